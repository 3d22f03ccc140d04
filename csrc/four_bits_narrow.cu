#include "four_bits_impl.cuh"

using trtspec::FourBits;
using trtspec::LinearParams;
using trtspec::WeightTileParams;

template cudaError_t trtspec::launch_four_bits<FourBits::kNarrow>(Epilogue, const LinearParams&, cudaStream_t);
template cudaError_t trtspec::launch_four_bit_tiles<FourBits::kNarrow>(const WeightTileParams&, const void*, int,
                                                                  cudaStream_t);
template cudaError_t trtspec::launch_widen<FourBits::kNarrow>(const LinearParams&, cudaStream_t);
