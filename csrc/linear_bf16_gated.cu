#include "linear_impl.cuh"

template cudaError_t trtspec::launch_normed<trtspec::bf16, trtspec::Epilogue::kGated>(const LinearParams&,
                                                                                 cudaStream_t);
