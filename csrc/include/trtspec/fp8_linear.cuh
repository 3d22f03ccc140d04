// The product of `stream_linear.cuh` for FP8 weights (e4m3), and all rows of x in shared memory.
//
// With a scale for each weight row, x is rounded to e4m3 as well, with a scale for each of its rows,
// and tensor cores multiply codes. That is what `quantize_rows` in trtspec/ops/layer/fp8.py does, so
// a row gets the same codes however many rows a step has.
// With a scale for each group of a weight row's columns, x stays bf16 and codes are widened.
#pragma once

#include <cuda_fp8.h>

#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kFp8Step = 64;  // values of k that four lanes of a weight row read at once, 16 each
constexpr int kFp8Rows = 8;
constexpr float kLargestFp8 = 448.0f;
constexpr float kSmallestRow = 0x1p-110f;  // a row with nothing larger becomes zeros

// Bytes between rows of x in shared memory, so that banks do not collide.
template <bool kGroups>
__host__ __device__ constexpr int resting_stride(int k) {
  return kGroups ? 2 * k + 16 : k + (k % 128 == 0 ? 64 : 0);
}

// Steps that are on their way. Of six, two are asked for before the previous kernel is done, and the others
// when the rows are: they arrive while these are rounded. (All before: rows wait behind them. None after:
// memory waits for the rounding.) Of four, as for groups and for rows that leave no room, all are before.
constexpr int kFp8Long = 6, kFp8Short = 4, kFp8Early = 2;

template <int kWarps, int kDepth>
constexpr int kFp8RingBytes = kDepth * 2 * kWarps * 32 * 16;

// The sums of two tiles. What warps know of rows has its place there before.
template <int kWarps>
using Fp8Sums = float[2][kWarps][kTile][kFp8Rows + 1];

// What rows may take of shared memory: what a block has on Hopper, less ring, sums and scales. The
// compiler gives the scales 128 bytes: the ring behind them begins at a multiple of that.
template <int kWarps, int kDepth>
constexpr int kMaxResting =
    (227 << 10) - kFp8RingBytes<kWarps, kDepth> - static_cast<int>(sizeof(Fp8Sums<kWarps>)) - 128;

// What is known of a row of x: of x times the norm's weights the largest magnitude, of x the sum of
// squares.
struct RowSums {
  float largest, squares;
};

// Eight values of x, times the norm's weights plus `offset`. `sums`: what `weigh` learns of them, if kSums.
template <bool kNorm, bool kSums>
__device__ inline void weigh(const uint4& x, const uint4& norm, float offset, float (&y)[8],
                             RowSums& sums) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, norms[4] = {norm.x, norm.y, norm.z, norm.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 a = unpack(xs[i], bf16());
    if constexpr (kNorm) {
      if constexpr (kSums) sums.squares = fmaf(a.x, a.x, fmaf(a.y, a.y, sums.squares));
      const float2 b = unpack(norms[i], bf16());
      a.x *= b.x + offset, a.y *= b.y + offset;
    }
    y[2 * i] = a.x, y[2 * i + 1] = a.y;
    if constexpr (kSums) sums.largest = fmaxf(sums.largest, fmaxf(fabsf(a.x), fabsf(a.y)));
  }
}

// As `weigh` without a norm, for the largest magnitude alone: of two values at once.
__device__ inline void find_largest(const uint4& x, RowSums& sums) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
  __nv_bfloat162 largest = __habs2(*reinterpret_cast<const __nv_bfloat162*>(xs));
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    largest = __hmax2(largest, __habs2(*reinterpret_cast<const __nv_bfloat162*>(xs + i)));
  }
  sums.largest = fmaxf(sums.largest, fmaxf(__low2float(largest), __high2float(largest)));
}

__device__ inline uint32_t four_codes(const float* y, float scale) {
  const float2 lo = {y[0] * scale, y[1] * scale}, hi = {y[2] * scale, y[3] * scale};
  const uint32_t a = __nv_cvt_float2_to_fp8x2(lo, __NV_SATFINITE, __NV_E4M3);
  const uint32_t b = __nv_cvt_float2_to_fp8x2(hi, __NV_SATFINITE, __NV_E4M3);
  return a | b << 16;
}

// Eight of the norm's weights. No kernel writes them: they may be read before the previous one is done.
template <bool kNorm>
__device__ inline uint4 norm_weights(const LinearParams& p, int k) {
  if (!kNorm || k >= p.k) return {};
  return *reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.norm0) + k);
}

// Writes the rows of x to shared memory, as codes or in bf16, and to `scales` what each row's sums
// are to be multiplied with. Ends with a barrier.
//
// A thread asks for kHeld pieces each of kRows rows at once, for each time it waits for memory. They
// stay in registers until the rows' scales are known, if that is all. `more` is called when the first
// are asked for: for copies of weights that would have delayed them.
//
// of_warp: [warp][row].
template <bool kGroups, bool kNorm, int kWarps, int kRows, int kHeld, typename More>
__device__ inline void rest_rows(const LinearParams& p, char* resting, RowSums (*of_warp)[kFp8Rows],
                                 float* scales, int warp, int lane, More more) {
  constexpr int kStride = kWarps * 256;
  const bf16* const x = static_cast<const bf16*>(p.x0);
  const int bytes = resting_stride<kGroups>(p.k);
  const int turns = (p.k + kHeld * kStride - 1) / (kHeld * kStride);
  uint4 norms[kHeld], held[kRows][kHeld];
  auto column = [&](int turn, int j) { return (turn * kHeld + j) * kStride + (warp * 32 + lane) * 8; };
  int norms_of = 0;  // the turn
  auto load_norms = [&](int turn) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) norms[j] = norm_weights<kNorm>(p, column(turn, j));
    norms_of = turn;
  };
  auto load = [&](int first, int turn) {
    if (kNorm && turn != norms_of) load_norms(turn);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int k = column(turn, j);
        const bf16* const from = x + (first + i) * p.x0_stride + k;
        held[i][j] = first + i < p.rows && k < p.k ? *reinterpret_cast<const uint4*>(from) : uint4{};
      }
    }
  };
  load_norms(0);
  wait_for_previous();
  let_next_start();
#pragma unroll 1
  for (int first = 0; first < p.rows; first += kRows) {
    RowSums sums[kRows] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      load(first, turn);
      if (first + turn == 0) more();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + i >= p.rows) break;
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          uint4 rests = held[i][j];
          if constexpr (kNorm) {
            float y[8];
            weigh<kNorm, true>(held[i][j], norms[j], p.offset, y, sums[i]);
            rests = {pack(y[0], y[1], bf16()), pack(y[2], y[3], bf16()), pack(y[4], y[5], bf16()),
                     pack(y[6], y[7], bf16())};
          } else if constexpr (!kGroups) {
            find_largest(held[i][j], sums[i]);
          }
          if constexpr (kGroups) {
            const int k = column(turn, j);
            if (k < p.k) *reinterpret_cast<uint4*>(resting + (first + i) * bytes + k * 2) = rests;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= p.rows) break;
      if constexpr (!kGroups) {  // numbers that are not negative are in the order of their bits
        sums[i].largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(sums[i].largest)));
      }
      if constexpr (kNorm) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
          sums[i].squares += __shfl_xor_sync(~0u, sums[i].squares, mask);
        }
      }
      if (lane == 0) of_warp[warp][first + i] = sums[i];
    }
    __syncthreads();
    // Every warp joins all warps' parts: lane % 8 is the row.
    RowSums total = {};
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) {
      const RowSums part = of_warp[lane / 8 + i * 4][lane % 8];
      total.largest = fmaxf(total.largest, part.largest), total.squares += part.squares;
    }
#pragma unroll
    for (int mask = 8; mask < 32; mask *= 2) {
      total.largest = fmaxf(total.largest, __shfl_xor_sync(~0u, total.largest, mask));
      total.squares += __shfl_xor_sync(~0u, total.squares, mask);
    }
    if (warp == 0 && lane >= first && lane < min(first + kRows, p.rows)) {
      float scale = kGroups ? 1.0f : total.largest / kLargestFp8;
      if constexpr (kNorm) scale *= rsqrtf(total.squares / static_cast<float>(p.k) + p.eps);
      scales[lane] = scale;
    }
    if constexpr (!kGroups) {
      const float to_codes =
          total.largest > kSmallestRow ? __fdiv_rn(kLargestFp8, total.largest) : 0.0f;
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        if (turns > 1) load(first, turn);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (first + i >= p.rows) break;
          const float row_scale = __shfl_sync(~0u, to_codes, first + i);
#pragma unroll
          for (int j = 0; j < kHeld; ++j) {
            const int k = column(turn, j);
            if (k >= p.k) break;
            float y[8];
            RowSums unused;
            weigh<kNorm, false>(held[i][j], norms[j], p.offset, y, unused);
            *reinterpret_cast<uint2*>(resting + (first + i) * bytes + k) = {
                four_codes(y, row_scale), four_codes(y + 4, row_scale)};
          }
        }
      }
    }
  }
  __syncthreads();
}

__device__ inline void multiply_add_codes(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

// 16 codes of two weight rows times the same 16 values of x, in bf16.
__device__ inline void multiply_widened(float (&part)[4], const uint4& a, const uint4& b,
                                        const uint4 (&v)[2]) {
  const uint32_t rows[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
  const uint32_t columns[4][2] = {
      {v[0].x, v[0].y}, {v[0].z, v[0].w}, {v[1].x, v[1].y}, {v[1].z, v[1].w}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a_lo, a_hi, b_lo, b_hi;
    widen(rows[i][0], a_lo, a_hi);
    widen(rows[i][1], b_lo, b_hi);
    multiply_add(part, a_lo, b_lo, a_hi, b_hi, columns[i][0], columns[i][1], bf16());
  }
}

// 16 codes of two weight rows times the same 16 values of x, which rest at `x`. Tensor cores add up
// codes with fewer bits than float has, so each step's sum begins at zero.
template <bool kGroups>
__device__ inline void multiply_step(float (&part)[4], const uint4& a, const uint4& b,
                                     const char* x, bool is_row) {
  if constexpr (kGroups) {
    uint4 v[2] = {};
    if (is_row) v[0] = reinterpret_cast<const uint4*>(x)[0], v[1] = reinterpret_cast<const uint4*>(x)[1];
    multiply_widened(part, a, b, v);
  } else {
    const uint4 v = is_row ? *reinterpret_cast<const uint4*>(x) : uint4{};
    multiply_add_codes(part, a.x, b.x, a.y, b.y, v.x, v.y);
    multiply_add_codes(part, a.z, b.z, a.w, b.w, v.z, v.w);
  }
}

// (Held to 64 registers, so that two kernels' blocks fit on a multiprocessor, a step of
// Llama-3.1-8B's shape took 3.10 ms in place of 2.75.)
// kRows: the most rows, 4 or 8. (Code is kept small: what a layer's kernels take together must fit a
// multiprocessor's 128 KiB of instructions, or each launch reads its own again.)
template <bool kGroups, Epilogue E, bool kNorm, int kWarps, int kRows, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    fp8_linear(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Fp8Sums<kWarps> sums;
  __shared__ float scales[kFp8Rows];
  static_assert(sizeof(sums) >= sizeof(RowSums[kWarps][kFp8Rows]));
  constexpr int kEarly = kDepth == kFp8Long ? kFp8Early : kDepth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + kTile - 1) / kTile, steps = p.k / kFp8Step;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  char* const resting = shared + kFp8RingBytes<kWarps, kDepth>;
  const char* const x = resting + g * resting_stride<kGroups>(p.k) + t * 16 * (kGroups ? 2 : 1);
  uint4* const mine = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  auto place = [&](int stage, int part) { return mine + (stage * 2 + part) * kWarps * 32; };

  // What is fetched next.
  int next_tile = blockIdx.x, next_step = begin;
  const char *w_lo = nullptr, *w_hi = nullptr;
  auto enter_tile = [&] {
    int n_lo, n_hi;
    tile_rows<E>(p, next_tile, g, n_lo, n_hi);
    const char* const weight = static_cast<const char*>(p.weight) + t * 16;
    w_lo = weight + static_cast<int64_t>(min(n_lo, p.n - 1)) * p.k;
    w_hi = weight + static_cast<int64_t>(min(n_hi, p.n - 1)) * p.k;
  };
  auto fetch = [&](int stage) {
    if (next_tile < tiles) {
      copy_16(place(stage, 0), w_lo + next_step * kFp8Step);
      copy_16(place(stage, 1), w_hi + next_step * kFp8Step);
      if (++next_step == end) {
        next_step = begin, next_tile += gridDim.x;
        enter_tile();
      }
    }
    copies_commit();
  };
  enter_tile();
  if (begin == end) next_tile = tiles;
#pragma unroll
  for (int i = 0; i < kEarly; ++i) fetch(i);
  auto more = [&] {
#pragma unroll 1
    for (int i = kEarly; i < kDepth; ++i) fetch(i);
  };
  const auto of_warp = reinterpret_cast<RowSums(*)[kFp8Rows]>(sums);
  // down_proj's rows are the longest.
  if (E == Epilogue::kResidual && (kRows == 4 || p.k > kWarps * 256)) {
    rest_rows<kGroups, kNorm, kWarps, 4, 4>(p, resting, of_warp, scales, warp, lane, more);
  } else {
    rest_rows<kGroups, kNorm, kWarps, kRows, 1>(p, resting, of_warp, scales, warp, lane, more);
  }

  // Of each tile a thread finishes two outputs of one row at most.
  static_assert(8 * kFp8Rows <= kWarps * 32);
  const int own_row = threadIdx.x % 8, own_m = threadIdx.x / 8;
  const bool finishes = own_m < p.rows;
  int stage = 0, parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    float acc[4] = {};
    int n_lo, n_hi;
    tile_rows<E>(p, tile, own_row, n_lo, n_hi);
    Ending<bf16> ending;
    float own_lo_scale = 1.0f, own_hi_scale = 1.0f;
    if (finishes) {
      ending = ending_of<bf16, E>(p, own_m, n_lo, n_hi);
      if constexpr (!kGroups) {
        own_lo_scale = p.scales[min(n_lo, p.n - 1)], own_hi_scale = p.scales[min(n_hi, p.n - 1)];
      }
    }
    int read_lo, read_hi;  // the rows of weights that this thread multiplies
    tile_rows<E>(p, tile, g, read_lo, read_hi);
    const float* const lo_scales = p.scales + static_cast<int64_t>(min(read_lo, p.n - 1)) * p.groups;
    const float* const hi_scales = p.scales + static_cast<int64_t>(min(read_hi, p.n - 1)) * p.groups;
    float lo_next = 1.0f, hi_next = 1.0f;
    auto fetch_scales = [&](int step) {
      if constexpr (kGroups) {
        const int group = min(step, steps - 1) * kFp8Step / p.group;
        lo_next = __ldg(lo_scales + group), hi_next = __ldg(hi_scales + group);
      }
    };
    fetch_scales(begin);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      const float lo_scale = lo_next, hi_scale = hi_next;
      fetch_scales(step + 1);
      copies_wait<kDepth - 1>();
      const uint4 a = *place(stage, 0), b = *place(stage, 1);
      float part[4] = {};
      multiply_step<kGroups>(part, a, b, x + step * kFp8Step * (kGroups ? 2 : 1), g < p.rows);
      // The pieces were in registers: their places are free.
      fetch(stage);
      if (++stage == kDepth) stage = 0;
      acc[0] = fmaf(lo_scale, part[0], acc[0]), acc[1] = fmaf(lo_scale, part[1], acc[1]);
      acc[2] = fmaf(hi_scale, part[2], acc[2]), acc[3] = fmaf(hi_scale, part[3], acc[3]);
    }
    sums[parity][warp][g][t * 2] = acc[0];
    sums[parity][warp][g][t * 2 + 1] = acc[1];
    sums[parity][warp][g + 8][t * 2] = acc[2];
    sums[parity][warp][g + 8][t * 2 + 1] = acc[3];
    __syncthreads();
    if (!finishes) continue;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      lo += sums[parity][w][own_row][own_m];
      hi += sums[parity][w][own_row + 8][own_m];
    }
    lo *= scales[own_m], hi *= scales[own_m];
    if constexpr (!kGroups) lo *= own_lo_scale, hi *= own_hi_scale;
    finish<bf16, E>(p, own_m, n_lo, n_hi, lo, hi, ending);
  }
}

}  // namespace trtspec
