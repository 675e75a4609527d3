// Products of more rows than few_rows.cuh takes with weights in codes (sm_90).
//
// Owns one launch; many_rows.cuh divides the work. Never chooses where it pays. Compiled for the macros of codes.cuh.
//
// Lines of the weight are the first operand of wgmma and come from registers: codes become bf16 once for all rows of a
// tile, while the products of the other warpgroup run. A tile is 128 lines of the weight and 128, 192 or 256 rows. Two
// blocks of a cluster compute tiles side by side; each fetches its own codes, and half of the rows for both. In a block one
// warp keeps a ring filled, through all of the block's tiles, and two warpgroups multiply 64 lines each.
//
// Letters in comments: g = lane / 4 and c = lane % 4, the coordinates of a lane in sums of wgmma.

#define SOURCE "many_rows"
#include "many_rows.cuh"

namespace {

template <class S>
using Slots = Ring<S::kSlots, S::kSlotBytes>;

// --- the warp that streams

// Eight lines of gates, eight of ups, and so on.
__device__ void fetch_gated(void* target, const CUtensorMap* map, int inner, int feature, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(
          shared_address(target)),
      "l"(map), "r"(inner), "r"(0), "r"(feature / 8), "r"(shared_address(barrier))
      : "memory");
}

template <class S>
__device__ void fetch_codes(const Arguments& with, uint8_t* slot, const Walk<S>& at, uint64_t* filled) {
  const int column = Place<S>(with, at.part.tile).column, inner = at.part.from * kWidth;
  barrier_expect(filled, S::kFetchedBytes);
  if constexpr (S::kGated) {
    fetch_gated(slot + S::kInputBytes, &with.weight, inner, column * S::kWide, filled);
  } else {
    fetch_lines(slot + S::kInputBytes, &with.weight, inner, column * S::kWide, filled);
  }
  if constexpr (kGroup > 0) {
    const int group = at.part.from * 4 / kGroupSteps;
    uint8_t* target = slot + S::kScalesAt;
    fetch_box(target, &with.scales.of_groups, column * kPartBytes<S, kScaleBytes, kScaleLines>, 0, group, filled, kReadOften);
    if constexpr (kZeros) {
      fetch_box(target + S::kScaleBytesOf, &with.scales.zeros, column * kPartBytes<S, 1, 1>, 0, group, filled, kReadOften);
    }
  }
}

template <class S>
__device__ void fetch_inputs(const Arguments& with, uint8_t* slot, const Walk<S>& at, uint64_t* filled) {
  const int rank = blockIdx.x % kCluster, row = Place<S>(with, at.part.tile).row + rank * (S::kRows / kCluster);
  fetch_for_all(slot + rank * (S::kInputBytes / kCluster), &with.x, at.part.from * kLine, row, filled, kCluster);
}

// Weights depend on no kernel before this one: the ring fills with them while that one runs.
template <class S>
__device__ void stream(const Arguments& with, Slots<S> ring) {
  Walk<S> codes(with), inputs(with);
  int early = 0;
  for (; early < S::kSlots && codes.more; ++early, codes.advance(with)) {
    fetch_codes(with, ring.slots + early * S::kSlotBytes, codes, ring.filled + early);
  }
  wait_for_last_kernel();
  for (int i = 0; i < early; ++i, inputs.advance(with)) {
    fetch_inputs(with, ring.slots + i * S::kSlotBytes, inputs, ring.filled + i);
  }
  for (; codes.more; codes.advance(with), ring.advance()) {
    uint64_t* filled = ring.filled + ring.at;
    barrier_wait_cluster(ring.emptied + ring.at, ring.turn & 1);
    fetch_codes(with, ring.slot(), codes, filled);
    fetch_inputs(with, ring.slot(), codes, filled);
  }
}

// --- products

// sum = a b^T over 16 inner elements, which is added to what it was if `adds`.
__device__ void multiply_add(float (&sum)[64], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
               "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}"
               : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ void multiply_add(float (&sum)[96], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %101, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NUMBERS_64 ", " NUMBERS_96
               "}, {%96, %97, %98, %99}, %100, adds, 1, 1, 0;\n}"
               : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ void multiply_add(float (&sum)[128], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %133, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NUMBERS_64 ", " NUMBERS_96 ", " NUMBERS_128
               "}, {%128, %129, %130, %131}, %132, adds, 1, 1, 0;\n}"
               : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// Makes what a warpgroup multiplies of a slot: its 64 lines and 64 columns, scaled where groups have scales.
template <class S>
__device__ void make_operand(Fragments& to, const uint8_t* slot, bool half, int thread, uint32_t magic) {
  const int lane = thread % 32, line = thread / 32 * 16 + lane % 16;
  const uint32_t own = shared_address(slot) + S::kInputBytes + line * kWidth;
  const int turn = kWidth == 32 ? lane / 4 & 1 : lane / 2 & 3;  // what the copy's swizzle does with this line
  uint32_t zeros[kZeroGroups][2];
  find_zeros<S>(zeros, slot + S::kScalesAt + S::kScaleBytesOf, 0, thread / kTeam, thread);
  read_fragments(to, [&](int number) { return own + ((number ^ turn) << 4); }, lane, zeros, magic);
  scale_fragments<S>(to, slot + S::kScalesAt, half, 0, thread / kTeam, thread);
}

// The sums of the next `count` chunks.
template <class S>
__device__ void sum_up(float (&sums)[S::kSums], Slots<S>& ring, int count, bool half, int thread) {
  const uint32_t magic = hidden_magic();
  Fragments own;
  ring.wait_filled();
  make_operand<S>(own, ring.slot(), half, thread, magic);
  for (int i = 0;;) {
    const uint64_t x = lines_at(same_in_warp(shared_address(ring.slot())));
    multiply_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_add(sums, own.steps[step], x + step * 2, i + step);
    multiply_commit();
    uint64_t* emptied = ring.emptied + ring.at;
    ring.advance();
    Fragments next;
    const bool more = ++i < count;
    if (more) {
      ring.wait_filled();
      make_operand<S>(next, ring.slot(), half, thread, magic);
    }
    multiply_wait<0>();  // the other warpgroup multiplies meanwhile
    still_needed(own, count < 0);
    leave_everywhere(emptied, kCluster, thread % 32);
    if (!more) break;
    own = next;
  }
  sums_ready(sums);
}

// --- what becomes of a tile

__device__ float silu_mul(float gate, float up) { return __fdividef(gate * up, 1.f + __expf(-gate)); }

__device__ uint32_t rounded(float first, float second) {
  Pair pair;
  pair.values[0] = static_cast<Element>(first), pair.values[1] = static_cast<Element>(second);
  return pair.bits;
}

// Stores four matrices of 8 features and 8 rows with features side by side.
__device__ void put_turned(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// Writes a warpgroup's features of a tile; `staged` is its own.
template <class S>
__device__ void finish(const Arguments& with, const float (&sums)[S::kSums], uint8_t* staged, const Place<S>& place, int thread) {
  const int lane = thread % 32, warp = thread % kTeam / 32, matrix = lane / 8;
  // A warp has 16 lines, g and 8 further: two matrices for 8 rows; of gates and ups these make one.
  const int row = (S::kGated ? matrix : matrix / 2) * 8 + lane % 8, own = S::kGated ? warp * 8 : warp * 16 + matrix % 2 * 8;
  const uint32_t target = shared_address(staged) + row * S::kPitch + own * 2;
  const int first = place.column * S::kWide + thread / kTeam * S::kOwn;
  constexpr int kEights = S::kGated ? 4 : 2;  // of rows in four matrices
  constexpr int kPieces = S::kOwn / 8;        // 16 bytes of a row
#pragma unroll
  for (int turn = 0; turn < S::kRows / kStagedRows; ++turn) {
    if (turn > 0) team_meets(thread);
#pragma unroll
    for (int eight = 0; eight < kStagedRows / 8; eight += kEights) {
      const float* now = sums + (turn * (kStagedRows / 8) + eight) * 4;
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* four = now + i * 4;
        matrices[i] = S::kGated ? rounded(silu_mul(four[0], four[2]), silu_mul(four[1], four[3]))
                                : rounded(now[i * 2], now[i * 2 + 1]);
      }
      put_turned(target + eight * 8 * S::kPitch, matrices);
    }
    team_meets(thread);
#pragma unroll
    for (int i = 0; i < kStagedRows * kPieces / kTeam; ++i) {
      const int piece = thread % kTeam + i * kTeam, line = piece / kPieces, feature = first + piece % kPieces * 8;
      const int out_row = place.row + turn * kStagedRows + line;
      if (out_row < with.rows && feature < with.size_out) {
        *reinterpret_cast<uint4*>(with.out + out_row * with.out_stride + feature) =
            *reinterpret_cast<const uint4*>(staged + line * S::kPitch + piece % kPieces * 16);
      }
    }
  }
  team_meets(thread);
}

template <class S>
__device__ void multiply(const Arguments& with, Slots<S> ring, uint8_t* staged, int thread) {
  float sums[1][S::kSums];
  Parts parts(with);
  Part part;
  wait_for_last_kernel();
  while (parts.next(with, part)) {
    const Place<S> place(with, part.tile);
    const LineScales<S> scales(with.scales, with.size_out, place.column, thread);
    sum_up<S>(sums[0], ring, part.count, with.scales.half, thread);
    if (part.from > 0) {
      hand_in<S>(with, sums[0], part.tile, thread);
      continue;
    }
    if (part.count < with.chunks) take_parts<S>(with, sums[0], part.tile, thread);
    scales.multiply(sums);
    finish<S>(with, sums[0], staged, place, thread);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) many_rows(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[S::kSlots], emptied[S::kSlots];
  const Slots<S> ring{slots, filled, emptied};
  if (threadIdx.x == 0) {
    ring.set_up(kCluster * kTeams * 4);
    barriers_are_set_up();
  }
  __syncthreads();
  cluster_begins();
  if (threadIdx.x < kTeam) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (same_in_warp(threadIdx.x / 32) == 0 && is_elected()) stream<S>(with, ring);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int thread = threadIdx.x - kTeam;
    multiply<S>(with, ring, slots + S::kSlots * S::kSlotBytes + thread / kTeam * S::kStagedBytes, thread);
  }
  let_next_kernel_start();
  __syncthreads();
  cluster_ends();
}

// --- what Python calls

template <class S>
CUtensorMap codes_of(const TensorView& weight) {
  constexpr uint32_t kWidthOf = kWidth;
  constexpr auto kSwizzle = kWidth == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B;
  const uint64_t bytes = weight.size(1), lines = weight.size(0), line = weight.stride(0);
  require(weight.dtype().bits == 8 && lies(weight, 1, 1), "codes that are not bytes");
  if constexpr (S::kGated) {
    return map_of<4>(weight, {bytes, 8, 2, lines / 16}, {line, lines / 2 * line, 8 * line},
                     {kWidthOf, 8, 2, kTileLines / 16}, true, kSwizzle);
  } else {
    return map_of<2>(weight, {bytes, lines}, {line}, {kWidthOf, kTileLines}, true, kSwizzle);
  }
}

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, const TensorView& scales,
            const TensorView& zeros, const TensorView& planes, const TensorView& counters, bool pdl) {
  with.weight = codes_of<S>(weight);
  with.x = lines_of(x, S::kRows / kCluster);
  with.scales = scales_of<S>(scales, zeros, weight.size(0), x.size(1));
  with.columns = (with.size_out + S::kWide * kCluster - 1) / (S::kWide * kCluster);
  with.tiles = (with.rows + S::kRows - 1) / S::kRows * with.columns;
  ClusterLaunch<many_rows<S>, kCluster> launch(x, kThreads, S::kBytes);
  const int64_t room = planes.numel() / (kCluster * kTileLines * S::kRows), marks = counters.numel() / (kCluster * kTeams);
  int64_t clusters = launch.most;
  for (int64_t most : {room, marks, static_cast<int64_t>(with.tiles) * with.chunks}) clusters = most < clusters ? most : clusters;
  require(clusters > 0, "the partial sums or the counters are too few");
  with.shared = with.tiles % static_cast<int>(clusters);
  with.sharers = min(static_cast<int>(clusters), max(with.shared * with.chunks / kFewest, 1));
  launch.run(with, static_cast<int>(clusters), pdl);
}

void run_many_rows(TensorView x, TensorView weight, TensorView scales, TensorView zeros, TensorView out, TensorView planes,
                   TensorView counters, bool gated, int64_t tile, bool pdl) {
  Arguments with{};
  with.rows = static_cast<int>(x.size(0));
  with.size_out = static_cast<int>(out.size(1));
  with.chunks = static_cast<int>(x.size(1) / kLine);
  with.out = static_cast<Element*>(out.data_ptr());
  with.out_stride = out.stride(0);
  with.planes = static_cast<float*>(planes.data_ptr());
  with.counters = static_cast<int*>(counters.data_ptr());
  require(x.size(1) % kLine == 0 && with.size_out % (gated ? 64 : 8) == 0, "sizes that are not whole lines");
  require(weight.size(0) == (gated ? 2 : 1) * out.size(1), "another number of outputs");
  require(weight.size(1) == static_cast<int64_t>(with.chunks) * kWidth, "another number of inputs");
  require(holds_elements(out) && out.size(0) == with.rows && lies(out, 1, 1), "outputs of another shape");
  require(with.rows < 2 || out.stride(0) % 8 == 0, "outputs between whose rows there is no multiple of 16 bytes");
  const auto run = [&](auto tiling) { launch<decltype(tiling)>(with, x, weight, scales, zeros, planes, counters, pdl); };
  require(tile == 128 || tile == 192 || tile == 256, "no such tiles");
  if (gated) {
    if (tile == 128) run(Tiling<128, true>{});
    if (tile == 192) run(Tiling<192, true>{});
    if (tile == 256) run(Tiling<256, true>{});
  } else {
    if (tile == 128) run(Tiling<128, false>{});
    if (tile == 192) run(Tiling<192, false>{});
    if (tile == 256) run(Tiling<256, false>{});
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_many_rows);
