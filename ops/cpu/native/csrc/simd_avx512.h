// 16 lanes in one register of AVX-512 with VNNI. Included once, before the kernels that are compiled for it.
#define vf __m512
#define vi __m512i
#define bytes __m512i
#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE vf NAME(vf_load)(const float *p) { return _mm512_loadu_ps(p); }
INLINE void NAME(vf_store)(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vf NAME(vf_set1)(float x) { return _mm512_set1_ps(x); }
INLINE vf NAME(vf_fma)(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf NAME(vf_mul)(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf NAME(vf_add)(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf NAME(vf_sub)(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf NAME(vf_div)(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf NAME(vf_max)(vf a, vf b) { return _mm512_max_ps(a, b); } // b where either is NaN
INLINE vf NAME(vf_min)(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf NAME(vf_halves)(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf NAME(vf_bf16)(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf NAME(vf_low)(const uint8_t *p) { // bfloat16 in the low halves of words
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
INLINE vf NAME(vf_high)(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE vf NAME(vf_u8)(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf NAME(vf_i8)(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vi NAME(vi_set1)(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi NAME(vi_add)(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vf NAME(vi_float)(vi v) { return _mm512_cvtepi32_ps(v); }
INLINE vi NAME(vf_round)(vf v) { return _mm512_cvtps_epi32(v); } // to the nearest, ties to even
INLINE vf NAME(vf_scale2)(vf v, vi power) {                      // v * 2^power, for normal results
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(power, 23)));
}
INLINE vf NAME(vf_within)(vf v, vi at, vi first, vi last, vf other) { // v where first <= at <= last
    __mmask16 inside = _mm512_cmpge_epi32_mask(at, first) & _mm512_cmple_epi32_mask(at, last);
    return _mm512_mask_mov_ps(other, inside, v);
}
INLINE vf NAME(vf_above)(vf v, vf x, vf least) { // v where x >= least or x is NaN, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), v);
}
INLINE vi NAME(vi_from)(int32_t first) {
    return _mm512_add_epi32(_mm512_set1_epi32(first),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
INLINE bytes NAME(by_load)(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE bytes NAME(by_and)(bytes a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
INLINE bytes NAME(by_or)(bytes a, bytes b) { return _mm512_or_si512(a, b); }
#define BY_RIGHT(v, n) _mm512_srli_epi16(v, n)
#define BY_LEFT(v, n) _mm512_slli_epi16(v, n)
// Add the products of 64 unsigned codes and 4 signed ones, repeated, in fours.
INLINE vi NAME(vi_dot)(vi sum, bytes codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(word));
}
#define vi_dot_wide NAME(vi_dot)
