// Products of the dense weights of experts with the rows that chose each of them (sm_90).
//
// Owns one launch. Never chooses experts: lists made on the device say which expert a tile of rows has.
//
// Lines of a weight are the first operand of wgmma and the rows of a tile the second, so that a tile of few rows takes
// little arithmetic. Blocks stay, and take one piece of work after another: 128 lines of an expert's weight, and the rows of
// a tile. One warp keeps a ring filled through all of a block's pieces; two warpgroups multiply 64 lines each. The rows of
// tokens are gathered by three more warps, or lie one behind another already. Where tiles have more than 64 rows, two blocks
// of a cluster take lines side by side, and each fetches every second box of the rows for both. A row's sums are in the
// order of the inner dimension, whatever the other rows of its tile are.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#define SOURCE "expert_dense"
#include <type_traits>

#include "experts.cuh"

namespace {

constexpr int kTeams = 2;  // warpgroups that multiply
constexpr int kThreads = kTeam * (kTeams + 1);
constexpr int kTileLines = kTeams * kBlock;
constexpr int kWeightBytes = kTileLines * 128;  // of a part, which is 64 columns
constexpr int kShared = 226 * 1024;             // bytes of a block, but for barriers
constexpr int kGatherers = kTeam - 32;          // threads that bring the rows of tokens together
constexpr int kStagedRows = 32;                 // of results that a warpgroup brings into the order of memory at once

template <int kRowsOf, bool kGatedOf, bool kGathersOf>
struct Tiling {
  static constexpr bool kGated = kGatedOf;
  static constexpr bool kGathers = kGathersOf;  // rows of tokens; the others lie one behind another
  static constexpr int kRows = kRowsOf;                        // most of a tile
  static constexpr int kStep = kRows < 32 ? kRows : 32;        // a tile is multiplied as some of these
  static constexpr int kCluster = kRows > 64 ? 2 : 1;
  static constexpr int kParts = kRows > 64 ? 1 : 2;            // of a slot
  static constexpr int kBand = kRows > 64 ? 8 : 4;             // tiles of rows that take the same lines one after the other
  static constexpr bool kLeads = kRows > 64;                   // a slot is left once the products of the next are asked for
  static constexpr int kOwn = kBlock / (kGated ? 2 : 1);       // features of a warpgroup
  static constexpr int kWide = kTeams * kOwn;                  // features of a piece
  static constexpr int kPartBytes = kWeightBytes + kRows * 128;
  static constexpr int kSlotBytes = kParts * kPartBytes;
  static constexpr int kPitch = kOwn * 2 + 16;                 // bytes of a staged row
  static constexpr int kStagedBytes = kStagedRows * kPitch;
  static constexpr int kTargetBytes = kGated ? 0 : kTeams * kRows * 8;
  static constexpr int kTokenBytes = kGathers ? 2 * kRows * 4 : 0;
  static constexpr int kRestBytes = kTeams * 2 * kStagedBytes + kTargetBytes + kTokenBytes;
  static constexpr int kSlots = (kShared - kRestBytes) / kSlotBytes;
  static constexpr int kBytes = kSlots * kSlotBytes + kRestBytes;
  static_assert(kSlots > 2, "a slot is free only once the next one is multiplied");
};

template <class S>
using Slots = Ring<S::kSlots, S::kSlotBytes>;

struct Arguments {
  CUtensorMap weight;  // [experts, lines, size_in]; of gates and ups [experts, F / 8, (gate, up), 8, size_in]
  CUtensorMap x;       // [places, size_in], unless rows of tokens are gathered
  const Element* tokens;  // [tokens, size_in], token_stride apart
  int64_t token_stride;
  const float* bias;   // [experts, lines], or null
  const int* tiles;    // [tiles, 3]: expert, first place, how many places
  const int* ends;     // the number of tiles
  const int* pairs;    // [places]: which row of the outputs a place has, of downs
  const float* shares;  // [pairs]: what results of downs are multiplied by
  void* out;            // [places or pairs, size_out]
  int64_t out_stride;
  bool in_float;  // outputs are float32
  bool early;     // weights are fetched before the kernel before has ended, which left the lists as they are
  int size_out, lines, columns, parts, activation, top_k;
};

// --- the division

// A piece of a cluster's work: a tile, and some of the lines. In a band of tiles all take the same lines before the next.
// Lists come from L2, since they may be read before this kernel has waited for those that wrote them, and the last one has.
template <class S>
struct Piece {
  int index, tiles, expert, first, rows, column;

  __device__ explicit Piece(const Arguments& with) : index(blockIdx.x / S::kCluster), tiles(__ldcg(with.ends)) { find(with); }

  __device__ bool exists(const Arguments& with) const { return index < tiles * with.columns; }

  __device__ void advance(const Arguments& with) {
    index += gridDim.x / S::kCluster;
    find(with);
  }

  __device__ void find(const Arguments& with) {
    if (!exists(with)) return;
    const int band = index / (S::kBand * with.columns), within = index % (S::kBand * with.columns);
    const int height = min(S::kBand, tiles - band * S::kBand);
    const int* tile = with.tiles + (band * S::kBand + within % height) * 3;
    expert = __ldcg(tile), first = __ldcg(tile + 1), rows = __ldcg(tile + 2);
    column = within / height * S::kCluster + blockIdx.x % S::kCluster;
  }
};

// One slot after another of a block's pieces. What the list says of the next piece is read while this one is fetched.
template <class S>
struct Walk {
  Piece<S> piece, next;
  int part = 0;

  __device__ explicit Walk(const Arguments& with) : piece(with), next(piece) { next.advance(with); }

  __device__ bool exists(const Arguments& with) const { return piece.exists(with); }

  __device__ void advance(const Arguments& with) {
    part += S::kParts;
    if (part < with.parts) return;
    part = 0, piece = next;
    next.advance(with);
  }

  __device__ int parts(const Arguments& with) const { return min(S::kParts, with.parts - part); }
  __device__ int boxes() const { return (piece.rows + S::kStep - 1) / S::kStep; }
};

// --- the warp that streams

template <class S>
__device__ void fetch_weights(const Arguments& with, const Slots<S>& ring, const Walk<S>& walk) {
  constexpr uint64_t kPolicy = S::kRows > 64 ? kReadNormally : kReadOnce;
  uint64_t* filled = ring.filled + ring.at;
  const int parts = walk.parts(with);
  barrier_expect(filled, parts * (kWeightBytes + (S::kGathers ? 0 : walk.boxes() * S::kStep * 128)));
  for (int part = 0; part < parts; ++part) {
    void* target = ring.slot() + part * S::kPartBytes;
    const int inner = (walk.part + part) * kLine, expert = walk.piece.expert;
    if constexpr (S::kGated) {
      fetch_gated(target, &with.weight, inner, walk.piece.column * (S::kWide / 8), expert, filled, kPolicy);
    } else {
      fetch_box(target, &with.weight, inner, walk.piece.column * S::kWide, expert, filled, kPolicy);
    }
  }
}

template <class S>
__device__ void fetch_inputs(const Arguments& with, const Slots<S>& ring, const Walk<S>& walk) {
  uint64_t* filled = ring.filled + ring.at;
  const int parts = walk.parts(with), boxes = walk.boxes(), rank = blockIdx.x % S::kCluster;
  for (int part = 0; part < parts; ++part) {
    uint8_t* target = ring.slot() + part * S::kPartBytes + kWeightBytes;
    const int inner = (walk.part + part) * kLine;
    for (int box = rank; box < boxes; box += S::kCluster) {
      void* rows = target + box * S::kStep * 128;
      const int first = walk.piece.first + box * S::kStep;
      if constexpr (S::kCluster > 1) {
        fetch_for_all(rows, &with.x, inner, first, filled, S::kCluster);
      } else {
        fetch_lines(rows, &with.x, inner, first, filled);
      }
    }
  }
}

template <class S>
__device__ void stream(const Arguments& with, Slots<S> ring) {
  int ahead = 0;  // slots whose weights are asked for already
  if (with.early) {
    Slots<S> empty = ring;
    Walk<S> walk(with);
    for (; ahead < S::kSlots && walk.exists(with); ++ahead, walk.advance(with), empty.advance()) {
      fetch_weights(with, empty, walk);
    }
  }
  wait_for_last_kernel();
  for (Walk<S> walk(with); walk.exists(with); walk.advance(with), ring.advance()) {
    if (ahead > 0) {
      --ahead;
    } else {
      ring.wait_emptied();
      fetch_weights(with, ring, walk);
    }
    if constexpr (!S::kGathers) fetch_inputs(with, ring, walk);
  }
}

// The other warps of that warpgroup: the rows of a tile's tokens, in the order of the swizzle of the copy engine.
template <class S>
__device__ void gather(const Arguments& with, Slots<S> ring, int* tokens, int thread) {
  wait_for_last_kernel();
  int turn = 0;  // which half of `tokens` has those of the piece at hand: somebody may still read those of the last
  for (Walk<S> walk(with); walk.exists(with); walk.advance(with), ring.advance()) {
    if (walk.part == 0) {
      turn ^= 1;
      for (int row = thread; row < walk.piece.rows; row += kGatherers) {
        tokens[turn * S::kRows + row] = with.pairs[walk.piece.first + row] / with.top_k;
      }
      asm volatile("bar.sync %0, %1;" ::"n"(kTeams + 1), "n"(kGatherers) : "memory");
    }
    ring.wait_emptied();
    const int parts = walk.parts(with);
    for (int part = 0; part < parts; ++part) {
      const uint32_t target = shared_address(ring.slot() + part * S::kPartBytes + kWeightBytes);
      const Element* source = with.tokens + (walk.part + part) * kLine;
#pragma unroll 4
      for (int at = thread; at < walk.piece.rows * 8; at += kGatherers) {
        const int row = at / 8, eight = at % 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + row * 128 + ((eight ^ row % 8) << 4)),
                     "l"(source + tokens[turn * S::kRows + row] * with.token_stride + eight * 8)
                     : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(ring.filled + ring.at))
                 : "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// --- products

#define NUMBERS_48 \
  NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_80 \
  NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NUMBERS_112 \
  NUMBERS_64 ", " NUMBERS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"

#define SUMS_16 SIXTEEN(0)
#define SUMS_32 SUMS_16, SIXTEEN(16)
#define SUMS_48 SUMS_32, SIXTEEN(32)
#define SUMS_64 SUMS_48, SIXTEEN(48)
#define SUMS_80 SUMS_64, SIXTEEN(64)
#define SUMS_96 SUMS_80, SIXTEEN(80)
#define SUMS_112 SUMS_96, SIXTEEN(96)
#define SUMS_128 SUMS_112, SIXTEEN(112)

// sum += a b^T over 16 inner elements of 64 lines and ROWS rows. A and B: the numbers of what follows the sums.
#define MULTIPLY_ADD(ROWS, NUMBERS, A, B, ...)                                                               \
  __device__ void multiply_add(float (&sum)[ROWS / 2], uint64_t a, uint64_t b) {                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" NUMBERS "}, " A ", " B      \
                 ", 1, 1, 1, 0, 0;"                                                                          \
                 : __VA_ARGS__                                                                               \
                 : "l"(a), "l"(b));                                                                          \
  }

MULTIPLY_ADD(16, NUMBERS_8, "%8", "%9", EIGHT(0))
MULTIPLY_ADD(32, NUMBERS_16, "%16", "%17", SUMS_16)
MULTIPLY_ADD(64, NUMBERS_32, "%32", "%33", SUMS_32)
MULTIPLY_ADD(96, NUMBERS_48, "%48", "%49", SUMS_48)
MULTIPLY_ADD(128, NUMBERS_64, "%64", "%65", SUMS_64)
MULTIPLY_ADD(160, NUMBERS_80, "%80", "%81", SUMS_80)
MULTIPLY_ADD(192, NUMBERS_64 ", " NUMBERS_96, "%96", "%97", SUMS_96)
MULTIPLY_ADD(224, NUMBERS_112, "%112", "%113", SUMS_112)
MULTIPLY_ADD(256, NUMBERS_64 ", " NUMBERS_96 ", " NUMBERS_128, "%128", "%129", SUMS_128)

// This warp has read a slot, and needs it no more.
template <class S>
__device__ void leave(const Slots<S>& ring, int slot, int lane) {
  if constexpr (S::kCluster > 1) {
    leave_everywhere(ring.emptied + slot, S::kCluster, lane);
  } else {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.emptied + slot);
  }
}

// The sums of all columns of a warpgroup's lines and kRows rows.
template <class S, int kRows>
__device__ void sum_up(float (&sums)[kRows / 2], Slots<S>& ring, int parts, int thread) {
  const uint32_t own_lines = same_in_warp(thread / kTeam) * (kBlock * 128);
#pragma unroll
  for (float& sum : sums) sum = 0.f;
  int before = 0;  // the slot of the products that are in flight while the next ones are asked for
  for (int left = parts; left > 0; left -= S::kParts) {
    ring.wait_filled();
    if constexpr (S::kGathers) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for what threads copied
    const uint32_t slot = same_in_warp(shared_address(ring.slot()));
    multiply_begin();
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      if (part > 0 && part >= left) break;
      const uint64_t w = lines_at(slot + part * S::kPartBytes + own_lines);
      const uint64_t x = lines_at(slot + part * S::kPartBytes + kWeightBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_add(sums, w + step * 2, x + step * 2);
    }
    multiply_commit();
    if constexpr (S::kLeads) {
      if (left < parts) {
        multiply_wait<1>();
        leave<S>(ring, before, thread % 32);
      }
      before = ring.at;
    } else {
      multiply_wait<0>();  // the other warpgroup multiplies meanwhile
      leave<S>(ring, ring.at, thread % 32);
    }
    ring.advance();
  }
  multiply_wait<0>();
  sums_ready(sums);
  if constexpr (S::kLeads) leave<S>(ring, before, thread % 32);
}

// --- what becomes of a piece

// A warpgroup's results on their way to memory: two buffers of 32 rows, written in turns, of its features each.
template <class S>
struct Staging {
  uint8_t* buffers;
  int thread;  // of the warpgroup
  int turn = 0;

  // The row that a lane names to stmatrix for matrices of eight rows and eight features: `column`, in eights.
  __device__ void put(int row, int column, const Pair (&pairs)[4]) const {
    const uint32_t at = shared_address(buffers + turn * S::kStagedBytes + row * S::kPitch + column * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pairs[0].bits),
                 "r"(pairs[1].bits), "r"(pairs[2].bits), "r"(pairs[3].bits)
                 : "memory");
  }
  __device__ uint4 get(int row, int eight) const {
    return *reinterpret_cast<const uint4*>(buffers + turn * S::kStagedBytes + row * S::kPitch + eight * 16);
  }
};

// Where results of downs go, and what they are multiplied by, of a warpgroup's tile.
struct Targets {
  int* pairs;
  float* shares;
};

// What a thread knows of a piece beside its sums.
struct Own {
  int first, feature;  // features: the first of the warpgroup's, and that of the thread's first line
  float bias[2];       // of its two lines: a gate and its up, or features eight apart
};

template <class S, int kRows>
__device__ void put_floats(const Arguments& with, const Piece<S>& piece, const float (&sums)[kRows / 2], const Own& own,
                           const Targets& targets, int c) {
  float* out = static_cast<float*>(with.out);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i / 4 * 8 + 2 * c + i % 2, half = i / 2 % 2, feature = own.feature + half * 8;
    if (row >= piece.rows || feature >= with.size_out) continue;
    out[targets.pairs[row] * with.out_stride + feature] =
        __fmul_rn(__fadd_rn(sums[i], own.bias[half]), targets.shares[row]);
  }
}

// Results of gates and ups, of four times eight rows from `first` on; a thread has one feature of two rows of each.
template <class S, int kRows>
__device__ void stage_gated(const Arguments& with, const float (&sums)[kRows / 2], int first, const Own& own,
                            const Staging<S>& staging) {
  Pair pairs[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = first / 2 + i / 2 * 4 + i % 2;
    const bool exists = at + 2 < kRows / 2;
    const float gate = exists ? __fadd_rn(sums[at], own.bias[0]) : 0.f;
    const float up = exists ? __fadd_rn(sums[at + 2], own.bias[1]) : 0.f;
    pairs[i / 2].values[i % 2] = static_cast<Element>(activated(gate, up, with.activation));
  }
  staging.put(staging.thread % 32, staging.thread / 32, pairs);
}

// Results of downs, of four times eight rows; a thread has two features, eight apart, of two rows of each.
template <class S, int kRows>
__device__ void stage_downs(const float (&sums)[kRows / 2], int first, const Own& own, const Targets& targets,
                            const Staging<S>& staging) {
  const int lane = staging.thread % 32, c = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Pair pairs[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int eight = half * 2 + i / 4, low = i / 2 % 2, at = first / 2 + eight * 4 + low * 2 + i % 2;
      const bool exists = at < kRows / 2;
      const float share = exists ? targets.shares[first + eight * 8 + 2 * c + i % 2] : 0.f;
      pairs[i / 2].values[i % 2] = static_cast<Element>(exists ? __fmul_rn(__fadd_rn(sums[at], own.bias[low]), share) : 0.f);
    }
    staging.put(half * 16 + lane / 16 * 8 + lane % 8, staging.thread / 32 * 2 + lane / 8 % 2, pairs);
  }
}

template <class S, int kRows>
__device__ void put_elements(const Arguments& with, const Piece<S>& piece, const float (&sums)[kRows / 2], const Own& own,
                             const Targets& targets, Staging<S>& staging, int thread) {
  constexpr int kLanes = S::kOwn / 8;  // threads of a row, 16 bytes each
#pragma unroll
  for (int first = 0; first < kRows; first += kStagedRows, staging.turn ^= 1) {
    if constexpr (S::kGated) {
      stage_gated<S, kRows>(with, sums, first, own, staging);
    } else {
      stage_downs<S, kRows>(sums, first, own, targets, staging);
    }
    team_meets(thread);  // all have left the other buffer, too
#pragma unroll
    for (int i = 0; i < kStagedRows * kLanes / kTeam; ++i) {
      const int within = i * (kTeam / kLanes) + staging.thread / kLanes, row = first + within;
      const int eight = staging.thread % kLanes, feature = own.first + eight * 8;
      if (row >= piece.rows || feature >= with.size_out) continue;
      const int64_t target = S::kGated ? piece.first + row : targets.pairs[row];
      *reinterpret_cast<uint4*>(static_cast<Element*>(with.out) + target * with.out_stride + feature) =
          staging.get(within, eight);
    }
  }
}

// Calls `work` with the number of rows, a multiple of S::kStep, as which a tile of `rows` rows is multiplied.
template <class S, int kMost, class Work>
__device__ void as_multiple(int rows, const Work& work) {
  if constexpr (kMost > S::kStep) {
    if (rows <= kMost - S::kStep) return as_multiple<S, kMost - S::kStep>(rows, work);
  }
  work(std::integral_constant<int, kMost>{});
}

template <class S>
__device__ void multiply(const Arguments& with, Slots<S> ring, Staging<S> staging, const Targets& targets, int thread) {
  constexpr int kEach = (S::kRows + kTeam - 1) / kTeam;  // targets of a thread
  const int lane = thread % 32, warp = thread % kTeam / 32, team = thread / kTeam, number = thread % kTeam;
  for (Piece<S> next(with); next.exists(with);) {
    const Piece<S> piece = next;
    next.advance(with);
    Own own;
    own.first = piece.column * S::kWide + team * S::kOwn;
    own.feature = own.first + warp * (S::kOwn / 4) + lane / 4;
    int pairs[kEach];
    float shares[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = number + i * kTeam;
      pairs[i] = 0, shares[i] = 0.f;
      if (!S::kGated && row < piece.rows) pairs[i] = with.pairs[piece.first + row], shares[i] = with.shares[pairs[i]];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int feature = own.feature + (S::kGated ? 0 : i * 8), line = own.feature + i * (S::kGated ? with.size_out : 8);
      own.bias[i] = 0.f;
      if (with.bias != nullptr && feature < with.size_out) {
        own.bias[i] = with.bias[static_cast<int64_t>(piece.expert) * with.lines + line];
      }
    }
    as_multiple<S, S::kRows>(same_in_warp(piece.rows), [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      float sums[kRows / 2];
      sum_up<S, kRows>(sums, ring, with.parts, thread);
      if constexpr (!S::kGated) {
        team_meets(thread);  // all have used the targets of the piece before
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int row = number + i * kTeam;
          if (row < S::kRows) targets.pairs[row] = pairs[i], targets.shares[row] = shares[i];
        }
        team_meets(thread);
        if constexpr (S::kRows <= 64) {
          if (with.in_float) return put_floats<S, kRows>(with, piece, sums, own, targets, lane % 4);
        }
      }
      put_elements<S, kRows>(with, piece, sums, own, targets, staging, thread);
    });
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) expert_dense(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[S::kSlots], emptied[S::kSlots];
  const Slots<S> ring{slots, filled, emptied};
  if (threadIdx.x == 0) {
    ring.set_up(S::kCluster * kTeams * 4, S::kGathers ? kGatherers + 1 : 1);
    barriers_are_set_up();
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) cluster_begins();
  uint8_t* staged = slots + S::kSlots * S::kSlotBytes;
  uint8_t* rest = staged + kTeams * 2 * S::kStagedBytes;  // targets of downs, or tokens
  if (threadIdx.x < kTeam) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (same_in_warp(threadIdx.x / 32) == 0) {
      if (is_elected()) stream<S>(with, ring);
    } else if constexpr (S::kGathers) {
      gather<S>(with, ring, reinterpret_cast<int*>(rest), threadIdx.x - 32);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_last_kernel();
    let_next_kernel_start();  // which may then read what kernels before this one have left
    const int thread = threadIdx.x - kTeam, team = thread / kTeam;
    int* pairs = reinterpret_cast<int*>(rest) + team * S::kRows;
    const Targets targets{pairs, reinterpret_cast<float*>(pairs + kTeams * S::kRows)};
    multiply<S>(with, ring, Staging<S>{staged + team * 2 * S::kStagedBytes, thread % kTeam}, targets, thread);
  }
  if constexpr (S::kCluster > 1) {
    __syncthreads();
    cluster_ends();
  }
}

// --- what Python calls

// The map of the weights of all experts, `pitch` elements apart.
template <class S>
CUtensorMap experts_of(const TensorView& weight, int64_t pitch, uint64_t experts) {
  const uint64_t columns = weight.size(1), lines = weight.size(0), line = columns * sizeof(Element);
  const uint64_t apart = experts > 1 ? pitch * sizeof(Element) : lines * line;
  if constexpr (S::kGated) {
    return map_of<5>(weight, {columns, 8, 2, lines / 16, experts}, {line, lines / 2 * line, 8 * line, apart},
                     {kLine, 8, 2, kTileLines / 16, 1});
  } else {
    return map_of<3>(weight, {columns, lines, experts}, {line, apart}, {kLine, kTileLines, 1});
  }
}

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, int64_t pitch, uint64_t experts,
            int64_t most_tiles, bool pdl) {
  with.weight = experts_of<S>(weight, pitch, experts);
  if constexpr (!S::kGathers) with.x = lines_of(x, S::kStep);
  with.columns = (with.size_out + S::kWide * S::kCluster - 1) / (S::kWide * S::kCluster);
  ClusterLaunch<expert_dense<S>, S::kCluster> launch(x, kThreads, S::kBytes);
  const int64_t most = most_tiles * with.columns;
  launch.run(with, static_cast<int>(most < launch.most ? most : launch.most), pdl);
}

// `weight`: the first expert's, [lines, size_in], contiguous; `activation`: of gates, or -1 for downs; `rows`: most of a
// tile, 16, 32 or 64, or a multiple of 32 up to 256; `top_k`: the pairs of a token, if `x` has a row for each token instead
// of each place, or 0; `bias`: of lines, or empty; `early`: whether weights may be fetched before the kernel before has
// ended, which must have waited for all that made the lists before it let this one begin.
void run_expert_dense(TensorView x, TensorView weight, int64_t pitch, int64_t experts, TensorView bias, TensorView tiles,
                      TensorView ends, TensorView pairs, TensorView shares, TensorView out, int64_t rows, int64_t top_k,
                      int64_t activation, bool early, bool pdl) {
  const bool gated = activation >= 0, gathers = top_k > 0;
  Arguments with{};
  with.size_out = static_cast<int>(out.size(1));
  with.lines = static_cast<int>(weight.size(0));
  with.parts = static_cast<int>(x.size(1) / kLine);
  with.activation = static_cast<int>(activation);
  with.tokens = static_cast<const Element*>(x.data_ptr());
  with.token_stride = x.stride(0);
  with.top_k = static_cast<int>(top_k);
  with.bias = bias.numel() > 0 ? static_cast<const float*>(bias.data_ptr()) : nullptr;
  with.tiles = static_cast<const int*>(tiles.data_ptr());
  with.ends = static_cast<const int*>(ends.data_ptr());
  with.pairs = static_cast<const int*>(pairs.data_ptr());
  with.shares = static_cast<const float*>(shares.data_ptr());
  with.out = out.data_ptr();
  with.out_stride = out.stride(0);
  with.in_float = !holds_elements(out);
  with.early = early && pdl;
  require(x.size(1) % kLine == 0 && with.size_out % 8 == 0, "sizes that are not whole lines");
  require(weight.size(1) == x.size(1) && lies(weight, 1, 1) && lies(weight, 0, x.size(1)), "another number of inputs");
  require(with.lines == (gated ? 2 : 1) * with.size_out, "another number of outputs");
  require(holds_elements(out) || (out.dtype().bits == 32 && !gated && rows <= 64), "outputs of another dtype");
  require(lies(out, 1, 1) && out.size(0) == pairs.numel() && out.stride(0) % 8 == 0, "outputs of another shape");
  const auto run = [&](auto tiling) {
    launch<decltype(tiling)>(with, x, weight, pitch, static_cast<uint64_t>(experts), tiles.size(0), pdl);
  };
  require(rows == 16 || (rows % 32 == 0 && rows > 0 && rows <= 256), "no such tiles");
  require(holds_elements(x) && lies(x, 1, 1) && x.stride(0) % 8 == 0, "inputs that are not bf16, or not in whole lines");
  const auto run_rows = [&](auto gates, auto gathered) {
    constexpr bool kGated = decltype(gates)::value, kGathers = decltype(gathered)::value;
    if (rows == 16) return run(Tiling<16, kGated, kGathers>{});
    if (rows == 32) return run(Tiling<32, kGated, kGathers>{});
    if (rows == 64) return run(Tiling<64, kGated, kGathers>{});
    if constexpr (!kGathers) run(Tiling<256, kGated, kGathers>{});
  };
  require(!gathers || (gated && rows <= 64), "rows of tokens for downs, or for large tiles");
  if (gathers) return run_rows(std::true_type{}, std::true_type{});
  if (gated) return run_rows(std::true_type{}, std::false_type{});
  run_rows(std::false_type{}, std::false_type{});
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_expert_dense);
