#include "linear_impl.cuh"

template cudaError_t trtspec::launch_linear<trtspec::bf16, trtspec::Held::kFp8Rows>(
    Epilogue, const LinearParams&, cudaStream_t);
