// The launchers of the attention kernels for one element type; attention_*.cu instantiate it.
#pragma once

#include "trtspec/launchers.h"
#include "trtspec/narrow_attention.cuh"
#include "trtspec/wide_attention.cuh"

namespace trtspec {

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
struct AttentionKernel {
  static constexpr auto kKernel = wide_attention<T, kDim, kTiles, kSize, kWarps>;
  static constexpr int kShared = WidePlaces<kDim, kTiles, kSize, kWarps>::kBytes;
};

template <typename T, int kTiles, int kSize, int kWarps>
struct AttentionKernel<T, 64, kTiles, kSize, kWarps> {
  static constexpr auto kKernel = narrow_attention<T, 64, kTiles, kSize, kWarps>;
  static constexpr int kShared = NarrowPlaces<64, kTiles, kSize, kWarps>::kBytes;
};

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
cudaError_t launch_clusters_as(const AttendParams& p, cudaStream_t stream) {
  using Kernel = AttentionKernel<T, kDim, kTiles, kSize, kWarps>;
  constexpr auto kernel = Kernel::kKernel;
  constexpr int shared = Kernel::kShared;
  static_assert(shared <= 224 * 1024, "a block has no more shared memory, with some for its variables");
  cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  if constexpr (kSize > 8) {
    raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (raised != cudaSuccess) return raised;
    static const bool has_room = clusters_at_once(kernel, kSize, kWarps * 32, shared) > 0;  // not every GPU has
    if (!has_room) return launch_clusters_as<T, kDim, kTiles, 8, 8>(p, stream);
  }
  return launch_clusters(kernel, dim3(p.requests * parts_of(p) * p.kv_heads * kSize), kSize, dim3(kWarps * 32),
                         shared, stream, p);
}

template <typename T, int kDim, int kTiles>
cudaError_t launch_clusters_of(const AttendParams& p, ClusterShape shape, cudaStream_t stream) {
  const auto [size, warps] = shape;
  if (warps == 4) {
    if constexpr (kDim == 64) {
      if (size == 16) return launch_clusters_as<T, kDim, kTiles, 16, 4>(p, stream);
      if (size == 2) return launch_clusters_as<T, kDim, kTiles, 2, 4>(p, stream);
    }
    return size == 1 ? launch_clusters_as<T, kDim, kTiles, 1, 4>(p, stream)
                     : cudaErrorInvalidValue;
  }
  return size == 1   ? launch_clusters_as<T, kDim, kTiles, 1, 8>(p, stream)
         : size == 2 ? launch_clusters_as<T, kDim, kTiles, 2, 8>(p, stream)
         : size == 4 ? launch_clusters_as<T, kDim, kTiles, 4, 8>(p, stream)
         : size == 8 ? launch_clusters_as<T, kDim, kTiles, 8, 8>(p, stream)
                     : cudaErrorInvalidValue;
}

// Of heads of 256 eight warps would not find room for their keys.
template <typename T>
cudaError_t launch_wide_clusters(const AttendParams& p, ClusterShape shape, cudaStream_t stream) {
  const auto [size, warps] = shape;
  return warps != 4   ? cudaErrorInvalidValue
         : size == 1 ? launch_clusters_as<T, 256, 1, 1, 4>(p, stream)
         : size == 2 ? launch_clusters_as<T, 256, 1, 2, 4>(p, stream)
         : size == 4 ? launch_clusters_as<T, 256, 1, 4, 4>(p, stream)
         : size == 8 ? launch_clusters_as<T, 256, 1, 8, 4>(p, stream)
                     : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_attend_clusters(const AttendParams& p, int dim, ClusterShape shape,
                                   cudaStream_t stream) {
  if (dim == 256) return launch_wide_clusters<T>(p, shape, stream);
  if (p.part_rows * p.per_kv <= 16) {
    return dim == 64 ? launch_clusters_of<T, 64, 1>(p, shape, stream)
                     : launch_clusters_of<T, 128, 1>(p, shape, stream);
  }
  return dim == 64 ? launch_clusters_of<T, 64, 2>(p, shape, stream)
                   : launch_clusters_of<T, 128, 2>(p, shape, stream);
}

}  // namespace trtspec
