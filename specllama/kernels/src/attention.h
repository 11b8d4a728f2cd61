// Attention over a cache of binary16. The result of a row does not depend on the other rows.
//
// Positions are taken in blocks of 32 and chunks of 256, counted from the start of the cache. Within a chunk the
// softmax runs over its blocks in order, from nothing; the chunks are then joined in order. Threads may share out the
// chunks of few rows, or take whole rows: the numbers are the same. Masked positions are left out, not multiplied by
// zero, so the padding of the cache does not count. Where a row sees no position between two that it sees, as in a branch
// of a tree, those behind the gap are counted on from it: the row has the numbers that it has after its path alone.
#pragma once
#include <cmath>
#include <initializer_list>
#include <limits>

#include "path.h"
#include "simd.h"

namespace speck::SPECK_ISA {

constexpr int attention_block = 32;
constexpr uint16_t hidden_half = 0xfc00;  // -infinity

#if defined(__AVX512F__)
struct Wide {
    static constexpr int n = 16;
    using V = __m512;
    SPECK_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
    SPECK_INLINE V halfs(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    SPECK_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
    SPECK_INLINE V all(float v) { return _mm512_set1_ps(v); }
    SPECK_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    SPECK_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    SPECK_INLINE __m256 folded(V v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1))); }
};
#else
struct Wide {
    static constexpr int n = 8;
    using V = __m256;
    SPECK_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
    SPECK_INLINE V halfs(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    SPECK_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
    SPECK_INLINE V all(float v) { return _mm256_set1_ps(v); }
    SPECK_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    SPECK_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    SPECK_INLINE __m256 folded(V v) { return v; }
};
#endif

// exp(x) for x <= 0 (0 below -87), to about one unit in the last place: 2^n times a polynomial in the rest.
SPECK_INLINE __m256 exp_negative(__m256 x) {
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 e = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), e);  // NaN stays
}

SPECK_INLINE float horizontal_max(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

SPECK_INLINE float horizontal_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// The sums of eight vectors.
SPECK_INLINE __m256 sums(const __m256* v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// For 32 positions, a bit pair for each that a row does not see.
struct Hidden {
    int low, high;
    explicit Hidden(const uint16_t* mask) {
        const __m256i hidden = _mm256_set1_epi16((short)hidden_half);
        low = _mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)mask), hidden));
        high = _mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)(mask + 16)), hidden));
    }
    bool all() const { return (low & high) == -1; }
    bool none() const { return (low | high) == 0; }
};

// The first position that a row does not see between two that it sees; no_gap if there is none.
inline int first_gap(const uint16_t* mask, int positions) {
    int at = 0;
    const auto pass = [&](bool visible) {
        const auto whole = [&] {
            const Hidden hidden(mask + at);
            return visible ? hidden.none() : hidden.all();
        };
        while (at + attention_block <= positions && whole()) at += attention_block;
        while (at < positions && (mask[at] != hidden_half) == visible) at++;
    };
    pass(false);
    pass(true);
    const int gap = at;
    pass(false);
    return at < positions ? gap : no_gap;
}

// Where the 32 positions from `at` on of a row with a gap lie in the cache; returns how many there are.
inline int places(const uint16_t* mask, int gap, int positions, int at, int* place) {
    int n = 0, before = at > gap ? at - gap : 0;
    for (; n < attention_block && at + n < gap; n++) place[n] = at + n;
    for (int j = gap; j < positions && n < attention_block; j++)
        if (mask[j] != hidden_half && before-- <= 0) place[n++] = j;
    return n;
}

// `place`: which of the numbers from `from` on; null: the first `count`.
inline void widen(const char* from, size_t stride, const int* place, int count, int n, float* to) {
    for (int j = 0; j < count; j++) {
        const auto* one = (const uint16_t*)(from + (place ? place[j] : j) * stride);
        for (int d = 0; d < n; d += Wide::n) Wide::store(to + j * n + d, Wide::halfs(one + d));
    }
}

// One block of 32 positions for one row of one head. `k` and `v` are widened; `count` positions are in the cache.
inline void attend_block(const Attention& a, const float* q, const float* k, const float* v, int count,
                         const uint16_t* mask, float* state) {
    float p[attention_block];
    for (int j = 0; j < attention_block; j += 8) {
        typename Wide::V sum[8];
        for (int i = 0; i < 8; i++) sum[i] = Wide::all(0.0f);
        for (int d = 0; d < a.k_size; d += Wide::n) {
            const auto part = Wide::load(q + d);
            for (int i = 0; i < 8; i++) sum[i] = Wide::fma(part, Wide::load(k + (j + i) * a.k_size + d), sum[i]);
        }
        __m256 folded[8];
        for (int i = 0; i < 8; i++) folded[i] = Wide::folded(sum[i]);
        __m256 s = _mm256_mul_ps(sums(folded), _mm256_set1_ps(a.scale));
        if (a.softcap != 0.0f) {
            float each[8];
            _mm256_storeu_ps(each, s);
            for (float& x : each) x = a.softcap * std::tanh(x);
            s = _mm256_loadu_ps(each);
        }
        if (mask) {  // a hidden position may hold anything, also NaN
            const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(mask + j)));
            const __m256 hidden = _mm256_set1_ps(-INFINITY);
            s = _mm256_blendv_ps(_mm256_add_ps(s, m), hidden, _mm256_cmp_ps(m, hidden, _CMP_EQ_OQ));
        }
        _mm256_storeu_ps(p + j, s);
    }
    for (int j = count; j < attention_block; j++) p[j] = -INFINITY;

    float& largest = state[0];
    float& total = state[1];
    float* out = state + 2;
    __m256 most = _mm256_loadu_ps(p), strange = _mm256_cmp_ps(most, most, _CMP_UNORD_Q);
    for (int j = 8; j < attention_block; j += 8) {
        const __m256 s = _mm256_loadu_ps(p + j);
        most = _mm256_max_ps(most, s);
        strange = _mm256_or_ps(strange, _mm256_cmp_ps(s, s, _CMP_UNORD_Q));
    }
    if (_mm256_movemask_ps(strange)) {  // NaN in, NaN out
        largest = std::fmax(largest, 0.0f);
        total = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const float now = std::fmax(largest, horizontal_max(most));
    if (now == -INFINITY) return;
    __m256 sum = _mm256_setzero_ps();
    for (int j = 0; j < attention_block; j += 8) {
        const __m256 e = exp_negative(_mm256_sub_ps(_mm256_loadu_ps(p + j), _mm256_set1_ps(now)));
        _mm256_storeu_ps(p + j, e);
        sum = _mm256_add_ps(sum, e);
    }
    const float shrink = largest == -INFINITY ? 0.0f : _mm256_cvtss_f32(exp_negative(_mm256_set1_ps(largest - now)));
    total = std::fma(total, shrink, horizontal_sum(sum));
    largest = now;
    constexpr int vectors = 8;
    for (int d = 0; d < a.v_size; d += vectors * Wide::n) {
        const int here = (a.v_size - d) / Wide::n < vectors ? (a.v_size - d) / Wide::n : vectors;
        typename Wide::V acc[vectors];
        for (int i = 0; i < here; i++) acc[i] = Wide::mul(Wide::all(shrink), Wide::load(out + d + i * Wide::n));
        for (int j = 0; j < count; j++) {
            if (p[j] == 0.0f) continue;
            const auto weight = Wide::all(p[j]);
            for (int i = 0; i < here; i++) acc[i] = Wide::fma(weight, Wide::load(v + j * a.v_size + d + i * Wide::n), acc[i]);
        }
        for (int i = 0; i < here; i++) Wide::store(out + d + i * Wide::n, acc[i]);
    }
}

// The chunk's state (largest score, sum of exponentials, weighted sum of v) for rows [row, row + rows) of the query
// heads that share a head of the cache. `work`: see `Attention::work_floats`.
inline void attend_chunk(const Attention& a, int kv_head, int row, int rows, int chunk, float* states, float* work) {
    const int size = a.v_size + 2;
    for (int i = 0; i < rows * a.shared; i++) {
        states[i * size] = -INFINITY;
        memset(states + i * size + 1, 0, (size - 1) * sizeof(float));
    }
    float *k = work, *v = work + attention_block * a.k_size;
    const char *all_k = a.k + kv_head * a.k_head, *all_v = a.v + kv_head * a.v_head;
    const int end = a.positions < (chunk + 1) * attention_chunk ? a.positions : (chunk + 1) * attention_chunk;
    for (int at = chunk * attention_chunk; at < end; at += attention_block) {
        bool widened = false;
        for (int r = 0; r < rows; r++) {
            const auto* visible = a.mask ? (const uint16_t*)(a.mask + (row + r) * a.mask_row) : nullptr;
            const auto* mask = visible ? visible + at : nullptr;
            const bool broken = a.gaps && a.gaps[row + r] < at + attention_block;
            int count = end - at < attention_block ? end - at : attention_block, place[attention_block];
            if (broken) count = places(visible, a.gaps[row + r], a.positions, at, place);
            uint16_t own[attention_block];
            if (mask && (broken || count < attention_block)) {
                for (int j = 0; j < attention_block; j++) own[j] = j < count ? visible[broken ? place[j] : at + j] : hidden_half;
                mask = own;
            }
            if (mask && Hidden(mask).all()) continue;
            if (broken || !widened) {
                widen(broken ? all_k : all_k + at * a.k_position, a.k_position, broken ? place : nullptr, count, a.k_size, k);
                widen(broken ? all_v : all_v + at * a.v_position, a.v_position, broken ? place : nullptr, count, a.v_size, v);
                for (int j = count; j < attention_block; j++) memset(k + j * a.k_size, 0, a.k_size * sizeof(float));
                widened = !broken;
            }
            for (int h = 0; h < a.shared; h++)
                attend_block(a, (const float*)(a.q + (row + r) * a.q_row + (kv_head * a.shared + h) * a.q_head), k, v, count,
                             mask, states + (r * a.shared + h) * size);
        }
    }
}

// Adds the state of the next chunk to that of the chunks before it.
inline void join(int v_size, float* all, const float* next) {
    if (next[0] == -INFINITY) return;
    if (all[0] == -INFINITY) {
        memcpy(all, next, (v_size + 2) * sizeof(float));
        return;
    }
    const float now = std::fmax(all[0], next[0]);
    const float old_share = _mm256_cvtss_f32(exp_negative(_mm256_set1_ps(all[0] - now)));
    const float new_share = _mm256_cvtss_f32(exp_negative(_mm256_set1_ps(next[0] - now)));
    all[0] = now;
    for (int i = 1; i < v_size + 2; i++) all[i] = std::fma(all[i], old_share, next[i] * new_share);
}

inline void finish(int v_size, const float* state, float* out) {
    const float share = state[1] == 0.0f ? 0.0f : 1.0f / state[1];
    for (int i = 0; i < v_size; i++) out[i] = state[2 + i] * share;
}

}  // namespace speck::SPECK_ISA
