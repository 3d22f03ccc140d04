// The launcher of products of more rows with FP8 weights that have scales of groups.
#include "trtspec/launchers.h"
#include "weight_tiles_impl.cuh"

namespace trtspec {

cudaError_t launch_fp8_tiles(const WeightTileParams& p, const void* weight, int tile_rows, cudaStream_t stream) {
  const cuuint64_t columns = p.k;
  const auto codes = [&](cuuint32_t outs) {
    return BoxedTensor{weight,
                       CU_TENSOR_MAP_DATA_TYPE_UINT8,
                       {columns, 1, static_cast<cuuint64_t>(p.n)},
                       {columns, columns},
                       {kWeightStep, 1, outs},
                       CU_TENSOR_MAP_SWIZZLE_128B};
  };
  return launch_weight_tiles<Fp8Form>(p, codes, tile_rows, stream);
}

}  // namespace trtspec
