// The launchers of the attention kernels for one element type; attention_*.cu instantiate it.
#pragma once

#include "trtspec/launchers.h"

namespace trtspec {

template <typename T, int kTiles>
cudaError_t launch_shares_as(const AttendParams& p, int shares, cudaStream_t stream) {
  const auto kernel = share_attention<T, kTiles>;
  constexpr int shared = attend_shared_bytes<kShareDim, kTiles, kShareStages>();
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  return launch(kernel, dim3(shares), dim3(kAttendWarps * 32), shared, stream, p);
}

template <typename T>
cudaError_t launch_attend_shares(const AttendParams& p, int shares, cudaStream_t stream) {
  return p.rows * p.per_kv <= 16 ? launch_shares_as<T, 1>(p, shares, stream)
                                 : launch_shares_as<T, 2>(p, shares, stream);
}

template <typename T, int kDim, int kTiles, int kSize>
cudaError_t launch_clusters_as(const AttendParams& p, cudaStream_t stream) {
  const auto kernel = cluster_attention<T, kDim, kTiles, kSize>;
  constexpr int shared = attend_shared_bytes<kDim, kTiles, kClusterStages>();
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  return launch_clusters(kernel, dim3(p.requests * p.kv_heads * kSize), kSize,
                         dim3(kAttendWarps * 32), shared, stream, p);
}

template <typename T, int kDim, int kTiles>
cudaError_t launch_clusters_of(const AttendParams& p, int size, cudaStream_t stream) {
  return size == 2 ? launch_clusters_as<T, kDim, kTiles, 2>(p, stream)
                   : launch_clusters_as<T, kDim, kTiles, 4>(p, stream);
}

template <typename T>
cudaError_t launch_attend_clusters(const AttendParams& p, int dim, int size, cudaStream_t stream) {
  if (p.rows * p.per_kv <= 16) {
    return dim == 64 ? launch_clusters_of<T, 64, 1>(p, size, stream)
                     : launch_clusters_of<T, 128, 1>(p, size, stream);
  }
  return dim == 64 ? launch_clusters_of<T, 64, 2>(p, size, stream)
                   : launch_clusters_of<T, 128, 2>(p, size, stream);
}

}  // namespace trtspec
