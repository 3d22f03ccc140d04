// Attention of a step's few query rows: a cluster of thread blocks for each group, some rows of a request and
// a KV head, or one block alone. The warps of a cluster take turns at its tiles of 16 keys. Their softmax
// sums are joined through shared memory, a thread block's first, then the cluster's. Blocks that a
// group with few keys does not need return at once.
//
// No thread block looks for its keys, and nothing goes through global memory. But a group that is much
// longer than the others ends last.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "attend_keys.cuh"

namespace trtspec {

constexpr int kClusterStages = 2;  // tiles ahead; three and four were mostly slower

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

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
__global__ void __launch_bounds__(
    kWarps * 32, (Cluster<kSize, kWarps>::template at_once<kDim, kTiles>()))
    cluster_attention(const __grid_constant__ AttendParams p) {
  constexpr int kPairs = kTiles * 16, kColumns = kDim / 4;
  extern __shared__ __align__(128) char shared[];
  __shared__ float2 stats_of[kWarps][kPairs], stats[kPairs];
  __shared__ float4 joined[kSize > 1 ? kPairs : 1][kColumns];
  const int warp = threadIdx.x / 32, rank = blockIdx.x % kSize, number = blockIdx.x / kSize;
  const Group group = group_of(p, number);
  if (group.rows == 0) return;
  const int blocks = (group.end - group.first + kBlockKeys - 1) / kBlockKeys;
  const int active = Cluster<kSize, kWarps>::active(blocks);
  // The next kernel starts when all blocks have let it or are gone: rank 0 has waited by then, or will
  // before it ends.
  if (rank >= active) return;
  const Keys keys = {group.first + (rank * kWarps + warp) * kTileKeys, active * kWarps * kTileKeys,
                     group.end};
  WarpSums<kDim, kTiles> sums;
  char* const ring = shared + warp * kClusterStages * 2 * kTileKeys * kDim * 2;
  const int slots = slots_of_tiles(p, group, keys);
  attend_keys<T, kDim, kTiles, kClusterStages>(p, group, keys, slots, ring, sums);
  __syncthreads();  // all warps are done with their rings
  float* const sums_of = reinterpret_cast<float*>(shared);
  leave_sums(sums, group.rows * p.per_kv, sums_of, stats_of);
  __syncthreads();

  constexpr int kThreads = kWarps * 32;
  const int items = group.rows * p.per_kv * kColumns;
  auto join_items = [&](auto together) {  // a thread's items of this number wait for shared memory together
    constexpr int kItems = decltype(together)::value;
    for (int first = threadIdx.x; first < items; first += kItems * kThreads) {
      Joined of_block[kItems];
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const int i = min(first + n * kThreads, items - 1);
        of_block[n] = join_warps<kDim, kTiles, kWarps>(sums_of, stats_of, i / kColumns, i % kColumns * 4);
      }
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const int i = first + n * kThreads, pair = i / kColumns, column = i % kColumns;
        if (i >= items) break;
        if (active == 1) {
          write_attention<T>(p, group, pair, column * 4, of_block[n]);
        } else if constexpr (kSize > 1) {
          joined[pair][column] = of_block[n].sum;
          if (column == 0) stats[pair] = {of_block[n].best, of_block[n].total};
        }
      }
    }
  };
  if (kWarps == 4 && items > kThreads) {
    join_items(std::integral_constant<int, 2>());
  } else {
    join_items(std::integral_constant<int, 1>());
  }
  if (p.is_beside) wait_for_previous();  // who waits for this kernel has waited for that one, too
  if (active == 1) return;
  const auto cluster = cooperative_groups::this_cluster();
  const int each = (items + active - 1) / active;
  cluster.sync();  // of those that have not returned
  // Many blocks' sums of four columns of a pair are joined by four threads, or two. One sum is added up in
  // as many parts by either, in one order.
  constexpr int kParts = kSize >= 8 ? 4 : 1, kEach = kSize / kParts;
  auto join_blocks = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kOwn = kParts / kLanes;
    const int lane = threadIdx.x % kLanes, end = min((rank + 1) * each, items);
    const unsigned together = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    for (int i = rank * each + threadIdx.x / kLanes; i < end; i += kThreads / kLanes) {
      const int pair = i / kColumns, column = i % kColumns;
      float2 of[kOwn][kEach];
      float4 part[kOwn][kEach];
#pragma unroll
      for (int n = 0; n < kOwn * kEach; ++n) {
        const int r = lane + n * kLanes;
        float2& of_r = of[n % kOwn][n / kOwn];
        float4& part_of_r = part[n % kOwn][n / kOwn];
        of_r = {-INFINITY, 0.0f}, part_of_r = {};
        if (r >= active) continue;
        of_r = *cluster.map_shared_rank(&stats[pair], r);
        part_of_r = *cluster.map_shared_rank(&joined[kSize > 1 ? pair : 0][column], r);
      }
      float best = -INFINITY;
#pragma unroll
      for (int n = 0; n < kOwn * kEach; ++n) best = better(of[n % kOwn][n / kOwn].x, best);
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        best = better(best, __shfl_xor_sync(together, best, mask));
      }
      const float base = base_of(best);
      Joined sum[kOwn];
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
        sum[o] = {best, 0.0f, {}};
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const float weight = exp2_of(of[o][j].x - base);
          add_weighted(sum[o].sum, part[o][j], weight);
          sum[o].total = fmaf(of[o][j].y, weight, sum[o].total);
        }
      }
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) {
          auto& [unused, all, values] = sum[o];
          for (float* x : {&values.x, &values.y, &values.z, &values.w, &all}) {
            *x += __shfl_xor_sync(together, *x, mask);
          }
        }
      }
#pragma unroll
      for (int o = 1; o < kOwn; ++o) add_weighted(sum[0].sum, sum[o].sum, 1.0f), sum[0].total += sum[o].total;
      if (lane == 0) write_attention<T>(p, group, pair, column * 4, sum[0]);
    }
  };
  // (A round of reading other blocks' memory takes longer than the sums do.)
  if constexpr (kParts > 1) {
    if (each * kParts > kThreads) {
      join_blocks(std::integral_constant<int, kParts / 2>());
    } else {
      join_blocks(std::integral_constant<int, kParts>());
    }
  } else {
    join_blocks(std::integral_constant<int, 1>());
  }
  cluster.sync();  // others may still be reading this block's shared memory
}

}  // namespace trtspec
