// What is computed for each row by itself: norms, activation codes, silu, rotations. Compiled for each instruction set.

INLINE float NAME(total)(vf v) { // of the lanes, in one fixed order
    float lane[LANES];
    NAME(vf_store)(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE float NAME(largest)(vf v) {
    float lane[LANES], most;
    NAME(vf_store)(lane, v);
    most = lane[0];
    for (int i = 1; i < LANES; i++) most = lane[i] > most || lane[i] != lane[i] ? lane[i] : most;
    return most;
}

// e^x to a relative 2^-22, for x up to 88; 0 below -87. Cody and Waite's reduction and a polynomial.
INLINE vf NAME(vf_exp)(vf x) {
    vf least = NAME(vf_set1)(-87.0f), kept = NAME(vf_max)(least, NAME(vf_min)(NAME(vf_set1)(88.0f), x));
    vi power = NAME(vf_round)(NAME(vf_mul)(kept, NAME(vf_set1)(1.44269504f)));
    vf whole = NAME(vi_float)(power);
    vf r = NAME(vf_fma)(whole, NAME(vf_set1)(-0.693359375f), kept);
    r = NAME(vf_fma)(whole, NAME(vf_set1)(2.12194440e-4f), r);
    vf p = NAME(vf_set1)(1.9875691500e-4f);
    p = NAME(vf_fma)(p, r, NAME(vf_set1)(1.3981999507e-3f));
    p = NAME(vf_fma)(p, r, NAME(vf_set1)(8.3334519073e-3f));
    p = NAME(vf_fma)(p, r, NAME(vf_set1)(4.1665795894e-2f));
    p = NAME(vf_fma)(p, r, NAME(vf_set1)(1.6666665459e-1f));
    p = NAME(vf_fma)(p, r, NAME(vf_set1)(5.0000001201e-1f));
    p = NAME(vf_fma)(p, NAME(vf_mul)(r, r), NAME(vf_add)(r, NAME(vf_set1)(1.0f)));
    return NAME(vf_above)(NAME(vf_scale2)(p, power), x, least);
}

// Quantise row `row` of `rows` in groups of 32, in an order unless that is NULL: code = round(x * 127 / largest). A group
// that holds NaN or infinity scales by NaN.
static TARGET void NAME(quantise)(const float *all, const int32_t *order, const Activations *a, int row, int rows) {
    int count, groups = a->ins / GROUP, start = tile_start(row, rows, WIDE ? 8 : 4, &count), r = row - start;
    int8_t *codes = a->codes + (size_t)start * a->ins + r * GROUP;
    size_t at = (size_t)start * groups + r;
    for (int g = 0; g < groups; g++, codes += count * GROUP, at += count) {
        const float *x = all + g * GROUP;
        float gathered[GROUP];
        if (order) {
            for (int i = 0; i < GROUP; i++) gathered[i] = all[order[g * GROUP + i]];
            x = gathered;
        }
        uint32_t most = 0, word[GROUP];
        memcpy(word, x, sizeof word);
        for (int i = 0; i < GROUP; i++) {
            uint32_t size = word[i] & 0x7fffffff;
            most = size > most ? size : most;
        }
        float largest;
        memcpy(&largest, &most, 4);
        int is_finite = most < 0x7f800000;
        // Below 2^-120, 127 / largest could overflow; such numbers count as 0.
        float inverse = is_finite && largest > 7.5e-37f ? 127.0f / largest : 0.0f;
        int32_t code[GROUP], half[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            float shifted = (is_finite ? x[i] * inverse : 0.0f) + 12582912.0f; // 1.5 * 2^23 rounds to integers
            memcpy(&word[i], &shifted, 4);
            code[i] = (int32_t)(word[i] - 0x4b400000u);
        }
        for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)code[i];
        for (int i = 0; i < GROUP / 2; i++) half[0] += code[i], half[1] += code[i + GROUP / 2];
        float scale = is_finite ? (inverse != 0.0f ? largest / 127.0f : 0.0f) : NAN;
        a->scales[at] = scale, a->sums[at] = scale * (float)(half[0] + half[1]);
        a->halves[2 * at] = half[0], a->halves[2 * at + 1] = half[1];
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight
static TARGET void NAME(norm)(const float *x, const float *weight, int size, float eps, float *y) {
    vf sum = NAME(vf_set1)(0);
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf v = NAME(vf_load)(x + i);
        sum = NAME(vf_fma)(v, v, sum);
    }
    float squares = NAME(total)(sum);
    for (; i < size; i++) squares += x[i] * x[i];
    float inverse = 1.0f / sqrtf(squares / (float)size + eps);
    vf all = NAME(vf_set1)(inverse);
    for (i = 0; i + LANES <= size; i += LANES)
        NAME(vf_store)(y + i, NAME(vf_mul)(NAME(vf_mul)(NAME(vf_load)(x + i), all), NAME(vf_load)(weight + i)));
    for (; i < size; i++) y[i] = x[i] * inverse * weight[i];
}

// y = silu(gate) * up
static TARGET void NAME(silu_mul)(const float *gate, const float *up, int size, float *y) {
    vf zero = NAME(vf_set1)(0), one = NAME(vf_set1)(1);
    for (int i = 0; i < size; i += LANES) {
        float g[LANES] = {0}, u[LANES] = {0};
        int valid = size - i < LANES ? size - i : LANES;
        if (valid < LANES)
            memcpy(g, gate + i, (size_t)valid * sizeof(float)), memcpy(u, up + i, (size_t)valid * sizeof(float));
        vf x = NAME(vf_load)(valid < LANES ? g : gate + i), v = NAME(vf_load)(valid < LANES ? u : up + i);
        vf silu = NAME(vf_div)(x, NAME(vf_add)(one, NAME(vf_exp)(NAME(vf_sub)(zero, x))));
        vf result = NAME(vf_mul)(silu, v);
        if (valid == LANES) {
            NAME(vf_store)(y + i, result);
        } else {
            NAME(vf_store)(g, result);
            memcpy(y + i, g, (size_t)valid * sizeof(float));
        }
    }
}

// y = gelu(x) by tanh, which is x / (1 + e^-2z) with z = sqrt(2 / pi) (x + 0.044715 x^3); `y` may be `x`.
static TARGET void NAME(gelu_tanh)(const float *x, int size, float *y) {
    vf one = NAME(vf_set1)(1), cubic = NAME(vf_set1)(0.044715f), factor = NAME(vf_set1)(-1.59576912f);
    for (int i = 0; i < size; i += LANES) {
        float some[LANES] = {0};
        int valid = size - i < LANES ? size - i : LANES;
        if (valid < LANES) memcpy(some, x + i, (size_t)valid * sizeof(float));
        vf v = NAME(vf_load)(valid < LANES ? some : x + i);
        vf z = NAME(vf_mul)(NAME(vf_mul)(factor, v), NAME(vf_fma)(NAME(vf_mul)(cubic, v), v, one));
        vf result = NAME(vf_div)(v, NAME(vf_add)(one, NAME(vf_exp)(z)));
        NAME(vf_store)(valid < LANES ? some : y + i, result);
        if (valid < LANES) memcpy(y + i, some, (size_t)valid * sizeof(float));
    }
}

// Rotate one head in place: its first half x with its second half y.
static TARGET void NAME(rotate)(float *restrict x, float *restrict y, const float *restrict cos,
                                const float *restrict sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}
