// Attention over a paged cache of a step's few query rows, by one warp: reading keys and values, and
// softmax sums of 16 keys at a time with tensor cores. cluster_attention.cuh cuts a group's keys (a
// group is some rows of a request and a KV head) among warps and thread blocks.
//
// A warp reads every so many tiles of 16 keys and their values into its own places in shared memory,
// some tiles ahead. Nothing is shared by warps until the end.
//
// Lengths and block tables come from the device. A warp asks for its first tiles before the previous
// kernel is done, unless that kernel may just be writing them.
#pragma once

#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kTileKeys = 16;
constexpr int kBlockKeys = 64;  // of a block of keys: a group's length is counted in these
constexpr int kNewKeys = 64;  // so far before a request's first row keys may just be being written

struct AttendParams {
  const void* q;  // [rows of all, heads, kDim]
  int64_t q_row, q_head;
  void* out;  // the same shape
  int64_t out_row, out_head;
  const void *k, *v;  // [slots, KV heads, kDim]
  int k_row, v_row;
  int64_t k_head, v_head;
  const int* tables;  // [requests, table_width]
  int64_t table_row;
  int table_width, page_size;
  const int64_t* positions;  // [rows of all]
  const int* starts;         // [requests + 1], their first rows; null: `rows` each
  int requests, rows, kv_heads, per_kv, window;  // rows: of a request, with starts at most
  int part_rows;  // of a request, that one group has; 1 … rows
  int kv_inverse;  // 65536 / per_kv + 1
  const void* sinks;  // [heads], logits beside the scores, of the queries' type; null: none
  float scale;  // of scores in base 2, positive
  // The previous kernel attends other rows' queries, and this one runs beside it: it waits at its end.
  bool is_beside;
};

// Rows of a request, and a KV head.
struct Group {
  int request, head;
  int row, rows;   // its first row, and how many it has
  int position;    // of the request's first row
  int first, end;  // the keys that its rows see: from the start of a block of keys to before `end`
};

// How many groups share a request's rows.
__host__ __device__ inline int parts_of(const AttendParams& p) { return (p.rows + p.part_rows - 1) / p.part_rows; }

__device__ inline Group group_of(const AttendParams& p, int number) {
  const int head = number % p.kv_heads, parts = parts_of(p);
  const int request = number / p.kv_heads / parts, before = number / p.kv_heads % parts * p.part_rows;
  int row = request * p.rows, rows = p.rows;
  if (p.starts != nullptr) {
    row = __ldcg(p.starts + request);
    rows = __ldcg(p.starts + request + 1) - row;
  }
  const int position = static_cast<int>(__ldcg(p.positions + row));
  const int seen_from = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  const int end = min(position + rows, p.table_width * p.page_size);
  const int own = min(max(rows - before, 0), p.part_rows);
  return {request, head, row + before, own, position, seen_from / kBlockKeys * kBlockKeys, end};
}

// Shared memory: the warps' places for keys and values, where their sums go at a group's end.
template <int kDim, int kTiles, int kStages, int kWarps>
__host__ __device__ constexpr int attend_shared_bytes() {
  constexpr int ring = kWarps * kStages * 2 * kTileKeys * kDim * 2;
  constexpr int sums = kWarps * kTiles * 16 * (kDim + 4) * 4;
  return ring > sums ? ring : sums;
}

// What a warp sums up for the pairs g and g + 8 of each tile, in base 2.
template <int kDim, int kTiles>
struct WarpSums {
  float acc[kTiles][kDim / 8][4] = {};  // weighted values
  float best[kTiles][2], total[kTiles][2] = {};
};

// Keys of one group that a warp reads: tiles from `first` on, `apart` keys apart, to before `end`.
struct Keys {
  int first, apart, end;
};

// Lane i has the first slot of the warp's i-th tile.
__device__ inline int slots_of_tiles(const AttendParams& p, const Group& group, const Keys& keys,
                                     int from = 0) {
  const int key = keys.first + (from + static_cast<int>(threadIdx.x % 32)) * keys.apart;
  if (key >= keys.end) return 0;
  const int page = key / p.page_size, in_page = key - page * p.page_size;
  return __ldcg(p.tables + group.request * p.table_row + page) * p.page_size + in_page;
}

// The row of a pair of a row and a head, of those that read one KV head: pair / per_kv.
__device__ inline int row_of(const AttendParams& p, int pair) { return pair * p.kv_inverse >> 16; }

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two scores, NaN where one is: a NaN must reach the output.
__device__ inline float better(float score, float than) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(score), "f"(than));
  return y;
}

// What scores are compared with: not the lowest one itself where there is no key.
__device__ inline float base_of(float best) { return best == -INFINITY ? 0.0f : best; }

// Adds what a warp reads of its keys. It waits for the previous kernel, unless it runs beside that.
//
// kTiles: of 16 pairs of a row and a head that read one KV head. kStages: tiles ahead.
// slots: as of slots_of_tiles.
template <typename T, int kDim, int kTiles, int kStages>
__device__ inline void attend_keys(const AttendParams& p, const Group& group, const Keys& own,
                                   int slots, char* ring, WarpSums<kDim, kTiles>& sums) {
  constexpr int kPieces = kDim / 8;                 // of 16 bytes in a key
  constexpr int kRows = 32 / kPieces;               // keys that the lanes copy a piece of at once
  constexpr int kTileBytes = kTileKeys * kDim * 2;  // of keys or of values
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int key_end = own.end;
  const int tiles = own.first < key_end ? (key_end - own.first + own.apart - 1) / own.apart : 0;
  const int my_row = lane / kPieces, my_piece = lane % kPieces;
  const int my_k = my_row * p.k_row + my_piece * 8, my_v = my_row * p.v_row + my_piece * 8;
  const T* const k = static_cast<const T*>(p.k) + group.head * p.k_head + my_k;
  const T* const v = static_cast<const T*>(p.v) + group.head * p.v_head + my_v;

  int slots_from = 0;
  auto fetch = [&](int i) {
    if (i < tiles) {
      if (i >= slots_from + 32) {
        slots_from = i;
        slots = slots_of_tiles(p, group, own, i);
      }
      const int slot = __shfl_sync(0xffffffffu, slots, i - slots_from);
      const int left = key_end - own.first - i * own.apart - my_row;
      const T* from_k = k + static_cast<int64_t>(slot) * p.k_row;
      const T* from_v = v + static_cast<int64_t>(slot) * p.v_row;
      char* const place = ring + i % kStages * 2 * kTileBytes;
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
  };

  // Pairs g and g + 8 of each tile: where their rows are, and their queries.
  int position_of[kTiles][2];
  const T* query_of[kTiles][2];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = m * 16 + half * 8 + g, row = row_of(p, pair);
      const bool is_pair = row < group.rows;
      const int64_t at = group.row + row;
      position_of[m][half] =
          is_pair ? static_cast<int>(__ldcg(p.positions + at)) : group.end;
      const int head = group.head * p.per_kv + pair - row * p.per_kv;
      query_of[m][half] =
          is_pair ? static_cast<const T*>(p.q) + at * p.q_row + head * p.q_head + t * 2 : nullptr;
    }
  }
  int fetched = 0;
  const int old = group.position - kNewKeys;  // keys before it are older than the previous kernel
  while (fetched < kStages && own.first + fetched * own.apart + kTileKeys <= old) fetch(fetched++);
  // Beside the previous kernel: that has waited before this one could start, so all before it is done.
  if (!p.is_beside) wait_for_previous();
  let_next_start();
  uint32_t q[kTiles][kDim / 16][4];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* const from = query_of[m][half];
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const auto* const pairs_of = reinterpret_cast<const uint32_t*>(from + step * 16);
        q[m][step][half] = from ? __ldcg(pairs_of) : 0;
        q[m][step][2 + half] = from ? __ldcg(pairs_of + 4) : 0;
      }
    }
  }
  for (; fetched < kStages; ++fetched) fetch(fetched);

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

  auto& [acc, best, total] = sums;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = -INFINITY;

  for (int i = 0; i < tiles; ++i) {
    copies_wait<kStages - 1>();
    __syncwarp();
    const int key = own.first + i * own.apart;
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
      if (!is_clear) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const int n = key + c / 4 * 8 + t * 2 + c % 2, at = position_of[m][c % 4 / 2];
          if (n > at || n >= key_end || (p.window > 0 && n <= at - p.window)) {
            scores[m][c / 4][c % 4] = -INFINITY;
          }
        }
      }
      bool is_same = true;
      float keep[2], base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&of)[2][4] = scores[m];
        float now = better(better(of[0][half * 2], of[0][half * 2 + 1]),
                           better(of[1][half * 2], of[1][half * 2 + 1]));
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
          now = better(now, __shfl_xor_sync(0xffffffffu, now, mask));
        }
        now = better(now * p.scale, best[m][half]);
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
    fetch(i + kStages);
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

__device__ inline void add_weighted(float4& sum, float4 other, float weight) {
  sum.x = fmaf(other.x, weight, sum.x), sum.y = fmaf(other.y, weight, sum.y);
  sum.z = fmaf(other.z, weight, sum.z), sum.w = fmaf(other.w, weight, sum.w);
}

// Softmax sums of four columns of a pair.
struct Joined {
  float best, total;
  float4 sum;
};

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

// Four columns of a pair's attention, of sums over all keys that it sees.
template <typename T>
__device__ inline void write_attention(const AttendParams& p, const Group& group, int pair,
                                       int column, Joined of) {
  auto [best, total, sum] = of;
  const int row = row_of(p, pair), head = group.head * p.per_kv + pair - row * p.per_kv;
  if (p.sinks != nullptr) {  // one more score, without a value
    const float sink = to_float(static_cast<const T*>(p.sinks)[head]) * 1.4426950408889634f;
    const float base = base_of(best), new_base = fmaxf(base, sink);
    const float keep = exp2_of(base - new_base);
    total = fmaf(total, keep, exp2_of(sink - new_base));
    sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
  }
  // Without keys the sums are zeros; where the total is NaN all is.
  const float scale = total == 0.0f ? 1.0f : inverse_of(total);
  T* to = static_cast<T*>(p.out) + (group.row + row) * p.out_row + head * p.out_head + column;
  *reinterpret_cast<uint2*>(to) = {pack(sum.x * scale, sum.y * scale, T()),
                                   pack(sum.z * scale, sum.w * scale, T())};
}

}  // namespace trtspec
