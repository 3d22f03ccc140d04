// The launchers of the products with weights of 4 bits, for one form of scales; four_bits_*.cu instantiate
// it, one each, so that they compile side by side.
#pragma once

#include <algorithm>
#include <array>

#include "trtspec/four_bit_tiles.cuh"
#include "trtspec/launchers.h"
#include "trtspec/tensor_map.h"

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

// How a product is cut: tiles of 128 or 256 outputs, K among the blocks of a cluster.
struct FourBitCut {
  int tiles, parts, steps;
  float time;
};

constexpr int kMaxFourBitParts = 8;  // a cluster's blocks

// Blocks of clusters of `parts` that run at once.
template <FourBits F, int kRows, int kTiles>
int blocks_at_once(int parts) {
  using Tile = FourBitTile<F, kRows, kTiles>;
  static const std::array<int, kMaxFourBitParts + 1> found = [] {
    std::array<int, kMaxFourBitParts + 1> blocks = {};
    for (int size = 1; size <= kMaxFourBitParts; ++size) {
      blocks[size] = size * clusters_at_once(four_bit_tiles<F, kRows, kTiles>, size,
                                             kFourBitThreads + 128, Tile::kShared);
    }
    return blocks;
  }();
  return found[parts];
}

// The cut that takes the least time, in steps of 128 outputs: by measurement on an H200 a step of 256 takes
// 1.85 of them, and a block some more for its start and its end.
template <FourBits F, int kRows, int kTiles>
FourBitCut best_cut(const FourBitTileParams& p) {
  const int steps = p.k / kFourBitStep, outs = FourBitTile<F, kRows, kTiles>::kOuts;
  const int tiles = (p.n + outs - 1) / outs * ((p.rows + kRows - 1) / kRows);
  FourBitCut best = {};
  for (int wanted = 1; wanted <= std::min(kMaxFourBitParts, steps); ++wanted) {
    const int of_part = (steps + wanted - 1) / wanted, parts = (steps + of_part - 1) / of_part;
    const int room = blocks_at_once<F, kRows, kTiles>(parts);
    if (room == 0) continue;
    const int turns = (tiles * parts + room - 1) / room;
    const float time = turns * (of_part * (kTiles == 1 ? 1.0f : 1.85f) + 5.0f + parts);
    if (best.parts == 0 || time < best.time) best = {kTiles, parts, of_part, time};
  }
  return best;
}

template <FourBits F, int kRows, int kTiles>
cudaError_t launch_cut(FourBitTileParams p, const void* weight, const FourBitCut& cut, cudaStream_t stream) {
  using Tile = FourBitTile<F, kRows, kTiles>;
  constexpr int kRecord = kFourBitRecord<F>;
  const cuuint64_t steps = p.k / kFourBitStep;
  const BoxedTensor records = {weight,
                               CU_TENSOR_MAP_DATA_TYPE_UINT32,
                               {kRecord / 4, steps, static_cast<cuuint64_t>(p.n / 8)},
                               {kRecord, kRecord * steps},
                               {kRecord / 4, 1, Tile::kOuts / 8},
                               CU_TENSOR_MAP_SWIZZLE_NONE};
  CUtensorMap map;
  const cudaError_t raised = describe(&map, records);
  if (raised != cudaSuccess) return raised;
  p.steps = cut.steps;
  const dim3 grid((p.n + Tile::kOuts - 1) / Tile::kOuts * cut.parts, (p.rows + kRows - 1) / kRows);
  return launch_clusters(four_bit_tiles<F, kRows, kTiles>, grid, cut.parts, dim3(kFourBitThreads + 128),
                         Tile::kShared, stream, p, map);
}

template <FourBits F, int kRows>
cudaError_t launch_rows_of_tiles(const FourBitTileParams& p, const void* weight, cudaStream_t stream) {
  constexpr int kThreads = 128;  // of 32 columns each
  const int rows = (p.rows + kRows - 1) / kRows * kRows;
  keep_shared_memory(arrange_rows<kRows>);
  const cudaError_t raised =
      launch(arrange_rows<kRows>, dim3(rows * (p.k / 32) / kThreads), dim3(kThreads), 0, stream, p);
  if (raised != cudaSuccess) return raised;
  const FourBitCut narrow = best_cut<F, kRows, 1>(p), wide = best_cut<F, kRows, 2>(p);
  if (narrow.parts == 0 || wide.parts == 0) return cudaErrorNotSupported;
  return narrow.time <= wide.time ? launch_cut<F, kRows, 1>(p, weight, narrow, stream)
                                  : launch_cut<F, kRows, 2>(p, weight, wide, stream);
}

template <FourBits F>
cudaError_t launch_four_bit_tiles(const FourBitTileParams& p, const void* weight, int tile_rows,
                                  cudaStream_t stream) {
  switch (tile_rows) {
    case 32: return launch_rows_of_tiles<F, 32>(p, weight, stream);
    case 64: return launch_rows_of_tiles<F, 64>(p, weight, stream);
    case 128: return launch_rows_of_tiles<F, 128>(p, weight, stream);
  }
  return cudaErrorInvalidValue;
}

template <FourBits F>
cudaError_t launch_widen(const LinearParams& p, cudaStream_t stream) {
  const int records = p.n / 8 * (p.k / kFourBitStep), warps = 8;
  return launch(widen_records<F>, dim3((records + warps - 1) / warps), dim3(warps * 32), 0, stream, p);
}

}  // namespace trtspec
