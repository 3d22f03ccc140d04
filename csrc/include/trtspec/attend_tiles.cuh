// What warps attend with: queries, the keys that they read, the scores of 16 of them by tensor cores.
#pragma once

#include "attend_group.cuh"

namespace trtspec {

// Keys of one group that a warp reads: tiles from `first` on, `apart` keys apart, to before `end`.
struct Keys {
  int first, apart, end;
};

// Whether the keys of a warp's i-th tile are older than the previous kernel, which may just be writing others.
__device__ inline bool is_older(const Group& group, const Keys& keys, int i) {
  return keys.first + i * keys.apart + kTileKeys <= group.position - kNewKeys;
}

// Lane i has the first slot of the warp's i-th tile.
__device__ inline int slots_of_tiles(const AttendParams& p, const Group& group, const Keys& keys,
                                     int from = 0) {
  const int key = keys.first + (from + static_cast<int>(threadIdx.x % 32)) * keys.apart;
  if (key >= keys.end) return 0;
  const int page = key / p.page_size, in_page = key - page * p.page_size;
  return __ldcg(p.tables + group.request * p.table_row + page) * p.page_size + in_page;
}

// The queries of a group's pairs, which a thread block's threads take to shared memory in pieces of 16 bytes:
// [kTiles * 16, kDim], zeros where there is no pair.
template <typename T, int kDim, int kTiles, int kThreads>
struct QueryPieces {
  static constexpr int kOfPair = kDim / 8, kAll = kTiles * 16 * kOfPair;
  static constexpr int kOwn = (kAll + kThreads - 1) / kThreads;
  const uint4* from[kOwn];
  uint4 pieces[kOwn];

  __device__ static int piece_of(int n) { return static_cast<int>(threadIdx.x) + n * kThreads; }

  __device__ void find(const AttendParams& p, const Group& group) {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int pair = piece_of(n) / kOfPair, row = row_of(p, pair);
      const int head = group.head * p.per_kv + pair - row * p.per_kv;
      const T* const at = static_cast<const T*>(p.q) + (group.row + row) * p.q_row + head * p.q_head;
      from[n] = row < group.rows ? reinterpret_cast<const uint4*>(at) + piece_of(n) % kOfPair : nullptr;
    }
  }

  __device__ void load() {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) pieces[n] = from[n] ? __ldcg(from[n]) : uint4{};
  }

  __device__ void store(char* to) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int pair = piece_of(n) / kOfPair, piece = piece_of(n) % kOfPair;
      if (piece_of(n) >= kAll) break;
      *reinterpret_cast<uint4*>(to + pair * kDim * 2 + (piece ^ (pair & 7)) * 16) = pieces[n];
    }
  }
};

// All queries of the group as the left operands of products, from where QueryPieces has put them.
template <int kDim, int kTiles>
__device__ inline void load_queries(uint32_t (&q)[kTiles][kDim / 16][4], const char* from) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, of_matrix = lane % 8;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int pair = m * 16 + matrix % 2 * 8 + of_matrix, piece = step * 2 + matrix / 2;
      load_matrices<false>(q[m][step], from + pair * kDim * 2 + (piece ^ (pair & 7)) * 16);
    }
  }
}

// Where the rows of a lane's pairs g and g + 8 of each tile are, and the keys that all pairs see.
template <int kTiles>
struct PairPositions {
  int of[kTiles][2];
  int clear_from, clear_to;

  __device__ void find(const AttendParams& p, const Group& group) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(p, m * 16 + half * 8 + g);
        of[m][half] = row < group.rows ? static_cast<int>(__ldcg(p.positions + group.row + row)) : group.end;
      }
    }
  }

  __device__ void find_clear(const AttendParams& p, const Group& group) {
    int lowest = of[0][0], highest = lowest;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lowest = min(lowest, of[m][half]), highest = max(highest, of[m][half]);
      }
    }
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
      lowest = min(lowest, __shfl_xor_sync(0xffffffffu, lowest, mask));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, mask));
    }
    clear_to = min(lowest + 1, group.end);
    clear_from = p.window > 0 ? highest - p.window + 1 : 0;
  }
};

// The scores of 16 keys from `key` on, -inf of those that a pair does not see. kHalves: sums of even and of odd
// pieces of 16 columns do not wait for each other.
template <typename T, int kDim, int kTiles, bool kHalves>
__device__ inline void score_tile(const AttendParams& p, const PairPositions<kTiles>& positions, int end, int key,
                                  const uint32_t (&q)[kTiles][kDim / 16][4], const char* keys,
                                  float (&scores)[kTiles][2][4]) {
  const int lane = threadIdx.x % 32, t = lane % 4, matrix = lane / 8, of_matrix = lane % 8;
  float odd[kTiles][2][4] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int c = 0; c < 8; ++c) scores[m][c / 4][c % 4] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    const int row = matrix / 2 * 8 + of_matrix, piece = step * 2 + matrix % 2;
    load_matrices<false>(b, keys + row * kDim * 2 + (piece ^ (row & 7)) * 16);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const uint32_t(&a)[4] = q[m][step];
      auto& to = kHalves && step % 2 ? odd[m] : scores[m];
      multiply_add(to[0], a[0], a[1], a[2], a[3], b[0], b[1], T());
      multiply_add(to[1], a[0], a[1], a[2], a[3], b[2], b[3], T());
    }
  }
  const bool is_clear = key + kTileKeys <= positions.clear_to && key >= positions.clear_from;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float& score = scores[m][c / 4][c % 4];
      if (kHalves) score += odd[m][c / 4][c % 4];
      if (is_clear) continue;
      const int n = key + c / 4 * 8 + t * 2 + c % 2, at = positions.of[m][c % 4 / 2];
      if (n > at || n >= end || (p.window > 0 && n <= at - p.window)) score = -INFINITY;
    }
  }
}

// The best of a tile's scores of pair g or g + 8, in all lanes of the pair.
__device__ inline float best_of(const float (&scores)[2][4], int half) {
  float now = better(better(scores[0][half * 2], scores[0][half * 2 + 1]),
                     better(scores[1][half * 2], scores[1][half * 2 + 1]));
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) now = better(now, __shfl_xor_sync(0xffffffffu, now, mask));
  return now;
}

}  // namespace trtspec
