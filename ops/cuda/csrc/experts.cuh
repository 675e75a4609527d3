// What products with the weights of experts share: how gates and ups are fetched side by side, and what becomes of their sums.
//
// Owns no kernel and no division of work.

#pragma once

#include "wgmma.cuh"

namespace {

// Of five dimensions, lines of gates and ups: eight of gates, eight of ups, and so on.
inline __device__ void fetch_gated(void* target, const CUtensorMap* map, int inner, int eight, int expert, uint64_t* barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(target)),
      "l"(map), "r"(inner), "r"(0), "r"(eight), "r"(expert), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

enum Activation { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// What is rounded where is written out: a row's results must not depend on the rows of its tile, for which the compiler may
// fuse other operations.
inline __device__ float activated(float gate, float up, int activation) {
  float inner = gate;
  if (activation == kGeluTanh) {
    const float cube = __fmul_rn(__fmul_rn(gate, gate), gate);
    inner = __fmul_rn(1.5957691216057308f, __fmaf_rn(0.044715f, cube, gate));
  } else if (activation == kClampedSwiglu) {
    gate = fminf(gate, 7.f), inner = __fmul_rn(gate, 1.702f);
    up = __fadd_rn(fminf(fmaxf(up, -7.f), 7.f), 1.f);
  }
  return __fdividef(__fmul_rn(gate, up), __fadd_rn(1.f, __expf(-inner)));
}

#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NUMBERS_16 NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_32 \
  NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

}  // namespace
