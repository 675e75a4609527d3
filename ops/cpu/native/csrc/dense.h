// Products of dense matrices, compiled for each instruction set, and once more for processors that multiply pairs of
// bfloat16 numbers (`PAIRS`).
//
// Every result is computed alike, however many rows and threads there are: products are added to a sum one after the
// other, each rounded once; panels of 256 inputs are summed by themselves, and their sums added in order. Of two
// neighbouring inputs the second comes first, as in VDPBF16PS. Activations are rounded to the weights' dtype, so that
// with bfloat16 the products are exact, and that instruction gives the same bits as fused multiplications in float32
// (but for numbers below 2^-126, which it takes for 0).

#undef DENSE
#undef DENSE_TARGET
#undef DENSE_INLINE
#if PAIRS
#define DENSE(x) NAME(x##_pairs)
#define DENSE_TARGET PAIRS_TARGET
#else
#define DENSE(x) NAME(x)
#define DENSE_TARGET TARGET
#endif
#define DENSE_INLINE static inline __attribute__((always_inline)) DENSE_TARGET

// Copy row `row` of `rows` to its places in the tiles, rounded to bfloat16 if `halves`: to even, NaN to NaN.
static DENSE_TARGET void DENSE(tile_floats)(const float *x, const Activations *a, int row, int rows, int halves) {
    int count, start = tile_start(row, rows, DENSE_ROWS, &count), even = (a->ins + 1) / 2 * 2;
    uint32_t *at = (uint32_t *)(a->floats + (size_t)start * even) + (row - start);
    for (int from = 0; from < a->ins; from += PANEL, x += PANEL) {
        int here = a->ins - from < PANEL ? a->ins - from : PANEL, twos = (here + 1) / 2;
        uint32_t word[PANEL];
        memcpy(word, x, (size_t)here * 4);
        if (here % 2) word[here] = 0;
        for (int i = 0; halves && i < here; i++) {
            uint32_t near = (word[i] + 0x7fff + (word[i] >> 16 & 1)) & 0xffff0000;
            word[i] = (word[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : near;
        }
        if (PAIRS && halves)
            for (int i = 0; i < twos; i++, at += count) *at = word[2 * i] >> 16 | word[2 * i + 1];
        else
            for (int i = 0; i < 2 * twos; i++, at += count) *at = word[i];
    }
}

// Input `odd` of two, for the 16 outputs of half `half` of a block.
DENSE_INLINE vf DENSE(column)(const uint8_t *w, int odd, int half, const int KIND) {
    if (KIND == DENSE_F32) return NAME(vf_load)((const float *)w + STRIP * odd + LANES * half);
    return odd ? NAME(vf_high)(w + 64 * half) : NAME(vf_low)(w + 64 * half);
}

// Add the products of two inputs for the `R` rows at `x`, of the halves `half` .. `half` + `H` - 1 of a block.
DENSE_INLINE void DENSE(add_two)(vf (*sums)[2], const uint8_t *w, const float *x, int half, const int KIND, const int R,
                                 const int H) {
    UNROLL for (int odd = 1; odd >= 0; odd--) {
        vf column[2];
        UNROLL for (int h = 0; h < H; h++) column[h] = DENSE(column)(w, odd, half + h, KIND);
        UNROLL for (int r = 0; r < R; r++) {
            vf all = NAME(vf_set1)(x[odd * R + r]);
            UNROLL for (int h = 0; h < H; h++) sums[r][h] = NAME(vf_fma)(column[h], all, sums[r][h]);
        }
    }
}

#if PAIRS
DENSE_INLINE void DENSE(dot_two)(vf (*sums)[2], const uint8_t *w, const float *x, int half, const int R, const int H) {
    bytes column[2];
    UNROLL for (int h = 0; h < H; h++) column[h] = NAME(by_load)(w + 64 * (half + h));
    UNROLL for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r, 4);
        bytes all = NAME(vi_set1)(pair);
        UNROLL for (int h = 0; h < H; h++)
            sums[r][h] = _mm512_dpbf16_ps(sums[r][h], (__m512bh)column[h], (__m512bh)all);
    }
}
#endif

// Sums of the halves `half` .. `half` + `H` - 1 of a block, for the `R` rows of the tile at `x`.
DENSE_INLINE void DENSE(dense_tile)(const uint8_t *w, const float *x, int ins, int half, vf *y, const int KIND,
                                    const int R, const int H) {
    const int BYTES = KIND == DENSE_F32 ? 8 * STRIP : 4 * STRIP; // of two inputs
    const int FLOATS_OF_TWO = PAIRS && KIND == DENSE_BF16 ? 1 : 2;
    for (int from = 0; from < ins; from += PANEL) {
        int pairs = ((ins - from < PANEL ? ins - from : PANEL) + 1) / 2;
        vf sums[MOST_ROWS][2];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int h = 0; h < H; h++) sums[r][h] = NAME(vf_set1)(0);
        for (int pair = 0; pair < pairs; pair++, w += BYTES, x += FLOATS_OF_TWO * R) {
            UNROLL for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(w + AHEAD + line);
#if PAIRS
            if (KIND == DENSE_BF16) {
                DENSE(dot_two)(sums, w, x, half, R, H);
                continue;
            }
#endif
            DENSE(add_two)(sums, w, x, half, KIND, R, H);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int h = 0; h < H; h++)
                y[2 * r + half + h] = from ? NAME(vf_add)(y[2 * r + half + h], sums[r][h]) : sums[r][h];
    }
}

// The sums of a block, in one go or its halves one after the other: as many as the registers hold.
#define DENSE_TILE(R, H)                                                                                      \
    static DENSE_TARGET __attribute__((noinline)) void DENSE(dense_tile_##R)(const Matrix *m, const uint8_t *w, \
                                                                             const float *x, vf *y) {         \
        for (int half = 0; half < 2; half += H) {                                                             \
            if (m->scale == DENSE_F32) DENSE(dense_tile)(w, x, m->ins, half, y, DENSE_F32, R, H);             \
            else DENSE(dense_tile)(w, x, m->ins, half, y, DENSE_BF16, R, H);                                  \
        }                                                                                                     \
    }
DENSE_TILE(1, 2)
DENSE_TILE(2, 2)
#if WIDE
DENSE_TILE(4, 2)
DENSE_TILE(8, 2)
DENSE_TILE(12, 2)
#else
DENSE_TILE(4, 1)
DENSE_TILE(6, 1)
#endif

// Compute the outputs of the blocks `first` .. `last` - 1 for all rows. `adds`: add them to what lies in `y`.
static DENSE_TARGET void DENSE(dense)(const Matrix *m, int first, int last, const Activations *a, int rows,
                                      const float *bias, float *y, size_t stride, int adds) {
    size_t even = ((size_t)m->ins + 1) / 2 * 2, bytes = even * STRIP * (size_t)m->bits / 8;
    for (int from = 0; from < rows; from += SPAN) {
        int to = rows - from < SPAN ? rows : from + SPAN;
        for (int block = first; block < last; block++) {
            const uint8_t *w = m->codes + (size_t)block * bytes;
            int valid = m->outs - block * STRIP < STRIP ? m->outs - block * STRIP : STRIP;
            float here[STRIP] = {0};
            if (bias) memcpy(here, bias + block * STRIP, (size_t)valid * sizeof(float));
            vf addend[2] = {NAME(vf_load)(here), NAME(vf_load)(here + LANES)};
            for (int row = from; row < to;) {
                const float *x = a->floats + (size_t)row * even;
                vf sums[2 * MOST_ROWS];
                int count = tile_rows(rows - row, DENSE_ROWS);
                switch (count) {
#if WIDE
                case 12: DENSE(dense_tile_12)(m, w, x, sums); break;
                case 8: DENSE(dense_tile_8)(m, w, x, sums); break;
#else
                case 6: DENSE(dense_tile_6)(m, w, x, sums); break;
#endif
                case 4: DENSE(dense_tile_4)(m, w, x, sums); break;
                case 2: DENSE(dense_tile_2)(m, w, x, sums); break;
                default: DENSE(dense_tile_1)(m, w, x, sums);
                }
                for (int r = 0; r < count; r++, row++) {
                    float *out = y + (size_t)row * stride + (size_t)block * STRIP;
                    for (int h = 0; h < 2; h++) {
                        vf sum = bias ? NAME(vf_add)(sums[2 * r + h], addend[h]) : sums[2 * r + h];
                        if (valid == STRIP) {
                            float *at = out + LANES * h;
                            NAME(vf_store)(at, adds ? NAME(vf_add)(NAME(vf_load)(at), sum) : sum);
                        } else {
                            NAME(vf_store)(here + LANES * h, sum);
                        }
                    }
                    for (int i = 0; valid < STRIP && i < valid; i++) out[i] = adds ? out[i] + here[i] : here[i];
                }
            }
        }
    }
}
#undef DENSE_TILE
