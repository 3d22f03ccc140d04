// Functions of floats that are one instruction each.
#pragma once

namespace trtspec {

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two scores, NaN where one is: a NaN must reach the output.
__device__ inline float better(float score, float than) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(score), "f"(than));
  return y;
}

}  // namespace trtspec
