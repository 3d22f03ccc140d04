// Descriptions of tensors for copies of boxes (`copy_box` in hopper.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace trtspec {

// Boxes of a tensor of three dimensions, the innermost first. What is outside is zeros.
struct BoxedTensor {
  const void* data;
  CUtensorMapDataType type;
  cuuint64_t sizes[3], strides[2];  // strides in bytes, of the second and third dimension
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
};

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                     CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill);

// The driver's function that describes tensors; null where it has none.
inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t raised = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    const bool is_there = raised == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<EncodeTensorMap>(function) : nullptr;
  }();
  return found;
}

inline cudaError_t describe(CUtensorMap* map, const BoxedTensor& x) {
  if (encode_tensor_map() == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode_tensor_map()(
      map, x.type, 3, const_cast<void*>(x.data), x.sizes, x.strides, x.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      x.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace trtspec
