// Launchers of the collectives.
#include <algorithm>

#include "trtspec/launchers.h"

namespace trtspec {

constexpr int kThreads = 128, kMaxBlocks = 264;  // all of them run at once: each waits for its twin

template <typename T, bool kSums>
cudaError_t launch_exchange(const CollectiveParams& p, cudaStream_t stream) {
  const int blocks = std::min((p.packets + kThreads - 1) / kThreads, kMaxBlocks);
  return launch(exchange<T, kSums>, blocks, kThreads, 0, stream, p);
}

template <typename T>
cudaError_t launch_all_reduce(const CollectiveParams& p, cudaStream_t stream) {
  return launch_exchange<T, true>(p, stream);
}

cudaError_t launch_all_gather(const CollectiveParams& p, cudaStream_t stream) {
  return launch_exchange<float, false>(p, stream);
}

template cudaError_t launch_all_reduce<float>(const CollectiveParams&, cudaStream_t);
template cudaError_t launch_all_reduce<bf16>(const CollectiveParams&, cudaStream_t);
template cudaError_t launch_all_reduce<half_t>(const CollectiveParams&, cudaStream_t);

}  // namespace trtspec
