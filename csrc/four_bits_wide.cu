#include "four_bits_impl.cuh"

using trtspec::FourBits;
using trtspec::FourBitTileParams;
using trtspec::LinearParams;

template cudaError_t trtspec::launch_four_bits<FourBits::kWide>(Epilogue, const LinearParams&, cudaStream_t);
template cudaError_t trtspec::launch_four_bit_tiles<FourBits::kWide>(const FourBitTileParams&, const void*, int,
                                                                  cudaStream_t);
template cudaError_t trtspec::launch_widen<FourBits::kWide>(const LinearParams&, cudaStream_t);
