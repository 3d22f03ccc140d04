// Generations through the gated delta rule (trtspec/ops/layer/delta_rule.py has the formula, and what becomes
// of rejected drafts): convolution, recurrence, norm and gate of one head of one request in a thread block.
//
// The head's matrix rests in registers: a pair of warps has 32 columns, each of the two 64 of the rows. What a
// row reads with k and with q is summed in one pass over it, for with S' = a S + k u
//
//     k S and q S        of the old matrix, one sum over both warps
//     u = b (v - a k S)
//     q S' = a (q S) + (q k) u
//
// so the warps of a pair meet once a row. The matrix and kept rows are older than the kernel before, and are
// asked for before it has ended.
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

// What a block shares. Behind it are `raw` [rows + 3, 3, 128] T, then `qkv` [rows, 3, 128] float, then z, and
// what rows return, [own, 128] T and float.
struct DeltaShared {
  float exchange[2][8][2][32];  // by turns, warp, k or q, column
  float decay[kDeltaRows], strength[kDeltaRows], qk[kDeltaRows];
};

inline size_t delta_shared_bytes(int rows, int own, size_t item) {
  return sizeof(DeltaShared) + (rows + kDeltaTaps - 1) * 3 * kDeltaSize * item +
         rows * 3 * kDeltaSize * sizeof(float) + own * kDeltaSize * (item + sizeof(float));
}

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
  return x;
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

// The two warps of a pair meet.
__device__ inline void meet_pair(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory"); }

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
  const int64_t slot = p.slots[request];
  const int first = static_cast<int>(p.firsts[request]);
  const int past = (p.places - kTaps) / 2;
  const int again = min(max(first - static_cast<int>(p.taken_in[request]), 0), past);
  const int rows = again + p.own;

  DeltaShared& s = *reinterpret_cast<DeltaShared*>(memory);
  T* raw = reinterpret_cast<T*>(memory + sizeof(DeltaShared));
  float* qkv = reinterpret_cast<float*>(raw + (past + p.own + kTaps - 1) * 3 * kSize);
  float* read = qkv + (past + p.own) * 3 * kSize;
  T* z = reinterpret_cast<T*>(read + p.own * kSize);

  // Rows of a slot's places, and of this pass, of which a block reads three heads' channels.
  const auto column_of = [&](int part) {
    return part == 2 ? 2 * keys + head * kSize : part * keys + key_head * kSize;
  };
  const auto place_of = [&](int position) {
    return static_cast<int64_t>(static_cast<unsigned>(position) % static_cast<unsigned>(p.places));
  };
  T* const kept = static_cast<T*>(p.kept_mixed) + slot * p.places * channels;
  const T* const mixed = static_cast<const T*>(p.mixed) + request * int64_t(p.own) * p.mixed_row;
  constexpr int kChunks = 3 * kSize / 8;  // of 16 bytes, in a row
  const int before = again + kTaps - 1;   // rows of places
  for (int i = thread; i < before * kChunks; i += kDeltaThreads) {
    const int row = i / kChunks, chunk = i % kChunks, part = chunk / (kSize / 8);
    const int position = first - before + row;
    const bool is_there = position >= 0;
    const T* from = kept + place_of(max(position, 0)) * channels + column_of(part) + chunk % (kSize / 8) * 8;
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
  // What this thread convolves with; or, of the last ones, the gates of a row.
  const auto kept_gates = [&](int row) {
    const int64_t place = slot * p.places + place_of(first - again + row);
    return static_cast<T*>(p.kept_gates) + place * 2 * p.heads + head;
  };
  float2 conv[kTaps];
  float dt_bias = 0.0f, a_log = 0.0f;
  if (thread < 3 * kSize / 2) {
    const float* const from =
        p.conv + column_of(thread / (kSize / 2)) + thread % (kSize / 2) * 2;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      conv[tap] = __ldg(reinterpret_cast<const float2*>(from + tap * channels));
    }
  } else {
    dt_bias = __ldg(p.dt_bias + head), a_log = __ldg(p.a_log + head);
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
    copy_16(z + row * kSize + chunk * 8, from + head * kSize + chunk * 8);
  }
  copies_commit();
  T strength = {}, decay = {};
  if (const int row = kDeltaThreads - 1 - thread; thread >= 3 * kSize / 2 && row < rows) {
    const T* from = kept_gates(row);
    if (row >= again) {
      const int64_t at = request * int64_t(p.own) + row - again;
      from = static_cast<const T*>(p.gates) + at * p.gates_row + head;
    }
    strength = from[0], decay = from[p.heads];
  }
  copies_wait<0>();
  __syncthreads();

  // The convolution: two channels a thread. The last warps have none: the gates are theirs.
  if (thread < 3 * kSize / 2) {
    const int part = thread / (kSize / 2), within = thread % (kSize / 2) * 2;
    float weight[kTaps][2], seen[kTaps][2];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) weight[tap][0] = conv[tap].x, weight[tap][1] = conv[tap].y;
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
      *reinterpret_cast<float2*>(qkv + (row * 3 + part) * kSize + within) = total;
    }
  } else if (const int row = kDeltaThreads - 1 - thread; row < rows) {
    if (row >= again) {
      T* const there = kept_gates(row);
      there[0] = strength, there[p.heads] = decay;
    }
    const float x = to_float(decay) + dt_bias;
    const float softplus = x > 20.0f ? x : log1pf(__expf(x));
    s.decay[row] = __expf(-__expf(a_log) * softplus);
    s.strength[row] = 1.0f / (1.0f + __expf(-to_float(strength)));
  }
  // Own rows are kept: values by each head, queries and keys by one of those that share them.
  const bool keeps_keys = head % shared_by == 0;
  for (int i = thread; i < p.own * kChunks; i += kDeltaThreads) {
    const int row = i / kChunks, chunk = i % kChunks, part = chunk / (kSize / 8);
    if (part < 2 && !keeps_keys) continue;
    T* to = kept + place_of(first + row) * channels + column_of(part) + chunk % (kSize / 8) * 8;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(raw + (before + row) * 3 * kSize + chunk * 8);
  }
  __syncthreads();
  for (int row = warp; row < rows; row += kDeltaThreads / 32) {
    float q[4], k[4];
    float* const q_at = qkv + row * 3 * kSize + lane * 4;
    load_4(q_at, q), load_4(q_at + kSize, k);
    float qq = 0, kk = 0, qk = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) qq += q[i] * q[i], kk += k[i] * k[i], qk += q[i] * k[i];
    qq = sum_of_warp(qq), kk = sum_of_warp(kk), qk = sum_of_warp(qk);
    const float q_scale = rsqrtf(qq + p.length_eps) * rsqrtf(float(kSize));
    const float k_scale = rsqrtf(kk + p.length_eps);
    *reinterpret_cast<float4*>(q_at) =
        make_float4(q[0] * q_scale, q[1] * q_scale, q[2] * q_scale, q[3] * q_scale);
    *reinterpret_cast<float4*>(q_at + kSize) =
        make_float4(k[0] * k_scale, k[1] * k_scale, k[2] * k_scale, k[3] * k_scale);
    if (lane == 0) s.qk[row] = qk * q_scale * k_scale;
  }
  __syncthreads();

  for (int row = 0; row < rows; ++row) {
    const float* const q_at = qkv + row * 3 * kSize;
    const bool is_own = row >= again;
    float with_k[4] = {}, with_q[4] = {};
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      float k[4];
      load_4(q_at + kSize + k_first + i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) with_k[c] += k[j] * state[i + j][c];
      }
    }
    if (is_own) {
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        float q[4];
        load_4(q_at + k_first + i, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) with_q[c] += q[j] * state[i + j][c];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      with_k[c] += __shfl_xor_sync(0xffffffff, with_k[c], 8);
      with_k[c] += __shfl_xor_sync(0xffffffff, with_k[c], 16);
      with_q[c] += __shfl_xor_sync(0xffffffff, with_q[c], 8);
      with_q[c] += __shfl_xor_sync(0xffffffff, with_q[c], 16);
    }
    auto& exchange = s.exchange[row % 2];
    if (lane < 8) {
      *reinterpret_cast<float4*>(&exchange[warp][0][lane * 4]) =
          make_float4(with_k[0], with_k[1], with_k[2], with_k[3]);
      *reinterpret_cast<float4*>(&exchange[warp][1][lane * 4]) =
          make_float4(with_q[0], with_q[1], with_q[2], with_q[3]);
    }
    meet_pair(pair);
    const float row_decay = s.decay[row], row_strength = s.strength[row], qk = s.qk[row];
    float other[4], v[4], u[4];
    load_4(&exchange[(warp + 4) % 8][0][lane % 8 * 4], other);
    load_4(q_at + 2 * kSize + column, v);
#pragma unroll
    for (int c = 0; c < 4; ++c) u[c] = row_strength * (v[c] - row_decay * (with_k[c] + other[c]));
    if (is_own && half == 0 && lane < 8) {
      load_4(&exchange[warp + 4][1][lane * 4], other);
      float out[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c] = row_decay * (with_q[c] + other[c]) + qk * u[c];
      *reinterpret_cast<float4*>(read + (row - again) * kSize + column) =
          make_float4(out[0], out[1], out[2], out[3]);
    }
    if (row > again && row + 1 == rows) break;  // nothing reads the matrix any more
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      float k[4];  // again: kept, they would take registers that are not there
      load_4(q_at + kSize + k_first + i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) state[i + j][c] = row_decay * state[i + j][c] + k[j] * u[c];
      }
    }
    if (row == again) {  // what is certain ends here
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        __stcg(reinterpret_cast<float4*>(matrix + (k_first + i) * kSize + column),
               make_float4(state[i][0], state[i][1], state[i][2], state[i][3]));
      }
    }
  }
  __syncthreads();

  for (int row = warp; row < p.own; row += kDeltaThreads / 32) {
    float x[4], gate[4], weight[4];
    load_4(read + row * kSize + lane * 4, x);
    load_4(z + row * kSize + lane * 4, gate);
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
    T* to = static_cast<T*>(p.out) + ((request * int64_t(p.own) + row) * p.heads + head) * kSize;
    *reinterpret_cast<uint2*>(to + lane * 4) = *reinterpret_cast<const uint2*>(out);
  }
}

}  // namespace trtspec
