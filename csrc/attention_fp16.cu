#include "attention_impl.cuh"

template cudaError_t trtspec::launch_attend_clusters<trtspec::half_t>(const AttendParams&, int,
                                                                    ClusterShape, cudaStream_t);
