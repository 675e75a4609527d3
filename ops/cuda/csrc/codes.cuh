// Weights of 8 or 4 bits on their way from the ring to wgmma: codes become bf16 fragments in registers, and sums are
// scaled.
//
// Owns no ring and no division of work. Compiled for CODES, the kind of codes, and GROUP, the inputs that share a scale,
// 0 where a line has one. ZEROS: whether each group has a zero point of its own.
//
// The products are those of the dense weight: a code is exact in bf16, and the scale multiplies the float32 sums of its
// group. A fragment is what ldmatrix reads of lines in shared memory, so the columns of a weight lie in another order
// within each 16 bytes (codes/layout.py says which).

#pragma once

#include "wgmma.cuh"

namespace {

enum Codes { kDense = 0, kE4m3 = 1, kInt8 = 2, kInt4 = 3, kE2m1 = 4 };
constexpr int kCodes = CODES;
constexpr bool kCoded = kCodes != kDense;
constexpr bool kFourBits = kCodes == kInt4 || kCodes == kE2m1;
constexpr int kAcross = kCodes == kDense ? 1 : kFourBits ? 4 : 2;  // lines of inputs to a line of weights
constexpr int kLineUnits = kCoded ? 128 : kLine;  // of a map of weights: bytes, or elements
constexpr int kGroup = GROUP;
constexpr int kGroupSteps = kGroup > 0 ? kGroup / 16 : 1;  // products of 16 inputs
constexpr bool kZeros = ZEROS;
constexpr int kZeroGroups = kZeros && kGroup == 32 ? 2 : 1;  // of 64 columns, each with zero points of its own
constexpr int kScaleLines = kCodes == kE4m3 ? 8 : 1;  // lines of weights that share a scale of a group
constexpr int kScaleBytes = kCodes == kE4m3 ? 4 : kCodes == kE2m1 ? 1 : 2;  // one: a power of two, as E8M0 stores it

// The scales of a weight, and its zero points: of each line [lines], or of groups [groups, pitch].
struct Scales {
  CUtensorMap of_groups;  // bytes: [groups, 1, lines], or of gates and ups [groups, 2, features]
  CUtensorMap zeros;      // the same
  const float* of_lines;
  bool half;  // 16-bit scales are float16
};

#if CODES

// --- fragments

inline __device__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

inline __device__ uint32_t scaled_by(uint32_t pair, uint32_t factors) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(factors));
  return result;
}

inline __device__ uint32_t less(uint32_t pair, uint32_t than) {
  uint32_t result;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(than));
  return result;
}

// The two pairs of four codes of 8 bits: bytes 0 and 2, then 1 and 3.
inline __device__ void make_pairs(uint32_t& first, uint32_t& second, uint32_t codes) {
  if constexpr (kCodes == kE4m3) {  // as if the exponent were bf16's, which leaves 2^-120 of the value
    const uint32_t power = 0x7B807B80;
    first = scaled_by(((codes << 8) & 0x80008000) | ((codes << 4) & 0x07f007f0), power);
    second = scaled_by((codes & 0x80008000) | ((codes >> 4) & 0x07f007f0), power);
  } else {  // 128 plus the low bits, less 128 or 256 by the sign
    const uint32_t others = codes >> 8, magic = 0x43004300;
    first = less((codes & 0x007f007f) | magic, (codes & 0x00800080) | magic);
    second = less((others & 0x007f007f) | magic, (others & 0x00800080) | magic);
  }
}

// 128 in both halves. The compiler must not know it: a logical operation takes one constant, and then one does for a pair.
inline __device__ uint32_t hidden_magic() {
  uint32_t magic;
  asm volatile("mov.b32 %0, 0x43004300;" : "=r"(magic));
  return magic;
}

// One pair of the four in eight codes of 4 bits, less its zero point, which is 128 too large, as the pair is.
template <int kPair>
inline __device__ uint32_t make_pair(uint32_t codes, uint32_t zero, uint32_t magic) {
  uint32_t raised;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xEA;" : "=r"(raised) : "r"(codes >> (4 * kPair)), "r"(magic));
  return less(raised, zero);
}

// The same of 4-bit floats: sign, exponent and fraction where bf16 has them, which leaves 2^-126 of the value. No zero
// points.
template <int kPair>
inline __device__ uint32_t make_float_pair(uint32_t codes) {
  const uint32_t numbers = kPair < 2 ? codes << (6 - 4 * kPair) : codes >> (4 * kPair - 6);
  return ((codes << (12 - 4 * kPair)) & 0x80008000) | (numbers & 0x01C001C0);
}

template <int kPair>
inline __device__ uint32_t make_pair_of_four_bits(uint32_t codes, uint32_t zero, uint32_t magic) {
  if constexpr (kCodes == kE2m1) return make_float_pair<kPair>(codes);
  return make_pair<kPair>(codes, zero, magic);
}

// What wgmma reads of 64 lines and 64 columns: four steps of 16 columns, four registers each.
struct Fragments {
  uint32_t steps[4][4];
};

// Reads 64 columns of the lines of a warp; `at`: says where 16 bytes of a thread's own line are, by their number in these
// columns; `zeros`: of its two lines by groups.
template <class At>
inline __device__ void read_fragments(Fragments& to, const At& at, int lane, const uint32_t (&zeros)[kZeroGroups][2],
                                      uint32_t magic) {
  if constexpr (kFourBits) {
    uint32_t codes[4];
    load_matrices(codes, at(lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // of lines g, g + 8, and the same 32 columns further
      auto& low = to.steps[i / 2 * 2];
      auto& high = to.steps[i / 2 * 2 + 1];
      const uint32_t zero = zeros[i / 2 * (kZeroGroups - 1)][i % 2];
      low[i % 2] = make_pair_of_four_bits<0>(codes[i], zero, magic);
      low[i % 2 + 2] = make_pair_of_four_bits<1>(codes[i], zero, magic);
      high[i % 2] = make_pair_of_four_bits<2>(codes[i], zero, magic);
      high[i % 2 + 2] = make_pair_of_four_bits<3>(codes[i], zero, magic);
    }
  } else {
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      uint32_t codes[4];
      load_matrices(codes, at(two * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        auto& step = to.steps[two * 2 + i / 2];
        make_pairs(step[i % 2], step[i % 2 + 2], codes[i]);
      }
    }
  }
}

// The same of part `part` of the lines of 128 bytes that `lines` begins.
inline __device__ void make_fragments(Fragments& to, uint32_t lines, int part, int lane,
                                      const uint32_t (&zeros)[kZeroGroups][2], uint32_t magic) {
  constexpr int kEach = kFourBits ? 2 : 4;  // 16 bytes of 64 columns
  read_fragments(to, [&](int number) { return lines + (((part * kEach + number) ^ (lane & 7)) << 4); }, lane, zeros, magic);
}

// --- scales

// Bytes of a tile's numbers of a group, of `kEach` bytes for `kShare` lines: of one of its halves, gates or ups.
template <class S, int kEach, int kShare>
constexpr int kPartBytes = S::kBlocks * kBlock / kShare / (S::kGated ? 2 : 1) * kEach;

// The numbers of a thread's two lines of a block, 16 w + g and 8 further.
template <class S, class Number, int kShare>
inline __device__ void find_numbers(Number (&found)[2], const uint8_t* at, int group, int block, int thread) {
  constexpr int kCount = S::kBlocks * kBlock / kShare;
  const Number* numbers = reinterpret_cast<const Number*>(at) + group * kCount;
  const int warp = thread % kTeam / 32, g = thread % 32 / 4;
  if constexpr (S::kGated) {
    const int place = (block * 4 + warp) * 8 + g;
    found[0] = numbers[place / kShare], found[1] = numbers[(S::kBlocks * kBlock / 2 + place) / kShare];
  } else {
    const int place = block * kBlock + 16 * warp + g;
    found[0] = numbers[place / kShare], found[1] = numbers[(place + 8) / kShare];
  }
}

// What zero points leave of the pairs of a thread's two lines of a block, in the groups of a part's columns.
template <class S>
inline __device__ void find_zeros(uint32_t (&found)[kZeroGroups][2], const uint8_t* at, int part, int block, int thread) {
#pragma unroll
  for (int group = 0; group < kZeroGroups; ++group) {
    found[group][0] = found[group][1] = 0x43084308;  // 8, for codes of 4 bits
    if constexpr (kZeros) {
      uint8_t zeros[2];
      find_numbers<S, uint8_t, 1>(zeros, at, part * 4 / kGroupSteps + group, block, thread);
#pragma unroll
      for (int i = 0; i < 2; ++i) found[group][i] = 0x43004300 | zeros[i] * 0x00010001u;
    }
  }
}

template <class S>
inline __device__ void find_scales(float (&found)[2], const uint8_t* at, bool half, int group, int block, int thread) {
  if constexpr (kScaleBytes == 4) {
    find_numbers<S, float, kScaleLines>(found, at, group, block, thread);
  } else {
    uint16_t numbers[2];
    find_numbers<S, uint16_t, kScaleLines>(numbers, at, group, block, thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found[i] = half ? __half2float(__ushort_as_half(numbers[i])) : __uint_as_float(uint32_t{numbers[i]} << 16);
    }
  }
}

inline __device__ uint32_t twice(float number) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(number)) * 0x00010001u;
}

// The scales of a thread's two lines of a group, for weights that are scaled before they are multiplied.
template <class S>
struct Factors {
  uint32_t high[2], low[2];  // their sum is the scale, so that products are rounded once

  __device__ Factors(const uint8_t* scales, bool half, int group, int block, int thread) {
    float found[2];
    find_scales<S>(found, scales, half, group, block, thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = twice(found[i]);
      low[i] = twice(found[i] - __uint_as_float(high[i] << 16));
    }
  }

  __device__ void multiply(uint32_t (&step)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t rest = scaled_by(step[i], low[i % 2]);
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(step[i]) : "r"(high[i % 2]), "r"(rest));
    }
  }
};

// Multiplies fragments by powers of two, 2^(exponent - 127), and by 2^126, which 4-bit floats lack.
template <class S>
inline __device__ void scale_by_powers(Fragments& to, const uint8_t* exponents, int part, int block, int thread) {
  constexpr int kGroups = 4 / kGroupSteps;  // of 64 columns
  uint8_t found[kGroups][2];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    find_numbers<S, uint8_t, kScaleLines>(found[i], exponents, part * kGroups + i, block, thread);
  }
  const auto multiply = [&](auto factor_of) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      uint32_t& pair = to.steps[i / 4][i % 4];
      pair = scaled_by(pair, factor_of(found[i / 4 / kGroupSteps][i % 2]));
    }
  };
  if (!__any_sync(~0u, (found[0][0] | found[0][1] | found[1][0] | found[1][1]) > 128)) {
    multiply([](uint32_t exponent) { return exponent * 0x00800080u + 0x3F003F00u; });
  } else {  // more than 2^127 at once is no number
    multiply([](uint32_t exponent) { return min(exponent + 126, 254u) * 0x00800080u; });
    multiply([](uint32_t exponent) { return max(static_cast<int>(exponent) - 1, 127) * 0x00800080u; });
  }
}

// Multiplies the fragments of 64 columns, a part of a chunk, by the scales of their groups.
template <class S>
inline __device__ void scale_fragments(Fragments& to, const uint8_t* scales, bool half, int part, int block, int thread) {
  constexpr int kSteps = kGroupSteps < 4 ? kGroupSteps : 4;
  if constexpr (kCodes == kE2m1) {
    scale_by_powers<S>(to, scales, part, block, thread);
  } else if constexpr (kGroup > 0) {
#pragma unroll
    for (int first = 0; first < 4; first += kSteps) {
      const Factors<S> factors(scales, half, (part * 4 + first) / kGroupSteps, block, thread);
#pragma unroll
      for (int step = first; step < first + kSteps; ++step) factors.multiply(to.steps[step]);
    }
  }
}

// Keeps the compiler from giving the registers of an operand to what comes before the wait above it: products that run
// still read them. The assembler must see a use, too: a store that never happens, since `never` is false.
inline __device__ void still_needed(const Fragments& operand, bool never) {
#pragma unroll
  for (const auto& step : operand.steps) {
    asm volatile("{\n.reg .pred never;\nsetp.ne.u32 never, %4, 0;\n@never st.shared.v4.b32 [%4], {%0, %1, %2, %3};\n}" ::"r"(
                     step[0]),
                 "r"(step[1]), "r"(step[2]), "r"(step[3]), "r"(static_cast<uint32_t>(never))
                 : "memory");
  }
}

// The scales of a thread's lines of a tile, where a line has one.
template <class S>
struct LineScales {
  float of[S::kTeamBlocks][2];

  __device__ LineScales(const Scales& with, int size_out, int tile, int thread) {
    const int warp = thread % kTeam / 32, g = thread % 32 / 4, first = tile * S::kBlocks + S::first_block(thread);
#pragma unroll
    for (int block = 0; block < S::kTeamBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int line = S::kGated ? (first + block) * 32 + warp * 8 + g
                                   : (first + block) * kBlock + 16 * warp + g + 8 * i;
        const bool exists = kGroup == 0 && line < size_out;
        const int place = S::kGated && i == 1 ? size_out + line : line;
        of[block][i] = exists ? __ldg(with.of_lines + place) : 0.f;
      }
    }
  }

  template <int kCount>
  __device__ void multiply(float (&sums)[S::kTeamBlocks][kCount]) const {
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int block = 0; block < S::kTeamBlocks; ++block) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[block][k] *= of[block][k / 2 % 2];
      }
    }
  }
};

// Fetches the scales and zero points of a chunk's groups.
template <class S>
inline __device__ void fetch_scales(const Scales& with, uint8_t* slot, int tile, int chunk, uint64_t* filled) {
  if constexpr (kGroup > 0) {
    uint8_t* target = slot + S::kScalesAt;
    fetch_box(target, &with.of_groups, tile * kPartBytes<S, kScaleBytes, kScaleLines>, 0, chunk * S::kGroups, filled,
              kReadOnce);
    if constexpr (kZeros) {
      fetch_box(target + S::kScaleBytesOf, &with.zeros, tile * kPartBytes<S, 1, 1>, 0, chunk * S::kGroups, filled,
                kReadOnce);
    }
  }
}

#else

template <class S>
struct LineScales {
  __device__ LineScales(const Scales&, int, int, int) {}
  template <int kCount>
  __device__ void multiply(float (&)[S::kTeamBlocks][kCount]) const {}
};

template <class S>
inline __device__ void fetch_scales(const Scales&, uint8_t*, int, int, uint64_t*) {}

#endif

// --- on the host

// The map of a weight's lines, whose bytes are codes or elements.
inline CUtensorMap weights_of(const TensorView& weight, int lines) {
  if constexpr (!kCoded) return lines_of(weight, lines);
  require(weight.dtype().bits == 8 && lies(weight, 1, 1), "codes that are not bytes");
  return map_of<2>(weight, {static_cast<uint64_t>(weight.size(1)), static_cast<uint64_t>(weight.size(0))},
                   {static_cast<uint64_t>(weight.stride(0))}, {kLineUnits, static_cast<uint32_t>(lines)}, true);
}

#if CODES

// The map of numbers of groups, of which a chunk's groups and a tile's lines are fetched at once.
template <class S, int kEach, int kShare>
CUtensorMap groups_of(const TensorView& numbers, uint64_t lines) {
  constexpr uint32_t kHalves = S::kGated ? 2 : 1;
  const uint64_t pitch = numbers.size(1) * kEach, part = S::kGated ? lines / 2 / kShare * kEach : pitch;
  return map_of<3>(numbers, {part, kHalves, static_cast<uint64_t>(numbers.size(0))}, {part, pitch},
                   {kPartBytes<S, kEach, kShare>, kHalves, S::kGroups}, true, CU_TENSOR_MAP_SWIZZLE_NONE);
}

#endif

template <class S>
Scales scales_of(const TensorView& scales, const TensorView& zeros, int64_t lines, int64_t inputs) {
  Scales found{};
#if CODES
  if constexpr (kGroup == 0) {
    require(scales.numel() == lines && scales.dtype().bits == 32, "scales of another number of lines");
    found.of_lines = static_cast<const float*>(scales.data_ptr());
  } else {
    require(scales.ndim() == 2 && scales.size(0) * kGroup >= inputs, "scales of too few groups");
    require(scales.size(1) * kScaleLines >= lines, "scales of too few lines");
    require(scales.dtype().bits == kScaleBytes * 8, "scales of another dtype");
    found.of_groups = groups_of<S, kScaleBytes, kScaleLines>(scales, lines);
    found.half = scales.dtype().code == kDLFloat && scales.dtype().bits == 16;
    if constexpr (kZeros) {
      require(zeros.ndim() == 2 && zeros.size(0) == scales.size(0) && zeros.size(1) == scales.size(1), "other zero points");
      found.zeros = groups_of<S, 1, 1>(zeros, lines);
    }
  }
#endif
  return found;
}

}  // namespace
