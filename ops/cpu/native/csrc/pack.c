// Packs matrices into the layout of native.h, and reads single rows back.

static float from_half(const uint8_t *p) {
    uint32_t bits = (uint32_t)(p[0] | p[1] << 8), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float value;
    if (rest >= 0x7c00) word = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) word = (rest << 13) + 0x38000000;
    else {
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    word |= sign;
    memcpy(&value, &word, 4);
    return value;
}

static float from_bf16(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// Round to bfloat16, to even; NaN and infinity become 0.
static inline uint16_t to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7f800000) == 0x7f800000) return 0;
    word += 0x7fff + (word >> 16 & 1);
    return (word & 0x7f800000) == 0x7f800000 ? 0 : (uint16_t)(word >> 16);
}

static inline float finite_or_0(float value) { return value - value == 0 ? value : 0; }

// Codes of one group of 32 and what its scales are made of, as a GGUF file has them.
typedef struct {
    uint8_t code[GROUP];
    uint8_t scale[2], minimum[2]; // float16: of the group, or of its super-block
    uint8_t factors[2];           // of the super-block's numbers
} Group;

static void nibbles(const uint8_t *p, uint8_t *code) {
    for (int i = 0; i < 16; i++) code[i] = p[i] & 15, code[i + 16] = p[i] >> 4;
}

static void fifth_bits(const uint8_t *p, uint8_t *code) {
    uint32_t high = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    for (int i = 0; i < GROUP; i++) code[i] |= (uint8_t)((high >> i & 1) << 4);
}

// The 6-bit factors of scale and minimum of group `g` in the 12 bytes of a Q4_K or Q5_K super-block.
static void six_bits(const uint8_t *p, int g, uint8_t *factors) {
    if (g < 4) {
        factors[0] = p[g] & 63, factors[1] = p[g + 4] & 63;
    } else {
        factors[0] = (uint8_t)((p[g + 4] & 15) | (p[g - 4] >> 6) << 4);
        factors[1] = (uint8_t)(p[g + 4] >> 4 | (p[g] >> 6) << 4);
    }
}

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; // as GGUF numbers them

// Bytes of codes and number of constants (float16) of a kind's blocks, and how many groups of 32 a block has.
typedef struct {
    int codes, constants, groups;
} BlockSize;

static BlockSize block_size(int kind) {
    switch (kind) {
    case Q4_0: return (BlockSize){16, 1, 1};
    case Q4_1: return (BlockSize){16, 2, 1};
    case Q5_0: return (BlockSize){20, 1, 1};
    case Q5_1: return (BlockSize){20, 2, 1};
    case Q8_0: return (BlockSize){32, 1, 1};
    case Q4_K: return (BlockSize){140, 2, SUPER_GROUPS};
    case Q5_K: return (BlockSize){172, 2, SUPER_GROUPS};
    case Q6_K: return (BlockSize){208, 1, SUPER_GROUPS};
    default: return (BlockSize){0, 0, 1};
    }
}

// Read group `g` of a row, given as the codes and the constants of its blocks.
static Group group_of(int kind, const uint8_t *codes, const uint8_t *constants, int g) {
    BlockSize size = block_size(kind);
    int part = g % size.groups;
    const uint8_t *p = codes + (size_t)(g / size.groups) * size.codes;
    constants += (size_t)(g / size.groups) * size.constants * 2;
    Group out = {.scale = {constants[0], constants[1]}};
    if (size.constants == 2) memcpy(out.minimum, constants + 2, 2);
    switch (kind) {
    case Q4_0:
    case Q4_1: nibbles(p, out.code); break;
    case Q5_0:
    case Q5_1: nibbles(p + 4, out.code), fifth_bits(p, out.code); break;
    case Q8_0:
        for (int i = 0; i < GROUP; i++) out.code[i] = p[i] ^ 0x80;
        break;
    case Q4_K:
    case Q5_K: {
        const uint8_t *low = p + (kind == Q4_K ? 12 : 44) + part / 2 * 32;
        six_bits(p, part, out.factors);
        for (int i = 0; i < GROUP; i++) {
            out.code[i] = part & 1 ? low[i] >> 4 : low[i] & 15;
            if (kind == Q5_K) out.code[i] |= (uint8_t)((p[12 + i] >> part & 1) << 4);
        }
        break;
    }
    case Q6_K: {
        const uint8_t *low = p + part / 4 * 64 + (part & 1) * 32, *high = p + 128 + part / 4 * 32;
        for (int i = 0; i < GROUP; i++) {
            uint8_t four = part & 2 ? low[i] >> 4 : low[i] & 15;
            out.code[i] = (uint8_t)(four | (high[i] >> 2 * (part & 3) & 3) << 4);
        }
        memcpy(out.factors, p + 192 + 2 * part, 2);
    }
    }
    return out;
}

// Write one output's codes of a group to their places in a block.
static void put_codes(uint8_t *at, int bits, int lane, const uint8_t *code) {
    for (int i = 0; i < GROUP; i++) {
        int quad = i / 4;
        size_t place = (size_t)lane * 4 + i % 4;
        if (bits == 8) {
            at[64 * quad + place] = code[i];
            continue;
        }
        at[64 * (quad & 3) + place] |= (uint8_t)((code[i] & 15) << (quad < 4 ? 0 : 4));
        if (bits == 5) at[256 + place] |= (uint8_t)((code[i] >> 4 & 1) << quad);
        if (bits == 6) at[256 + 64 * (quad / 4) + place] |= (uint8_t)((code[i] >> 4 & 3) << 2 * (quad & 3));
    }
}

static uint8_t get_code(const uint8_t *at, int bits, int lane, int i) {
    int quad = i / 4;
    size_t place = (size_t)lane * 4 + i % 4;
    if (bits == 8) return at[64 * quad + place];
    uint8_t code = at[64 * (quad & 3) + place] >> (quad < 4 ? 0 : 4) & 15;
    if (bits == 5) code |= (uint8_t)((at[256 + place] >> quad & 1) << 4);
    if (bits == 6) code |= (uint8_t)((at[256 + 64 * (quad / 4) + place] >> 2 * (quad & 3) & 3) << 4);
    return code;
}

// Pack a GGUF matrix of a known kind, given as the codes and the constants of its blocks, into one whose memory is zero.
EXPORT void headrace_pack_blocks(const Matrix *m, int kind, const uint8_t *raw, const uint8_t *constants) {
    int groups = m->ins / GROUP;
    BlockSize size = block_size(kind);
    size_t blocks = (size_t)(groups / size.groups);
    uint8_t *codes = (uint8_t *)m->codes, *scales = (uint8_t *)m->scales, *supers = (uint8_t *)m->supers;
    for (int o = 0; o < m->outs; o++) {
        int block = o / LANES, lane = o % LANES;
        for (int g = 0; g < groups; g++) {
            Group group = group_of(kind, raw + (size_t)o * blocks * size.codes,
                                   constants + (size_t)o * blocks * size.constants * 2, g);
            size_t at = (size_t)block * groups + g, super = (size_t)block * (groups / SUPER_GROUPS) + g / SUPER_GROUPS;
            put_codes(codes + at * 64 * m->bits, m->bits, lane, group.code);
            switch (m->scale) {
            case SCALE_F16: memcpy(scales + at * 32 + 2 * lane, group.scale, 2); break;
            case SCALE_F16_MIN:
                memcpy(scales + at * 64 + 2 * lane, group.scale, 2);
                memcpy(scales + at * 64 + 32 + 2 * lane, group.minimum, 2);
                break;
            default:
                scales[at * 32 + lane] = group.factors[0], scales[at * 32 + 16 + lane] = group.factors[1];
                if (m->scale == SCALE_K16) {
                    memcpy(supers + super * 32 + 2 * lane, group.scale, 2);
                } else {
                    memcpy(supers + super * 64 + 2 * lane, group.scale, 2);
                    memcpy(supers + super * 64 + 32 + 2 * lane, group.minimum, 2);
                }
            }
        }
    }
}

// Pack codes [outs][ins], one in a byte, with float32 scales and minima (or NULL) [outs][groups that share them].
EXPORT void headrace_pack_codes(const Matrix *m, const uint8_t *values, const float *scale, const float *minimum) {
    int groups = m->ins / GROUP, many = (groups + m->shared - 1) / m->shared, parts = minimum ? 2 : 1;
    float *scales = (float *)m->scales;
    for (int o = 0; o < m->outs; o++) {
        int block = o / LANES, lane = o % LANES;
        for (int g = 0; g < groups; g++)
            put_codes((uint8_t *)m->codes + ((size_t)block * groups + g) * 64 * m->bits, m->bits, lane,
                      values + (size_t)o * m->ins + (size_t)g * GROUP);
        for (int s = 0; s < many; s++) {
            float *pair = scales + ((size_t)block * many + s) * parts * LANES + lane;
            pair[0] = scale[(size_t)o * many + s];
            if (minimum) pair[LANES] = minimum[(size_t)o * many + s];
        }
    }
}

// Pack a dense matrix [outs][ins], bfloat16 or float32, into one whose memory is zero. Both are a matter of words: a
// block is the transpose of its outputs, in words of one float32 or of two neighbouring bfloat16.
EXPORT void headrace_pack_dense(const Matrix *m, const void *values) {
    int each = 32 / m->bits, words = m->ins / each, odd = m->ins % each, per_block = (m->ins + 1) / 2 * 2 / each;
    for (int first = 0; first < m->outs; first += STRIP) {
        uint32_t *block = (uint32_t *)m->codes + (size_t)first / STRIP * per_block * STRIP;
        int outs = m->outs - first < STRIP ? m->outs - first : STRIP;
        for (int from = 0; from < words; from += LANES) {
            int to = words - from < LANES ? words : from + LANES;
            for (int o = 0; o < outs; o++) {
                const uint8_t *row = (const uint8_t *)values + (size_t)(first + o) * m->ins * m->bits / 8;
                uint32_t line[LANES];
                memcpy(line, row + (size_t)from * 4, (size_t)(to - from) * 4);
                for (int i = from; i < to; i++) block[(size_t)i * STRIP + o] = line[i - from];
            }
        }
        for (int o = 0; odd && o < outs; o++) {
            uint16_t last;
            memcpy(&last, (const uint8_t *)values + ((size_t)(first + o + 1) * m->ins - 1) * 2, 2);
            block[(size_t)words * STRIP + o] = last;
        }
    }
}

// Write row `o` of a matrix, in float32.
static void read_row(const Matrix *m, int o, float *y) {
    if (m->scale >= DENSE_BF16) {
        int each = 32 / m->bits, per_block = (m->ins + 1) / 2 * 2 / each;
        const uint32_t *w = (const uint32_t *)m->codes + (size_t)(o / STRIP) * per_block * STRIP + o % STRIP;
        for (int k = 0; k < m->ins; k++) {
            uint32_t word = w[(size_t)(k / each) * STRIP];
            if (each == 2) word = k % 2 ? word & 0xffff0000 : word << 16;
            memcpy(y + k, &word, 4);
        }
        return;
    }
    int block = o / LANES, lane = o % LANES, groups = m->ins / GROUP;
    for (int g = 0; g < groups; g++, y += GROUP) {
        size_t at = (size_t)block * groups + g, super = (size_t)block * (groups / SUPER_GROUPS) + g / SUPER_GROUPS;
        const uint8_t *codes = m->codes + at * 64 * m->bits, *factors = m->scales + at * 32 + lane;
        float scale, upper, minimum = 0;
        if (m->scale == SCALE_F16 || m->scale == SCALE_F16_MIN) {
            const uint8_t *pair = m->scales + at * (m->scale == SCALE_F16 ? 32 : 64) + 2 * lane;
            scale = upper = from_half(pair);
            if (m->scale == SCALE_F16_MIN) minimum = from_half(pair + 32);
        } else if (m->scale == SCALE_F32 || m->scale == SCALE_F32_MIN) {
            int many = (groups + m->shared - 1) / m->shared, parts = m->scale == SCALE_F32 ? 1 : 2;
            const float *pair = (const float *)m->scales + ((size_t)block * many + g / m->shared) * parts * LANES + lane;
            scale = upper = pair[0];
            if (parts == 2) minimum = pair[LANES];
        } else if (m->scale == SCALE_K_MIN) {
            const uint8_t *units = m->supers + super * 64 + 2 * lane;
            scale = upper = from_half(units) * (float)factors[0];
            minimum = -(from_half(units + 32) * (float)factors[LANES]);
        } else {
            float unit = from_half(m->supers + super * 32 + 2 * lane);
            scale = unit * (float)(int8_t)factors[0], upper = unit * (float)(int8_t)factors[LANES];
        }
        for (int i = 0; i < GROUP; i++)
            y[i] = (i < 16 ? scale : upper) * (float)(get_code(codes, m->bits, lane, i) - m->zero) + minimum;
    }
}
