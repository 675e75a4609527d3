// Attention over pages, compiled for each instruction set with keys and values in bfloat16, then in float32 (`KV_FLOATS`).
//
// A query's result is computed alike, whoever else is in the step: scores of 16 positions at a time, which are counted
// from the beginning of the sequence; their largest; weights and their sum; then the values, position by position.
// Positions that a query does not see have the weight 0. Keys lie transposed in their pages, [head_dim][page_size], so
// that a register holds 16 positions.

#undef KV
#undef stored
#undef vf_stored
#undef from_stored
#undef to_stored
#if KV_FLOATS
#define KV(x) NAME(x##_floats)
#define stored float
#define vf_stored NAME(vf_load)
#define from_stored(x) (x)
#define to_stored finite_or_0
#else
#define KV(x) NAME(x##_halves)
#define stored uint16_t
#define vf_stored NAME(vf_bf16)
#define from_stored from_bf16
#define to_stored to_bf16
#endif

// Rotate the queries and keys of one token, scale the queries, and store the keys and values in their page, 0 for
// what is not finite; of a layer without keys and values of its own, the queries are all.
static TARGET void KV(place)(const Heads *h, const Step *step, int layer, int token, const float *q_norm,
                             const float *k_norm, void *kv, float *qkv) {
    int size = h->head_dim, half = size / 2, keys = h->kv_heads;
    const float *cos = h->cos + step->positions[token] * half, *sin = h->sin + step->positions[token] * half;
    for (int head = 0; head < h->heads + (h->only_queries ? 0 : keys); head++) {
        float *x = qkv + (size_t)head * size;
        const float *weight = head < h->heads ? q_norm : k_norm;
        if (weight) NAME(norm)(x, weight, size, h->eps, x);
        NAME(rotate)(x, x + half, cos, sin, half);
        if (head < h->heads)
            for (int i = 0; i < size; i++) x[i] *= h->scale;
    }
    if (h->only_queries) return;
    const float *new = qkv + (size_t)h->heads * size;
    if (step->given && step->given[2 * token])
        new = (const float *)(intptr_t)(step->given[2 * token] + layer * step->given[2 * token + 1]);
    int64_t page = step->slots[token] / h->page_size, place = step->slots[token] % h->page_size;
    stored *first = (stored *)kv + (size_t)page * 2 * keys * size * h->page_size;
    for (int head = 0; head < keys; head++) {
        stored *key = first + (size_t)head * size * h->page_size + place;
        stored *value = first + ((size_t)(keys + head) * h->page_size + place) * size;
        for (int i = 0; i < size; i++) {
            key[(size_t)i * h->page_size] = to_stored(new[head * size + i]);
            value[i] = to_stored(new[(keys + head) * size + i]);
        }
    }
}

// Scores of `n` queries, `apart` floats apart, with 16 keys whose elements lie `stride` apart.
INLINE void KV(scores)(const float *q, size_t apart, const stored *keys, size_t stride, int size, float *y,
                       size_t row, const int n) {
    vf sum[4], other[4]; // of even and of odd dimensions, so that one does not wait for itself
    UNROLL for (int i = 0; i < n; i++) sum[i] = other[i] = NAME(vf_set1)(0);
    for (int d = 0; d < size; d += 2) {
        vf key = vf_stored(keys + (size_t)d * stride), next = vf_stored(keys + (size_t)(d + 1) * stride);
        UNROLL for (int i = 0; i < n; i++) {
            sum[i] = NAME(vf_fma)(key, NAME(vf_set1)(q[(size_t)i * apart + d]), sum[i]);
            other[i] = NAME(vf_fma)(next, NAME(vf_set1)(q[(size_t)i * apart + d + 1]), other[i]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) 
        NAME(vf_store)(y + (size_t)i * row, NAME(vf_add)(sum[i], other[i]));
}

// Values of 16 * `wide` dimensions from `d` on, weighted, for `n` queries.
INLINE void KV(weighted_at)(const float *weights, size_t row, const stored *const *pages, int d, int first, int last,
                            int page_size, int size, float *y, size_t apart, const int n, const int wide) {
    vf sum[4][4];
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int w = 0; w < wide; w++) sum[i][w] = NAME(vf_set1)(0);
    for (int at = first; at < last;) {
        const stored *value = pages[at / page_size] + (size_t)(at % page_size) * size + d;
        int stop = (at / page_size + 1) * page_size;
        for (stop = stop < last ? stop : last; at < stop; at++, value += size) {
            vf here[4];
            UNROLL for (int w = 0; w < wide; w++) here[w] = vf_stored(value + LANES * w);
            UNROLL for (int i = 0; i < n; i++) {
                vf weight = NAME(vf_set1)(weights[(size_t)i * row + at]);
                UNROLL for (int w = 0; w < wide; w++) sum[i][w] = NAME(vf_fma)(here[w], weight, sum[i][w]);
            }
        }
    }
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int w = 0; w < wide; w++) NAME(vf_store)(y + (size_t)i * apart + LANES * w, sum[i][w]);
}

#define FOR_QUERIES(total, CALL)          \
    for (int i = 0; i < (total);) {       \
        int left_ = (total) - i;          \
        if (left_ >= 4) { CALL(4) i += 4; } \
        else if (left_ == 3) { CALL(3) i += 3; } \
        else if (left_ == 2) { CALL(2) i += 2; } \
        else { CALL(1) i += 1; }          \
    }

// Attend from `count` queries at consecutive positions and the query heads of one key head. Positions here count from
// the row's first page on, `lead` of them before it up to a multiple of 16 in the sequence.
static TARGET void KV(attend)(const Heads *h, const Step *step, const Queries *block, int skip, int count, int head,
                              const void *cache, const float *q, float *o, Scratch *s) {
    const stored *kv = cache, **pages = (const stored **)s->pages;
    stored *gathered = s->keys;
    int size = h->head_dim, share = h->heads / h->kv_heads, page_size = h->page_size;
    size_t plane = (size_t)page_size * size;
    int64_t begin = block->position + skip, end = begin + count;
    int64_t seen = h->window && begin + 1 > h->window ? begin + 1 - h->window : 0;
    int lead = (int)(block->offset % LANES);
    // Tiles of 16 positions that the queries see, in positions from `lead` before the first page on.
    int first = (int)((seen + lead) / LANES * LANES), last = (int)((end + lead + LANES - 1) / LANES * LANES);
    int wide = last - first;
    size_t row = (size_t)wide;
    float *scores = s->scores;
    int total = count * share;
    size_t width = token_width(h);
    for (int i = 0; i < total; i++)
        memcpy(s->queries + (size_t)i * size, q + (size_t)(i / share) * width + ((size_t)head * share + i % share) * size,
               sizeof(float) * size);
    for (int tile = first; tile < last; tile += LANES) {
        const stored *keys;
        size_t stride = LANES;
        if (page_size % LANES == 0) {
            int64_t page = step->pages[block->table + tile / page_size];
            keys = kv + ((size_t)page * 2 * h->kv_heads + head) * plane + tile % page_size;
            stride = (size_t)page_size;
        } else {
            for (int lane = 0; lane < LANES; lane++) {
                int64_t at = tile + lane - lead;
                int is_kept = at >= 0 && at < end;
                int64_t page = is_kept ? step->pages[block->table + at / page_size] : 0;
                const stored *key =
                    kv + ((size_t)page * 2 * h->kv_heads + head) * plane + (is_kept ? at % page_size : 0);
                for (int d = 0; d < size; d++) gathered[d * LANES + lane] = is_kept ? key[(size_t)d * page_size] : 0;
            }
            keys = gathered;
        }
#define CALL(N) KV(scores)(s->queries + (size_t)i * size, (size_t)size, keys, stride, size, \
                             scores + (size_t)i * row + (tile - first), row, N);
        FOR_QUERIES(total, CALL)
#undef CALL
    }
    for (int i = 0; i < total; i++) {
        int64_t here = begin + i / share;
        int64_t from = h->window && here + 1 > h->window ? here + 1 - h->window : 0;
        vi least = NAME(vi_set1)((int)from + lead), most = NAME(vi_set1)((int)here + lead);
        float *line = scores + (size_t)i * row;
        vf top = NAME(vf_set1)(-INFINITY), none = top, zero = NAME(vf_set1)(0);
        for (int at = 0; at < wide; at += LANES)
            top = NAME(vf_max)(top, NAME(vf_within)(NAME(vf_load)(line + at), NAME(vi_from)(first + at), least, most, none));
        vf largest = NAME(vf_set1)(NAME(largest)(top)), sum = zero;
        for (int at = 0; at < wide; at += LANES) {
            vf weight = NAME(vf_exp)(NAME(vf_sub)(NAME(vf_load)(line + at), largest));
            weight = NAME(vf_within)(weight, NAME(vi_from)(first + at), least, most, zero);
            NAME(vf_store)(line + at, weight);
            sum = NAME(vf_add)(sum, weight);
        }
        s->inverse[i] = 1.0f / NAME(total)(sum);
    }
    // Values, from the first position of the first page that any query sees.
    int from = first > lead ? first - lead : 0, shift = lead - first;
    for (int page = from / page_size; page <= (int)((end - 1) / page_size); page++)
        pages[page] = kv + ((size_t)step->pages[block->table + page] * 2 + 1) * h->kv_heads * plane + head * plane;
    for (int d = 0; d < size;) {
        float *y = s->results + d;
        if (d + 4 * LANES <= size) {
#define CALL(N) KV(weighted_at)(scores + (size_t)i * row + shift, row, pages, d, from, (int)end, page_size, size, \
                                  y + (size_t)i * size, (size_t)size, N, 4);
            FOR_QUERIES(total, CALL)
            d += 4 * LANES;
        } else if (d + LANES <= size) {
#undef CALL
#define CALL(N) KV(weighted_at)(scores + (size_t)i * row + shift, row, pages, d, from, (int)end, page_size, size, \
                                  y + (size_t)i * size, (size_t)size, N, 1);
            FOR_QUERIES(total, CALL)
            d += LANES;
        } else {
#undef CALL
            for (int i = 0; i < total; i++) {
                float sum = 0;
                for (int at = from; at < end; at++)
                    sum = fmaf(scores[(size_t)i * row + shift + at],
                               from_stored(pages[at / page_size][(size_t)(at % page_size) * size + d]), sum);
                y[(size_t)i * size] = sum;
            }
            d += 1;
        }
    }
    for (int i = 0; i < total; i++) {
        float *out = o + ((size_t)(i / share) * h->heads + (size_t)head * share + i % share) * size;
        for (int d = 0; d < size; d++) out[d] = s->results[(size_t)i * size + d] * s->inverse[i];
    }
}
