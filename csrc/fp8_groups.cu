#include "fp8_impl.cuh"

template cudaError_t trtspec::launch_fp8_linear<true>(Epilogue, const LinearParams&, cudaStream_t);
