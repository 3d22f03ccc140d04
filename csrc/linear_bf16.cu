#include "linear_impl.cuh"

template cudaError_t trtspec::launch_linear<trtspec::bf16>(Epilogue, const LinearParams&,
                                                           cudaStream_t);
template cudaError_t trtspec::launch_largest<trtspec::bf16>(const LinearParams&, const LargestParams&,
                                                    cudaStream_t);
