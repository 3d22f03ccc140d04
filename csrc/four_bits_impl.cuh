// The launchers of the products with weights of 4 bits, for one form of scales; four_bits_*.cu instantiate
// it, one each, so that they compile side by side.
#pragma once

#include <algorithm>

#include "trtspec/four_bit_tiles.cuh"
#include "trtspec/launchers.h"
#include "weight_tiles_impl.cuh"

namespace trtspec {

template <FourBits F, Epilogue E, bool kNorm, int kTiles, int kColumns>
cudaError_t launch_four_bit_tiles(const LinearParams& p, int multiprocessors, cudaStream_t stream) {
  using Shared = FourBitShared<F, kTiles, kColumns>;
  const auto kernel = four_bit_linear<F, E, kNorm, kTiles, kColumns>;
  const int shared = Shared::kRing + (kNorm ? p.rows * (p.k * 2 + kPad) : 0);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  const int turns = (p.n / kTile + kTiles - 1) / kTiles;
  return launch(kernel, dim3(std::min(turns, multiprocessors)), dim3(kFourBitWarps * 32), shared, stream, p);
}

template <FourBits F, Epilogue E, bool kNorm>
cudaError_t launch_four_bits_of(const LinearParams& p, cudaStream_t stream) {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (p.rows > 8) {  // normed rows leave room for a tile alone
    return launch_four_bit_tiles<F, E, kNorm, kNorm ? 1 : 2, 2>(p, count, stream);
  }
  // Two tiles share rows and barriers, if no block gets much more to do.
  auto turns = [count](int tiles) { return (tiles + count - 1) / count; };
  const int tiles = p.n / kTile;
  if (tiles > count && 2 * turns((tiles + 1) / 2) <= turns(tiles) + 1) {
    return launch_four_bit_tiles<F, E, kNorm, 2, 1>(p, count, stream);
  }
  return launch_four_bit_tiles<F, E, kNorm, 1, 1>(p, count, stream);
}

template <FourBits F>
cudaError_t launch_four_bits(Epilogue epilogue, const LinearParams& p, cudaStream_t stream) {
  const bool norm = p.norm0 != nullptr;
  switch (epilogue) {
    case Epilogue::kPlain:
      return norm ? launch_four_bits_of<F, Epilogue::kPlain, true>(p, stream)
                  : launch_four_bits_of<F, Epilogue::kPlain, false>(p, stream);
    case Epilogue::kRope:
      return norm ? launch_four_bits_of<F, Epilogue::kRope, true>(p, stream)
                  : launch_four_bits_of<F, Epilogue::kRope, false>(p, stream);
    case Epilogue::kGated:
      return norm ? launch_four_bits_of<F, Epilogue::kGated, true>(p, stream) : cudaErrorInvalidValue;
    case Epilogue::kResidual:
      return launch_four_bits_of<F, Epilogue::kResidual, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

template <FourBits F>
cudaError_t launch_four_bit_tiles(const WeightTileParams& p, const void* weight, int tile_rows,
                                  cudaStream_t stream) {
  using Form = FourBitForm<F>;
  constexpr cuuint32_t kWords = Form::kRecord / 4;
  const cuuint64_t steps = p.k / kWeightStep, bytes = Form::kRecord;
  const auto records = [&](cuuint32_t outs) {
    return BoxedTensor{weight,
                       CU_TENSOR_MAP_DATA_TYPE_UINT32,
                       {kWords, steps, static_cast<cuuint64_t>(p.n / 8)},
                       {bytes, bytes * steps},
                       {kWords, 1, outs / 8},
                       CU_TENSOR_MAP_SWIZZLE_NONE};
  };
  return launch_weight_tiles<Form>(p, records, tile_rows, stream);
}

template <FourBits F>
cudaError_t launch_widen(const LinearParams& p, cudaStream_t stream) {
  const int records = p.n / 8 * (p.k / kFourBitStep), warps = 8;
  return launch(widen_records<F>, dim3((records + warps - 1) / warps), dim3(warps * 32), 0, stream, p);
}

}  // namespace trtspec
