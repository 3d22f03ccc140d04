#include "attention_impl.cuh"

template cudaError_t trtspec::launch_attend<trtspec::half_t>(const AttendParams&, int,
                                                                 cudaStream_t);
