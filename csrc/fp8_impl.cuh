// The launcher of the FP8 products for one form of scales; fp8_*.cu instantiate it, one each, so that
// they compile side by side.
#pragma once

#include <algorithm>

#include "trtspec/fp8_linear.cuh"
#include "trtspec/launchers.h"

namespace trtspec {

constexpr int kFp8Warps = 16;

template <bool kGroups, Epilogue E, bool kNorm, int kRows, int kDepth>
cudaError_t launch_fp8_rows(const LinearParams& p, cudaStream_t stream) {
  const auto kernel = fp8_linear<kGroups, E, kNorm, kFp8Warps, kRows, kDepth>;
  const int resting = p.rows * resting_stride<kGroups>(p.k);
  if (resting > kMaxResting<kFp8Warps, kDepth>) return cudaErrorInvalidValue;
  const int shared = kFp8RingBytes<kFp8Warps, kDepth> + resting;
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
    if (p.rows * resting_stride<kGroups>(p.k) <= kMaxResting<kFp8Warps, kFp8Long>) {
      return p.rows <= 4 ? launch_fp8_rows<kGroups, E, kNorm, 4, kFp8Long>(p, stream)
                         : launch_fp8_rows<kGroups, E, kNorm, kFp8Rows, kFp8Long>(p, stream);
    }
  }
  return launch_fp8_rows<kGroups, E, kNorm, kFp8Rows, kFp8Short>(p, stream);
}

template <bool kGroups>
cudaError_t launch_fp8_linear(Epilogue epilogue, const LinearParams& p, cudaStream_t stream) {
  const bool norm = p.norm0 != nullptr;
  switch (epilogue) {
    case Epilogue::kPlain:
      return norm ? launch_fp8<kGroups, Epilogue::kPlain, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kPlain, false>(p, stream);
    case Epilogue::kGated:
      return norm ? launch_fp8<kGroups, Epilogue::kGated, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kGated, false>(p, stream);
    case Epilogue::kRope:
      return norm ? launch_fp8<kGroups, Epilogue::kRope, true>(p, stream)
                  : launch_fp8<kGroups, Epilogue::kRope, false>(p, stream);
    case Epilogue::kResidual:
      return launch_fp8<kGroups, Epilogue::kResidual, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trtspec
