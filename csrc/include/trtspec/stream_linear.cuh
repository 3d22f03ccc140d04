// The product of `skinny_linear.cuh` for large weights, bound by memory bandwidth alone: one block
// for each multiprocessor, and every thread keeps the 16-byte pieces it will multiply next on their
// way into its own places in shared memory, without a pause between tiles. Nothing is shared but the
// sums at a tile's end and, where x is normed, the normed rows.
//
// The copies start as soon as a multiprocessor has room, before the previous kernel is done.
#pragma once

#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kPad = 64;  // bytes between rows in shared memory, so that banks do not collide

// x times the norm's weights into shared memory, and the sums of the squares of x: the norm's scale is
// applied to the finished sums. squares_of: [input][warp][row]. kInputs: 1, or up to 2.
template <typename T, int kRows, int kWarps, int kInputs>
__device__ inline void make_resident(const LinearParams& p, char* x_shared,
                                     float (*squares_of)[kWarps][kRows], int warp, int lane) {
  float squares[kInputs][kRows] = {};
  for (int k = (warp * 32 + lane) * 8; k < p.k; k += kWarps * 256) {
    const int second = kInputs == 2 && k >= p.k_split, column = second ? k - p.k_split : k;
    const T* x = static_cast<const T*>(second ? p.x1 : p.x0) + column;
    const int64_t stride = second ? p.x1_stride : p.x0_stride;
    const uint4 w = *reinterpret_cast<const uint4*>(
        static_cast<const T*>(second ? p.norm1 : p.norm0) + column);
    uint4 v[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m < p.rows) v[m] = *reinterpret_cast<const uint4*>(x + m * stride);
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= p.rows) break;
      float& sum = squares[second][m];
      *reinterpret_cast<uint4*>(x_shared + m * (p.k * 2 + kPad) + k * 2) = {
          scale_pair<T>(v[m].x, w.x, sum), scale_pair<T>(v[m].y, w.y, sum),
          scale_pair<T>(v[m].z, w.z, sum), scale_pair<T>(v[m].w, w.w, sum)};
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    if (m >= p.rows) break;
#pragma unroll
    for (int second = 0; second < kInputs; ++second) {
      if (second && p.k_split == p.k) break;
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        squares[second][m] += __shfl_xor_sync(0xffffffffu, squares[second][m], mask);
      }
      if (lane == 0) squares_of[second][warp][m] = squares[second][m];
    }
  }
}

// Steps of 32 values of k on their way, for each thread: two pieces of weights and, where x is not
// normed, kColumns of x.
template <bool kNorm, int kColumns, int kWarps, int kDepth>
__host__ __device__ constexpr int ring_bytes() {
  return kDepth * (kNorm ? 2 : 2 + kColumns) * kWarps * 32 * 16;
}

template <typename T, Epilogue E, bool kNorm, int kColumns, int kWarps, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    stream_linear(const __grid_constant__ LinearParams p) {
  constexpr int kParts = kNorm ? 2 : 2 + kColumns;
  extern __shared__ __align__(128) char shared[];
  __shared__ float sums[2][kWarps][kTile][8 * kColumns + 1];
  __shared__ float squares_of[2][kWarps][8 * kColumns], scales[2][8 * kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + kTile - 1) / kTile, steps = p.k / 32;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  const bool second = begin * 32 >= p.k_split;
  const T* x = static_cast<const T*>(second ? p.x1 : p.x0) + t * 8 - (second ? p.k_split : 0);
  const int64_t x_stride = second ? p.x1_stride : p.x0_stride;
  char* x_shared = shared + ring_bytes<kNorm, kColumns, kWarps, kDepth>();
  uint4* const mine = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  auto place = [&](int stage, int part) { return mine + (stage * kParts + part) * kWarps * 32; };

  // What is fetched next.
  int next_tile = blockIdx.x, next_step = begin;
  const T *w_lo = nullptr, *w_hi = nullptr;
  auto enter_tile = [&] { weight_rows<T, E>(p, next_tile, g, t, w_lo, w_hi); };
  auto fetch_x = [&](int stage, int step) {
    if constexpr (!kNorm) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        if (m < p.rows) copy_16(place(stage, 2 + c), x + m * x_stride + step * 32);
      }
    }
  };
  auto fetch_weights = [&](int stage) {
    if (next_tile >= tiles) return;
    copy_16(place(stage, 0), w_lo + next_step * 32);
    copy_16(place(stage, 1), w_hi + next_step * 32);
    if (++next_step == end) {
      next_step = begin, next_tile += gridDim.x;
      enter_tile();
    }
  };
  enter_tile();
  if (begin == end) next_tile = tiles;
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch_weights(i);
  wait_for_previous();
  let_next_start();
  int x_step = begin;  // of the next fetch of x
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (begin < end) fetch_x(i, x_step);
    if (++x_step >= end) x_step = begin;
    copies_commit();
  }
  if constexpr (kNorm) {
    make_resident<T, 8 * kColumns, kWarps, 2>(p, x_shared, squares_of, warp, lane);
    __syncthreads();
    if (threadIdx.x < 16 * kColumns) {  // read after a tile's barrier
      const int input = threadIdx.x / (8 * kColumns), m = threadIdx.x % (8 * kColumns);
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) total += squares_of[input][w][m];
      scales[input][m] = rsqrtf(total / static_cast<float>(input ? p.k - p.k_split : p.k_split) + p.eps);
    }
  }

  int stage = 0, parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    float acc[kColumns][4] = {};
    for (int step = begin; step < end; ++step) {
      copies_wait<kDepth - 1>();
      const uint4 a = *place(stage, 0), b = *place(stage, 1);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        uint4 v = {0, 0, 0, 0};
        if (m < p.rows) {
          if constexpr (kNorm) {
            v = *reinterpret_cast<const uint4*>(x_shared + m * (p.k * 2 + kPad) + step * 64 +
                                                t * 16);
          } else {
            v = *place(stage, 2 + c);
          }
        }
        multiply_add(acc[c], a.x, b.x, a.y, b.y, v.x, v.y, T());
        multiply_add(acc[c], a.z, b.z, a.w, b.w, v.z, v.w, T());
      }
      // The piece is in registers: its place is free.
      if (next_tile < tiles) fetch_x(stage, next_step);
      fetch_weights(stage);
      copies_commit();
      if (++stage == kDepth) stage = 0;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[parity][warp][g][c * 8 + t * 2] = acc[c][0];
      sums[parity][warp][g][c * 8 + t * 2 + 1] = acc[c][1];
      sums[parity][warp][g + 8][c * 8 + t * 2] = acc[c][2];
      sums[parity][warp][g + 8][c * 8 + t * 2 + 1] = acc[c][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * p.rows; i += kWarps * 32) {
      const int row = i % 8, m = i / 8;
      float lo = 0.0f, hi = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        float scale = 1.0f;
        if constexpr (kNorm) scale = scales[w >= kWarps / 2 && p.k_split < p.k][m];
        lo = fmaf(scale, sums[parity][w][row][m], lo);
        hi = fmaf(scale, sums[parity][w][row + 8][m], hi);
      }
      int n_lo, n_hi;
      tile_rows<E>(p, tile, row, n_lo, n_hi);
      finish<T, E>(p, m, n_lo, n_hi, lo, hi);
    }
  }
}

}  // namespace trtspec
