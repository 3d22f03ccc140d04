// The launcher of attention of prompts.
#include <type_traits>

#include "trtspec/launchers.h"

namespace trtspec {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function that describes tensors; null where it has none.
Encode encode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t raised = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    const bool is_there = raised == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// A tensor whose boxes of `rows` times `heads` times 64 columns are copied. What is outside is zeros.
template <typename T>
bool describe(CUtensorMap* map, const PromptTensor& x, int dim, int heads, int rows) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(x.heads),
                               static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(x.head * sizeof(T)),
                                 static_cast<cuuint64_t>(x.row * sizeof(T))};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  constexpr auto type = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode()(map, type, 3, const_cast<void*>(x.data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int kDim>
cudaError_t launch_prompts(const PromptParams& p, const PromptTensors& x, cudaStream_t stream) {
  if (encode() == nullptr) return cudaErrorNotSupported;
  PromptMaps maps;
  const bool are_described = describe<T>(&maps.q, x.q, kDim, p.per_kv, p.tile_rows) &&
                             describe<T>(&maps.k, x.k, kDim, 1, p.box_keys) &&
                             describe<T>(&maps.v, x.v, kDim, 1, p.box_keys);
  if (!are_described) return cudaErrorInvalidValue;
  const auto kernel = prompt_attention<T, kDim>;
  constexpr int shared = sizeof(PromptTiles<kDim>) + 1024;  // it begins at a multiple of 1,024
  int device = 0, generation = 0, processors = 0;
  cudaError_t raised = cudaGetDevice(&device);
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
