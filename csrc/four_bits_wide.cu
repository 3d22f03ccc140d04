#include "four_bits_impl.cuh"

using trtspec::FourBits;
using trtspec::LinearParams;
using trtspec::WeightTileParams;

template cudaError_t trtspec::launch_four_bits<FourBits::kWide>(Epilogue, const LinearParams&, cudaStream_t);
template cudaError_t trtspec::launch_four_bit_tiles<FourBits::kWide>(const WeightTileParams&, const void*, int,
                                                                  cudaStream_t);
template cudaError_t trtspec::launch_widen<FourBits::kWide>(const LinearParams&, cudaStream_t);
