// The launcher of attention of prompts.
#include <type_traits>

#include "trtspec/launchers.h"
#include "trtspec/tensor_map.h"

namespace trtspec {
namespace {

// A tensor whose boxes of `rows` times `heads` times 64 columns are copied.
template <typename T>
cudaError_t describe(CUtensorMap* map, const PromptTensor& x, int dim, int heads, int rows) {
  constexpr auto type = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const BoxedTensor of = {
      x.data,
      type,
      {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(x.heads), static_cast<cuuint64_t>(x.rows)},
      {static_cast<cuuint64_t>(x.head * sizeof(T)), static_cast<cuuint64_t>(x.row * sizeof(T))},
      {64, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(rows)},
      CU_TENSOR_MAP_SWIZZLE_128B};
  return describe(map, of);
}

template <typename T, int kDim>
cudaError_t launch_prompts(const PromptParams& p, const PromptTensors& x, cudaStream_t stream) {
  PromptMaps maps;
  cudaError_t raised = describe<T>(&maps.q, x.q, kDim, p.per_kv, p.tile_rows);
  if (raised == cudaSuccess) raised = describe<T>(&maps.k, x.k, kDim, 1, p.box_keys);
  if (raised == cudaSuccess) raised = describe<T>(&maps.v, x.v, kDim, 1, p.box_keys);
  if (raised != cudaSuccess) return raised;
  const auto kernel = prompt_attention<T, kDim>;
  constexpr int shared = sizeof(PromptTiles<kDim>) + 1024;  // it begins at a multiple of 1,024
  int device = 0, generation = 0, processors = 0;
  raised = cudaGetDevice(&device);
  if (raised == cudaSuccess) {
    raised = cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (raised == cudaSuccess) {
    raised = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (raised == cudaSuccess && generation != 9) raised = cudaErrorNotSupported;  // it is empty there
  if (raised == cudaSuccess) {
    raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  }
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  const int items = p.num_tiles * p.kv_heads * p.parts.most;
  return launch(kernel, dim3(items < processors ? items : processors), dim3(kPromptThreads), shared,
                stream, p, maps);
}

}  // namespace

template <typename T>
cudaError_t launch_attend_prompts(const PromptParams& p, const PromptTensors& x, int dim,
                                  cudaStream_t stream) {
  return dim == 64 ? launch_prompts<T, 64>(p, x, stream) : launch_prompts<T, 128>(p, x, stream);
}

template cudaError_t launch_attend_prompts<bf16>(const PromptParams&, const PromptTensors&, int,
                                                 cudaStream_t);
template cudaError_t launch_attend_prompts<half_t>(const PromptParams&, const PromptTensors&, int,
                                                   cudaStream_t);

}  // namespace trtspec
