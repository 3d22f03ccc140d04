// The launcher of the attention kernel for one element type; attention_*.cu instantiate it.
#pragma once

#include "trtspec/launchers.h"

namespace trtspec {

template <typename T, int kTiles>
cudaError_t launch_attend_as(const AttendParams& p, int shares, cudaStream_t stream) {
  const auto kernel = paged_attention<T, kTiles>;
  constexpr int shared = attend_shared_bytes<kTiles>();
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  return launch(kernel, dim3(shares), dim3(kAttendWarps * 32), shared, stream, p);
}

template <typename T>
cudaError_t launch_attend(const AttendParams& p, int shares, cudaStream_t stream) {
  return p.rows * p.per_kv <= 16 ? launch_attend_as<T, 1>(p, shares, stream)
                                 : launch_attend_as<T, 2>(p, shares, stream);
}

}  // namespace trtspec
