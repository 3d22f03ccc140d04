// y = x W^T for few rows of x: bound by reading W once. What stands before and after the product in
// a decoder layer is done in the same kernel: RMSNorm of x before it; bias, residual, SwiGLU, GeGLU or
// RoPE with the write into the KV cache after it.
//
// One block makes 16 outputs of every row. Its warps divide K among them. A warp multiplies with
// m16n8k16 tensor-core instructions, the weights as the 16-row operand and the rows of x as columns.
// The order of a sum over k is free as long as both operands agree, so each lane loads 16 contiguous
// bytes of a weight row (8 values of k) and the same k of a row of x: no shared memory on the way.
//
// A row's result does not depend on how many rows there are: the order of its sum is fixed by K.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace trtspec {

// kNormedRope: RoPE of queries and keys with a norm over each head (tile_linear.cuh).
enum class Epilogue { kPlain, kResidual, kGated, kRope, kNormedRope };

__host__ __device__ constexpr bool is_rope(Epilogue e) {
  return e == Epilogue::kRope || e == Epilogue::kNormedRope;
}

struct LinearParams {
  // x [rows, k]: columns 0 … k_split-1 from x0, the rest from x1. Strides in elements.
  const void* x0;
  const void* x1;
  int64_t x0_stride, x1_stride;
  // Which rows of a table are x0's (tile_linear.cuh), null: all, in turn. Those outside the table are its ends.
  const void* ids;  // [rows] int32, or int64
  bool has_wide_ids;
  int table_rows;
  int k_split;
  const void* norm0;  // [k_split] RMSNorm weights, null: no norm
  const void* norm1;  // [k - k_split]
  float eps;
  float offset;  // added to the norms' weights
  const void* weight;  // [n, k]
  const float* scales;  // [n, groups] of FP8 codes, null: of no others
  int group, groups;    // columns that share a scale; scales of a row
  int record;           // bytes of one of weights of 4 bits (four_bit_linear.cuh), 0: of no others
  const void* bias;    // [n], null: none
  int rows, n, k;
  void* out;  // [rows, n]; gated [rows, n/2]; RoPE: the queries, [rows, q_heads * dim]
  int64_t out_stride;
  const void* residual;  // [rows, n]
  int64_t residual_stride;
  void* copy;  // [rows, n] takes a sum with the residual too, null: none
  int64_t copy_stride;
  bool is_gelu;  // gated: by gelu, approximated by tanh, in place of silu
  // RoPE
  const float* cos_sin;      // [positions, dim]: cosines of dim/2 frequencies, then sines
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], below 0 is scratch_slot
  int64_t scratch_slot;
  void* k_cache;             // [slots, kv_heads, dim]
  void* v_cache;
  int64_t k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;
  int q_heads, kv_heads, dim;
  int keeps_finite;
  const void* q_norm;  // [dim] RMSNorm weights of heads, and of keys' heads
  const void* k_norm;
  float head_eps, head_offset;
};

__device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1, half_t) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

// Weights are read once: they need not stay in L1.
__device__ inline uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ inline float2 unpack(uint32_t v, bf16) {
  return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}
__device__ inline float2 unpack(uint32_t v, half_t) {
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
__device__ inline uint32_t pack(float a, float b, bf16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ inline uint32_t pack(float a, float b, half_t) {
  __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Two values of x times two norm weights plus `offset`, and their squares onto `squares`.
template <typename T>
__device__ inline uint32_t scale_pair(uint32_t x, uint32_t w, float offset, float& squares) {
  const float2 a = unpack(x, T()), b = unpack(w, T());
  squares = fmaf(a.x, a.x, fmaf(a.y, a.y, squares));
  return pack(a.x * (b.x + offset), a.y * (b.y + offset), T());
}

constexpr int kTile = 16;  // outputs of a block

// Weight rows of a block's tile: `lo` for the tile's rows 0 … 7, `hi` for 8 … 15. The epilogues that
// combine two outputs have them in one thread.
template <Epilogue E>
__device__ inline void tile_rows(const LinearParams& p, int tile, int row, int& lo, int& hi) {
  if constexpr (E == Epilogue::kGated) {
    lo = tile * 8 + row;
    hi = p.n / 2 + lo;
  } else if constexpr (is_rope(E)) {
    const int per_head = p.dim / kTile;
    lo = tile / per_head * p.dim + tile % per_head * 8 + row;
    hi = lo + p.dim / 2;
  } else {
    lo = tile * kTile + row;
    hi = lo + 8;
  }
}

// Where thread (g, t) of a warp begins to read its two weight rows of a tile, and each 32 values on.
template <typename T, Epilogue E>
__device__ inline void weight_rows(const LinearParams& p, int tile, int g, int t, const T*& lo,
                                   const T*& hi) {
  int n_lo, n_hi;
  tile_rows<E>(p, tile, g, n_lo, n_hi);
  const T* weight = static_cast<const T*>(p.weight) + t * 8;
  lo = weight + static_cast<int64_t>(min(n_lo, p.n - 1)) * p.k;
  hi = weight + static_cast<int64_t>(min(n_hi, p.n - 1)) * p.k;
}

// silu, or gelu approximated by tanh: 0.5 x (1 + tanh(u)) is x / (1 + exp(-2u)).
__device__ inline float activate(float x, bool is_gelu) {
  const float twice_u = 1.5957691216f * x * fmaf(0.044715f * x, x, 1.0f);
  return x / (1.0f + __expf(is_gelu ? -twice_u : -x));
}

__device__ inline float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }

// As T holds it; with `finite` 0 in place of what T has no number for.
template <typename T>
__device__ inline T rounded(float x, bool finite) {
  const T value = from_float<T>(x);
  return finite && !(fabsf(to_float(value)) < INFINITY) ? from_float<T>(0.0f) : value;
}

// RoPE: turns numbers d and d + dim/2 of a head of queries or keys. The table's values are rounded as the
// model's dtype holds them.
template <typename T>
__device__ inline void rotate(float cosine, float sine, float& lo, float& hi) {
  cosine = to_float(from_float<T>(cosine)), sine = to_float(from_float<T>(sine));
  const float rotated = lo * cosine - hi * sine;
  hi = hi * cosine + lo * sine;
  lo = rotated;
}

// RoPE: where output n of row m goes, to the queries or into the cache at `slot`.
template <typename T>
__device__ inline T* rope_target(const LinearParams& p, int m, int n, int64_t slot) {
  const int head = n / p.dim - p.q_heads, d = n % p.dim;
  if (head < 0) return static_cast<T*>(p.out) + m * p.out_stride + n;
  if (slot < 0) slot = p.scratch_slot;
  if (head < p.kv_heads) {
    return static_cast<T*>(p.k_cache) + slot * p.k_slot_stride + head * p.k_head_stride + d;
  }
  return static_cast<T*>(p.v_cache) + slot * p.v_slot_stride + (head - p.kv_heads) * p.v_head_stride + d;
}

// Whether RoPE turns output n: queries and keys.
__device__ inline bool is_turned(const LinearParams& p, int n) {
  return n < (p.q_heads + p.kv_heads) * p.dim;
}

// What the sums of outputs n_lo and n_hi of a row meet. It is read before they are complete: otherwise
// each block would wait for memory once more at its end. It stays as it was read until then: to convert
// it would be to wait for it. A residual that is waited for before the sums begin is a float.
template <typename T, typename Residual = T>
struct Ending {
  T bias_lo, bias_hi;
  Residual residual_lo, residual_hi;
  float cosine, sine;
  int64_t slot;
};

// Comes after `wait_for_previous`: it reads what that kernel may have written.
template <typename T, Epilogue E, typename Residual = T>
__device__ inline Ending<T, Residual> ending_of(const LinearParams& p, int m, int n_lo, int n_hi) {
  Ending<T, Residual> end = {};
  if (p.bias != nullptr) {
    const T* bias = static_cast<const T*>(p.bias);
    end.bias_lo = bias[min(n_lo, p.n - 1)];
    end.bias_hi = bias[min(n_hi, p.n - 1)];
  }
  if constexpr (E == Epilogue::kResidual) {
    const T* residual = static_cast<const T*>(p.residual) + m * p.residual_stride;
    auto kept = [](T x) {
      if constexpr (std::is_same_v<Residual, T>) {
        return x;
      } else {
        return to_float(x);
      }
    };
    if (n_lo < p.n) end.residual_lo = kept(residual[n_lo]);
    if (n_hi < p.n) end.residual_hi = kept(residual[n_hi]);
  }
  if constexpr (E == Epilogue::kRope) {
    end.slot = p.slots[m];
    if (is_turned(p, n_lo)) {
      const float* table = p.cos_sin + p.positions[m] * p.dim + n_lo % p.dim;
      end.cosine = table[0], end.sine = table[p.dim / 2];
    }
  }
  return end;
}

// lo and hi are the sums of outputs n_lo and n_hi of row m.
template <typename T, Epilogue E, typename Residual>
__device__ inline void finish(const LinearParams& p, int m, int n_lo, int n_hi, float lo, float hi,
                              const Ending<T, Residual>& end) {
  if (p.bias != nullptr) lo += to_float(end.bias_lo), hi += to_float(end.bias_hi);
  T* out = static_cast<T*>(p.out) + m * p.out_stride;
  if constexpr (E == Epilogue::kGated) {
    if (n_lo < p.n / 2) out[n_lo] = from_float<T>(activate(lo, p.is_gelu) * hi);
  } else if constexpr (E == Epilogue::kRope) {
    if (p.keeps_finite) lo = finite_or_zero(lo), hi = finite_or_zero(hi);
    if (is_turned(p, n_lo)) rotate<T>(end.cosine, end.sine, lo, hi);
    T* const target = rope_target<T>(p, m, n_lo, end.slot);
    target[0] = rounded<T>(lo, p.keeps_finite);
    target[p.dim / 2] = rounded<T>(hi, p.keeps_finite);
  } else {
    if constexpr (E == Epilogue::kResidual) {
      lo += to_float(end.residual_lo), hi += to_float(end.residual_hi);
    }
    if (n_lo < p.n) out[n_lo] = from_float<T>(lo);
    if (n_hi < p.n) out[n_hi] = from_float<T>(hi);
    if constexpr (E == Epilogue::kResidual) {
      if (p.copy == nullptr) return;
      T* copy = static_cast<T*>(p.copy) + m * p.copy_stride;
      if (n_lo < p.n) copy[n_lo] = from_float<T>(lo);
      if (n_hi < p.n) copy[n_hi] = from_float<T>(hi);
    }
  }
}

// kColumns: tiles of 8 rows of x. kUnroll: steps of 32 values of k whose weights are in flight.
template <typename T, Epilogue E, bool kNorm, int kColumns, int kWarps, int kUnroll>
__global__ void __launch_bounds__(kWarps * 32) skinny_linear(const __grid_constant__ LinearParams p) {
  __shared__ float sums[kWarps][kTile][8 * kColumns + 1];
  __shared__ float squares_of[kWarps][8 * kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T *w_lo, *w_hi;
  weight_rows<T, E>(p, blockIdx.x, g, t, w_lo, w_hi);
  const int steps = p.k / 32;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;

  uint4 lo[kUnroll], hi[kUnroll];
  auto fetch = [&](int step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool inside = step + u < end;
      lo[u] = inside ? load_once(w_lo + (step + u) * 32) : uint4{0, 0, 0, 0};
      hi[u] = inside ? load_once(w_hi + (step + u) * 32) : uint4{0, 0, 0, 0};
    }
  };
  fetch(begin);
  wait_for_previous();
  let_next_start();
  // A thread finishes two outputs of one row at most.
  static_assert(kColumns * 8 * 8 <= kWarps * 32);
  const int own_row = threadIdx.x % 8, own_m = threadIdx.x / 8;
  const bool finishes = own_m < p.rows;
  int n_lo, n_hi;
  tile_rows<E>(p, blockIdx.x, own_row, n_lo, n_hi);
  Ending<T> ending;
  if (finishes) ending = ending_of<T, E>(p, own_m, n_lo, n_hi);

  // Two inputs side by side: the warps divide evenly, so a warp reads one of them.
  const bool second = begin * 32 >= p.k_split;
  const int first_k = second ? p.k_split : 0;
  const T* x = static_cast<const T*>(second ? p.x1 : p.x0) + t * 8 - first_k;
  const int64_t x_stride = second ? p.x1_stride : p.x0_stride;
  const T* norm = static_cast<const T*>(second ? p.norm1 : p.norm0) + t * 8 - first_k;

  float acc[kColumns][4] = {};
  float squares[kColumns] = {};
  for (int step = begin; step < end; step += kUnroll) {
    uint4 a[kUnroll], b[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) a[u] = lo[u], b[u] = hi[u];
    fetch(step + kUnroll);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (step + u >= end) break;
      const int k = (step + u) * 32;
      uint4 scale;
      if constexpr (kNorm) scale = *reinterpret_cast<const uint4*>(norm + k);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        uint4 v = {0, 0, 0, 0};
        if (m < p.rows) v = *reinterpret_cast<const uint4*>(x + m * x_stride + k);
        if constexpr (kNorm) {
          v.x = scale_pair<T>(v.x, scale.x, p.offset, squares[c]);
          v.y = scale_pair<T>(v.y, scale.y, p.offset, squares[c]);
          v.z = scale_pair<T>(v.z, scale.z, p.offset, squares[c]);
          v.w = scale_pair<T>(v.w, scale.w, p.offset, squares[c]);
        }
        multiply_add(acc[c], a[u].x, b[u].x, a[u].y, b[u].y, v.x, v.y, T());
        multiply_add(acc[c], a[u].z, b[u].z, a[u].w, b[u].w, v.z, v.w, T());
      }
    }
  }

#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    sums[warp][g][c * 8 + t * 2] = acc[c][0];
    sums[warp][g][c * 8 + t * 2 + 1] = acc[c][1];
    sums[warp][g + 8][c * 8 + t * 2] = acc[c][2];
    sums[warp][g + 8][c * 8 + t * 2 + 1] = acc[c][3];
    if constexpr (kNorm) {
      squares[c] += __shfl_xor_sync(0xffffffffu, squares[c], 1);
      squares[c] += __shfl_xor_sync(0xffffffffu, squares[c], 2);
      if (t == 0) squares_of[warp][c * 8 + g] = squares[c];
    }
  }
  __syncthreads();

  if (!finishes) return;
  float total_lo = 0.0f, total_hi = 0.0f;
  if constexpr (kNorm) {
    const bool two = p.k_split < p.k;
    float scale = 1.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == 0 || (two && w == kWarps / 2)) {  // the scale of this input
        const int last = two ? w + kWarps / 2 : kWarps;
        float total = 0.0f;
        for (int v = w; v < last; ++v) total += squares_of[v][own_m];
        scale = rsqrtf(total / static_cast<float>(two && w > 0 ? p.k - p.k_split : p.k_split) + p.eps);
      }
      total_lo += scale * sums[w][own_row][own_m];
      total_hi += scale * sums[w][own_row + 8][own_m];
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total_lo += sums[w][own_row][own_m];
      total_hi += sums[w][own_row + 8][own_m];
    }
  }
  finish<T, E>(p, own_m, n_lo, n_hi, total_lo, total_hi, ending);
}

}  // namespace trtspec
