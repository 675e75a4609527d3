// Products of up to 64 rows, as fast as their weights are read (sm_90).
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32 or 64) and ELEMENT_F16 (weights, inputs and outputs; 0: bf16, 1: fp16).
//
// The blocks of a cluster share the inner dimension of one tile after another (few_rows.cuh). In each block one warp streams
// weights and inputs into a ring in shared memory and one warpgroup multiplies. Clusters of one block take equal numbers
// of chunks instead of whole tiles: who has a tile's first chunk waits for the sums of the others, which are blocks of lower
// numbers, so that they run already or have run. Sums are added in the order of the inner dimension: results do not vary
// from run to run.
//
// Weights depend on no kernel before this one: the ring fills with them while that one still runs.

#define SOURCE "even_linear"
#include "few_rows.cuh"

namespace {

constexpr int kScalers = 64;
constexpr int kThreads = kMultipliers + 32 + kScalers;
constexpr int kMostSlots = 16;

struct Arguments : Target {
  CUtensorMap weight;  // [features, size_in]; kGated: [features / 8, (gate, up), 8, size_in]
  CUtensorMap x;       // [rows, size_in]
  const float* squares_in;  // null or [size_in / 64, rows]
  float* planes;            // [blocks, sums of a tile]: parts of tiles that blocks share
  int* counters;            // [tiles], zeros: parts handed in
  int size_in, chunks, tiles, slots;
  float eps;
};

__device__ void scalers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kScalers) : "memory"); }
__device__ void factors_ready() { asm volatile("bar.arrive 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }
__device__ void wait_for_factors() { asm volatile("bar.sync 2, %0;" ::"n"(kMultipliers + kScalers) : "memory"); }

// --- the division

// A block's own shared memory but for its sums.
struct Ring {
  uint8_t* slots;
  uint64_t* filled;
  uint64_t* emptied;
  int count;
};

// What is a block's, and where it stands: some chunks of every so many tiles.
template <class S>
struct Cursor {
  int rank, first, last, tile, chunk, step;

  __device__ explicit Cursor(const Arguments& with)
      : rank(blockIdx.x % S::kSplits),
        first(with.chunks * rank / S::kSplits),
        last(with.chunks * (rank + 1) / S::kSplits),
        tile(blockIdx.x / S::kSplits),
        chunk(first),
        step(gridDim.x / S::kSplits) {}
  __device__ int count(const Arguments& with) const { return (last - first) * ((with.tiles - tile + step - 1) / step); }
  __device__ void advance() {
    if (++chunk == last) chunk = first, tile += step;
  }
};

// Chunks of one tile after another, if nobody shares the inner dimension: higher blocks have earlier ones.
template <bool kGated>
struct Cursor<Shape<1, kGated>> {
  int begin, end, chunks, tile, chunk;

  __device__ explicit Cursor(const Arguments& with)
      : begin(begin_of(with, rank())), end(begin_of(with, rank() + 1)), chunks(with.chunks), tile(begin / chunks),
        chunk(begin % chunks) {}
  __device__ static int rank() { return gridDim.x - 1 - blockIdx.x; }
  __device__ static int begin_of(const Arguments& with, int rank) {
    return static_cast<int>(static_cast<int64_t>(with.tiles) * with.chunks * rank / gridDim.x);
  }
  __device__ int count(const Arguments&) const { return end - begin; }
  __device__ void advance() {
    if (++chunk == chunks) chunk = 0, ++tile;
  }
};

// --- the warp that streams

template <class S>
__device__ void fetch_weights(const Arguments& with, uint8_t* slot, const Cursor<S>& at, uint64_t* filled) {
#pragma unroll
  for (int line = 0; line < S::kLines; ++line) {
    const int inner = (at.chunk * S::kLines + line) * kLine;
    if constexpr (S::kGated) {
      fetch_gated(slot + line * kBlockBytes, &with.weight, inner, at.tile * S::kWide, filled);
    } else {
      fetch_lines(slot + line * kBlockBytes, &with.weight, inner, at.tile * S::kWide, filled, kReadOnce);
    }
  }
}

template <class S>
__device__ void fetch_inputs(const Arguments& with, uint8_t* slot, const Cursor<S>& at, uint64_t* filled) {
#pragma unroll
  for (int line = 0; line < S::kLines; ++line) {
    fetch_lines(slot + S::kWeightBytes + line * kRows * 128, &with.x, (at.chunk * S::kLines + line) * kLine, 0, filled,
                kReadOften);
  }
}

template <class S>
__device__ void stream(const Arguments& with, const Ring& ring) {
  Cursor<S> weights(with), inputs = weights;
  const int count = weights.count(with), early = min(count, ring.count);
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

// --- the warps that find factors of the norm for a block's rows, from the sums of squares that the last product left

template <class S>
__device__ void find_factors(const Arguments& with, float* factors, int thread) {
  constexpr int kTogether = kScalers / S::kOwn;  // threads of a row
  __shared__ float shares[kScalers];
  wait_for_last_kernel();
  const int parts = with.size_in / 64, own = thread % S::kOwn;
  const int row = blockIdx.x % S::kSplits * S::kOwn + own;
  float share = 0.f;
  if (row < with.rows) {
#pragma unroll 16
    for (int part = thread / S::kOwn; part < parts; part += kTogether) {
      share += __ldcg(with.squares_in + part * with.rows + row);
    }
  }
  shares[thread] = share;
  scalers_meet();
  if (thread < S::kOwn) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum += shares[i * S::kOwn + thread];
    factors[thread] = rsqrtf(sum / with.size_in + with.eps);
  }
  __syncwarp();
  factors_ready();
}

// --- the warpgroup that multiplies

// Gives the sums of the last chunks of a tile to the block that has its first.
__device__ void hand_in(const Arguments& with, const float (&sums)[kSums], int tile, int rank, int thread) {
  float4* plane = reinterpret_cast<float4*>(with.planes) + rank * (kSums / 4 * kMultipliers) + thread;
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    __stcg(plane + i / 4 * kMultipliers, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  multipliers_meet();
  if (thread == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(with.counters + tile) : "memory");
}

// Adds what ranks [first, last) handed in.
__device__ void take_parts(const Arguments& with, float (&sums)[kSums], int tile, int first, int last, int thread) {
  if (thread == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(with.counters + tile) : "memory");
    } while (arrived < last - first);
    with.counters[tile] = 0;
  }
  multipliers_meet();
  for (int rank = first; rank < last; ++rank) {
    const float4* plane = reinterpret_cast<const float4*>(with.planes) + rank * (kSums / 4 * kMultipliers) + thread;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float4 four = __ldcg(plane + i / 4 * kMultipliers);
      sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
  }
}

// The sums of the next chunks of the ring, which stands `at` a slot.
template <class S>
__device__ void sum_up(float (&sums)[kSums], const Ring& ring, int count, int& at, int& turn, int thread) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
  int behind = -1;
  for (int i = 0; i < count; ++i) {
    barrier_wait(ring.filled + at, turn & 1);
    const uint8_t* slot = ring.slots + at * S::kSlotBytes;
    const uint64_t w = lines_at(slot), x = lines_at(slot + S::kWeightBytes);
    multiply_begin();
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // of 16 elements, 32 bytes of a line
        multiply_add(sums, w + (line * kBlockBytes + step * 32) / 16, x + (line * kRows * 128 + step * 32) / 16);
      }
    }
    multiply_commit();
    multiply_wait<1>();
    if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
    behind = at;
    if (++at == ring.count) at = 0, ++turn;
  }
  multiply_wait<0>();
  sums_ready(sums);
  if (behind >= 0 && thread % 32 == 0) barrier_arrive(ring.emptied + behind);
}

template <class S>
__device__ void multiply(const Arguments& with, const Ring& ring, const Exchange<S>& exchange, const float* factors,
                         int thread) {
  int at = 0, turn = 0, round = 0;
  float sums[kSums];
  const Cursor<S> own(with);
  const float* scale = with.squares_in == nullptr ? nullptr : factors;
  wait_for_last_kernel();
  if constexpr (S::kSplits > 1) {
    for (int tile = own.tile; tile < with.tiles; tile += own.step, ++round) {
      sum_up<S>(sums, ring, own.last - own.first, at, turn, thread);
      if (round == 0 && with.squares_in != nullptr) wait_for_factors();
      finish_tile<S>(with, exchange, sums, tile, round, scale, thread);
    }
    exchange.end(round);
  } else {
    bool waits = with.squares_in != nullptr;
    for (int pair = own.begin; pair < own.end;) {
      const int tile = pair / own.chunks, from = pair % own.chunks, count = min(own.chunks - from, own.end - pair);
      sum_up<S>(sums, ring, count, at, turn, thread);
      pair += count;
      if (from > 0) {
        hand_in(with, sums, tile, own.rank(), thread);
        continue;
      }
      if (count < own.chunks) {
        int last = own.rank() + 1;
        while (last < gridDim.x && own.begin_of(with, last) < (tile + 1) * own.chunks) ++last;
        take_parts(with, sums, tile, own.rank() + 1, last, thread);
      }
      if (waits) wait_for_factors(), waits = false;
      finish_tile<S>(with, exchange, sums, tile, round++, scale, thread);
    }
    if (waits) wait_for_factors();
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 2) even_linear(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t slots[];
  __shared__ uint64_t filled[kMostSlots], emptied[kMostSlots], arrived, taken;
  __shared__ float factors[kRows];
  __shared__ __align__(16) float staged[kRows * kPitch];
  const int thread = threadIdx.x;
  let_next_kernel_start();
  if (thread == 0) {
    for (int slot = 0; slot < with.slots; ++slot) {
      barrier_init(filled + slot, 1);
      barrier_init(emptied + slot, kMultipliers / 32);
    }
    barrier_init(&arrived, S::kSplits * kMultipliers / 32);
    barrier_init(&taken, S::kSplits * kMultipliers / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (S::kSplits > 1) cluster_begins();
  const Ring ring{slots, filled, emptied, with.slots};
  if (thread < kMultipliers) {
    multiply<S>(with, ring, Exchange<S>{staged, &arrived, &taken}, factors, thread);
  } else if (thread < kMultipliers + 32) {
    if (thread == kMultipliers) {
      stream<S>(with, ring);
    }
    __syncwarp();
  } else if (with.squares_in != nullptr) {
    find_factors<S>(with, factors, thread - kMultipliers - 32);
  }
}

// --- what Python calls

template <class S>
void launch(Arguments& with, const TensorView& x, const TensorView& weight, const TensorView& planes,
            const TensorView& counters, bool pdl) {
  with.weight = S::kGated ? gated_lines_of(weight) : lines_of(weight, kBlock);
  with.x = lines_of(x, kRows);
  with.chunks = (with.size_in / kLine + S::kLines - 1) / S::kLines;
  with.tiles = (with.size_out + S::kWide - 1) / S::kWide;
  ClusterLaunch<even_linear<S>, S::kSplits> launch(x, kThreads, with.slots * S::kSlotBytes);
  const int clusters = S::kSplits == 1 ? min(with.tiles, launch.most) : few_clusters(with.tiles, launch.most);
  require(planes.numel() >= static_cast<int64_t>(clusters) * kBlock * kRows, "the partial sums are too small");
  require(counters.numel() >= with.tiles, "the counters are too few");
  launch.run(with, clusters, pdl);
}

void run_even_linear(TensorView x, TensorView weight, TensorView out, TensorView residual, TensorView norm,
                     TensorView squares_out, TensorView squares_in, TensorView planes, TensorView counters, int64_t kind,
                     bool scaled, double eps, int64_t splits, int64_t slots, bool pdl) {
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
  require(splits == 1 || splits == 2 || splits == 4, "no such division");
  if (kind == kGated) {
    if (splits == 1) launch<Shape<1, true>>(with, x, weight, planes, counters, pdl);
    if (splits == 2) launch<Shape<2, true>>(with, x, weight, planes, counters, pdl);
    if (splits == 4) launch<Shape<4, true>>(with, x, weight, planes, counters, pdl);
  } else {
    if (splits == 1) launch<Shape<1, false>>(with, x, weight, planes, counters, pdl);
    if (splits == 2) launch<Shape<2, false>>(with, x, weight, planes, counters, pdl);
    if (splits == 4) launch<Shape<4, false>>(with, x, weight, planes, counters, pdl);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_linear);
