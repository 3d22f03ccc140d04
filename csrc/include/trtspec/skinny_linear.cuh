// y = x W^T for few rows of x: bound by reading W once. What stands before and after the product in
// a decoder layer is done in the same kernel: RMSNorm of x before it; bias, residual, SwiGLU or
// RoPE with the write into the KV cache after it.
//
// One block makes 16 outputs of every row. Its warps divide K among them. A warp multiplies with
// m16n8k16 tensor-core instructions, the weights as the 16-row operand and the rows of x as columns.
// The order of a sum over k is free as long as both operands agree, so each lane loads 16 contiguous
// bytes of a weight row (8 values of k, 16 in FP8) and the same k of a row of x: no shared memory on
// the way.
//
// A row's result does not depend on how many rows there are: the order of its sum is fixed by K.
#pragma once

#include "common.cuh"

namespace trtspec {

enum class Epilogue { kPlain, kResidual, kSwiGLU, kRope };

struct LinearParams {
  // x [rows, k]: columns 0 … k_split-1 from x0, the rest from x1. Strides in elements.
  const void* x0;
  const void* x1;
  int64_t x0_stride, x1_stride;
  int k_split;
  const void* norm0;  // [k_split] RMSNorm weights, null: no norm
  const void* norm1;  // [k - k_split]
  float eps;
  const void* weight;  // [n, k]
  const float* scales;  // [n, ceil(k / group)] of FP8 codes
  int group, groups;    // columns that share a scale; scales of a row
  const void* bias;    // [n], null: none
  int rows, n, k;
  void* out;  // [rows, n]; SwiGLU [rows, n/2]; RoPE: the queries, [rows, q_heads * dim]
  int64_t out_stride;
  const void* residual;  // [rows, n]
  int64_t residual_stride;
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

// How a weight is held: as x is, or in FP8 (e4m3) with a scale for each row, or with one for each
// group of columns of a row.
enum class Held { kAsX, kFp8Rows, kFp8Groups };

template <Held H>
constexpr bool kIsFp8 = H != Held::kAsX;

// Values of k that 16 bytes of a weight row hold, and that a warp's four lanes of a row read at once.
template <Held H>
constexpr int kPiece = kIsFp8<H> ? 16 : 8;
template <Held H>
constexpr int kStep = 4 * kPiece<H>;

template <typename T, Held H>
__device__ inline const char* weight_row(const LinearParams& p, int n, int lane_of_row) {
  constexpr int bytes = kIsFp8<H> ? 1 : sizeof(T);
  return static_cast<const char*>(p.weight) + (static_cast<int64_t>(min(n, p.n - 1)) * p.k) * bytes +
         lane_of_row * 16;
}

// Four e4m3 codes as numbers, exactly. A bf16 with e4m3's exponent and mantissa is 2^120 times too
// small; moving bits is quicker than converting by way of fp16. (NaN codes are refused at load.)
__device__ inline void widen(uint32_t codes, uint32_t& lo, uint32_t& hi) {
  const uint32_t a = __byte_perm(codes, 0, 0x1404), b = __byte_perm(codes, 0, 0x3424);
  lo = (a >> 4 & 0x07f007f0u) | (a & 0x80008000u);
  hi = (b >> 4 & 0x07f007f0u) | (b & 0x80008000u);
  const uint32_t power = 0x7b807b80u;
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(lo) : "r"(power));
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(hi) : "r"(power));
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

// Two values of x times two norm weights, and their squares onto `squares`.
template <typename T>
__device__ inline uint32_t scale_pair(uint32_t x, uint32_t w, float& squares) {
  const float2 a = unpack(x, T()), b = unpack(w, T());
  squares = fmaf(a.x, a.x, fmaf(a.y, a.y, squares));
  return pack(a.x * b.x, a.y * b.y, T());
}

// A piece of two weight rows, `a` and `b`, times the same k of eight rows of x.
template <typename T, Held H>
__device__ inline void multiply_piece(float (&c)[4], const uint4& a, const uint4& b,
                                      const uint4 (&v)[kPiece<H> / 8]) {
  if constexpr (kIsFp8<H>) {
    const uint32_t rows[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
    const uint32_t columns[4][2] = {
        {v[0].x, v[0].y}, {v[0].z, v[0].w}, {v[1].x, v[1].y}, {v[1].z, v[1].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a_lo, a_hi, b_lo, b_hi;
      widen(rows[i][0], a_lo, a_hi);
      widen(rows[i][1], b_lo, b_hi);
      multiply_add(c, a_lo, b_lo, a_hi, b_hi, columns[i][0], columns[i][1], T());
    }
  } else {
    multiply_add(c, a.x, b.x, a.y, b.y, v[0].x, v[0].y, T());
    multiply_add(c, a.z, b.z, a.w, b.w, v[0].z, v[0].w, T());
  }
}

struct GroupScales {
  float lo, hi;
};

// The scales of columns k … k + kStep - 1 of two weight rows.
template <Held H>
__device__ inline GroupScales group_scales(const LinearParams& p, int n_lo, int n_hi, int k) {
  if constexpr (H == Held::kFp8Groups) {
    const float* const scales = p.scales + k / p.group;
    return {__ldg(scales + static_cast<int64_t>(min(n_lo, p.n - 1)) * p.groups),
            __ldg(scales + static_cast<int64_t>(min(n_hi, p.n - 1)) * p.groups)};
  }
  return {1.0f, 1.0f};
}

// A row's scale, for the finished sum.
template <Held H>
__device__ inline float row_scale(const LinearParams& p, int n) {
  return H == Held::kFp8Rows ? p.scales[min(n, p.n - 1)] : 1.0f;
}

// `multiply_piece` onto sums, with the scales of its group.
template <typename T, Held H>
__device__ inline void accumulate(float (&sum)[4], const uint4& a, const uint4& b,
                                  const uint4 (&v)[kPiece<H> / 8], const GroupScales& scales) {
  if constexpr (H == Held::kFp8Groups) {
    float part[4] = {};
    multiply_piece<T, H>(part, a, b, v);
    sum[0] = fmaf(scales.lo, part[0], sum[0]), sum[1] = fmaf(scales.lo, part[1], sum[1]);
    sum[2] = fmaf(scales.hi, part[2], sum[2]), sum[3] = fmaf(scales.hi, part[3], sum[3]);
  } else {
    multiply_piece<T, H>(sum, a, b, v);
  }
}

constexpr int kTile = 16;  // outputs of a block

// Weight rows of a block's tile: `lo` for the tile's rows 0 … 7, `hi` for 8 … 15. The epilogues that
// combine two outputs have them in one thread.
template <Epilogue E>
__device__ inline void tile_rows(const LinearParams& p, int tile, int row, int& lo, int& hi) {
  if constexpr (E == Epilogue::kSwiGLU) {
    lo = tile * 8 + row;
    hi = p.n / 2 + lo;
  } else if constexpr (E == Epilogue::kRope) {
    const int per_head = p.dim / kTile;
    lo = tile / per_head * p.dim + tile % per_head * 8 + row;
    hi = lo + p.dim / 2;
  } else {
    lo = tile * kTile + row;
    hi = lo + 8;
  }
}

__device__ inline float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }

// As T holds it; with `finite` 0 in place of what T has no number for.
template <typename T>
__device__ inline T rounded(float x, bool finite) {
  const T value = from_float<T>(x);
  return finite && !(fabsf(to_float(value)) < INFINITY) ? from_float<T>(0.0f) : value;
}

// lo and hi are the sums of outputs n_lo and n_hi of row m.
template <typename T, Epilogue E>
__device__ inline void finish(const LinearParams& p, int m, int n_lo, int n_hi, float lo,
                              float hi) {
  if (p.bias != nullptr) {
    const T* bias = static_cast<const T*>(p.bias);
    lo += to_float(bias[min(n_lo, p.n - 1)]);
    hi += to_float(bias[min(n_hi, p.n - 1)]);
  }
  T* out = static_cast<T*>(p.out) + m * p.out_stride;
  if constexpr (E == Epilogue::kSwiGLU) {
    if (n_lo < p.n / 2) out[n_lo] = from_float<T>(lo / (1.0f + __expf(-lo)) * hi);
  } else if constexpr (E == Epilogue::kRope) {
    const int head = n_lo / p.dim, d = n_lo % p.dim, half_dim = p.dim / 2;
    if (p.keeps_finite) lo = finite_or_zero(lo), hi = finite_or_zero(hi);
    if (head < p.q_heads + p.kv_heads) {
      const float* table = p.cos_sin + p.positions[m] * p.dim + d;
      // Rounded as the model's dtype holds them.
      const float cosine = to_float(from_float<T>(table[0]));
      const float sine = to_float(from_float<T>(table[half_dim]));
      const float rotated = lo * cosine - hi * sine;
      hi = hi * cosine + lo * sine;
      lo = rotated;
    }
    T* target = out + n_lo;
    int64_t slot = p.slots[m];
    if (slot < 0) slot = p.scratch_slot;
    if (head >= p.q_heads + p.kv_heads) {
      target = static_cast<T*>(p.v_cache) + slot * p.v_slot_stride +
               (head - p.q_heads - p.kv_heads) * p.v_head_stride + d;
    } else if (head >= p.q_heads) {
      target = static_cast<T*>(p.k_cache) + slot * p.k_slot_stride +
               (head - p.q_heads) * p.k_head_stride + d;
    }
    target[0] = rounded<T>(lo, p.keeps_finite);
    target[half_dim] = rounded<T>(hi, p.keeps_finite);
  } else {
    if constexpr (E == Epilogue::kResidual) {
      const T* residual = static_cast<const T*>(p.residual) + m * p.residual_stride;
      if (n_lo < p.n) lo += to_float(residual[n_lo]);
      if (n_hi < p.n) hi += to_float(residual[n_hi]);
    }
    if (n_lo < p.n) out[n_lo] = from_float<T>(lo);
    if (n_hi < p.n) out[n_hi] = from_float<T>(hi);
  }
}

// kColumns: tiles of 8 rows of x. kUnroll: steps of k whose weights are in flight.
template <typename T, Held H, Epilogue E, bool kNorm, int kColumns, int kWarps, int kUnroll>
__global__ void __launch_bounds__(kWarps * 32) skinny_linear(const __grid_constant__ LinearParams p) {
  __shared__ float sums[kWarps][kTile][8 * kColumns + 1];
  __shared__ float squares_of[kWarps][8 * kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int n_lo, n_hi;
  tile_rows<E>(p, blockIdx.x, g, n_lo, n_hi);
  const char* const w_lo = weight_row<T, H>(p, n_lo, t);
  const char* const w_hi = weight_row<T, H>(p, n_hi, t);
  const int steps = p.k / kStep<H>;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;

  uint4 lo[kUnroll], hi[kUnroll];
  auto fetch = [&](int step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool inside = step + u < end;
      lo[u] = inside ? load_once(w_lo + (step + u) * 64) : uint4{0, 0, 0, 0};
      hi[u] = inside ? load_once(w_hi + (step + u) * 64) : uint4{0, 0, 0, 0};
    }
  };
  fetch(begin);
  wait_for_previous();
  let_next_start();

  // Two inputs side by side: the warps divide evenly, so a warp reads one of them.
  const bool second = begin * kStep<H> >= p.k_split;
  const int first_k = second ? p.k_split : 0;
  const T* x = static_cast<const T*>(second ? p.x1 : p.x0) + t * kPiece<H> - first_k;
  const int64_t x_stride = second ? p.x1_stride : p.x0_stride;
  const T* norm = static_cast<const T*>(second ? p.norm1 : p.norm0) + t * kPiece<H> - first_k;

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
      const int k = (step + u) * kStep<H>;
      constexpr int kLoads = kPiece<H> / 8;  // of x, for one piece of weights
      uint4 scale[kLoads];
      if constexpr (kNorm) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          scale[j] = *reinterpret_cast<const uint4*>(norm + k + j * 8);
        }
      }
      const GroupScales scales_of = group_scales<H>(p, n_lo, n_hi, k);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        uint4 v[kLoads] = {};
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          if (m < p.rows) v[j] = *reinterpret_cast<const uint4*>(x + m * x_stride + k + j * 8);
          if constexpr (kNorm) {
            v[j].x = scale_pair<T>(v[j].x, scale[j].x, squares[c]);
            v[j].y = scale_pair<T>(v[j].y, scale[j].y, squares[c]);
            v[j].z = scale_pair<T>(v[j].z, scale[j].z, squares[c]);
            v[j].w = scale_pair<T>(v[j].w, scale[j].w, squares[c]);
          }
        }
        accumulate<T, H>(acc[c], a[u], b[u], v, scales_of);
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

  for (int i = threadIdx.x; i < 8 * p.rows; i += kWarps * 32) {
    const int row = i % 8, m = i / 8;
    float total_lo = 0.0f, total_hi = 0.0f;
    if constexpr (kNorm) {
      const bool two = p.k_split < p.k;
      float scale = 1.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w == 0 || (two && w == kWarps / 2)) {  // the scale of this input
          const int last = two ? w + kWarps / 2 : kWarps;
          float total = 0.0f;
          for (int v = w; v < last; ++v) total += squares_of[v][m];
          scale = rsqrtf(total / static_cast<float>(two && w > 0 ? p.k - p.k_split : p.k_split) + p.eps);
        }
        total_lo += scale * sums[w][row][m];
        total_hi += scale * sums[w][row + 8][m];
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total_lo += sums[w][row][m];
        total_hi += sums[w][row + 8][m];
      }
    }
    tile_rows<E>(p, blockIdx.x, row, n_lo, n_hi);
    finish<T, E>(p, m, n_lo, n_hi, total_lo * row_scale<H>(p, n_lo), total_hi * row_scale<H>(p, n_hi));
  }
}

}  // namespace trtspec
