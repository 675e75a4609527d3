// Decode attention that deals out the pages of all rows in equal parts among multiprocessors (sm_90).
//
// Owns two launches, the division of a step's pages and each layer's attention; never writes keys or values. Compiled once
// for each shape of heads: HEAD_DIM, KV_HEADS, GROUP (query heads of a kv head), PAGE (tokens), KV_FP8 (keys and values;
// 0: bf16, 1: e4m3, multiplied as fp16) and SHARED_BYTES (of a block, as the caller found that they fit).
//
// A page's keys, and likewise its values, of all heads are one contiguous piece of memory. One warp streams these pieces
// into a ring in shared memory with bulk copies; every other warp takes one kv head of each piece. Rows that no single
// share held are summed by whichever warp finishes their last part.
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
constexpr int kDims = KV_FP8 ? 16 : 8;             // that a lane reads at once, 16 bytes
constexpr int kBlocks = HEAD_DIM / (4 * kDims);    // parts of a key that four lanes read at once
constexpr int kReads = HEAD_DIM / (8 * kDims);     // times that a lane reads of one value
constexpr int kTiles = HEAD_DIM / 8;               // of 8 dims: what mma sums of values
constexpr int kPlanThreads = 1024;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // below any score; unlike infinity it can be subtracted from itself

static_assert(HEAD_DIM == 128 || (HEAD_DIM == 64 && !KV_FP8));
static_assert(PAGE % kTile == 0 && KV_HEADS <= 8 && GROUP <= 16 && kSlots >= 3);
static_assert(kSlots * (kPieceBytes + 16) == SHARED_BYTES, "attention/even.py reckons with another ring");

// One block's pages [first, last), counted over the pages of all rows; the row of the first, and where that row begins.
struct Share {
  int first, last, row, row_first;
};

// What `deal` leaves for the layers of a step, followed by one share for each block and by where each row begins.
struct Plan {
  int total, used;  // pages, and the blocks that have any
  int padding[2];

  __host__ __device__ static int64_t words(int64_t blocks, int64_t rows) {
    return (sizeof(Plan) + blocks * sizeof(Share)) / sizeof(int) + rows + 1;
  }
  __host__ __device__ Share* shares() const { return reinterpret_cast<Share*>(const_cast<Plan*>(this) + 1); }
  __host__ __device__ int* starts(int blocks) const { return reinterpret_cast<int*>(shares() + blocks); }

  __device__ int begin(int share) const { return static_cast<int>(static_cast<int64_t>(total) * share / used); }
  // The share that holds a page: the inverse of `begin`.
  __device__ int holder(int page) const {
    return static_cast<int>((static_cast<int64_t>(page + 1) * used + total - 1) / total) - 1;
  }
};

struct Arguments {
  const Element* q;    // [rows, heads, dim]
  const uint8_t* kv;   // [pages, 2, PAGE, KV_HEADS, dim]
  Element* out;        // [rows, heads, dim]
  const int* pages;    // [rows, columns]
  const int* lengths;  // [rows], the current token included
  const Plan* plan;
  float* partial;  // [rows + blocks, kSubs, KV_HEADS, GROUP, dim]
  float2* stats;   // the same without dim: (maximum, sum)
  int* arrived;    // [rows, KV_HEADS], zeros: parts handed in
  const float* sinks;  // [heads], the scores of keys without values, or null
  int64_t page_bytes;
  int columns, window;
  float scale_log2, out_scale;
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

// The state of the softmax of up to 16 query heads: lane (g, c) holds heads g and g + 8.
struct Heads {
  static constexpr int kHalves = GROUP > 8 ? 2 : 1;
  // Inner dimension permuted: in block t a lane's words are dims kDims (4 t + c) and on, as a lane reads keys.
  uint32_t query[kHalves][kBlocks][kDims / 2];
  float most[kHalves], total[kHalves];
  float sums[kTiles][4];  // tile i, column n: dim kTiles n + i

  __device__ void start(const Element* q, int g, int c) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      most[half] = -INFINITY;
      total[half] = 0.f;
      const int member = g + 8 * half;
#pragma unroll
      for (int t = 0; t < kBlocks; ++t) {
        const auto* words = reinterpret_cast<const uint32_t*>(q + member * HEAD_DIM + kDims * (4 * t + c));
#pragma unroll
        for (int i = 0; i < kDims / 2; ++i) query[half][t][i] = member < GROUP ? operands_of(words[i]) : 0;
      }
    }
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
  }

  // Scores of 8 tokens at `keys`: columns 2c and 2c + 1 are tokens. Neighbouring lanes of odd and even g read two blocks in
  // opposite order, so that they meet in no bank.
  __device__ void score(float (&scores)[4], const uint8_t* keys, int g, int c) const {
    const uint8_t* line = keys + g * kTokenBytes + 16 * c;
    const bool odd = g & 1;
    scores[0] = scores[1] = scores[2] = scores[3] = 0.f;
#pragma unroll
    for (int t = 0; t < kBlocks; t += 2) {
      uint4 x = *reinterpret_cast<const uint4*>(line + 64 * (t + odd));
      uint4 y = *reinterpret_cast<const uint4*>(line + 64 * (t + !odd));
      swap_if(odd, x, y);
      multiply(scores, t, x);
      multiply(scores, t + 1, y);
    }
  }

  __device__ void multiply(float (&scores)[4], int t, const uint4& key) const {
    const auto* words = reinterpret_cast<const uint32_t*>(&key);
#pragma unroll
    for (int i = 0; i < kDims / 4; ++i) {
      const uint32_t b0 = KV_FP8 ? low_e4m3(words[i]) : words[2 * i % 4];
      const uint32_t b1 = KV_FP8 ? high_e4m3(words[i]) : words[(2 * i + 1) % 4];
      const uint32_t a1 = kHalves > 1 ? query[kHalves - 1][t][2 * i] : 0;
      const uint32_t a3 = kHalves > 1 ? query[kHalves - 1][t][2 * i + 1] : 0;
      mma(scores, query[0][t][2 * i], a1, query[0][t][2 * i + 1], a3, b0, b1);
    }
  }

  // Turns the scores of 16 tokens into weights, in place, and rescales what was summed before.
  __device__ void weigh(float (&scores)[2][4]) {
    float ratio[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float* first = scores[0] + 2 * half;
      float* second = scores[1] + 2 * half;
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
    for (auto& tile : sums) {
      tile[0] *= ratio[0];
      tile[1] *= ratio[0];
      if (kHalves > 1) {
        tile[2] *= ratio[kHalves - 1];
        tile[3] *= ratio[kHalves - 1];
      }
    }
  }

  // Adds 16 weighted tokens at `values`. A lane reads 16 bytes of a token at once; pairs of tokens are packed by bytes.
  __device__ void add(const float (&weights)[2][4], const uint8_t* values, int g, int c) {
    const uint32_t a0 = as_operands(weights[0][0], weights[0][1]), a2 = as_operands(weights[1][0], weights[1][1]);
    const uint32_t a1 = kHalves > 1 ? as_operands(weights[0][2], weights[0][3]) : 0;
    const uint32_t a3 = kHalves > 1 ? as_operands(weights[1][2], weights[1][3]) : 0;
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
        float(*tile)[4] = sums + kDims * s + kDims / 4 * i;
        if constexpr (KV_FP8) {
          const uint32_t first = __byte_perm(x0, x1, 0x5140), second = __byte_perm(x2, x3, 0x5140);
          const uint32_t third = __byte_perm(x0, x1, 0x7362), fourth = __byte_perm(x2, x3, 0x7362);
          mma(tile[0], a0, a1, a2, a3, low_e4m3(first), low_e4m3(second));
          mma(tile[1], a0, a1, a2, a3, high_e4m3(first), high_e4m3(second));
          mma(tile[2], a0, a1, a2, a3, low_e4m3(third), low_e4m3(fourth));
          mma(tile[3], a0, a1, a2, a3, high_e4m3(third), high_e4m3(fourth));
        } else {
          mma(tile[0], a0, a1, a2, a3, __byte_perm(x0, x1, 0x5410), __byte_perm(x2, x3, 0x5410));
          mma(tile[1], a0, a1, a2, a3, __byte_perm(x0, x1, 0x7632), __byte_perm(x2, x3, 0x7632));
        }
      }
    }
  }
};

// --- what a warp does

// Fetches the pages of a share, as far ahead as the ring has room. All but the page that the current token was just
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
      const int oldest = with.window > 0 ? max(with.lengths[row] - with.window, 0) / PAGE : 0;
      number = with.pages[static_cast<int64_t>(row) * with.columns + oldest + page - starts[row]];
      newest = page == starts[row + 1] - 1;
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
  for (int half = 0; half < Heads::kHalves; ++half) {
    const int member = g + 8 * half;
    const float total = quad_sum(heads.total[half]);
    Element* line = with.out + (static_cast<int64_t>(row) * kHeads + head * GROUP + member) * HEAD_DIM;
    if (member >= GROUP) continue;
    const float factor = with.out_scale / with_sink(with, head * GROUP + member, heads.most[half], total);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      auto* target = reinterpret_cast<uint4*>(line + kTiles * (2 * c + column));
#pragma unroll
      for (int i = 0; i < kTiles; i += 8) {
        uint4 words;
        auto* word = reinterpret_cast<uint32_t*>(&words);
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const int at = 2 * half + column;
          word[k / 2] = as_elements(heads.sums[i + k][at] * factor, heads.sums[i + k + 1][at] * factor);
        }
        target[i / 8] = words;
      }
    }
  }
}

__device__ void write_part(const Arguments& with, const Heads& heads, int64_t part, int g, int c) {
#pragma unroll
  for (int half = 0; half < Heads::kHalves; ++half) {
    const int member = g + 8 * half;
    const float total = quad_sum(heads.total[half]);
    if (member >= GROUP) continue;
    float* line = with.partial + (part * GROUP + member) * HEAD_DIM;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      auto* target = reinterpret_cast<float4*>(line + kTiles * (2 * c + column));
      const int at = 2 * half + column;
#pragma unroll
      for (int i = 0; i < kTiles; i += 4) {
        target[i / 4] = make_float4(heads.sums[i][at], heads.sums[i + 1][at], heads.sums[i + 2][at], heads.sums[i + 3][at]);
      }
    }
    if (c == 0) with.stats[part * GROUP + member] = make_float2(heads.most[half], total);
  }
}

// Sums the parts of one row and kv head, numbered first + k * KV_HEADS, for members [begin, begin + kMembers).
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
    const int64_t at = (first + static_cast<int64_t>(k) * KV_HEADS) * GROUP + begin;
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
    const int number = head * GROUP + begin + member;
    const float factor = with.out_scale / with_sink(with, number, most[member], total[member]);
    auto* words = reinterpret_cast<uint32_t*>(out + (begin + member) * HEAD_DIM + kEach * lane);
#pragma unroll
    for (int i = 0; i < kEach; i += 2) words[i / 2] = as_elements(sums[member][i] * factor, sums[member][i + 1] * factor);
  }
}

// Hands in one warp's part of a row; the warp that brings the last one sums them all.
__device__ void hand_in(const Arguments& with, const Heads& heads, int row, int row_first, int row_last, int head,
                        int sub, int g, int c) {
  const int lane = 4 * g + c, first = with.plan->holder(row_first), last = with.plan->holder(row_last - 1);
  // Row and block numbers never fall from one part to the next, and one of them rises: their sum names a part.
  write_part(with, heads, (static_cast<int64_t>(row + blockIdx.x) * kSubs + sub) * KV_HEADS + head, g, c);
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
    merge<kMembers>(with, part, parts, head, begin, out, lane);
  }
  if constexpr (kRest > 0) merge<kRest>(with, part, parts, head, GROUP - kRest, out, lane);
}

// Computes one kv head (every kSubs-th page of it) of all rows of a share.
struct Attender {
  const Arguments& with;
  const Ring& ring;
  int head, sub, lane;

  __device__ void run(const Share& share) {
    const int g = lane / 4, c = lane % 4;
    const int* starts = with.plan->starts(gridDim.x);
    int page = share.first, row_first = share.row_first;
    wait_for_last_kernel();  // which wrote the queries
    for (int row = share.row; page < share.last; ++row) {
      const int row_last = starts[row + 1], end = min(row_last, share.last), length = with.lengths[row];
      const int oldest = with.window > 0 ? max(length - with.window, 0) : 0;
      Heads heads;
      heads.start(with.q + (static_cast<int64_t>(row) * kHeads + head * GROUP) * HEAD_DIM, g, c);
      for (; page < end; ++page) {
        const int index = page - share.first;
        if (kSubs > 1 && index % kSubs != sub) continue;
        add_page(heads, 2 * index, (page - row_first + oldest / PAGE) * PAGE, oldest, length, g, c);
      }
      if (kSubs == 1 && row_first >= share.first && row_last <= share.last) {
        write_out(with, heads, row, head, g, c);
      } else {
        hand_in(with, heads, row, row_first, row_last, head, sub, g, c);
      }
      row_first = row_last;
    }
  }

  // The page whose keys are piece `at` and whose first token is `start`, of which those in [oldest, length) are seen.
  __device__ void add_page(Heads& heads, int at, int start, int oldest, int length, int g, int c) {
    const uint8_t* keys = ring.slot(at) + head * kHeadBytes;
    const uint8_t* values = ring.slot(at + 1) + head * kHeadBytes;
#pragma unroll
    for (int tile = 0; tile < PAGE; tile += kTile) {
      const int first = start + tile;
      const bool used = first < length && first + kTile > oldest;
      float scores[2][4];
      if (tile == 0) ring.wait_filled(at);
      if (used) {
        heads.score(scores[0], keys + tile * kTokenBytes, g, c);
        heads.score(scores[1], keys + (tile + 8) * kTokenBytes, g, c);
      }
      if (tile == PAGE - kTile) ring.release(at, lane);
      if (used) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] *= with.scale_log2;
        if (first < oldest || first + kTile > length) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int token = first + 8 * (i / 4) + 2 * c + (i & 1);
            if (token < oldest || token >= length) scores[i / 4][i % 4] = -INFINITY;
          }
        }
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
    Attender{with, ring, warp % KV_HEADS, warp / KV_HEADS, lane}.run(share);
  }
}

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
__global__ void __launch_bounds__(kPlanThreads) deal(const int* lengths, int rows, int window, int blocks, Plan* plan) {
  __shared__ int sums[kPlanThreads];
  int* starts = plan->starts(blocks);
  const int thread = threadIdx.x, each = (rows + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(thread * each, rows), end = min(begin + each, rows);
  int own = 0;
  for (int row = begin; row < end; ++row) {
    const int oldest = window > 0 ? max(lengths[row] - window, 0) / PAGE : 0;
    own += (lengths[row] + PAGE - 1) / PAGE - oldest;
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

void plan_even_decode(TensorView lengths, TensorView plan, int64_t window, int64_t blocks) {
  const int64_t rows = lengths.size(0);
  require(plan.size(0) >= Plan::words(blocks, rows), "the plan is too small");
  deal<<<1, kPlanThreads, 0, stream_of(lengths)>>>(static_cast<const int*>(lengths.data_ptr()), static_cast<int>(rows),
                                                   static_cast<int>(window), static_cast<int>(blocks),
                                                   static_cast<Plan*>(plan.data_ptr()));
  check(cudaGetLastError());
}

// counters: int32 zeros [rows * KV_HEADS]; sinks: float32 [heads], or of no elements.
void run_even_decode(TensorView q, TensorView kv, TensorView out, TensorView pages, TensorView lengths, TensorView plan,
                     TensorView partial, TensorView stats, TensorView counters, TensorView sinks, int64_t window,
                     int64_t blocks, double scale, double out_scale, bool pdl) {
  const int64_t rows = q.size(0), parts = most_parts(blocks, rows);
  require(kv.size(2) == PAGE && kv.size(3) == KV_HEADS && kv.size(4) == HEAD_DIM, "pages of another shape");
  require(lies(kv, 1, PAGE * KV_HEADS * HEAD_DIM) && lies(kv, 2, KV_HEADS * HEAD_DIM), "pages with gaps");
  require(holds_elements(q) && q.size(1) == kHeads && q.size(2) == HEAD_DIM, "queries of another shape");
  require(lies(q, 0, kHeads * HEAD_DIM) && out.numel() == q.numel(), "queries or outputs with gaps");
  require(lengths.size(0) == rows && pages.size(0) == rows && lies(pages, 0, pages.size(1)), "another number of rows");
  require(plan.size(0) >= Plan::words(blocks, rows), "the plan is too small");
  require(partial.numel() >= parts * kHeads * HEAD_DIM, "the partial sums are too small");
  require(stats.numel() >= 2 * parts * kHeads, "the statistics are too small");
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
  allow_shared_memory<attend>(q, kSlots * kPieceBytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSlots * kPieceBytes;
  config.stream = stream_of(q);
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  check(cudaLaunchKernelEx(&config, attend, with));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_words, plan_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_parts, most_parts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan_even_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_decode);
