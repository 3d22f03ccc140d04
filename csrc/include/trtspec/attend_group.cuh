// Attention over a paged cache of a step's few query rows: what is attended, and softmax sums in base 2.
// cluster_attention.cuh cuts a group's keys (a group is some rows of a request and a KV head) among warps and
// thread blocks.
//
// Lengths and block tables come from the device.
#pragma once

#include "fast_math.cuh"
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

// The row of a pair of a row and a head, of those that read one KV head: pair / per_kv.
__device__ inline int row_of(const AttendParams& p, int pair) { return pair * p.kv_inverse >> 16; }

// What scores are compared with: not the lowest one itself where there is no key.
__device__ inline float base_of(float best) { return best == -INFINITY ? 0.0f : best; }

__device__ inline void add_weighted(float4& sum, float4 other, float weight) {
  sum.x = fmaf(other.x, weight, sum.x), sum.y = fmaf(other.y, weight, sum.y);
  sum.z = fmaf(other.z, weight, sum.z), sum.w = fmaf(other.w, weight, sum.w);
}

// Softmax sums of four columns of a pair.
struct Joined {
  float best, total;
  float4 sum;
};

// What a pair's sums over all keys that it sees are multiplied by.
template <typename T>
__device__ inline float last_scale(const AttendParams& p, const Group& group, int pair, float best, float total) {
  float keep = 1.0f;
  if (p.sinks != nullptr) {  // one more score, without a value
    const int head = group.head * p.per_kv + pair - row_of(p, pair) * p.per_kv;
    const float sink = to_float(static_cast<const T*>(p.sinks)[head]) * 1.4426950408889634f;
    const float base = base_of(best), new_base = fmaxf(base, sink);
    keep = exp2_of(base - new_base);
    total = fmaf(total, keep, exp2_of(sink - new_base));
  }
  // Without keys the sums are zeros; where the total is NaN all is.
  return total == 0.0f ? 1.0f : keep * inverse_of(total);
}

// Where a pair's attention goes.
template <typename T>
__device__ inline T* output_of(const AttendParams& p, const Group& group, int pair) {
  const int row = row_of(p, pair), head = group.head * p.per_kv + pair - row * p.per_kv;
  return static_cast<T*>(p.out) + (group.row + row) * p.out_row + head * p.out_head;
}

// Four columns of a pair's attention, of sums over all keys that it sees.
template <typename T>
__device__ inline void write_attention(const AttendParams& p, const Group& group, int pair,
                                       int column, const Joined& of) {
  const float scale = last_scale<T>(p, group, pair, of.best, of.total);
  const auto& sum = of.sum;
  *reinterpret_cast<uint2*>(output_of<T>(p, group, pair) + column) = {
      pack(sum.x * scale, sum.y * scale, T()), pack(sum.z * scale, sum.w * scale, T())};
}

}  // namespace trtspec
