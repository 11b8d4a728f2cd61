// The products of packed weights with columns of activations, for the instruction set of simd.h.
//
// Packed, a block holds the same numbers for `Simd::rows` rows side by side: vector t of a plane has the weights
// 4t..4t+3 of every row. One order of additions, whatever the width: integers within a group of weights (exact), then
// one float operation a group in the order of k, then one a superblock. A number of the output therefore depends on
// its own row and column only.
#pragma once
#include <type_traits>
#include <utility>

#include "simd.h"
#include "unpack.h"

namespace speck::SPECK_ISA {

constexpr int L = Simd::rows;
using Int = Simd::Int;
using Float = Simd::Float;

// Calls f with the constants 0..n-1, so that shifts and planes are known to the compiler.
template <class F, int... i> SPECK_INLINE void each(F&& f, std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>{}), ...);
}
template <int n, class F> SPECK_INLINE void each(F&& f) { each(f, std::make_integer_sequence<int, n>{}); }

// Four weights of a row, as one number.
inline uint32_t word(const uint8_t* q) {
    uint32_t w;
    memcpy(&w, q, 4);
    return w;
}

struct Vector {
    uint32_t row[L];
    SPECK_INLINE Int get(const Vector& v) { return Simd::load((const uint8_t*)v.row); }
};

// Planes of a superblock of 256: four bits, two bits or one bit of each weight.
struct Plane4 {
    Vector v[4][8];
    void put(int r, const uint8_t* q, int shift = 0) {
        for (int j = 0; j < 4; j++)
            for (int t = 0; t < 8; t++)
                v[j][t].row[r] = (word(q + 64 * j + 4 * t) >> shift & 0x0f0f0f0f) |
                                 (word(q + 64 * j + 32 + 4 * t) >> shift & 0x0f0f0f0f) << 4;
    }
    template <int e> SPECK_INLINE Int get(const Plane4& p) {  // e: first weight
        const Int v = Vector::get(p.v[e / 64][e % 32 / 4]);
        if constexpr (e / 32 % 2) return Simd::high(v);
        return Simd::low(v);
    }
};
struct Plane2 {
    Vector v[2][8];
    void put(int r, const uint8_t* q, int shift) {
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < 8; t++) {
                uint32_t w = 0;
                for (int g = 0; g < 4; g++) w |= (word(q + 128 * h + 32 * g + 4 * t) >> shift & 0x03030303) << 2 * g;
                v[h][t].row[r] = w;
            }
    }
    template <int e, int to> SPECK_INLINE Int get(const Plane2& p) {
        return Simd::bits<2 * (e / 32 % 4), 2, to>(Vector::get(p.v[e / 128][e % 32 / 4]));
    }
};
struct Plane1 {
    Vector v[8];
    void put(int r, const uint8_t* q, int shift) {
        for (int t = 0; t < 8; t++) {
            uint32_t w = 0;
            for (int g = 0; g < 8; g++) w |= (word(q + 32 * g + 4 * t) >> shift & 0x01010101) << g;
            v[t].row[r] = w;
        }
    }
    template <int e, int to> SPECK_INLINE Int get(const Plane1& p) {
        return Simd::bits<e / 32, 1, to>(Vector::get(p.v[e % 32 / 4]));
    }
};

// Minimums of `n` groups, in pairs: those of groups 2i and 2i+1 of a row lie side by side.
template <int n> struct Minimums {
    uint8_t pair[n / 2][L][2];
    void put(int r, const uint8_t* min) {
        for (int g = 0; g < n; g++) pair[g / 2][r][g % 2] = min[g];
    }
};

// ---- types with superblocks of 256 weights; weight = d * scale * (q - offset) - dmin * min

template <int group_> struct Super {
    using Column = Column256;
    static constexpr int block = 256, group = group_, groups = 256 / group_, offset = 0, room = group_ / 4;
    static constexpr bool is_signed = false, has_min = false;
};

struct Q4_K : Super<32> {
    using File = BlockQ4_K;
    static constexpr bool has_min = true;
    struct Packed {
        Plane4 q;
        uint8_t scale[8][L];
        Minimums<8> min;
        half d[L], dmin[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q);
        p.min.put(r, u.min);
        p.dmin[r] = u.dmin;
    }
    template <int e> SPECK_INLINE Int quad(const Packed& p) { return Plane4::get<e>(p.q); }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

struct Q5_K : Super<32> {
    using File = BlockQ5_K;
    static constexpr bool has_min = true;
    static constexpr int room = 4;
    struct Packed {
        Plane4 q;
        Plane1 high;
        uint8_t scale[8][L];
        Minimums<8> min;
        half d[L], dmin[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q);
        p.high.put(r, u.q, 4);
        p.min.put(r, u.min);
        p.dmin[r] = u.dmin;
    }
    template <int e> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::either(Plane4::get<e>(p.q), Plane1::get<e, 4>(p.high));
    }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

struct Q2_K : Super<16> {
    using File = BlockQ2_K;
    static constexpr bool has_min = true;
    struct Packed {
        Plane2 q;
        uint8_t scale[16][L];
        Minimums<16> min;
        half d[L], dmin[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q, 0);
        p.min.put(r, u.min);
        p.dmin[r] = u.dmin;
    }
    template <int e> SPECK_INLINE Int quad(const Packed& p) { return Plane2::get<e, 0>(p.q); }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

struct Q3_K : Super<16> {
    using File = BlockQ3_K;
    static constexpr int offset = 4;
    struct Packed {
        Plane2 q;
        Plane1 high;
        int8_t scale[16][L];
        half d[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q, 0);
        p.high.put(r, u.q, 2);
    }
    template <int e> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::either(Plane2::get<e, 0>(p.q), Plane1::get<e, 2>(p.high));
    }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

struct Q6_K : Super<16> {
    using File = BlockQ6_K;
    static constexpr int offset = 32, room = 2;
    struct Packed {
        Plane4 q;
        Plane2 high;
        int8_t scale[16][L];
        half d[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q);
        p.high.put(r, u.q, 4);
    }
    template <int e> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::either(Plane4::get<e>(p.q), Plane2::get<e, 4>(p.high));
    }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

// The values of IQ4_NL and IQ4_XS, with 128 added where weights are stored so.
alignas(16) constexpr int8_t iq4_stored[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15},
};
constexpr int signed_offset = Simd::biased ? 128 : 0;

struct IQ4_XS : Super<32> {
    using File = BlockIQ4_XS;
    static constexpr int offset = signed_offset, room = 1;
    static constexpr bool is_signed = true;
    struct Packed {
        Plane4 q;
        int8_t scale[8][L];
        half d[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) { p.q.put(r, u.q); }
    template <int e> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::look_up(iq4_stored[Simd::biased], Plane4::get<e>(p.q));
    }
    SPECK_INLINE Int scale(const Packed& p, int g) { return Simd::widened(p.scale[g]); }
};

// ---- types with blocks of 32 weights; weight = d * (q - offset) + min

struct Small {
    using Column = Column32;
    static constexpr int block = 32, offset = 0, room = 8;
    static constexpr bool is_signed = false, has_min = false;
};

struct Nibbles {  // weight i and i + 16 share a byte
    Vector v[4];
    void put(int r, const uint8_t* q) {
        for (int t = 0; t < 4; t++)
            v[t].row[r] = (word(q + 4 * t) & 0x0f0f0f0f) | (word(q + 16 + 4 * t) & 0x0f0f0f0f) << 4;
    }
    template <int t> SPECK_INLINE Int get(const Nibbles& n) {
        const Int v = Vector::get(n.v[t % 4]);
        if constexpr (t / 4) return Simd::high(v);
        return Simd::low(v);
    }
};
struct HighBits {  // bit t of a byte belongs to the weights 4t..4t+3
    Vector v;
    void put(int r, const uint8_t* q) {
        uint32_t w = 0;
        for (int t = 0; t < 8; t++) w |= (word(q + 4 * t) >> 4 & 0x01010101) << t;
        v.row[r] = w;
    }
    template <int t> SPECK_INLINE Int get(const HighBits& h) { return Simd::bits<t, 1, 4>(Vector::get(h.v)); }
};

template <class File_, int offset_> struct FourBits : Small {
    using File = File_;
    static constexpr int offset = offset_;
    static constexpr bool has_min = offset_ == 0;
    struct Packed {
        Nibbles q;
        half d[has_min ? 2 * L : L];  // then the minimums
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q);
        if constexpr (has_min) p.d[L + r] = u.dmin;
    }
    template <int t> SPECK_INLINE Int quad(const Packed& p) { return Nibbles::get<t>(p.q); }
};
using Q4_0 = FourBits<BlockQ4_0, 8>;
using Q4_1 = FourBits<BlockQ4_1, 0>;

template <class File_, int offset_> struct FiveBits : Small {
    using File = File_;
    static constexpr int offset = offset_, room = 4;
    static constexpr bool has_min = offset_ == 0;
    struct Packed {
        Nibbles q;
        HighBits high;
        half d[has_min ? 2 * L : L];  // then the minimums
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        p.q.put(r, u.q);
        p.high.put(r, u.q);
        if constexpr (has_min) p.d[L + r] = u.dmin;
    }
    template <int t> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::either(Nibbles::get<t>(p.q), HighBits::get<t>(p.high));
    }
};
using Q5_0 = FiveBits<BlockQ5_0, 16>;
using Q5_1 = FiveBits<BlockQ5_1, 0>;

struct Q8_0 : Small {
    using File = BlockQ8_0;
    static constexpr int offset = signed_offset, room = 1;
    static constexpr bool is_signed = true;
    struct Packed {
        Vector q[8];
        half d[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) {
        for (int t = 0; t < 8; t++) p.q[t].row[r] = word(u.q + 4 * t) ^ (Simd::biased ? 0 : 0x80808080u);
    }
    template <int t> SPECK_INLINE Int quad(const Packed& p) { return Vector::get(p.q[t]); }
};

struct IQ4_NL : Small {
    using File = BlockIQ4_NL;
    static constexpr int offset = signed_offset, room = 1;
    static constexpr bool is_signed = true;
    struct Packed {
        Nibbles q;
        half d[L];
    };
    static void put(Packed& p, int r, const Unpacked& u) { p.q.put(r, u.q); }
    template <int t> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::look_up(iq4_stored[Simd::biased], Nibbles::get<t>(p.q));
    }
};

// ---- the coarse copy of a head: 64 weights of two bits with one scale, weight = d * (2q - 3)

struct Coarse {
    using Column = Column32;
    static constexpr int block = 64, offset = 3, room = 8;
    static constexpr bool is_signed = false;
    struct Packed {
        Vector q[4];  // of each byte of vector v, bits 2i and 2i + 1 belong to the weights 16v + 4i..16v + 4i + 3
        half d[L];
    };
    template <int t> SPECK_INLINE Int quad(const Packed& p) {
        return Simd::bits<2 * (t % 4), 2, 1>(Vector::get(p.q[t / 4]));
    }
};

// ---- floating-point weights, 32 at once

template <class File_, class Weight, Float (*widen)(const Weight*)> struct Floating {
    using File = File_;
    using Column = ColumnFloat;
    static constexpr int block = 32;
    struct Packed { Weight w[32][L]; };
    SPECK_INLINE Float get(const Packed& p, int k) { return widen(p.w[k]); }
};
using F32 = Floating<BlockF32, float, Simd::floats>;
using F16 = Floating<BlockF16, half, Simd::halfs>;
using BF16 = Floating<BlockBF16, uint16_t, Simd::upper_halfs>;

// Step i of n asks for its share of the memory behind a block. Reading then goes on while the core multiplies; asked for
// at once, the lines wait for each other. The hardware's own prefetcher stops at each page. Compilers put intrinsics
// side by side, so this is an instruction that they leave where it is.
template <int i, int n, class Packed> SPECK_INLINE void read_ahead(const Packed& block) {
    constexpr int lines = (sizeof(Packed) + 63) / 64, distance = 4096;
    each<(i + 1) * lines / n - i * lines / n>([&](auto line) __attribute__((always_inline)) {
        __asm__ volatile("prefetcht0 %0" ::"m"(((const char*)&block)[distance + 64 * (i * lines / n + line)]));
    });
}

template <class T, int N> SPECK_INLINE void floating_block(const typename T::Packed& x, const ColumnFloat* y, size_t stride,
                                                           Float (&acc)[N]) {
    Float part[N];
    for (int c = 0; c < N; c++) part[c] = Simd::zero_float();
    each<32>([&](auto k) __attribute__((always_inline)) {
        read_ahead<k, 32>(x);
        const Float w = T::get(x, k);
        for (int c = 0; c < N; c++) part[c] = Simd::fma(w, Simd::all(y[c * stride].q[k]), part[c]);
    });
    for (int c = 0; c < N; c++) acc[c] = Simd::add(acc[c], part[c]);
}

// ---- one tile: L rows, N columns

// The sums of each 32 or 16 activations, as the groups of T have them.
template <class T> SPECK_INLINE const int16_t* sums_of(const Column256& y) { return T::group == 32 ? y.sum32 : y.sum16; }

// S is Simd: a parameter, so that only the instruction sets that have its operations compile the first branch.
template <class T, int N, class S = Simd>
SPECK_INLINE void superblock(const typename T::Packed& x, const Column256* y, size_t stride, Float (&acc)[N]) {
    Float sum[N];
    if constexpr (S::scales_integers) {
        Simd::Sum all[N];
        for (int c = 0; c < N; c++) all[c] = Simd::start(0);
        each<T::groups>([&](auto g) __attribute__((always_inline)) {
            const Int scale = S::pair(T::scale(x, g), T::scale(x, g));
            each<T::group / 4>([&](auto t) __attribute__((always_inline)) {
                read_ahead<g * T::group / 4 + t, T::block / 4>(x);
                const Int w = T::template quad<g * T::group + 4 * t>(x);
                for (int c = 0; c < N; c++)
                    Simd::add<T::room, T::is_signed, t>(all[c], w, y[c * stride].q + g * T::group + 4 * t, scale);
            });
        });
        each<T::offset ? T::groups / 2 : 0>([&](auto i) __attribute__((always_inline)) {
            const Int offsets = S::times(S::pair(T::scale(x, 2 * i), T::scale(x, 2 * i + 1)), -T::offset);
            for (int c = 0; c < N; c++) all[c].v = Simd::add_pairs(all[c].v, offsets, sums_of<T>(y[c * stride]) + 2 * i);
        });
        for (int c = 0; c < N; c++) sum[c] = Simd::total(all[c]);
    } else {
        for (int c = 0; c < N; c++) sum[c] = Simd::zero_float();
        each<T::groups>([&](auto g) __attribute__((always_inline)) {
            Simd::Sum part[N];
            for (int c = 0; c < N; c++)
                part[c] = Simd::start(T::offset ? -T::offset * sums_of<T>(y[c * stride])[g] : 0);
            each<T::group / 4>([&](auto t) __attribute__((always_inline)) {
                read_ahead<g * T::group / 4 + t, T::block / 4>(x);
                const Int w = T::template quad<g * T::group + 4 * t>(x);
                for (int c = 0; c < N; c++)
                    Simd::add<T::room, T::is_signed, t>(part[c], w, y[c * stride].q + g * T::group + 4 * t);
            });
            const Float scale = Simd::to_float(T::scale(x, g));
            for (int c = 0; c < N; c++) sum[c] = Simd::fma(Simd::total(part[c]), scale, sum[c]);
        });
    }
    const Float d = Simd::halfs(x.d);
    if constexpr (T::has_min) {
        Int low[N];
        for (int c = 0; c < N; c++) low[c] = Simd::zero();
        each<T::groups / 2>([&](auto i) __attribute__((always_inline)) {
            const Int pair = Simd::pairs(&x.min.pair[i][0][0]);
            for (int c = 0; c < N; c++) low[c] = Simd::add_pairs(low[c], pair, sums_of<T>(y[c * stride]) + 2 * i);
        });
        const Float dmin = Simd::halfs(x.dmin);
        for (int c = 0; c < N; c++)
            sum[c] = Simd::fms(d, sum[c], Simd::mul(dmin, Simd::to_float(low[c])));
    } else {
        for (int c = 0; c < N; c++) sum[c] = Simd::mul(d, sum[c]);
    }
    for (int c = 0; c < N; c++) acc[c] = Simd::fma(Simd::all(y[c * stride].d), sum[c], acc[c]);
}

template <class T, int N> SPECK_INLINE void small_block(const typename T::Packed& x, const Column32* y, size_t stride,
                                                        Float (&acc)[N]) {
    Simd::Sum part[N];
    for (int c = 0; c < N; c++) part[c] = Simd::start(-T::offset * y[c * stride].sum);
    each<8>([&](auto t) __attribute__((always_inline)) {
        read_ahead<t, 8>(x);
        const Int w = T::template quad<t>(x);
        for (int c = 0; c < N; c++) Simd::add<T::room, T::is_signed, t>(part[c], w, y[c * stride].q + 4 * t);
    });
    const Float d = Simd::halfs(x.d);
    for (int c = 0; c < N; c++)
        acc[c] = Simd::fma(Simd::total(part[c]), Simd::mul(d, Simd::all(y[c * stride].d)), acc[c]);
    if constexpr (T::has_min) {
        const Float min = Simd::halfs(x.d + L);
        for (int c = 0; c < N; c++) acc[c] = Simd::fma(min, Simd::all(y[c * stride].d_sum), acc[c]);
    }
}

template <int N>
SPECK_INLINE void coarse_block(const Coarse::Packed& x, const Column32* y, size_t stride, Float (&acc)[N]) {
    const Float d = Simd::halfs(x.d);
    each<2>([&](auto half) __attribute__((always_inline)) {
        Simd::Sum part[N];
        for (int c = 0; c < N; c++) part[c] = Simd::start(-Coarse::offset * y[c * stride + half].sum);
        each<8>([&](auto t) __attribute__((always_inline)) {
            read_ahead<8 * half + t, 16>(x);
            const Int w = Coarse::quad<8 * half + t>(x);
            for (int c = 0; c < N; c++) Simd::add<Coarse::room, false, t>(part[c], w, y[c * stride + half].q + 4 * t);
        });
        for (int c = 0; c < N; c++)
            acc[c] = Simd::fma(Simd::total(part[c]), Simd::mul(d, Simd::all(y[c * stride + half].d)), acc[c]);
    });
}

// x: the blocks of L rows; y: the first of N columns, `stride` blocks apart; out: L numbers a column.
template <class T, int N>
void tile(const typename T::Packed* x, int blocks, const typename T::Column* y, size_t stride, float* out,
          size_t out_stride) {
    Float acc[N];
    for (int c = 0; c < N; c++) acc[c] = Simd::zero_float();
    for (int b = 0; b < blocks; b++) {
        if constexpr (std::is_same_v<typename T::Column, ColumnFloat>) floating_block<T, N>(x[b], y + b, stride, acc);
        else if constexpr (T::block == 256) superblock<T, N>(x[b], y + b, stride, acc);
        else if constexpr (T::block == 64) coarse_block<N>(x[b], y + 2 * b, stride, acc);
        else small_block<T, N>(x[b], y + b, stride, acc);
    }
    for (int c = 0; c < N; c++) Simd::store(out + c * out_stride, acc[c]);
}

// Any number of columns, in tiles of similar width.
template <class T>
void tiles(const void* x, int blocks, int columns, const void* y, size_t stride, float* out, size_t out_stride) {
    const auto* weights = (const typename T::Packed*)x;
    const auto* column = (const typename T::Column*)y;
    while (columns > 0) {
        int n = columns >= 2 * Simd::tile ? Simd::tile : columns > Simd::tile ? (columns + 1) / 2 : columns;
        // Widths 9 and 11 are left out: they would take their share of the compiler's time for little.
        if (n == 9 || n == 11) n = (n + 1) / 2;
#ifdef SPECK_TWO_WIDTHS  // the others repeat them; sanitizers make compilers slow
        n = n < 2 ? n : 2;
#endif
        const auto multiply = [&](auto width) __attribute__((always_inline)) {
#ifdef SPECK_TWO_WIDTHS
            if constexpr (width > 2) return;
            else
#endif
            if constexpr (width <= Simd::tile) tile<T, width>(weights, blocks, column, stride, out, out_stride);
        };
        switch (n) {
            case 1: multiply(std::integral_constant<int, 1>{}); break;
            case 2: multiply(std::integral_constant<int, 2>{}); break;
            case 3: multiply(std::integral_constant<int, 3>{}); break;
            case 4: multiply(std::integral_constant<int, 4>{}); break;
            case 5: multiply(std::integral_constant<int, 5>{}); break;
            case 6: multiply(std::integral_constant<int, 6>{}); break;
            case 7: multiply(std::integral_constant<int, 7>{}); break;
            case 8: multiply(std::integral_constant<int, 8>{}); break;
            case 10: multiply(std::integral_constant<int, 10>{}); break;
            default: multiply(std::integral_constant<int, 12>{});
        }
        columns -= n;
        column += n * stride;
        out += n * out_stride;
    }
}

template <class T> void pack(const void* file_rows, size_t row_bytes, int blocks, void* out) {
    auto* packed = (typename T::Packed*)out;
    for (int b = 0; b < blocks; b++)
        for (int r = 0; r < L; r++) {
            typename T::File block;  // a file may have any alignment
            memcpy(&block, (const char*)file_rows + r * row_bytes + b * sizeof block, sizeof block);
            if constexpr (std::is_same_v<typename T::Column, ColumnFloat>) {
                for (int k = 0; k < 32; k++) packed[b].w[k][r] = block.w[k];
            } else {
                Unpacked u;
                unpack(block, u);
                T::put(packed[b], r, u);
                packed[b].d[r] = u.d;
                if constexpr (T::block == 256)
                    for (int g = 0; g < T::groups; g++) packed[b].scale[g][r] = u.scale[g];
            }
        }
}

}  // namespace speck::SPECK_ISA
