// Activations as 8-bit integers and one scale a block: q = round(x * 127 / max|x|), d = max|x| / 127.
//
// A block with a NaN or an infinity gets d = NaN, so that NaN comes out; one below 2^-100 counts as zeros.
#pragma once
#include <cmath>
#include <limits>

#include "simd.h"
#include "formats.h"

namespace speck::SPECK_ISA {

// Writes n (a multiple of 32) integers and returns their scale.
SPECK_INLINE float quantize(const float* x, int n, int8_t* q) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256i largest = _mm256_setzero_si256();  // compared as integers, where NaN is above infinity
    for (int i = 0; i < n; i += 8)
        largest = _mm256_max_epi32(largest, _mm256_castps_si256(_mm256_and_ps(no_sign, _mm256_loadu_ps(x + i))));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    float most;
    const int32_t bits = _mm_cvtsi128_si32(m);
    memcpy(&most, &bits, 4);
    if (bits >= 0x7f800000 || most < 0x1p-100f) {
        memset(q, 0, n);
        return bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / most);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < n; i += 32) {
        __m256i v[4];
        for (int j = 0; j < 4; j++)
            v[j] = _mm256_cvtps_epi32(_mm256_mul_ps(inverse, _mm256_loadu_ps(x + i + 8 * j)));
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        _mm256_storeu_si256((__m256i*)(q + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
    return most / 127.0f;
}

inline void quantize(const float* x, Column32& y) {
    y.d = quantize(x, 32, y.q);
    y.sum = 0;
    for (int i = 0; i < 32; i++) y.sum += y.q[i];
    y.d_sum = y.d * (float)y.sum;
}

inline void quantize(const float* x, Column256& y) {
    y.d = quantize(x, 256, y.q);
    for (int g = 0; g < 16; g++) {
        int sum = 0;
        for (int i = 0; i < 16; i++) sum += y.q[16 * g + i];
        y.sum16[g] = (int16_t)sum;
    }
    for (int g = 0; g < 8; g++) y.sum32[g] = (int16_t)(y.sum16[2 * g] + y.sum16[2 * g + 1]);
}

inline void quantize(const float* x, ColumnFloat& y) { memcpy(y.q, x, sizeof y.q); }

// Blocks [first, last) of a column.
template <class Column> void quantize_blocks(const float* x, int first, int last, void* out) {
    constexpr int n = sizeof(Column::q) / sizeof(Column::q[0]);
    for (int b = first; b < last; b++) quantize(x + (size_t)n * b, ((Column*)out)[b]);
}

}  // namespace speck::SPECK_ISA
