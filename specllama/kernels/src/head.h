// The coarse copy of a draft's head, and which of its logits are high.
#pragma once
#include <algorithm>
#include <cmath>

#include "tile.h"

namespace speck::SPECK_ISA {

SPECK_INLINE float sum_of(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// L rows of `blocks` times 64 floats as `Coarse`; returns the sum of the squared errors.
inline double pack_coarse(const float* rows, int blocks, void* out) {
    auto* packed = (Coarse::Packed*)out;
    double lost = 0;
    for (int r = 0; r < L; r++)
        for (int b = 0; b < blocks; b++) {
            const float* w = rows + ((size_t)r * blocks + b) * Coarse::block;
            __m256 squares = _mm256_setzero_ps(), errors = squares;
            for (int i = 0; i < Coarse::block; i += 8)
                squares = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(w + i), squares);
            // Half of the step between the four values that has the least error for normal numbers.
            packed[b].d[r] = to_half(0.498f * std::sqrt(sum_of(squares) / Coarse::block));
            const float d = from_half(packed[b].d[r]);
            const __m256 inverse = _mm256_set1_ps(d > 0 ? 0.5f / d : 0.0f), two = _mm256_set1_ps(2.0f);
            alignas(32) int32_t q[8];  // of weights i, i + 8, ...
            uint32_t bits[4] = {};
            for (int i = 0; i < Coarse::block; i += 8) {
                const __m256 at = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), inverse, two);
                const __m256i v = _mm256_cvttps_epi32(_mm256_min_ps(_mm256_max_ps(at, _mm256_setzero_ps()), _mm256_set1_ps(3.0f)));
                const __m256 level = _mm256_fmsub_ps(two, _mm256_cvtepi32_ps(v), _mm256_set1_ps(3.0f));
                const __m256 error = _mm256_fnmadd_ps(_mm256_set1_ps(d), level, _mm256_loadu_ps(w + i));
                errors = _mm256_fmadd_ps(error, error, errors);
                _mm256_store_si256((__m256i*)q, v);
                for (int k = 0; k < 8; k++) bits[i / 16] |= (uint32_t)q[k] << (8 * (k % 4) + 2 * ((i % 16 + k) / 4));
            }
            for (int v = 0; v < 4; v++) packed[b].q[v].row[r] = bits[v];
            lost += sum_of(errors);
        }
    return lost;
}

// The highest of n numbers; NaN counts as none.
inline float highest(const float* x, int64_t n) {
    Float most = Simd::all(-INFINITY);
    int64_t i = 0;
    for (; i + L <= n; i += L) most = Simd::max(Simd::floats(x + i), most);
    float of_lane[L];
    Simd::store(of_lane, most);
    for (; i < n; i++) of_lane[0] = std::max(of_lane[0], x[i]);
    return *std::max_element(of_lane, of_lane + L);
}

// Writes the indices of the groups of L logits that have one of at least `least` to `high`; returns their number.
inline int high_groups(const float* x, int64_t n, float least, int* high) {
    int count = 0;
    for (int64_t i = 0; i < n; i += L) {
        const bool is_high = i + L <= n ? Simd::any_from(Simd::floats(x + i), least)
                                        : std::any_of(x + i, x + n, [&](float each) { return each >= least; });
        if (is_high) high[count++] = (int)(i / L);
    }
    return count;
}

}  // namespace speck::SPECK_ISA
