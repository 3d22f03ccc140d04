#include "linear_impl.cuh"

template cudaError_t trtspec::launch_normed<trtspec::bf16, trtspec::Epilogue::kRope>(const LinearParams&,
                                                                                cudaStream_t);
template cudaError_t trtspec::launch_normed_rope<trtspec::bf16>(const LinearParams&, cudaStream_t);
