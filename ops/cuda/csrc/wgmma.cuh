// What kernels share that multiply by wgmma: lines of 128 bytes, from maps in memory to descriptors in shared memory, rings
// that hold them, and clusters of blocks.
//
// Owns no kernel and no division of work.

#pragma once

#include "hopper.cuh"

namespace {

constexpr int kLine = 64;  // elements of a line of shared memory, 128 bytes
constexpr int kBlock = 64;  // lines of the first operand of a wgmma
constexpr int kTeam = 128;  // threads of a warpgroup
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // L2 policies: evict first
constexpr uint64_t kReadNormally = 0x1000000000000000;
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict last

union Pair {
  uint32_t bits;
  Element values[2];
};

union Eight {
  uint4 bits;
  Element values[8];
};

// --- clusters

// As `barrier_wait`, for what other blocks of the cluster did before they arrived.
inline __device__ void barrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Before the first word to another block. What must be visible, initialised barriers, is fenced already: a release would
// wait for all of the GPU's memory.
inline __device__ void cluster_begins() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Nobody leaves while others may still write to its memory or arrive at its barriers: a release waits until they have.
inline __device__ void cluster_ends() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
inline __device__ uint32_t address_in(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// Tells all `blocks` blocks of the cluster that this warp has read what it wants to; of what it wrote only its own block
// may know: a release to the cluster would wait until all of the GPU's memory could.
inline __device__ void leave_everywhere(uint64_t* barrier, int blocks, int lane) {
  __syncwarp();
  if (lane < blocks) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(shared_address(barrier), lane)) : "memory");
  }
}

// --- rings

// Slots in shared memory that one warp fills and others empty, and where one of them stands.
template <int kSlots, int kBytes>
struct Ring {
  uint8_t* slots;
  uint64_t* filled;
  uint64_t* emptied;
  int at = 0, turn = 0;

  // Before anybody waits; `readers` warps empty a slot, and `writers` arrive when they have filled it.
  __device__ void set_up(int readers, int writers = 1) const {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(filled + slot, writers);
      barrier_init(emptied + slot, readers);
    }
  }
  __device__ uint8_t* slot() const { return slots + at * kBytes; }
  __device__ void advance() {
    if (++at == kSlots) at = 0, ++turn;
  }

  // The warp that fills: what is fetched into the slot arrives at the barrier.
  __device__ void wait_emptied() const {
    if (turn > 0) barrier_wait(emptied + at, (turn - 1) & 1);
  }
  __device__ uint64_t* expect() const {
    barrier_expect(filled + at, kBytes);
    return filled + at;
  }

  // Those that empty.
  __device__ void wait_filled() const { barrier_wait(filled + at, turn & 1); }
};

// --- copies

// Lines of a matrix.
inline __device__ void fetch_lines(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(target)),
      "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Of three dimensions, innermost first.
inline __device__ void fetch_box(void* target, const CUtensorMap* map, int inner, int middle, int outer, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Lines of a matrix to the same place in all `blocks` blocks of the cluster, and to their barriers.
inline __device__ void fetch_for_all(void* target, const CUtensorMap* map, int inner, int row, uint64_t* barrier,
                                     int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(row), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << blocks) - 1))
      : "memory");
}

// --- products

// Describes lines, swizzled, in groups of eight; `wide`: bytes from 64 elements to the next 64, where a line runs along the
// outputs of a product instead of its inner dimension.
inline __device__ uint64_t lines_at(uint32_t address, int wide = 16) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (static_cast<uint64_t>(wide / 16) << 16) | ((address & 0x3FFFF) >> 4);
}
inline __device__ uint64_t lines_at(const void* pointer, int wide = 16) { return lines_at(shared_address(pointer), wide); }

// A number that all lanes have, in a way that shows it: a descriptor then takes no move to a uniform register.
inline __device__ uint32_t same_in_warp(uint32_t number) { return __shfl_sync(~0u, number, 0); }

inline __device__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline __device__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
inline __device__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from using sums before the wait above it.
template <int kCount>
inline __device__ void sums_ready(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The warpgroup of a thread waits for all of its threads; threads are counted from the first of these warpgroups.
inline __device__ void team_meets(int thread) {
  asm volatile("bar.sync %0, %1;" ::"r"(thread / kTeam + 1), "n"(kTeam) : "memory");
}

#define FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)

#define NUMBERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_96 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NUMBERS_128 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// --- sums on their way to memory

// 16 rows and 128 features of a warp in shared memory of its own, between the layout of sums and lines of memory.
struct Staged {
  static constexpr int kPitch = 128 * 2 + 16;  // bytes of a row
  static constexpr int kBytes = 16 * kPitch;

  uint8_t* rows;
  int lane;

  // The place that a lane names to stmatrix and ldmatrix, for features [8 * block, 8 * block + 16).
  __device__ uint32_t matrices(int block) const {
    return shared_address(rows + (lane / 8 % 2 * 8 + lane % 8) * kPitch + (block + lane / 16) * 16);
  }
  __device__ void put(int block, const Pair (&pairs)[4]) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(matrices(block)),
                 "r"(pairs[0].bits), "r"(pairs[1].bits), "r"(pairs[2].bits), "r"(pairs[3].bits)
                 : "memory");
  }
  __device__ void get(int block, Pair (&pairs)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0].bits), "=r"(pairs[1].bits), "=r"(pairs[2].bits), "=r"(pairs[3].bits)
                 : "r"(matrices(block))
                 : "memory");
  }
  // Rows as they lie in memory: two of them at each of eight turns, 16 bytes a lane.
  __device__ uint4& line(int turn) const {
    return *reinterpret_cast<uint4*>(rows + (2 * turn + lane / 16) * kPitch + lane % 16 * 16);
  }
};

// --- on the host

using Encode = decltype(&cuTensorMapEncodeTiled);

// How a matrix of elements, or of bytes, is fetched: its sizes and strides (bytes, from the second on), innermost first, and
// what is fetched at once.
template <int kDims>
CUtensorMap map_of(const TensorView& matrix, const uint64_t (&sizes)[kDims], const uint64_t (&strides)[kDims - 1],
                   const uint32_t (&box)[kDims], bool bytes = false,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status));
    return reinterpret_cast<Encode>(found);
  }();
  require(bytes || holds_elements(matrix), "a matrix that is not bf16");
  uint32_t steps[kDims];
  for (uint32_t& step : steps) step = 1;
  CUtensorMap map;
  const CUresult status = encode(&map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDims, matrix.data_ptr(), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle,
                                 swizzle != CU_TENSOR_MAP_SWIZZLE_NONE ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, "a matrix that cannot be fetched in tiles");
  return map;
}

inline CUtensorMap lines_of(const TensorView& matrix, int rows) {
  return map_of<2>(matrix, {static_cast<uint64_t>(matrix.size(1)), static_cast<uint64_t>(matrix.size(0))},
                   {matrix.stride(0) * sizeof(Element)}, {kLine, static_cast<uint32_t>(rows)});
}

// Of all rows, some lines at once.
inline CUtensorMap inputs_of(const TensorView& matrix, int rows, int lines) {
  return map_of<3>(matrix, {kLine, static_cast<uint64_t>(matrix.size(0)), static_cast<uint64_t>(matrix.size(1) / kLine)},
                   {matrix.stride(0) * sizeof(Element), kLine * sizeof(Element)},
                   {kLine, static_cast<uint32_t>(rows), static_cast<uint32_t>(lines)});
}

// A launch of `kKernel` in clusters of `kBlocks` blocks, each block with a multiprocessor to itself.
template <auto kKernel, int kBlocks>
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  int most;  // clusters that run at once

  // On the stream that is current where `on` lies; `bytes`, of shared memory of a block, are always the same.
  ClusterLaunch(const TensorView& on, int threads, int bytes) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {kBlocks, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream_of(on);
    config.attrs = attributes;
    config.numAttrs = 1;
    allow_shared_memory<kKernel>(on, bytes);
    most = count(on.device().device_id);
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // `config` points into it

  // Of `wanted` clusters, or as many as run at once; with `pdl` they may begin while the kernel before still runs.
  template <class Arguments>
  void run(const Arguments& with, int wanted, bool pdl) {
    config.gridDim = dim3((wanted < most ? wanted : most) * kBlocks);
    config.numAttrs = pdl ? 2 : 1;
    check(cudaLaunchKernelEx(&config, kKernel, with));
  }

  // Once for each device.
  int count(int device) const {
    static std::atomic<int> known[kMostDevices];
    if (const int before = known[device]) return before;
    int found = 0, processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    check(cudaOccupancyMaxActiveClusters(&found, kKernel, &config));
    require(found > 0, "clusters do not fit");
    return known[device] = found < processors / kBlocks ? found : processors / kBlocks;
  }
};

}  // namespace
