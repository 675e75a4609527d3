// The product of up to 64 rows that makes queries, keys and values, and what becomes of them before attention (sm_90):
// norms of heads, rotation, and keys and values in their pages.
//
// Owns one launch and its division of the work; never chooses where it pays. Compiled once for each padded number of
// rows: ROWS (16, 32 or 64), and RANKS (updates.cuh).
//
// A tile of few_rows.cuh is one head: a row's sums of all 128 features meet in one block, as norms and rotation need them.

#define SOURCE "even_heads"
#include "updates.cuh"

#include <cuda_fp8.h>

#include <climits>

namespace {

constexpr int kHead = 128;          // features of a head
constexpr int kBytes = 190 * 1024;  // as much as 64 rows leave room for

using S = Shape<2, kHead / kBlock, kCoded ? 4 / kAcross : 1, RANKS, kBytes>;  // clusters of four blocks took longer

constexpr int kItems = S::kOwn * (kHead / 16);                      // of eight dimensions of a row and their partners
constexpr int kTurns = (kItems + kMultipliers - 1) / kMultipliers;  // items of a thread

// The weight: [tiles * kHead, size_in].
struct Arguments : Inputs {
  Element* q;               // [rows, queries, kHead]
  uint8_t* kv;              // [pages, (keys, values), page_size, keys, kHead]
  const Element* q_norm;    // null or [kHead]
  const Element* k_norm;    // the same
  const float* cos_sin;     // [positions, kHead]
  const void* positions;    // [rows], int64 or int32
  const int64_t* slots_of;  // [rows]: page * page_size + offset; negative: nowhere
  int64_t page_stride, part_stride, token_stride;  // elements of kv
  int queries, keys, page_size;
  bool long_positions, fp8;
  float k_scale, v_scale;
};

// --- what becomes of a head

__device__ void load_eight(float (&values)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

__device__ void store_eight(Element* to, const float (&values)[8]) {
  Eight eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.values[i] = static_cast<Element>(values[i]);
  *reinterpret_cast<uint4*>(to) = eight.bits;
}

// Stores zeros for what bf16 could not hold: what a failed row leaves in a page must not reach the page's next user.
__device__ void store_cached(const Arguments& with, int64_t place, float (&values)[8], float scale) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fabsf(values[i]) < 3.38e38f ? values[i] : 0.f;
  if (!with.fp8) return store_eight(reinterpret_cast<Element*>(with.kv) + place, values);
  union {
    uint2 bits;
    __nv_fp8_e4m3 values[8];
  } eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.values[i] = __nv_fp8_e4m3(fminf(fmaxf(values[i] / scale, -448.f), 448.f));
  *reinterpret_cast<uint2*>(with.kv + place) = eight.bits;
}

// The norm of a head that eight neighbouring lanes hold.
__device__ void norm_head(float (&low)[8], float (&high)[8], const Element* norm, int part, float eps) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += low[i] * low[i] + high[i] * high[i];
#pragma unroll
  for (int step = 1; step < 8; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = rsqrtf(squares / kHead + eps);
  Eight first, second;
  first.bits = *reinterpret_cast<const uint4*>(norm + part * 8);
  second.bits = *reinterpret_cast<const uint4*>(norm + kHead / 2 + part * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] *= factor * static_cast<float>(first.values[i]);
    high[i] *= factor * static_cast<float>(second.values[i]);
  }
}

__device__ void rotate(float (&low)[8], float (&high)[8], const float (&cos)[8], const float (&sin)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float turned = low[i] * cos[i] - high[i] * sin[i];
    high[i] = high[i] * cos[i] + low[i] * sin[i];
    low[i] = turned;
  }
}

// Eight dimensions of a row, 8 * part and on, and their partners half a head further.
struct HeadItem {
  int own, row, part;
  bool inside;

  __device__ HeadItem(const Arguments& with, int number)
      : own(number / 8 % S::kOwn), row(blockIdx.x % S::kSplits * S::kOwn + own), part(number % 8),
        inside(number < kItems && row < with.rows) {}

  __device__ int64_t position(const Arguments& with) const {
    if (!inside) return 0;
    return with.long_positions ? static_cast<const int64_t*>(with.positions)[row]
                               : static_cast<const int*>(with.positions)[row];
  }

  __device__ void store(const Arguments& with, int head, int64_t slot, float (&low)[8], float (&high)[8]) const {
    if (!inside) return;
    if (head < with.queries) {
      Element* to = with.q + (static_cast<int64_t>(row) * with.queries + head) * kHead + part * 8;
      store_eight(to, low);
      store_eight(to + kHead / 2, high);
    } else if (slot >= 0) {
      const bool is_k = head < with.queries + with.keys;
      const int64_t at = head - with.queries - (is_k ? 0 : with.keys);
      const int64_t place = slot / with.page_size * with.page_stride + (is_k ? 0 : with.part_stride) +
                            slot % with.page_size * with.token_stride + at * kHead + part * 8;
      store_cached(with, place, low, is_k ? with.k_scale : with.v_scale);
      store_cached(with, place + kHead / 2, high, is_k ? with.k_scale : with.v_scale);
    }
  }
};

// --- updates

// The one of the site's modules that a head belongs to.
struct HeadModule {
  int a = 0, b = 0, rank = 0, feature = 0, features = 0;  // feature: the head's first in its module

  __device__ HeadModule(const Arguments& with, int head) {
    if (!kUpdates) return;
    const int number = head < with.queries ? 0 : head < with.queries + with.keys ? 1 : 2;
    const int4 own = __ldg(with.adapter.modules + number);
    a = own.x, b = own.y, rank = own.z;
    feature = (head - (number > 0 ? with.queries : 0) - (number > 1 ? with.keys : 0)) * kHead;
    features = (number > 0 ? with.keys : with.queries) * kHead;
  }
};

// Begins to fetch B of a head.
__device__ void fetch_head(const Arguments& with, uint8_t* high, int head, int thread) {
  const HeadModule module(with, head);
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
    const Element* first = with.adapter.arena + static_cast<int64_t>(module.b) * 8 + module.feature + block * kBlock;
    fetch_high<S::kLow>(high + block * S::kLow * 128, with.adapter, thread, [&](int rank, int part) {
      return rank < module.rank ? first + static_cast<int64_t>(rank) * module.features + part * 8 : nullptr;
    });
  }
}

// --- the warpgroup that multiplies

__device__ void multiply(const Arguments& with, Chunks<S> ring, const Exchange<S>& exchange, Update<S> update,
                         const float* factors, int thread) {
  const Cursor<S::kSplits> own(with);
  int round = 0;
  wait_for_last_kernel();
  float cos[kTurns][8], sin[kTurns][8];
  int64_t slot[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const HeadItem item(with, thread + i * kMultipliers);
    const float* angles = with.cos_sin + item.position(with) * kHead + item.part * 8;
    load_eight(cos[i], angles);
    load_eight(sin[i], angles + kHead / 2);
    slot[i] = item.inside ? with.slots_of[item.row] : -1;
  }
  for (int head = own.tile; head < with.tiles; head += own.step, ++round) {
    float sums[S::kTeamBlocks][kSums];
    update.begin(own.last - own.first, HeadModule(with, head).rank);
    const LineScales<S> scales(with.scales, with.tiles * kHead, head, thread);
    update.sum_up(sums, ring, own.last - own.first, thread);
    scales.multiply(sums);
    update.add_to(sums, round, thread);
    if (round == 0 && with.squares_in != nullptr) wait_for_factors();
    exchange.send(sums, round, thread);
    exchange.wait(round);
    const Element* norm = head < with.queries ? with.q_norm : with.k_norm;
    const bool turns = head < with.queries + with.keys;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const HeadItem item(with, thread + i * kMultipliers);
      const float factor = with.squares_in == nullptr ? 1.f : factors[item.own];
      float low[8], high[8];
      exchange.add_up(low, item.own, 8 * item.part);
      exchange.add_up(high, item.own, kHead / 2 + 8 * item.part);
#pragma unroll
      for (int j = 0; j < 8; ++j) low[j] *= factor, high[j] *= factor;
      if (turns && norm != nullptr) norm_head(low, high, norm, item.part, with.eps);
      if (turns) rotate(low, high, cos[i], sin[i]);
      item.store(with, head, slot[i], low, high);
    }
    exchange.done(thread);
  }
  exchange.end(round);
}

__global__ void __launch_bounds__(kThreads, 1) even_heads(const __grid_constant__ Arguments with) {
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
  const auto fetch = [&](uint8_t* slot, int head, int chunk, uint64_t* filled) {
    fetch_scales<S>(with.scales, slot, head, chunk, filled);
#pragma unroll
    for (int line = 0; line < S::kLines; ++line) {
      fetch_lines(slot + line * S::kBlocks * kBlockBytes, &with.weight, (chunk * S::kLines + line) * kLineUnits,
                  head * kHead, filled, kReadOnce);
    }
  };
  set_up(with, ring, exchange, space, warp, fetch);
  if (warp < kMultipliers / 32) {
    multiply(with, ring, exchange, Update<S>(with, space, thread), factors, thread);
  } else if (warp == kMultipliers / 32) {
    if (is_elected()) {
      const auto find = [&](int head) {
        const HeadModule module(with, head);
        return Low{module.a, module.rank};
      };
      stream(with, ring, fetch, LowLines<S, decltype(find)>(with.adapter, find, INT_MAX));
    }
    __syncwarp();
  } else {
    const int scaler = thread - kMultipliers - 32;
    prepare(with, space, factors, scaler, [&](int head) { fetch_head(with, space.high, head, scaler); });
  }
}

// --- what Python calls

void run_even_heads(TensorView x, TensorView weight, TensorView scales, TensorView zeros, TensorView squares_in, bool scaled, TensorView q, TensorView kv,
                    TensorView q_norm, TensorView k_norm, bool normed, TensorView cos_sin, TensorView positions,
                    TensorView slots_of, double k_scale, double v_scale, double eps, bool pdl,
                    TensorView arena, TensorView modules, TensorView adapters_of) {
  Arguments with{};
  with.weight = weights_of(weight, kHead);
  with.x = inputs_of(x, kRows, S::kInputs);
  with.squares_in = scaled ? static_cast<const float*>(squares_in.data_ptr()) : nullptr;
  with.q = static_cast<Element*>(q.data_ptr());
  with.kv = static_cast<uint8_t*>(kv.data_ptr());
  with.q_norm = normed ? static_cast<const Element*>(q_norm.data_ptr()) : nullptr;
  with.k_norm = normed ? static_cast<const Element*>(k_norm.data_ptr()) : nullptr;
  with.cos_sin = static_cast<const float*>(cos_sin.data_ptr());
  with.positions = positions.data_ptr();
  with.long_positions = positions.dtype().bits == 64;
  with.slots_of = static_cast<const int64_t*>(slots_of.data_ptr());
  with.page_stride = kv.stride(0), with.part_stride = kv.stride(1), with.token_stride = kv.stride(2);
  with.rows = static_cast<int>(x.size(0));
  with.size_in = static_cast<int>(x.size(1));
  with.chunks = (with.size_in / kLine + S::kInputs - 1) / S::kInputs;
  with.tiles = static_cast<int>(weight.size(0)) / kHead;
  with.queries = static_cast<int>(q.size(1)) / kHead;
  with.keys = static_cast<int>(kv.size(3));
  with.page_size = static_cast<int>(kv.size(2));
  with.fp8 = kv.dtype().bits == 8;
  with.k_scale = static_cast<float>(k_scale), with.v_scale = static_cast<float>(v_scale);
  with.eps = static_cast<float>(eps);
  with.adapter = adapter_of<S>(arena, modules, adapters_of, with);
  with.scales = scales_of<S>(scales, zeros, weight.size(0), with.size_in);
  require(with.rows <= kRows, "too many rows");
  require(with.size_in % kLine == 0 && weight.size(1) == with.size_in / kLine * kLineUnits / kAcross, "a weight of another shape");
  require(kv.size(4) == kHead && lies(kv, 3, kHead) && lies(q, 0, q.size(1)), "heads of another shape");
  require(weight.size(0) == kHead * (with.queries + 2 * with.keys), "another number of heads");
  require(positions.size(0) >= with.rows && slots_of.size(0) >= with.rows, "too few positions");
  require(!scaled || squares_in.numel() == with.size_in / 64 * with.rows, "squares of another shape");
  ClusterLaunch<even_heads, S::kSplits> launch(x, kThreads, S::kDynamicBytes);
  launch.run(with, few_clusters(with.tiles, launch.most), pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_even_heads);
