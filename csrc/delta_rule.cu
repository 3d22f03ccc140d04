// Launcher of generations through the gated delta rule.
#include "trtspec/launchers.h"

namespace trtspec {

template <typename T>
cudaError_t launch_delta_generations(const DeltaParams& p, cudaStream_t stream) {
  const auto kernel = delta_generations<T>;
  const int rows = (p.places - kDeltaTaps) / 2 + p.own;
  const size_t shared = delta_shared_bytes(rows, p.own, sizeof(T));
  const cudaError_t raised = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  return launch(kernel, dim3(p.heads, p.requests), dim3(kDeltaThreads), shared, stream, p);
}

template cudaError_t launch_delta_generations<bf16>(const DeltaParams&, cudaStream_t);
template cudaError_t launch_delta_generations<half_t>(const DeltaParams&, cudaStream_t);

}  // namespace trtspec
