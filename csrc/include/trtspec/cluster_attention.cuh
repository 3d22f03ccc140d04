// Attention of a step's few query rows: a cluster of thread blocks for each group, some rows of a request and
// a KV head, or one block alone. The warps of a cluster take turns at its tiles of 16 keys, those of a block one
// after the other. Blocks that a group with few keys does not need return at once. What a block does with its
// keys is in narrow_attention.cuh (heads of 64) and wide_attention.cuh (others).
//
// The blocks of a cluster send what they have of a pair to the block that writes it. No thread block looks
// for its keys, and nothing goes through global memory. But a group that is much longer than the others ends
// last.
#pragma once

#include "attend_tiles.cuh"
#include "hopper.cuh"

namespace trtspec {

// Thread blocks of a group, and their warps.
template <int kSize, int kWarps>
struct Cluster {
  // Blocks of 64 keys for each thread block: with more, another one joins in.
  static constexpr int kAlone = kSize == 16 ? 1 : kSize > 2 ? 2 : kWarps == 8 ? 4 : 3;
  // So few that joining takes longer than reading them alone.
  static constexpr int kFew = kWarps == 8 ? 4 : kAlone;

  __device__ static int active(int blocks) {
    return blocks <= kFew ? 1 : min((blocks + kAlone - 1) / kAlone, kSize);
  }

  // Thread blocks that must find room on a multiprocessor: what registers allow.
  template <int kDim, int kTiles>
  static constexpr int at_once() {
    if (kDim == 256) return 1;
    return (kWarps == 4 ? 2 : 1) * (kDim == 64 && kTiles == 1 ? 2 : 1);
  }
};

// The pairs of a group that a block of a cluster writes: each `active`th.
struct OwnPairs {
  int rank, active;
  int count, most;  // most: of any block
};

// What a thread block attends to.
struct BlockPart {
  Group group;
  int pairs;  // of the group
  OwnPairs own;
  Keys keys;  // of this warp
  int turns;  // of the block's warps at tiles, one even where there are no keys
};

// What the cluster's blocks send of a block's own pairs, [blocks, own pairs, kNumbers]: each pair's columns, the
// best score, the total.
template <int kDim, int kTiles, int kSize>
struct SentSums {
  static constexpr int kNumbers = kDim + 4, kPairBytes = (kDim + 2) * 4;
  static constexpr int kBytes = kSize > 1 ? (kTiles * 16 + kSize) * kNumbers * 4 : 0;
};

// Finds this block's part, and makes `there` count what other blocks send. Returns whether it has any.
//
// The next kernel starts when all blocks have let it or are gone: rank 0 has waited by then, or will before it ends.
template <int kPairBytes, int kSize, int kWarps>
__device__ inline bool begin_part(const AttendParams& p, BlockPart& part, Barrier& there) {
  const int rank = blockIdx.x % kSize;
  part.group = group_of(p, blockIdx.x / kSize);
  const Group& group = part.group;
  if (group.rows == 0) return false;
  const int blocks = (group.end - group.first + kBlockKeys - 1) / kBlockKeys;
  const int active = Cluster<kSize, kWarps>::active(blocks);
  if (rank >= active) return false;
  part.pairs = group.rows * p.per_kv;
  part.own = {rank, active, (part.pairs - rank + active - 1) / active, (part.pairs + active - 1) / active};
  if (kSize > 1 && active > 1) {
    if (threadIdx.x == 0) {
      there.init(1);
      fence_barriers();
      there.arrive_and_expect(active * part.own.count * kPairBytes);
    }
    cluster_arrive();
  }
  constexpr int kOfTurn = kWarps * kTileKeys;
  const int apart = active * kOfTurn, first = group.first + rank * kOfTurn;
  part.keys = {first + static_cast<int>(threadIdx.x / 32) * kTileKeys, apart, group.end};
  part.turns = max((group.end - first + apart - 1) / apart, 1);
  return true;
}

// Where a block's part of a pair goes, and the barrier that counts its bytes.
struct Receiver {
  uint32_t place, barrier;

  __device__ Receiver(const OwnPairs& own, int pair, float* parts, int numbers, Barrier& there)
      : place(remote_address(parts + (own.rank * own.most + pair / own.active) * numbers, pair % own.active)),
        barrier(remote_address(&there, pair % own.active)) {}

  __device__ void send(int column, float x, float y) const { send_pair(place + column * 4, barrier, x, y); }
};

// A warp's columns of a block's attention over all its keys, and each pair's best score and total.
template <int kTiles, int kEights>
struct ColumnSums {
  float acc[kTiles][kEights][4] = {};
  float best[kTiles][2], total[kTiles][2] = {};
};

// Writes a warp's columns of all pairs, or sends them to the blocks that do, once all blocks have begun.
template <typename T, int kDim, int kTiles, int kSize, int kEights>
__device__ inline void leave_columns(const AttendParams& p, const BlockPart& part,
                                     const ColumnSums<kTiles, kEights>& sums, float* parts, Barrier& there) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int column = warp * kEights * 8 + t * 2;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = m * 16 + half * 8 + g;
      const float best = sums.best[m][half], total = sums.total[m][half];
      if (pair >= part.pairs) continue;
      if (part.own.active == 1) {
        const float scale = last_scale<T>(p, part.group, pair, best, total);
        T* const to = output_of<T>(p, part.group, pair) + column;
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          const float(&of)[4] = sums.acc[m][n];
          *reinterpret_cast<uint32_t*>(to + n * 8) = pack(of[half * 2] * scale, of[half * 2 + 1] * scale, T());
        }
      } else if constexpr (kSize > 1) {
        const Receiver receiver(part.own, pair, parts, SentSums<kDim, kTiles, kSize>::kNumbers, there);
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          receiver.send(column + n * 8, sums.acc[m][n][half * 2], sums.acc[m][n][half * 2 + 1]);
        }
        if (warp == 0 && t == 0) receiver.send(kDim, best, total);
      }
    }
  }
}

// Writes the block's own pairs, once all blocks have sent theirs.
template <typename T, int kDim, int kTiles, int kSize>
__device__ inline void end_part(const AttendParams& p, const BlockPart& part, const float* parts, Barrier& there) {
  constexpr int kFours = kDim / 4, kNumbers = SentSums<kDim, kTiles, kSize>::kNumbers;
  const OwnPairs& own = part.own;
  if (p.is_beside) wait_for_previous();  // who waits for this kernel has waited for that one, too
  if (kSize == 1 || own.active == 1 || own.count == 0) return;
  there.wait(0);
  for (int i = threadIdx.x; i < own.count * kFours; i += blockDim.x) {
    const int column = i % kFours * 4;
    const float* const of_own = parts + i / kFours * kNumbers;
    float2 stats[kSize];
    float4 columns[kSize];
    Joined all = {-INFINITY, 0.0f, {}};
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      stats[r] = {-INFINITY, 0.0f}, columns[r] = {};
      if (r >= own.active) continue;
      const float* const from = of_own + r * own.most * kNumbers;
      stats[r] = *reinterpret_cast<const float2*>(from + kDim);
      columns[r] = *reinterpret_cast<const float4*>(from + column);
      all.best = better(stats[r].x, all.best);
    }
    const float base = base_of(all.best);
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      const float weight = exp2_of(stats[r].x - base);
      add_weighted(all.sum, columns[r], weight);
      all.total = fmaf(stats[r].y, weight, all.total);
    }
    write_attention<T>(p, part.group, own.rank + i / kFours * own.active, column, all);
  }
}

}  // namespace trtspec
