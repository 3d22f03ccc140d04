// Generations through the gated delta rule (trtspec/ops/layer/delta_rule.py has the formula, and what becomes
// of rejected drafts): convolution, recurrence, norm and gate of one head of one request in a thread block.
//
// The head's matrix S rests in registers, and is passed over twice, whatever the number of rows: once for what
// all rows read of it, once for what it takes in. Between these, with c_i the sum of log decays up to row i,
// the rows u that are written follow from each other
//
//     u_i = b_i (v_i - exp(c_i) k_i S - sum_{j < i} exp(c_i - c_j) (k_i k_j) u_j)
//     o_i = exp(c_i) q_i S + sum_{j <= i} exp(c_i - c_j) (q_i k_j) u_j
//
// q and k are scaled to length 1 in the coefficients. The matrix and kept rows are older than the kernel
// before, and are asked for before it has ended.
#pragma once

#include "common.cuh"

namespace trtspec {

constexpr int kDeltaSize = 128;  // of a head's keys and of its values
constexpr int kDeltaTaps = 4;
constexpr int kDeltaThreads = 256;
constexpr int kDeltaRows = 40;  // read again and new

struct DeltaParams {
  const void* mixed;  // [G * own, channels], rows apart: queries, keys and values of all heads
  int64_t mixed_row;
  const void* gates;  // [G * own, 2 * heads]
  int64_t gates_row;
  const void* z;  // [G * own, heads * 128]
  int64_t z_row;
  const float *conv, *a_log, *dt_bias;  // [4, channels], [heads], [heads]
  const void* norm;                     // [128]
  float eps, length_eps;
  float* matrices;  // [slots, heads, 128, 128]
  void* kept_mixed;  // [slots, places, channels]
  void* kept_gates;  // [slots, places, 2 * heads]
  const int64_t *slots, *firsts, *taken_in;  // [G]
  void* out;                                 // [G * own, heads * 128]
  int requests, heads, key_heads, places, own;
};

// What a block shares, by rows in all and own ones. Rows of 128 values unless said.
template <typename T>
struct DeltaShared {
  float *qkv;      // [rows, 3]
  float *read;     // [rows, 2, 2]: half of the matrix, k or q
  float *written;  // [rows]
  // [rows, rows] numbers: products; coefficients of u; products, then coefficients of o.
  float *kk, *lower, *qk;
  float *decay, *strength, *qq, *begun;  // [rows] numbers; the last: exp(c_i)
  T *raw;  // [rows + 3, 3]
  T *z;    // [own]

  __device__ DeltaShared(unsigned char* memory, int rows, int own) {
    qkv = reinterpret_cast<float*>(memory), read = qkv + rows * 3 * kDeltaSize;
    written = read + rows * 4 * kDeltaSize;
    raw = reinterpret_cast<T*>(written + rows * kDeltaSize);
    z = raw + (rows + kDeltaTaps - 1) * 3 * kDeltaSize;
    kk = reinterpret_cast<float*>(z + own * kDeltaSize), lower = kk + rows * rows;
    qk = lower + rows * rows, decay = qk + rows * rows, strength = decay + rows;
    qq = strength + rows, begun = qq + rows;
  }
};

inline size_t delta_shared_bytes(int rows, int own, size_t item) {
  const size_t floats = rows * (8 * kDeltaSize + 3 * rows + 4);
  return floats * sizeof(float) + ((rows + kDeltaTaps - 1) * 3 + own) * kDeltaSize * item;
}

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
  return x;
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

template <typename T>
__device__ inline void load_4(const T* from, float (&to)[4]) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const T* values = reinterpret_cast<const T*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = to_float(values[i]);
}

__device__ inline void load_4(const float* from, float (&to)[4]) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

template <typename T>
__global__ void __launch_bounds__(kDeltaThreads, 2) delta_generations(const DeltaParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kSize = kDeltaSize, kTaps = kDeltaTaps, kEach = 16;  // rows of S that a thread has
  const int head = blockIdx.x, request = blockIdx.y, thread = threadIdx.x;
  const int warp = thread / 32, lane = thread % 32;
  const int shared_by = p.heads / p.key_heads, key_head = head / shared_by;
  const int keys = p.key_heads * kSize, channels = 2 * keys + p.heads * kSize;
  const int64_t slot = p.slots[request], first = p.firsts[request];
  const int past = (p.places - kTaps) / 2;
  const int64_t behind = first - p.taken_in[request];
  const int again = static_cast<int>(behind < 0 ? 0 : behind > past ? past : behind);
  const int rows = again + p.own;

  const DeltaShared<T> s(memory, past + p.own, p.own);
  T* const raw = s.raw;

  // Rows of a slot's places, and of this pass, of which a block reads three heads' channels.
  const auto column_of = [&](int part) {
    return part == 2 ? 2 * keys + head * kSize : part * keys + key_head * kSize;
  };
  T* const kept = static_cast<T*>(p.kept_mixed) + slot * p.places * channels;
  const T* const mixed = static_cast<const T*>(p.mixed) + request * int64_t(p.own) * p.mixed_row;
  constexpr int kChunks = 3 * kSize / 8;  // of 16 bytes, in a row
  const int before = again + kTaps - 1;   // rows of places
  for (int i = thread; i < before * kChunks; i += kDeltaThreads) {
    const int row = i / kChunks, chunk = i % kChunks, part = chunk / (kSize / 8);
    const int64_t position = first - before + row;
    const bool is_there = position >= 0;
    const int64_t place = is_there ? position % p.places : 0;
    const T* from = kept + place * channels + column_of(part) + chunk % (kSize / 8) * 8;
    copy_16_if(raw + row * 3 * kSize + chunk * 8, from, is_there);
  }
  const int pair = warp % 4, half = warp / 4;
  const int column = pair * 32 + lane % 8 * 4, k_first = half * 64 + lane / 8 * kEach;
  float* const matrix = p.matrices + (slot * p.heads + head) * kSize * kSize;
  float state[kEach][4];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float4 at = make_float4(0, 0, 0, 0);
    if (first > 0) at = __ldcg(reinterpret_cast<const float4*>(matrix + (k_first + i) * kSize + column));
    state[i][0] = at.x, state[i][1] = at.y, state[i][2] = at.z, state[i][3] = at.w;
  }
  wait_for_previous();
  let_next_start();

  for (int i = thread; i < p.own * kChunks; i += kDeltaThreads) {
    const int row = i / kChunks, chunk = i % kChunks, part = chunk / (kSize / 8);
    const T* from = mixed + row * p.mixed_row + column_of(part) + chunk % (kSize / 8) * 8;
    copy_16(raw + (before + row) * 3 * kSize + chunk * 8, from);
  }
  for (int i = thread; i < p.own * (kSize / 8); i += kDeltaThreads) {
    const int row = i / (kSize / 8), chunk = i % (kSize / 8);
    const T* from = static_cast<const T*>(p.z) + (request * int64_t(p.own) + row) * p.z_row;
    copy_16(s.z + row * kSize + chunk * 8, from + head * kSize + chunk * 8);
  }
  copies_commit();
  for (int row = thread; row < rows; row += kDeltaThreads) {
    const bool is_own = row >= again;
    const int64_t place = (first - again + row) % p.places;
    T* const there = static_cast<T*>(p.kept_gates) + (slot * p.places + place) * 2 * p.heads + head;
    const T* from = there;
    if (is_own) {
      const int64_t at = request * int64_t(p.own) + row - again;
      from = static_cast<const T*>(p.gates) + at * p.gates_row + head;
    }
    const T strength = from[0], decay = from[p.heads];
    if (is_own) there[0] = strength, there[p.heads] = decay;
    const float x = to_float(decay) + p.dt_bias[head];
    const float softplus = x > 20.0f ? x : log1pf(__expf(x));
    s.decay[row] = __expf(-__expf(p.a_log[head]) * softplus);
    s.strength[row] = 1.0f / (1.0f + __expf(-to_float(strength)));
  }
  copies_wait<0>();
  __syncthreads();

  // The convolution: two channels a thread.
  if (thread < 3 * kSize / 2) {
    const int part = thread / (kSize / 2), within = thread % (kSize / 2) * 2;
    float weight[kTaps][2], seen[kTaps][2];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const float2 two =
          *reinterpret_cast<const float2*>(p.conv + tap * channels + column_of(part) + within);
      weight[tap][0] = two.x, weight[tap][1] = two.y;
    }
    const T* from = raw + part * kSize + within;
#pragma unroll
    for (int tap = 0; tap < kTaps - 1; ++tap) {
      seen[tap][0] = to_float(from[tap * 3 * kSize]), seen[tap][1] = to_float(from[tap * 3 * kSize + 1]);
    }
    for (int row = 0; row < rows; ++row) {
      const T* last = from + (row + kTaps - 1) * 3 * kSize;
      seen[kTaps - 1][0] = to_float(last[0]), seen[kTaps - 1][1] = to_float(last[1]);
      float2 total = make_float2(0, 0);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        total.x += seen[tap][0] * weight[tap][0], total.y += seen[tap][1] * weight[tap][1];
        if (tap + 1 < kTaps) seen[tap][0] = seen[tap + 1][0], seen[tap][1] = seen[tap + 1][1];
      }
      // Rounded before and after SiLU, as a model in 16 bits does.
      total.x = to_float(from_float<T>(silu(to_float(from_float<T>(total.x)))));
      total.y = to_float(from_float<T>(silu(to_float(from_float<T>(total.y)))));
      *reinterpret_cast<float2*>(s.qkv + (row * 3 + part) * kSize + within) = total;
    }
  }
  // Own rows are kept: values by each head, queries and keys by one of those that share them.
  const bool keeps_keys = head % shared_by == 0;
  for (int i = thread; i < p.own * kChunks; i += kDeltaThreads) {
    const int row = i / kChunks, chunk = i % kChunks, part = chunk / (kSize / 8);
    if (part < 2 && !keeps_keys) continue;
    T* to = kept + (first + row) % p.places * channels + column_of(part) + chunk % (kSize / 8) * 8;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(raw + (before + row) * 3 * kSize + chunk * 8);
  }
  __syncthreads();

  // Products of rows: eight lanes each.
  for (int i = thread / 8; i < rows * (rows + 1) / 2; i += kDeltaThreads / 8) {
    int row = 0, earlier = i;
    while (earlier > row) earlier -= ++row;
    const float* const at = s.qkv + row * 3 * kSize + lane % 8 * 4;
    const float* const k_at = s.qkv + (earlier * 3 + 1) * kSize + lane % 8 * 4;
    float kk = 0, qk = 0, qq = 0;
#pragma unroll
    for (int j = 0; j < kSize; j += 32) {
      float q[4], k[4], other[4];
      load_4(at + j, q), load_4(at + kSize + j, k), load_4(k_at + j, other);
#pragma unroll
      for (int c = 0; c < 4; ++c) kk += k[c] * other[c], qk += q[c] * other[c], qq += q[c] * q[c];
    }
    const unsigned lanes = 0xffu << lane / 8 * 8;
#pragma unroll
    for (int j = 4; j > 0; j /= 2) {
      kk += __shfl_xor_sync(lanes, kk, j), qk += __shfl_xor_sync(lanes, qk, j);
      qq += __shfl_xor_sync(lanes, qq, j);
    }
    if (lane % 8 == 0) {
      s.kk[row * rows + earlier] = kk, s.qk[row * rows + earlier] = qk;
      if (earlier == row) s.qq[row] = qq;
    }
  }
  __syncthreads();

  // Coefficients.
  const auto k_scale = [&](int row) { return rsqrtf(s.kk[row * rows + row] + p.length_eps); };
  const auto q_scale = [&](int row) {
    return rsqrtf(s.qq[row] + p.length_eps) * rsqrtf(float(kSize));
  };
  for (int i = thread; i < rows * rows; i += kDeltaThreads) {
    const int row = i / rows, earlier = i % rows;
    if (earlier > row) continue;
    float decay = 1;
    for (int j = earlier + 1; j <= row; ++j) decay *= s.decay[j];
    s.lower[i] = s.kk[i] * k_scale(row) * k_scale(earlier) * decay;
    s.qk[i] *= q_scale(row) * k_scale(earlier) * decay;
    if (earlier == 0) s.begun[row] = decay * s.decay[0];
  }

  // What two rows at a time read of the matrix, by k and by q.
  for (int row = 0; row < rows; row += 2) {
    const float* const at[2] = {s.qkv + row * 3 * kSize, s.qkv + min(row + 1, rows - 1) * 3 * kSize};
    float sums[2][2][4] = {};
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float q[4], k[4];
        load_4(at[r] + k_first + i, q), load_4(at[r] + kSize + k_first + i, k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[r][0][c] += k[j] * state[i + j][c], sums[r][1][c] += q[j] * state[i + j][c];
          }
        }
      }
    }
    // Four groups of lanes have parts of all four sums: each ends with one.
    const bool second = lane & 16, by_q = lane & 8;
    float total[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float kept_sums[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float sent = second ? sums[0][j][c] : sums[1][j][c];
        kept_sums[j] = (second ? sums[1][j][c] : sums[0][j][c]) + __shfl_xor_sync(0xffffffff, sent, 16);
      }
      const float sent = by_q ? kept_sums[0] : kept_sums[1];
      total[c] = (by_q ? kept_sums[1] : kept_sums[0]) + __shfl_xor_sync(0xffffffff, sent, 8);
    }
    if (row + second < rows) {
      float* const to = s.read + (((row + second) * 2 + half) * 2 + by_q) * kSize + column;
      *reinterpret_cast<float4*>(to) = make_float4(total[0], total[1], total[2], total[3]);
    }
  }
  __syncthreads();

  // The rows that are written, a column a thread.
  if (thread < kSize) {
    float last = 0;
    for (int row = 0; row < rows; ++row) {
      const float* const halves = s.read + row * 4 * kSize + thread;
      float u = s.qkv[(row * 3 + 2) * kSize + thread];
      u -= s.begun[row] * k_scale(row) * (halves[0] + halves[2 * kSize]);
      for (int j = 0; j + 1 < row; ++j) u -= s.lower[row * rows + j] * s.written[j * kSize + thread];
      if (row > 0) u -= s.lower[row * rows + row - 1] * last;
      last = s.strength[row] * u;
      s.written[row * kSize + thread] = last;
    }
  }
  __syncthreads();

  // The matrix takes in what is certain.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) state[i][c] *= s.begun[again];
  }
  for (int row = 0; row <= again; ++row) {
    float u[4], decay = k_scale(row);
    for (int j = row + 1; j <= again; ++j) decay *= s.decay[j];
    load_4(s.written + row * kSize + column, u);
#pragma unroll
    for (int c = 0; c < 4; ++c) u[c] *= decay;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      float k[4];
      load_4(s.qkv + (row * 3 + 1) * kSize + k_first + i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) state[i + j][c] += k[j] * u[c];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    __stcg(reinterpret_cast<float4*>(matrix + (k_first + i) * kSize + column),
           make_float4(state[i][0], state[i][1], state[i][2], state[i][3]));
  }

  for (int own = warp; own < p.own; own += kDeltaThreads / 32) {
    const int row = again + own;
    float x[4], other[4], gate[4], weight[4];
    load_4(s.read + (row * 4 + 1) * kSize + lane * 4, x);
    load_4(s.read + (row * 4 + 3) * kSize + lane * 4, other);
    const float begun = s.begun[row] * q_scale(row);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = begun * (x[i] + other[i]);
    for (int j = 0; j <= row; ++j) {
      const float by = s.qk[row * rows + j];
      load_4(s.written + j * kSize + lane * 4, other);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] += by * other[i];
    }
    load_4(s.z + own * kSize + lane * 4, gate);
    load_4(static_cast<const T*>(p.norm) + lane * 4, weight);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(from_float<T>(x[i])), squares += x[i] * x[i];
    const float scale = rsqrtf(sum_of_warp(squares) / kSize + p.eps);
    T out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float normed = to_float(from_float<T>(x[i] * scale));
      out[i] = from_float<T>(to_float(from_float<T>(normed * weight[i])) * silu(gate[i]));
    }
    T* to = static_cast<T*>(p.out) + ((request * int64_t(p.own) + own) * p.heads + head) * kSize;
    *reinterpret_cast<uint2*>(to + lane * 4) = *reinterpret_cast<const uint2*>(out);
  }
}

}  // namespace trtspec
