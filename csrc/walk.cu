// Launchers of the walk over a block's drafts.
#include "trtspec/launchers.h"

namespace trtspec {

template <typename T, int kRank>
cudaError_t launch_walk_of(const WalkParams& p, int blocks, cudaStream_t stream) {
  const auto kernel = walk_markov<T, kRank>;
  const int shared = p.chunk * (kRank * 2 + kPad + 2 * p.batch * static_cast<int>(sizeof(T)));
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  return launch(kernel, dim3(blocks), dim3(kWalkWarps * 32), shared, stream, p);
}

template <typename T>
cudaError_t launch_walk(const WalkParams& p, int rank, int blocks, cudaStream_t stream) {
  switch (rank) {
    case 64:
      return launch_walk_of<T, 64>(p, blocks, stream);
    case 128:
      return launch_walk_of<T, 128>(p, blocks, stream);
    case 256:
      return launch_walk_of<T, 256>(p, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

template cudaError_t launch_walk<bf16>(const WalkParams&, int, int, cudaStream_t);
template cudaError_t launch_walk<half_t>(const WalkParams&, int, int, cudaStream_t);

}  // namespace trtspec
