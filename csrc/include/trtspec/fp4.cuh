// MXFP4 weights: numbers of 4 bits (e2m1), 32 of which share a power of two (e8m0).
//
// Eight rows are a group, and 64 columns a block. A group has its rows' parts of a block together, 32 bytes
// each: 8 words, of which word i has columns 4 i … 4 i + 3 and 32 + 4 i … 35 + 4 i in four pairs. The second
// number of a pair is 16 bits behind the first one, and the word is a ring. The first one's sign, and then its
// other bits from the highest on, are in these bits:
//
//   columns 4 i, 4 i + 1            15;  8, 7, 6       where a bf16 has them
//   columns 4 i + 2, 4 i + 3        18;  11, 10, 9     3 bits further left
//   columns 32 + 4 i, 33 + 4 i      21;  14, 13, 12    6 bits further left
//   columns 34 + 4 i, 35 + 4 i      3;   1, 0, 4       one multiplication moves them
//
// `ops/experts/fp4.py` writes them so.
#pragma once

#include "pieces.cuh"

namespace trtspec {

constexpr int kFp4Step = 128;  // columns that four lanes read of a weight row at once: two blocks
// Bytes that a group has of a step.
constexpr int kGroupCodes = kFp4Step / 2 * 8, kGroupScales = 4 * 8;
constexpr uint32_t kFp4Bits = 0x81c081c0u, kFp4LastBits = 0x001b001bu;
constexpr uint32_t kFp4Move = (1 << 12) + (1 << 7) + (1 << 2);

// A bf16 with e2m1's exponent and mantissa is 2^126 times too small, and `power` is 2^126 times the
// columns' scale, twice.
__device__ inline uint32_t scale_fp4(uint32_t pair, uint32_t power) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(power));
  return pair;
}

__host__ __device__ constexpr int fp4_steps(int k) { return (k + kFp4Step - 1) / kFp4Step; }

// Lane t of four reads 16 bytes of row g of a group: where they are in a step, and which column the `piece`th
// eight of its 32 begin with. Two pieces are of a block's first half, and two of its second.
__device__ inline int fp4_place(int g, int t) { return t / 2 * 256 + g * 32 + t % 2 * 16; }
__device__ inline int fp4_column(int t, int piece) {
  return t / 2 * 64 + piece / 2 * 32 + t % 2 * 16 + piece % 2 * 8;
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
