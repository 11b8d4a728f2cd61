// Weight blocks as GGUF files store them, and the columns they are multiplied with.
//
// The layouts of the file are those of the GGUF specification (ggml-common.h of llama.cpp). `half` is IEEE binary16.
#pragma once
#include <cstdint>

namespace speck {

using half = uint16_t;

struct BlockF32 { float w[32]; };
struct BlockF16 { half w[32]; };
struct BlockBF16 { uint16_t w[32]; };  // the upper halves of binary32
struct BlockQ4_0 { half d; uint8_t qs[16]; };
struct BlockQ4_1 { half d, m; uint8_t qs[16]; };
struct BlockQ5_0 { half d; uint8_t qh[4]; uint8_t qs[16]; };
struct BlockQ5_1 { half d, m; uint8_t qh[4]; uint8_t qs[16]; };
struct BlockQ8_0 { half d; int8_t qs[32]; };
struct BlockIQ4_NL { half d; uint8_t qs[16]; };
struct BlockQ2_K { uint8_t scales[16]; uint8_t qs[64]; half d, dmin; };
struct BlockQ3_K { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; half d; };
struct BlockQ4_K { half d, dmin; uint8_t scales[12]; uint8_t qs[128]; };
struct BlockQ5_K { half d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; };
struct BlockQ6_K { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; half d; };
struct BlockIQ4_XS { half d; uint16_t scales_h; uint8_t scales_l[4]; uint8_t qs[128]; };

// The 16 values of the types IQ4_NL and IQ4_XS.
constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 32 activations as they are, for floating-point weights.
struct ColumnFloat { float q[32]; };

// 32 activations: d * q[i]. Used for the types with blocks of 32 weights.
struct Column32 {
    int8_t q[32];
    int32_t sum;  // of q
    float d;
    float d_sum;  // d * sum
};

// 256 activations: d * q[i]. Used for the types with superblocks of 256 weights.
struct Column256 {
    int8_t q[256];
    int16_t sum32[8];   // of each 32 of q
    int16_t sum16[16];  // of each 16 of q
    float d;
};

// The scales and minimums of Q4_K and Q5_K: eight of six bits each in twelve bytes.
static inline void unpack_6bit(const uint8_t* packed, uint8_t* scales, uint8_t* mins) {
    for (int j = 0; j < 4; j++) {
        scales[j] = packed[j] & 63;
        mins[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6 << 4);
        mins[j + 4] = (packed[j + 8] >> 4) | (packed[j + 4] >> 6 << 4);
    }
}

// The scales of Q3_K: sixteen of six bits in twelve bytes, stored with 32 added.
static inline void unpack_q3_scales(const uint8_t* packed, int8_t* scales) {
    for (int j = 0; j < 16; j++) {
        const int low = j < 8 ? packed[j] & 15 : packed[j - 8] >> 4;
        const int high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
        scales[j] = (int8_t)((low | high << 4) - 32);
    }
}

}  // namespace speck
