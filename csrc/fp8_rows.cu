#include "fp8_impl.cuh"

template cudaError_t trtspec::launch_fp8_linear<false>(Epilogue, const LinearParams&, cudaStream_t);
