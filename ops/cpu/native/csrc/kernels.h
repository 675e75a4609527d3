// All kernels of one instruction set, after its vectors.
#include "product.h"
#define PAIRS 0
#include "dense.h"
#undef PAIRS
#include "rows.h"
#define KV_FLOATS 0
#include "attention.h"
#undef KV_FLOATS
#define KV_FLOATS 1
#include "attention.h"
#undef KV_FLOATS
