// Products of rows that are grouped by expert, and the weighted sums of their results.
//
// All groups share one loop, so that no thread waits between one expert and the next. A group's rows lie in tiles of
// their own, one group's behind the other's; every result is computed as a product of that group alone would be.

typedef struct {
    Context *c;
    const Linear *const *linears; // [groups]
    const int32_t *starts;        // [groups + 1] first row of each group
    const int64_t *gather;        // [rows] row of `x`; NULL for the same
    const float *x;
    float *y;
    Activations a;
    int groups, blocks, chunks;
} GroupedJob;

// Return what a group's rows are in the activations of all.
static Activations of_group(const GroupedJob *j, int group) {
    size_t first = (size_t)j->starts[group], ins = (size_t)j->a.ins, groups = ins / GROUP;
    Activations a = j->a;
    if (a.floats) a.floats += first * ((ins + 1) / 2 * 2);
    if (a.codes) a.codes += first * ins, a.scales += first * groups, a.sums += first * groups, a.halves += first * groups * 2;
    return a;
}

static void do_gathered(void *argument, int chunk, int worker) {
    GroupedJob *j = argument;
    (void)worker;
    int rows = j->starts[j->groups], from = edge(rows, j->chunks, chunk), to = edge(rows, j->chunks, chunk + 1);
    for (int group = 0; group < j->groups; group++) {
        int first = j->starts[group], last = j->starts[group + 1];
        Activations a = of_group(j, group);
        for (int row = first > from ? first : from; row < (last < to ? last : to); row++) {
            const float *x = j->x + (size_t)(j->gather ? j->gather[row] : row) * (size_t)j->a.ins;
            prepare_row(j->c->kernels, j->linears[group], &a, x, row - first, last - first);
        }
    }
}

static int blocks_in(const Linear *l) {
    int blocks = 0;
    for (int i = 0; i < l->count; i++) blocks += blocks_of(l->matrices + i);
    return blocks;
}

static void do_grouped(void *argument, int chunk, int worker) {
    GroupedJob *j = argument;
    (void)worker;
    int from = edge(j->blocks, j->chunks, chunk), to = edge(j->blocks, j->chunks, chunk + 1), before = 0;
    for (int group = 0; group < j->groups && before < to; group++) {
        const Linear *l = j->linears[group];
        int first = j->starts[group], rows = j->starts[group + 1] - first, blocks = rows ? blocks_in(l) : 0;
        if (before + blocks > from && blocks) {
            Activations a = of_group(j, group);
            ProductJob product = {j->c, l, &a, j->y + (size_t)first * l->outs, (size_t)l->outs, rows, 0, blocks, 0};
            product_blocks(&product, from > before ? from - before : 0, to < before + blocks ? to - before : blocks);
        }
        before += blocks;
    }
}

// y [rows][outs] = x W^T + bias, where rows `starts[g]` .. `starts[g + 1]` - 1 are multiplied by `linears[g]`; weights
// of groups without rows are not read. All have the same sizes. -1 without memory.
EXPORT int headrace_grouped(Context *c, const Linear *const *linears, int groups, const int32_t *starts,
                            const int64_t *gather, const float *x, float *y) {
    GroupedJob j = {.c = c, .linears = linears, .starts = starts, .gather = gather, .x = x, .y = y, .groups = groups,
                    .a.ins = linears[0]->ins};
    int reads = 0, orders = 1, rows = starts[groups];
    for (int group = 0; group < groups; group++) {
        if (starts[group + 1] == starts[group]) continue;
        reads |= linears[group]->reads;
        orders = linears[group]->count_orders > orders ? linears[group]->count_orders : orders;
        j.blocks += blocks_in(linears[group]);
    }
    if (make_room(c, &j.a, reads, orders, rows)) return -1;
    j.chunks = chunks_of(c, rows, 1);
    pool_run(c->pool, do_gathered, &j, j.chunks);
    j.chunks = chunks_of(c, j.blocks, 12);
    pool_run(c->pool, do_grouped, &j, j.chunks);
    return 0;
}

typedef struct {
    const float *y, *weights;
    const int64_t *places;
    float *sum;
    int rows, count, size, chunks;
} SumJob;

static void do_sums(void *argument, int chunk, int worker) {
    SumJob *j = argument;
    (void)worker;
    for (int row = edge(j->rows, j->chunks, chunk); row < edge(j->rows, j->chunks, chunk + 1); row++) {
        float *sum = j->sum + (size_t)row * j->size;
        for (int k = 0; k < j->count; k++) {
            size_t pair = (size_t)row * j->count + k;
            const float *y = j->y + (size_t)j->places[pair] * j->size;
            float weight = j->weights[pair];
            for (int i = 0; i < j->size; i++) sum[i] = k ? sum[i] + weight * y[i] : weight * y[i];
        }
    }
}

// sum [rows][size] = the rows `places` [rows][count] of y, times `weights` [rows][count], added in order.
EXPORT void headrace_weighted_sums(Context *c, const float *y, const int64_t *places, const float *weights, int rows,
                                   int count, int size, float *sum) {
    SumJob j = {y, weights, places, sum, rows, count, size, chunks_of(c, rows, 1)};
    pool_run(c->pool, do_sums, &j, j.chunks);
}
