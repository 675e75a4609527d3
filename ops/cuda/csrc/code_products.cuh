// Products of up to ROWS rows whose first operands are fragments in registers (codes.cuh): by warps, or by warpgroups.

#pragma once

#include "codes.cuh"

#if CODES

namespace {

#if ROWS < 64

// Loads 64 inner elements of 8 * kEights rows from their lines, for four products of 16: second operands of
// `multiply_rows`.
template <int kEights>
inline __device__ void load_rows(uint32_t (&to)[4][kEights][2], uint32_t lines, int lane) {
  constexpr bool kOne = kEights == 1;  // then four matrices are two steps, or else 16 rows of one
#pragma unroll
  for (int step = 0; step < 4; step += kOne ? 2 : 1) {
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
      uint32_t found[4];
      const int row = (kOne ? 0 : eight * 8 + lane / 16 * 8) + lane % 8, part = step * 2 + (kOne ? lane / 8 : lane / 8 % 2);
      load_matrices(found, lines + row * 128 + ((part ^ (lane % 8)) << 4));
      auto& others = kOne ? to[step + 1][0] : to[step][eight + 1];
      to[step][eight][0] = found[0], to[step][eight][1] = found[1], others[0] = found[2], others[1] = found[3];
    }
  }
}

// sum = a b^T over 16 inner elements of a warp's 16 lines, which is added to what it was if `adds`. Sums lie as wgmma's do.
template <int kEights>
inline __device__ void multiply_rows(float (&sum)[kSums], const uint32_t (&a)[4], const uint32_t (&b)[kEights][2], bool adds) {
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    float* own = sum + eight * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = adds ? own[i] : 0.f;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(own[0]), "+f"(own[1]), "+f"(own[2]), "+f"(own[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[eight][0]), "r"(b[eight][1]));
  }
}

#else

// sum = a b^T over 16 inner elements, which is added to what it was if `adds`.
inline __device__ void multiply_codes(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b, int adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" S0 ", " S1 ", " S2 ", " S3
               "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}"
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

#endif

}  // namespace

#endif
