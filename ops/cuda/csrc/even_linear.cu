// Products of up to 64 rows, as fast as their weights are read (sm_90).
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32 or 64), and RANKS (updates.cuh).
//
// The blocks of a cluster share the inner dimension of one tile after another (few_rows.cuh): a tile is 64 features, or 32
// gates and their ups. Clusters of one block take equal numbers of chunks instead of whole tiles: who has a tile's first
// chunk waits for the sums of the others, which are blocks of lower numbers, so that they run already or have run. Sums are
// added in the order of the inner dimension: results do not vary from run to run.

#define SOURCE "even_linear"
#include "updates.cuh"

namespace {

constexpr int kBytes[] = {208 * 1024, 190 * 1024};  // as much as 64 rows leave room for, in tiles of one or two blocks

enum Kind { kPlain = 0, kGated = 1, kAdd = 2 };  // kGated: silu(gate) * up

// The weight: [features, size_in]; kGated: [features / 8, (gate, up), 8, size_in].
struct Arguments : Inputs {
  Element* out;         // [rows, size_out], out_stride apart
  Element* residual;    // kAdd: [rows, size_out], read and written
  const Element* norm;  // kAdd: [size_out]
  float* squares_out;   // kAdd: [size_out / 64, rows]
  float* planes;        // [blocks, sums of a tile]: parts of tiles that blocks share
  int* counters;        // [tiles], zeros: parts handed in
  int size_out, kind;
  int64_t out_stride;
};

// Lines of a chunk. More inputs of codes of 4 bits have room in shared memory without updates, and for few rows; of 64 rows
// and one block, inputs leave room for a deeper ring of single lines.
constexpr int lines_of_chunk(int blocks) {
  if (!kCoded) return 2 / blocks;
  if (blocks == 1 && kRows == 64 && kGroup == 0) return 1;
  return (blocks == 2 && kCodes == kInt4 && kRows < 64 && RANKS == 0 ? 8 : 4) / kAcross;
}

// Two blocks: inputs, and A, are fetched for twice the weights, where there are tiles enough for all multiprocessors.
template <int kSplits, bool kGatedOf, int kBlocks = 1>
struct LinearShape : Shape<kSplits, kBlocks, lines_of_chunk(kBlocks), (kGatedOf ? 2 : 1) * RANKS, kBytes[kBlocks - 1]> {
  static constexpr bool kGated = kGatedOf;
  static constexpr int kWide = kBlocks * (kGated ? 32 : 64);  // features of a tile
  static constexpr int kItems = LinearShape::kOwn * (kWide / 8);  // of eight features of a row
  static constexpr int kTurns = (kItems + kMultipliers - 1) / kMultipliers;  // items of a thread
};

// --- the division

// Chunks of one tile after another, if nobody shares the inner dimension: higher blocks have earlier ones.
template <>
struct Cursor<1> {
  int begin, end, chunks, tile, chunk;

  __device__ explicit Cursor(const Inputs& with)
      : begin(begin_of(with, rank())), end(begin_of(with, rank() + 1)), chunks(with.chunks), tile(begin / chunks),
        chunk(begin % chunks) {}
  __device__ static int rank() { return gridDim.x - 1 - blockIdx.x; }
  __device__ static int begin_of(const Inputs& with, int rank) {
    return static_cast<int>(static_cast<int64_t>(with.tiles) * with.chunks * rank / gridDim.x);
  }
  __device__ int count(const Inputs&) const { return end - begin; }
  __device__ int once(const Inputs&) const { return chunks; }
  __device__ Finished finished(const Inputs&) const {
    return {(begin + chunks - 1) / chunks, 1, (end + chunks - 1) / chunks};
  }
  __device__ void advance() {
    if (++chunk == chunks) chunk = 0, ++tile;
  }
};

// --- the warp that streams

// Eight lines of gates, eight of ups, and so on.
__device__ void fetch_gated(void* target, const CUtensorMap* map, int inner, int feature, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(0), "r"(feature / 8), "r"(shared_address(barrier)), "l"(kReadOnce)
      : "memory");
}

template <class S>
__device__ void fetch_weights(const Arguments& with, uint8_t* slot, int tile, int chunk, uint64_t* filled) {
  fetch_scales<S>(with.scales, slot, tile, chunk, filled);
#pragma unroll
  for (int line = 0; line < S::kLines; ++line) {
    const int inner = (chunk * S::kLines + line) * kLineUnits;
    if constexpr (S::kGated) {
      fetch_gated(slot + line * S::kBlocks * kBlockBytes, &with.weight, inner, tile * S::kWide, filled);
    } else {
      fetch_lines(slot + line * S::kBlocks * kBlockBytes, &with.weight, inner, tile * S::kWide, filled, kReadOnce);
    }
  }
}

// --- updates

// Those of all tiles are the same.
template <class S>
__device__ Low find_low(const Inputs& with) {
  if (!kUpdates) return {};
  const int4 last = __ldg(with.adapter.modules + S::kGated);
  return {S::kGated ? __ldg(&with.adapter.modules->x) : last.x, last.w + last.z};
}

// Begins to fetch B of a tile: of gates and ups by turns, or of one module.
template <class S>
__device__ void fetch_tile(const Arguments& with, uint8_t* high, int tile, int thread) {
  const int4 first = __ldg(with.adapter.modules), last = __ldg(with.adapter.modules + S::kGated);
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
    fetch_high<S::kLow>(high + block * S::kLow * 128, with.adapter, thread, [&](int line, int part) -> const Element* {
      const bool is_up = S::kGated && line >= first.z;
      const int4 own = is_up ? last : first;
      const int eight = tile * (S::kWide / 8) + (block * 8 + part) / (S::kGated ? 2 : 1), rank = line - own.w;
      if (rank >= own.z || eight * 8 >= with.size_out || (S::kGated && part % 2 != is_up)) return nullptr;
      return with.adapter.arena + static_cast<int64_t>(own.y) * 8 + static_cast<int64_t>(rank) * with.size_out + eight * 8;
    });
  }
}

// --- the warpgroup that multiplies

// Where a block hands in sums of one of a tile's blocks of lines.
template <class S>
__device__ float4* plane_of(const Arguments& with, int rank, int block, int thread) {
  return reinterpret_cast<float4*>(with.planes) + (rank * S::kTeamBlocks + block) * (kSums / 4 * kMultipliers) + thread;
}

// Gives the sums of the last chunks of a tile to the block that has its first.
template <class S>
__device__ void hand_in(const Arguments& with, const float (&sums)[S::kTeamBlocks][kSums], int tile, int rank, int thread) {
#pragma unroll
  for (int block = 0; block < S::kTeamBlocks; ++block) {
    float4* plane = plane_of<S>(with, rank, block, thread);
    const auto& own = sums[block];
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      __stcg(plane + i / 4 * kMultipliers, make_float4(own[i], own[i + 1], own[i + 2], own[i + 3]));
    }
  }
  multipliers_meet();
  if (thread == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(with.counters + tile) : "memory");
}

// Adds what ranks [first, last) handed in.
template <class S>
__device__ void take_parts(const Arguments& with, float (&sums)[S::kTeamBlocks][kSums], int tile, int first, int last,
                           int thread) {
  if (thread == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(with.counters + tile) : "memory");
    } while (arrived < last - first);
    with.counters[tile] = 0;
  }
  multipliers_meet();
  for (int rank = first; rank < last; ++rank) {
#pragma unroll
    for (int block = 0; block < S::kTeamBlocks; ++block) {
      const float4* plane = plane_of<S>(with, rank, block, thread);
      auto& own = sums[block];
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float4 four = __ldcg(plane + i / 4 * kMultipliers);
        own[i] += four.x, own[i + 1] += four.y, own[i + 2] += four.z, own[i + 3] += four.w;
      }
    }
  }
}

// --- what becomes of a tile

__device__ float silu(float x) { return x / (1.f + __expf(-x)); }

// Eight features of a row.
template <class S>
struct Item {
  int own, row, part, feature;
  bool exists, inside;

  __device__ Item(const Arguments& with, int tile, int number)
      : own(number / (S::kWide / 8)),
        row(blockIdx.x % S::kSplits * S::kOwn + own),
        part(number % (S::kWide / 8)),
        feature(tile * S::kWide + part * 8),
        exists(number < S::kItems),
        inside(exists && row < with.rows && feature < with.size_out) {}
};

// Adds the residual to `values`, which become the norm's input, and leaves the squares.
template <class S>
__device__ void add_residual(const Arguments& with, float (&values)[8], const Item<S>& item, Eight& residual,
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
  if (item.part % 8 == 0) with.squares_out[item.feature / 64 * with.rows + item.row] = squares;
}

template <class S>
__device__ void finish_tile(const Arguments& with, const Exchange<S>& exchange, const float (&sums)[S::kTeamBlocks][kSums], int tile,
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

// --- the whole

template <class S>
__device__ void multiply(const Arguments& with, Chunks<S> ring, const Exchange<S>& exchange, Update<S> update,
                         const float* factors, int thread) {
  int round = 0;
  float sums[S::kTeamBlocks][kSums];
  const Cursor<S::kSplits> own(with);
  const float* scale = with.squares_in == nullptr ? nullptr : factors;
  update.begin(own.once(with), find_low<S>(with).ranks);
  wait_for_last_kernel();
  if constexpr (S::kSplits > 1) {
    for (int tile = own.tile; tile < with.tiles; tile += own.step, ++round) {
      const LineScales<S> scales(with.scales, with.size_out, tile, thread);
      update.sum_up(sums, ring, own.last - own.first, thread);
      scales.multiply(sums);
      update.add_to(sums, round, thread);
      if (round == 0 && with.squares_in != nullptr) wait_for_factors();
      finish_tile<S>(with, exchange, sums, tile, round, scale, thread);
    }
    exchange.end(round);
  } else {
    bool waits = with.squares_in != nullptr;
    for (int pair = own.begin; pair < own.end;) {
      const int tile = pair / own.chunks, from = pair % own.chunks, count = min(own.chunks - from, own.end - pair);
      const LineScales<S> scales(with.scales, with.size_out, tile, thread);
      update.sum_up(sums, ring, count, thread);
      scales.multiply(sums);
      pair += count;
      if (from > 0) {
        hand_in<S>(with, sums, tile, own.rank(), thread);
        continue;
      }
      update.add_to(sums, round, thread);
      if (count < own.chunks) {
        int last = own.rank() + 1;
        while (last < gridDim.x && own.begin_of(with, last) < (tile + 1) * own.chunks) ++last;
        take_parts<S>(with, sums, tile, own.rank() + 1, last, thread);
      }
      if (waits) wait_for_factors(), waits = false;
      finish_tile<S>(with, exchange, sums, tile, round++, scale, thread);
    }
    if (waits) wait_for_factors();
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, kCoded ? 1 : 3 - S::kBlocks) even_linear(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[S::kSlots], emptied[S::kSlots], arrived, taken, high_filled, high_emptied;
  __shared__ float factors[kRows];
  __shared__ __align__(16) float staged[S::kParts * S::kOwn * S::kPitch];
  const int thread = threadIdx.x;
  let_next_kernel_start();
  const Chunks<S> ring(slots, filled, emptied);
  const Exchange<S> exchange{staged, &arrived, &taken};
  const UpdateSpace<S> space(slots + S::kSlots * S::kSlotBytes, &high_filled, &high_emptied);
  const int warp = same_in_warp(thread / 32);
  const auto fetch = [&](uint8_t* slot, int tile, int chunk, uint64_t* filled) {
    fetch_weights<S>(with, slot, tile, chunk, filled);
  };
  set_up(with, ring, exchange, space, warp, fetch);
  if (warp < kMultipliers / 32) {
    multiply(with, ring, exchange, Update<S>(with, space, thread), factors, thread);
  } else if (warp == kMultipliers / 32) {
    if (is_elected()) {
      const Low low = find_low<S>(with);
      const auto find = [&](int) { return low; };
      stream(with, ring, fetch, LowLines<S, decltype(find)>(with.adapter, find, Cursor<S::kSplits>(with).once(with)));
    }
    __syncwarp();
  } else {
    const int scaler = thread - kMultipliers - 32;
    prepare(with, space, factors, scaler, [&](int tile) { fetch_tile<S>(with, space.high, tile, scaler); });
  }
}

// --- what Python calls

CUtensorMap gated_lines_of(const TensorView& matrix, uint32_t lines) {
  const uint64_t line = matrix.stride(0) * (kCoded ? 1 : sizeof(Element)), features = matrix.size(0) / 2;
  return map_of<4>(matrix, {static_cast<uint64_t>(matrix.size(1)), 8, 2, features / 8}, {line, features * line, 8 * line},
                   {kLineUnits, 8, 2, lines / 16}, kCoded);
}

struct Adapter {
  TensorView arena, modules, slots_of;
};

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, const TensorView& scales,
            const TensorView& zeros, const TensorView& planes, const TensorView& counters, const Adapter& adapter,
            bool pdl) {
  with.weight = S::kGated ? gated_lines_of(weight, S::kBlocks * kBlock) : weights_of(weight, S::kBlocks * kBlock);
  with.x = inputs_of(x, kRows, S::kInputs);
  with.adapter = adapter_of<S>(adapter.arena, adapter.modules, adapter.slots_of, with);
  with.chunks = (with.size_in / kLine + S::kInputs - 1) / S::kInputs;
  with.tiles = (with.size_out + S::kWide - 1) / S::kWide;
  with.scales = scales_of<S>(scales, zeros, weight.size(0), with.size_in);
  ClusterLaunch<even_linear<S>, S::kSplits> launch(x, kThreads, S::kDynamicBytes);
  const int clusters = S::kSplits == 1 ? min(with.tiles, launch.most) : few_clusters(with.tiles, launch.most);
  require(planes.numel() >= static_cast<int64_t>(clusters) * S::kTeamBlocks * kTeams * kBlock * kRows, "the partial sums are too small");
  require(counters.numel() >= with.tiles, "the counters are too few");
  launch.run(with, clusters, pdl);
}

// Products of codes alone have such tiles without a gate.
template <class Run>
void run_wide(const Run& run, int64_t splits) {
  if constexpr (kCoded) {
    if (splits == 1) run(LinearShape<1, false, 2>{});
    if (splits == 2) run(LinearShape<2, false, 2>{});
    if (splits == 4) run(LinearShape<4, false, 2>{});
  }
}

void run_even_linear(TensorView x, TensorView weight, TensorView scales, TensorView zeros, TensorView out, TensorView residual, TensorView norm,
                     TensorView squares_out, TensorView squares_in, TensorView planes, TensorView counters, int64_t kind,
                     bool scaled, double eps, int64_t splits, bool wide, bool pdl, TensorView arena,
                     TensorView modules, TensorView adapters_of) {
  Arguments with{};
  with.rows = static_cast<int>(x.size(0));
  with.size_in = static_cast<int>(x.size(1));
  with.size_out = static_cast<int>(out.size(1));
  with.kind = static_cast<int>(kind);
  require(with.rows <= kRows, "too many rows");
  require(with.size_in % kLine == 0 && with.size_out % (kind == kAdd ? 64 : 8) == 0, "sizes that are not whole lines");
  require(weight.size(0) == (kind == kGated ? 2 : 1) * with.size_out, "another number of outputs");
  require(weight.size(1) == with.size_in / kLine * kLineUnits / kAcross, "another number of inputs");
  require(out.size(0) == with.rows && out.stride(0) % 8 == 0, "outputs of another shape");
  if (kind == kAdd) {
    const int64_t size = static_cast<int64_t>(with.rows) * with.size_out;
    require(residual.numel() == size && lies(residual, 0, with.size_out), "a residual of another shape");
    require(norm.numel() == with.size_out && squares_out.numel() == size / 64, "a norm of another shape");
  }
  require(!scaled || squares_in.numel() == with.size_in / 64 * with.rows, "squares of another shape");
  with.out = static_cast<Element*>(out.data_ptr());
  with.residual = static_cast<Element*>(residual.data_ptr());
  with.norm = static_cast<const Element*>(norm.data_ptr());
  with.squares_out = static_cast<float*>(squares_out.data_ptr());
  with.squares_in = scaled ? static_cast<const float*>(squares_in.data_ptr()) : nullptr;
  with.planes = static_cast<float*>(planes.data_ptr());
  with.counters = static_cast<int*>(counters.data_ptr());
  with.out_stride = out.stride(0);
  with.eps = static_cast<float>(eps);
  require(splits == 1 || splits == 2 || splits == 4, "no such division");
  require(!wide || kCoded || (kind == kGated && splits == 1), "no such tiles");
  const Adapter adapter{arena, modules, adapters_of};
  const auto run = [&](auto shape) {
    launch<decltype(shape)>(with, x, weight, scales, zeros, planes, counters, adapter, pdl);
  };
  if (kind == kGated) {
    if (wide && splits == 1) run(LinearShape<1, true, 2>{});
    if (!wide && splits == 1) run(LinearShape<1, true>{});
    if (!wide && splits == 2) run(LinearShape<2, true>{});
    if (!wide && splits == 4) run(LinearShape<4, true>{});
  } else {
    if (wide) run_wide(run, splits);
    if (!wide && splits == 1) run(LinearShape<1, false>{});
    if (!wide && splits == 2) run(LinearShape<2, false>{});
    if (!wide && splits == 4) run(LinearShape<4, false>{});
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_linear);
