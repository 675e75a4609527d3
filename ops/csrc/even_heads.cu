// The product of up to 64 rows that makes queries, keys and values, and what becomes of them before attention (sm_90): norms of
// heads, rotation, and keys and values in their pages.
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32 or 64) and ELEMENT_F16 (weights, inputs and queries; 0: bf16, 1: fp16).
//
// A tile is one head. The blocks of a cluster share the inner dimension of one head after another: in each, one warp
// streams weights and inputs into a ring in shared memory and one warpgroup multiplies; then every block sends its sums to
// the others, each of which finishes its share of the rows. Weights depend on no kernel before this one: the ring fills
// with them while that one still runs.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#define SOURCE "even_heads"
#include "few_rows.cuh"

#include <cuda_fp8.h>

namespace {

constexpr int kHead = 128;  // features of a head
constexpr int kHalves = kHead / kBlock;
constexpr int kHeadPitch = kHead + 4;  // floats of a row of sums in shared memory
constexpr int kSplits = 2;                     // blocks of a cluster; four took longer
constexpr int kOwn = kRows / kSplits;          // rows that a block finishes
constexpr int kItems = kOwn * (kHead / 16);    // of eight dimensions of a row and their partners
constexpr int kTurns = (kItems + kMultipliers - 1) / kMultipliers;  // items of a thread
constexpr int kScalers = 64;
constexpr int kThreads = kMultipliers + 32 + kScalers;
constexpr int kMostSlots = 16;
constexpr int kWeightBytes = kHalves * kBlockBytes;  // of a chunk: a line of each feature
constexpr int kSlotBytes = kWeightBytes + kRows * 128;

struct Arguments {
  CUtensorMap weight;       // [heads * kHead, size_in]
  CUtensorMap x;            // [rows, size_in]
  const float* squares_in;  // null or [size_in / 64, rows]
  Element* q;               // [rows, queries, kHead]
  uint8_t* kv;              // [pages, (keys, values), page_size, keys, kHead]
  const Element* q_norm;    // null or [kHead]
  const Element* k_norm;    // the same
  const float* cos_sin;     // [positions, kHead]
  const void* positions;    // [rows], int64 or int32
  const int64_t* slots_of;  // [rows]: page * page_size + offset; negative: nowhere
  int64_t page_stride, part_stride, token_stride;  // elements of kv
  int rows, size_in, chunks, heads, queries, keys, page_size, slots;
  bool long_positions, fp8;
  float eps, k_scale, v_scale;
};

__device__ void scalers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kScalers) : "memory"); }
__device__ void factors_ready() { asm volatile("bar.arrive 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }
__device__ void wait_for_factors() { asm volatile("bar.sync 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }

// What is a block's: some chunks of every so many heads.
struct Share {
  int rank, first, last, begin, step;

  __device__ explicit Share(const Arguments& with)
      : rank(blockIdx.x % kSplits), first(with.chunks * rank / kSplits), last(with.chunks * (rank + 1) / kSplits),
        begin(blockIdx.x / kSplits), step(gridDim.x / kSplits) {}
  __device__ int count(const Arguments& with) const {
    return (last - first) * ((with.heads - begin + step - 1) / step);
  }
};

struct Ring {
  uint8_t* slots;
  uint64_t* filled;
  uint64_t* emptied;
  int count;
};

// --- the warp that streams

__device__ void stream(const Arguments& with, const Ring& ring) {
  const Share own(with);
  const int count = own.count(with), early = min(count, ring.count), chunks = max(own.last - own.first, 1);
  const auto fetch_weights = [&](int i, int at) {
    barrier_expect(ring.filled + at, kSlotBytes);
    fetch_lines(ring.slots + at * kSlotBytes, &with.weight, (own.first + i % chunks) * kLine,
                (own.begin + i / chunks * own.step) * kHead, ring.filled + at, kReadOnce);
  };
  const auto fetch_inputs = [&](int i, int at) {
    fetch_lines(ring.slots + at * kSlotBytes + kWeightBytes, &with.x, (own.first + i % chunks) * kLine, 0,
                ring.filled + at, kReadOften);
  };
  for (int i = 0; i < early; ++i) fetch_weights(i, i);
  wait_for_last_kernel();
  for (int i = 0; i < early; ++i) fetch_inputs(i, i);
  for (int i = early, at = 0, turn = 0; i < count; ++i) {
    barrier_wait(ring.emptied + at, turn & 1);
    fetch_weights(i, at);
    fetch_inputs(i, at);
    if (++at == ring.count) at = 0, ++turn;
  }
}

// --- the warps that find factors of the norm for a block's rows, from the sums of squares that the last product left

__device__ void find_factors(const Arguments& with, float* factors, int thread) {
  constexpr int kTogether = kScalers / kOwn;  // threads of a row
  __shared__ float shares[kScalers];
  wait_for_last_kernel();
  const int own = thread % kOwn, row = blockIdx.x % kSplits * kOwn + own;
  float share = 0.f;
  if (row < with.rows) {
#pragma unroll 16
    for (int part = thread / kOwn; part < with.size_in / 64; part += kTogether) {
      share += __ldcg(with.squares_in + part * with.rows + row);
    }
  }
  shares[thread] = share;
  scalers_meet();
  if (thread < kOwn) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum += shares[i * kOwn + thread];
    factors[thread] = rsqrtf(sum / with.size_in + with.eps);
  }
  __syncwarp();
  factors_ready();
}

// --- what becomes of a head

__device__ void load_eight(float (&values)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

__device__ void store_eight(Element* to, const float (&values)[8]) {
  Eight eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.values[i] = static_cast<Element>(values[i]);
  *reinterpret_cast<uint4*>(to) = eight.bits;
}

// Stores zeros for what bf16 could not hold: what a failed row leaves in a page must not reach the page's next user.
__device__ void store_cached(const Arguments& with, int64_t place, float (&values)[8], float scale) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fabsf(values[i]) < 3.38e38f ? values[i] : 0.f;
  if (!with.fp8) return store_eight(reinterpret_cast<Element*>(with.kv) + place, values);
  union {
    uint2 bits;
    __nv_fp8_e4m3 values[8];
  } eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.values[i] = __nv_fp8_e4m3(fminf(fmaxf(values[i] / scale, -448.f), 448.f));
  *reinterpret_cast<uint2*>(with.kv + place) = eight.bits;
}

// The norm of a head that eight neighbouring lanes hold.
__device__ void norm_head(float (&low)[8], float (&high)[8], const Element* norm, int part, float eps) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += low[i] * low[i] + high[i] * high[i];
#pragma unroll
  for (int step = 1; step < 8; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = rsqrtf(squares / kHead + eps);
  Eight first, second;
  first.bits = *reinterpret_cast<const uint4*>(norm + part * 8);
  second.bits = *reinterpret_cast<const uint4*>(norm + kHead / 2 + part * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] *= factor * static_cast<float>(first.values[i]);
    high[i] *= factor * static_cast<float>(second.values[i]);
  }
}

__device__ void rotate(float (&low)[8], float (&high)[8], const float (&cos)[8], const float (&sin)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float turned = low[i] * cos[i] - high[i] * sin[i];
    high[i] = high[i] * cos[i] + low[i] * sin[i];
    low[i] = turned;
  }
}

// Eight dimensions of a row, 8 * part and on, and their partners half a head further.
struct HeadItem {
  int own, row, part;
  bool inside;

  __device__ HeadItem(const Arguments& with, int number)
      : own(number / 8 % kOwn), row(blockIdx.x % kSplits * kOwn + own), part(number % 8),
        inside(number < kItems && row < with.rows) {}

  __device__ int64_t position(const Arguments& with) const {
    if (!inside) return 0;
    return with.long_positions ? static_cast<const int64_t*>(with.positions)[row]
                               : static_cast<const int*>(with.positions)[row];
  }

  __device__ void store(const Arguments& with, int head, int64_t slot, float (&low)[8], float (&high)[8]) const {
    if (!inside) return;
    if (head < with.queries) {
      Element* to = with.q + (static_cast<int64_t>(row) * with.queries + head) * kHead + part * 8;
      store_eight(to, low);
      store_eight(to + kHead / 2, high);
    } else if (slot >= 0) {
      const bool is_k = head < with.queries + with.keys;
      const int64_t at = head - with.queries - (is_k ? 0 : with.keys);
      const int64_t place = slot / with.page_size * with.page_stride + (is_k ? 0 : with.part_stride) +
                            slot % with.page_size * with.token_stride + at * kHead + part * 8;
      store_cached(with, place, low, is_k ? with.k_scale : with.v_scale);
      store_cached(with, place + kHead / 2, high, is_k ? with.k_scale : with.v_scale);
    }
  }
};

// --- the warpgroup that multiplies

// Where sums of a head meet: those of each block of the cluster for this block's rows.
struct HeadExchange {
  float* staged;  // [kSplits, kOwn, kHeadPitch]
  uint64_t* arrived;
  uint64_t* taken;

  // Sends each row's sums to the block that finishes it.
  __device__ void send(const float (&sums)[kHalves][kSums], int round, int thread) const {
    const int lane = thread % 32, g = lane / 4, c = lane % 4, rank = blockIdx.x % kSplits;
    if (round > 0) barrier_wait_cluster(taken, (round - 1) & 1);
    const uint32_t place = shared_address(staged + rank * kOwn * kHeadPitch + 16 * (thread / 32) + g);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const int row = 8 * (i / 4) + 2 * c, own = row % kOwn;
        const uint32_t there = address_in(place + (own * kHeadPitch + half * kBlock) * 4, row / kOwn);
        const uint32_t barrier = address_in(shared_address(arrived), row / kOwn);
        store_in(there, sums[half][i], barrier);
        store_in(there + kHeadPitch * 4, sums[half][i + 1], barrier);
        store_in(there + 8 * 4, sums[half][i + 2], barrier);
        store_in(there + kHeadPitch * 4 + 8 * 4, sums[half][i + 3], barrier);
      }
    }
    tell_everywhere(arrived, kSplits, kHalves * kOwn * 16 * 4, lane);
  }

  __device__ void wait(int round) const { barrier_wait_cluster(arrived, round & 1); }
  __device__ void done(int thread) const { tell_everywhere(taken, kSplits, 0, thread % 32); }
  // Nobody may leave before all that others send has arrived.
  __device__ void end(int rounds) const {
    if (rounds > 0) barrier_wait_cluster(taken, (rounds - 1) & 1);
  }

  // Eight sums of a row, in the order of the inner dimension, times the row's factor.
  __device__ void add_up(float (&values)[8], int own, int line, float factor) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.f;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      float part[8];
      load_eight(part, staged + (split * kOwn + own) * kHeadPitch + line);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] += part[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= factor;
  }
};

// The sums of the next chunks of the ring, which stands `at` a slot.
__device__ void sum_up(float (&sums)[kHalves][kSums], const Ring& ring, int count, int& at, int& turn, int thread) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[half][i] = 0.f;
  }
  int behind = -1;
  for (int i = 0; i < count; ++i) {
    barrier_wait(ring.filled + at, turn & 1);
    const uint8_t* slot = ring.slots + at * kSlotBytes;
    const uint64_t w = lines_at(slot), x = lines_at(slot + kWeightBytes);
    multiply_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 16 elements, 32 bytes of a line
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        multiply_add(sums[half], w + (half * kBlockBytes + step * 32) / 16, x + step * 2);
      }
    }
    multiply_commit();
    multiply_wait<1>();
    if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
    behind = at;
    if (++at == ring.count) at = 0, ++turn;
  }
  multiply_wait<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) sums_ready(sums[half]);
  if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
}

__device__ void multiply(const Arguments& with, const Ring& ring, const HeadExchange& exchange, const float* factors,
                         int thread) {
  const Share own(with);
  int at = 0, turn = 0, round = 0;
  wait_for_last_kernel();
  float cos[kTurns][8], sin[kTurns][8];
  int64_t slot[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const HeadItem item(with, thread + i * kMultipliers);
    const float* angles = with.cos_sin + item.position(with) * kHead + item.part * 8;
    load_eight(cos[i], angles);
    load_eight(sin[i], angles + kHead / 2);
    slot[i] = item.inside ? with.slots_of[item.row] : -1;
  }
  for (int head = own.begin; head < with.heads; head += own.step, ++round) {
    float sums[kHalves][kSums];
    sum_up(sums, ring, own.last - own.first, at, turn, thread);
    if (round == 0 && with.squares_in != nullptr) wait_for_factors();
    exchange.send(sums, round, thread);
    exchange.wait(round);
    const Element* norm = head < with.queries ? with.q_norm : with.k_norm;
    const bool turns = head < with.queries + with.keys;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const HeadItem item(with, thread + i * kMultipliers);
      const float factor = with.squares_in == nullptr ? 1.f : factors[item.own];
      float low[8], high[8];
      exchange.add_up(low, item.own, 8 * item.part, factor);
      exchange.add_up(high, item.own, kHead / 2 + 8 * item.part, factor);
      if (turns && norm != nullptr) norm_head(low, high, norm, item.part, with.eps);
      if (turns) rotate(low, high, cos[i], sin[i]);
      item.store(with, head, slot[i], low, high);
    }
    exchange.done(thread);
  }
  exchange.end(round);
  if (round == 0 && with.squares_in != nullptr) wait_for_factors();
}

__global__ void __launch_bounds__(kThreads, 1) even_heads(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[kMostSlots], emptied[kMostSlots], arrived, taken;
  __shared__ float factors[kRows];
  __shared__ __align__(16) float staged[kRows * kHeadPitch];
  const int thread = threadIdx.x;
  let_next_kernel_start();
  if (thread == 0) {
    for (int slot = 0; slot < with.slots; ++slot) {
      barrier_init(filled + slot, 1);
      barrier_init(emptied + slot, kMultipliers / 32);
    }
    barrier_init(&arrived, kSplits * kMultipliers / 32);
    barrier_init(&taken, kSplits * kMultipliers / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_begins();
  const Ring ring{slots, filled, emptied, with.slots};
  if (thread < kMultipliers) {
    multiply(with, ring, HeadExchange{staged, &arrived, &taken}, factors, thread);
  } else if (thread < kMultipliers + 32) {
    if (thread == kMultipliers) stream(with, ring);
    __syncwarp();
  } else if (with.squares_in != nullptr) {
    find_factors(with, factors, thread - kMultipliers - 32);
  }
}

// --- what Python calls

constexpr int kMostRingBytes = 190 * 1024;

void run_even_heads(TensorView x, TensorView weight, TensorView squares_in, bool scaled, TensorView q, TensorView kv,
                    TensorView q_norm, TensorView k_norm, bool normed, TensorView cos_sin, TensorView positions,
                    TensorView slots_of, double k_scale, double v_scale, double eps, int64_t slots,
                    bool pdl) {
  Arguments with{};
  with.weight = lines_of(weight, kHead);
  with.x = lines_of(x, kRows);
  with.squares_in = scaled ? static_cast<const float*>(squares_in.data_ptr()) : nullptr;
  with.q = static_cast<Element*>(q.data_ptr());
  with.kv = static_cast<uint8_t*>(kv.data_ptr());
  with.q_norm = normed ? static_cast<const Element*>(q_norm.data_ptr()) : nullptr;
  with.k_norm = normed ? static_cast<const Element*>(k_norm.data_ptr()) : nullptr;
  with.cos_sin = static_cast<const float*>(cos_sin.data_ptr());
  with.positions = positions.data_ptr();
  with.long_positions = positions.dtype().bits == 64;
  with.slots_of = static_cast<const int64_t*>(slots_of.data_ptr());
  with.page_stride = kv.stride(0), with.part_stride = kv.stride(1), with.token_stride = kv.stride(2);
  with.rows = static_cast<int>(x.size(0));
  with.size_in = static_cast<int>(x.size(1));
  with.chunks = with.size_in / kLine;
  with.heads = static_cast<int>(weight.size(0)) / kHead;
  with.queries = static_cast<int>(q.size(1)) / kHead;
  with.keys = static_cast<int>(kv.size(3));
  with.page_size = static_cast<int>(kv.size(2));
  with.fp8 = kv.dtype().bits == 8;
  with.k_scale = static_cast<float>(k_scale), with.v_scale = static_cast<float>(v_scale);
  with.eps = static_cast<float>(eps);
  with.slots = static_cast<int>(slots);
  require(with.rows <= kRows, "too many rows");
  require(slots <= kMostSlots && slots * kSlotBytes <= kMostRingBytes, "too many slots");
  require(kv.size(4) == kHead && with.heads == with.queries + 2 * with.keys, "heads of another shape");
  ClusterLaunch<even_heads, kSplits> launch(x, kThreads, with.slots * kSlotBytes);
  launch.run(with, few_clusters(with.heads, launch.most), pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_heads);
