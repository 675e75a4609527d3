// Decode attention that deals out the pages of all rows in equal parts among multiprocessors (sm_90).
//
// Owns the division of a step's pages and each layer's attention; never writes keys or values. Compiled once for each
// shape of heads: HEAD_DIM, KV_HEADS, GROUP (query heads of a kv head), PAGE (tokens), KV_FP8 (keys and values; 0: bf16,
// 1: e4m3, multiplied as fp16), QUERIES (that a warp has room for: 8, 16 or 32), HAS_LINES and SHARED_BYTES (of a block,
// as the caller found that they fit).
//
// A row has one line, its last token, or with HAS_LINES as many as the caller says: first those of consecutive tokens,
// each with its own query heads, length and page numbers, and then those that compute nothing of use, which are no longer
// than the first and attend to what that one attends to. All lines of a row attend to each key while it is in shared
// memory, and mask those that are not theirs.
//
// A page's keys, and likewise its values, of all heads are one contiguous piece of memory. One warp streams these pieces
// into a ring in shared memory with bulk copies; every other warp takes one kv head of each piece. Rows that no single
// share held are summed by whichever warp finishes their last part; with HAS_LINES, whose rows have more to sum, by a
// launch of their own.
//
// The ring is small on purpose. With more bytes in flight than bandwidth times latency asks for, multiprocessors queue for
// memory and are not served alike: on an H200 a ring of 224 KB made the slowest finish 1.6 times after the fastest, and
// one of 96 KB reads as fast and ends together.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in a fragment of mma.m16n8k16.

#define SOURCE "even_decode"
#include "hopper.cuh"

#include <cuda_fp16.h>

namespace {

#if KV_FP8
#define MMA_KIND "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA_KIND "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif

constexpr int kHeads = KV_HEADS * GROUP;
constexpr int kTile = 16;                                // tokens of one round of products
constexpr int kSubs = KV_HEADS >= 8 ? 1 : 8 / KV_HEADS;  // warps of one kv head; they take turns at pages
constexpr int kWarps = KV_HEADS * kSubs;
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kHeadBytes = HEAD_DIM * (KV_FP8 ? 1 : 2);  // of one key or value
constexpr int kTokenBytes = KV_HEADS * kHeadBytes;
constexpr int kPieceBytes = PAGE * kTokenBytes;  // the keys or the values of one page
constexpr int kRingBytes = 96 * 1024;
// A slot is always read by the same warps: one that skipped a filling could not tell it from the next but one.
constexpr int kTurns = kSubs == 1 ? 1 : 2 * kSubs;
constexpr int kWantedSlots = kRingBytes / kPieceBytes < 32 ? kRingBytes / kPieceBytes : 32;
constexpr int kSlots = (kWantedSlots + kTurns - 1) / kTurns * kTurns;
constexpr int kHalves = QUERIES / 8;                     // queries of a lane
constexpr int kPairs = (kHalves + 1) / 2;                // tiles of 16 queries
constexpr bool kKeepsQueries = kPairs > 1;               // in shared memory, for lack of registers
constexpr int kKeptBytes = kKeepsQueries ? kWarps * QUERIES * HEAD_DIM * 2 : 0;
constexpr int kDims = KV_FP8 ? 16 : 8;             // that a lane reads at once, 16 bytes
constexpr int kBlocks = HEAD_DIM / (4 * kDims);    // parts of a key that four lanes read at once
constexpr int kReads = HEAD_DIM / (8 * kDims);     // times that a lane reads of one value
constexpr int kTiles = HEAD_DIM / 8;               // of 8 dims: what mma sums of values
constexpr int kPlanThreads = 1024;
[[maybe_unused]] constexpr int kMergeThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // below any score; unlike infinity it can be subtracted from itself

static_assert(HEAD_DIM == 128 || (HEAD_DIM == 64 && !KV_FP8));
static_assert(PAGE % kTile == 0 && KV_HEADS <= 8 && GROUP <= QUERIES && kSlots >= 3);
static_assert((QUERIES == 8 || QUERIES == 16 || QUERIES == 32) && (HAS_LINES || !kKeepsQueries));
static_assert(kSlots * (kPieceBytes + 16) + kKeptBytes == SHARED_BYTES, "attention/even.py reckons with another ring");

// One block's pages [first, last), counted over the pages of all rows; the row of the first, and where that row begins.
struct Share {
  int first, last, row, row_first;
};

// What `deal` leaves for the layers of a step, followed by one share for each block, by where each row begins and by each
// row's longest line.
struct Plan {
  int total, used;  // pages, and the blocks that have any
  int padding[2];

  __host__ __device__ static int64_t words(int64_t blocks, int64_t rows) {
    return (sizeof(Plan) + blocks * sizeof(Share)) / sizeof(int) + rows + 1 + (HAS_LINES ? rows : 0);
  }
  __host__ __device__ Share* shares() const { return reinterpret_cast<Share*>(const_cast<Plan*>(this) + 1); }
  __host__ __device__ int* starts(int blocks) const { return reinterpret_cast<int*>(shares() + blocks); }
  __host__ __device__ int* longest(int blocks, int rows) const { return starts(blocks) + rows + 1; }

  __device__ int begin(int share) const { return static_cast<int>(static_cast<int64_t>(total) * share / used); }
  // The share that holds a page: the inverse of `begin`.
  __device__ int holder(int page) const {
    return static_cast<int>((static_cast<int64_t>(page + 1) * used + total - 1) / total) - 1;
  }
};

struct Arguments {
  const Element* q;    // [rows, lines, heads, dim]
  const uint8_t* kv;   // [pages, 2, PAGE, KV_HEADS, dim]
  Element* out;        // [rows, lines, heads, dim]
  const int* pages;    // [rows, lines, columns]
  const int* lengths;  // [rows, lines], the line's token included
  const Plan* plan;
  float* partial;  // [rows + blocks, kSubs, KV_HEADS, lines, GROUP, dim]
  float2* stats;   // the same without dim: (maximum, sum)
  int* arrived;    // [rows, KV_HEADS], zeros: parts handed in
  const float* sinks;  // [heads], the scores of keys without values, or null
  int64_t page_bytes;
  int columns, window;
  float scale_log2, out_scale;
  int given_lines, rows, blocks;

  __device__ int lines() const { return HAS_LINES ? given_lines : 1; }
  __device__ int queries() const { return GROUP * lines(); }  // of a row and kv head
  __device__ int first_line(int row) const { return row * lines(); }
  __device__ int longest_line(int row) const { return HAS_LINES ? plan->longest(blocks, rows)[row] : row; }
  // The first token that any line of a row sees.
  __device__ int oldest(int row) const { return window > 0 ? max(lengths[first_line(row)] - window, 0) : 0; }
  // Where a query of a row and kv head lies among those of all lines and heads.
  __device__ int64_t place(int row, int head, int query) const {
    if (!HAS_LINES) return static_cast<int64_t>(row) * kHeads + head * GROUP + query;
    return static_cast<int64_t>(first_line(row) + query / GROUP) * kHeads + head * GROUP + query % GROUP;
  }
};

// --- synchronisation

__device__ void fetch_piece(void* target, const void* source, uint64_t* barrier) {
  barrier_expect(barrier, kPieceBytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(target)),
      "l"(source), "r"(kPieceBytes), "r"(shared_address(barrier))
      : "memory");
}

struct Ring {
  uint8_t* pieces;
  uint64_t* filled;
  uint64_t* emptied;

  __device__ uint8_t* slot(int piece) const { return pieces + (piece % kSlots) * kPieceBytes; }
  __device__ void wait_filled(int piece) const { barrier_wait(filled + piece % kSlots, (piece / kSlots) & 1); }
  __device__ void release(int piece, int lane) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(emptied + piece % kSlots);
  }
  __device__ void fetch(int piece, const void* source) const {
    if (piece >= kSlots) barrier_wait(emptied + piece % kSlots, (piece / kSlots - 1) & 1);
    fetch_piece(slot(piece), source, filled + piece % kSlots);
  }
};

// --- arithmetic

__device__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(MMA_KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ uint32_t as_half(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ uint32_t as_elements(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ uint32_t as_operands(float low, float high) {
  return KV_FP8 ? as_half(low, high) : as_elements(low, high);
}

// Two elements of a query as operands.
__device__ uint32_t operands_of(uint32_t elements) {
  if (!KV_FP8) return elements;
  const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&elements));
  return as_half(fminf(fmaxf(pair.x, -65504.f), 65504.f), fminf(fmaxf(pair.y, -65504.f), 65504.f));
}

// The low or the high two of four e4m3 numbers.
__device__ uint32_t low_e4m3(uint32_t four) {
  uint32_t halves;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(four));
  return halves;
}

__device__ uint32_t high_e4m3(uint32_t four) { return low_e4m3(four >> 16); }

template <int kCount>
__device__ void load_floats(float (&to)[kCount], const float* from) {
  static_assert(kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    const float4 read = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = read.x, to[1] = read.y, to[2] = read.z, to[3] = read.w;
  } else {
    const float2 read = __ldcg(reinterpret_cast<const float2*>(from));
    to[0] = read.x, to[1] = read.y;
  }
}

__device__ void swap_if(bool odd, uint4& x, uint4& y) {
  const uint4 kept = x;
  x = odd ? y : x;
  y = odd ? kept : y;
}

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The tokens that some line of a row sees, [from, to), and those that every line sees, [all_from, all_to).
struct Seen {
  int row, from, to, all_from, all_to;
};

// The state of the softmax of up to QUERIES queries, line by line: lane (g, c) holds queries g, g + 8 and so on.
struct Heads {
  // Inner dimension permuted: in block t a lane's words are dims kDims (4 t + c) and on, as a lane reads keys.
  uint32_t query[kKeepsQueries ? 1 : kHalves][kBlocks][kDims / 2];
  uint4* kept;  // instead of `query`: the words of one lane for one product lie together, 32 lanes apart
  float most[kHalves], total[kHalves];
  float sums[kPairs][kTiles][4];  // tile i, column n: dim kTiles n + i

  __device__ void start(const Arguments& with, int row, int head, int g, int c) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      // A part of a row may have no key that the first lines see: their largest score must be a number.
      most[half] = HAS_LINES ? kLowest : -INFINITY;
      total[half] = 0.f;
      const int number = g + 8 * half;
      const Element* q = with.q + with.place(row, head, number < with.queries() ? number : 0) * HEAD_DIM;
#pragma unroll
      for (int t = 0; t < kBlocks; ++t) {
        const auto* words = reinterpret_cast<const uint32_t*>(q + kDims * (4 * t + c));
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) {
          const uint32_t operands = number < with.queries() ? operands_of(words[i]) : 0;
          if constexpr (kKeepsQueries) {
            auto* lane = reinterpret_cast<uint32_t*>(kept + 32 * product(half / 2, t, i / 2));
            lane[half % 2 + 2 * (i % 2)] = operands;
          } else {
            query[half][t][i] = operands;
          }
        }
      }
    }
#pragma unroll
    for (auto& pair : sums) {
#pragma unroll
      for (auto& tile : pair) tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
    }
  }

  // The number of a product among those of 8 tokens.
  __device__ static constexpr int product(int pair, int t, int i) { return (pair * kBlocks + t) * (kDims / 4) + i; }

  // Scores of 8 tokens at `keys`: columns 2c and 2c + 1 are tokens. Neighbouring lanes of odd and even g read two blocks in
  // opposite order, so that they meet in no bank.
  __device__ void score(float (&scores)[kPairs][2][4], int eight, const uint8_t* keys, int g, int c) const {
    const uint8_t* line = keys + g * kTokenBytes + 16 * c;
    const bool odd = g & 1;
#pragma unroll
    for (auto& pair : scores) pair[eight][0] = pair[eight][1] = pair[eight][2] = pair[eight][3] = 0.f;
#pragma unroll
    for (int t = 0; t < kBlocks; t += 2) {
      uint4 x = *reinterpret_cast<const uint4*>(line + 64 * (t + odd));
      uint4 y = *reinterpret_cast<const uint4*>(line + 64 * (t + !odd));
      swap_if(odd, x, y);
      multiply(scores, eight, t, x);
      multiply(scores, eight, t + 1, y);
    }
  }

  __device__ void multiply(float (&scores)[kPairs][2][4], int eight, int t, const uint4& key) const {
    const auto* words = reinterpret_cast<const uint32_t*>(&key);
#pragma unroll
    for (int i = 0; i < kDims / 4; ++i) {
      const uint32_t b0 = KV_FP8 ? low_e4m3(words[i]) : words[2 * i % 4];
      const uint32_t b1 = KV_FP8 ? high_e4m3(words[i]) : words[(2 * i + 1) % 4];
      if constexpr (kKeepsQueries) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const uint4 a = kept[32 * product(pair, t, i)];
          mma(scores[pair][eight], a.x, a.y, a.z, a.w, b0, b1);
        }
      } else {
        const uint32_t a1 = kHalves > 1 ? query[kHalves - 1][t][2 * i] : 0;
        const uint32_t a3 = kHalves > 1 ? query[kHalves - 1][t][2 * i + 1] : 0;
        mma(scores[0][eight], query[0][t][2 * i], a1, query[0][t][2 * i + 1], a3, b0, b1);
      }
    }
  }

  // Hides from each query what its line does not see of 16 tokens from `first` on.
  __device__ void mask(float (&scores)[kPairs][2][4], const Arguments& with, const Seen& seen, int first, int g,
                       int c) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      int oldest = seen.from, length = seen.to;
      if constexpr (HAS_LINES) {
        const int line = min((g + 8 * half) / GROUP, with.lines() - 1);
        length = max(with.lengths[with.first_line(seen.row) + line], seen.all_to);
        oldest = with.window > 0 ? max(length - with.window, 0) : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first + 8 * (i / 2) + 2 * c + (i & 1);
        if (token < oldest || token >= length) scores[half / 2][i / 2][2 * (half % 2) + i % 2] = -INFINITY;
      }
    }
  }

  // Turns the scores of 16 tokens into weights, in place, and rescales what was summed before.
  __device__ void weigh(float (&scores)[kPairs][2][4]) {
    float ratio[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float* first = scores[half / 2][0] + 2 * (half % 2);
      float* second = scores[half / 2][1] + 2 * (half % 2);
      const float higher =
          fmaxf(most[half], quad_max(fmaxf(fmaxf(first[0], first[1]), fmaxf(second[0], second[1]))));
      ratio[half] = exp2f(most[half] - higher);
      most[half] = higher;
      first[0] = exp2f(first[0] - higher);
      first[1] = exp2f(first[1] - higher);
      second[0] = exp2f(second[0] - higher);
      second[1] = exp2f(second[1] - higher);
      total[half] = total[half] * ratio[half] + (first[0] + first[1]) + (second[0] + second[1]);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (auto& tile : sums[pair]) {
        tile[0] *= ratio[2 * pair];
        tile[1] *= ratio[2 * pair];
        if (kHalves > 1) {
          tile[2] *= ratio[(2 * pair + 1) % kHalves];
          tile[3] *= ratio[(2 * pair + 1) % kHalves];
        }
      }
    }
  }

  // Adds 16 weighted tokens at `values`. A lane reads 16 bytes of a token at once; pairs of tokens are packed by bytes.
  __device__ void add(const float (&weights)[kPairs][2][4], const uint8_t* values, int g, int c) {
    uint32_t a[kPairs][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto& own = weights[pair];
      a[pair][0] = as_operands(own[0][0], own[0][1]), a[pair][2] = as_operands(own[1][0], own[1][1]);
      a[pair][1] = kHalves > 1 ? as_operands(own[0][2], own[0][3]) : 0;
      a[pair][3] = kHalves > 1 ? as_operands(own[1][2], own[1][3]) : 0;
    }
    const uint8_t* line = values + 2 * c * kTokenBytes + 16 * kReads * g;
    const bool odd = kReads > 1 && (c & 1);
    uint4 read[kReads][4];
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      const uint8_t* at = line + ((token & 1) + 8 * (token >> 1)) * kTokenBytes;
      read[0][token] = *reinterpret_cast<const uint4*>(at + 16 * odd);
      if (kReads > 1) {
        read[kReads - 1][token] = *reinterpret_cast<const uint4*>(at + 16 * !odd);
        swap_if(odd, read[0][token], read[kReads - 1][token]);
      }
    }
#pragma unroll
    for (int s = 0; s < kReads; ++s) {
      const auto* words = reinterpret_cast<const uint32_t(*)[4]>(&read[s][0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t x0 = words[0][i], x1 = words[1][i], x2 = words[2][i], x3 = words[3][i];
        const int tile = kDims * s + kDims / 4 * i;
        if constexpr (KV_FP8) {
          const uint32_t first = __byte_perm(x0, x1, 0x5140), second = __byte_perm(x2, x3, 0x5140);
          const uint32_t third = __byte_perm(x0, x1, 0x7362), fourth = __byte_perm(x2, x3, 0x7362);
          multiply_all(tile, a, low_e4m3(first), low_e4m3(second));
          multiply_all(tile + 1, a, high_e4m3(first), high_e4m3(second));
          multiply_all(tile + 2, a, low_e4m3(third), low_e4m3(fourth));
          multiply_all(tile + 3, a, high_e4m3(third), high_e4m3(fourth));
        } else {
          multiply_all(tile, a, __byte_perm(x0, x1, 0x5410), __byte_perm(x2, x3, 0x5410));
          multiply_all(tile + 1, a, __byte_perm(x0, x1, 0x7632), __byte_perm(x2, x3, 0x7632));
        }
      }
    }
  }

  __device__ void multiply_all(int tile, const uint32_t (&a)[kPairs][4], uint32_t b0, uint32_t b1) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      mma(sums[pair][tile], a[pair][0], a[pair][1], a[pair][2], a[pair][3], b0, b1);
    }
  }
};

// --- what a warp does

// Fetches the pages of a share, as far ahead as the ring has room. All but the pages that the step's tokens were just
// written to may be read while the kernel before this one still runs.
__device__ void fetch_share(const Arguments& with, const Share& share, const Ring& ring, int lane) {
  const int* starts = with.plan->starts(gridDim.x);
  bool waited = false;
  int piece = 0, row = share.row;
  for (int base = share.first; base < share.last; base += 32) {
    const int page = base + lane;
    int number = 0;
    bool newest = false;
    if (page < share.last) {
      while (page >= starts[row + 1]) ++row;
      const int place = with.oldest(row) / PAGE + page - starts[row];
      number = with.pages[static_cast<int64_t>(with.longest_line(row)) * with.columns + place];
      newest = HAS_LINES ? place >= (with.lengths[with.first_line(row)] - 1) / PAGE : page == starts[row + 1] - 1;
    }
    for (int at = 0; at < min(32, share.last - base); ++at) {
      const int next = __shfl_sync(~0u, number, at);
      if (__shfl_sync(~0u, newest, at) && !waited) {
        wait_for_last_kernel();
        waited = true;
      }
      if (lane == 0) {
        const uint8_t* source = with.kv + next * with.page_bytes;
        ring.fetch(piece, source);
        ring.fetch(piece + 1, source + kPieceBytes);
      }
      piece += 2;
    }
  }
}

// The sum of weights beside the largest score, with the weight of a query head's sink.
__device__ float with_sink(const Arguments& with, int head, float most, float total) {
  return with.sinks == nullptr ? total : total + exp2f(__ldg(with.sinks + head) * kLog2E - most);
}

__device__ void write_out(const Arguments& with, const Heads& heads, int row, int head, int g, int c) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int number = g + 8 * half;
    const float total = quad_sum(heads.total[half]);
    Element* line = with.out + with.place(row, head, number) * HEAD_DIM;
    if (number >= with.queries()) continue;
    const float factor = with.out_scale / with_sink(with, head * GROUP + number % GROUP, heads.most[half], total);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      auto* target = reinterpret_cast<uint4*>(line + kTiles * (2 * c + column));
#pragma unroll
      for (int i = 0; i < kTiles; i += 8) {
        uint4 words;
        auto* word = reinterpret_cast<uint32_t*>(&words);
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const int at = 2 * (half % 2) + column;
          const auto& sums = heads.sums[half / 2];
          word[k / 2] = as_elements(sums[i + k][at] * factor, sums[i + k + 1][at] * factor);
        }
        target[i / 8] = words;
      }
    }
  }
}

__device__ void write_part(const Arguments& with, const Heads& heads, int64_t part, int g, int c) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int number = g + 8 * half;
    const float total = quad_sum(heads.total[half]);
    if (number >= with.queries()) continue;
    float* line = with.partial + (part * with.queries() + number) * HEAD_DIM;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      auto* target = reinterpret_cast<float4*>(line + kTiles * (2 * c + column));
      const int at = 2 * (half % 2) + column;
      const auto& sums = heads.sums[half / 2];
#pragma unroll
      for (int i = 0; i < kTiles; i += 4) {
        target[i / 4] = make_float4(sums[i][at], sums[i + 1][at], sums[i + 2][at], sums[i + 3][at]);
      }
    }
    if (c == 0) with.stats[part * with.queries() + number] = make_float2(heads.most[half], total);
  }
}

// Sums the parts of one row and kv head, numbered first + k * KV_HEADS, for queries [begin, begin + kMembers) of one line,
// whose results lie at `out`.
template <int kMembers>
__device__ void merge(const Arguments& with, int64_t first, int parts, int head, int begin, Element* out, int lane) {
  constexpr int kEach = HEAD_DIM / 32;
  float most[kMembers], total[kMembers], sums[kMembers][kEach];
#pragma unroll
  for (int member = 0; member < kMembers; ++member) {
    most[member] = kLowest;
    total[member] = 0.f;
#pragma unroll
    for (float& sum : sums[member]) sum = 0.f;
  }
#pragma unroll 4
  for (int k = 0; k < parts; ++k) {
    const int64_t at = (first + static_cast<int64_t>(k) * KV_HEADS) * with.queries() + begin;
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
      const float2 stats = __ldcg(with.stats + at + member);
      float part[kEach];
      load_floats(part, with.partial + (at + member) * HEAD_DIM + kEach * lane);
      const float higher = fmaxf(most[member], stats.x);
      const float kept = exp2f(most[member] - higher), factor = exp2f(stats.x - higher);
      most[member] = higher;
      total[member] = total[member] * kept + stats.y * factor;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[member][i] = sums[member][i] * kept + part[i] * factor;
    }
  }
#pragma unroll
  for (int member = 0; member < kMembers; ++member) {
    const int number = head * GROUP + (begin + member) % GROUP;
    const float factor = with.out_scale / with_sink(with, number, most[member], total[member]);
    auto* words = reinterpret_cast<uint32_t*>(out + member * HEAD_DIM + kEach * lane);
#pragma unroll
    for (int i = 0; i < kEach; i += 2) words[i / 2] = as_elements(sums[member][i] * factor, sums[member][i + 1] * factor);
  }
}

// Hands in one warp's part of a row; the warp that brings the last one sums them all, unless `merge_lines` does.
__device__ void hand_in(const Arguments& with, const Heads& heads, int row, int row_first, int row_last, int head,
                        int sub, int g, int c) {
  const int lane = 4 * g + c, first = with.plan->holder(row_first), last = with.plan->holder(row_last - 1);
  // Row and block numbers never fall from one part to the next, and one of them rises: their sum names a part.
  write_part(with, heads, (static_cast<int64_t>(row + blockIdx.x) * kSubs + sub) * KV_HEADS + head, g, c);
  if constexpr (HAS_LINES) return;
  __syncwarp();
  const int parts = (last - first + 1) * kSubs;
  int arrived = 0;
  if (lane == 0) {
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(arrived)
                 : "l"(with.arrived + row * KV_HEADS + head)
                 : "memory");
  }
  if (__shfl_sync(~0u, arrived, 0) != parts - 1) return;
  __syncwarp();
  if (lane == 0) with.arrived[row * KV_HEADS + head] = 0;
  const int64_t part = static_cast<int64_t>(row + first) * kSubs * KV_HEADS + head;
  Element* out = with.out + (static_cast<int64_t>(row) * kHeads + head * GROUP) * HEAD_DIM;
  constexpr int kMembers = GROUP < 4 ? GROUP : 4, kRest = GROUP % kMembers;
  for (int begin = 0; begin + kMembers <= GROUP; begin += kMembers) {
    merge<kMembers>(with, part, parts, head, begin, out + begin * HEAD_DIM, lane);
  }
  if constexpr (kRest > 0) merge<kRest>(with, part, parts, head, GROUP - kRest, out + (GROUP - kRest) * HEAD_DIM, lane);
}

// Computes one kv head (every kSubs-th page of it) of all rows of a share.
struct Attender {
  const Arguments& with;
  const Ring& ring;
  int head, sub, lane;
  uint4* kept;  // for the lane's words of queries in shared memory

  __device__ void run(const Share& share) {
    const int g = lane / 4, c = lane % 4;
    const int* starts = with.plan->starts(gridDim.x);
    int page = share.first, row_first = share.row_first;
    wait_for_last_kernel();  // which wrote the queries
    for (int row = share.row; page < share.last; ++row) {
      const int row_last = starts[row + 1], end = min(row_last, share.last);
      const int oldest = with.oldest(row);
      Seen seen{row, oldest, with.lengths[with.longest_line(row)], oldest, with.lengths[with.first_line(row)]};
      if (HAS_LINES && with.window > 0) seen.all_from = max(seen.to - with.window, 0);
      Heads heads;
      heads.kept = kept;
      heads.start(with, row, head, g, c);
      for (; page < end; ++page) {
        const int index = page - share.first;
        if (kSubs > 1 && index % kSubs != sub) continue;
        add_page(heads, 2 * index, (page - row_first + oldest / PAGE) * PAGE, seen, g, c);
      }
      if (kSubs == 1 && row_first >= share.first && row_last <= share.last) {
        write_out(with, heads, row, head, g, c);
      } else {
        hand_in(with, heads, row, row_first, row_last, head, sub, g, c);
      }
      row_first = row_last;
    }
  }

  // The page whose keys are piece `at` and whose first token is `start`.
  __device__ void add_page(Heads& heads, int at, int start, const Seen& seen, int g, int c) {
    const uint8_t* keys = ring.slot(at) + head * kHeadBytes;
    const uint8_t* values = ring.slot(at + 1) + head * kHeadBytes;
#pragma unroll
    for (int tile = 0; tile < PAGE; tile += kTile) {
      const int first = start + tile;
      const bool used = first < seen.to && first + kTile > seen.from;
      float scores[kPairs][2][4];
      if (tile == 0) ring.wait_filled(at);
      if (used) {
        heads.score(scores, 0, keys + tile * kTokenBytes, g, c);
        heads.score(scores, 1, keys + (tile + 8) * kTokenBytes, g, c);
      }
      if (tile == PAGE - kTile) ring.release(at, lane);
      if (used) {
#pragma unroll
        for (auto& pair : scores) {
#pragma unroll
          for (int i = 0; i < 8; ++i) pair[i / 4][i % 4] *= with.scale_log2;
        }
        if (first < seen.all_from || first + kTile > seen.all_to) heads.mask(scores, with, seen, first, g, c);
        heads.weigh(scores);
      }
      if (tile == 0) ring.wait_filled(at + 1);
      if (used) heads.add(scores, values + tile * kTokenBytes, g, c);
      if (tile == PAGE - kTile) ring.release(at + 1, lane);
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) attend(const Arguments with) {
  extern __shared__ __align__(128) uint8_t pieces[];
  __shared__ uint64_t filled[kSlots], emptied[kSlots];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(filled + slot, 1);
      barrier_init(emptied + slot, KV_HEADS);
    }
    barriers_are_set_up();
  }
  __syncthreads();
  const Share share = with.plan->shares()[blockIdx.x];
  const Ring ring{pieces, filled, emptied};
  if (warp == kWarps) {
    fetch_share(with, share, ring, lane);
  } else {
    uint4* kept = reinterpret_cast<uint4*>(pieces + kSlots * kPieceBytes + warp * (kKeptBytes / kWarps)) + lane;
    Attender{with, ring, warp % KV_HEADS, warp / KV_HEADS, lane, kept}.run(share);
  }
}

#if HAS_LINES
// Sums the parts of every row that no single share held; a warp for each line and query head.
__global__ void __launch_bounds__(kMergeThreads) merge_lines(const Arguments with) {
  let_next_kernel_start();
  const int at = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int line = at / kHeads, number = at % kHeads, row = line / with.lines(), head = number / GROUP;
  wait_for_last_kernel();
  if (row >= with.rows) return;
  const int* starts = with.plan->starts(with.blocks);
  const int first = with.plan->holder(starts[row]), last = with.plan->holder(starts[row + 1] - 1);
  if (kSubs == 1 && first == last) return;
  const int64_t part = static_cast<int64_t>(row + first) * kSubs * KV_HEADS + head;
  const int begin = line % with.lines() * GROUP + number % GROUP;
  Element* out = with.out + (static_cast<int64_t>(line) * kHeads + number) * HEAD_DIM;
  merge<1>(with, part, (last - first + 1) * kSubs, head, begin, out, lane);
}
#endif

// The last row that begins at or before a page.
__device__ int row_of(const int* starts, int rows, int page) {
  int low = 0, high = rows - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= page) low = middle; else high = middle - 1;
  }
  return low;
}

// Counts the pages of every row and divides them; one block.
__global__ void __launch_bounds__(kPlanThreads) deal(const int* lengths, int rows, int lines, int window, int blocks,
                                                     Plan* plan) {
  __shared__ int sums[kPlanThreads];
  int* starts = plan->starts(blocks);
  const int thread = threadIdx.x, each = (rows + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(thread * each, rows), end = min(begin + each, rows);
  int own = 0;
  for (int row = begin; row < end; ++row) {
    const int oldest = window > 0 ? max(lengths[row * lines] - window, 0) / PAGE : 0;
    int line = row * lines;
    if constexpr (HAS_LINES) {
      for (int next = line + 1; next < (row + 1) * lines && lengths[next] > lengths[line]; ++next) line = next;
      plan->longest(blocks, rows)[row] = line;
    }
    own += (lengths[line] + PAGE - 1) / PAGE - oldest;
    starts[row + 1] = own;
  }
  sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kPlanThreads; step *= 2) {
    const int before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  for (int row = begin; row < end; ++row) starts[row + 1] += sums[thread] - own;
  if (thread == 0) starts[0] = 0;
  __syncthreads();
  const Plan division{sums[kPlanThreads - 1], min(blocks, sums[kPlanThreads - 1]), {}};
  if (thread == 0) *plan = division;
  for (int block = thread; block < blocks; block += kPlanThreads) {
    Share share{0, 0, 0, 0};
    if (block < division.used) {
      const int first = division.begin(block), row = row_of(starts, rows, first);
      share = Share{first, division.begin(block + 1), row, starts[row]};
    }
    plan->shares()[block] = share;
  }
}

// --- what Python calls

// The int32 words of a plan, and the parts that partial sums are kept for.
int64_t plan_words(int64_t blocks, int64_t rows) { return Plan::words(blocks, rows); }
int64_t most_parts(int64_t blocks, int64_t rows) { return (rows + blocks) * kSubs; }

void plan_even_decode(TensorView lengths, TensorView plan, int64_t lines, int64_t window, int64_t blocks) {
  require(lines > 0 && lengths.size(0) % lines == 0, "lengths of another number of lines");
  const int64_t rows = lengths.size(0) / lines;
  require(plan.size(0) >= Plan::words(blocks, rows), "the plan is too small");
  deal<<<1, kPlanThreads, 0, stream_of(lengths)>>>(static_cast<const int*>(lengths.data_ptr()), static_cast<int>(rows),
                                                   static_cast<int>(lines), static_cast<int>(window),
                                                   static_cast<int>(blocks), static_cast<Plan*>(plan.data_ptr()));
  check(cudaGetLastError());
}

// counters: int32 zeros [rows * KV_HEADS]; sinks: float32 [heads], or of no elements.
void run_even_decode(TensorView q, TensorView kv, TensorView out, TensorView pages, TensorView lengths, TensorView plan,
                     TensorView partial, TensorView stats, TensorView counters, TensorView sinks, int64_t window,
                     int64_t blocks, double scale, double out_scale, int64_t lines, bool pdl) {
  require(lines > 0 && q.size(0) % lines == 0, "queries of another number of lines");
  require(HAS_LINES ? lines * GROUP <= QUERIES : lines == 1, "more lines of a row than were compiled");
  const int64_t rows = q.size(0) / lines, parts = most_parts(blocks, rows);
  require(kv.size(2) == PAGE && kv.size(3) == KV_HEADS && kv.size(4) == HEAD_DIM, "pages of another shape");
  require(lies(kv, 1, PAGE * KV_HEADS * HEAD_DIM) && lies(kv, 2, KV_HEADS * HEAD_DIM), "pages with gaps");
  require(holds_elements(q) && q.size(1) == kHeads && q.size(2) == HEAD_DIM, "queries of another shape");
  require(lies(q, 0, kHeads * HEAD_DIM) && out.numel() == q.numel(), "queries or outputs with gaps");
  require(lengths.size(0) == q.size(0) && pages.size(0) == q.size(0) && lies(pages, 0, pages.size(1)),
          "another number of rows");
  require(plan.size(0) >= Plan::words(blocks, rows), "the plan is too small");
  require(partial.numel() >= parts * lines * kHeads * HEAD_DIM, "the partial sums are too small");
  require(stats.numel() >= 2 * parts * lines * kHeads, "the statistics are too small");
  require(counters.numel() >= rows * KV_HEADS, "the counters are too small");
  require(sinks.numel() == 0 || sinks.numel() == kHeads, "another number of sinks");
  Arguments with{};
  with.q = static_cast<const Element*>(q.data_ptr());
  with.kv = static_cast<const uint8_t*>(kv.data_ptr());
  with.out = static_cast<Element*>(out.data_ptr());
  with.pages = static_cast<const int*>(pages.data_ptr());
  with.lengths = static_cast<const int*>(lengths.data_ptr());
  with.plan = static_cast<const Plan*>(plan.data_ptr());
  with.partial = static_cast<float*>(partial.data_ptr());
  with.stats = static_cast<float2*>(stats.data_ptr());
  with.arrived = static_cast<int*>(counters.data_ptr());
  with.sinks = sinks.numel() == 0 ? nullptr : static_cast<const float*>(sinks.data_ptr());
  with.page_bytes = kv.stride(0) * (KV_FP8 ? 1 : 2);
  with.columns = static_cast<int>(pages.size(1));
  with.window = static_cast<int>(window);
  with.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  with.out_scale = static_cast<float>(out_scale);
  with.given_lines = static_cast<int>(lines);
  with.rows = static_cast<int>(rows);
  with.blocks = static_cast<int>(blocks);
  constexpr int kBytes = kSlots * kPieceBytes + kKeptBytes;
  allow_shared_memory<attend>(q, kBytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream_of(q);
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  check(cudaLaunchKernelEx(&config, attend, with));
#if HAS_LINES
  constexpr int kWarpsOfMerge = kMergeThreads / 32;
  config.gridDim = dim3(static_cast<unsigned>((q.size(0) * kHeads + kWarpsOfMerge - 1) / kWarpsOfMerge));
  config.blockDim = dim3(kMergeThreads);
  config.dynamicSmemBytes = 0;
  check(cudaLaunchKernelEx(&config, merge_lines, with));
#endif
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_words, plan_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_parts, most_parts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan_even_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_decode);
