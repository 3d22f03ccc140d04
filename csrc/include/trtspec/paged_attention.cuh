// Attention of a step's few query rows over a paged cache, bound by memory bandwidth ("split-KV" or
// "flash decoding").
//
// The keys of all requests and KV heads are one line of blocks of 64 keys, request by request and
// head by head. It is cut into equal shares, one for each thread block; all of them should run at
// once. A share can be the end of one group (a request and a KV head), whole groups, and the start
// of another:
//
//     groups   |----0----|--1--|------2------|--3--|
//     shares   |   0   |   1   |   2   |   3   |  4
//
// Each warp reads every fourth tile of 16 keys and their values, into its own places in shared
// memory, some tiles ahead. Nothing is shared by warps until the share, or the group in it, ends:
// there they join their softmax sums. A group that lies in several shares is joined by the thread
// block that ends last, in the order of shares, so that the bits do not depend on which one that is.
//
// Lengths and block tables come from the device. A warp asks for its first tiles before the previous
// kernel is done, unless that kernel may just be writing them.
#pragma once

#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kDim = 128, kTileKeys = 16, kAttendWarps = 4, kStages = 3;  // tiles ahead
constexpr int kBlockKeys = kTileKeys * kAttendWarps;
constexpr int kNewKeys = 64;  // so far before a request's first row keys may just be being written

struct AttendParams {
  const void* q;  // [requests * rows, heads, kDim]
  int64_t q_row, q_head;
  void* out;  // the same shape
  int64_t out_row, out_head;
  const void *k, *v;  // [slots, KV heads, kDim]
  int64_t k_row, k_head, v_row, v_head;
  const int* tables;  // [requests, table_width]
  int64_t table_row;
  int table_width, page_size;
  const int64_t* positions;  // [requests * rows]
  int requests, rows, kv_heads, per_kv, window;
  float scale;   // of scores in base 2
  float* sums;   // [2 * shares, pairs, kDim], of the groups at a share's start and end
  float* stats;  // [2 * shares, pairs, 2]
  int* tickets;  // [requests * KV heads], zeros before and after
};

// A part of a share: keys of one group.
struct Segment {
  int request, head;
  int first, blocks;  // of the group: its first block's number among its own keys, and how many
  int line;           // where the group begins among all blocks
  int position;       // of the request's first row
};

template <typename T>
struct Pair;
template <>
struct Pair<bf16> {
  static __device__ uint32_t of(float lo, float hi) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};
template <>
struct Pair<half_t> {
  static __device__ uint32_t of(float lo, float hi) {
    const __half2 v = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

// Four 8x8 matrices of 16-bit values; `at` is this lane's row of one of them.
template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&r)[4], const char* at) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  }
}

// As copy_16, or zeros.
__device__ inline void copy_16_if(void* target, const void* source, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source), "r"(is_there ? 16 : 0)
               : "memory");
}

// What a request's rows see.
struct Seen {
  int position;       // of the first row
  int first, blocks;  // of keys: the first block's number, and how many
};

__device__ inline Seen seen_by(const AttendParams& p, int request) {
  if (request >= p.requests) return {};
  const int position = static_cast<int>(__ldcg(p.positions + static_cast<int64_t>(request) * p.rows));
  const int first = p.window > 0 ? max(position - p.window + 1, 0) / kBlockKeys : 0;
  const int end = min(position + p.rows, p.table_width * p.page_size);
  return {position, first, (end + kBlockKeys - 1) / kBlockKeys - first};
}

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
      found.position = __shfl_sync(0xffffffffu, seen.position, owner);
      found.head = (block - of_request) / found.blocks;
      found.line = of_request + found.head * found.blocks;
      return found;
    }
    before += __shfl_sync(0xffffffffu, until, 31);
  }
  return found;
}

// Shared memory: the warps' places for keys and values, where their sums go at a group's end.
template <int kTiles>
__host__ __device__ constexpr int attend_shared_bytes() {
  constexpr int ring = kAttendWarps * kStages * 2 * kTileKeys * kDim * 2;
  constexpr int sums = kAttendWarps * kTiles * 16 * (kDim + 4) * 4;
  return ring > sums ? ring : sums;
}

// kTiles: of 16 pairs of a row and a head that read one KV head.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kAttendWarps * 32, 2)
    paged_attention(const __grid_constant__ AttendParams p) {
  constexpr int kPieces = kDim / 8;              // of 16 bytes in a key
  constexpr int kTileBytes = kTileKeys * kDim * 2;  // of keys or of values
  constexpr int kPairs = kTiles * 16, kSumRow = kDim + 4;
  extern __shared__ __align__(128) char shared[];
  __shared__ float best_of[kAttendWarps][kPairs], total_of[kAttendWarps][kPairs];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* const ring = shared + warp * kStages * 2 * kTileBytes;
  const Seen mine = seen_by(p, lane);
  const int all = count_blocks(p, mine, lane), share = (all + gridDim.x - 1) / gridDim.x;
  const int line_end = min(static_cast<int>(blockIdx.x + 1) * share, all);
  bool has_waited = false;

  auto end_of_keys = [&](const Segment& s) {
    return min((s.first + min(s.blocks, line_end - s.line)) * kBlockKeys,
               min(s.position + p.rows, p.table_width * p.page_size));
  };
  auto first_of_warp = [&](const Segment& s, int line) {
    return (s.first + line - s.line) * kBlockKeys + warp * kTileKeys;
  };
  // Lane i has the page of the warp's i-th tile from `key` on.
  auto page_at = [&](const Segment& s, int key) {
    key += lane * kBlockKeys;
    return key < end_of_keys(s) ? __ldcg(p.tables + s.request * p.table_row + key / p.page_size) : 0;
  };
  int line = blockIdx.x * share;
  Segment next = find_segment(p, mine, line, lane);
  int next_pages = line < line_end ? page_at(next, first_of_warp(next, line)) : 0;
  while (line < line_end) {
    const Segment s = next;
    const int end_block = min(s.blocks, line_end - s.line);
    const int key_end = end_of_keys(s), first_key = first_of_warp(s, line);
    const int tiles = first_key < key_end ? (key_end - first_key + kBlockKeys - 1) / kBlockKeys : 0;
    const T* const k = static_cast<const T*>(p.k) + s.head * p.k_head;
    const T* const v = static_cast<const T*>(p.v) + s.head * p.v_head;

    int page_of_lane = next_pages, pages_from = 0;
    auto fetch = [&](int i) {
      if (i < tiles) {
        if (i >= pages_from + 32) {
          pages_from = i;
          page_of_lane = page_at(s, first_key + i * kBlockKeys);
        }
        const int key = first_key + i * kBlockKeys;
        const int64_t page = __shfl_sync(0xffffffffu, page_of_lane, i - pages_from);
        const int64_t slot = page * p.page_size + key % p.page_size;
        char* const place = ring + i % kStages * 2 * kTileBytes;
#pragma unroll
        for (int j = 0; j < kTileKeys * kPieces / 32; ++j) {
          const int row = (j * 32 + lane) / kPieces, piece = (j * 32 + lane) % kPieces;
          const int to = row * kDim * 2 + (piece ^ (row & 7)) * 16;
          const bool is_there = key + row < key_end;
          copy_16_if(place + to, k + (slot + row) * p.k_row + piece * 8, is_there);
          copy_16_if(place + kTileBytes + to, v + (slot + row) * p.v_row + piece * 8, is_there);
        }
      }
      copies_commit();
    };

    int fetched = 0;
    if (!has_waited) {
      const int old = s.position - kNewKeys;  // keys before it are older than the previous kernel
      while (fetched < kStages && first_key + fetched * kBlockKeys + kTileKeys <= old) {
        fetch(fetched++);
      }
      wait_for_previous();
      let_next_start();
      has_waited = true;
    }
    for (; fetched < kStages; ++fetched) fetch(fetched);

    // Pairs g and g + 8 of each tile: where their rows are, and their queries.
    uint32_t q[kTiles][kDim / 16][4];
    int position_of[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = m * 16 + half * 8 + g, row = pair / p.per_kv;
        const bool is_pair = row < p.rows;
        const int64_t at = static_cast<int64_t>(s.request) * p.rows + row;
        position_of[m][half] =
            is_pair ? static_cast<int>(__ldcg(p.positions + at)) : s.position + p.rows;
        const T* from = static_cast<const T*>(p.q) + at * p.q_row +
                        (s.head * p.per_kv + pair % p.per_kv) * p.q_head + t * 2;
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
          q[m][step][half] = is_pair ? *reinterpret_cast<const uint32_t*>(from + step * 16) : 0;
          q[m][step][2 + half] =
              is_pair ? *reinterpret_cast<const uint32_t*>(from + step * 16 + 8) : 0;
        }
      }
    }
    // Keys that all rows see: from `clear_from` to before `clear_to`.
    int lowest = position_of[0][0], highest = lowest;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = position_of[m][half];
        lowest = min(lowest, at), highest = max(highest, at);
      }
    }
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
      lowest = min(lowest, __shfl_xor_sync(0xffffffffu, lowest, mask));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, mask));
    }
    const int clear_to = min(lowest + 1, key_end);
    const int clear_from = p.window > 0 ? highest - p.window + 1 : 0;

    float acc[kTiles][kDim / 8][4] = {};
    float best[kTiles][2], total[kTiles][2] = {};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = -INFINITY;

    for (int i = 0; i < tiles; ++i) {
      copies_wait<kStages - 1>();
      __syncwarp();
      const int key = first_key + i * kBlockKeys;
      const char* const keys = ring + i % kStages * 2 * kTileBytes;
      const char* const values = keys + kTileBytes;
      const int matrix = lane / 8, of_matrix = lane % 8;
      float scores[kTiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t b[4];
        const int row = matrix / 2 * 8 + of_matrix, piece = step * 2 + matrix % 2;
        load_matrices<false>(b, keys + row * kDim * 2 + (piece ^ (row & 7)) * 16);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const uint32_t(&a)[4] = q[m][step];
          multiply_add(scores[m][0], a[0], a[1], a[2], a[3], b[0], b[1], T());
          multiply_add(scores[m][1], a[0], a[1], a[2], a[3], b[2], b[3], T());
        }
      }
      const bool is_clear = key + kTileKeys <= clear_to && key >= clear_from;
      uint32_t weights[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float highest_of[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const int half = c % 4 / 2;
          float& score = scores[m][c / 4][c % 4];
          score *= p.scale;
          if (!is_clear) {
            const int n = key + c / 4 * 8 + t * 2 + c % 2, at = position_of[m][half];
            if (n > at || n >= key_end || (p.window > 0 && n <= at - p.window)) score = -INFINITY;
          }
          // Not fmaxf, which drops NaN: a NaN must reach the output.
          highest_of[half] = score <= highest_of[half] ? highest_of[half] : score;
        }
        bool is_same = true;
        float keep[2], base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& highest_here = highest_of[half];
#pragma unroll
          for (int mask = 1; mask < 4; mask *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, highest_here, mask);
            highest_here = other <= highest_here ? highest_here : other;
          }
          const float now = highest_here <= best[m][half] ? best[m][half] : highest_here;
          base[half] = now == -INFINITY ? 0.0f : now;
          keep[half] = exp2f(best[m][half] - base[half]);
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
          score = exp2f(score - base[c % 4 / 2]);
          total[m][c % 4 / 2] += score;
        }
        weights[m][0] = Pair<T>::of(scores[m][0][0], scores[m][0][1]);
        weights[m][1] = Pair<T>::of(scores[m][0][2], scores[m][0][3]);
        weights[m][2] = Pair<T>::of(scores[m][1][0], scores[m][1][1]);
        weights[m][3] = Pair<T>::of(scores[m][1][2], scores[m][1][3]);
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
      fetch(i + kStages);
    }

    line = s.line + end_block;
    if (line < line_end) {
      next = find_segment(p, mine, line, lane);
      next_pages = page_at(next, first_of_warp(next, line));
    }

    // The warps' sums, through shared memory.
    copies_wait<0>();
    __syncthreads();  // all warps are done with their rings
    float* const sums_of = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = m * 16 + half * 8 + g;
        float& sum = total[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0) best_of[warp][pair] = best[m][half], total_of[warp][pair] = sum;
        float* const to = sums_of + (warp * kPairs + pair) * kSumRow + t * 2;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          *reinterpret_cast<float2*>(to + d * 8) = {acc[m][d][half * 2], acc[m][d][half * 2 + 1]};
        }
      }
    }
    __syncthreads();

    // Columns of a pair for each thread: of this share, or of all shares of the group.
    const int pairs = p.rows * p.per_kv;
    auto columns = [&](int index, int& pair, int& column) {
      pair = index / (kDim / 4), column = index % (kDim / 4) * 4;
    };
    auto write = [&](int pair, int column, float4 sum, float total_sum) {
      const float scale = total_sum > 0.0f ? 1.0f / total_sum : total_sum == 0.0f ? 1.0f : total_sum;
      const int64_t row = static_cast<int64_t>(s.request) * p.rows + pair / p.per_kv;
      T* to = static_cast<T*>(p.out) + row * p.out_row +
              (s.head * p.per_kv + pair % p.per_kv) * p.out_head + column;
      *reinterpret_cast<uint2*>(to) = {Pair<T>::of(sum.x * scale, sum.y * scale),
                                       Pair<T>::of(sum.z * scale, sum.w * scale)};
    };
    auto add = [](float4& sum, float4 other, float weight) {
      sum.x = fmaf(other.x, weight, sum.x), sum.y = fmaf(other.y, weight, sum.y);
      sum.z = fmaf(other.z, weight, sum.z), sum.w = fmaf(other.w, weight, sum.w);
    };
    const int first_share = s.line / share, last_share = (s.line + s.blocks - 1) / share;
    const bool is_whole = first_share == last_share;
    for (int i = threadIdx.x; i < pairs * (kDim / 4); i += kAttendWarps * 32) {
      int pair, column;
      columns(i, pair, column);
      float highest_best = -INFINITY;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        const float other = best_of[w][pair];
        highest_best = other <= highest_best ? highest_best : other;
      }
      const float base = highest_best == -INFINITY ? 0.0f : highest_best;
      float4 sum = {};
      float total_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        const float weight = exp2f(best_of[w][pair] - base);
        const float* from = sums_of + (w * kPairs + pair) * kSumRow + column;
        add(sum, *reinterpret_cast<const float4*>(from), weight);
        total_sum = fmaf(total_of[w][pair], weight, total_sum);
      }
      if (is_whole) {
        write(pair, column, sum, total_sum);
      } else {
        const int64_t at = (blockIdx.x * 2 + (first_share == blockIdx.x)) * pairs + pair;
        *reinterpret_cast<float4*>(p.sums + at * kDim + column) = sum;
        if (column == 0) *reinterpret_cast<float2*>(p.stats + at * 2) = {highest_best, total_sum};
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
              const int64_t at = static_cast<int64_t>(of * 2 + (of == first_share)) * pairs + pair;
              others[u][j] = __ldcg(reinterpret_cast<const float4*>(p.sums + at * kDim + column));
              stats[u][j] = __ldcg(reinterpret_cast<const float2*>(p.stats + at * 2));
            }
          }
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
              const float other = stats[u][j].x;
              const float now = other <= best_sum[j] ? best_sum[j] : other;
              const float base = now == -INFINITY ? 0.0f : now;
              const float keep = exp2f(best_sum[j] - base), weight = exp2f(other - base);
              sum[j].x *= keep, sum[j].y *= keep, sum[j].z *= keep, sum[j].w *= keep;
              total_sum[j] = fmaf(stats[u][j].y, weight, total_sum[j] * keep);
              add(sum[j], others[u][j], weight);
              best_sum[j] = now;
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          int pair, column;
          columns(threadIdx.x + j * kAttendWarps * 32, pair, column);
          if (pair < pairs) write(pair, column, sum[j], total_sum[j]);
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
