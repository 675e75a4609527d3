// silu(x G^T) * (x U^T) of many rows (sm_90).
//
// Owns one launch and its division of the work; never chooses where it pays.
//
// A tile is 128 rows and 128 features, of which gates and ups meet in one thread's sums. Two blocks of a cluster compute
// tiles one below the other; each fetches its own rows, and one the gates, the other the ups for both. In a block one warp
// keeps a ring in shared memory filled, through all of the block's tiles, and two warpgroups multiply 64 rows each.

#define SOURCE "tile_linear"
#include "wgmma.cuh"

namespace {

constexpr int kCluster = 2;
constexpr int kBand = 8;                    // tiles one below the other that are computed before those beside them
constexpr int kRows = 128;                  // of a tile
constexpr int kFeatures = 128;              // of a tile
constexpr int kInputBytes = kRows * 128;
constexpr int kHalfBytes = kFeatures * 128;  // gates, or ups
constexpr int kSlotBytes = kInputBytes + 2 * kHalfBytes;
constexpr int kSlots = 4;
constexpr int kMultipliers = 2;             // warpgroups
constexpr int kThreads = 128 * (kMultipliers + 1);
constexpr int kSums = 128;                  // of a thread
constexpr int kSharedBytes = kSlots * kSlotBytes + 4 * kMultipliers * Staged::kBytes + 2 * kSlots * 8;

struct Arguments {
  CUtensorMap weight;  // [2 * size_out, size_in]: gates, then ups
  CUtensorMap x;       // [rows, size_in]
  Element* out;        // [rows, size_out], out_stride apart
  int rows, size_out, chunks, pairs, columns, tiles;
  int64_t out_stride;
};

// --- arithmetic

// sum += a b^T over 16 inner elements; sum = a b^T unless `adds`.
__device__ void multiply_add(float (&sum)[kSums], uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NUMBERS_64 ", " NUMBERS_96 ", " NUMBERS_128
      "}, %128, %129, adds, 1, 1, 0, 0;\n}"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
      : "l"(a), "l"(b), "r"(adds));
}

__device__ float silu_mul(float gate, float up) { return __fdividef(gate * up, 1.f + __expf(-gate)); }

// --- the division

// Where a block of a cluster stands: tiles of a band column by column.
struct Tile {
  int row, column;  // the first row, and which 128 features

  __device__ Tile(const Arguments& with, int number) {
    const int band = number / (kBand * with.columns), within = number % (kBand * with.columns);
    const int height = min(kBand, with.pairs - band * kBand);
    row = ((band * kBand + within % height) * kCluster + blockIdx.x % kCluster) * kRows;
    column = within / height;
  }
};

using Slots = Ring<kSlots, kSlotBytes>;

// --- the warp that streams

__device__ void stream(const Arguments& with, Slots ring) {
  const int rank = blockIdx.x % kCluster;
  wait_for_last_kernel();
  for (int number = blockIdx.x / kCluster; number < with.tiles; number += gridDim.x / kCluster) {
    const Tile tile(with, number);
    const int line = tile.column * kFeatures + rank * with.size_out;
    for (int chunk = 0; chunk < with.chunks; ++chunk, ring.advance()) {
      ring.wait_emptied();
      uint64_t* filled = ring.expect();
      fetch_lines(ring.slot(), &with.x, chunk * kLine, tile.row, filled);
      fetch_for_all(ring.slot() + kInputBytes + rank * kHalfBytes, &with.weight, chunk * kLine, line, filled, kCluster);
    }
  }
}

// --- the warpgroups that multiply

// A warp's 16 rows from `row` on, 128 features from `feature` on.
__device__ void finish(const Arguments& with, const float (&sums)[kSums], const Staged& staged, int row, int feature) {
#pragma unroll
  for (int block = 0; block < kFeatures / 8; block += 2) {
    Pair pairs[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pairs[i / 2].values[i % 2] =
          static_cast<Element>(silu_mul(sums[block * 4 + i], sums[kSums / 2 + block * 4 + i]));
    }
    staged.put(block, pairs);
  }
  __syncwarp();
  row += staged.lane / 16, feature += staged.lane % 16 * 8;
#pragma unroll
  for (int turn = 0; turn < 8; ++turn, row += 2) {
    if (row < with.rows && feature < with.size_out) {
      *reinterpret_cast<uint4*>(with.out + row * with.out_stride + feature) = staged.line(turn);
    }
  }
  __syncwarp();
}

__device__ void multiply(const Arguments& with, Slots ring, const Staged& staged, int group, int warp) {
  float sums[kSums];
  wait_for_last_kernel();
  for (int number = blockIdx.x / kCluster; number < with.tiles; number += gridDim.x / kCluster) {
    const Tile tile(with, number);
    for (int chunk = 0; chunk < with.chunks; ++chunk, ring.advance()) {
      ring.wait_filled();
      const uint64_t x = lines_at(ring.slot() + group * (kInputBytes / 2)), w = lines_at(ring.slot() + kInputBytes);
      multiply_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_add(sums, x + step * 2, w + step * 2, chunk + step);
      multiply_commit();
      multiply_wait<0>();  // the other warpgroup multiplies meanwhile
      leave_everywhere(ring.emptied + ring.at, kCluster, staged.lane);
    }
    sums_ready(sums);
    const int row = tile.row + group * 64 + warp * 16;
    finish(with, sums, staged, row, tile.column * kFeatures);
  }
}

__global__ void __launch_bounds__(kThreads, 1) tile_linear(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  uint8_t* staged = slots + kSlots * kSlotBytes;
  uint64_t* filled = reinterpret_cast<uint64_t*>(staged + 4 * kMultipliers * Staged::kBytes);
  const Slots ring{slots, filled, filled + kSlots};
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    ring.set_up(kCluster * kMultipliers * 4);
    barriers_are_set_up();
  }
  __syncthreads();
  cluster_begins();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (thread == 0) stream(with, ring);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x / 32 - 4;
    multiply(with, ring, Staged{staged + warp * Staged::kBytes, thread % 32}, group - 1, warp % 4);
  }
  let_next_kernel_start();
  __syncthreads();
  cluster_ends();
}

// --- what Python calls

void run_tile_linear(TensorView x, TensorView weight, TensorView out, bool pdl) {
  Arguments with{};
  with.rows = static_cast<int>(x.size(0));
  with.size_out = static_cast<int>(out.size(1));
  with.weight = lines_of(weight, kFeatures);
  with.x = lines_of(x, kRows);
  with.out = static_cast<Element*>(out.data_ptr());
  with.out_stride = out.stride(0);
  with.chunks = static_cast<int>((x.size(1) + kLine - 1) / kLine);
  with.pairs = (with.rows + kRows * kCluster - 1) / (kRows * kCluster);
  with.columns = (with.size_out + kFeatures - 1) / kFeatures;
  with.tiles = with.pairs * with.columns;
  require(weight.size(0) == 2 * with.size_out && weight.size(1) == x.size(1), "a weight of another shape");
  require(out.size(0) == with.rows && with.size_out % 8 == 0, "outputs of another shape");
  require(with.rows < 2 || out.stride(0) % 8 == 0, "outputs between whose rows there is no multiple of 16 bytes");
  ClusterLaunch<tile_linear, kCluster> launch(x, kThreads, kSharedBytes);
  launch.run(with, with.tiles, pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_tile_linear);
