// The launcher of the products of `weight_tiles.cuh`, for one form of weights.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "trtspec/tensor_map.h"
#include "trtspec/weight_tiles.cuh"

namespace trtspec {

// How a product is cut: tiles of outputs, and K among the blocks of a cluster.
struct WeightCut {
  int parts, steps;  // of a part
  float time;
};

constexpr int kMaxWeightParts = 8;  // a cluster's blocks

// Blocks of clusters of `parts` that run at once on a GPU.
template <typename Form, int kRows, int kTiles>
int blocks_at_once(int device, int parts) {
  static std::mutex guard;
  static std::map<int, std::array<int, kMaxWeightParts + 1>> known;
  const std::lock_guard<std::mutex> lock(guard);
  const auto [found, is_new] = known.try_emplace(device);
  for (int size = 1; is_new && size <= kMaxWeightParts; ++size) {
    found->second[size] = size * clusters_at_once(weight_tiles<Form, kRows, kTiles>, size, kWeightThreads + 128,
                                                  WeightTile<Form, kRows, kTiles>::kShared);
  }
  return found->second[parts];
}

// The cut that takes the least time, in steps of 128 outputs: by measurement on an H200 a step of 256 takes
// 1.85 of them, and a block some more for its start and its end.
template <typename Form, int kRows, int kTiles>
WeightCut best_cut(const WeightTileParams& p, int device) {
  const int steps = p.k / kWeightStep, outs = WeightTile<Form, kRows, kTiles>::kOuts;
  const int tiles = (p.n + outs - 1) / outs * ((p.rows + kRows - 1) / kRows);
  WeightCut best = {};
  for (int wanted = 1; wanted <= std::min(kMaxWeightParts, steps); ++wanted) {
    const int of_part = (steps + wanted - 1) / wanted, parts = (steps + of_part - 1) / of_part;
    const int room = blocks_at_once<Form, kRows, kTiles>(device, parts);
    if (room == 0) continue;
    const int turns = (tiles * parts + room - 1) / room;
    const float time = turns * (of_part * (kTiles == 1 ? 1.0f : 1.85f) + 5.0f + parts);
    if (best.parts == 0 || time < best.time) best = {parts, of_part, time};
  }
  return best;
}

// weight(outs): the weight in boxes of a step of so many outputs.
template <typename Form, int kRows, int kTiles, typename Weight>
cudaError_t launch_cut(WeightTileParams p, const Weight& weight, const WeightCut& cut, cudaStream_t stream) {
  using Tile = WeightTile<Form, kRows, kTiles>;
  const auto kernel = weight_tiles<Form, kRows, kTiles>;
  cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
  CUtensorMap map;
  if (raised == cudaSuccess) raised = describe(&map, weight(Tile::kOuts));
  if (raised != cudaSuccess) return raised;
  p.steps = cut.steps;
  const dim3 grid((p.n + Tile::kOuts - 1) / Tile::kOuts * cut.parts, (p.rows + kRows - 1) / kRows);
  return launch_clusters(kernel, grid, cut.parts, dim3(kWeightThreads + 128), Tile::kShared, stream, p, map);
}

template <typename Form, int kRows, typename Weight>
cudaError_t launch_tiles_of(const WeightTileParams& p, const Weight& weight, cudaStream_t stream) {
  int device = 0, generation = 0;
  cudaError_t raised = cudaGetDevice(&device);
  if (raised == cudaSuccess) {
    raised = cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (raised == cudaSuccess && generation != 9) raised = cudaErrorNotSupported;  // the kernel is empty there
  if (raised != cudaSuccess) return raised;
  constexpr int kThreads = 128;  // of 32 columns each
  const int rows = (p.rows + kRows - 1) / kRows * kRows;
  keep_shared_memory(arrange_rows<Form, kRows>);
  raised = launch(arrange_rows<Form, kRows>, dim3(rows * (p.k / 32) / kThreads), dim3(kThreads), 0, stream, p);
  if (raised != cudaSuccess) return raised;
  const WeightCut narrow = best_cut<Form, kRows, 1>(p, device);
  if (narrow.parts == 0) return cudaErrorNotSupported;
  if constexpr (kRows < 128 || Form::kTilesOf128 == 2) {
    const WeightCut wide = best_cut<Form, kRows, 2>(p, device);
    if (wide.parts > 0 && wide.time < narrow.time) return launch_cut<Form, kRows, 2>(p, weight, wide, stream);
  }
  return launch_cut<Form, kRows, 1>(p, weight, narrow, stream);
}

// tile_rows: 32, 64 or 128. p.arranged has room for a multiple of it.
template <typename Form, typename Weight>
cudaError_t launch_weight_tiles(const WeightTileParams& p, const Weight& weight, int tile_rows,
                                cudaStream_t stream) {
  switch (tile_rows) {
    case 32: return launch_tiles_of<Form, 32>(p, weight, stream);
    case 64: return launch_tiles_of<Form, 64>(p, weight, stream);
    case 128: return launch_tiles_of<Form, 128>(p, weight, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trtspec
