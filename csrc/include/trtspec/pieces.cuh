// Words of 16 bytes, and pairs of bf16.
#pragma once

#include "common.cuh"

namespace trtspec {

// The ith of the four words of a piece of 16 bytes.
__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ inline uint32_t pair_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace trtspec
