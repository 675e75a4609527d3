// Products of the weights of experts, in codes, with the rows that chose each of them (sm_90).
//
// Owns one launch. Never chooses experts: lists made on the device say which expert a tile of rows has. Compiled for the
// macros of codes.cuh.
//
// Lines of a weight are the first operand of wgmma and come from registers, where codes become bf16 once for all rows of a
// tile. Blocks stay, and take one piece of work after another: 256 lines of an expert's weight, and up to 64 rows. One warp
// keeps a ring filled through all of a block's pieces; four warpgroups multiply 64 lines each. A row's sums are in the order
// of the inner dimension, whatever the other rows of its tile are.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#define SOURCE "expert_rows"
#include "codes.cuh"
#include "experts.cuh"

namespace {

constexpr int kTeams = 4;                         // warpgroups that multiply
constexpr int kThreads = kTeam * (kTeams + 1);
constexpr int kWidth = 128;                       // bytes of a line of codes that are fetched at once
constexpr int kParts = kAcross;                   // of 64 columns, in these bytes
constexpr int kShared = 223 * 1024;               // bytes of a block, but for what is declared below
constexpr int kTileLines = kTeams * kBlock;
constexpr int kNumberLines = 128;                 // whose numbers of 2 bytes the copy engine fetches at once

template <int kRowsOf, bool kGatedOf>
struct Tiling {
  static constexpr bool kGated = kGatedOf;
  static constexpr int kRows = kRowsOf;
  static constexpr int kBlocks = kTeams, kTeamBlocks = 1;  // of 64 lines: of a tile, and of a warpgroup
  static constexpr int kSums = kRows / 2;                  // of a thread
  static constexpr int kWide = kTileLines / (kGated ? 2 : 1);  // features of a tile
  static constexpr int kColumns = kParts * kLine;
  static constexpr int kGroups = kGroup == 0 ? 0 : kGroup < kColumns ? kColumns / kGroup : 1;  // that a chunk meets
  static constexpr int kCodeBytes = kTileLines * kWidth;
  static constexpr int kInputBytes = kRows * 128;  // of 64 columns
  static constexpr int kScalesAt = kCodeBytes + kParts * kInputBytes;  // in a slot: codes, inputs, scales, zero points
  static constexpr int kScaleBytesOf = kGroups * (kTileLines / kScaleLines) * kScaleBytes;
  static constexpr int kZeroBytes = kZeros ? kGroups * kTileLines : 0;
  static constexpr int kFetchedBytes = kScalesAt + kScaleBytesOf + kZeroBytes;
  static constexpr int kSlotBytes = (kFetchedBytes + 1023) / 1024 * 1024;
  static constexpr int kSlots = kShared / kSlotBytes;
  static constexpr int kBytes = kSlots * kSlotBytes;
  static_assert(kSlots > 1, "a slot is free only once the next one is multiplied");

  static __device__ int first_block(int thread) { return thread / kTeam; }
};

template <class S>
using Slots = Ring<S::kSlots, S::kSlotBytes>;

struct Arguments {
  CUtensorMap weight;  // bytes: [experts, lines, size_in]; of gates and ups [experts, F / 8, (gate, up), 8, size_in]
  CUtensorMap x;       // [size_in / 64, rows, 64]
  CUtensorMap scales, zeros;  // bytes of numbers of groups: [experts, groups, halves, lines]
  const float* line_scales;   // [experts, lines], line_scale_pitch apart
  int64_t line_scale_pitch;
  const float* bias;  // [experts, lines], or null
  const int* tiles;   // [tiles, 3]: expert, first place, how many places
  const int* ends;    // the number of tiles
  const int* pairs;   // [places]: which row of the outputs a place has, of downs
  const float* shares;  // [pairs]: what results of downs are multiplied by
  void* out;            // [places or pairs, size_out]
  int64_t out_stride;
  bool half, in_float;  // 16-bit scales are float16; outputs are float32
  int size_out, lines, columns, parts, activation;
};

// A piece of a block's work. What the list says of the next one is read while this one is worked on.
struct Piece {
  int index, count, expert, first, rows, column;

  __device__ explicit Piece(const Arguments& with) : index(blockIdx.x), count(with.ends[0] * with.columns) { find(with); }

  __device__ bool exists() const { return index < count; }

  __device__ void advance(const Arguments& with) {
    index += gridDim.x;
    find(with);
  }

  __device__ void find(const Arguments& with) {
    if (!exists()) return;
    const int* tile = with.tiles + index / with.columns * 3;
    expert = tile[0], first = tile[1], rows = tile[2], column = index % with.columns;
  }
};

// --- the warp that streams

__device__ void fetch_box_of_four(void* target, const CUtensorMap* map, int inner, int middle, int outer, int expert,
                                  uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(expert), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

template <class S>
__device__ void fetch_numbers(uint8_t* target, const CUtensorMap* map, int bytes, const Piece& piece, int chunk,
                              uint64_t* filled) {
  // Numbers of two bytes of all of a tile's lines are more than a copy takes: they are fetched as halves.
  const bool in_halves = !S::kGated && bytes == 2;
  fetch_box_of_four(target, map, in_halves ? 0 : piece.column * S::kWide * bytes / (bytes == 4 ? kScaleLines : 1),
                    in_halves ? piece.column * (kTileLines / kNumberLines) : 0,
                    chunk * S::kColumns / (kGroup > 0 ? kGroup : 1), piece.expert, filled, kReadOften);
}

template <class S>
__device__ void fetch(const Arguments& with, uint8_t* slot, const Piece& piece, int chunk, uint64_t* filled) {
  barrier_expect(filled, S::kFetchedBytes);
  if constexpr (S::kGated) {
    fetch_gated(slot, &with.weight, chunk * kWidth, piece.column * (S::kWide / 8), piece.expert, filled, kReadOnce);
  } else {
    fetch_box(slot, &with.weight, chunk * kWidth, piece.column * S::kWide, piece.expert, filled, kReadOnce);
  }
  fetch_box(slot + S::kCodeBytes, &with.x, 0, piece.first, chunk * kParts, filled, kReadOften);
  if constexpr (kGroup > 0) {
    fetch_numbers<S>(slot + S::kScalesAt, &with.scales, kScaleBytes, piece, chunk, filled);
    if constexpr (kZeros) fetch_numbers<S>(slot + S::kScalesAt + S::kScaleBytesOf, &with.zeros, 1, piece, chunk, filled);
  }
}

template <class S>
__device__ void stream(const Arguments& with, Slots<S> ring) {
  const int chunks = (with.parts + kParts - 1) / kParts;
  Piece next(with);
  while (next.exists()) {
    const Piece piece = next;
    next.advance(with);
    for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
      ring.wait_emptied();
      fetch<S>(with, ring.slot(), piece, chunk, ring.filled + ring.at);
    }
  }
}

// --- products

// sum += a b^T over 16 inner elements.
__device__ void multiply_add(float (&sum)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" NUMBERS_8 "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
               : EIGHT(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void multiply_add(float (&sum)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NUMBERS_16 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : SIXTEEN(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void multiply_add(float (&sum)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : SIXTEEN(0), SIXTEEN(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Makes what a warpgroup multiplies of a part of a slot: its 64 lines and 64 columns, scaled where groups have scales.
// `lines`: the address of 16 bytes of a lane's line, where the copy's swizzle puts the first or the second of them.
template <class S>
__device__ void make_operand(Fragments& to, const uint8_t* slot, uint32_t lines, int part, bool half, int thread,
                             uint32_t magic) {
  constexpr int kEach = kFourBits ? 2 : 4;  // 16 bytes of 64 columns
  const int block = thread / kTeam;
  uint32_t zeros[kZeroGroups][2];
  find_zeros<S>(zeros, slot + S::kScalesAt + S::kScaleBytesOf, part, block, thread);
  read_fragments(to, [&](int number) { return lines ^ ((part * kEach + (number & ~1)) << 4); }, thread % 32, zeros, magic);
  scale_fragments<S>(to, slot + S::kScalesAt, half, part, block, thread);
}

// The sums of all columns of a piece's lines and rows.
template <class S>
__device__ void sum_up(float (&sums)[S::kSums], Slots<S>& ring, const Arguments& with, int thread) {
  const uint32_t magic = hidden_magic();
  const int lane = thread % 32, line = thread / 32 * 16 + lane % 16;
  const uint32_t own_lines = line * kWidth + ((lane / 16 ^ (lane & 7)) << 4);
  const bool never = with.parts < 0;
  Fragments fragments[2];
#pragma unroll
  for (float& sum : sums) sum = 0.f;
  for (int left = with.parts; left > 0; left -= kParts) {
    ring.wait_filled();
    const uint32_t slot = same_in_warp(shared_address(ring.slot()));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part > 0 && part >= left) break;
      Fragments& own = fragments[part % 2];
      if (part > 1) {
        multiply_wait<1>();
        still_needed(own, never);
      }
      make_operand<S>(own, ring.slot(), slot + own_lines, part, with.half, thread, magic);
      const uint64_t x = lines_at(slot + S::kCodeBytes) + part * (S::kInputBytes / 16);
      multiply_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_add(sums, own.steps[step], x + step * 2);
      multiply_commit();
    }
    multiply_wait<0>();  // other warpgroups multiply meanwhile
    still_needed(fragments[0], never);
    still_needed(fragments[1], never);
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.emptied + ring.at);
    ring.advance();
  }
  sums_ready(sums);
}

// --- what becomes of a piece

__device__ void put(const Arguments& with, int64_t row, int feature, float result) {
  const int64_t at = row * with.out_stride + feature;
  if (with.in_float) {
    static_cast<float*>(with.out)[at] = result;
  } else {
    static_cast<Element*>(with.out)[at] = static_cast<Element>(result);
  }
}

// Where results of downs go, and what they are multiplied by.
template <class S>
struct Targets {
  int pairs[kTeams][S::kRows];
  float shares[kTeams][S::kRows];
};

template <class S>
__device__ void multiply(const Arguments& with, Slots<S> ring, Targets<S>& targets, int thread) {
  const int g = thread % 32 / 4, c = thread % 4, warp = thread % kTeam / 32, team = thread / kTeam, own = thread % kTeam;
  Piece next(with);
  while (next.exists()) {
    const Piece piece = next;
    next.advance(with);
    const int feature = piece.column * S::kWide + (S::kGated ? team * 32 + warp * 8 : team * 64 + warp * 16) + g;
    int pair = 0;
    float share = 0.f, bias[2] = {0.f, 0.f};
    if (!S::kGated && own < piece.rows) pair = with.pairs[piece.first + own], share = with.shares[pair];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = S::kGated ? feature + i * with.size_out : feature + i * 8;
      if (with.bias != nullptr && (S::kGated ? feature : line) < with.size_out) {
        bias[i] = with.bias[static_cast<int64_t>(piece.expert) * with.lines + line];
      }
    }
    Scales of_lines{};
    of_lines.of_lines = with.line_scales + piece.expert * with.line_scale_pitch;
    const LineScales<S> scales(of_lines, with.size_out, piece.column, thread);
    float sums[1][S::kSums];
    sum_up<S>(sums[0], ring, with, thread);
    scales.multiply(sums);
    if constexpr (!S::kGated) {
      team_meets(thread);  // all have used the targets of the piece before
      if (own < S::kRows) targets.pairs[team][own] = pair, targets.shares[team][own] = share;
      team_meets(thread);
    }
#pragma unroll
    for (int eight = 0; eight < S::kRows / 8; ++eight) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = eight * 8 + 2 * c + i;
        const float first = __fadd_rn(sums[0][eight * 4 + i], bias[0]), second = __fadd_rn(sums[0][eight * 4 + 2 + i], bias[1]);
        if (row >= piece.rows) continue;
        if constexpr (S::kGated) {
          if (feature < with.size_out) put(with, piece.first + row, feature, activated(first, second, with.activation));
        } else {
          const float factor = targets.shares[team][row];
          const int target = targets.pairs[team][row];
          if (feature < with.size_out) put(with, target, feature, __fmul_rn(first, factor));
          if (feature + 8 < with.size_out) put(with, target, feature + 8, __fmul_rn(second, factor));
        }
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) expert_rows(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[S::kSlots], emptied[S::kSlots];
  __shared__ Targets<S> targets;
  const Slots<S> ring{slots, filled, emptied};
  if (threadIdx.x == 0) {
    ring.set_up(kTeams * 4);
    barriers_are_set_up();
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_last_kernel();
  if (threadIdx.x < kTeam) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (same_in_warp(threadIdx.x / 32) == 0 && is_elected()) stream<S>(with, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    multiply<S>(with, ring, targets, threadIdx.x - kTeam);
  }
}

// --- what Python calls

// The map of the codes of all experts, `pitch` bytes apart.
template <class S>
CUtensorMap codes_of(const TensorView& weight, int64_t pitch, uint64_t experts) {
  const uint64_t bytes = weight.size(1), lines = weight.size(0), line = weight.stride(0);
  require(weight.dtype().bits == 8 && lies(weight, 1, 1), "codes that are not bytes");
  const uint64_t apart = experts > 1 ? pitch : lines * line;
  if constexpr (S::kGated) {
    return map_of<5>(weight, {bytes, 8, 2, lines / 16, experts}, {line, lines / 2 * line, 8 * line, apart},
                     {kWidth, 8, 2, kTileLines / 16, 1}, true);
  } else {
    return map_of<3>(weight, {bytes, lines, experts}, {line, apart}, {kWidth, kTileLines, 1}, true);
  }
}

// The map of numbers of groups of all experts, `pitch` numbers apart, each of `kEach` bytes for `kShare` lines.
template <class S, int kEach, int kShare>
CUtensorMap numbers_of(const TensorView& numbers, uint64_t lines, int64_t pitch, uint64_t experts) {
  constexpr bool kInHalves = !S::kGated && kEach == 2;
  constexpr uint32_t kHalves = S::kGated || kInHalves ? 2 : 1;
  constexpr uint32_t kBytes = kPartBytes<S, kEach, kShare> / (kInHalves ? 2 : 1);
  const uint64_t row = numbers.size(1) * kEach, groups = numbers.size(0), apart = experts > 1 ? pitch * kEach : groups * row;
  const uint64_t inner = S::kGated ? lines / 2 / kShare * kEach : kInHalves ? kBytes : row;
  const uint64_t halves = kInHalves ? numbers.size(1) / kNumberLines : kHalves;
  return map_of<4>(numbers, {inner, halves, groups, experts}, {inner, row, apart}, {kBytes, kHalves, S::kGroups, 1}, true,
                   CU_TENSOR_MAP_SWIZZLE_NONE);
}

// All experts' weights: the first of them, and how many bytes and numbers are from one to the next.
struct Weights {
  TensorView codes, scales, zeros;
  int64_t code_pitch, scale_pitch, zero_pitch;
  uint64_t experts;
};

template <class S>
void launch(Arguments& with, const TensorView& x, const Weights& weights, int64_t most_tiles, bool pdl) {
  const TensorView &scales = weights.scales, &zeros = weights.zeros;
  with.weight = codes_of<S>(weights.codes, weights.code_pitch, weights.experts);
  with.x = inputs_of(x, S::kRows, kParts);
  if constexpr (kGroup == 0) {
    require(scales.numel() == with.lines && scales.dtype().bits == 32, "scales of another number of lines");
    with.line_scales = static_cast<const float*>(scales.data_ptr());
    with.line_scale_pitch = weights.scale_pitch;
  } else {
    require(scales.ndim() == 2 && scales.size(0) * kGroup >= x.size(1), "scales of too few groups");
    require(scales.size(1) * kScaleLines >= with.lines, "scales of too few lines");
    require(scales.dtype().bits == kScaleBytes * 8, "scales of another dtype");
    with.scales = numbers_of<S, kScaleBytes, kScaleLines>(scales, with.lines, weights.scale_pitch, weights.experts);
    with.half = scales.dtype().code == kDLFloat && scales.dtype().bits == 16;
  }
  if constexpr (kZeros) {
    require(zeros.ndim() == 2 && zeros.size(0) == scales.size(0) && zeros.size(1) == scales.size(1), "other zero points");
    with.zeros = numbers_of<S, 1, 1>(zeros, with.lines, weights.zero_pitch, weights.experts);
  }
  with.columns = (with.size_out + S::kWide - 1) / S::kWide;
  ClusterLaunch<expert_rows<S>, 1> launch(x, kThreads, S::kBytes);
  const int64_t most = most_tiles * with.columns;
  launch.run(with, static_cast<int>(most < launch.most ? most : launch.most), pdl);
}

// `activation`: of gates, or -1 for downs; `rows`: of a tile; `bias`: of lines, or empty.
void run_expert_rows(TensorView x, TensorView codes, TensorView scales, TensorView zeros, int64_t code_pitch,
                     int64_t scale_pitch, int64_t zero_pitch, int64_t experts, TensorView bias, TensorView tiles,
                     TensorView ends, TensorView pairs, TensorView shares, TensorView out, int64_t rows, int64_t activation,
                     bool pdl) {
  const bool gated = activation >= 0;
  Arguments with{};
  with.size_out = static_cast<int>(out.size(1));
  with.lines = static_cast<int>(codes.size(0));
  with.parts = static_cast<int>(x.size(1) / kLine);
  with.activation = static_cast<int>(activation);
  with.bias = bias.numel() > 0 ? static_cast<const float*>(bias.data_ptr()) : nullptr;
  with.tiles = static_cast<const int*>(tiles.data_ptr());
  with.ends = static_cast<const int*>(ends.data_ptr());
  with.pairs = static_cast<const int*>(pairs.data_ptr());
  with.shares = static_cast<const float*>(shares.data_ptr());
  with.out = out.data_ptr();
  with.out_stride = out.stride(0);
  with.in_float = !holds_elements(out);
  require(x.size(1) % kLine == 0 && with.size_out % (gated ? 32 : 8) == 0, "sizes that are not whole lines");
  require(with.lines == (gated ? 2 : 1) * with.size_out, "another number of outputs");
  require(codes.size(1) == x.size(1) * kWidth / (kParts * kLine), "another number of inputs");
  require(holds_elements(out) || out.dtype().bits == 32, "outputs of another dtype");
  require(lies(out, 1, 1) && out.size(0) == pairs.numel(), "outputs of another shape");
  const Weights weights{codes, scales, zeros, code_pitch, scale_pitch, zero_pitch, static_cast<uint64_t>(experts)};
  const auto run = [&](auto tiling) { launch<decltype(tiling)>(with, x, weights, tiles.size(0), pdl); };
  require(rows == 16 || rows == 32 || rows == 64, "no such tiles");
  if (gated) {
    if (rows == 16) run(Tiling<16, true>{});
    if (rows == 32) run(Tiling<32, true>{});
    if (rows == 64) run(Tiling<64, true>{});
  } else {
    if (rows == 16) run(Tiling<16, false>{});
    if (rows == 32) run(Tiling<32, false>{});
    if (rows == 64) run(Tiling<64, false>{});
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_expert_rows);
