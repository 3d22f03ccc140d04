#include "attention_impl.cuh"

template cudaError_t trtspec::launch_attend_shares<trtspec::bf16>(const AttendParams&, int,
                                                                  cudaStream_t);
template cudaError_t trtspec::launch_attend_clusters<trtspec::bf16>(const AttendParams&, int, int,
                                                                    int, cudaStream_t);
