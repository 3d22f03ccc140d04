#include "linear_impl.cuh"

// In linear_bf16_gated.cu and linear_bf16_rope.cu.
extern template cudaError_t trtspec::launch_normed<trtspec::bf16, trtspec::Epilogue::kGated>(const LinearParams&,
                                                                                        cudaStream_t);
extern template cudaError_t trtspec::launch_normed<trtspec::bf16, trtspec::Epilogue::kRope>(const LinearParams&,
                                                                                       cudaStream_t);
extern template cudaError_t trtspec::launch_normed_rope<trtspec::bf16>(const LinearParams&, cudaStream_t);

template cudaError_t trtspec::launch_linear<trtspec::bf16>(Epilogue, const LinearParams&,
                                                           cudaStream_t);
template cudaError_t trtspec::launch_largest<trtspec::bf16>(const LinearParams&, const LargestParams&,
                                                    cudaStream_t);
