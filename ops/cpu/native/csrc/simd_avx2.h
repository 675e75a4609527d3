// 16 lanes in two registers of AVX2; with AVX-VNNI if `VNNI` is 1. Included before the kernels that are compiled for it.
#ifndef HEADRACE_PAIRS
#define HEADRACE_PAIRS
typedef struct { __m256 a, b; } PairF;
typedef struct { __m256i a, b; } PairI;
#endif
#define vf PairF
#define vi PairI
#define bytes PairI
#define INLINE static inline __attribute__((always_inline)) TARGET
INLINE vf NAME(vf_load)(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void NAME(vf_store)(float *p, vf v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
INLINE vf NAME(vf_set1)(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf NAME(vf_fma)(vf x, vf y, vf z) {
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE vf NAME(vf_mul)(vf x, vf y) { return (vf){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE vf NAME(vf_add)(vf x, vf y) { return (vf){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE vf NAME(vf_sub)(vf x, vf y) { return (vf){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE vf NAME(vf_div)(vf x, vf y) { return (vf){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE vf NAME(vf_max)(vf x, vf y) { return (vf){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE vf NAME(vf_min)(vf x, vf y) { return (vf){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE vf NAME(vf_halves)(const uint8_t *p) {
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
INLINE vf NAME(vf_bf16)(const uint16_t *p) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
INLINE vf NAME(vf_low)(const uint8_t *p) { // bfloat16 in the low halves of words
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 32));
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
INLINE vf NAME(vf_high)(const uint8_t *p) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000));
    return (vf){_mm256_and_ps(_mm256_loadu_ps((const float *)p), mask),
                _mm256_and_ps(_mm256_loadu_ps((const float *)(p + 32)), mask)};
}
INLINE vf NAME(vf_u8)(const uint8_t *p) {
    __m128i all = _mm_loadu_si128((const __m128i *)p);
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
}
INLINE vf NAME(vf_i8)(const uint8_t *p) {
    __m128i all = _mm_loadu_si128((const __m128i *)p);
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
INLINE vi NAME(vi_set1)(int32_t x) { return (vi){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE vi NAME(vi_add)(vi x, vi y) { return (vi){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE vf NAME(vi_float)(vi v) { return (vf){_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
INLINE vi NAME(vf_round)(vf v) { return (vi){_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
INLINE vf NAME(vf_scale2)(vf v, vi power) {
    __m256i a = _mm256_add_epi32(_mm256_castps_si256(v.a), _mm256_slli_epi32(power.a, 23));
    __m256i b = _mm256_add_epi32(_mm256_castps_si256(v.b), _mm256_slli_epi32(power.b, 23));
    return (vf){_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)};
}
INLINE __m256 NAME(one_within)(__m256 v, __m256i at, __m256i first, __m256i last, __m256 other) {
    __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(first, at), _mm256_cmpgt_epi32(at, last));
    return _mm256_blendv_ps(v, other, _mm256_castsi256_ps(outside));
}
INLINE vf NAME(vf_within)(vf v, vi at, vi first, vi last, vf other) {
    return (vf){NAME(one_within)(v.a, at.a, first.a, last.a, other.a),
                NAME(one_within)(v.b, at.b, first.b, last.b, other.b)};
}
INLINE vf NAME(vf_above)(vf v, vf x, vf least) {
    return (vf){_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, least.a, _CMP_NLT_UQ)),
                _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, least.b, _CMP_NLT_UQ))};
}
INLINE vi NAME(vi_from)(int32_t first) {
    __m256i a = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (vi){a, _mm256_add_epi32(a, _mm256_set1_epi32(8))};
}
INLINE bytes NAME(by_load)(const uint8_t *p) {
    return (bytes){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE bytes NAME(by_and)(bytes x, uint8_t mask) {
    __m256i all = _mm256_set1_epi8((char)mask);
    return (bytes){_mm256_and_si256(x.a, all), _mm256_and_si256(x.b, all)};
}
INLINE bytes NAME(by_or)(bytes x, bytes y) {
    return (bytes){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
#define BY_RIGHT(v, n) ((bytes){_mm256_srli_epi16((v).a, n), _mm256_srli_epi16((v).b, n)})
#define BY_LEFT(v, n) ((bytes){_mm256_slli_epi16((v).a, n), _mm256_slli_epi16((v).b, n)})
#if VNNI
INLINE vi NAME(vi_dot)(vi sum, bytes codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    __m256i all = _mm256_set1_epi32(word);
    return (vi){_mm256_dpbusd_avx_epi32(sum.a, codes.a, all), _mm256_dpbusd_avx_epi32(sum.b, codes.b, all)};
}
#define vi_dot_wide NAME(vi_dot)
#else
// Pairs are added in 16 bits first: exact for codes of up to 7 bits, since 2 * 127 * 127 < 2^15.
INLINE __m256i NAME(one_dot)(__m256i sum, __m256i codes, __m256i all) {
    __m256i pairs = _mm256_maddubs_epi16(codes, all);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi NAME(vi_dot)(vi sum, bytes codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    __m256i all = _mm256_set1_epi32(word);
    return (vi){NAME(one_dot)(sum.a, codes.a, all), NAME(one_dot)(sum.b, codes.b, all)};
}
// Codes of 8 bits: the highest bit for itself, since 2 * 128 * 127 < 2^15, too.
INLINE vi NAME(vi_dot8)(vi sum, bytes codes, const int8_t *four) {
    sum = NAME(vi_dot)(sum, NAME(by_and)(codes, 0x7f), four);
    return NAME(vi_dot)(sum, NAME(by_and)(codes, 0x80), four);
}
#define vi_dot_wide NAME(vi_dot8)
#endif
