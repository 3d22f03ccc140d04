// Which tensors the kernels may read as rows of one piece, whatever apache-tvm-ffi's version says.
#pragma once

#include <tvm/ffi/container/tensor.h>

namespace trtspec {

// Whether dimensions `first` … of x have no gaps. As in torch, a dimension of size 1 may have any
// stride and a tensor without elements any strides; TensorView::IsContiguous minds the latter's
// before apache-tvm-ffi 0.1.12.
inline bool is_dense(const tvm::ffi::TensorView& x, int first = 0) {
  if (x.numel() == 0) return true;
  int64_t step = 1;
  for (int i = x.ndim() - 1; i >= first; --i) {
    if (x.size(i) != 1 && x.stride(i) != step) return false;
    step *= x.size(i);
  }
  return true;
}

}  // namespace trtspec
