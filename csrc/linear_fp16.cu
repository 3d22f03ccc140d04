#include "linear_impl.cuh"

template cudaError_t trtspec::launch_linear<trtspec::half_t>(Epilogue, const LinearParams&,
                                                             cudaStream_t);
