// The CPU kernels' plain C interface: products of packed matrices, the halves of a layer, and the threads that share
// them. The only file to compile; it includes the rest, the kernels once for each instruction set.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "pool.c"

#define UNROLL _Pragma("GCC unroll 16")
#define EXPORT __attribute__((visibility("default")))
#include "pack.c"

enum { MOST_QUERIES = 8, SCORE_FLOATS = 1 << 15 };
enum { MOST_ROWS = 12, SPAN = 96 }; // of a tile; rows that a dense block multiplies by before the next block does

// Rows are computed in tiles of 1, 2, 4, 6, 8 or 12. Return how many the next one has, with `left` rows to go.
static int tile_rows(int left, int widest) {
    if (left >= widest) return widest;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 && widest > 4 ? 2 : 1;
}

// Return the first row of the tile in which `row` lies, and how many it has.
static int tile_start(int row, int rows, int widest, int *count) {
    int start = row < rows / widest * widest ? row / widest * widest : rows / widest * widest;
    while (start + (*count = tile_rows(rows - start, widest)) <= row) start += *count;
    return start;
}

// Memory of one thread for attention.
typedef struct {
    float *queries, *results, *inverse, *scores;
    void *keys;
    const void **pages;
    void *all;
    size_t bytes;
} Scratch;

// Kernels of one instruction set.
typedef struct {
    void (*block)(const Matrix *, int, const Activations *, int, const float *, float *, size_t, int);
    void (*dense)(const Matrix *, int, int, const Activations *, int, const float *, float *, size_t, int);
    void (*quantise)(const float *, const int32_t *, const Activations *, int, int);
    void (*norm)(const float *, const float *, int, float, float *);
    void (*silu_mul)(const float *, const float *, int, float *);
    void (*gelu_tanh)(const float *, int, float *);
    void (*tile_floats)(const float *, const Activations *, int, int, int);
    // With keys and values in bfloat16 and in float32:
    void (*place[2])(const Heads *, const Step *, int, int, const float *, const float *, void *, float *);
    void (*attend[2])(const Heads *, const Step *, const Queries *, int, int, int, const void *, const float *, float *,
                      Scratch *);
} Kernels;

#define KERNELS(dense, tile_floats)                                                                            \
    {NAME(block), NAME(dense), NAME(quantise), NAME(norm), NAME(silu_mul), NAME(gelu_tanh), NAME(tile_floats), \
     {NAME(place_halves), NAME(place_floats)}, {NAME(attend_halves), NAME(attend_floats)}}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(x) x##_avx2
#define VNNI 0
#define WIDE 0
#define DENSE_ROWS 6
#include "simd_avx2.h"
#include "kernels.h"
static const Kernels avx2 = KERNELS(dense, tile_floats);
#include "forget.h"

#define NEW_COMPILER (__GNUC__ >= 11 || __clang_major__ >= 12) // knows AVX-VNNI and AVX512-BF16
#if NEW_COMPILER
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define NAME(x) x##_avxvnni
#define VNNI 1
#define WIDE 0
#define DENSE_ROWS 6
#include "simd_avx2.h"
#include "kernels.h"
static const Kernels avxvnni = KERNELS(dense, tile_floats);
#include "forget.h"
#endif

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,prefer-vector-width=512"
#define TARGET __attribute__((target(AVX512)))
#define PAIRS_TARGET __attribute__((target(AVX512 ",avx512bf16")))
#define NAME(x) x##_avx512
#define WIDE 1
#define DENSE_ROWS 12
#include "simd_avx512.h"
#include "kernels.h"
static const Kernels avx512 = KERNELS(dense, tile_floats);
#if NEW_COMPILER
#define PAIRS 1
#include "dense.h"
static const Kernels avx512_bf16 = KERNELS(dense_pairs, tile_floats_pairs);
#endif
#include "forget.h"
#endif

enum { LEVEL_NONE = 0, LEVEL_AVX2 = 1, LEVEL_AVX_VNNI = 2, LEVEL_AVX512_VNNI = 3, LEVEL_AVX512_BF16 = 4 };

// Return whether this processor runs the kernels of `level`.
EXPORT int headrace_supports(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    unsigned a = 0, b = 0, c = 0, d = 0;
    switch (level) {
    case LEVEL_AVX2: return has_avx2;
#if NEW_COMPILER
    case LEVEL_AVX_VNNI: return has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
#endif
    case LEVEL_AVX512_VNNI: return has_avx512;
#if NEW_COMPILER
    case LEVEL_AVX512_BF16: return has_avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
#endif
    }
#endif
    return level == LEVEL_NONE;
}

static const Kernels *kernels_of(int level) {
#if defined(__x86_64__)
    if (level == LEVEL_AVX2) return &avx2;
#if NEW_COMPILER
    if (level == LEVEL_AVX_VNNI) return &avxvnni;
#endif
    if (level == LEVEL_AVX512_VNNI) return &avx512;
#if NEW_COMPILER
    if (level == LEVEL_AVX512_BF16) return &avx512_bf16;
#endif
#endif
    return NULL;
}

// Instruction set of the fastest kernels that this processor runs; 0 for none.
EXPORT int headrace_best_level(void) {
    int level = LEVEL_AVX512_BF16;
    while (!headrace_supports(level)) level--;
    return level;
}

enum { CODES, SCALES, SUMS, HALVES, FLOATS, NORMED, WIDE_ROWS, RESULTS, BUFFERS };

// Threads, kernels, and memory that operations use over again. One operation runs at a time.
typedef struct {
    const Kernels *kernels;
    Pool *pool;
    int threads;
    char *buffers[BUFFERS];
    size_t sizes[BUFFERS];
    Scratch *scratch; // of each thread
} Context;

EXPORT void headrace_close(Context *c) {
    if (!c) return;
    if (c->pool) pool_close(c->pool);
    for (int i = 0; i < BUFFERS; i++) free(c->buffers[i]);
    for (int i = 0; c->scratch && i < c->threads; i++) free(c->scratch[i].all);
    free(c->scratch);
    free(c);
}

// Return a context with kernels of `level` and `threads` threads; NULL without memory or if the processor has no such.
EXPORT Context *headrace_open(int level, int threads) {
    if (!level || !headrace_supports(level)) return NULL;
    Context *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->kernels = kernels_of(level);
    c->pool = pool_open(threads);
    c->threads = c->pool ? c->pool->helpers + 1 : 1;
    c->scratch = calloc((size_t)c->threads, sizeof(Scratch));
    if (c->pool && c->scratch) return c;
    headrace_close(c);
    return NULL;
}

EXPORT int headrace_threads(const Context *c) { return c->threads; }

EXPORT void headrace_step(Context *c, int runs) { pool_step(c->pool, runs); }

// Grow one of the context's buffers; NULL without memory.
static void *buffer(Context *c, int which, size_t bytes) {
    if (c->sizes[which] < bytes) {
        free(c->buffers[which]);
        c->buffers[which] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        c->sizes[which] = c->buffers[which] ? bytes : 0;
    }
    return c->buffers[which];
}

// Return how many chunks to cut `units` into: a few for each thread, so that a late one holds up little.
static int chunks_of(const Context *c, int units, int most) {
    int chunks = c->threads == 1 ? 1 : c->threads * most;
    return units < chunks ? units : chunks;
}

static int edge(int units, int chunks, int chunk) { return (int)((int64_t)units * chunk / chunks); }

// --- rows of activations: the sum of the stream, its norm, its codes

typedef struct {
    Context *c;
    const float *x, *added; // [rows][size]; `added` may be NULL
    float *sum;             // where x + added goes, with `added`
    const float *weight;    // of the norm; NULL without one
    float eps;
    float *normed; // NULL without a norm
    Activations a;
    const Linear *l; // what multiplies the rows next; NULL for nothing
    int rows, chunks;
} RowsJob;

// Make of a row what a product by `l` reads of it.
static void prepare_row(const Kernels *kernels, const Linear *l, const Activations *a, const float *x, int row, int rows) {
    for (int i = 0; l->reads & READS_CODES && i < l->count_orders; i++) {
        Activations ordered = in_order(a, i);
        kernels->quantise(x, l->orders[i], &ordered, row, rows);
    }
    if (l->reads & (READS_FLOATS | READS_HALVES)) kernels->tile_floats(x, a, row, rows, l->reads & READS_HALVES);
}

static void do_rows(void *argument, int chunk, int worker) {
    RowsJob *j = argument;
    (void)worker;
    int size = j->a.ins;
    for (int row = edge(j->rows, j->chunks, chunk); row < edge(j->rows, j->chunks, chunk + 1); row++) {
        const float *x = j->x + (size_t)row * size;
        if (j->added) {
            float *sum = j->sum + (size_t)row * size;
            const float *added = j->added + (size_t)row * size;
            for (int i = 0; i < size; i++) sum[i] = x[i] + added[i];
            x = sum;
        }
        if (j->weight) {
            float *normed = j->normed + (size_t)row * size;
            j->c->kernels->norm(x, j->weight, size, j->eps, normed);
            x = normed;
        }
        if (j->l) prepare_row(j->c->kernels, j->l, &j->a, x, row, j->rows);
    }
}

// Give activations the memory that products which read them need, in `orders` orders. -1 without memory.
static int make_room(Context *c, Activations *a, int reads, int orders, int count) {
    size_t rows = (size_t)count, coded = rows * (size_t)orders, groups = (size_t)a->ins / GROUP;
    a->rows = count;
    if (reads & READS_CODES) {
        a->codes = buffer(c, CODES, coded * (size_t)a->ins);
        a->scales = buffer(c, SCALES, coded * groups * 4);
        a->sums = buffer(c, SUMS, coded * groups * 4);
        a->halves = buffer(c, HALVES, coded * groups * 8);
        if (!a->codes || !a->scales || !a->sums || !a->halves) return -1;
    }
    if (reads & (READS_FLOATS | READS_HALVES)) {
        a->floats = buffer(c, FLOATS, rows * (((size_t)a->ins + 1) / 2 * 2) * 4);
        if (!a->floats) return -1;
    }
    return 0;
}

static int prepare_rows(RowsJob *j) {
    if (j->l && make_room(j->c, &j->a, j->l->reads, j->l->count_orders, j->rows)) return -1;
    j->chunks = chunks_of(j->c, j->rows, 1);
    pool_run(j->c->pool, do_rows, j, j->chunks);
    return 0;
}

// --- products

typedef struct {
    Context *c;
    const Linear *l;
    const Activations *a;
    float *y;
    size_t stride;
    int rows, adds, blocks, chunks;
} ProductJob;

// Return how many blocks of outputs a matrix has.
static int blocks_of(const Matrix *m) {
    int outs = m->scale >= DENSE_BF16 ? STRIP : LANES;
    return (m->outs + outs - 1) / outs;
}

// Compute the outputs of the blocks `from` .. `to` - 1 of all matrices.
static void product_blocks(const ProductJob *j, int from, int to) {
    int before = 0, outs = 0;
    for (int i = 0; i < j->l->count; i++) {
        const Matrix *m = j->l->matrices + i;
        const float *bias = j->l->bias ? j->l->bias + outs : NULL;
        int blocks = blocks_of(m), first = from > before ? from - before : 0;
        int last = to < before + blocks ? to - before : blocks;
        if (m->scale >= DENSE_BF16 && first < last)
            j->c->kernels->dense(m, first, last, j->a, j->rows, bias, j->y + outs, j->stride, j->adds);
        else if (first < last) {
            Activations a = in_order(j->a, m->order);
            for (int b = first; b < last; b++)
                j->c->kernels->block(m, b, &a, j->rows, bias, j->y + outs, j->stride, j->adds);
        }
        before += blocks, outs += m->outs;
    }
}

static void do_product(void *argument, int chunk, int worker) {
    ProductJob *j = argument;
    (void)worker;
    product_blocks(j, edge(j->blocks, j->chunks, chunk), edge(j->blocks, j->chunks, chunk + 1));
}

static void multiply(Context *c, const Linear *l, const Activations *a, int rows, float *y, int adds) {
    ProductJob j = {c, l, a, y, (size_t)l->outs, rows, adds, 0, 0};
    for (int i = 0; i < l->count; i++) j.blocks += blocks_of(l->matrices + i);
    j.chunks = chunks_of(c, j.blocks, 6);
    pool_run(c->pool, do_product, &j, j.chunks);
}

// y = x W^T + bias; added to what lies in y if `adds`. x [rows][ins], y [rows][outs], float32. -1 without memory.
EXPORT int headrace_linear(Context *c, const Linear *l, const float *x, int rows, float *y, int adds) {
    RowsJob j = {.c = c, .x = x, .l = l, .rows = rows, .a.ins = l->ins};
    if (prepare_rows(&j)) return -1;
    multiply(c, l, &j.a, rows, y, adds);
    return 0;
}

// Write the rows `ids` of a matrix, in float32.
EXPORT void headrace_read_rows(const Matrix *m, const int64_t *ids, int count, float *y) {
    for (int i = 0; i < count; i++) read_row(m, (int)ids[i], y + (size_t)i * m->ins);
}

// sum = x + added (unless NULL); normed = RMS norm of the sum.
EXPORT int headrace_norm(Context *c, const float *x, const float *added, float *sum, const float *weight, float eps,
                         int rows, int size, float *normed) {
    RowsJob j = {.c = c, .x = x, .added = added, .sum = sum, .weight = weight, .eps = eps, .normed = normed,
                 .rows = rows, .a.ins = size};
    return prepare_rows(&j);
}

// --- attention

typedef struct {
    Context *c;
    const Heads *h;
    const Step *step;
    const float *q_norm, *k_norm;
    void *kv;
    float *qkv, *o; // [tokens][token_width], [tokens][heads * head_dim]
    int layer, chunks;
    _Atomic int failed;
} AttentionJob;

static void do_places(void *argument, int chunk, int worker) {
    AttentionJob *j = argument;
    (void)worker;
    size_t width = token_width(j->h);
    for (int n = edge(j->step->tokens, j->chunks, chunk); n < edge(j->step->tokens, j->chunks, chunk + 1); n++)
        j->c->kernels->place[j->h->kv_floats](j->h, j->step, j->layer, n, j->q_norm, j->k_norm, j->kv,
                                              j->qkv + (size_t)n * width);
}

// Grow one thread's memory for `queries` rows of scores of `wide` positions in `pages` pages.
static int grow(Scratch *s, size_t queries, size_t size, size_t wide, size_t pages) {
    size_t rows = queries * size * 4, scores = queries * wide * 4, keys = LANES * size * 4;
    size_t bytes = 2 * rows + queries * 4 + scores + keys + pages * sizeof(void *) + 6 * 64;
    if (s->bytes < bytes) {
        free(s->all);
        s->bytes = 0;
        s->all = aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (!s->all) return -1;
        s->bytes = bytes;
    }
    char *at = s->all;
    s->queries = (float *)at, at += (rows + 63) / 64 * 64;
    s->results = (float *)at, at += (rows + 63) / 64 * 64;
    s->inverse = (float *)at, at += (queries * 4 + 63) / 64 * 64;
    s->scores = (float *)at, at += (scores + 63) / 64 * 64;
    s->keys = at, at += (keys + 63) / 64 * 64;
    s->pages = (const void **)at;
    return 0;
}

static void do_attention(void *argument, int chunk, int worker) {
    AttentionJob *j = argument;
    const Heads *h = j->h;
    Scratch *s = j->c->scratch + worker;
    int share = h->heads / h->kv_heads, units = j->step->blocks * h->kv_heads;
    size_t width = token_width(h), out = (size_t)h->heads * h->head_dim;
    for (int unit = edge(units, j->chunks, chunk); unit < edge(units, j->chunks, chunk + 1); unit++) {
        const Queries *block = j->step->queries + unit / h->kv_heads;
        size_t wide = (size_t)(block->position + block->count) + 3 * LANES;
        int step = (int)(SCORE_FLOATS / (wide * (size_t)share));
        step = step < 1 ? 1 : step > MOST_QUERIES ? MOST_QUERIES : step;
        if (grow(s, (size_t)step * share, (size_t)h->head_dim, wide, wide / h->page_size + 2)) {
            atomic_store(&j->failed, 1);
            return;
        }
        for (int skip = 0; skip < block->count; skip += step) {
            int count = block->count - skip < step ? block->count - skip : step;
            size_t token = (size_t)block->token + skip;
            j->c->kernels->attend[h->kv_floats](h, j->step, block, skip, count, unit % h->kv_heads, j->kv,
                                                j->qkv + token * width, j->o + token * out, s);
        }
    }
}

static int attend(AttentionJob *j) {
    j->chunks = chunks_of(j->c, j->step->tokens, 1);
    pool_run(j->c->pool, do_places, j, j->chunks);
    j->chunks = chunks_of(j->c, j->step->blocks * j->h->kv_heads, 4);
    pool_run(j->c->pool, do_attention, j, j->chunks);
    return j->failed ? -1 : 0;
}

// Rotate queries and keys, store keys and values, and attend. `qkv` is overwritten.
EXPORT int headrace_attend_with(Context *c, const Heads *h, const Step *step, int layer, const float *q_norm,
                                const float *k_norm, void *kv, float *qkv, float *o) {
    AttentionJob j = {.c = c, .h = h, .step = step, .q_norm = q_norm, .k_norm = k_norm, .kv = kv, .qkv = qkv,
                      .o = o, .layer = layer};
    return attend(&j);
}

// The first half of a layer up to the product of the attention's result: norm, product, rotation and attention.
EXPORT int headrace_attend(Context *c, const Heads *h, const Step *step, int layer, const float *x,
                           const float *added, float *sum, const float *norm, const Linear *l, const float *q_norm,
                           const float *k_norm, void *kv, float *o, int rows) {
    float *qkv = buffer(c, WIDE_ROWS, (size_t)rows * l->outs * 4), *normed = buffer(c, NORMED, (size_t)rows * l->ins * 4);
    if (!qkv || !normed) return -1;
    RowsJob j = {.c = c, .x = x, .added = added, .sum = sum, .weight = norm, .eps = h->eps, .normed = normed,
                 .l = l, .rows = rows, .a.ins = l->ins};
    if (prepare_rows(&j)) return -1;
    multiply(c, l, &j.a, rows, qkv, 0);
    return headrace_attend_with(c, h, step, layer, q_norm, k_norm, kv, qkv, o);
}

// --- feeds

typedef struct {
    Context *c;
    const float *x;
    float *y;
    int rows, size, chunks;
} FeedJob;

static void do_silu(void *argument, int chunk, int worker) {
    FeedJob *j = argument;
    (void)worker;
    size_t size = (size_t)j->size;
    for (size_t row = (size_t)edge(j->rows, j->chunks, chunk); row < (size_t)edge(j->rows, j->chunks, chunk + 1); row++)
        j->c->kernels->silu_mul(j->x + row * 2 * size, j->x + row * 2 * size + size, j->size, j->y + row * size);
}

// y [rows][size] = silu(gate) * up of x [rows][2][size].
EXPORT int headrace_silu_mul(Context *c, const float *x, int rows, int size, float *y) {
    FeedJob j = {c, x, y, rows, size, chunks_of(c, rows, 1)};
    pool_run(c->pool, do_silu, &j, j.chunks);
    return 0;
}

static void do_gelu(void *argument, int chunk, int worker) {
    FeedJob *j = argument;
    (void)worker;
    size_t size = (size_t)j->size;
    for (size_t row = (size_t)edge(j->rows, j->chunks, chunk); row < (size_t)edge(j->rows, j->chunks, chunk + 1); row++)
        j->c->kernels->gelu_tanh(j->x + row * size, j->size, j->y + row * size);
}

// y [rows][size] = gelu(x) by tanh; `y` may be `x`.
EXPORT int headrace_gelu_tanh(Context *c, const float *x, int rows, int size, float *y) {
    FeedJob j = {c, x, y, rows, size, chunks_of(c, rows, 1)};
    pool_run(c->pool, do_gelu, &j, j.chunks);
    return 0;
}

// The second half of a layer up to the product of the activation: norm, product and activation.
EXPORT int headrace_feed(Context *c, const float *x, const float *added, float *sum, const float *norm, float eps,
                         const Linear *l, float *y, int rows) {
    float *wide = buffer(c, WIDE_ROWS, (size_t)rows * l->outs * 4), *normed = buffer(c, NORMED, (size_t)rows * l->ins * 4);
    if (!wide || !normed) return -1;
    RowsJob j = {.c = c, .x = x, .added = added, .sum = sum, .weight = norm, .eps = eps, .normed = normed,
                 .l = l, .rows = rows, .a.ins = l->ins};
    if (prepare_rows(&j)) return -1;
    multiply(c, l, &j.a, rows, wide, 0);
    return headrace_silu_mul(c, wide, rows, l->outs / 2, y);
}

#include "experts.c"
#include "layer.c"
