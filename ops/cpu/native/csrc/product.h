// Products of packed matrices, compiled once for each instruction set.
//
// Every result is computed alike, however many rows and threads there are: a group's sum is an exact integer, and the
// groups' sums are added in order, in float32 with fused multiplications.

// Inputs 4 * `j` .. 4 * `j` + 3 of a group, for 16 outputs. `j` is a literal, since shifts need one.
#define LOW(j) ((j) < 4 ? NAME(by_and)(NAME(by_load)(codes + 64 * ((j) & 3)), 15) \
                        : NAME(by_and)(BY_RIGHT(NAME(by_load)(codes + 64 * ((j) & 3)), 4), 15))
#define FIFTH(j) NAME(by_and)((j) < 4 ? BY_LEFT(NAME(by_load)(codes + 256), (4 - (j)) & 7) \
                                      : BY_RIGHT(NAME(by_load)(codes + 256), ((j) - 4) & 7), 0x10)
#define TWO_BITS(j) NAME(by_and)(((j) & 3) < 2 ? BY_LEFT(NAME(by_load)(codes + 256 + 64 * ((j) / 4)), (4 - 2 * (j)) & 6) \
                                               : BY_RIGHT(NAME(by_load)(codes + 256 + 64 * ((j) / 4)), (2 * ((j) & 3) - 4) & 6), 0x30)
#define DOTS(j)                                                                                             \
    do {                                                                                                    \
        bytes w = BITS == 8   ? NAME(by_load)(codes + 64 * (j))                                             \
                  : BITS == 4 ? LOW(j)                                                                      \
                  : BITS == 5 ? NAME(by_or)(LOW(j), FIFTH(j))                                               \
                              : NAME(by_or)(LOW(j), TWO_BITS(j));                                           \
        UNROLL for (int r = 0; r < R; r++) {                                                                \
            const int8_t *four = x + r * GROUP + 4 * (j);                                                   \
            vi *sum = (j) < 4 || (SCALE != SCALE_K16 && R > 2) ? &first[r] : &last[r];                      \
            *sum = BITS == 8 ? vi_dot_wide(*sum, w, four) : NAME(vi_dot)(*sum, w, four);                    \
        }                                                                                                   \
    } while (0)

// Sums of 16 outputs for the `R` rows of the tile that begins with `row`.
INLINE void NAME(tile)(const Matrix *m, int block, const Activations *a, int row, vf *y, const int BITS,
                       const int SCALE, const int R) {
    int groups = m->ins / GROUP, zero = m->zero;
    const uint8_t *codes = m->codes + (size_t)block * groups * 64 * BITS;
    const int8_t *x = a->codes + (size_t)row * a->ins;
    const float *scales = a->scales + (size_t)row * groups, *sums = a->sums + (size_t)row * groups;
    const int32_t *halves = a->halves + (size_t)row * groups * 2;
    const uint8_t *constants = m->scales, *supers = m->supers;
    int shared = 0;
    if (SCALE == SCALE_F16) constants += (size_t)block * groups * 32;
    else if (SCALE == SCALE_F16_MIN) constants += (size_t)block * groups * 64;
    else if (SCALE == SCALE_F32) constants += (size_t)block * ((groups + m->shared - 1) / m->shared) * 64;
    else if (SCALE == SCALE_F32_MIN) constants += (size_t)block * ((groups + m->shared - 1) / m->shared) * 128;
    else constants += (size_t)block * groups * 32;
    if (SCALE == SCALE_K_MIN) supers += (size_t)block * (groups / SUPER_GROUPS) * 64;
    if (SCALE == SCALE_K16) supers += (size_t)block * (groups / SUPER_GROUPS) * 32;
    UNROLL for (int r = 0; r < R; r++) y[r] = NAME(vf_set1)(0);
    for (int g = 0; g < groups; g++) {
        for (int line = 0; line < BITS; line++) __builtin_prefetch(codes + AHEAD + 64 * line);
        vi first[8], last[8]; // integer sums, whose order does not matter: two, so that one does not wait for itself
        UNROLL for (int r = 0; r < R; r++) {
            int low = halves[2 * r], high = halves[2 * r + 1];
            first[r] = NAME(vi_set1)(SCALE == SCALE_K16 ? -zero * low : -zero * (low + high));
            if (SCALE == SCALE_K16 || R <= 2) last[r] = NAME(vi_set1)(SCALE == SCALE_K16 ? -zero * high : 0);
        }
        if (BITS == 8) {
            DOTS(0); DOTS(1); DOTS(2); DOTS(3); DOTS(4); DOTS(5); DOTS(6); DOTS(7);
        } else {
            DOTS(0); DOTS(4); DOTS(1); DOTS(5); DOTS(2); DOTS(6); DOTS(3); DOTS(7);
        }
        vf scale, minimum, lower, upper;
        if (SCALE == SCALE_F16 || SCALE == SCALE_F16_MIN) {
            scale = NAME(vf_halves)(constants);
            if (SCALE == SCALE_F16_MIN) minimum = NAME(vf_halves)(constants + 32);
            constants += SCALE == SCALE_F16_MIN ? 64 : 32;
        } else if (SCALE == SCALE_F32 || SCALE == SCALE_F32_MIN) {
            scale = NAME(vf_load)((const float *)constants);
            if (SCALE == SCALE_F32_MIN) minimum = NAME(vf_load)((const float *)constants + LANES);
            if (++shared == m->shared) shared = 0, constants += SCALE == SCALE_F32_MIN ? 128 : 64;
        } else if (SCALE == SCALE_K_MIN) {
            scale = NAME(vf_mul)(NAME(vf_halves)(supers), NAME(vf_u8)(constants));
            vf unit = NAME(vf_sub)(NAME(vf_set1)(0), NAME(vf_halves)(supers + 32));
            minimum = NAME(vf_mul)(unit, NAME(vf_u8)(constants + LANES));
            constants += 32, supers += g % SUPER_GROUPS == SUPER_GROUPS - 1 ? 64 : 0;
        } else {
            scale = NAME(vf_halves)(supers);
            lower = NAME(vf_i8)(constants), upper = NAME(vf_i8)(constants + LANES);
            constants += 32, supers += g % SUPER_GROUPS == SUPER_GROUPS - 1 ? 32 : 0;
        }
        UNROLL for (int r = 0; r < R; r++) {
            vf both;
            if (SCALE == SCALE_K16)
                both = NAME(vf_fma)(NAME(vi_float)(last[r]), upper, NAME(vf_mul)(NAME(vi_float)(first[r]), lower));
            else
                both = NAME(vi_float)(R <= 2 ? NAME(vi_add)(first[r], last[r]) : first[r]);
            y[r] = NAME(vf_fma)(both, NAME(vf_mul)(scale, NAME(vf_set1)(scales[r])), y[r]);
            if (SCALE == SCALE_F16_MIN || SCALE == SCALE_F32_MIN || SCALE == SCALE_K_MIN)
                y[r] = NAME(vf_fma)(minimum, NAME(vf_set1)(sums[r]), y[r]);
        }
        codes += 64 * BITS, x += R * GROUP, scales += R, sums += R, halves += 2 * R;
    }
}

#define TILES(R) \
    static TARGET __attribute__((noinline)) void NAME(tile_##R)(const Matrix *m, int block, const Activations *a, int row, vf *y) { \
        switch (m->scale) {                                                                                 \
        case SCALE_F16:                                                                                     \
            if (m->bits == 4) NAME(tile)(m, block, a, row, y, 4, SCALE_F16, R);                             \
            else if (m->bits == 5) NAME(tile)(m, block, a, row, y, 5, SCALE_F16, R);                        \
            else NAME(tile)(m, block, a, row, y, 8, SCALE_F16, R);                                          \
            return;                                                                                         \
        case SCALE_F16_MIN:                                                                                 \
            if (m->bits == 4) NAME(tile)(m, block, a, row, y, 4, SCALE_F16_MIN, R);                         \
            else NAME(tile)(m, block, a, row, y, 5, SCALE_F16_MIN, R);                                      \
            return;                                                                                         \
        case SCALE_F32:                                                                                     \
            if (m->bits == 4) NAME(tile)(m, block, a, row, y, 4, SCALE_F32, R);                             \
            else NAME(tile)(m, block, a, row, y, 8, SCALE_F32, R);                                          \
            return;                                                                                         \
        case SCALE_F32_MIN:                                                                                 \
            if (m->bits == 4) NAME(tile)(m, block, a, row, y, 4, SCALE_F32_MIN, R);                         \
            else NAME(tile)(m, block, a, row, y, 8, SCALE_F32_MIN, R);                                      \
            return;                                                                                         \
        case SCALE_K_MIN:                                                                                   \
            if (m->bits == 4) NAME(tile)(m, block, a, row, y, 4, SCALE_K_MIN, R);                           \
            else NAME(tile)(m, block, a, row, y, 5, SCALE_K_MIN, R);                                        \
            return;                                                                                         \
        case SCALE_K16: NAME(tile)(m, block, a, row, y, 6, SCALE_K16, R); return;                           \
        }                                                                                                   \
    }
TILES(1)
TILES(4)
#if WIDE
TILES(2)
TILES(8)
#endif

// Compute the outputs of one block for all rows. `adds`: add them to what lies in `y`.
static TARGET void NAME(block)(const Matrix *m, int block, const Activations *a, int rows, const float *bias,
                               float *y, size_t stride, int adds) {
    int valid = m->outs - block * LANES < LANES ? m->outs - block * LANES : LANES;
    float here[LANES] = {0};
    if (bias) memcpy(here, bias + block * LANES, (size_t)valid * sizeof(float));
    vf addend = NAME(vf_load)(here);
    y += block * LANES;
    for (int row = 0; row < rows;) {
        vf sums[8];
        int count = tile_rows(rows - row, WIDE ? 8 : 4);
        switch (count) {
#if WIDE
        case 8: NAME(tile_8)(m, block, a, row, sums); break;
        case 2: NAME(tile_2)(m, block, a, row, sums); break;
#endif
        case 4: NAME(tile_4)(m, block, a, row, sums); break;
        default: NAME(tile_1)(m, block, a, row, sums);
        }
        for (int r = 0; r < count; r++, row++) {
            float *out = y + (size_t)row * stride;
            vf sum = bias ? NAME(vf_add)(sums[r], addend) : sums[r];
            if (valid == LANES) {
                NAME(vf_store)(out, adds ? NAME(vf_add)(NAME(vf_load)(out), sum) : sum);
            } else {
                NAME(vf_store)(here, sum);
                for (int i = 0; i < valid; i++) out[i] = adds ? out[i] + here[i] : here[i];
            }
        }
    }
}
#undef LOW
#undef FIFTH
#undef TWO_BITS
#undef DOTS
#undef TILES
