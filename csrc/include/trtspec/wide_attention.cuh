// Attention with heads of 128 and 256, by the clusters of cluster_attention.cuh.
//
// A block reads a chunk of keys a turn, a tile for each warp. A warp makes the scores of its tile, then a few columns
// of the output over all tiles of the chunk. So weights go through shared memory, not each warp's sums of all
// columns. There is one barrier a turn: the scores of the next one are made before it.
#pragma once

#include "cluster_attention.cuh"

namespace trtspec {

constexpr int kKeyChunks = 2, kValueChunks = 3;  // that are in shared memory

// A block's places in shared memory, in bytes from its start.
template <int kDim, int kTiles, int kSize, int kWarps>
struct WidePlaces {
  static constexpr int kPairs = kTiles * 16, kTileBytes = kTileKeys * kDim * 2;  // of keys or of values
  static constexpr int kValues = kKeyChunks * kWarps * kTileBytes;
  static constexpr int kWeights = kValues + kValueChunks * kWarps * kTileBytes;
  // Of two chunks, [pairs, keys]. Queries are there before.
  static constexpr int kWeightRow = kWarps * kTileKeys * 2, kWeightBytes = kPairs * kWeightRow;
  static constexpr int kQueryBytes = kPairs * kDim * 2;
  static constexpr int kBests = kWeights + (2 * kWeightBytes > kQueryBytes ? 2 * kWeightBytes : kQueryBytes);
  static constexpr int kBestBytes = kPairs * kWarps * 4;  // of two chunks, [pairs, warps]
  static constexpr int kParts = kBests + 2 * kBestBytes;
  static constexpr int kBytes = kParts + SentSums<kDim, kTiles, kSize>::kBytes;
};

// A block's chunks of keys and values on their way to shared memory; each warp copies its own tile.
template <typename T, int kDim, int kWarps>
struct ChunkCopies {
  static constexpr int kTileBytes = kTileKeys * kDim * 2;
  const AttendParams& p;
  const Group& group;
  const Keys own;
  const int turns;
  char* const shared;
  int slots, slots_from = 0;
  int even = 0, odd = 0;  // slots of the last even and odd tile whose keys were asked for

  __device__ ChunkCopies(const AttendParams& p, const BlockPart& part, char* shared)
      : p(p), group(part.group), own(part.keys), turns(part.turns), shared(shared),
        slots(slots_of_tiles(p, part.group, part.keys)) {}

  __device__ char* keys_of(int turn) const {
    return shared + (turn % kKeyChunks * kWarps + static_cast<int>(threadIdx.x / 32)) * kTileBytes;
  }
  __device__ char* values_of(int turn, int warp) const {
    return shared + ((kKeyChunks + turn % kValueChunks) * kWarps + warp) * kTileBytes;
  }

  // This warp's tile of a turn, zeros where there are no keys; behind the last turn nothing.
  __device__ void fetch_keys(int turn) {
    if (turn < turns) {
      if (turn >= slots_from + 32) {
        slots_from = turn;
        slots = slots_of_tiles(p, group, own, turn);
      }
      const int slot = __shfl_sync(0xffffffffu, slots, turn - slots_from);
      if (turn % 2) {
        odd = slot;
      } else {
        even = slot;
      }
      copy(keys_of(turn), static_cast<const T*>(p.k) + group.head * p.k_head, p.k_row, turn);
    }
    copies_commit();
  }

  // Likewise. The keys were asked for before, and those of one further turn at most.
  __device__ void fetch_values(int turn) {
    if (turn < turns) {
      copy(values_of(turn, threadIdx.x / 32), static_cast<const T*>(p.v) + group.head * p.v_head, p.v_row, turn);
    }
    copies_commit();
  }

 private:
  __device__ void copy(char* place, const T* from, int row_stride, int turn) const {
    constexpr int kPieces = kDim / 8;    // of 16 bytes in a key
    constexpr int kRows = 32 / kPieces;  // keys that the lanes copy a piece of at once
    const int lane = threadIdx.x % 32, my_row = lane / kPieces, my_piece = lane % kPieces;
    const int slot = turn % 2 ? odd : even;
    const int left = own.end - own.first - turn * own.apart - my_row;
    from += static_cast<int64_t>(slot) * row_stride + my_row * row_stride + my_piece * 8;
#pragma unroll
    for (int j = 0; j < kTileKeys / kRows; ++j) {
      const int row = my_row + j * kRows;
      copy_16_if(place + row * kDim * 2 + (my_piece ^ (row & 7)) * 16, from, j * kRows < left);
      from += kRows * row_stride;
    }
  }
};

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
__global__ void __launch_bounds__(
    kWarps * 32, (Cluster<kSize, kWarps>::template at_once<kDim, kTiles>()))
    wide_attention(const __grid_constant__ AttendParams p) {
  using Places = WidePlaces<kDim, kTiles, kSize, kWarps>;
  constexpr int kThreads = kWarps * 32, kEights = kDim / kWarps / 8;  // of a warp's columns
  char* const shared = dynamic_shared();
  __shared__ Barrier there;
  float* const parts = reinterpret_cast<float*>(shared + Places::kParts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int matrix = lane / 8, of_matrix = lane % 8;
  BlockPart part;
  if (!begin_part<SentSums<kDim, kTiles, kSize>::kPairBytes, kSize, kWarps>(p, part, there)) return;
  const int turns = part.turns;
  const Keys& own = part.keys;

  ChunkCopies<T, kDim, kWarps> copies(p, part, shared);
  PairPositions<kTiles> positions;
  positions.find(p, part.group);
  QueryPieces<T, kDim, kTiles, kThreads> queries;
  queries.find(p, part.group);
  int fetched = 0;
  auto fetch = [&] { copies.fetch_keys(fetched), copies.fetch_values(fetched), ++fetched; };
  while (fetched < kKeyChunks && is_older(part.group, own, fetched)) fetch();
  // Beside the previous kernel: that has waited before this one could start, so all before it is done.
  if (!p.is_beside) wait_for_previous();
  let_next_start();
  queries.load();
  while (fetched < kKeyChunks) fetch();
  queries.store(shared + Places::kWeights);
  positions.find_clear(p, part.group);
  __syncthreads();
  uint32_t q[kTiles][kDim / 16][4];
  load_queries<kDim, kTiles>(q, shared + Places::kWeights);

  ColumnSums<kTiles, kEights> sums;
  auto& [acc, best, total] = sums;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = -INFINITY;
  auto bests_of = [&](int turn, int pair) {
    char* const of = shared + Places::kBests + turn % 2 * Places::kBestBytes;
    return reinterpret_cast<float*>(of) + pair * kWarps;
  };
  auto weights_at = [&](int turn, int pair, int piece) {
    char* const of = shared + Places::kWeights + turn % 2 * Places::kWeightBytes;
    return of + pair * Places::kWeightRow + (piece ^ (pair & 7)) * 16;
  };

  // Makes this warp's scores of a turn, and leaves each pair's best.
  auto score = [&](int turn, float(&scores)[kTiles][2][4]) {
    copies_wait<3>();  // its keys
    __syncwarp();
    score_tile<T, kDim, kTiles, true>(p, positions, own.end, own.first + turn * own.apart, q, copies.keys_of(turn),
                                      scores);
    __syncwarp();  // all lanes have read the keys: their place is free
    copies.fetch_keys(turn + kKeyChunks);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of = best_of(scores[m], half) * p.scale;
        if (t == 0) bests_of(turn, m * 16 + half * 8 + g)[warp] = of;
      }
    }
  };

  float scores[kTiles][2][4];
  score(0, scores);
  copies.fetch_values(kKeyChunks);
  __syncthreads();
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      float base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float now = best[m][half];
        const float4* const of = reinterpret_cast<const float4*>(bests_of(turn, m * 16 + half * 8 + g));
#pragma unroll
        for (int w = 0; w < kWarps / 4; ++w) {
          const float4 four = of[w];
          now = better(better(better(four.x, four.y), better(four.z, four.w)), now);
        }
        base[half] = base_of(now);
        const float keep = exp2_of(best[m][half] - base[half]);
        best[m][half] = now;
        total[m][half] *= keep;
#pragma unroll
        for (int n = 0; n < kEights; ++n) acc[m][n][half * 2] *= keep, acc[m][n][half * 2 + 1] *= keep;
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& weight = scores[m][c / 4][c % 4];
        weight = exp2_of(fmaf(weight, p.scale, -base[c % 4 / 2]));
        total[m][c % 4 / 2] += weight;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        char* const to = weights_at(turn, m * 16 + c % 2 * 8 + g, warp * 2 + c / 2) + t * 4;
        *reinterpret_cast<uint32_t*>(to) =
            pack(scores[m][c / 2][c % 2 * 2], scores[m][c / 2][c % 2 * 2 + 1], T());
      }
    }
    if (turn + 1 < turns) {
      score(turn + 1, scores);
    } else {
      copies_commit();
    }
    // The turn's values: of the first turns they were asked for among more copies.
    if (turn < kValueChunks) {
      copies_wait<5>();
    } else {
      copies_wait<3>();
    }
    __syncthreads();
    if (turn > 0) {  // all warps are done with the values before
      copies.fetch_values(turn - 1 + kValueChunks);
    } else {
      copies_commit();
    }
    // The sums of even and of odd tiles do not wait for each other where a warp has few columns.
    constexpr bool kHalves = kEights <= 2;
    float odd[kTiles][kEights][4] = {};
    const int row = matrix % 2 * 8 + of_matrix;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) load_matrices<false>(a[m], weights_at(turn, m * 16 + row, w * 2 + matrix / 2));
#pragma unroll
      for (int n = 0; n < kEights / 2; ++n) {
        uint32_t b[4];
        const int piece = warp * kEights + n * 2 + matrix / 2;
        load_matrices<true>(b, copies.values_of(turn, w) + row * kDim * 2 + (piece ^ (row & 7)) * 16);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          auto& to = kHalves && w % 2 ? odd[m] : acc[m];
          multiply_add(to[n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1], T());
          multiply_add(to[n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3], T());
        }
      }
    }
    if constexpr (kHalves) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int c = 0; c < kEights * 4; ++c) acc[m][c / 4][c % 4] += odd[m][c / 4][c % 4];
      }
    }
  }
  copies_wait<0>();

  // A warp's totals are of its own keys.
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of = total[m][half];
      of += __shfl_xor_sync(0xffffffffu, of, 1);
      of += __shfl_xor_sync(0xffffffffu, of, 2);
      if (t == 0) bests_of(turns, m * 16 + half * 8 + g)[warp] = of;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[m][half] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total[m][half] += bests_of(turns, m * 16 + half * 8 + g)[w];
    }
  }
  if (kSize > 1 && part.own.active > 1) cluster_wait();
  leave_columns<T, kDim, kTiles, kSize>(p, part, sums, parts, there);
  end_part<T, kDim, kTiles, kSize>(p, part, parts, there);
}

}  // namespace trtspec
