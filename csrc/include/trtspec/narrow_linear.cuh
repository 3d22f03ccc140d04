// The product of `skinny_linear.cuh` for large weights with few columns, as an lm_head of a small model
// has: bound by memory bandwidth, if nothing waits. A warp makes 16 outputs by itself, over all of k,
// so that no block meets at a tile's end. The rows of x, perhaps normed, rest in shared memory. Weights
// come as in `stream_linear.cuh`: each thread's next pieces are on their way into places of its own, and
// the first start before the previous kernel is done.
#pragma once

#include "stream_linear.cuh"

namespace trtspec {

// One input, nothing after the product but a bias, at most 8 rows.
template <typename T, bool kNorm, int kWarps, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    narrow_linear(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares_of[1][kWarps][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + kTile - 1) / kTile, steps = p.k / 32, pitch = p.k * 2 + kPad;
  const int stride = gridDim.x * kWarps, first_tile = blockIdx.x + gridDim.x * warp;
  char* const x_shared = shared + ring_bytes<true, 1, 1, kWarps, kDepth>();  // of weights alone
  uint4* const mine = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  auto place = [&](int stage, int part) { return mine + (stage * 2 + part) * kWarps * 32; };

  int next_tile = first_tile, next_step = 0;  // what is fetched next
  const T *w_lo = nullptr, *w_hi = nullptr;
  auto enter_tile = [&] { weight_rows<T, Epilogue::kPlain>(p, next_tile, g, t, w_lo, w_hi); };
  auto fetch = [&](int stage) {
    if (next_tile < tiles) {
      copy_16(place(stage, 0), w_lo + next_step * 32);
      copy_16(place(stage, 1), w_hi + next_step * 32);
      if (++next_step == steps) {
        next_step = 0, next_tile += stride;
        enter_tile();
      }
    }
    copies_commit();
  };
  enter_tile();
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch(i);
  if constexpr (kNorm) ask_for_norms<T, kWarps>(p);
  wait_for_previous();
  let_next_start();
  if constexpr (kNorm) {
    make_resident<T, 8, kWarps, 1>(p, x_shared, squares_of, warp, lane);
  } else {
    for (int i = threadIdx.x; i < p.rows * steps * 4; i += kWarps * 32) {
      const int m = i / (steps * 4), piece = i % (steps * 4);
      const T* x = static_cast<const T*>(p.x0) + m * p.x0_stride + piece * 8;
      *reinterpret_cast<uint4*>(x_shared + m * pitch + piece * 16) =
          *reinterpret_cast<const uint4*>(x);
    }
  }
  __syncthreads();
  float scales[2] = {1.0f, 1.0f};  // of this thread's rows
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += squares_of[0][w][t * 2 + i];
      scales[i] = rsqrtf(total / static_cast<float>(p.k) + p.eps);
    }
  }

  int stage = 0;
  for (int tile = first_tile; tile < tiles; tile += stride) {
    float acc[4] = {};
    for (int step = 0; step < steps; ++step) {
      copies_wait<kDepth - 1>();
      const uint4 a = *place(stage, 0), b = *place(stage, 1);
      uint4 v = {0, 0, 0, 0};
      if (g < p.rows) {
        v = *reinterpret_cast<const uint4*>(x_shared + g * pitch + step * 64 + t * 16);
      }
      multiply_add(acc, a.x, b.x, a.y, b.y, v.x, v.y, T());
      multiply_add(acc, a.z, b.z, a.w, b.w, v.z, v.w, T());
      fetch(stage);  // the piece is in registers: its place is free
      if (++stage == kDepth) stage = 0;
    }
    int n_lo, n_hi;
    tile_rows<Epilogue::kPlain>(p, tile, g, n_lo, n_hi);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = t * 2 + i;
      if (m < p.rows) {
        finish<T, Epilogue::kPlain>(p, m, n_lo, n_hi, acc[i] * scales[i], acc[2 + i] * scales[i],
                                    ending_of<T, Epilogue::kPlain>(p, m, n_lo, n_hi));
      }
    }
  }
}

}  // namespace trtspec
