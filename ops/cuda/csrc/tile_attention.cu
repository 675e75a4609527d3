// Causal attention of several new tokens a row over the row's pages (sm_90).
//
// Owns one launch; never writes keys or values, and never decides how rows are cut into tiles. Compiled for each
// KV_HEADS, GROUP (heads that share keys and values) and PAGE; heads have 128 features.
//
// A tile is up to 128 tokens of a row and one head, or in a cluster of two blocks two heads with the same keys and values,
// of which each block fetches half for both. Tiles come sorted, those that see most first, and clusters take them there and
// back, so that all end at about the same time. In a block one warp keeps two rings filled, of keys and of values, through
// all of the block's tiles, and two warpgroups take 64 tokens each: scores of the next 128 keys are multiplied while those
// before become weights. The warpgroups take turns at multiplying.
//
// Keys and values that lie behind a row's last token are whatever its pages hold: finite numbers, that weigh nothing.

#define SOURCE "tile_attention"
#include "wgmma.cuh"

namespace {

constexpr int kHead = 128;                       // features
constexpr int kQueries = 128;                    // of a tile
constexpr int kKeys = 128;                       // of a slot
constexpr int kPage = PAGE;
constexpr int kPages = kKeys / kPage;            // of a slot
constexpr int kHalfBytes = 128 * 128;            // 64 features of 128 tokens
constexpr int kSlotBytes = 2 * kHalfBytes;
constexpr int kCluster = GROUP % 2 ? 1 : 2;      // blocks that take heads with the same keys and values
constexpr int kSlots = 2;                        // of each ring
constexpr int kGroups = 2;                       // of warps that multiply
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kSums = 64;                        // of a thread: 64 x 128 of a warpgroup
constexpr int kBarriers = 2 * 3 * kSlots;
constexpr int kSharedBytes = 3 * kSlots * kSlotBytes + 4 * kGroups * Staged::kBytes + kBarriers * 8;
static_assert(kKeys % kPage == 0 && kPage % 8 == 0 && 2 * kPages <= 32, "a slot is whole pages, one lane for each half");

struct Arguments {
  CUtensorMap q;   // [tokens, heads, 2, 64]
  CUtensorMap kv;  // [2 * pages, kv_heads, 2, PAGE, 64]
  Element* out;    // [tokens, heads, kHead]
  const int4* jobs;  // of up to 128 tokens: the first, how many, the first's position, the first of the row's `pages`
  const int* pages;  // of all rows
  int tiles;
  float scale;     // log2(e) included
};

// --- synchronisation

// As `fetch`, to the same place in all blocks of the cluster, and to their barriers.
__device__ void fetch_for_all(void* target, const CUtensorMap* map, int token, int half, int head, int part,
                              uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(target)),
      "l"(map), "r"(0), "r"(token), "r"(half), "r"(head), "r"(part), "r"(shared_address(barrier)),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

// Lines of 64 features: `half` of `head`'s, from `token` on of part `part`.
__device__ void fetch(void* target, const CUtensorMap* map, int token, int half, int head, int part, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(target)),
      "l"(map), "r"(0), "r"(token), "r"(half), "r"(head), "r"(part), "r"(shared_address(barrier))
      : "memory");
}

__device__ void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

// --- arithmetic

#define SUMS                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                        \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// sum += q k^T over 16 features; sum = q k^T unless `adds`.
__device__ void score(float (&sum)[kSums], uint64_t q, uint64_t k, int adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUMS ", %64, %65, adds, 1, 1, 0, 0;\n}"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(q), "l"(k), "r"(adds));
}

// sum += weights v over 16 keys.
__device__ void weigh(float (&sum)[kSums], const uint32_t (&weights)[4], uint64_t v) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUMS ", {%64, %65, %66, %67}, %68, adds, 1, 1, 1;\n}"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(v));
}

__device__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- the division

// A cluster's tiles, there and back through the sorted list.
struct Walk {
  int number = blockIdx.x / kCluster, turn = 0;

  __device__ void advance() {
    const int clusters = gridDim.x / kCluster, own = blockIdx.x / kCluster;
    number += ++turn % 2 ? 2 * (clusters - own) - 1 : 2 * own + 1;
  }
};

struct Tile {
  int token, count, position, page, head, slots;

  __device__ Tile(const Arguments& with, int number) {
    constexpr int kWide = KV_HEADS * GROUP / kCluster;
    const int4 job = __ldg(with.jobs + number / kWide);
    token = job.x, count = job.y, position = job.z, page = job.w;
    head = number % kWide * kCluster + blockIdx.x % kCluster;
    slots = (position + count + kKeys - 1) / kKeys;
  }
};

struct Slots : Ring<kSlots, kSlotBytes> {
  __device__ Slots(uint8_t* slots, uint64_t* barriers) : Ring{slots, barriers, barriers + kSlots} {}

  // This warp has done with the slot, which this block fills, or all of the cluster together.
  __device__ void leave(int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(emptied + at);
    advance();
  }
  __device__ void leave_to_all(int lane) {
    leave_everywhere(emptied + at, kCluster, lane);
    advance();
  }
};

// --- the warp that streams

// Half a page of one head a lane; of a cluster, each block fetches one half for both.
__device__ void fetch_slot(const Arguments& with, Slots& ring, int page, int head, int part, int lane) {
  ring.wait_emptied();
  if (lane == 0) barrier_expect(ring.filled + ring.at, kSlotBytes);
  __syncwarp();
  const int own = lane % kPages, half = kCluster == 1 ? lane / kPages : blockIdx.x % kCluster;
  uint8_t* target = ring.slot() + half * kHalfBytes + own * kPage * 128;
  if (lane < 2 / kCluster * kPages) {
    if constexpr (kCluster == 1) {
      fetch(target, &with.kv, 0, half, head, 2 * page + part, ring.filled + ring.at);
    } else {
      fetch_for_all(target, &with.kv, 0, half, head, 2 * page + part, ring.filled + ring.at);
    }
  }
  __syncwarp();
  ring.advance();
}

__device__ void stream(const Arguments& with, Slots q, Slots k, Slots v, int lane) {
  wait_for_last_kernel();
  for (Walk walk; walk.number < with.tiles; walk.advance()) {
    const Tile tile(with, walk.number);
    const int kv_head = tile.head / GROUP, last = (tile.position + tile.count - 1) / kPage;
    const int* pages = with.pages + tile.page;
    auto page_of = [&](int slot) { return __ldg(pages + min(slot * kPages + lane % kPages, last)); };
    int page = page_of(tile.slots - 1);
    q.wait_emptied();
    if (lane == 0) {
      barrier_expect(q.filled + q.at, kSlotBytes);
      fetch(q.slot(), &with.q, tile.token, 0, tile.head, 0, q.filled + q.at);
      fetch(q.slot() + kHalfBytes, &with.q, tile.token, 1, tile.head, 0, q.filled + q.at);
    }
    q.advance();
    for (int slot = tile.slots - 1; slot >= 0; --slot) {
      const int next = slot > 0 ? page_of(slot - 1) : 0;
      fetch_slot(with, k, page, kv_head, 0, lane);
      fetch_slot(with, v, page, kv_head, 1, lane);
      page = next;
    }
  }
}

// --- the warpgroups that multiply

// Of rows lane / 4 and lane / 4 + 8 of a warp's 16.
struct Softmax {
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};

  // Makes weights of scores, and finds by what older sums shrink.
  __device__ void take(float (&scores)[kSums], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = most[half];
#pragma unroll
      for (int i = 0; i < kSums; i += 4) high = fmaxf(high, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float base = high == -INFINITY ? 0.f : high * scale;  // no key is seen yet
      shrink[half] = power_of_two(most[half] * scale - base);
      most[half] = high;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          scores[i + j] = power_of_two(fmaf(scores[i + j], scale, -base));
          sum += scores[i + j];
        }
      }
      total[half] = total[half] * shrink[half] + sum;
    }
  }
  // What a row's sums are to be multiplied by at the end.
  __device__ float factor(int half) const {
    float sum = total[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum > 0.f ? 1.f / sum : 0.f;
  }
};

__device__ void hide_later_keys(float (&scores)[kSums], int first_key, int position, int lane) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2, row = position + lane / 4 + i / 2 % 2 * 8;
    if (key > row) scores[i] = -INFINITY;
  }
}

__device__ void score_slot(float (&scores)[kSums], const uint8_t* q, const uint8_t* k) {
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const int offset = step / 4 * kHalfBytes + step % 4 * 32;
    score(scores, lines_at(q + offset), lines_at(k + offset), step);
  }
}

__device__ void weigh_slot(float (&sums)[kSums], const uint32_t (&weights)[kKeys / 16][4], const uint8_t* v) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    weigh(sums, weights[step], lines_at(v + step * 16 * 128, kHalfBytes));
  }
}

__device__ void pack(uint32_t (&weights)[kKeys / 16][4], const float (&scores)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    Pair pair;
    pair.values[0] = static_cast<Element>(scores[i]);
    pair.values[1] = static_cast<Element>(scores[i + 1]);
    weights[i / 8][i / 2 % 4] = pair.bits;
  }
}

__device__ void write_out(const Arguments& with, float (&sums)[kSums], const Softmax& softmax, const Tile& tile, int first,
                          const Staged& staged) {
  const int lane = staged.lane;
  const float factors[2] = {softmax.factor(0), softmax.factor(1)};
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kHead / 8; block += 2) {
    Pair pairs[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i / 2].values[i % 2] = static_cast<Element>(sums[block * 4 + i] * factors[i / 2 % 2]);
    staged.put(block, pairs);
  }
  __syncwarp();
#pragma unroll
  for (int turn = 0; turn < 8; ++turn) {
    const int row = first + 2 * turn + lane / 16;
    if (row >= tile.count) continue;
    const int64_t place = (static_cast<int64_t>(tile.token + row) * (KV_HEADS * GROUP) + tile.head) * kHead;
    *reinterpret_cast<uint4*>(with.out + place + lane % 16 * 8) = staged.line(turn);
  }
}

__device__ void attend(const Arguments& with, Slots q, Slots k, Slots v, const Staged& staged, int group, int warp) {
  const int lane = staged.lane;
  wait_for_last_kernel();
  if (group == 1) give_turn(0);
  for (Walk walk; walk.number < with.tiles; walk.advance()) {
    const Tile tile(with, walk.number);
    const int first = group * 64 + warp * 16, position = tile.position + first;
    float sums[kSums], scores[kSums], shrink[2];
    uint32_t weights[kKeys / 16][4];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
    q.wait_filled();
    const uint8_t* own = q.slot() + group * 64 * 128;
    k.wait_filled();
    wait_for_turn(group);
    multiply_begin();
    score_slot(scores, own, k.slot());
    multiply_commit();
    give_turn(1 - group);
    multiply_wait<0>();
    sums_ready(scores);
    k.leave_to_all(lane);
    hide_later_keys(scores, (tile.slots - 1) * kKeys, position, lane);
    softmax.take(scores, with.scale, shrink);
    pack(weights, scores);
    for (int slot = tile.slots - 2; slot >= 0; --slot) {
      k.wait_filled();
      wait_for_turn(group);
      multiply_begin();
      score_slot(scores, own, k.slot());
      multiply_commit();
      v.wait_filled();
      weigh_slot(sums, weights, v.slot());
      multiply_commit();
      give_turn(1 - group);
      multiply_wait<1>();
      sums_ready(scores);
      k.leave_to_all(lane);
      if ((slot + 1) * kKeys > position + 1) hide_later_keys(scores, slot * kKeys, position, lane);
      softmax.take(scores, with.scale, shrink);
      multiply_wait<0>();
      sums_ready(sums);
      v.leave_to_all(lane);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] *= shrink[i / 2 % 2];
      pack(weights, scores);
    }
    q.leave(lane);
    v.wait_filled();
    multiply_begin();
    weigh_slot(sums, weights, v.slot());
    multiply_commit();
    multiply_wait<0>();
    sums_ready(sums);
    v.leave_to_all(lane);
    write_out(with, sums, softmax, tile, first, staged);
  }
}

__global__ void __launch_bounds__(kThreads, 1) tile_attention(const __grid_constant__ Arguments with) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* staged = memory + 3 * kSlots * kSlotBytes;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(staged + 4 * kGroups * Staged::kBytes);
  const Slots q(memory, barriers);
  const Slots k(memory + kSlots * kSlotBytes, barriers + 2 * kSlots);
  const Slots v(memory + 2 * kSlots * kSlotBytes, barriers + 4 * kSlots);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    q.set_up(kGroups * 4);
    k.set_up(kCluster * kGroups * 4);
    v.set_up(kCluster * kGroups * 4);
    barriers_are_set_up();
  }
  __syncthreads();
  cluster_begins();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) stream(with, q, k, v, lane);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warp = threadIdx.x / 32 - 4;
    attend(with, q, k, v, Staged{staged + warp * Staged::kBytes, lane}, warp / 4, warp % 4);
  }
  let_next_kernel_start();
  __syncthreads();
  cluster_ends();
}

// --- what Python calls

void run_tile_attention(TensorView q, TensorView kv, TensorView out, TensorView jobs, TensorView pages, double scale,
                        bool pdl) {
  constexpr uint64_t kBytes = sizeof(Element), kHalf = kLine * kBytes;
  const uint64_t tokens = q.size(0), heads = KV_HEADS * GROUP, row = q.stride(0) * kBytes, head = kHead * kBytes;
  require(q.size(1) == static_cast<int64_t>(heads) && q.size(2) == kHead && lies(q, 1, kHead), "other heads");
  require(kv.size(2) == kPage && kv.size(3) == KV_HEADS && kv.stride(0) == 2 * kv.stride(1), "other pages");
  require(kv.size(4) == kHead && lies(kv, 3, kHead) && jobs.size(1) == 4, "other pages");
  Arguments with{};
  const uint64_t token = kv.stride(2) * kBytes, part = kv.stride(1) * kBytes, parts = 2 * kv.size(0);
  with.q = map_of<5>(q, {kLine, tokens, 2, heads, 1}, {row, kHalf, head, tokens * row}, {kLine, kQueries, 1, 1, 1});
  with.kv = map_of<5>(kv, {kLine, kPage, 2, KV_HEADS, parts}, {token, kHalf, head, part}, {kLine, kPage, 1, 1, 1});
  with.out = static_cast<Element*>(out.data_ptr());
  with.jobs = static_cast<const int4*>(jobs.data_ptr());
  with.pages = static_cast<const int*>(pages.data_ptr());
  with.tiles = static_cast<int>(jobs.size(0) * heads / kCluster);
  with.scale = static_cast<float>(scale * 1.4426950408889634);
  ClusterLaunch<tile_attention, kCluster> launch(q, kThreads, kSharedBytes);
  launch.run(with, with.tiles, pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_tile_attention);
