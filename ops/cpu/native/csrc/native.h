// Types that all parts of the CPU kernels share: packed matrices, quantised activations, and one step's places in the
// paged cache. The structs that Python fills are mirrored in library.py; both must change together.
#ifndef HEADRACE_NATIVE_H
#define HEADRACE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

enum { LANES = 16, GROUP = 32, SUPER_GROUPS = 8 }; // outputs of a block, inputs of a group, groups of a super-block
enum { STRIP = 32, PANEL = 256 };                  // of dense matrices: outputs of a block, inputs that are summed together
enum { AHEAD = 4096 }; // bytes of codes to ask memory for ahead of their use

// How the scales of a matrix lie in memory, for each block of 16 outputs. G is its number of groups of 32 inputs.
enum ScaleKind {
    SCALE_F16 = 0,      // [G][16] scales, float16
    SCALE_F16_MIN = 1,  // [G][2][16] scales, then minima, float16
    SCALE_F32 = 2,      // [G / shared][16] scales, float32
    SCALE_F32_MIN = 3,  // [G / shared][2][16] scales, then minima, float32
    SCALE_K_MIN = 4,    // [G][2][16] factors of scale and minimum, uint8; supers [G / 8][2][16] their units, float16
    SCALE_K16 = 5,      // [G][2][16] factors of each 16 inputs, int8; supers [G / 8][16] their unit, float16
    DENSE_BF16 = 6,     // no codes but the weights themselves
    DENSE_F32 = 7,
};

// One matrix, packed in blocks of 16 outputs. Codes of a block: [G][64 * bits] bytes. A vector of 64 bytes holds four
// neighbouring inputs of 16 outputs. Four vectors hold the low four bits of a group: inputs 4j.. of vector j in the low
// halves, inputs 16 + 4j.. in the high halves. With 5 bits one more vector holds the fifth: bit j of a byte is of
// inputs 4j... With 6 bits two more hold two bits each. With 8 bits there are eight plain vectors.
//
// A dense matrix is packed in blocks of 32 outputs, for each two neighbouring inputs: bfloat16 [32][2], so that a word
// holds the first of two inputs in its low half, or float32 [2][32]. A zero follows an odd number of inputs.
typedef struct {
    int32_t outs, ins;
    int32_t bits;   // 4, 5, 6, 8; 16 and 32 for dense weights
    int32_t scale;  // a ScaleKind
    int32_t zero;   // code that stands for zero
    int32_t shared; // groups of 32 that share a scale, for SCALE_F32 and SCALE_F32_MIN
    int32_t order;  // index in Linear.orders of the order that its columns are in; of matrices of codes
    const uint8_t *codes, *scales, *supers;
} Matrix;

// Matrices of the same inputs, one above the other.
typedef struct {
    int32_t count, outs, ins;
    int32_t reads; // READS_CODES, and READS_FLOATS or READS_HALVES, as its matrices need them
    int32_t count_orders;
    const Matrix *matrices;
    const int32_t *const *orders; // each the input of each column [ins], or NULL for columns as the inputs are
    const float *bias; // [outs] or NULL
} Linear;

enum { READS_CODES = 1, READS_FLOATS = 2, READS_HALVES = 4 };

// Rows of activations for products: float32, and their 8-bit codes in groups of 32. Codes and what belongs to them, and
// the floats for dense matrices, lie in tiles of rows, one after the other; R is the number of a tile's rows. Codes of
// all rows lie there once for each order of columns.
typedef struct {
    float *floats;       // [ins, made even][R]; for bfloat16 weights rounded, and in words of two where kernels take pairs
    int8_t *codes;       // [G][R][32]
    float *scales;       // [G][R]
    float *sums;         // [G][R]: scale * sum of the group's codes
    int32_t *halves;     // [G][R][2]: sums of the codes of the first and of the last 16 inputs
    int32_t ins;
    int32_t rows; // of one order
} Activations;

// Return the activations with their codes in one of the orders.
static inline Activations in_order(const Activations *all, int order) {
    Activations a = *all;
    size_t skip = (size_t)order * (size_t)a.rows, groups = (size_t)a.ins / GROUP;
    if (skip) a.codes += skip * (size_t)a.ins, a.scales += skip * groups, a.sums += skip * groups, a.halves += skip * groups * 2;
    return a;
}

// Queries of one row at consecutive positions.
typedef struct {
    int32_t token;    // the step's index of the first query
    int32_t count;
    int64_t table;    // index in Step.pages of the row's first page
    int64_t position; // position of the first query, counted from the first page on
    int64_t offset;   // position in the sequence of the first page's first token, a multiple of the page size
} Queries;

// One step's places in the cache, the same for all layers.
typedef struct {
    int32_t tokens, blocks;
    const int64_t *positions; // [tokens] in their sequences
    const int64_t *slots;     // [tokens] page * page_size + offset
    const int64_t *pages;     // page tables of all rows
    const Queries *queries;   // [blocks]
    const int64_t *given;     // [tokens][2] address of layer 0 and bytes from layer to layer, address 0 for none; or NULL
} Step;

// One kind of attention.
typedef struct {
    int32_t heads, kv_heads, head_dim, page_size;
    int32_t kv_floats;    // whether keys and values are float32, not bfloat16
    int32_t only_queries; // whether tokens have queries alone, and an earlier layer has stored keys and values
    int64_t window; // 0 for none
    float scale, eps;
    const float *cos, *sin; // [positions][head_dim / 2]
} Heads;

// Number of floats of a token's queries, keys and values.
static inline size_t token_width(const Heads *h) {
    return (size_t)(h->heads + (h->only_queries ? 0 : 2 * h->kv_heads)) * h->head_dim;
}

#endif
