// One block of weights as small integers: weight i is d * scale[i / group] * (q[i] - offset) - dmin * min[i / group].
#pragma once
#include "formats.h"

// All static: this is compiled once for each instruction set, and a linker would keep one copy for all of them.

namespace speck {

// `q` is in the order of the row; every type fills only the fields it has.
struct Unpacked {
    alignas(64) uint8_t q[256];
    int8_t scale[16];
    uint8_t min[16];
    half d, dmin;
};

static inline void unpack(const BlockQ4_0& b, Unpacked& u) {
    u.d = b.d;
    for (int i = 0; i < 16; i++) u.q[i] = b.qs[i] & 15, u.q[i + 16] = b.qs[i] >> 4;
}

static inline void unpack(const BlockQ4_1& b, Unpacked& u) {
    u.d = b.d;
    u.dmin = b.m;
    for (int i = 0; i < 16; i++) u.q[i] = b.qs[i] & 15, u.q[i + 16] = b.qs[i] >> 4;
}

static inline void unpack_q5(const uint8_t* qs, const uint8_t* qh, Unpacked& u) {
    for (int i = 0; i < 16; i++) {
        u.q[i] = (qs[i] & 15) | (qh[i / 8] >> (i % 8) & 1) << 4;
        u.q[i + 16] = qs[i] >> 4 | (qh[2 + i / 8] >> (i % 8) & 1) << 4;
    }
}

static inline void unpack(const BlockQ5_0& b, Unpacked& u) {
    u.d = b.d;
    unpack_q5(b.qs, b.qh, u);
}

static inline void unpack(const BlockQ5_1& b, Unpacked& u) {
    u.d = b.d;
    u.dmin = b.m;
    unpack_q5(b.qs, b.qh, u);
}

static inline void unpack(const BlockQ8_0& b, Unpacked& u) {  // offset 128
    u.d = b.d;
    for (int i = 0; i < 32; i++) u.q[i] = (uint8_t)(b.qs[i] + 128);
}

static inline void unpack(const BlockIQ4_NL& b, Unpacked& u) {  // q is the index of the value
    u.d = b.d;
    for (int i = 0; i < 16; i++) u.q[i] = b.qs[i] & 15, u.q[i + 16] = b.qs[i] >> 4;
}

static inline void unpack(const BlockQ2_K& b, Unpacked& u) {
    u.d = b.d;
    u.dmin = b.dmin;
    for (int i = 0; i < 16; i++) u.scale[i] = b.scales[i] & 15, u.min[i] = b.scales[i] >> 4;
    for (int h = 0; h < 2; h++)
        for (int g = 0; g < 4; g++)
            for (int i = 0; i < 32; i++) u.q[128 * h + 32 * g + i] = b.qs[32 * h + i] >> (2 * g) & 3;
}

static inline void unpack(const BlockQ3_K& b, Unpacked& u) {  // offset 4
    u.d = b.d;
    unpack_q3_scales(b.scales, u.scale);
    for (int h = 0; h < 2; h++)
        for (int g = 0; g < 4; g++)
            for (int i = 0; i < 32; i++)
                u.q[128 * h + 32 * g + i] = (b.qs[32 * h + i] >> (2 * g) & 3) | (b.hmask[i] >> (4 * h + g) & 1) << 2;
}

static inline void unpack(const BlockQ4_K& b, Unpacked& u) {
    u.d = b.d;
    u.dmin = b.dmin;
    unpack_6bit(b.scales, (uint8_t*)u.scale, u.min);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) u.q[64 * j + i] = b.qs[32 * j + i] & 15, u.q[64 * j + 32 + i] = b.qs[32 * j + i] >> 4;
}

static inline void unpack(const BlockQ5_K& b, Unpacked& u) {
    u.d = b.d;
    u.dmin = b.dmin;
    unpack_6bit(b.scales, (uint8_t*)u.scale, u.min);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            u.q[64 * j + i] = (b.qs[32 * j + i] & 15) | (b.qh[i] >> (2 * j) & 1) << 4;
            u.q[64 * j + 32 + i] = b.qs[32 * j + i] >> 4 | (b.qh[i] >> (2 * j + 1) & 1) << 4;
        }
}

static inline void unpack(const BlockQ6_K& b, Unpacked& u) {  // offset 32
    u.d = b.d;
    for (int i = 0; i < 16; i++) u.scale[i] = b.scales[i];
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 32; i++) {
            const uint8_t first = b.ql[64 * h + i], second = b.ql[64 * h + 32 + i], high = b.qh[32 * h + i];
            u.q[128 * h + i] = (first & 15) | (high & 3) << 4;
            u.q[128 * h + 32 + i] = (second & 15) | (high >> 2 & 3) << 4;
            u.q[128 * h + 64 + i] = first >> 4 | (high >> 4 & 3) << 4;
            u.q[128 * h + 96 + i] = second >> 4 | (high >> 6) << 4;
        }
}

static inline void unpack(const BlockIQ4_XS& b, Unpacked& u) {  // q is the index of the value
    u.d = b.d;
    for (int g = 0; g < 8; g++) {
        u.scale[g] = (int8_t)(((b.scales_l[g / 2] >> (4 * (g % 2)) & 15) | (b.scales_h >> (2 * g) & 3) << 4) - 32);
        for (int i = 0; i < 16; i++) {
            u.q[32 * g + i] = b.qs[16 * g + i] & 15;
            u.q[32 * g + 16 + i] = b.qs[16 * g + i] >> 4;
        }
    }
}

}  // namespace speck
