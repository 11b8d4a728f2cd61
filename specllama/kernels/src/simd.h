// One set of vector operations for each instruction set; tile.h is written against it.
//
// A vector of integers holds four consecutive weights of each of `rows` rows in its 32-bit lanes; a vector of floats
// one number a row. `Sum` collects products of unsigned weights and signed activations.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define SPECK_ISA avx512vnni
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
#define SPECK_ISA avxvnni
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPECK_ISA avx2
#else
#error "this file needs AVX2, FMA and F16C"
#endif

namespace speck::SPECK_ISA {

#define SPECK_INLINE static inline __attribute__((always_inline))

SPECK_INLINE uint16_t to_half(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
SPECK_INLINE float from_half(uint16_t x) { return _cvtsh_ss(x); }

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

struct Simd {
    static constexpr int rows = 16;
    static constexpr int tile = 12;  // columns at once: 32 registers
    static constexpr bool biased = true;  // signed weights are stored with 128 added
    static constexpr bool scales_integers = false;  // else the sum of each group is scaled as a float

    using Int = __m512i;
    using Float = __m512;
    struct Sum { __m512i v; };

    SPECK_INLINE Int load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    SPECK_INLINE Int low(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    SPECK_INLINE Int high(Int v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
    // The bits [from, from + n) of each byte, moved to bit `to`.
    template <int from, int n, int to> SPECK_INLINE Int bits(Int v) {
        if constexpr (from > to) v = _mm512_srli_epi16(v, from - to);
        if constexpr (from < to) v = _mm512_slli_epi16(v, to - from);
        return _mm512_and_si512(v, _mm512_set1_epi8((char)(((1 << n) - 1) << to)));
    }
    SPECK_INLINE Int either(Int a, Int b) { return _mm512_or_si512(a, b); }
    SPECK_INLINE Int look_up(const int8_t* table, Int index) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), index);
    }

    SPECK_INLINE Sum start(int32_t v) { return {_mm512_set1_epi32(v)}; }
    template <int, bool, int> SPECK_INLINE void add(Sum& sum, Int weights, const int8_t* q) {
        int32_t four;
        memcpy(&four, q, 4);
        sum.v = _mm512_dpbusd_epi32(sum.v, weights, _mm512_set1_epi32(four));
    }
    SPECK_INLINE Float total(const Sum& sum) { return _mm512_cvtepi32_ps(sum.v); }

    // Pairs of small weights (uint8, two a row) with pairs of int16, added to 32-bit numbers.
    SPECK_INLINE Int pairs(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
    SPECK_INLINE Int add_pairs(Int sum, Int weights, const int16_t* q) {
        int32_t two;
        memcpy(&two, q, 4);
        return _mm512_dpwssd_epi32(sum, weights, _mm512_set1_epi32(two));
    }
    SPECK_INLINE Int zero() { return _mm512_setzero_si512(); }
    SPECK_INLINE Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }

    SPECK_INLINE Float zero_float() { return _mm512_setzero_ps(); }
    SPECK_INLINE Float all(float v) { return _mm512_set1_ps(v); }
    SPECK_INLINE Float floats(const float* p) { return _mm512_loadu_ps(p); }
    SPECK_INLINE Float halfs(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    SPECK_INLINE Float upper_halfs(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
    SPECK_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    SPECK_INLINE Int widened(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    SPECK_INLINE Int widened(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    SPECK_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    SPECK_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    SPECK_INLINE Float fms(Float a, Float b, Float c) { return _mm512_fmsub_ps(a, b, c); }
    SPECK_INLINE Float max(Float a, Float b) { return _mm512_max_ps(a, b); }  // b if one of them is NaN
    SPECK_INLINE bool any_from(Float v, float least) {
        return _mm512_cmp_ps_mask(v, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
    }
    SPECK_INLINE void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
};

#else

struct Simd {
    static constexpr int rows = 8;
    static constexpr int tile = 4;  // columns at once: 16 registers

    using Int = __m256i;
    using Float = __m256;

    SPECK_INLINE Int load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    SPECK_INLINE Int low(Int v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    SPECK_INLINE Int high(Int v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
    template <int from, int n, int to> SPECK_INLINE Int bits(Int v) {
        if constexpr (from > to) v = _mm256_srli_epi16(v, from - to);
        if constexpr (from < to) v = _mm256_slli_epi16(v, to - from);
        return _mm256_and_si256(v, _mm256_set1_epi8((char)(((1 << n) - 1) << to)));
    }
    SPECK_INLINE Int either(Int a, Int b) { return _mm256_or_si256(a, b); }
    SPECK_INLINE Int look_up(const int8_t* table, Int index) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), index);
    }

#if defined(__AVXVNNI__)
    static constexpr bool biased = true;
    static constexpr bool scales_integers = false;
    struct Sum { __m256i v; };

    SPECK_INLINE Sum start(int32_t v) { return {_mm256_set1_epi32(v)}; }
    template <int, bool, int> SPECK_INLINE void add(Sum& sum, Int weights, const int8_t* q) {
        int32_t four;
        memcpy(&four, q, 4);
        sum.v = _mm256_dpbusd_avx_epi32(sum.v, weights, _mm256_set1_epi32(four));
    }
    SPECK_INLINE Float total(const Sum& sum) { return _mm256_cvtepi32_ps(sum.v); }
    SPECK_INLINE Int add_pairs(Int sum, Int weights, const int16_t* q) {
        int32_t two;
        memcpy(&two, q, 4);
        return _mm256_dpwssd_avx_epi32(sum, weights, _mm256_set1_epi32(two));
    }
#else
    static constexpr bool biased = false;
    static constexpr bool scales_integers = true;
    struct Sum { __m256i v, narrow; };  // narrow: 16-bit sums of pairs that are not in v yet

    SPECK_INLINE Sum start(int32_t v) { return {_mm256_set1_epi32(v), _mm256_setzero_si256()}; }
    // The t-th addition to a sum. `room` of them fit into 16 bits: 2 * 127 * (largest weight) * room < 32768.
    // `by`: pairs of 16-bit numbers that the sums of pairs are multiplied with.
    template <int room, bool is_signed, int t>
    SPECK_INLINE void add(Sum& sum, Int weights, const int8_t* q, Int by = _mm256_set1_epi16(1)) {
        int32_t four;
        memcpy(&four, q, 4);
        const __m256i y = _mm256_set1_epi32(four);
        const __m256i product = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(y, weights))
                                          : _mm256_maddubs_epi16(weights, y);
        sum.narrow = t % room ? _mm256_add_epi16(sum.narrow, product) : product;
        if constexpr (t % room == room - 1)
            sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(sum.narrow, by));
    }
    SPECK_INLINE Float total(const Sum& sum) { return _mm256_cvtepi32_ps(sum.v); }
    SPECK_INLINE Int add_pairs(Int sum, Int weights, const int16_t* q) {
        int32_t two;
        memcpy(&two, q, 4);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, _mm256_set1_epi32(two)));
    }
    // The lower halves of two 32-bit numbers, side by side.
    SPECK_INLINE Int pair(Int a, Int b) { return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa); }
    SPECK_INLINE Int times(Int pairs, int16_t by) { return _mm256_mullo_epi16(pairs, _mm256_set1_epi16(by)); }
#endif
    SPECK_INLINE Int pairs(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
    SPECK_INLINE Int zero() { return _mm256_setzero_si256(); }
    SPECK_INLINE Float to_float(Int v) { return _mm256_cvtepi32_ps(v); }

    SPECK_INLINE Float zero_float() { return _mm256_setzero_ps(); }
    SPECK_INLINE Float all(float v) { return _mm256_set1_ps(v); }
    SPECK_INLINE Float floats(const float* p) { return _mm256_loadu_ps(p); }
    SPECK_INLINE Float halfs(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    SPECK_INLINE Float upper_halfs(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
    SPECK_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    SPECK_INLINE Int widened(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    SPECK_INLINE Int widened(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    SPECK_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    SPECK_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    SPECK_INLINE Float fms(Float a, Float b, Float c) { return _mm256_fmsub_ps(a, b, c); }
    SPECK_INLINE Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
    SPECK_INLINE bool any_from(Float v, float least) {
        return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(least), _CMP_GE_OQ)) != 0;
    }
    SPECK_INLINE void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
};

#endif

}  // namespace speck::SPECK_ISA
