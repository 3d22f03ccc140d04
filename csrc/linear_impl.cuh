// The launcher of the linear kernels for one element type. linear_*.cu instantiate it, those of bf16 an epilogue
// or two each, so that they compile side by side.
#pragma once

#include <algorithm>
#include <type_traits>

#include "trtspec/launchers.h"
#include "trtspec/tile_linear.cuh"

namespace trtspec {

constexpr int kWarps = 8;                    // of skinny_linear
constexpr int kStreamWarps = 16, kDepth = 6, kDepthOfTwo = 3, kDepthOfMany = 4;  // of stream_linear
constexpr int kMaxStreamRows = 16, kMaxRowsOfOneTile = 4;
// Tiles of a block from which rows without a norm rest in shared memory, of few rows and of more.
constexpr int kTurnsOfFew = 8, kTurnsOfMore = 4;
constexpr int64_t kLargeWeight = 4 << 20;    // values; from here on bandwidth counts, not latency
constexpr int64_t kLargeNarrow = 9'000'000;  // of a weight with at most kMaxNarrow columns
// Bytes of normed x in shared memory, and of more than 8 rows.
constexpr int kMaxResident = 104 << 10, kMaxResidentOfMany = 140 << 10;
constexpr int kMaxSkinnyRows = 32;
constexpr int kMaxTileColumns = 16 << 10;  // a norm's weights rest in shared memory
// Sizes of tiles go by these (decision 029): rows, columns of a deep weight, outputs of a wide and of a
// narrow one.
constexpr int kFewRows = 16, kMaxFewRows = 48, kMaxSomeRows = 64, kMaxMoreRows = 96, kMaxManyRows = 192;
constexpr int kMaxRowsBySixteen = 128;  // of a residual and few columns, in tiles of 16 rows
// With 17 to 32 rows more columns were not measured. Blocks that have all columns, and those of 128 outputs,
// lose with more than these (decision 029).
constexpr int kMaxLargeColumns = 8192, kMaxColumnsAlone = 3584, kMaxColumnsOfWidest = 2048;
constexpr int kMostAtRest = 9;  // steps of 16 rows and 16 outputs for which a thread has registers
constexpr int kDeep = 1536, kDeeper = 2048, kWide = 2048, kFewOutputs = 256;
constexpr int kNarrowWarps = 8, kNarrowDepth = 12;  // of narrow_linear
// Of narrow_linear, which has a block for each multiprocessor: two must not find room on one, for another
// would have none. Ring and rows take less.
constexpr int kLeastShared = 114 << 10;

inline int resident_bytes(const LinearParams& p) { return p.rows * (p.k * 2 + kPad); }

inline bool resident_fits(const LinearParams& p) {
  return resident_bytes(p) <= (p.rows > 8 ? kMaxResidentOfMany : kMaxResident);
}

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <typename T, Epilogue E, int kNorms, int kTiles, int kColumns, int kDepth>
cudaError_t launch_stream_of(const LinearParams& p, cudaStream_t stream) {
  const auto kernel = stream_linear<T, E, kNorms, kTiles, kColumns, kStreamWarps, kDepth>;
  const int rings = ring_bytes<(kNorms > 0), kTiles, kColumns, kStreamWarps, kDepth>();
  const int shared = rings + (kNorms > 0 ? resident_bytes(p) : 0);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  const int tiles = (p.n + kTiles * kTile - 1) / (kTiles * kTile);
  return launch(kernel, dim3(std::min(tiles, multiprocessors())), dim3(kStreamWarps * 32), shared,
                stream, p);
}

template <typename T, Epilogue E, bool kNorm>
cudaError_t launch_stream(const LinearParams& p, cudaStream_t stream) {
  // Many rows of x are half of what a tile reads.
  auto turns = [](int tiles) { return (tiles + multiprocessors() - 1) / multiprocessors(); };
  const int tiles = (p.n + kTile - 1) / kTile;
  if constexpr (E == Epilogue::kPlain && !kNorm) {
    // Where a block makes many tiles, they rest in shared memory.
    const int least = p.rows > kMaxRowsOfOneTile ? kTurnsOfMore : kTurnsOfFew;
    if (p.x1 == nullptr && turns(tiles) >= least && resident_fits(p)) {
      if (p.rows > 8) return launch_stream_of<T, E, 1, 1, 2, kDepthOfMany>(p, stream);
      return launch_stream_of<T, E, 1, 1, 1, kDepth>(p, stream);
    }
  }
  if constexpr (!kNorm && (E == Epilogue::kPlain || E == Epilogue::kResidual)) {
    // Two tiles share them, if no block gets more to do.
    if (p.rows > kMaxRowsOfOneTile && 2 * turns((tiles + 1) / 2) <= turns(tiles)) {
      if (p.rows > 8) return launch_stream_of<T, E, 0, 2, 2, kDepthOfTwo>(p, stream);
      return launch_stream_of<T, E, 0, 2, 1, kDepthOfTwo>(p, stream);
    }
  }
  if (p.rows > 8) return launch_stream_of<T, E, kNorm, 1, 2, kDepthOfMany>(p, stream);
  if constexpr (kNorm && E != Epilogue::kGated) {
    if (p.x1 != nullptr) return launch_stream_of<T, E, 2, 1, 1, kDepth>(p, stream);
  }
  return launch_stream_of<T, E, kNorm, 1, 1, kDepth>(p, stream);
}

template <typename T, bool kNorm, bool kLargest>
cudaError_t launch_narrow(const LinearParams& p, const LargestParams& largest, cudaStream_t stream) {
  const auto kernel = narrow_linear<T, kNorm, kLargest, kNarrowWarps, kNarrowDepth>;
  constexpr int kRing = ring_bytes<true, 1, 1, kNarrowWarps, kNarrowDepth>();
  static_assert(kRing + kNarrowRows * (2 * kMaxNarrow + kPad) <= kLeastShared);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLeastShared);
  if (raised != cudaSuccess) return raised;
  return launch(kernel, dim3(multiprocessors()), dim3(kNarrowWarps * 32), kLeastShared, stream, p, largest);
}

template <typename T, Epilogue E, int kNorms, int kBlocks, int kOuts, int kStages, int kSplit = 1,
          bool kRests = false>
cudaError_t launch_tile(const LinearParams& p, cudaStream_t stream) {
  using Sizes = Tiling<kBlocks, kOuts, kStages, kSplit, kNorms == 2>;
  if constexpr (!kRests && has_registers(kBlocks, kOuts, kStages)) {
    if (p.k <= kStages * kSplit * kStep) {
      return launch_tile<T, E, kNorms, kBlocks, kOuts, kStages, kSplit, true>(p, stream);
    }
  }
  const auto kernel = tile_linear<T, E, kNorms, kBlocks, kOuts, kStages, kSplit, kRests>;
  const int shared = Sizes::shared_bytes(p);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  const int across = (p.n + kOuts - 1) / kOuts, down = (p.rows + Sizes::kRows - 1) / Sizes::kRows;
  int cluster = kSplit;
  if constexpr (E == Epilogue::kNormedRope) {
    static_assert(kOuts == kHeadOuts, "all tiles add up a head's squares in one order");
    if (p.dim % kOuts || p.dim > kMaxHeadBlocks * kOuts) return cudaErrorInvalidValue;
    cluster = p.dim / kOuts;
  }
  return launch_clusters(kernel, dim3(across * kSplit, down), cluster, dim3(kTileWarps * 32), shared,
                         stream, p);
}

// How many blocks a product has. `rows` and `outs` are of a block, and a cluster of `split` blocks divides K.
inline int blocks_of(const LinearParams& p, int rows, int outs, int split) {
  return (p.rows + rows - 1) / rows * ((p.n + outs - 1) / outs) * split;
}

// Whether they run at once, one on a multiprocessor.
inline bool runs_at_once(const LinearParams& p, int rows, int outs, int split) {
  return blocks_of(p, rows, outs, split) <= multiprocessors();
}

// And whether two of three multiprocessors have one at least.
inline bool fills(const LinearParams& p, int rows, int outs, int split) {
  return runs_at_once(p, rows, outs, split) && 3 * blocks_of(p, rows, outs, split) >= 2 * multiprocessors();
}

// Outputs of a block, and the blocks of a cluster that divides K.
struct TileShape {
  int outs, split;
};

// Tiles of a large, deep weight and 17 to 32 rows whose blocks are neither too many nor too few; 0 outputs: none.
template <Epilogue E, bool kNorm>
TileShape large_tile(const LinearParams& p) {
  if (E == Epilogue::kGated) {
    if (fills(p, 32, 96, 1)) return {96, 1};
    return {p.k <= kMaxColumnsOfWidest && fills(p, 32, 128, 1) ? 128 : 0, 1};
  }
  if (kNorm) return {fills(p, 32, 32, 1) ? 32 : fills(p, 32, 48, 1) ? 48 : 0, 1};
  if (fills(p, 32, 32, 2)) return {32, 2};
  return {p.k <= kMaxColumnsAlone && fills(p, 32, 32, 1) ? 32 : 0, 1};
}

template <typename T, Epilogue E, bool kNorm>
cudaError_t launch_large(const LinearParams& p, TileShape tile, cudaStream_t stream) {
  if constexpr (E == Epilogue::kGated) {
    if (tile.outs == 128) return launch_tile<T, E, 1, 2, 128, 5>(p, stream);
    return launch_tile<T, E, 1, 2, 96, 6>(p, stream);
  } else if constexpr (kNorm) {
    if (tile.outs == 48) return launch_tile<T, E, 1, 2, 48, 10>(p, stream);
    return launch_tile<T, E, 1, 2, 32, 10>(p, stream);
  } else {
    if (tile.split == 1) return launch_tile<T, E, 0, 2, 32, 12>(p, stream);
    if (p.k <= 2 * 8 * kStep) return launch_tile<T, E, 0, 2, 32, 8, 2>(p, stream);
    return launch_tile<T, E, 0, 2, 32, 10, 2>(p, stream);
  }
}

// A deep weight with few outputs: 33 to 192 rows find blocks that run at once.
template <typename T, Epilogue E>
cudaError_t launch_deep(const LinearParams& p, cudaStream_t stream) {
  if (p.rows <= kFewRows) return launch_tile<T, E, 0, 1, 32, 5, 4>(p, stream);
  if (p.rows <= 2 * kFewRows) return launch_tile<T, E, 0, 1, 16, 6, 2>(p, stream);
  if (runs_at_once(p, 32, 32, 2)) return launch_tile<T, E, 0, 2, 32, 6, 2>(p, stream);
  if (runs_at_once(p, 48, 32, 2)) return launch_tile<T, E, 0, 3, 32, 6, 2>(p, stream);
  if (runs_at_once(p, 32, 48, 2)) return launch_tile<T, E, 0, 2, 48, 6, 2>(p, stream);
  return launch_tile<T, E, 0, 4, 32, 4, 2>(p, stream);
}

// Whether tiles are there for two inputs.
template <Epilogue E, bool kNorm>
constexpr bool takes_two() {
  return kNorm && E != Epilogue::kGated && E != Epilogue::kNormedRope;
}

template <typename T, Epilogue E, bool kNorm>
cudaError_t launch_tiles(const LinearParams& p, cudaStream_t stream) {
  if constexpr (takes_two<E, kNorm>()) {
    if (p.x1 != nullptr) {
      if (p.rows <= kMaxFewRows) return launch_tile<T, E, 2, 1, 16, 9>(p, stream);
      if (p.rows <= kMaxMoreRows) return launch_tile<T, E, 2, 1, 32, 9>(p, stream);
      if constexpr (E == Epilogue::kPlain) {  // as the keys and values of a block drafter's context
        if (!runs_at_once(p, 32, 32, 1)) return launch_tile<T, E, 2, 3, 32, 9>(p, stream);
      }
      return launch_tile<T, E, 2, 2, 32, 9>(p, stream);
    }
  }
  if constexpr (kNorm && E == Epilogue::kPlain) {  // as the gates of linear attention
    if (p.n <= kFewOutputs && p.k >= kDeeper) {
      if (p.rows <= kMaxFewRows) return launch_tile<T, E, 1, 1, 32, 5, 8>(p, stream);
      return launch_tile<T, E, 1, 2, 32, 5, 8>(p, stream);
    }
  }
  if constexpr (!kNorm && (E == Epilogue::kPlain || E == Epilogue::kResidual)) {
    const bool has_room = (p.n + 31) / 32 * 2 * (kMaxManyRows / 64) <= multiprocessors();
    if (p.k >= kDeep && has_room) return launch_deep<T, E>(p, stream);
  }
  if constexpr (kNorm && E == Epilogue::kGated) {
    // All columns on their way, and few blocks of many rows.
    if (p.rows > kMaxSomeRows && p.k <= 5 * kStep && p.n >= kWide) {
      if (runs_at_once(p, 48, 48, 1)) return launch_tile<T, E, kNorm, 3, 48, 5>(p, stream);
      if (runs_at_once(p, 64, 48, 1)) return launch_tile<T, E, kNorm, 4, 48, 5>(p, stream);
      if (runs_at_once(p, 80, 48, 1)) return launch_tile<T, E, kNorm, 5, 48, 5>(p, stream);
    }
  }
  if (5 * kStep < p.k && p.k <= kMostAtRest * kStep) {
    const auto at_most_two = [&](int outs) { return blocks_of(p, 16, outs, 1) <= 2 * multiprocessors(); };
    if constexpr (E == Epilogue::kNormedRope) {
      const bool is_some = p.rows <= kFewRows && runs_at_once(p, 16, 32, 1) && !fills(p, 16, 32, 1);
      if (is_some) return launch_tile<T, E, kNorm, 1, 32, kMostAtRest>(p, stream);
    } else if (p.rows <= kMaxSomeRows && at_most_two(16)) {
      return launch_tile<T, E, kNorm, 1, 16, kMostAtRest, 1, true>(p, stream);
    }
    if constexpr (E == Epilogue::kGated) {
      if (p.rows <= kFewRows && at_most_two(32)) return launch_tile<T, E, kNorm, 1, 32, 8>(p, stream);
      if (p.rows <= kFewRows && at_most_two(48)) return launch_tile<T, E, kNorm, 1, 48, 5>(p, stream);
    }
  }
  const bool is_wide = 4 * blocks_of(p, 32, 32, 1) >= 3 * multiprocessors();
  if (kFewRows < p.rows && p.rows <= 2 * kFewRows && is_wide) {
    if constexpr (E == Epilogue::kGated) {
      if (runs_at_once(p, 32, 48, 1)) return launch_tile<T, E, kNorm, 2, 48, 6>(p, stream);
    }
    return launch_tile<T, E, kNorm, 2, 32, 5>(p, stream);
  }
  if (p.rows <= kMaxFewRows) {
    if constexpr (!kNorm) {
      const bool is_deep = p.k >= (p.rows <= kFewRows ? kDeep : kDeeper);
      if (is_deep) return launch_tile<T, E, kNorm, 1, 32, 5, 4>(p, stream);
    }
    return launch_tile<T, E, kNorm, 1, 32, 5>(p, stream);
  }
  const int most = p.k <= 5 * kStep ? kMaxMoreRows : kMaxSomeRows;  // whether all columns have room at once
  if constexpr (E == Epilogue::kResidual) {  // as an o_proj; with fewer and with more rows it takes longer
    const bool is_some = kMaxMoreRows < p.rows && p.rows <= kMaxRowsBySixteen;
    if (is_some && p.k <= 5 * kStep && p.n < kWide) return launch_tile<T, E, kNorm, 1, 32, 5>(p, stream);
  }
  if (p.rows <= most || p.n < kWide) return launch_tile<T, E, kNorm, 2, 32, 5>(p, stream);
  if (p.rows <= kMaxMoreRows) return launch_tile<T, E, kNorm, 2, 32, 3>(p, stream);
  if constexpr (E == Epilogue::kNormedRope) {
    return launch_tile<T, E, kNorm, 2, 32, 3>(p, stream);
  } else {
    return launch_tile<T, E, kNorm, 2, 64, 3>(p, stream);
  }
}

// Whether tiles make a product.
template <Epilogue E, bool kNorm>
bool is_tiled(const LinearParams& p) {
  const int64_t large = p.k <= kMaxNarrow ? kLargeNarrow : kLargeWeight;
  const bool is_small = static_cast<int64_t>(p.n) * p.k < large && p.k <= kMaxTileColumns;
  return is_small && p.n % kTile == 0 && (takes_two<E, kNorm>() || p.x1 == nullptr);
}

template <typename T, Epilogue E, bool kNorm>
cudaError_t launch_columns(const LinearParams& p, cudaStream_t stream) {
  const int64_t values = static_cast<int64_t>(p.n) * p.k;
  const bool has_tiles = is_tiled<E, kNorm>(p);
  if (p.ids != nullptr && !(has_tiles && p.x1 != nullptr)) return cudaErrorInvalidValue;
  if (has_tiles) return launch_tiles<T, E, kNorm>(p, stream);
  if (p.rows > kMaxSkinnyRows) return cudaErrorInvalidValue;
  if constexpr (E == Epilogue::kPlain) {
    const bool is_narrow = p.rows <= kNarrowRows && p.k <= kMaxNarrow && p.k_split == p.k;
    if (is_narrow && values >= kLargeWeight) return launch_narrow<T, kNorm, false>(p, {}, stream);
  }
  const bool is_large = values >= kLargeWeight && p.k >= kDeeper && p.k <= kMaxLargeColumns;
  if constexpr (kNorm && E == Epilogue::kGated) {
    const bool is_some = p.rows <= kFewRows && p.k <= kMaxColumnsOfWidest && p.n % kTile == 0;
    if (is_large && is_some && fills(p, 16, 96, 1)) return launch_tile<T, E, 1, 1, 96, 6>(p, stream);
  }
  if constexpr (kNorm || E != Epilogue::kGated) {
    const bool is_some = p.rows > kMaxStreamRows && p.n % kTile == 0 && p.x1 == nullptr;
    const TileShape tile = is_large && is_some ? large_tile<E, kNorm>(p) : TileShape{0, 1};
    if (tile.outs > 0) return launch_large<T, E, kNorm>(p, tile, stream);
  }
  const bool fits = !kNorm || resident_fits(p);
  const bool is_alone = p.x1 == nullptr || p.rows <= 8;
  if (p.rows <= kMaxStreamRows && values >= kLargeWeight && fits && is_alone) {
    return launch_stream<T, E, kNorm>(p, stream);
  }
  const dim3 grid((p.n + kTile - 1) / kTile), block(kWarps * 32);
  if (p.rows <= 8) {
    return launch(skinny_linear<T, E, kNorm, 1, kWarps, 4>, grid, block, 0, stream, p);
  }
  if (p.rows <= 16) {
    return launch(skinny_linear<T, E, kNorm, 2, kWarps, 4>, grid, block, 0, stream, p);
  }
  return launch(skinny_linear<T, E, kNorm, 4, kWarps, 2>, grid, block, 0, stream, p);
}

template <typename T, Epilogue E>
cudaError_t launch_normed(const LinearParams& p, cudaStream_t stream) {
  if (p.norm0 == nullptr) return launch_columns<T, E, false>(p, stream);
  if constexpr (std::is_same_v<T, bf16>) {
    return launch_columns<T, E, true>(p, stream);
  } else {
    return cudaErrorInvalidValue;  // x times a norm's weight may leave fp16's range
  }
}

// A norm before the product and norms of heads behind it.
template <typename T>
cudaError_t launch_normed_rope(const LinearParams& p, cudaStream_t stream) {
  constexpr Epilogue kHeads = Epilogue::kNormedRope;
  if constexpr (std::is_same_v<T, bf16>) {
    if (p.norm0 != nullptr && is_tiled<kHeads, true>(p)) return launch_tiles<T, kHeads, true>(p, stream);
  }
  return cudaErrorInvalidValue;  // fp16 as of other norms
}

template <typename T>
cudaError_t launch_largest(const LinearParams& p, const LargestParams& largest, cudaStream_t stream) {
  if (p.norm0 == nullptr) return launch_narrow<T, false, true>(p, largest, stream);
  if constexpr (std::is_same_v<T, bf16>) return launch_narrow<T, true, true>(p, largest, stream);
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_linear(Epilogue epilogue, const LinearParams& p, cudaStream_t stream) {
  switch (epilogue) {
    case Epilogue::kPlain: return launch_normed<T, Epilogue::kPlain>(p, stream);
    case Epilogue::kGated: return launch_normed<T, Epilogue::kGated>(p, stream);
    case Epilogue::kRope: return launch_normed<T, Epilogue::kRope>(p, stream);
    case Epilogue::kNormedRope: return launch_normed_rope<T>(p, stream);
    case Epilogue::kResidual: return launch_columns<T, Epilogue::kResidual, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trtspec
