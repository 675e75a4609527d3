// How products of many rows are divided among clusters, and how clusters that share a tile add up its sums.
//
// Owns no launch, no copies and no products. Compiled for the macros of codes.cuh.
//
// Clusters take whole tiles in turns. What is left, less than a tile for each, comes first and is divided into equal
// numbers of chunks: who has a tile's first chunk waits for the sums of the others, and adds them in the order of the inner
// dimension, so that results do not vary from run to run.

#pragma once

#include <cuda_fp16.h>

#include "codes.cuh"

namespace {

constexpr int kCluster = 2;
constexpr int kTeams = 2;                    // warpgroups that multiply
constexpr int kTileLines = kTeams * kBlock;  // of a block
constexpr int kThreads = kTeam * (kTeams + 1);
constexpr int kBand = 8;                     // tiles one below the other that are computed before those beside them
constexpr int kWidth = kLineUnits / kAcross; // bytes of 64 columns of a line of codes
constexpr int kShared = 226 * 1024;          // bytes of a block, but for barriers
constexpr int kStagedRows = 64;
constexpr int kFewest = 8;                   // chunks of a part of a shared tile: to add a part takes as long as two

template <int kRowsOf, bool kGatedOf>
struct Tiling {
  static constexpr bool kGated = kGatedOf;
  static constexpr int kRows = kRowsOf;
  static constexpr int kBlocks = kTeams, kTeamBlocks = 1;    // of 64 lines: of a tile, and of a warpgroup
  static constexpr int kSums = kRows / 2;                    // of a thread
  static constexpr int kWide = kTileLines / (kGated ? 2 : 1);  // features of a tile
  static constexpr int kOwn = kWide / kTeams;                // of a warpgroup
  static constexpr int kGroups = kGroup == 0 ? 0 : kGroup < kLine ? kLine / kGroup : 1;  // that 64 columns meet
  static constexpr int kInputBytes = kRows * 128;
  static constexpr int kCodeBytes = kTileLines * kWidth;
  static constexpr int kScaleBytesOf = kGroups * (kTileLines / kScaleLines) * kScaleBytes;
  static constexpr int kZeroBytes = kZeros ? kGroups * kTileLines : 0;
  static constexpr int kScalesAt = kInputBytes + kCodeBytes;  // in a slot: inputs, codes, scales, zero points
  static constexpr int kFetchedBytes = kScalesAt + kScaleBytesOf + kZeroBytes;  // of a chunk, which is 64 columns
  static constexpr int kSlotBytes = (kFetchedBytes + 1023) / 1024 * 1024;
  static constexpr int kPitch = kOwn * 2 + 16;  // bytes of a staged row
  static constexpr int kStagedBytes = kStagedRows * kPitch;
  static constexpr int kSlots = (kShared - kTeams * kStagedBytes) / kSlotBytes;
  static constexpr int kBytes = kSlots * kSlotBytes + kTeams * kStagedBytes;
  static_assert(kSlots > 2, "a slot is free only once the next one is multiplied");

  static __device__ int first_block(int thread) { return thread / kTeam; }
};

struct Arguments {
  CUtensorMap weight;  // bytes: [lines, size_in]; of gates and ups [features / 8, (gate, up), 8, size_in]
  CUtensorMap x;       // [rows, size_in]
  Scales scales;
  Element* out;   // [rows, size_out], out_stride apart
  float* planes;  // [blocks, sums of a tile]: parts of tiles that clusters share
  int* counters;  // [blocks, warpgroups], zeros: parts handed in to each
  int rows, size_out, chunks, columns, tiles;
  int shared, sharers;  // tiles that clusters share, which come first, and how many clusters do
  int64_t out_stride;
};

// --- the division

__device__ int cluster_of() { return gridDim.x / kCluster - 1 - blockIdx.x / kCluster; }  // lower blocks run first

// Of the chunks of shared tiles, which clusters with higher numbers have later ones of.
__device__ int begin_of(const Arguments& with, int cluster) {
  return with.shared * with.chunks * min(cluster, with.sharers) / with.sharers;
}

// Some chunks of a tile.
struct Part {
  int tile, from, count;
};

// The parts that are a cluster's, one after the other.
struct Parts {
  int begin, end, whole;

  __device__ explicit Parts(const Arguments& with)
      : begin(begin_of(with, cluster_of())), end(begin_of(with, cluster_of() + 1)), whole(with.shared + cluster_of()) {}

  __device__ bool next(const Arguments& with, Part& part) {
    if (begin < end) {
      part.tile = begin / with.chunks, part.from = begin % with.chunks;
      part.count = min(with.chunks - part.from, end - begin);
      begin += part.count;
      return true;
    }
    part = {whole, 0, with.chunks};
    whole += gridDim.x / kCluster;
    return part.tile < with.tiles;
  }
};

// Where a tile is: bands of tiles column by column.
template <class S>
struct Place {
  int row, column;  // the first row, and which of the blocks' tiles side by side

  __device__ Place(const Arguments& with, int tile) {
    const int lines = (with.rows + S::kRows - 1) / S::kRows;
    const int band = tile / (kBand * with.columns), within = tile % (kBand * with.columns);
    const int height = min(kBand, lines - band * kBand);
    row = (band * kBand + within % height) * S::kRows;
    column = within / height * kCluster + blockIdx.x % kCluster;
  }
};

// One chunk after another of a cluster's parts.
template <class S>
struct Walk {
  Parts parts;
  Part part;
  bool more;

  __device__ explicit Walk(const Arguments& with) : parts(with), more(parts.next(with, part)) {}
  __device__ void advance(const Arguments& with) {
    if (++part.from, --part.count == 0) more = parts.next(with, part);
  }
};

// --- tiles that clusters share

// Where a warpgroup of a cluster's block hands in sums, and where it hears of those of others.
template <class S>
__device__ float4* plane_of(const Arguments& with, int cluster, int thread) {
  const int block = cluster * kCluster + blockIdx.x % kCluster;
  return reinterpret_cast<float4*>(with.planes) + (block * kTeams + thread / kTeam) * (S::kSums / 4 * kTeam) + thread % kTeam;
}

__device__ int* counter_of(const Arguments& with, int cluster, int thread) {
  return with.counters + (cluster * kCluster + blockIdx.x % kCluster) * kTeams + thread / kTeam;
}

// Gives the sums of a tile's later chunks to the cluster that has its first.
template <class S>
__device__ void hand_in(const Arguments& with, const float (&sums)[S::kSums], int tile, int thread) {
  float4* plane = plane_of<S>(with, cluster_of(), thread);
#pragma unroll
  for (int i = 0; i < S::kSums; i += 4) {
    __stcg(plane + i / 4 * kTeam, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  int owner = cluster_of() - 1;
  while (begin_of(with, owner) > tile * with.chunks) --owner;
  team_meets(thread);
  if (thread % kTeam == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter_of(with, owner, thread)) : "memory");
  }
}

// Adds what others handed in for a tile.
template <class S>
__device__ void take_parts(const Arguments& with, float (&sums)[S::kSums], int tile, int thread) {
  const int first = cluster_of() + 1;
  int last = first;
  while (last < with.sharers && begin_of(with, last) < (tile + 1) * with.chunks) ++last;
  if (thread % kTeam == 0) {
    int* counter = counter_of(with, cluster_of(), thread);
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < last - first);
    *counter = 0;
  }
  team_meets(thread);
  for (int cluster = first; cluster < last; ++cluster) {
    const float4* plane = plane_of<S>(with, cluster, thread);
#pragma unroll
    for (int i = 0; i < S::kSums; i += 4) {
      const float4 four = __ldcg(plane + i / 4 * kTeam);
      sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
  }
}

}  // namespace
