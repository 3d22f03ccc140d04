// The launcher of the FP8 products for one form of scales; fp8_*.cu instantiate it, one each, so that
// they compile side by side.
#pragma once

#include <algorithm>

#include "trtspec/fp8_linear.cuh"
#include "trtspec/launchers.h"

namespace trtspec {

constexpr int kFp8Warps = 16;

template <bool kGroups, Epilogue E, bool kNorm, int kRows>
cudaError_t launch_fp8_rows(const LinearParams& p, cudaStream_t stream) {
  const auto kernel = fp8_linear<kGroups, E, kNorm, kFp8Warps, kRows>;
  const int resting = p.rows * resting_stride<kGroups>(p.k);
  if (resting > kMaxResting<kGroups, kFp8Warps>) return cudaErrorInvalidValue;
  const int shared = kFp8RingBytes<kGroups, kFp8Warps> + resting;
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int tiles = (p.n + kTile - 1) / kTile;
  return launch(kernel, dim3(std::min(tiles, multiprocessors)), dim3(kFp8Warps * 32), shared,
                stream, p);
}

template <bool kGroups, Epilogue E, bool kNorm>
cudaError_t launch_fp8(const LinearParams& p, cudaStream_t stream) {
  if constexpr (!kGroups) {
    if (p.rows <= 4) return launch_fp8_rows<kGroups, E, kNorm, 4>(p, stream);
  }
  return launch_fp8_rows<kGroups, E, kNorm, kFp8Rows>(p, stream);
}

template <bool kGroups>
cudaError_t launch_fp8_linear(Epilogue epilogue, const LinearParams& p, cudaStream_t stream) {
  const bool norm = p.norm0 != nullptr;
  switch (epilogue) {
    case Epilogue::kPlain:
      return norm ? launch_fp8<kGroups, Epilogue::kPlain, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kPlain, false>(p, stream);
    case Epilogue::kSwiGLU:
      return norm ? launch_fp8<kGroups, Epilogue::kSwiGLU, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kSwiGLU, false>(p, stream);
    case Epilogue::kRope:
      return norm ? launch_fp8<kGroups, Epilogue::kRope, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kRope, false>(p, stream);
    case Epilogue::kResidual:
      return launch_fp8<kGroups, Epilogue::kResidual, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trtspec
