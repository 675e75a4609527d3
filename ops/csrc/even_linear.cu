// Products of up to 64 rows, as fast as their weights are read (sm_90).
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32 or 64) and ELEMENT_F16 (weights, inputs and outputs; 0: bf16, 1: fp16).
//
// A tile is 64 features, or 32 gates and their ups. The blocks of a cluster share the inner dimension of one tile after
// another. In each block one warp streams weights and inputs into a ring in shared memory and one warpgroup multiplies;
// then every block sends its sums to the others, each of which finishes its share of the rows. Clusters of one block take
// equal numbers of chunks instead of whole tiles: who has a tile's first chunk waits for the sums of the others, which are
// blocks of lower numbers, so that they run already or have run. Sums are added in the order of the inner dimension:
// results do not vary from run to run.
//
// Weights depend on no kernel before this one: the ring fills with them while that one still runs.
//
// A norm between two products costs no kernel: the first (kAdd) adds the residual, multiplies by the norm's weight and
// leaves sums of squares; the second (`squares_in`) multiplies its outputs by each row's factor.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>

using tvm::ffi::TensorView;

namespace {

#if ELEMENT_F16
using Element = __half;
#define KIND "f16"
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#else
using Element = __nv_bfloat16;
#define KIND "bf16"
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#endif

constexpr int kRows = ROWS;
constexpr int kLine = 64;                   // elements of a line of shared memory, 128 bytes
constexpr int kBlock = 64;                  // lines of weights of a tile: what wgmma multiplies
constexpr int kBlockBytes = kBlock * 128;
constexpr int kSums = kRows / 2;            // of a thread
constexpr int kMultipliers = 128;
constexpr int kScalers = 64;
constexpr int kThreads = kMultipliers + 32 + kScalers;
constexpr int kMostSlots = 16;
constexpr int kPitch = kBlock + 4;          // floats of a row of sums in shared memory
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // L2 policies: evict first
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict last

enum Kind { kPlain = 0, kGated = 1, kAdd = 2 };  // kGated: silu(gate) * up

struct Arguments {
  CUtensorMap weight;  // [features, size_in]; kGated: [features / 8, (gate, up), 8, size_in]
  CUtensorMap x;       // [rows, size_in]
  Element* out;        // [rows, size_out], out_stride apart
  Element* residual;   // kAdd: [rows, size_out], read and written
  const Element* norm; // kAdd: [size_out]
  float* squares_out;       // kAdd: [size_out / 64, rows]
  const float* squares_in;  // null or [size_in / 64, rows]
  float* planes;            // [blocks, sums of a tile]: parts of tiles that blocks share
  int* counters;            // [tiles], zeros: parts handed in
  int rows, size_out, size_in, chunks, tiles, slots, kind;
  int64_t out_stride;
  float eps;
};

// --- synchronisation

__device__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// As `barrier_wait`, for what other blocks of the cluster did before they arrived.
__device__ void barrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void fetch_lines(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Eight lines of gates, eight of ups, and so on.
__device__ void fetch_gated(void* target, const CUtensorMap* map, int inner, int feature, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(0), "r"(feature / 8), "r"(shared_address(barrier)), "l"(kReadOnce)
      : "memory");
}

__device__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
__device__ uint32_t address_in(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

__device__ void store_in(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Tells all `blocks` blocks of the cluster what this warp has done.
__device__ void arrive_everywhere(uint64_t* barrier, int blocks, int lane) {
  __syncwarp();
  if (lane < blocks) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     address_in(shared_address(barrier), lane))
                 : "memory");
  }
}

__device__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void multipliers_meet() { asm volatile("bar.sync 3, %0;" ::"n"(kMultipliers) : "memory"); }
__device__ void scalers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kScalers) : "memory"); }
__device__ void factors_ready() { asm volatile("bar.arrive 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }
__device__ void wait_for_factors() { asm volatile("bar.sync 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }

// --- arithmetic

// Describes lines of 128 bytes, swizzled, in groups of eight.
__device__ uint64_t lines_at(const void* pointer) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{1} << 16) | ((shared_address(pointer) & 0x3FFFF) >> 4);
}

__device__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from using sums before the wait above it.
__device__ void sums_ready(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define MULTIPLY(n, sums, a, b) \
  "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." KIND "." KIND " {" sums "}, " a ", " b ", adds, 1, 1, 0, 0;\n}"

// sum += a b^T over 16 inner elements.
__device__ void multiply_add(float (&sum)[kSums], uint64_t a, uint64_t b) {
#if ROWS == 16
  asm volatile(MULTIPLY("16", S0, "%8", "%9")
               : EIGHT(0)
               : "l"(a), "l"(b));
#elif ROWS == 32
  asm volatile(MULTIPLY("32", S0 ", " S1, "%16", "%17")
               : EIGHT(0), EIGHT(8)
               : "l"(a), "l"(b));
#else
  asm volatile(MULTIPLY("64", S0 ", " S1 ", " S2 ", " S3, "%32", "%33")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
               : "l"(a), "l"(b));
#endif
}

__device__ float silu(float x) { return x / (1.f + __expf(-x)); }

union Eight {
  uint4 bits;
  Element values[8];
};

// --- the division

// How a product is divided: blocks of a cluster, and whether a tile is gates and ups by turns.
template <int kSplitsOf, bool kGatedOf>
struct Shape {
  static constexpr int kSplits = kSplitsOf;
  static constexpr int kLines = 2;  // of a chunk
  static constexpr bool kGated = kGatedOf;
  static constexpr int kWide = kGated ? 32 : 64;     // features of a tile
  static constexpr int kOwn = kRows / kSplits;       // rows that a block finishes
  static constexpr int kItems = kOwn * (kWide / 8);  // of eight features of a row
  static constexpr int kTurns = (kItems + kMultipliers - 1) / kMultipliers;  // items of a thread
  static constexpr int kWeightBytes = kLines * kBlockBytes;
  static constexpr int kSlotBytes = kWeightBytes + kLines * kRows * 128;
};

// A block's own shared memory but for its sums.
struct Ring {
  uint8_t* slots;
  uint64_t* filled;
  uint64_t* emptied;
  int count;
};

// What is a block's, and where it stands: some chunks of every so many tiles.
template <class S>
struct Cursor {
  int rank, first, last, tile, chunk, step;

  __device__ explicit Cursor(const Arguments& with)
      : rank(blockIdx.x % S::kSplits),
        first(with.chunks * rank / S::kSplits),
        last(with.chunks * (rank + 1) / S::kSplits),
        tile(blockIdx.x / S::kSplits),
        chunk(first),
        step(gridDim.x / S::kSplits) {}
  __device__ int count(const Arguments& with) const { return (last - first) * ((with.tiles - tile + step - 1) / step); }
  __device__ void advance() {
    if (++chunk == last) chunk = first, tile += step;
  }
};

// Chunks of one tile after another, if nobody shares the inner dimension: higher blocks have earlier ones.
template <bool kGated>
struct Cursor<Shape<1, kGated>> {
  int begin, end, chunks, tile, chunk;

  __device__ explicit Cursor(const Arguments& with)
      : begin(begin_of(with, rank())), end(begin_of(with, rank() + 1)), chunks(with.chunks), tile(begin / chunks),
        chunk(begin % chunks) {}
  __device__ static int rank() { return gridDim.x - 1 - blockIdx.x; }
  __device__ static int begin_of(const Arguments& with, int rank) {
    return static_cast<int>(static_cast<int64_t>(with.tiles) * with.chunks * rank / gridDim.x);
  }
  __device__ int count(const Arguments&) const { return end - begin; }
  __device__ void advance() {
    if (++chunk == chunks) chunk = 0, ++tile;
  }
};

// --- the warp that streams

template <class S>
__device__ void fetch_weights(const Arguments& with, uint8_t* slot, const Cursor<S>& at, uint64_t* filled) {
#pragma unroll
  for (int line = 0; line < S::kLines; ++line) {
    const int inner = (at.chunk * S::kLines + line) * kLine;
    if constexpr (S::kGated) {
      fetch_gated(slot + line * kBlockBytes, &with.weight, inner, at.tile * S::kWide, filled);
    } else {
      fetch_lines(slot + line * kBlockBytes, &with.weight, inner, at.tile * S::kWide, filled, kReadOnce);
    }
  }
}

template <class S>
__device__ void fetch_inputs(const Arguments& with, uint8_t* slot, const Cursor<S>& at, uint64_t* filled) {
#pragma unroll
  for (int line = 0; line < S::kLines; ++line) {
    fetch_lines(slot + S::kWeightBytes + line * kRows * 128, &with.x, (at.chunk * S::kLines + line) * kLine, 0, filled,
                kReadOften);
  }
}

template <class S>
__device__ void stream(const Arguments& with, const Ring& ring) {
  Cursor<S> weights(with), inputs = weights;
  const int count = weights.count(with), early = min(count, ring.count);
  for (int i = 0; i < early; ++i, weights.advance()) {
    barrier_expect(ring.filled + i, S::kSlotBytes);
    fetch_weights<S>(with, ring.slots + i * S::kSlotBytes, weights, ring.filled + i);
  }
  wait_for_last_kernel();
  for (int i = 0; i < early; ++i, inputs.advance()) {
    fetch_inputs<S>(with, ring.slots + i * S::kSlotBytes, inputs, ring.filled + i);
  }
  int at = 0, turn = 0;
  for (int i = early; i < count; ++i, weights.advance()) {
    uint8_t* slot = ring.slots + at * S::kSlotBytes;
    barrier_wait(ring.emptied + at, turn & 1);
    barrier_expect(ring.filled + at, S::kSlotBytes);
    fetch_weights<S>(with, slot, weights, ring.filled + at);
    fetch_inputs<S>(with, slot, weights, ring.filled + at);
    if (++at == ring.count) at = 0, ++turn;
  }
}

// --- the warps that find factors of the norm for a block's rows, from the sums of squares that the last product left

template <class S>
__device__ void find_factors(const Arguments& with, float* factors, int thread) {
  constexpr int kTogether = kScalers / S::kOwn;  // threads of a row
  __shared__ float shares[kScalers];
  wait_for_last_kernel();
  const int parts = with.size_in / 64, own = thread % S::kOwn;
  const int row = blockIdx.x % S::kSplits * S::kOwn + own;
  float share = 0.f;
  if (row < with.rows) {
#pragma unroll 16
    for (int part = thread / S::kOwn; part < parts; part += kTogether) {
      share += __ldcg(with.squares_in + part * with.rows + row);
    }
  }
  shares[thread] = share;
  scalers_meet();
  if (thread < S::kOwn) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum += shares[i * S::kOwn + thread];
    factors[thread] = rsqrtf(sum / with.size_in + with.eps);
  }
  __syncwarp();
  factors_ready();
}

// --- the warpgroup that multiplies

// Where sums of a tile meet: those of each block of the cluster for this block's rows.
template <class S>
struct Exchange {
  float* staged;  // [kSplits, kOwn, kPitch]
  uint64_t* arrived;
  uint64_t* taken;

  // Sends each row's sums to the block that finishes it.
  __device__ void send(const float (&sums)[kSums], int round, int thread) const {
    const int lane = thread % 32, g = lane / 4, c = lane % 4, rank = blockIdx.x % S::kSplits;
    if (round > 0) barrier_wait_cluster(taken, (round - 1) & 1);
    const uint32_t place = shared_address(staged + rank * S::kOwn * kPitch + 16 * (thread / 32) + g);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const int row = 8 * (i / 4) + 2 * c, own = row % S::kOwn;
      const uint32_t there = address_in(place + own * (kPitch * 4), row / S::kOwn);
      store_in(there, sums[i]);
      store_in(there + kPitch * 4, sums[i + 1]);
      store_in(there + 8 * 4, sums[i + 2]);
      store_in(there + kPitch * 4 + 8 * 4, sums[i + 3]);
    }
    arrive_everywhere(arrived, S::kSplits, lane);
  }

  __device__ void wait(int round) const { barrier_wait_cluster(arrived, round & 1); }
  __device__ void done(int thread) const { arrive_everywhere(taken, S::kSplits, thread % 32); }

  // Eight sums of a row.
  __device__ void add_up(float (&values)[8], int row, int line) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.f;
#pragma unroll
    for (int split = 0; split < S::kSplits; ++split) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(staged + (split * S::kOwn + row) * kPitch + line + i);
        values[i] += four.x, values[i + 1] += four.y, values[i + 2] += four.z, values[i + 3] += four.w;
      }
    }
  }
};

// Eight features of a row.
template <class S>
struct Item {
  int own, row, part, feature;
  bool exists, inside;

  __device__ Item(const Arguments& with, int tile, int number)
      : own(number / (S::kWide / 8)),
        row(blockIdx.x % S::kSplits * S::kOwn + own),
        part(number % (S::kWide / 8)),
        feature(tile * S::kWide + part * 8),
        exists(number < S::kItems),
        inside(exists && row < with.rows && feature < with.size_out) {}
};

// Adds the residual to `values`, which become the norm's input, and leaves the squares.
template <class S>
__device__ void add_residual(const Arguments& with, float (&values)[8], const Item<S>& item, Eight& residual,
                             const Eight& norm) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] += static_cast<float>(residual.values[i]);
    squares += values[i] * values[i];
    residual.values[i] = static_cast<Element>(values[i]);
    values[i] *= static_cast<float>(norm.values[i]);
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (!item.inside) return;
  *reinterpret_cast<uint4*>(with.residual + static_cast<int64_t>(item.row) * with.size_out + item.feature) = residual.bits;
  if (item.part == 0) with.squares_out[item.feature / 64 * with.rows + item.row] = squares;
}

template <class S>
__device__ void finish_tile(const Arguments& with, const Exchange<S>& exchange, const float (&sums)[kSums], int tile,
                            int round, const float* factors, int thread) {
  Eight residual[S::kTurns]{}, norm[S::kTurns]{};
  exchange.send(sums, round, thread);
  if (!S::kGated && with.kind == kAdd) {
#pragma unroll
    for (int turn = 0; turn < S::kTurns; ++turn) {
      const Item<S> item(with, tile, thread + turn * kMultipliers);
      if (!item.inside) continue;
      const int64_t place = static_cast<int64_t>(item.row) * with.size_out + item.feature;
      residual[turn].bits = *reinterpret_cast<const uint4*>(with.residual + place);
      norm[turn].bits = *reinterpret_cast<const uint4*>(with.norm + item.feature);
    }
  }
  exchange.wait(round);
#pragma unroll
  for (int turn = 0; turn < S::kTurns; ++turn) {
    const Item<S> item(with, tile, thread + turn * kMultipliers);
    float values[8];
    const int own = item.exists ? item.own : 0;
    const float factor = with.squares_in == nullptr ? 1.f : factors[own];
    if constexpr (S::kGated) {
      float ups[8];
      exchange.add_up(values, own, 16 * item.part);
      exchange.add_up(ups, own, 16 * item.part + 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = silu(values[i] * factor) * (ups[i] * factor);
    } else {
      exchange.add_up(values, own, 8 * item.part);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= factor;
      if (with.kind == kAdd) add_residual<S>(with, values, item, residual[turn], norm[turn]);
    }
    Eight result;
#pragma unroll
    for (int i = 0; i < 8; ++i) result.values[i] = static_cast<Element>(values[i]);
    if (item.inside) *reinterpret_cast<uint4*>(with.out + item.row * with.out_stride + item.feature) = result.bits;
  }
  exchange.done(thread);
}

// Gives the sums of the last chunks of a tile to the block that has its first.
__device__ void hand_in(const Arguments& with, const float (&sums)[kSums], int tile, int rank, int thread) {
  float4* plane = reinterpret_cast<float4*>(with.planes) + rank * (kSums / 4 * kMultipliers) + thread;
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    __stcg(plane + i / 4 * kMultipliers, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  __threadfence();
  multipliers_meet();
  if (thread == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(with.counters + tile) : "memory");
}

// Adds what ranks [first, last) handed in.
__device__ void take_parts(const Arguments& with, float (&sums)[kSums], int tile, int first, int last, int thread) {
  if (thread == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(with.counters + tile) : "memory");
    } while (arrived < last - first);
    with.counters[tile] = 0;
  }
  multipliers_meet();
  for (int rank = first; rank < last; ++rank) {
    const float4* plane = reinterpret_cast<const float4*>(with.planes) + rank * (kSums / 4 * kMultipliers) + thread;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float4 four = __ldcg(plane + i / 4 * kMultipliers);
      sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
  }
}

// The sums of the next chunks of the ring, which stands `at` a slot.
template <class S>
__device__ void sum_up(float (&sums)[kSums], const Ring& ring, int count, int& at, int& turn, int thread) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
  int behind = -1;
  for (int i = 0; i < count; ++i) {
    barrier_wait(ring.filled + at, turn & 1);
    const uint8_t* slot = ring.slots + at * S::kSlotBytes;
    const uint64_t w = lines_at(slot), x = lines_at(slot + S::kWeightBytes);
    multiply_begin();
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // of 16 elements, 32 bytes of a line
        multiply_add(sums, w + (line * kBlockBytes + step * 32) / 16, x + (line * kRows * 128 + step * 32) / 16);
      }
    }
    multiply_commit();
    multiply_wait<1>();
    if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
    behind = at;
    if (++at == ring.count) at = 0, ++turn;
  }
  multiply_wait<0>();
  sums_ready(sums);
  if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
}

template <class S>
__device__ void multiply(const Arguments& with, const Ring& ring, const Exchange<S>& exchange, const float* factors,
                         int thread) {
  int at = 0, turn = 0, round = 0;
  float sums[kSums];
  const Cursor<S> own(with);
  wait_for_last_kernel();
  if constexpr (S::kSplits > 1) {
    for (int tile = own.tile; tile < with.tiles; tile += own.step, ++round) {
      sum_up<S>(sums, ring, own.last - own.first, at, turn, thread);
      if (round == 0 && with.squares_in != nullptr) wait_for_factors();
      finish_tile<S>(with, exchange, sums, tile, round, factors, thread);
    }
  } else {
    bool waits = with.squares_in != nullptr;
    for (int pair = own.begin; pair < own.end;) {
      const int tile = pair / own.chunks, from = pair % own.chunks, count = min(own.chunks - from, own.end - pair);
      sum_up<S>(sums, ring, count, at, turn, thread);
      pair += count;
      if (from > 0) {
        hand_in(with, sums, tile, own.rank(), thread);
        continue;
      }
      if (count < own.chunks) {
        int last = own.rank() + 1;
        while (last < gridDim.x && own.begin_of(with, last) < (tile + 1) * own.chunks) ++last;
        take_parts(with, sums, tile, own.rank() + 1, last, thread);
      }
      if (waits) wait_for_factors(), waits = false;
      finish_tile<S>(with, exchange, sums, tile, round++, factors, thread);
    }
    if (waits) wait_for_factors();
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 2) even_linear(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[kMostSlots], emptied[kMostSlots], arrived, taken;
  __shared__ float factors[kRows];
  __shared__ __align__(16) float staged[kRows * kPitch];
  const int thread = threadIdx.x;
  let_next_kernel_start();
  if (thread == 0) {
    for (int slot = 0; slot < with.slots; ++slot) {
      barrier_init(filled + slot, 1);
      barrier_init(emptied + slot, kMultipliers / 32);
    }
    barrier_init(&arrived, S::kSplits * kMultipliers / 32);
    barrier_init(&taken, S::kSplits * kMultipliers / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meets();
  const Ring ring{slots, filled, emptied, with.slots};
  if (thread < kMultipliers) {
    multiply<S>(with, ring, Exchange<S>{staged, &arrived, &taken}, factors, thread);
  } else if (thread < kMultipliers + 32) {
    if (thread == kMultipliers) {
      stream<S>(with, ring);
    }
    __syncwarp();
  } else if (with.squares_in != nullptr) {
    find_factors<S>(with, factors, thread - kMultipliers - 32);
  }
  cluster_meets();  // nobody leaves while others may still write to its memory
}

// --- what Python calls

void require(bool holds, const char* what) {
  if (!holds) TVM_FFI_THROW(ValueError) << "even_linear: " << what;
}

void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "even_linear: " << cudaGetErrorString(status);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// How a matrix is fetched: its sizes and strides (bytes, from the second on), innermost first, and what is fetched at once.
template <int kDims>
CUtensorMap map_of(const TensorView& matrix, const uint64_t (&sizes)[kDims], const uint64_t (&strides)[kDims - 1],
                   const uint32_t (&box)[kDims]) {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status));
    return reinterpret_cast<Encode>(found);
  }();
  uint32_t steps[kDims];
  for (uint32_t& step : steps) step = 1;
  CUtensorMap map;
  const CUresult status = encode(&map, kMapType, kDims, matrix.data_ptr(), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, "a matrix that cannot be fetched in tiles");
  return map;
}

CUtensorMap lines_of(const TensorView& matrix, int rows) {
  return map_of<2>(matrix, {static_cast<uint64_t>(matrix.size(1)), static_cast<uint64_t>(matrix.size(0))},
                   {matrix.stride(0) * sizeof(Element)}, {kLine, static_cast<uint32_t>(rows)});
}

CUtensorMap gated_lines_of(const TensorView& matrix) {
  const uint64_t line = matrix.stride(0) * sizeof(Element), features = matrix.size(0) / 2;
  return map_of<4>(matrix, {static_cast<uint64_t>(matrix.size(1)), 8, 2, features / 8}, {line, features * line, 8 * line},
                   {kLine, 8, 2, kBlock / 16});
}

constexpr int kMostRingBytes = 206 * 1024;

// That run at once, one block on a multiprocessor.
int most_clusters(const void* kernel, const cudaLaunchConfig_t& config, int device, int splits) {
  int found = 0, processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  check(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
  require(found > 0, "clusters do not fit");
  return found < processors / splits ? found : processors / splits;
}

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, const TensorView& planes,
            const TensorView& counters, bool pdl) {
  with.weight = S::kGated ? gated_lines_of(weight) : lines_of(weight, kBlock);
  with.x = lines_of(x, kRows);
  with.chunks = (with.size_in / kLine + S::kLines - 1) / S::kLines;
  with.tiles = (with.size_out + S::kWide - 1) / S::kWide;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(even_linear<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostRingBytes);
  check(allowed);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = S::kSplits;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(S::kSplits);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = with.slots * S::kSlotBytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
  config.attrs = attributes;
  config.numAttrs = 1;
  static const int most =
      most_clusters(reinterpret_cast<const void*>(even_linear<S>), config, x.device().device_id, S::kSplits);
  const int rounds = (with.tiles + most - 1) / most;
  const int clusters = S::kSplits == 1 ? (with.tiles < most ? with.tiles : most) : (with.tiles + rounds - 1) / rounds;
  require(planes.numel() >= static_cast<int64_t>(clusters) * kBlock * kRows, "the partial sums are too small");
  require(counters.numel() >= with.tiles, "the counters are too few");
  config.gridDim = dim3(clusters * S::kSplits);
  config.numAttrs = pdl ? 2 : 1;
  check(cudaLaunchKernelEx(&config, even_linear<S>, with));
}

void run_even_linear(TensorView x, TensorView weight, TensorView out, TensorView residual, TensorView norm,
                     TensorView squares_out, TensorView squares_in, TensorView planes, TensorView counters, int64_t kind,
                     bool scaled, double eps, int64_t splits, int64_t slots, bool pdl) {
  Arguments with{};
  with.rows = static_cast<int>(x.size(0));
  with.size_in = static_cast<int>(x.size(1));
  with.size_out = static_cast<int>(out.size(1));
  with.kind = static_cast<int>(kind);
  with.slots = static_cast<int>(slots);
  require(with.rows <= kRows, "too many rows");
  require(slots <= kMostSlots, "too many slots");
  with.out = static_cast<Element*>(out.data_ptr());
  with.residual = static_cast<Element*>(residual.data_ptr());
  with.norm = static_cast<const Element*>(norm.data_ptr());
  with.squares_out = static_cast<float*>(squares_out.data_ptr());
  with.squares_in = scaled ? static_cast<const float*>(squares_in.data_ptr()) : nullptr;
  with.planes = static_cast<float*>(planes.data_ptr());
  with.counters = static_cast<int*>(counters.data_ptr());
  with.out_stride = out.stride(0);
  with.eps = static_cast<float>(eps);
  require(splits == 1 || splits == 2 || splits == 4, "no such division");
  if (kind == kGated) {
    if (splits == 1) launch<Shape<1, true>>(with, x, weight, planes, counters, pdl);
    if (splits == 2) launch<Shape<2, true>>(with, x, weight, planes, counters, pdl);
    if (splits == 4) launch<Shape<4, true>>(with, x, weight, planes, counters, pdl);
  } else {
    if (splits == 1) launch<Shape<1, false>>(with, x, weight, planes, counters, pdl);
    if (splits == 2) launch<Shape<2, false>>(with, x, weight, planes, counters, pdl);
    if (splits == 4) launch<Shape<4, false>>(with, x, weight, planes, counters, pdl);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_linear);
