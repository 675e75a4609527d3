// A whole layer of attention and a gated feed, which native.c includes: one call for a layer, since what a call costs its
// caller is near what one row takes in a small model.

typedef struct {
    const float *norm, *q_norm, *k_norm; // of the attention's input, of each query and key head; the latter may be NULL
    const Linear *qkv, *o;
    const float *feed_norm;
    const Linear *gate_up, *down;
} Layer;

// x += W_o attention(norm(x)); x += W_down (silu(gate) * up) of norm(x). x [rows][size], float32. -1 without memory.
EXPORT int headrace_layer(Context *c, const Heads *h, const Step *step, const Layer *l, int layer, float *x, void *kv,
                          int rows) {
    size_t wide = (size_t)(l->o->ins > l->down->ins ? l->o->ins : l->down->ins);
    float *result = buffer(c, RESULTS, (size_t)rows * wide * 4);
    if (!result) return -1;
    if (headrace_attend(c, h, step, layer, x, NULL, x, l->norm, l->qkv, l->q_norm, l->k_norm, kv, result, rows)) return -1;
    if (headrace_linear(c, l->o, result, rows, x, 1)) return -1;
    if (headrace_feed(c, x, NULL, x, l->feed_norm, h->eps, l->gate_up, result, rows)) return -1;
    return headrace_linear(c, l->down, result, rows, x, 1);
}
