// What Python's views of the kernels share (bindings_*.cu), through apache-tvm-ffi. Checks of shapes are in
// trtspec/ops; there is only what would read or write outside a tensor.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "trtspec/dense.h"
#include "trtspec/launchers.h"

namespace bindings {

using trtspec::is_dense;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline void check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << "trtspec kernels: " << what;
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "trtspec kernels: " << cudaGetErrorString(error);
  }
}

inline cudaStream_t stream_of(const TensorView& x) {
  const DLDevice device = x.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline void* data(const Optional<TensorView>& x) {
  return x.has_value() ? x.value().data_ptr() : nullptr;
}

inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Calls `run` with a value of x's element type, one of 16 bits.
template <typename Run>
void by_half_type(const TensorView& x, Run run) {
  const DLDataType type = x.dtype();
  if (type.code == kDLBfloat) {
    check(run(trtspec::bf16()));
  } else {
    check(type.code == kDLFloat && type.bits == 16, "bfloat16 or float16");
    check(run(trtspec::half_t()));
  }
}

// Calls `run` with the form that records of these bytes have.
template <typename Run>
cudaError_t by_form(int record, Run run) {
  using trtspec::FourBits;
  constexpr FourBits kWide = FourBits::kWide, kNarrow = FourBits::kNarrow, kFloats = FourBits::kFloats;
  switch (record) {
    case trtspec::kFourBitRecord<kWide>: return run(std::integral_constant<FourBits, kWide>());
    case trtspec::kFourBitRecord<kNarrow>: return run(std::integral_constant<FourBits, kNarrow>());
    case trtspec::kFourBitRecord<kFloats>: return run(std::integral_constant<FourBits, kFloats>());
  }
  return cudaErrorInvalidValue;
}

// Those of rows that records of these bytes have; null: none.
inline const float* row_scales(int record, const Optional<TensorView>& scales, int64_t rows) {
  const bool has_scales = record == trtspec::kFourBitRecord<trtspec::FourBits::kFloats>;
  check(scales.has_value() == has_scales, "NVFP4 weights have scales of rows, integers none");
  if (!has_scales) return nullptr;
  const TensorView& of = scales.value();
  check(is_dense(of) && of.numel() == rows && of.dtype().bits == 32, "a scale in float32 for each row");
  return static_cast<const float*>(of.data_ptr());
}

}  // namespace bindings
