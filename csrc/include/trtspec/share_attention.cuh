// Attention of a step's few query rows, bound by memory bandwidth: all keys in equal shares
// ("split-KV" or "flash decoding").
//
// The keys of all requests and KV heads are one line of blocks of 64 keys, request by request and
// head by head. It is cut into equal shares, one for each thread block; all of them should run at
// once. A share can be the end of one group (a request and a KV head), whole groups, and the start
// of another:
//
//     groups   |----0----|--1--|------2------|--3--|
//     shares   |   0   |   1   |   2   |   3   |  4
//
// Where the share, or the group in it, ends, the warps join their softmax sums. A group that lies in
// several shares is joined by the thread block that ends last, in the order of shares, so that the
// bits do not depend on which one that is.
#pragma once

#include "attend_keys.cuh"

namespace trtspec {

// Blocks of all requests and heads. `mine`: what this lane's request sees, of the first 32.
__device__ inline int count_blocks(const AttendParams& p, const Seen& mine, int lane) {
  int total = mine.blocks;
  for (int i = lane + 32; i < p.requests; i += 32) total += seen_by(p, i).blocks;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
  return total * p.kv_heads;
}

// The group that holds a block of the line. All lanes of a warp call it.
__device__ inline Segment find_segment(const AttendParams& p, const Seen& mine, int block,
                                       int lane) {
  Segment found = {};
  int before = 0;
  for (int base = 0; base < p.requests; base += 32) {
    const Seen seen = base == 0 ? mine : seen_by(p, base + lane);
    int until = seen.blocks * p.kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += other;
    }
    const unsigned after = __ballot_sync(0xffffffffu, before + until > block);
    if (after != 0) {
      const int owner = __ffs(after) - 1;
      const int begin = before + until - seen.blocks * p.kv_heads;
      const int of_request = __shfl_sync(0xffffffffu, begin, owner);
      found.request = base + owner;
      found.blocks = __shfl_sync(0xffffffffu, seen.blocks, owner);
      found.first = __shfl_sync(0xffffffffu, seen.first, owner);
      found.row = __shfl_sync(0xffffffffu, seen.row, owner);
      found.rows = __shfl_sync(0xffffffffu, seen.rows, owner);
      found.position = __shfl_sync(0xffffffffu, seen.position, owner);
      found.head = (block - of_request) / found.blocks;
      found.line = of_request + found.head * found.blocks;
      return found;
    }
    before += __shfl_sync(0xffffffffu, until, 31);
  }
  return found;
}

constexpr int kShareDim = 128, kShareStages = 3;  // tiles ahead

// kTiles: of 16 pairs of a row and a head that read one KV head.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kAttendWarps * 32, 2)
    share_attention(const __grid_constant__ AttendParams p) {
  constexpr int kDim = kShareDim, kPairs = kTiles * 16;
  extern __shared__ __align__(128) char shared[];
  __shared__ float2 stats_of[kAttendWarps][kPairs];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* const ring = shared + warp * kShareStages * 2 * kTileKeys * kDim * 2;
  const Seen mine = seen_by(p, lane);
  const int all = count_blocks(p, mine, lane), share = (all + gridDim.x - 1) / gridDim.x;
  const int line_end = min(static_cast<int>(blockIdx.x + 1) * share, all);
  bool has_waited = false;

  auto end_of_keys = [&](const Segment& s) {
    return min((s.first + min(s.blocks, line_end - s.line)) * kBlockKeys,
               min(s.position + s.rows, p.table_width * p.page_size));
  };
  auto keys_from = [&](const Segment& s, int line) -> Keys {
    return {(s.first + line - s.line) * kBlockKeys + warp * kTileKeys, kBlockKeys, end_of_keys(s)};
  };
  int line = blockIdx.x * share;
  Segment next = find_segment(p, mine, line, lane);
  int next_slots = line < line_end ? slots_of_tiles(p, next, keys_from(next, line)) : 0;
  while (line < line_end) {
    const Segment s = next;
    const int end_block = min(s.blocks, line_end - s.line);
    WarpSums<kDim, kTiles> sums;
    attend_keys<T, kDim, kTiles, kShareStages>(p, s, keys_from(s, line), next_slots, ring,
                                               has_waited, sums);

    line = s.line + end_block;
    if (line < line_end) {
      next = find_segment(p, mine, line, lane);
      next_slots = slots_of_tiles(p, next, keys_from(next, line));
    }

    // The warps' sums, through shared memory.
    __syncthreads();  // all warps are done with their rings
    float* const sums_of = reinterpret_cast<float*>(shared);
    leave_sums(sums, s.rows * p.per_kv, sums_of, stats_of);
    __syncthreads();

    // Columns of a pair for each thread: of this share, or of all shares of the group.
    const int pairs = s.rows * p.per_kv, room = p.rows * p.per_kv;
    auto columns = [&](int index, int& pair, int& column) {
      pair = index / (kDim / 4), column = index % (kDim / 4) * 4;
    };
    const int first_share = s.line / share, last_share = (s.line + s.blocks - 1) / share;
    const bool is_whole = first_share == last_share;
    for (int i = threadIdx.x; i < pairs * (kDim / 4); i += kAttendWarps * 32) {
      int pair, column;
      columns(i, pair, column);
      const auto [best, total, sum] = join_warps<kDim, kTiles>(sums_of, stats_of, pair, column);
      if (is_whole) {
        write_attention<T>(p, s, pair, column, sum, total);
      } else {
        const int64_t at = (blockIdx.x * 2 + (first_share == blockIdx.x)) * room + pair;
        *reinterpret_cast<float4*>(p.sums + at * kDim + column) = sum;
        if (column == 0) *reinterpret_cast<float2*>(p.stats + at * 2) = {best, total};
      }
    }
    if (!is_whole) {
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        int* const ticket = p.tickets + s.request * p.kv_heads + s.head;
        is_last = atomicAdd(ticket, 1) == last_share - first_share;
        if (is_last) *ticket = 0;
        __threadfence();
      }
      __syncthreads();
      if (is_last) {
        // All that a thread reads of a few shares is on its way at once.
        constexpr int kItems = kPairs * (kDim / 4) / (kAttendWarps * 32), kAtOnce = 16 / kItems;
        float4 sum[kItems] = {};
        float best_sum[kItems], total_sum[kItems] = {};
#pragma unroll
        for (int j = 0; j < kItems; ++j) best_sum[j] = -INFINITY;
        for (int from = first_share; from <= last_share; from += kAtOnce) {
          float4 others[kAtOnce][kItems];
          float2 stats[kAtOnce][kItems];
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u) {
            const int of = from + u;
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
              int pair, column;
              columns(threadIdx.x + j * kAttendWarps * 32, pair, column);
              others[u][j] = {}, stats[u][j] = {-INFINITY, 0.0f};
              if (of > last_share || pair >= pairs) continue;
              const int64_t at = static_cast<int64_t>(of * 2 + (of == first_share)) * room + pair;
              others[u][j] = __ldcg(reinterpret_cast<const float4*>(p.sums + at * kDim + column));
              stats[u][j] = __ldcg(reinterpret_cast<const float2*>(p.stats + at * 2));
            }
          }
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
              const float other = stats[u][j].x;
              const float now = better(other, best_sum[j]);
              const float base = base_of(now);
              const float keep = exp2_of(best_sum[j] - base), weight = exp2_of(other - base);
              sum[j].x *= keep, sum[j].y *= keep, sum[j].z *= keep, sum[j].w *= keep;
              total_sum[j] = fmaf(stats[u][j].y, weight, total_sum[j] * keep);
              add_weighted(sum[j], others[u][j], weight);
              best_sum[j] = now;
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          int pair, column;
          columns(threadIdx.x + j * kAttendWarps * 32, pair, column);
          if (pair < pairs) write_attention<T>(p, s, pair, column, sum[j], total_sum[j]);
        }
      }
    }
    if (line < line_end) __syncthreads();  // the rings take the sums' place again
  }
  if (!has_waited) {
    wait_for_previous();
    let_next_start();
  }
}

}  // namespace trtspec
