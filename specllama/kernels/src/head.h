// The coarse copy of a draft's head, and which of its logits are high.
#pragma once
#include <algorithm>
#include <cmath>

#include "tile.h"

namespace speck::SPECK_ISA {

// Rows of `blocks` times 64 floats, side by side in `rows`, as `Coarse`; returns the sum of the squared errors.
inline double pack_coarse(const float* rows, int blocks, void* out) {
    auto* packed = (Coarse::Packed*)out;
    double lost = 0;
    for (int r = 0; r < L; r++)
        for (int b = 0; b < blocks; b++) {
            const float* w = rows + ((size_t)r * blocks + b) * Coarse::block;
            float squares[16] = {}, errors[16] = {};  // sums side by side, so that compilers use vectors
            for (int i = 0; i < Coarse::block; i++) squares[i % 16] += w[i] * w[i];
            float square = 0;
            for (float each : squares) square += each;
            // Half of the step between the four values that has the least error for normal numbers.
            packed[b].d[r] = to_half(0.498f * std::sqrt(square / Coarse::block));
            const float d = from_half(packed[b].d[r]), inverse = d > 0 ? 0.5f / d : 0.0f;
            uint8_t q[Coarse::block];
            for (int i = 0; i < Coarse::block; i++) {
                const float at = std::fmin(std::fmax(w[i] * inverse + 2.0f, 0.0f), 3.0f);
                q[i] = (uint8_t)(int)at;
                const float error = w[i] - d * (float)(2 * (int)at - 3);
                errors[i % 16] += error * error;
            }
            for (float each : errors) lost += each;
            for (int v = 0; v < 4; v++) {
                uint32_t bits = 0;
                for (int i = 0; i < 4; i++) bits |= word(q + 16 * v + 4 * i) << 2 * i;
                packed[b].q[v].row[r] = bits;
            }
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
