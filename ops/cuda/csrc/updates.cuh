// What a product of few rows adds to its sums for the rows that use a low-rank adapter, all the same one: (x A^T) B.
//
// Owns no launch and no division of work. Compiled for RANKS: 0, for products without, or 16, the most that a module may
// have. Letters in comments as in few_rows.cuh.
//
// No block waits for another's x A^T. Each multiplies A with the inputs that pass through its ring anyway, and A comes
// through the ring with them; B lies in shared memory before x exists. So nothing is read late, which would queue behind all
// that the rings have asked for. A is read by every block, nearly always from L2. A block that has a part of the inner
// dimension has that part of x A^T, and adds its update to its own sums.

#pragma once

#include "few_rows.cuh"

namespace {

constexpr int kRanks = RANKS;
constexpr bool kUpdates = kRanks > 0;

// The updates of a tile's modules, one after the other: where in the arena A begins, in eights of elements.
struct Low {
  int start, ranks;
};

// Where a block keeps what its updates need besides the ring.
template <class S>
struct UpdateSpace {
  uint8_t* high;      // B: for each 64 lines of a tile a line for each rank, swizzled
  uint8_t* low;       // x A^T, rounded, of each warpgroup: [ranks / 8, kRows / 8, 8 rows, 8 ranks]
  uint64_t* filled;   // B is there
  uint64_t* emptied;  // and has been multiplied

  __device__ UpdateSpace(uint8_t* start, uint64_t* filled, uint64_t* emptied)
      : high(start), low(start + S::kBlocks * S::kLow * 128), filled(filled), emptied(emptied) {}
  __device__ void set_up() const {
    barrier_init(filled, kScalers);
    barrier_init(emptied, kMultipliers / 32);
  }
};

// --- the warp that streams

// Lines of A for the next 64 inputs, or more.
inline __device__ void fetch_low(void* target, const CUtensorMap* map, int sixty_four, int line, int start,
                                 uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(target)),
      "l"(map), "r"(0), "r"(line), "r"(sixty_four), "r"(start), "r"(shared_address(barrier))
      : "memory");
}

// What chunks hold of A, those of them that are among the first `once`; `find` says which updates a tile has.
template <class S, class Find>
struct LowLines {
  const RowAdapter& adapter;
  const Find& find;
  int once, tile = -1;
  Low now{};

  __device__ LowLines(const RowAdapter& adapter, const Find& find, int once) : adapter(adapter), find(find), once(kUpdates ? once : 0) {}

  __device__ int bytes(int i, int of_tile) {
    if (i >= once) return 0;
    if (of_tile != tile) now = find(of_tile), tile = of_tile;
    return S::kInputs * now.ranks * 128;
  }

  __device__ void fetch(int i, uint8_t* slot, int chunk, uint64_t* filled) const {
    if (i >= once) return;
    uint8_t* target = slot + S::kLowAt;
    if (now.ranks == S::kLow) return fetch_low(target, &adapter.all_low, chunk * S::kInputs, 0, now.start, filled);
    for (int rank = 0; rank < now.ranks; rank += 8) {
#pragma unroll
      for (int line = 0; line < S::kInputs; ++line) {
        fetch_low(target + (line * S::kLow + rank) * 128, &adapter.low, chunk * S::kInputs + line, rank, now.start, filled);
      }
    }
  }
};

// --- the warps that fetch B and find factors of a norm

// Lets wgmma see what ordinary stores of this thread left in shared memory.
inline __device__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Begins to copy lines of B for 64 lines of a tile; `find` says where eight features begin, null where a rank has none.
template <int kLow, class Find>
inline __device__ void fetch_high(uint8_t* target, const RowAdapter& adapter, int thread, const Find& find) {
#pragma unroll
  for (int i = 0; i < kLow * 8 / kScalers; ++i) {
    const int rank = (thread + i * kScalers) / 8, part = thread % 8;
    const Element* source = find(rank, part);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     shared_address(target + rank * 128 + (part ^ (rank & 7)) * 16)),
                 "l"(source == nullptr ? adapter.arena : source), "r"(source == nullptr ? 0 : 16)
                 : "memory");
  }
}

// Of one tile after another that the block finishes.
template <class S, class Fetch>
inline __device__ void prepare(const Inputs& with, const UpdateSpace<S>& space, float* factors, int thread,
                               const Fetch& fetch_tile) {
  const Finished tiles = Cursor<S::kSplits>(with).finished(with);
  int tile = tiles.first;
  if (kUpdates && tile < tiles.end) fetch_tile(tile);
  if (with.squares_in != nullptr) find_factors<S>(with, factors, thread);
  for (int round = 0; kUpdates && tile < tiles.end; ++round) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    show_to_products();
    barrier_arrive(space.filled);
    tile += tiles.step;
    if (tile >= tiles.end) break;
    barrier_wait(space.emptied, round & 1);
    fetch_tile(tile);
  }
}

// --- the warpgroup that multiplies

// Describes x A^T of some rank on: matrices of 8 rows and 8 ranks.
inline __device__ uint64_t low_at(const uint8_t* low, int rank) {
  return (uint64_t{8} << 32) | (uint64_t{kRows} << 16) | ((shared_address(low + rank * kRows * 2) & 0x3FFFF) >> 4);
}

// What the warpgroup has of the updates.
template <class S>
struct Update {
  UpdateSpace<S> space;
  float low[kUpdates ? S::kLow / 2 : 1];  // x A^T
  int left = 0, ranks = 0;             // chunks until all of x has passed
  bool uses[2], laid = false;         // whether they do whose x A^T this thread has
  const bool half;                     // scales of weights are float16
  const bool few;                      // rows: 8 at most

  __device__ Update(const Inputs& with, const UpdateSpace<S>& space, int thread) : space(space), half(with.scales.half), few(with.rows <= 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread % kTeam / 32 * 16 + thread % 32 / 4 + i * 8;
      uses[i] = kUpdates && row < with.rows && __ldg(with.adapter.slots_of + row) >= 0;
    }
  }

  // Before chunks that come with A.
  __device__ void begin(int chunks, int ranks_of) {
    left = chunks, ranks = ranks_of, laid = false;
#pragma unroll
    for (float& sum : low) sum = 0.f;
  }

  // The sums of the next `count` chunks.
  __device__ void sum_up(float (&sums)[S::kTeamBlocks][kSums], Chunks<S>& ring, int count, int thread) {
    clear(sums);
    if constexpr (!kUpdates) {
      add_chunks<false>(sums, low, ring, count, half, few, thread);
    } else if constexpr (S::kSplits > 1) {  // all come with A, or none
      if (left > 0) {
        add_chunks<true>(sums, low, ring, count, half, few, thread);
      } else {
        add_chunks<false>(sums, low, ring, count, half, few, thread);
      }
      left = 0;
    } else {
      const int now = min(left, count);
      if (now > 0) add_chunks<true>(sums, low, ring, now, half, few, thread);
      if (count > now) add_chunks<false>(sums, low, ring, count - now, half, few, thread);
      left -= now;
    }
  }

  // Adds the updates to the sums of a tile that the block finishes.
  __device__ void add_to(float (&sums)[S::kTeamBlocks][kSums], int round, int thread) {
    if constexpr (kUpdates) {
      if (!laid) lay(thread);
      barrier_wait(space.filled, round & 1);
      multiply_begin();
#pragma unroll
      for (int block = 0; block < S::kTeamBlocks; ++block) {
        const uint8_t* high = space.high + (S::first_block(thread) + block) * S::kLow * 128;
#pragma unroll
        for (int rank = 0; rank < S::kLow; rank += 16) {
          multiply_add<1>(sums[block], lines_at(high + rank * 128), low_at(own_low(thread), rank));
        }
      }
      multiply_commit();
      multiply_wait<0>();
#pragma unroll
      for (int block = 0; block < S::kTeamBlocks; ++block) sums_ready(sums[block]);
      if (thread % 32 == 0) barrier_arrive(space.emptied);
    }
  }

  // Where a thread's warpgroup keeps its x A^T: of all inputs, or of its part of them.
  __device__ uint8_t* own_low(int thread) const { return space.low + thread / kTeam * S::kLow * kRows * 2; }

  // Rounds x A^T of the rows that use the adapter and of its ranks: other sums are of whatever lay in memory.
  __device__ void lay(int thread) {
    const int warp = thread % kTeam / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    if (warp * 16 < kRows) {
#pragma unroll
      for (int i = 0; i < S::kLow / 2; i += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Pair pair;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const bool counts = uses[half] && 2 * i + 2 * c + k < ranks;
            pair.values[k] = static_cast<Element>(counts ? low[i + 2 * half + k] : 0.f);
          }
          const int matrix = i / 4 * (kRows / 8) + 2 * warp + half;
          *reinterpret_cast<uint32_t*>(own_low(thread) + (matrix * 8 + g) * 16 + c * 4) = pair.bits;
        }
      }
    }
    show_to_products();
    multipliers_meet();
    laid = true;
  }
};

// --- on the host

template <class S>
RowAdapter adapter_of(const TensorView& arena, const TensorView& modules, const TensorView& slots_of, const Inputs& with) {
  RowAdapter adapter{};
  if constexpr (kUpdates) {
    require(slots_of.numel() == with.rows, "another number of rows");
    const uint64_t inner = static_cast<uint64_t>(with.size_in), eights = static_cast<uint64_t>(arena.numel()) / 8;
    const uint64_t sizes[] = {kLine, S::kLow, inner / kLine, eights};
    const uint64_t strides[] = {inner * sizeof(Element), kLine * sizeof(Element), 8 * sizeof(Element)};
    adapter.low = map_of<4>(arena, sizes, strides, {kLine, 8, 1, 1});
    adapter.all_low = map_of<4>(arena, sizes, strides, {kLine, S::kLow, S::kInputs, 1});
    adapter.arena = static_cast<const Element*>(arena.data_ptr());
    adapter.modules = static_cast<const int4*>(modules.data_ptr());
    adapter.slots_of = static_cast<const int*>(slots_of.data_ptr());
  }
  return adapter;
}

}  // namespace
