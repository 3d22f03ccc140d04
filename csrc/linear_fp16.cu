#include "linear_impl.cuh"

template cudaError_t trtspec::launch_linear<trtspec::half_t>(Epilogue, const LinearParams&,
                                                             cudaStream_t);
template cudaError_t trtspec::launch_largest<trtspec::half_t>(const LinearParams&, const LargestParams&,
                                                    cudaStream_t);
