// Attention over a cache of binary16. The result of a row depends only on the positions that it sees, in their order: not on
// where they lie in the cache, nor on the other rows.
//
// The positions that a row sees are counted from the first one, and taken in blocks of 32 and chunks of 256. So a row of one
// of several sequences, or of a branch of a tree, has the numbers that it has where nothing else is in the cache. Within a
// chunk the softmax runs over its blocks in order, from nothing; the chunks are then joined in order. Threads may share out
// the chunks of few rows, or take whole rows: the numbers are the same. Hidden positions are left out, not multiplied by
// zero, so they may hold anything, also NaN.
#pragma once
#include <cmath>
#include <initializer_list>
#include <limits>

#include "path.h"
#include "simd.h"

namespace speck::SPECK_ISA {


#if defined(__AVX512F__)
struct Wide {
    static constexpr int n = 16;
    static constexpr int score_heads = 2, value_heads = 3;  // at once: 32 registers
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
    static constexpr int score_heads = 1, value_heads = 1;
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

// For `n` positions, at most 32, a bit for each that a row sees.
SPECK_INLINE uint32_t seen(const uint16_t* mask, int n) {
    if (n < attention_block) {
        uint32_t bits = 0;
        for (int j = 0; j < n; j++) bits |= (uint32_t)(mask[j] != hidden_half) << j;
        return bits;
    }
#if defined(__AVX512BW__)
    return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(mask), _mm512_set1_epi16((short)hidden_half));
#else
    const __m256i hidden = _mm256_set1_epi16((short)hidden_half);
    const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)mask), hidden);
    const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)(mask + 16)), hidden);
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
#endif
}

// Fills in a `Sight`: what a row sees.
inline void look(const uint16_t* mask, int positions, int* sight) {
    int count = 0, last = -1;
    for (int at = 0; at < positions; at += attention_block) {
        uint32_t bits = seen(mask + at, positions - at < attention_block ? positions - at : attention_block);
        if (!bits) continue;
        const int n = __builtin_popcount(bits), before = -count & (attention_chunk - 1);  // the next chunk begins
        last = at + 31 - __builtin_clz(bits);
        if (before < n) {
            for (int i = 0; i < before; i++) bits &= bits - 1;
            sight[Sight::starts + (count + before) / attention_chunk] = at + __builtin_ctz(bits);
        }
        count += n;
    }
    sight[Sight::count] = count;
    sight[Sight::last] = last;
}

// The next `count` positions, at most 32, that a row sees from `at` on, which moves behind them. Returns their numbers in the
// mask, in `own` where they do not lie side by side.
inline const uint16_t* next_places(const uint16_t* mask, int positions, int& at, int count, int* place, uint16_t* own) {
    if (at + attention_block <= positions && seen(mask + at, attention_block) == ~0u) {
        for (int j = 0; j < attention_block; j++) place[j] = at + j;
        at += attention_block;
        return mask + at - attention_block;
    }
    for (int n = 0; n < count; at += attention_block) {
        uint32_t bits = seen(mask + at, positions - at < attention_block ? positions - at : attention_block);
        for (; bits && n < count; bits &= bits - 1, n++) {
            place[n] = at + __builtin_ctz(bits);
            own[n] = mask[place[n]];
        }
    }
    at = place[count - 1] + 1;
    return own;
}

// The widened keys and values of a block, kept for the next rows: those of a sequence see the same positions, each one more.
struct Widened {
    static constexpr int room = 2 * attention_block;  // a window moves from row to row
    const Attention& a;
    const char *from_k, *from_v;
    float *k, *v;
    int n = 0, kept[room];  // where they lie in the cache, ascending

    Widened(const Attention& a, int kv_head, float* work)
        : a(a), from_k(a.k + kv_head * a.k_head), from_v(a.v + kv_head * a.v_head), k(work), v(work + room * a.k_size) {}

    // The first of `count` positions side by side in `k` and `v`.
    int find(const int* place, int count) {
        int first = 0, same = 0;
        while (first < n && kept[first] < place[0]) first++;
        if (first + attention_block > room) first = n = 0;
        while (same < count && first + same < n && kept[first + same] == place[same]) same++;
        if (!same) first = 0;
        if (same < count) n = first + same;
        for (int j = same; j < count; j++, n++) {
            kept[n] = place[j];
            widen(from_k + place[j] * a.k_position, a.k_size, k + n * a.k_size);
            widen(from_v + place[j] * a.v_position, a.v_size, v + n * a.v_size);
        }
        return first;
    }
    static void widen(const char* from, int size, float* to) {
        for (int d = 0; d < size; d += Wide::n) Wide::store(to + d, Wide::halfs((const uint16_t*)from + d));
    }
};

// A block of `count` positions, at most 32, of one row. `k` and `v` are widened and have room for 32; `p` has 32 numbers for
// each head that shares them: scores, then weights. A few heads are computed at once: their numbers do not depend on that.

template <int heads>
SPECK_INLINE void scores(const Attention& a, const char* q, const float* k, int count, const uint16_t* mask, float* p) {
    for (int j = 0; j < count; j += 8) {
        typename Wide::V sum[heads][8];
        for (auto& each : sum)
            for (auto& one : each) one = Wide::all(0.0f);
        for (int d = 0; d < a.k_size; d += Wide::n) {
            typename Wide::V part[heads];
            for (int h = 0; h < heads; h++) part[h] = Wide::load((const float*)(q + h * a.q_head) + d);
            for (int i = 0; i < 8; i++) {
                const auto key = Wide::load(k + (j + i) * a.k_size + d);
                for (int h = 0; h < heads; h++) sum[h][i] = Wide::fma(part[h], key, sum[h][i]);
            }
        }
        for (int h = 0; h < heads; h++) {
            __m256 folded[8];
            for (int i = 0; i < 8; i++) folded[i] = Wide::folded(sum[h][i]);
            __m256 s = _mm256_mul_ps(sums(folded), _mm256_set1_ps(a.scale));
            if (a.softcap != 0.0f) {
                float each[8];
                _mm256_storeu_ps(each, s);
                for (float& x : each) x = a.softcap * std::tanh(x);
                s = _mm256_loadu_ps(each);
            }
            if (mask) s = _mm256_add_ps(s, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(mask + j))));
            _mm256_storeu_ps(p + h * attention_block + j, s);
        }
    }
}

// Turns scores into weights and adds them to the state's total. Returns what its weighted sum is multiplied with.
SPECK_INLINE float weigh(float* p, int count, float* state) {
    for (int j = count; j < attention_block; j++) p[j] = -INFINITY;
    __m256 most = _mm256_loadu_ps(p), strange = _mm256_cmp_ps(most, most, _CMP_UNORD_Q);
    for (int j = 8; j < attention_block; j += 8) {
        const __m256 s = _mm256_loadu_ps(p + j);
        most = _mm256_max_ps(most, s);
        strange = _mm256_or_ps(strange, _mm256_cmp_ps(s, s, _CMP_UNORD_Q));
    }
    float &largest = state[0], &total = state[1];
    const float here = horizontal_max(most), now = largest < here ? here : largest;
    const bool is_strange = _mm256_movemask_ps(strange);
    if (is_strange || now == -INFINITY) {  // NaN in, NaN out
        if (is_strange) largest = std::fmax(largest, 0.0f), total = std::numeric_limits<float>::quiet_NaN();
        memset(p, 0, attention_block * sizeof *p);
        return 1.0f;
    }
    __m256 sum = _mm256_setzero_ps();
    for (int j = 0; j < attention_block; j += 8) {
        const __m256 e = exp_negative(_mm256_sub_ps(_mm256_loadu_ps(p + j), _mm256_set1_ps(now)));
        _mm256_storeu_ps(p + j, e);
        sum = _mm256_add_ps(sum, e);
    }
    const float shrink = largest == -INFINITY ? 0.0f : _mm256_cvtss_f32(exp_negative(_mm256_set1_ps(largest - now)));
    total = std::fma(total, shrink, horizontal_sum(sum));
    largest = now;
    return shrink;
}

template <int heads, int vectors>
SPECK_INLINE void add_values(const Attention& a, const float* v, int count, const float* p, const float* shrink, float* out) {
    typename Wide::V sum[heads][vectors];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < vectors; i++)
            sum[h][i] = Wide::mul(Wide::all(shrink[h]), Wide::load(out + h * a.state_floats() + i * Wide::n));
    for (int j = 0; j < count; j++)
        for (int i = 0; i < vectors; i++) {
            const auto value = Wide::load(v + j * a.v_size + i * Wide::n);
            for (int h = 0; h < heads; h++) sum[h][i] = Wide::fma(Wide::all(p[h * attention_block + j]), value, sum[h][i]);
        }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < vectors; i++) Wide::store(out + h * a.state_floats() + i * Wide::n, sum[h][i]);
}

template <int heads>
inline void add_all_values(const Attention& a, const float* v, int count, const float* p, const float* shrink, float* out) {
    int d = 0;
    for (; d + 8 * Wide::n <= a.v_size; d += 8 * Wide::n) add_values<heads, 8>(a, v + d, count, p, shrink, out + d);
    for (; d + 4 * Wide::n <= a.v_size; d += 4 * Wide::n) add_values<heads, 4>(a, v + d, count, p, shrink, out + d);
    for (; d < a.v_size; d += Wide::n) add_values<heads, 1>(a, v + d, count, p, shrink, out + d);
}

inline void attend_block(const Attention& a, const char* q, const float* k, const float* v, int count, const uint16_t* mask,
                         float* p, float* states) {
    int h = 0;
    for (; h + Wide::score_heads <= a.shared; h += Wide::score_heads)
        scores<Wide::score_heads>(a, q + h * a.q_head, k, count, mask, p + h * attention_block);
    for (; h < a.shared; h++) scores<1>(a, q + h * a.q_head, k, count, mask, p + h * attention_block);
    float* shrink = p + a.shared * attention_block;
    for (h = 0; h < a.shared; h++) shrink[h] = weigh(p + h * attention_block, count, states + h * a.state_floats());
    for (h = 0; h + Wide::value_heads <= a.shared; h += Wide::value_heads)
        add_all_values<Wide::value_heads>(a, v, count, p + h * attention_block, shrink + h, states + h * a.state_floats() + 2);
    for (; h < a.shared; h++)
        add_all_values<1>(a, v, count, p + h * attention_block, shrink + h, states + h * a.state_floats() + 2);
}

// The chunk's state (largest score, sum of exponentials, weighted sum of v) for `n` rows, at most attention_rows, of the query
// heads that share a head of the cache. `work`: see `Attention::work_floats`.
inline void attend_chunk(const Attention& a, int kv_head, const int* rows, int n, int chunk, float* states, float* work) {
    const int size = a.state_floats();
    for (int i = 0; i < n * a.shared; i++) {
        states[i * size] = -INFINITY;
        memset(states + i * size + 1, 0, (size - 1) * sizeof(float));
    }
    Widened widened(a, kv_head, work);
    float* p = work + 2 * attention_block * (a.k_size + a.v_size);
    int at[attention_rows];
    for (int r = 0; r < n; r++)
        if (a.mask && chunk < a.chunks(rows[r])) at[r] = a.sight(rows[r])[Sight::starts + chunk];
    for (int done = chunk * attention_chunk; done < (chunk + 1) * attention_chunk; done += attention_block) {
        widened.n = 0;
        for (int r = 0; r < n; r++) {
            const int row = rows[r], left = a.count(row) - done, count = left < attention_block ? left : attention_block;
            if (left <= 0) continue;
            int place[attention_block];
            uint16_t own[attention_block] = {};
            const uint16_t* mask = nullptr;
            if (a.mask) mask = next_places((const uint16_t*)(a.mask + row * a.mask_row), a.positions, at[r], count, place, own);
            else for (int j = 0; j < count; j++) place[j] = done + j;
            const int first = widened.find(place, count);
            attend_block(a, a.q + row * a.q_row + kv_head * a.shared * a.q_head, widened.k + first * a.k_size,
                         widened.v + first * a.v_size, count, mask, p, states + r * a.shared * size);
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
