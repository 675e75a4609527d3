// What products of up to ROWS rows share: a ring in shared memory, the sums of what it holds, and how clusters add them up.
//
// Owns no launch, and never knows what becomes of a product. Compiled for each padded number of rows: ROWS is 16, 32 or
// 64.
//
// The blocks of a cluster share the inner dimension of one tile of features after another. In each block one warp streams
// weights and inputs into a ring and one warpgroup multiplies; then every block sends its sums to the others, each of
// which finishes its share of the rows. Weights depend on no kernel before this one: the ring fills with them while that
// one runs.
//
// A norm between two products costs no kernel: the first adds the residual, multiplies by the norm's weight and leaves sums
// of squares; the second multiplies its outputs by each row's factor, which two more warps find meanwhile.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#pragma once

#include <cuda_fp16.h>

#include "wgmma.cuh"

#ifndef CODES
#define CODES 0
#define GROUP 0
#define ZEROS 0
#endif

namespace {

constexpr int kRows = ROWS;
constexpr int kBlockBytes = kBlock * 128;
constexpr int kSums = kRows / 2;            // of a thread and such lines
constexpr int kTeams = CODES ? 2 : 1;       // warpgroups that multiply: one converts codes while another's are multiplied
constexpr int kMultipliers = kTeam * kTeams;
constexpr int kScalers = 64;                // threads that find factors of a norm
constexpr int kThreads = kMultipliers + 32 + kScalers;
constexpr int kSharedBytes = 225 * 1024;    // of a block, but for barriers, factors of a norm, and 1 KB of the system

// --- arithmetic

#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define MULTIPLY(n, sums, a, b, turned) \
  "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " a ", " b ", adds, 1, 1, " turned ", 0;\n}"

// sum += a b^T over 16 inner elements; kTurned: lines of `a` run along its rows instead.
template <int kTurned = 0>
inline __device__ void multiply_add(float (&sum)[kSums], uint64_t a, uint64_t b) {
#if ROWS == 16
  asm volatile(MULTIPLY("16", S0, "%8", "%9", "%10")
               : EIGHT(0)
               : "l"(a), "l"(b), "n"(kTurned));
#elif ROWS == 32
  asm volatile(MULTIPLY("32", S0 ", " S1, "%16", "%17", "%18")
               : EIGHT(0), EIGHT(8)
               : "l"(a), "l"(b), "n"(kTurned));
#else
  asm volatile(MULTIPLY("64", S0 ", " S1 ", " S2 ", " S3, "%32", "%33", "%34")
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
               : "l"(a), "l"(b), "n"(kTurned));
#endif
}

// sum += x a^T over 16 inner elements, of up to 64 rows and all ranks: lanes of warp w get rows 16 w + g and 8 further.
template <int kCount>
inline __device__ void multiply_low(float (&sum)[kCount], uint64_t x, uint64_t a) {
  static_assert(kCount == 8 || kCount == 16);
  if constexpr (kCount == 8) {
    asm volatile(MULTIPLY("16", S0, "%8", "%9", "0")
                 : EIGHT(0)
                 : "l"(x), "l"(a));
  } else {
    asm volatile(MULTIPLY("32", S0 ", " S1, "%16", "%17", "0")
                 : EIGHT(0), EIGHT(8)
                 : "l"(x), "l"(a));
  }
}

}  // namespace

#include "code_products.cuh"

namespace {

// How a product is divided: a tile is `kBlocks` times 64 lines of weights; a chunk of it, which a slot of the ring holds,
// is `kLines` lines of 128 bytes of each; `kLow`: ranks of an adapter's updates of a tile (updates.cuh).
template <int kSplitsOf, int kBlocksOf, int kLinesOf, int kLowOf, int kBytes>
struct Shape {
  static constexpr bool kGated = false;
  static constexpr int kSplits = kSplitsOf;  // blocks of a cluster
  static constexpr int kBlocks = kBlocksOf;
  static constexpr int kLines = kLinesOf;
  static constexpr int kLow = kLowOf;
  static constexpr int kOwn = kRows / kSplits;         // rows that a block finishes
  static constexpr int kPitch = kBlocks * kBlock + 4;  // floats of a row of sums in shared memory
  static constexpr int kInputs = kLines * kAcross;     // lines of inputs
  // Warpgroups divide the blocks of a tile; if it has one block, they divide its inputs, and each has a part of its sums.
  static constexpr bool kByBlocks = kBlocks % kTeams == 0;
  static constexpr int kTeamBlocks = kByBlocks ? kBlocks / kTeams : kBlocks;
  static constexpr int kTeamInputs = kByBlocks ? kInputs : kInputs / kTeams;
  static constexpr int kTeamParts = kByBlocks ? 1 : kTeams;
  static constexpr int kParts = kSplits * kTeamParts;  // of a row's sums, which meet in one block
  static constexpr int kGroups = kGroup > 0 ? kInputs * kLine / kGroup : 0;
  static constexpr int kWeightBytes = kLines * kBlocks * kBlockBytes;
  static constexpr int kScaleBytesOf = kGroups * (kBlocks * kBlock / kScaleLines) * kScaleBytes;
  static constexpr int kZeroBytes = kZeros ? kGroups * kBlocks * kBlock : 0;
  static constexpr int kFetchedBytes = kWeightBytes + kInputs * kRows * 128 + kScaleBytesOf + kZeroBytes;  // of a chunk
  static constexpr int kLowAt = kWeightBytes + kInputs * kRows * 128;  // in a slot: A, then scales and zero points
  static constexpr int kScalesAt = kLowAt + kInputs * kLow * 128;
  static constexpr int kSlotBytes = (kScalesAt + kScaleBytesOf + kZeroBytes + 1023) / 1024 * 1024;
  static constexpr int kUpdateBytes = kLow * (kBlocks * 128 + kTeams * kRows * 2);
  static constexpr int kStagedBytes = kParts * kOwn * kPitch * 4;
  static constexpr int kRoom = kCoded ? kSharedBytes - kStagedBytes : kBytes;
  static constexpr int kSlots = (kRoom - kUpdateBytes) / kSlotBytes;  // chunks in shared memory
  static constexpr int kDynamicBytes = kSlots * kSlotBytes + kUpdateBytes;
  static_assert(kSlots > 1, "a slot is free only once the next one is multiplied");
  static_assert(kTeamInputs * kTeamParts == kInputs, "warpgroups have equal parts");
  static_assert(kGroup == 0 || kTeamInputs * kLine % kGroup == 0, "warpgroups have whole groups");

  static __device__ int first_block(int thread) { return kByBlocks ? thread / kTeam * kTeamBlocks : 0; }
  static __device__ int first_input(int thread) { return kByBlocks ? 0 : thread / kTeam * kTeamInputs; }
  static __device__ int part(int thread) { return kByBlocks ? 0 : thread / kTeam; }
};

// The adapter that rows use, as far as a product needs it.
struct RowAdapter {
  CUtensorMap low;      // A wherever in the arena it begins: [eights of elements, size_in / 64, lines, 64], eight lines
  CUtensorMap all_low;  // the same, all ranks that a chunk has room for
  const Element* arena;
  const int4* modules;  // of the site: where A and B begin in eights of elements, the rank, the ranks of those before
  const int* slots_of;  // [rows]: negative: uses none
};

// What is multiplied; the last kernel writes all of it but the weight and the adapter.
struct Inputs {
  CUtensorMap weight;       // of `tiles` tiles
  CUtensorMap x;            // [size_in / 64, rows, 64]
  const float* squares_in;  // null or [size_in / 64, rows]: of the norm whose factors `x` lacks
  RowAdapter adapter;
  Scales scales;
  int rows, size_in, chunks, tiles;
  float eps;
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

// Begins to read a map, of whose place the copy engine otherwise learns with the first copy.
inline __device__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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
inline __device__ void scalers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kScalers) : "memory"); }
inline __device__ void factors_ready() { asm volatile("bar.arrive 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }
inline __device__ void wait_for_factors() { asm volatile("bar.sync 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }

// --- the division

// The tiles that a block finishes.
struct Finished {
  int first, step, end;
};

// What is a block's, and where it stands: some chunks of every so many tiles.
template <int kSplits>
struct Cursor {
  int rank, first, last, tile, chunk, step;

  __device__ explicit Cursor(const Inputs& with)
      : rank(blockIdx.x % kSplits), first(with.chunks * rank / kSplits), last(with.chunks * (rank + 1) / kSplits),
        tile(blockIdx.x / kSplits), chunk(first), step(gridDim.x / kSplits) {}
  __device__ int count(const Inputs& with) const { return (last - first) * ((with.tiles - tile + step - 1) / step); }
  __device__ int once(const Inputs&) const { return last - first; }  // chunks until its part of x has passed
  __device__ Finished finished(const Inputs& with) const { return {tile, step, with.tiles}; }
  __device__ void advance() {
    if (++chunk == last) chunk = first, tile += step;
  }
};

// --- the ring

// Of one chunk a slot.
template <class S>
struct Chunks : Ring<S::kSlots, S::kSlotBytes> {
  __device__ Chunks(uint8_t* slots, uint64_t* filled, uint64_t* emptied)
      : Ring<S::kSlots, S::kSlotBytes>{slots, filled, emptied} {}
};

template <class S>
inline __device__ void fetch_inputs(const Inputs& with, uint8_t* slot, int chunk, uint64_t* filled) {
  fetch_box(slot + S::kWeightBytes, &with.x, 0, 0, chunk * S::kInputs, filled, kReadOften);
}

// Begins to fill the ring with weights, as much as it holds: one thread, which has set up the ring.
template <class S, class Fetch>
inline __device__ void begin_stream(const Inputs& with, const Chunks<S>& ring, const Fetch& fetch_weights) {
  prefetch_map(&with.x);
  Cursor<S::kSplits> weights(with);
  const int early = min(weights.count(with), S::kSlots);
  for (int i = 0; i < early; ++i, weights.advance()) {
    barrier_announce(ring.filled + i, S::kFetchedBytes);
    fetch_weights(ring.slots + i * S::kSlotBytes, weights.tile, weights.chunk, ring.filled + i);
  }
}

// Fills the ring with chunk after chunk of a block's tiles: the same thread. `low`: of A, whose place it takes a read to
// know.
template <class S, class Fetch, class Low>
inline __device__ void stream(const Inputs& with, Chunks<S> ring, const Fetch& fetch_weights, Low low) {
  Cursor<S::kSplits> weights(with), inputs = weights, lows = weights;
  const int count = weights.count(with), early = min(count, S::kSlots);
  for (int i = 0; i < early; ++i) weights.advance();
  for (int i = 0; i < early; ++i, lows.advance()) {
    barrier_expect(ring.filled + i, low.bytes(i, lows.tile));
    low.fetch(i, ring.slots + i * S::kSlotBytes, lows.chunk, ring.filled + i);
  }
  wait_for_last_kernel();
  for (int i = 0; i < early; ++i, inputs.advance()) {
    fetch_inputs<S>(with, ring.slots + i * S::kSlotBytes, inputs.chunk, ring.filled + i);
  }
  for (int i = early; i < count; ++i, weights.advance(), ring.advance()) {
    uint64_t* filled = ring.filled + ring.at;
    barrier_wait(ring.emptied + ring.at, ring.turn & 1);
    barrier_expect(filled, S::kFetchedBytes + low.bytes(i, weights.tile));
    fetch_weights(ring.slot(), weights.tile, weights.chunk, filled);
    fetch_inputs<S>(with, ring.slot(), weights.chunk, filled);
    low.fetch(i, ring.slot(), weights.chunk, filled);
  }
}

template <int kBlocks>
inline __device__ void clear(float (&sums)[kBlocks][kSums]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[block][i] = 0.f;
  }
}

#if !CODES

// Adds the next `count` chunks to the sums; kWithLow: and to x A^T, which `low` is.
template <bool kWithLow, class S, int kCount>
inline __device__ void add_chunks(float (&sums)[S::kTeamBlocks][kSums], float (&low)[kCount], Chunks<S>& ring, int count,
                                  bool, bool, int thread) {
  int behind = -1;
  for (int i = 0; i < count; ++i) {
    ring.wait_filled();
    const uint64_t w = lines_at(ring.slot()), x = lines_at(ring.slot() + S::kWeightBytes);
    const uint64_t a = lines_at(ring.slot() + S::kLowAt);
    multiply_begin();
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // of 16 elements, 32 bytes of a line
        const uint64_t inputs = x + (line * kRows * 128 + step * 32) / 16;
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
          multiply_add(sums[block], w + ((line * S::kBlocks + block) * kBlockBytes + step * 32) / 16, inputs);
        }
        if constexpr (kWithLow) multiply_low(low, inputs, a + (line * S::kLow * 128 + step * 32) / 16);
      }
    }
    multiply_commit();
    multiply_wait<1>();
    if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
    behind = ring.at;
    ring.advance();
  }
  multiply_wait<0>();
#pragma unroll
  for (int block = 0; block < S::kTeamBlocks; ++block) sums_ready(sums[block]);
  if constexpr (kWithLow) sums_ready(low);
  if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
}

#else

// A warpgroup's sums of a group, while its inputs are multiplied: of each of its blocks.
template <class S>
using GroupSums = float[kGroup > 0 ? S::kTeamBlocks : 1][kSums];

// Adds the sums of a group, scaled, to those of its block.
template <class S, int kEights = kRows / 8>
inline __device__ void add_group(float (&to)[kSums], const float (&from)[kSums], const uint8_t* scales, bool half, int group,
                                 int block, int thread) {
  float scale[2];
  find_scales<S>(scale, scales, half, group, block, thread);
#pragma unroll
  for (int k = 0; k < 4 * kEights; ++k) to[k] += from[k] * scale[k / 2 % 2];
}

#if ROWS < 64

// Adds the next `count` chunks to the sums; kWithLow: and to x A^T, which `low` is. Each warp multiplies alone: products of
// so few rows whose weights come from registers take twice as long by wgmma. The first 8 * kEights rows.
template <bool kWithLow, int kEights, class S, int kCount>
inline __device__ void add_rows(float (&sums)[S::kTeamBlocks][kSums], float (&low)[kCount], Chunks<S>& ring, int count,
                                bool half, int thread) {
  const int lane = thread % 32, first = same_in_warp(thread);
  const int own_line = (thread % kTeam / 32 * 16 + lane % 16) * 128;  // that this thread names to ldmatrix
  const int first_block = S::first_block(first), first_input = S::first_input(first);
  const uint32_t magic = hidden_magic();
  for (int i = 0; i < count; ++i) {
    ring.wait_filled();
    const uint32_t slot = shared_address(ring.slot()), x = slot + S::kWeightBytes;
    const uint8_t* scales = ring.slot() + S::kScalesAt;
    if constexpr (kWithLow) {
      multiply_begin();
#pragma unroll
      for (int step = 0; step < S::kTeamInputs * 4; ++step) {
        const int part = first_input + step / 4, inside = step % 4 * 32;
        multiply_low(low, lines_at(x + part * kRows * 128 + inside), lines_at(slot + S::kLowAt + part * S::kLow * 128 + inside));
      }
      multiply_commit();
      multiply_wait<0>();
      sums_ready(low);
    }
    GroupSums<S> group_sums{};
#pragma unroll
    for (int own_part = 0; own_part < S::kTeamInputs; ++own_part) {  // of 64 columns
      const int part = first_input + own_part;
      uint32_t rows[4][kEights][2];
      load_rows(rows, x + part * kRows * 128, lane);
#pragma unroll
      for (int own_block = 0; own_block < S::kTeamBlocks; ++own_block) {
        const int block = first_block + own_block;
        Fragments own;
        uint32_t zeros[kZeroGroups][2];
        find_zeros<S>(zeros, scales + S::kScaleBytesOf, part, block, thread);
        make_fragments(own, slot + own_line + (part / kAcross * S::kBlocks + block) * kBlockBytes, part % kAcross, lane, zeros,
                       magic);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const int at = own_part * 4 + step;  // of 16 columns
          if constexpr (kGroup > 0) {
            multiply_rows(group_sums[own_block], own.steps[step], rows[step], at % kGroupSteps != 0);
            if ((at + 1) % kGroupSteps == 0) {
              add_group<S, kEights>(sums[own_block], group_sums[own_block], scales, half, (part * 4 + step) / kGroupSteps, block, thread);
            }
          } else {
            multiply_rows(sums[own_block], own.steps[step], rows[step], true);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.emptied + ring.at);
    ring.advance();
  }
}

// `few`: of 8 rows at most.
template <bool kWithLow, class S, int kCount>
inline __device__ void add_chunks(float (&sums)[S::kTeamBlocks][kSums], float (&low)[kCount], Chunks<S>& ring, int count,
                                  bool half, bool few, int thread) {
  if (kRows == 16 && few) {
    add_rows<kWithLow, 1>(sums, low, ring, count, half, thread);
  } else {
    add_rows<kWithLow, kRows / 8>(sums, low, ring, count, half, thread);
  }
}

#else

// The same. One warpgroup converts codes while the products of the other run.
template <bool kWithLow, class S, int kCount>
inline __device__ void add_chunks(float (&sums)[S::kTeamBlocks][kSums], float (&low)[kCount], Chunks<S>& ring, int count,
                                  bool half, bool, int thread) {
  const int lane = thread % 32, first = same_in_warp(thread);
  const int own_line = (thread % kTeam / 32 * 16 + lane % 16) * 128;  // that this thread names to ldmatrix
  const int first_block = S::first_block(first), first_input = S::first_input(first);
  const uint32_t magic = hidden_magic();
  int behind = -1;
  Fragments fragments[2];
  for (int i = 0; i < count; ++i) {
    ring.wait_filled();
    const uint32_t slot = same_in_warp(shared_address(ring.slot()));
    const uint64_t x = lines_at(slot + S::kWeightBytes), a = lines_at(slot + S::kLowAt);
    const uint8_t* scales = ring.slot() + S::kScalesAt;
    GroupSums<S> group_sums;
#pragma unroll
    for (int own_part = 0; own_part < S::kTeamInputs; ++own_part) {  // of 64 columns
      const int part = first_input + own_part;
#pragma unroll
      for (int own_block = 0; own_block < S::kTeamBlocks; ++own_block) {
        const int block = first_block + own_block;
        Fragments& own = fragments[(own_part * S::kTeamBlocks + own_block) % 2];
        uint32_t zeros[kZeroGroups][2];
        find_zeros<S>(zeros, scales + S::kScaleBytesOf, part, block, thread);
        make_fragments(own, slot + own_line + (part / kAcross * S::kBlocks + block) * kBlockBytes, part % kAcross, lane, zeros,
                       magic);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const int at = own_part * 4 + step;  // of 16 columns
          const uint64_t inputs = x + (part * kRows * 128 + step * 32) / 16;
          if (step == 0 || (kGroup > 0 && at % kGroupSteps == 0)) multiply_begin();
          if constexpr (kGroup > 0) {
            multiply_codes(group_sums[own_block], own.steps[step], inputs, at % kGroupSteps != 0);
          } else {
            multiply_codes(sums[own_block], own.steps[step], inputs, 1);
          }
          if constexpr (kWithLow) {
            if (own_block == 0) multiply_low(low, inputs, a + (part * S::kLow * 128 + step * 32) / 16);
          }
          if constexpr (kGroup > 0) {
            if ((at + 1) % kGroupSteps == 0) {
              multiply_commit();
              multiply_wait<0>();
              sums_ready(group_sums[own_block]);
              add_group<S>(sums[own_block], group_sums[own_block], scales, half, (part * 4 + step) / kGroupSteps, block, thread);
            }
          }
        }
        multiply_commit();
        multiply_wait<1>();
      }
    }
    if (behind >= 0 && lane == 0) barrier_arrive(ring.emptied + behind);
    behind = ring.at;
    ring.advance();
  }
  multiply_wait<0>();
#pragma unroll
  for (int block = 0; block < S::kTeamBlocks; ++block) sums_ready(sums[block]);
  if constexpr (kWithLow) sums_ready(low);
  if (behind >= 0 && lane == 0) barrier_arrive(ring.emptied + behind);
}

#endif
#endif

// --- the cluster's sums

// Where sums of a tile meet: those of each block of the cluster for this block's rows.
template <class S>
struct Exchange {
  float* staged;  // [kParts, kOwn, kPitch]
  uint64_t* arrived;
  uint64_t* taken;

  __device__ void set_up() const {
    barrier_init(arrived, S::kSplits * kMultipliers / 32);
    barrier_init(taken, S::kSplits * kMultipliers / 32);
  }

  // Sends each row's sums to the block that finishes it.
  __device__ void send(const float (&sums)[S::kTeamBlocks][kSums], int round, int thread) const {
    const int lane = thread % 32, g = lane / 4, c = lane % 4;
    float* place = staged + S::part(thread) * S::kOwn * S::kPitch + S::first_block(thread) * kBlock +
                   16 * (thread % kTeam / 32) + g;
    if (round > 0) wait_for(taken, round - 1);
#pragma unroll
    for (int block = 0; block < S::kTeamBlocks; ++block, place += kBlock) {
      if constexpr (S::kSplits == 1) {
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
          float* here = place + (8 * (i / 4) + 2 * c) * S::kPitch;
          here[0] = sums[block][i], here[S::kPitch] = sums[block][i + 1];
          here[8] = sums[block][i + 2], here[S::kPitch + 8] = sums[block][i + 3];
        }
      } else {
        const uint32_t start = shared_address(place + blockIdx.x % S::kSplits * S::kTeamParts * S::kOwn * S::kPitch);
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
          const int row = 8 * (i / 4) + 2 * c, own = row % S::kOwn, owner = row / S::kOwn;
          const uint32_t there = address_in(start + own * (S::kPitch * 4), owner);
          const uint32_t barrier = address_in(shared_address(arrived), owner);
          store_in(there, sums[block][i], barrier);
          store_in(there + S::kPitch * 4, sums[block][i + 1], barrier);
          store_in(there + 8 * 4, sums[block][i + 2], barrier);
          store_in(there + S::kPitch * 4 + 8 * 4, sums[block][i + 3], barrier);
        }
      }
    }
    tell(arrived, S::kTeamBlocks * S::kOwn * 16 * 4, lane);
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

  // Eight sums of a row, in the order of the inner dimension.
  __device__ void add_up(float (&values)[8], int own, int line) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.f;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(staged + (part * S::kOwn + own) * S::kPitch + line + i);
        values[i] += four.x, values[i + 1] += four.y, values[i + 2] += four.z, values[i + 3] += four.w;
      }
    }
  }
};

// Before the first use of any of them.
template <class S, class Space, class Fetch>
inline __device__ void set_up(const Inputs& with, const Chunks<S>& ring, const Exchange<S>& exchange, const Space& space,
                              int warp, const Fetch& fetch_weights) {
  if (warp == kMultipliers / 32) {
    if (is_elected()) {
      ring.set_up(kMultipliers / 32);
      exchange.set_up();
      space.set_up();
      barriers_are_set_up();
      begin_stream(with, ring, fetch_weights);
    }
    __syncwarp();
  }
  __syncthreads();
  if constexpr (S::kSplits > 1) cluster_begins();
}

// --- the warps that find factors of a norm

constexpr int kShares = 16;  // of a row's squares: share s is part s, part s + 16 and so on

// Adds numbers two by two, so that the sum of a power of two of them is that of the sums of its halves.
template <int kCount>
inline __device__ float sum_of(const float* numbers, int stride) {
  if constexpr (kCount == 1) {
    return *numbers;
  } else {
    return sum_of<kCount / 2>(numbers, stride) + sum_of<kCount / 2>(numbers + kCount / 2 * stride, stride);
  }
}

// For this block's rows, from the sums of squares that the last product left. They are added in the same order however many
// threads a row has: a factor must not depend on the number of rows, or the same token would be computed differently in
// another batch.
template <class S>
inline __device__ void find_factors(const Inputs& with, float* factors, int thread) {
  constexpr int kTogether = kScalers / S::kOwn;   // threads of a row
  constexpr int kEach = kShares / kTogether;      // neighbouring shares of a thread
  static_assert(kEach * kTogether == kShares);
  __shared__ float sums[kScalers];
  wait_for_last_kernel();
  const int own = thread % S::kOwn, row = blockIdx.x % S::kSplits * S::kOwn + own, first = thread / S::kOwn * kEach;
  const int rows = with.rows, parts = with.size_in / 64;  // known before the loop: its reads are asked for together
  float shares[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) shares[i] = 0.f;
  if (row < rows) {
#pragma unroll (16 / kEach)
    for (int part = first; part < parts; part += kShares) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (part + i < parts) shares[i] += __ldcg(with.squares_in + (part + i) * rows + row);
      }
    }
  }
  sums[thread] = sum_of<kEach>(shares, 1);
  scalers_meet();
  if (thread < S::kOwn) {
    factors[thread] = rsqrtf(sum_of<kTogether>(sums + thread, S::kOwn) / with.size_in + with.eps);
  }
  __syncwarp();
  factors_ready();
}

// --- on the host

// As few clusters as take `tiles` in as many rounds as `most` would.
inline int few_clusters(int tiles, int most) {
  const int rounds = (tiles + most - 1) / most;
  return (tiles + rounds - 1) / rounds;
}

}  // namespace
