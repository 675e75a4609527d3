// Products of up to 256 rows whose weights are dealt out in equal parts among multiprocessors (sm_90).
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32, 64, 128, 192 or 256) and ELEMENT_F16 (weights, inputs and outputs; 0: bf16, 1: fp16).
//
// Outputs are cut into tiles, the inner dimension into chunks; every multiprocessor takes as many (tile, chunk) pairs as
// any other, in order, so several may share a tile. One warp streams weights and inputs into a ring in shared memory, one
// or two warpgroups multiply. Weights depend on no kernel before this one: the ring fills with them while that one still
// runs. Up to 64 rows it takes half a multiprocessor's shared memory, so that there is room for it. For more rows than
// that, two multiprocessors form a cluster: they take neighbouring features, and each fetches half of the inputs for both.
//
// Who holds a tile's first chunk sums up the others' parts, in order, so that results do not vary from run to run. It
// waits for blocks of lower numbers only: those run already or have run.
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
constexpr int kBlock = 64;                  // lines of weights that one wgmma multiplies
constexpr int kBlockBytes = kBlock * 128;
constexpr int kSums = kRows / 2;            // of a thread for one block
constexpr int kGroups = ROWS > 64 ? 2 : 1;  // warpgroups that multiply, each its own block of every tile
constexpr int kCluster = ROWS > 64 ? 2 : 1;
constexpr int kMultipliers = 128 * kGroups;
constexpr int kScalers = 64;
constexpr int kThreads = kMultipliers + 32 + kScalers;
constexpr int kMostSlots = 16;
constexpr int kStaged = kRows < 32 ? kRows : 32;  // rows that pass through shared memory at once
constexpr int kPitch = kBlock + 4;                // floats of one of them
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
  float* planes;            // [blocks, sums of a block's tile]
  int* counters;            // [blocks of all tiles], zeros
  int rows, size_out, size_in, chunks, total, slots, kind;
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

__device__ void fetch_weight(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "l"(kReadOnce)
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

// For every block of the cluster, to the same place.
__device__ void fetch_input(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier) {
  if constexpr (kCluster == 1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
        "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "l"(kReadOften)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(target)),
        "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << kCluster) - 1)),
        "l"(kReadOften)
        : "memory");
  }
}

__device__ int block_of_cluster() { return kCluster == 1 ? 0 : blockIdx.x % kCluster; }

__device__ void cluster_meets() {
  if constexpr (kCluster > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}

// Tells every block of the cluster that this warp is done with a slot.
__device__ void release(uint64_t* emptied, int lane) {
  if constexpr (kCluster == 1) {
    if (lane == 0) barrier_arrive(emptied);
  } else if (lane < kCluster) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(emptied)),
        "r"(lane)
        : "memory");
  }
}

__device__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The threads of a warpgroup.
__device__ void group_meets(int group) {
  if (kGroups == 1 || group == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}
__device__ void factors_ready() { asm volatile("bar.arrive 3, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }
__device__ void wait_for_factors() { asm volatile("bar.sync 3, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }

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
template <int kBlocks>
__device__ void sums_ready(float (&sums)[kBlocks][kSums]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[block][i])::"memory");
  }
}

#define FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define S4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define S5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define S6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define S7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define S8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define S9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define S10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define S11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define S12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define S13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define S14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define S15 "%120, %121, %122, %123, %124, %125, %126, %127"
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
#elif ROWS == 64
  asm volatile(MULTIPLY("64", S0 ", " S1 ", " S2 ", " S3, "%32", "%33")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
               : "l"(a), "l"(b));
#elif ROWS == 128
  asm volatile(MULTIPLY("128", S0 ", " S1 ", " S2 ", " S3 ", " S4 ", " S5 ", " S6 ", " S7, "%64", "%65")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
               : "l"(a), "l"(b));
#elif ROWS == 192
  asm volatile(MULTIPLY("192", S0 ", " S1 ", " S2 ", " S3 ", " S4 ", " S5 ", " S6 ", " S7 ", " S8 ", " S9 ", " S10 ", " S11, "%96", "%97")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88)
               : "l"(a), "l"(b));
#else
  asm volatile(MULTIPLY("256", S0 ", " S1 ", " S2 ", " S3 ", " S4 ", " S5 ", " S6 ", " S7 ", " S8 ", " S9 ", " S10 ", " S11 ", " S12 ", " S13 ", " S14 ", " S15, "%128", "%129")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
               : "l"(a), "l"(b));
#endif
}

__device__ float silu(float x) { return x / (1.f + __expf(-x)); }

union Eight {
  uint4 bits;
  Element values[8];
};

// --- the division

// Clusters take pairs [begin(rank), begin(rank + 1)), counted tile by tile. Higher clusters have earlier ones: who waits
// for others' parts waits for lower clusters.
__device__ int ranks() { return gridDim.x / kCluster; }
__device__ int own_rank() { return ranks() - 1 - blockIdx.x / kCluster; }
__device__ int begin_of(const Arguments& with, int rank) { return with.total * rank / ranks(); }

// The tile shapes: blocks of a tile, lines of a chunk, and whether lines are gates and ups by turns.
template <int kBlocksOf, int kPartsOf, bool kGatedOf>
struct Shape {
  static constexpr int kBlocks = kBlocksOf;
  static constexpr int kParts = kPartsOf;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kOwn = kBlocks / kGroups;        // blocks of a warpgroup
  static constexpr int kWide = kGated ? 32 : 64;        // features of a block
  static constexpr int kAll = kCluster * kBlocks;       // blocks of a cluster's tile
  static constexpr int kWeightBytes = kBlocks * kParts * kBlockBytes;
  static constexpr int kSlotBytes = kWeightBytes + kParts * kRows * 128;
  static constexpr int kPlane = kBlocks * kSums * 128;  // floats
};

struct Ring {
  uint8_t* slots;
  uint64_t* filled;
  uint64_t* emptied;
  int count;
};

// Where a block stands among its pairs.
struct Cursor {
  int tile, chunk, chunks;

  __device__ Cursor(int pair, int chunks) : tile(pair / chunks), chunk(pair % chunks), chunks(chunks) {}
  __device__ void advance() {
    if (++chunk == chunks) chunk = 0, ++tile;
  }
};

// --- the warp that streams

template <class S>
__device__ void fetch_weights(const Arguments& with, uint8_t* slot, const Cursor& at, uint64_t* filled) {
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
    const int feature = (at.tile * S::kAll + block_of_cluster() * S::kBlocks + block) * S::kWide;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      uint8_t* target = slot + (block * S::kParts + part) * kBlockBytes;
      const int inner = (at.chunk * S::kParts + part) * kLine;
      if constexpr (S::kGated) {
        fetch_gated(target, &with.weight, inner, feature, filled);
      } else {
        fetch_weight(target, &with.weight, inner, feature, filled);
      }
    }
  }
}

template <class S>
__device__ void fetch_inputs(const Arguments& with, uint8_t* slot, const Cursor& at, uint64_t* filled) {
  const int row = block_of_cluster() * (kRows / kCluster);
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
    fetch_input(slot + S::kWeightBytes + (part * kRows + row) * 128, &with.x, (at.chunk * S::kParts + part) * kLine, row,
                filled);
  }
}

template <class S>
__device__ void stream(const Arguments& with, const Ring& ring, int first, int count) {
  const int early = min(count, ring.count);
  Cursor weights(first, with.chunks), inputs = weights;
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

// --- the warps that find each row's factor of the norm, from the sums of squares that the last product left

__device__ void find_factors(const Arguments& with, float* factors, int thread) {
  wait_for_last_kernel();
  const int parts = with.size_in / 64;
  for (int row = thread; row < with.rows; row += kScalers) {
    float sum = 0.f;
#pragma unroll 16
    for (int part = 0; part < parts; ++part) sum += __ldcg(with.squares_in + part * with.rows + row);
    factors[row] = rsqrtf(sum / with.size_in + with.eps);
  }
  __syncwarp();
  factors_ready();
}

// --- the warpgroups that multiply

// One of them.
struct Group {
  int number, thread;  // of kGroups, of 128
  float* staged;
  const float* factors;
};

// Adds the residual to eight features, and gives their squares; `values` become the norm's input.
__device__ float add_residual(const Arguments& with, float (&values)[8], int row, int feature, bool inside) {
  const int64_t place = static_cast<int64_t>(row) * with.size_out + feature;
  Eight residual{}, norm{};
  if (inside) {
    residual.bits = *reinterpret_cast<const uint4*>(with.residual + place);
    norm.bits = *reinterpret_cast<const uint4*>(with.norm + feature);
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] += static_cast<float>(residual.values[i]);
    squares += values[i] * values[i];
    residual.values[i] = static_cast<Element>(values[i]);
    values[i] *= static_cast<float>(norm.values[i]);
  }
  if (inside) *reinterpret_cast<uint4*>(with.residual + place) = residual.bits;
  return squares;
}

// Writes one block, whose sums are final, by way of shared memory.
template <class S>
__device__ void write_block(const Arguments& with, const float (&sum)[kSums], int feature, const Group& group) {
  constexpr int kItems = S::kWide / 8;  // of eight features, of a row
  const int lane = group.thread % 32, warp = group.thread / 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int base = 0; base < kRows; base += kStaged) {
    if (base >= with.rows) break;
    group_meets(group.number);
#pragma unroll
    for (int i = 0; i < kStaged / 2; ++i) {
      const int row = 8 * (i / 4) + 2 * c + (i & 1), at = base / 2 + i;
      if constexpr (S::kGated) {
        if (!(i & 2)) group.staged[row * kPitch + 8 * warp + g] = silu(sum[at]) * sum[at + 2];
      } else {
        group.staged[row * kPitch + 16 * warp + g + (i & 2) * 4] = sum[at];
      }
    }
    group_meets(group.number);
#pragma unroll
    for (int item = group.thread; item < kStaged * kItems; item += 128) {
      const int row = base + item / kItems, at = feature + item % kItems * 8;
      const bool inside = row < with.rows && at < with.size_out;
      const float* from = group.staged + item / kItems * kPitch + item % kItems * 8;
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
      }
      if constexpr (!S::kGated) {
        if (with.kind == kAdd) {
          float squares = add_residual(with, values, row, at, inside);
#pragma unroll
          for (int step = 1; step < kItems; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
          if (inside && item % kItems == 0) with.squares_out[feature / kBlock * with.rows + row] = squares;
        }
      }
      Eight result;
#pragma unroll
      for (int i = 0; i < 8; ++i) result.values[i] = static_cast<Element>(values[i]);
      if (inside) *reinterpret_cast<uint4*>(with.out + row * with.out_stride + at) = result.bits;
    }
  }
}

template <class S>
__device__ void write_tile(const Arguments& with, float (&sums)[S::kOwn][kSums], int tile, const Group& group) {
  if (with.squares_in != nullptr) {
    const int c = group.thread % 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float factor = group.factors[8 * (i / 4) + 2 * c + (i & 1)];
#pragma unroll
      for (int block = 0; block < S::kOwn; ++block) sums[block][i] *= factor;
    }
  }
#pragma unroll
  for (int block = 0; block < S::kOwn; ++block) {
    const int number = tile * S::kAll + block_of_cluster() * S::kBlocks + group.number * S::kOwn + block;
    write_block<S>(with, sums[block], number * S::kWide, group);
  }
}

// Where a warpgroup's sums of a shared tile are kept for the tile's holder.
template <class S>
__device__ float4* plane_of(const Arguments& with, int rank, const Group& group) {
  float* plane = with.planes + static_cast<int64_t>(rank * kCluster + block_of_cluster()) * S::kPlane;
  return reinterpret_cast<float4*>(plane + group.number * (S::kPlane / kGroups)) + group.thread;
}

template <class S>
__device__ int* counter_of(const Arguments& with, int tile, const Group& group) {
  return with.counters + (tile * kCluster + block_of_cluster()) * kGroups + group.number;
}

template <class S>
__device__ void hand_in(const Arguments& with, const float (&sums)[S::kOwn][kSums], int tile, const Group& group) {
  float4* plane = plane_of<S>(with, own_rank(), group);
#pragma unroll
  for (int block = 0; block < S::kOwn; ++block) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float4 four = make_float4(sums[block][i], sums[block][i + 1], sums[block][i + 2], sums[block][i + 3]);
      __stcg(plane + (block * kSums + i) / 4 * 128, four);
    }
  }
  __threadfence();
  group_meets(group.number);
  if (group.thread == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter_of<S>(with, tile, group)) : "memory");
  }
}

// Adds what ranks [first, last) handed in.
template <class S>
__device__ void take_parts(const Arguments& with, float (&sums)[S::kOwn][kSums], int tile, int first, int last,
                           const Group& group) {
  if (group.thread == 0) {
    int* counter = counter_of<S>(with, tile, group);
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < last - first);
    *counter = 0;
  }
  group_meets(group.number);
  for (int rank = first; rank < last; ++rank) {
    const float4* plane = plane_of<S>(with, rank, group);
#pragma unroll
    for (int block = 0; block < S::kOwn; ++block) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float4 four = __ldcg(plane + (block * kSums + i) / 4 * 128);
        sums[block][i] += four.x, sums[block][i + 1] += four.y, sums[block][i + 2] += four.z, sums[block][i + 3] += four.w;
      }
    }
  }
}

template <class S>
__device__ void multiply_slot(const uint8_t* slot, float (&sums)[S::kOwn][kSums], const Group& group) {
  const uint64_t w = lines_at(slot + group.number * S::kOwn * S::kParts * kBlockBytes), x = lines_at(slot + S::kWeightBytes);
  multiply_begin();
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 16 elements, 32 bytes of a line
#pragma unroll
      for (int block = 0; block < S::kOwn; ++block) {
        multiply_add(sums[block], w + ((block * S::kParts + part) * kBlockBytes + step * 32) / 16,
                     x + (part * kRows * 128 + step * 32) / 16);
      }
    }
  }
  multiply_commit();
}

template <class S>
__device__ void multiply(const Arguments& with, const Ring& ring, int first, int last, const Group& group) {
  const int lane = group.thread % 32;
  int at = 0, turn = 0;
  bool waits = with.squares_in != nullptr;
  wait_for_last_kernel();
  for (int pair = first; pair < last;) {
    const int tile = pair / with.chunks, tile_first = tile * with.chunks, tile_last = tile_first + with.chunks;
    const int count = min(tile_last, last) - pair;
    float sums[S::kOwn][kSums];
#pragma unroll
    for (int block = 0; block < S::kOwn; ++block) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[block][i] = 0.f;
    }
    int behind = -1;
    for (int i = 0; i < count; ++i) {
      barrier_wait(ring.filled + at, turn & 1);
      multiply_slot<S>(ring.slots + at * S::kSlotBytes, sums, group);
      multiply_wait<1>();
      if (behind >= 0) release(ring.emptied + behind, lane);
      behind = at;
      if (++at == ring.count) at = 0, ++turn;
    }
    multiply_wait<0>();
    sums_ready<S::kOwn>(sums);
    release(ring.emptied + behind, lane);
    if (waits) wait_for_factors(), waits = false;
    if (pair > tile_first) {
      hand_in<S>(with, sums, tile, group);
    } else {
      if (last < tile_last) {
        int end = own_rank() + 1;
        while (end < ranks() && begin_of(with, end) < tile_last) ++end;
        take_parts<S>(with, sums, tile, own_rank() + 1, end, group);
      }
      write_tile<S>(with, sums, tile, group);
    }
    pair += count;
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, kGroups > 1 || S::kOwn * kRows > 128 ? 1 : 2)
    even_linear(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[kMostSlots], emptied[kMostSlots];
  __shared__ float factors[kRows];
  __shared__ __align__(16) float staged[kGroups][kStaged * kPitch];
  const int thread = threadIdx.x;
  let_next_kernel_start();
  if (thread == 0) {
    for (int slot = 0; slot < with.slots; ++slot) {
      barrier_init(filled + slot, 1);
      barrier_init(emptied + slot, kCluster * kMultipliers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meets();
  const int first = begin_of(with, own_rank()), last = begin_of(with, own_rank() + 1);
  const Ring ring{slots, filled, emptied, with.slots};
  if (thread < kMultipliers) {
    const int number = thread / 128;
    multiply<S>(with, ring, first, last, Group{number, thread % 128, staged[number], factors});
  } else if (thread < kMultipliers + 32) {
    if (thread == kMultipliers) stream<S>(with, ring, first, last - first);
    __syncwarp();
  } else if (with.squares_in != nullptr) {
    find_factors(with, factors, thread - kMultipliers - 32);
  }
  cluster_meets();  // nobody leaves while the other may still write to its memory
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

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, int64_t blocks, bool pdl) {
  with.weight = S::kGated ? gated_lines_of(weight) : lines_of(weight, kBlock);
  with.x = lines_of(x, kRows / kCluster);
  with.chunks = (with.size_in / kLine + S::kParts - 1) / S::kParts;
  const int tiles = (with.size_out + S::kAll * S::kWide - 1) / (S::kAll * S::kWide);
  with.total = tiles * with.chunks;
  const int64_t clusters = blocks / kCluster < with.total ? blocks / kCluster : with.total;
  const int bytes = with.slots * S::kSlotBytes;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(even_linear<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 20 * 1024);
  check(allowed);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
  config.attrs = attributes;
  config.numAttrs = pdl ? 2 : 1;
  check(cudaLaunchKernelEx(&config, even_linear<S>, with));
}

void run_even_linear(TensorView x, TensorView weight, TensorView out, TensorView residual, TensorView norm,
                     TensorView squares_out, TensorView squares_in, TensorView planes, TensorView counters, int64_t kind,
                     bool scaled, double eps, int64_t tile, int64_t parts, int64_t slots, int64_t blocks, bool pdl) {
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
  require(planes.numel() >= blocks * tile * kBlock * kRows, "the partial sums are too small");
  const int64_t how = 100 * (kind == kGated) + 10 * tile + parts;
#define CASE(a, b) \
  if (how == 10 * a + b) return launch<Shape<a, b, false>>(with, x, weight, blocks, pdl); \
  if (how == 100 + 10 * a + b) return launch<Shape<a, b, true>>(with, x, weight, blocks, pdl)
#if ROWS <= 64
  CASE(1, 2);
  CASE(1, 4);
  CASE(2, 1);
  CASE(2, 2);
#else
  CASE(2, 1);
  CASE(2, 2);
#endif
  require(false, "no such tile");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_linear);
