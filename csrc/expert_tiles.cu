#include "trtspec/expert_tiles.cuh"
#include "trtspec/launchers.h"

namespace trtspec {

template <typename Codes>
cudaError_t launch_tiles_of(bool is_gated, TiledExpertParams p, cudaStream_t stream) {
  const auto kernel = is_gated ? expert_tiles<Codes, true> : expert_tiles<Codes, false>;
  int device = 0, multiprocessors = 0, room = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  room -= kTiledExperts * static_cast<int>(sizeof(int));  // last_tiles
  p.tile_rows = 8 * Codes::kEights;
  while (p.tile_rows > 8 && tile_shared(p.k, p.tile_rows) > room) p.tile_rows -= 8;
  const int shared = tile_shared(p.k, p.tile_rows);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  return launch(kernel, dim3(multiprocessors), dim3(kTiledThreads), shared, stream, p);
}

cudaError_t launch_expert_tiles(bool is_gated, const TiledExpertParams& p, cudaStream_t stream) {
  return launch_tiles_of<PowerCodes>(is_gated, p, stream);
}

template <FourBits F>
cudaError_t launch_record_tiles(bool is_gated, const TiledExpertParams& p, cudaStream_t stream) {
  return launch_tiles_of<RecordCodes<F>>(is_gated, p, stream);
}

template cudaError_t launch_record_tiles<FourBits::kWide>(bool, const TiledExpertParams&, cudaStream_t);
template cudaError_t launch_record_tiles<FourBits::kNarrow>(bool, const TiledExpertParams&, cudaStream_t);
template cudaError_t launch_record_tiles<FourBits::kFloats>(bool, const TiledExpertParams&, cudaStream_t);

}  // namespace trtspec
