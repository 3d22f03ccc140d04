// Attention with heads of 64, by the clusters of cluster_attention.cuh.
//
// Up to two tiles for each warp of a block are attended at once: a warp makes the scores of its own tiles, then
// a few columns of the output over all tiles of the block. So weights go through shared memory, not each warp's
// sums of all columns. With more tiles each warp goes through its own alone, and their sums are joined at the end.
#pragma once

#include <type_traits>

#include "cluster_attention.cuh"

namespace trtspec {

constexpr int kTilesAhead = 2;  // three and four were mostly slower

// A block's places in shared memory, in bytes from its start.
template <int kDim, int kTiles, int kSize, int kWarps>
struct NarrowPlaces {
  static constexpr int kPairs = kTiles * 16, kRing = kWarps * kTilesAhead * 2 * kTileKeys * kDim * 2;
  // At once: weights [pairs, keys of all tiles], then of each pair all warps' bests and totals.
  static constexpr int kWeightRow = kTilesAhead * kWarps * kTileKeys * 2, kBests = kRing + kPairs * kWeightRow;
  static constexpr int kTotals = kBests + kPairs * kWarps * 4, kAtOnce = kTotals + kPairs * kWarps * 4;
  // Alone: all warps' sums, where their tiles were.
  static constexpr int kSums = kWarps * kPairs * (kDim + 4) * 4;
  static constexpr int kQueries = kAtOnce > kSums ? kAtOnce : kSums;
  static constexpr int kParts = kQueries + kPairs * kDim * 2;
  static constexpr int kBytes = kParts + SentSums<kDim, kTiles, kSize>::kBytes;
};

// A warp's tiles of keys and their values on their way to its places in shared memory: kAhead tiles,
// of each the keys, then the values.
template <typename T, int kDim, int kAhead>
struct TileCopies {
  static constexpr int kTileBytes = kTileKeys * kDim * 2;  // of keys or of values
  static constexpr int kWarpBytes = kAhead * 2 * kTileBytes;
  const AttendParams& p;
  const Group& group;
  const Keys own;
  char* const ring;
  int slots, slots_from = 0;

  __device__ TileCopies(const AttendParams& p, const Group& group, const Keys& own, char* ring)
      : p(p), group(group), own(own), ring(ring), slots(slots_of_tiles(p, group, own)) {}

  __device__ static char* keys_at(char* ring, int i) { return ring + i % kAhead * 2 * kTileBytes; }

  // The warp's i-th tile, of which zeros where there are no keys; with i >= before nothing.
  __device__ void fetch(int i, int before) {
    constexpr int kPieces = kDim / 8;     // of 16 bytes in a key
    constexpr int kRows = 32 / kPieces;   // keys that the lanes copy a piece of at once
    const int lane = threadIdx.x % 32, my_row = lane / kPieces, my_piece = lane % kPieces;
    if (i < before) {
      if (i >= slots_from + 32) {
        slots_from = i;
        slots = slots_of_tiles(p, group, own, i);
      }
      const int64_t slot = __shfl_sync(0xffffffffu, slots, i - slots_from);
      const int left = own.end - own.first - i * own.apart - my_row;
      const T* from_k = static_cast<const T*>(p.k) + group.head * p.k_head + my_row * p.k_row + my_piece * 8;
      const T* from_v = static_cast<const T*>(p.v) + group.head * p.v_head + my_row * p.v_row + my_piece * 8;
      from_k += slot * p.k_row, from_v += slot * p.v_row;
      char* const place = keys_at(ring, i);
#pragma unroll
      for (int j = 0; j < kTileKeys / kRows; ++j) {
        const int row = my_row + j * kRows;
        const int to = row * kDim * 2 + (my_piece ^ (row & 7)) * 16;
        copy_16_if(place + to, from_k, j * kRows < left);
        copy_16_if(place + kTileBytes + to, from_v, j * kRows < left);
        from_k += kRows * p.k_row, from_v += kRows * p.v_row;
      }
    }
    copies_commit();
  }
};

// Attends to one or two tiles of each warp at once, all of a block. Its copies are on their way.
template <typename T, int kDim, int kTiles, int kSize, int kWarps>
__device__ inline void attend_at_once(const AttendParams& p, const TileCopies<T, kDim, kTilesAhead>& copies, int turns,
                                      const PairPositions<kTiles>& positions,
                                      const uint32_t (&q)[kTiles][kDim / 16][4], char* shared,
                                      ColumnSums<kTiles, kDim / kWarps / 8>& sums) {
  using Places = NarrowPlaces<kDim, kTiles, kSize, kWarps>;
  using Copies = TileCopies<T, kDim, kTilesAhead>;
  constexpr int kEights = kDim / kWarps / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int matrix = lane / 8, of_matrix = lane % 8;
  float* const bests = reinterpret_cast<float*>(shared + Places::kBests);
  float* const totals = reinterpret_cast<float*>(shared + Places::kTotals);
  auto weights_at = [&](int pair, int piece) {
    return shared + Places::kRing + pair * Places::kWeightRow + (piece ^ (pair & 7)) * 16;
  };
  float scores[kTilesAhead][kTiles][2][4];
#pragma unroll
  for (int i = 0; i < kTilesAhead; ++i) {
    if (i == turns) break;
    if (i == 0) {
      copies_wait<kTilesAhead - 1>();
    } else {
      copies_wait<0>();
    }
    __syncwarp();
    score_tile<T, kDim, kTiles, true>(p, positions, copies.own.end, copies.own.first + i * copies.own.apart, q,
                                      Copies::keys_at(copies.ring, i), scores[i]);
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = best_of(scores[0][m], half);
      if (turns > 1) best = better(best, best_of(scores[1][m], half));
      if (t == 0) bests[(m * 16 + half * 8 + g) * kWarps + warp] = best * p.scale;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4* const of = reinterpret_cast<const float4*>(bests + (m * 16 + half * 8 + g) * kWarps);
      float best = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps / 4; ++w) {
        const float4 four = of[w];
        best = better(better(better(four.x, four.y), better(four.z, four.w)), best);
      }
      sums.best[m][half] = best, base[half] = base_of(best), sums.total[m][half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kTilesAhead; ++i) {
      if (i == turns) break;
      auto& of = scores[i][m];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& score = of[c / 4][c % 4];
        score = exp2_of(fmaf(score, p.scale, -base[c % 4 / 2]));
        sums.total[m][c % 4 / 2] += score;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        char* const to = weights_at(m * 16 + c % 2 * 8 + g, (i * kWarps + warp) * 2 + c / 2) + t * 4;
        *reinterpret_cast<uint32_t*>(to) = pack(of[c / 2][c % 2 * 2], of[c / 2][c % 2 * 2 + 1], T());
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& total = sums.total[m][half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (t == 0) totals[(m * 16 + half * 8 + g) * kWarps + warp] = total;
    }
  }
  copies_wait<0>();
  __syncthreads();  // all warps' weights and values are there

  // The sums of even and of odd tiles do not wait for each other.
  float odd[kTiles][kEights][4] = {};
  auto load_weights = [&](uint32_t(&a)[4], int m, int tile) {
    load_matrices<false>(a, weights_at(m * 16 + matrix % 2 * 8 + of_matrix, tile * 2 + matrix / 2));
  };
  const int row = matrix % 2 * 8 + of_matrix;
  auto values_at = [&](int i, int of_warp, int piece) {
    const char* const of = Copies::keys_at(shared + of_warp * Copies::kWarpBytes, i) + Copies::kTileBytes;
    return of + row * kDim * 2 + (piece ^ (row & 7)) * 16;
  };
#pragma unroll
  for (int i = 0; i < kTilesAhead; ++i) {
    if (i == turns) break;
    if constexpr (kEights == 1) {
#pragma unroll
      for (int w = 0; w < kWarps; w += 2) {
        uint32_t b[4];
        load_matrices<true>(b, values_at(i, w + matrix / 2, warp));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t a[4];
          load_weights(a, m, i * kWarps + w);
          multiply_add(sums.acc[m][0], a[0], a[1], a[2], a[3], b[0], b[1], T());
          load_weights(a, m, i * kWarps + w + 1);
          multiply_add(odd[m][0], a[0], a[1], a[2], a[3], b[2], b[3], T());
        }
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        uint32_t a[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) load_weights(a[m], m, i * kWarps + w);
#pragma unroll
        for (int n = 0; n < kEights / 2; ++n) {
          uint32_t b[4];
          load_matrices<true>(b, values_at(i, w, warp * kEights + n * 2 + matrix / 2));
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            auto& to = w % 2 ? odd[m] : sums.acc[m];
            multiply_add(to[n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1], T());
            multiply_add(to[n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3], T());
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int c = 0; c < kEights * 4; ++c) sums.acc[m][c / 4][c % 4] += odd[m][c / 4][c % 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& total = sums.total[m][half];
      total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += totals[(m * 16 + half * 8 + g) * kWarps + w];
    }
  }
}

// What a warp sums up for the pairs g and g + 8 of each tile, in base 2.
template <int kDim, int kTiles>
struct WarpSums {
  float acc[kTiles][kDim / 8][4] = {};  // weighted values
  float best[kTiles][2], total[kTiles][2] = {};
};

// Adds what a warp reads of its keys, whose first tiles are on their way.
//
// kTiles: of 16 pairs of a row and a head that read one KV head.
template <typename T, int kDim, int kTiles, int kAhead>
__device__ inline void attend_alone(const AttendParams& p, TileCopies<T, kDim, kAhead>& copies, int tiles,
                                   const PairPositions<kTiles>& positions, const uint32_t (&q)[kTiles][kDim / 16][4],
                                   WarpSums<kDim, kTiles>& sums) {
  const Keys& own = copies.own;
  const int lane = threadIdx.x % 32, matrix = lane / 8, of_matrix = lane % 8;
  auto& [acc, best, total] = sums;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = -INFINITY;
  for (int i = 0; i < tiles; ++i) {
    copies_wait<kAhead - 1>();
    __syncwarp();
    const char* const keys = copies.keys_at(copies.ring, i);
    const char* const values = keys + copies.kTileBytes;
    float scores[kTiles][2][4];
    score_tile<T, kDim, kTiles, false>(p, positions, own.end, own.first + i * own.apart, q, keys, scores);
    uint32_t weights[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      bool is_same = true;
      float keep[2], base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float now = better(best_of(scores[m], half) * p.scale, best[m][half]);
        base[half] = base_of(now);
        keep[half] = exp2_of(best[m][half] - base[half]);
        is_same &= now == best[m][half];
        best[m][half] = now;
      }
      if (!__all_sync(0xffffffffu, is_same)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[m][half] *= keep[half];
#pragma unroll
          for (int d = 0; d < kDim / 8; ++d) {
            acc[m][d][half * 2] *= keep[half];
            acc[m][d][half * 2 + 1] *= keep[half];
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& score = scores[m][c / 4][c % 4];
        score = exp2_of(fmaf(score, p.scale, -base[c % 4 / 2]));
        total[m][c % 4 / 2] += score;
      }
      weights[m][0] = pack(scores[m][0][0], scores[m][0][1], T());
      weights[m][1] = pack(scores[m][0][2], scores[m][0][3], T());
      weights[m][2] = pack(scores[m][1][0], scores[m][1][1], T());
      weights[m][3] = pack(scores[m][1][2], scores[m][1][3], T());
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      const int row = matrix % 2 * 8 + of_matrix, piece = d * 2 + matrix / 2;
      load_matrices<true>(b, values + row * kDim * 2 + (piece ^ (row & 7)) * 16);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const uint32_t(&a)[4] = weights[m];
        multiply_add(acc[m][d * 2], a[0], a[1], a[2], a[3], b[0], b[1], T());
        multiply_add(acc[m][d * 2 + 1], a[0], a[1], a[2], a[3], b[2], b[3], T());
      }
    }
    __syncwarp();  // all lanes have read the tile: its place is free
    copies.fetch(i + kAhead, tiles);
  }
  copies_wait<0>();
}

// Leaves a warp's sums in the thread block's shared memory: [warps, pairs, kDim + 4], and stats.
template <int kDim, int kTiles>
__device__ inline void leave_sums(WarpSums<kDim, kTiles>& sums, int pairs, float* at,
                                  float2 (*stats)[kTiles * 16]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = m * 16 + half * 8 + g;
      float total = sums.total[m][half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (pair >= pairs) continue;
      if (t == 0) stats[warp][pair] = {sums.best[m][half], total};
      float* const to = at + (warp * kTiles * 16 + pair) * (kDim + 4) + t * 2;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<float2*>(to + d * 8) = {sums.acc[m][d][half * 2], sums.acc[m][d][half * 2 + 1]};
      }
    }
  }
}

// Joins what the warps of a thread block have left, as of leave_sums.
template <int kDim, int kTiles, int kWarps>
__device__ inline Joined join_warps(const float* sums, const float2 (*stats)[kTiles * 16], int pair,
                                    int column) {
  Joined joined = {-INFINITY, 0.0f, {}};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) joined.best = better(stats[w][pair].x, joined.best);
  const float base = base_of(joined.best);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float weight = exp2_of(stats[w][pair].x - base);
    const float* from = sums + (w * kTiles * 16 + pair) * (kDim + 4) + column;
    add_weighted(joined.sum, *reinterpret_cast<const float4*>(from), weight);
    joined.total = fmaf(stats[w][pair].y, weight, joined.total);
  }
  return joined;
}

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
__global__ void __launch_bounds__(
    kWarps * 32, (Cluster<kSize, kWarps>::template at_once<kDim, kTiles>()))
    narrow_attention(const __grid_constant__ AttendParams p) {
  using Places = NarrowPlaces<kDim, kTiles, kSize, kWarps>;
  using Sent = SentSums<kDim, kTiles, kSize>;
  using Copies = TileCopies<T, kDim, kTilesAhead>;
  constexpr int kThreads = kWarps * 32;
  char* const shared = dynamic_shared();
  __shared__ Barrier there;
  float* const parts = reinterpret_cast<float*>(shared + Places::kParts);
  BlockPart part;
  if (!begin_part<Sent::kPairBytes, kSize, kWarps>(p, part, there)) return;
  const Group& group = part.group;
  const OwnPairs& own_pairs = part.own;
  const Keys& own = part.keys;
  const int pairs = part.pairs, turns = part.turns;
  const bool is_at_once = turns <= kTilesAhead, is_divided = kSize > 1 && own_pairs.active > 1;
  // At once all warps' values are read by all, also where a warp has no keys.
  const int own_tiles = own.first < own.end ? (own.end - own.first + own.apart - 1) / own.apart : 0;
  const int tiles = is_at_once ? turns : own_tiles;

  Copies copies(p, group, own, shared + threadIdx.x / 32 * Copies::kWarpBytes);
  PairPositions<kTiles> positions;
  positions.find(p, group);
  QueryPieces<T, kDim, kTiles, kThreads> queries;
  queries.find(p, group);
  int fetched = 0;
  for (; fetched < kTilesAhead && is_older(group, own, fetched); ++fetched) copies.fetch(fetched, tiles);
  // Beside the previous kernel: that has waited before this one could start, so all before it is done.
  if (!p.is_beside) wait_for_previous();
  let_next_start();
  queries.load();
  for (; fetched < kTilesAhead; ++fetched) copies.fetch(fetched, tiles);
  queries.store(shared + Places::kQueries);
  positions.find_clear(p, group);
  __syncthreads();
  uint32_t q[kTiles][kDim / 16][4];
  load_queries<kDim, kTiles>(q, shared + Places::kQueries);

  if (is_at_once) {
    ColumnSums<kTiles, kDim / kWarps / 8> sums;
    attend_at_once<T, kDim, kTiles, kSize, kWarps>(p, copies, turns, positions, q, shared, sums);
    if (is_divided) cluster_wait();
    leave_columns<T, kDim, kTiles, kSize>(p, part, sums, parts, there);
  } else {
    WarpSums<kDim, kTiles> sums;
    attend_alone<T, kDim, kTiles, kTilesAhead>(p, copies, tiles, positions, q, sums);
    __syncthreads();  // all warps are done with their tiles
    __shared__ float2 stats_of[kWarps][Places::kPairs];
    float* const sums_of = reinterpret_cast<float*>(shared);
    leave_sums(sums, pairs, sums_of, stats_of);
    __syncthreads();
    if (is_divided) cluster_wait();
    constexpr int kFours = kDim / 4;
    const int items = pairs * kFours;
    auto join_items = [&](auto together) {  // a thread's items of this number wait for shared memory together
      constexpr int kItems = decltype(together)::value;
      for (int begin = threadIdx.x; begin < items; begin += kItems * kThreads) {
        Joined of_block[kItems];
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
          const int i = min(begin + n * kThreads, items - 1);
          of_block[n] = join_warps<kDim, kTiles, kWarps>(sums_of, stats_of, i / kFours, i % kFours * 4);
        }
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
          const int i = begin + n * kThreads, pair = i / kFours, column = i % kFours * 4;
          const auto& [best, total, sum] = of_block[n];
          if (i >= items) break;
          if (!is_divided) {
            write_attention<T>(p, group, pair, column, of_block[n]);
          } else if constexpr (kSize > 1) {
            const Receiver receiver(own_pairs, pair, parts, Sent::kNumbers, there);
            receiver.send(column, sum.x, sum.y);
            receiver.send(column + 2, sum.z, sum.w);
            if (column == 0) receiver.send(kDim, best, total);
          }
        }
      }
    };
    if (kWarps == 4 && items > kThreads) {
      join_items(std::integral_constant<int, 2>());
    } else {
      join_items(std::integral_constant<int, 1>());
    }
  }
  end_part<T, kDim, kTiles, kSize>(p, part, parts, there);
}

}  // namespace trtspec
