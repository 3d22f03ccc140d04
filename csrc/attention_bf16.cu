#include "attention_impl.cuh"

template cudaError_t trtspec::launch_attend<trtspec::bf16>(const AttendParams&, int, cudaStream_t);
