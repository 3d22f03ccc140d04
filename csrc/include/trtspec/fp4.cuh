// MXFP4 weights: numbers of 4 bits (e2m1), 32 of which share a power of two (e8m0).
//
// Of a block of 64 columns word i (0 … 7) has columns 4 i … 4 i + 3 and 32 + 4 i … 32 + 4 i + 3, in four
// pairs. Each half of the word has one of each pair. A bf16 has its sign in bit 15, and the lowest bits of
// its exponent and the highest of its mantissa in bits 8 to 6. Of the first pair codes are there already, of
// the second and the third 3 and 6 bits further left (the word is a ring), and those of the fourth are in
// the bits left, from where one multiplication moves them.
//
// The blocks of 8 rows lie together, in every second one in the order 2, 3, 0, 1, 6, 7, 4, 5.
// `ops/experts/fp4.py` writes all this.
#pragma once

#include "common.cuh"

namespace trtspec {

constexpr int kFp4Step = 128;  // columns that four lanes read of a weight row at once
constexpr uint32_t kFp4Bits = 0x81c081c0u, kFp4LastBits = 0x001b001bu;
constexpr uint32_t kFp4Move = (1 << 12) + (1 << 7) + (1 << 2);

// A bf16 with e2m1's exponent and mantissa is 2^126 times too small, and `power` is 2^126 times the
// columns' scale, twice.
__device__ inline uint32_t scale_fp4(uint32_t pair, uint32_t power) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(power));
  return pair;
}

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The first two pairs of a word (columns of the block's first half), or the others.
template <bool kHigh>
__device__ inline uint2 widen_fp4(uint32_t word, uint32_t power) {
  const uint32_t first = kHigh ? __funnelshift_r(word, word, 6) : word;
  const uint32_t second = kHigh ? (word & kFp4LastBits) * kFp4Move : __funnelshift_r(word, word, 3);
  return {scale_fp4(first & kFp4Bits, power), scale_fp4(second & kFp4Bits, power)};
}

// 2^126 times the power of two of one of four e8m0 codes, which `fp4_selector` says, twice. (No code is of
// 2^2 and more.)
__device__ inline int fp4_selector(int index) { return 0x4040 + index * 0x0101; }
__device__ inline uint32_t fp4_power(uint32_t codes, int selector) {
  return __byte_perm(codes, 0, selector) * 0x80u + 0x3f003f00u;
}

}  // namespace trtspec
