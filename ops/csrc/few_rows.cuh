// What products of up to ROWS rows share: how weights are fetched and multiplied, and how a tile is finished.
//
// Owns no launch and no division of work. Compiled for each padded number of rows: ROWS is 16, 32 or 64. A tile is 64
// features, or 32 gates and their ups; in each block of a cluster one warpgroup multiplies its part of the inner dimension,
// then every block sends its sums to the others, each of which finishes its share of the rows.
//
// A norm between two products costs no kernel: the first (kAdd) adds the residual, multiplies by the norm's weight and
// leaves sums of squares; the second multiplies its outputs by each row's factor.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#pragma once

#include "wgmma.cuh"

namespace {

constexpr int kRows = ROWS;
constexpr int kBlock = 64;                  // lines of weights of a tile: what wgmma multiplies
constexpr int kBlockBytes = kBlock * 128;
constexpr int kSums = kRows / 2;            // of a thread
constexpr int kMultipliers = 128;
constexpr int kPitch = kBlock + 4;          // floats of a row of sums in shared memory
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // L2 policies: evict first
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict last

enum Kind { kPlain = 0, kGated = 1, kAdd = 2 };  // kGated: silu(gate) * up

// What becomes of a product.
struct Target {
  Element* out;         // [rows, size_out], out_stride apart
  Element* residual;    // kAdd: [rows, size_out], read and written
  const Element* norm;  // kAdd: [size_out]
  float* squares_out;   // kAdd: [size_out / 64, rows]
  int rows, size_out, kind;
  int64_t out_stride;
};

// --- synchronisation

inline __device__ void fetch_lines(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Eight lines of gates, eight of ups, and so on.
inline __device__ void fetch_gated(void* target, const CUtensorMap* map, int inner, int feature, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(0), "r"(feature / 8), "r"(shared_address(barrier)), "l"(kReadOnce)
      : "memory");
}

// Stores a sum, whose bytes `barrier` of the same block awaits: to release ordinary stores to a cluster takes a fence of the
// whole GPU, microseconds while memory is busy.
inline __device__ void store_in(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

// Tells all `blocks` blocks of the cluster that this warp is so far, and how many bytes it stores in each.
inline __device__ void tell_everywhere(uint64_t* barrier, int blocks, int bytes, int lane) {
  __syncwarp();
  if (lane < blocks) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(
                     address_in(shared_address(barrier), lane)),
                 "r"(bytes)
                 : "memory");
  }
}

inline __device__ void multipliers_meet() { asm volatile("bar.sync 3, %0;" ::"n"(kMultipliers) : "memory"); }

// --- arithmetic

#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define MULTIPLY(n, sums, a, b) \
  "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." KIND "." KIND " {" sums "}, " a ", " b ", adds, 1, 1, 0, 0;\n}"

// sum += a b^T over 16 inner elements.
inline __device__ void multiply_add(float (&sum)[kSums], uint64_t a, uint64_t b) {
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

inline __device__ float silu(float x) { return x / (1.f + __expf(-x)); }

// --- tiles

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

// Where sums of a tile meet: those of each block of the cluster for this block's rows.
template <class S>
struct Exchange {
  float* staged;  // [kSplits, kOwn, kPitch]
  uint64_t* arrived;
  uint64_t* taken;

  // Sends each row's sums to the block that finishes it.
  __device__ void send(const float (&sums)[kSums], int round, int thread) const {
    const int lane = thread % 32, g = lane / 4, c = lane % 4;
    float* place = staged + 16 * (thread / 32) + g;
    if (round > 0) wait_for(taken, round - 1);
    if constexpr (S::kSplits == 1) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        float* here = place + (8 * (i / 4) + 2 * c) * kPitch;
        here[0] = sums[i], here[kPitch] = sums[i + 1], here[8] = sums[i + 2], here[kPitch + 8] = sums[i + 3];
      }
    } else {
      const uint32_t start = shared_address(place + blockIdx.x % S::kSplits * S::kOwn * kPitch);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const int row = 8 * (i / 4) + 2 * c, own = row % S::kOwn, block = row / S::kOwn;
        const uint32_t there = address_in(start + own * (kPitch * 4), block);
        const uint32_t barrier = address_in(shared_address(arrived), block);
        store_in(there, sums[i], barrier);
        store_in(there + kPitch * 4, sums[i + 1], barrier);
        store_in(there + 8 * 4, sums[i + 2], barrier);
        store_in(there + kPitch * 4 + 8 * 4, sums[i + 3], barrier);
      }
    }
    tell(arrived, S::kOwn * 16 * 4, lane);
  }

  __device__ void wait(int round) const { wait_for(arrived, round); }
  __device__ void done(int thread) const { tell(taken, 0, thread % 32); }

  // Nobody may leave before all that others send has arrived.
  __device__ void end(int rounds) const {
    if (S::kSplits > 1 && rounds > 0) wait_for(taken, rounds - 1);
  }

  __device__ void tell(uint64_t* barrier, int bytes, int lane) const {
    if constexpr (S::kSplits > 1) return tell_everywhere(barrier, S::kSplits, bytes, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ void wait_for(uint64_t* barrier, int round) const {
    if constexpr (S::kSplits == 1) {
      barrier_wait(barrier, round & 1);
    } else {
      barrier_wait_cluster(barrier, round & 1);
    }
  }

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

  __device__ Item(const Target& with, int tile, int number)
      : own(number / (S::kWide / 8)),
        row(blockIdx.x % S::kSplits * S::kOwn + own),
        part(number % (S::kWide / 8)),
        feature(tile * S::kWide + part * 8),
        exists(number < S::kItems),
        inside(exists && row < with.rows && feature < with.size_out) {}
};

// Adds the residual to `values`, which become the norm's input, and leaves the squares.
template <class S>
inline __device__ void add_residual(const Target& with, float (&values)[8], const Item<S>& item, Eight& residual,
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
inline __device__ void finish_tile(const Target& with, const Exchange<S>& exchange, const float (&sums)[kSums], int tile,
                            int round, const float* factors, int thread) {
  Eight residual[S::kTurns]{}, norm[S::kTurns]{};
  exchange.send(sums, round, thread);
  if (!S::kGated && with.kind == kAdd) {
#pragma unroll
    for (int turn = 0; turn < S::kTurns; ++turn) {
      const Item<S> item(with, tile, thread + turn * kMultipliers);
      if (!item.inside) continue;
      const int64_t place = static_cast<int64_t>(item.row) * with.size_out + item.feature;
      residual[turn].bits = __ldcg(reinterpret_cast<const uint4*>(with.residual + place));
      norm[turn].bits = *reinterpret_cast<const uint4*>(with.norm + item.feature);
    }
  }
  exchange.wait(round);
#pragma unroll
  for (int turn = 0; turn < S::kTurns; ++turn) {
    const Item<S> item(with, tile, thread + turn * kMultipliers);
    float values[8];
    const int own = item.exists ? item.own : 0;
    const float factor = factors == nullptr ? 1.f : factors[own];
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

// --- on the host

// As few clusters as take `tiles` in as many rounds as `most` would.
inline int few_clusters(int tiles, int most) {
  const int rounds = (tiles + most - 1) / most;
  return (tiles + rounds - 1) / rounds;
}

inline CUtensorMap gated_lines_of(const TensorView& matrix) {
  const uint64_t line = matrix.stride(0) * sizeof(Element), features = matrix.size(0) / 2;
  return map_of<4>(matrix, {static_cast<uint64_t>(matrix.size(1)), 8, 2, features / 8}, {line, features * line, 8 * line},
                   {kLine, 8, 2, kBlock / 16});
}

}  // namespace
