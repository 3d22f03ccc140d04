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

// Asks L2 for the norms' weights that this thread will read in make_resident. No kernel writes them.
template <typename T, int kWarps>
__device__ inline void ask_for_norms(const LinearParams& p) {
  if (p.norm0 == nullptr) return;
  for (int k = threadIdx.x * 8; k < p.k; k += kWarps * 256) {
    const T* norm = static_cast<const T*>(p.norm0) + k;
    if (k >= p.k_split) norm = static_cast<const T*>(p.norm1) + k - p.k_split;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(norm));
  }
}

// x times the norm's weights into shared memory, and the sums of the squares of x: the norm's scale is
// applied to the finished sums. squares_of: [input][warp][row]. As many pieces of each row as inputs are
// asked for at once. Without a norm x rests there as it is.
template <typename T, int kRows, int kWarps, int kInputs>
__device__ inline void make_resident(const LinearParams& p, char* x_shared,
                                     float (*squares_of)[kWarps][kRows], int warp, int lane) {
  constexpr int kStride = kWarps * 256;
  const float offset = p.norm0 == nullptr ? 0.0f : p.offset;
  float squares[kInputs][kRows] = {};
  auto is_second = [&](int k) { return kInputs == 2 && k >= p.k_split; };
#pragma unroll 1
  for (int first_k = (warp * 32 + lane) * 8; first_k < p.k; first_k += kInputs * kStride) {
    uint4 v[kInputs][kRows], norms[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const int k = first_k + i * kStride, column = is_second(k) ? k - p.k_split : k;
      if (k >= p.k) break;
      const T* const x = static_cast<const T*>(is_second(k) ? p.x1 : p.x0) + column;
      const T* const norm = static_cast<const T*>(is_second(k) ? p.norm1 : p.norm0);
      const int64_t stride = is_second(k) ? p.x1_stride : p.x0_stride;
      const uint32_t one = pack(1.0f, 1.0f, T());
      norms[i] = {one, one, one, one};
      if (norm != nullptr) norms[i] = *reinterpret_cast<const uint4*>(norm + column);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        if (m < p.rows) v[i][m] = *reinterpret_cast<const uint4*>(x + m * stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const int k = first_k + i * kStride;
      if (k >= p.k) break;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        if (m >= p.rows) break;
        const uint4 x = v[i][m], w = norms[i];
        float sum = 0.0f;
        *reinterpret_cast<uint4*>(x_shared + m * (p.k * 2 + kPad) + k * 2) = {
            scale_pair<T>(x.x, w.x, offset, sum), scale_pair<T>(x.y, w.y, offset, sum),
            scale_pair<T>(x.z, w.z, offset, sum), scale_pair<T>(x.w, w.w, offset, sum)};
        // (An index that is only known here would put the sums into local memory.)
        squares[0][m] += is_second(k) ? 0.0f : sum;
        if constexpr (kInputs == 2) squares[1][m] += is_second(k) ? sum : 0.0f;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    if (m >= p.rows) break;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        squares[i][m] += __shfl_xor_sync(0xffffffffu, squares[i][m], mask);
      }
      if (lane == 0) squares_of[i][warp][m] = squares[i][m];
    }
  }
}

// Steps of 32 values of k on their way, for each thread: two pieces of weights of each tile and, where x
// is not normed, kColumns of x.
template <bool kNorm, int kTiles, int kColumns, int kWarps, int kDepth>
__host__ __device__ constexpr int ring_bytes() {
  return kDepth * (2 * kTiles + (kNorm ? 0 : kColumns)) * kWarps * 32 * 16;
}

// kNorms: 0, 1 of one input, or one for each of two. With 1 and no norm given the rows rest in shared
// memory as they are. kTiles: tiles of 16 outputs that are made at once, from the same pieces of x.
// kColumns: tiles of 8 rows of x; of two a block has room for one tile's sums.
template <typename T, Epilogue E, int kNorms, int kTiles, int kColumns, int kWarps, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    stream_linear(const __grid_constant__ LinearParams p) {
  constexpr bool kNorm = kNorms > 0;
  constexpr int kOfWeights = 2 * kTiles, kParts = kOfWeights + (kNorm ? 0 : kColumns);
  constexpr int kRows = 8 * kColumns, kSums = kColumns == 1 ? 2 : 1;
  extern __shared__ __align__(128) char shared[];
  __shared__ float sums[kSums][kWarps][kTiles * kTile][kRows + 1];
  constexpr int kInputs = kNorms == 2 ? 2 : 1;
  __shared__ float squares_of[kInputs][kWarps][kRows], scales[kInputs][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + kTiles * kTile - 1) / (kTiles * kTile), steps = p.k / 32;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  const bool second = begin * 32 >= p.k_split;
  const T* x = static_cast<const T*>(second ? p.x1 : p.x0) + t * 8 - (second ? p.k_split : 0);
  const int64_t x_stride = second ? p.x1_stride : p.x0_stride;
  char* x_shared = shared + ring_bytes<kNorm, kTiles, kColumns, kWarps, kDepth>();
  uint4* const mine = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  auto place = [&](int stage, int part) { return mine + (stage * kParts + part) * kWarps * 32; };

  // What is fetched next.
  int next_tile = blockIdx.x, next_step = begin;
  const T* from[kOfWeights];
  auto enter_tile = [&] {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      weight_rows<T, E>(p, next_tile * kTiles + i, g, t, from[2 * i], from[2 * i + 1]);
    }
  };
  auto fetch_x = [&](int stage, int step) {
    if constexpr (!kNorm) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        if (m < p.rows) copy_16(place(stage, kOfWeights + c), x + m * x_stride + step * 32);
      }
    }
  };
  auto fetch_weights = [&](int stage) {
    if (next_tile >= tiles) return;
#pragma unroll
    for (int i = 0; i < kOfWeights; ++i) copy_16(place(stage, i), from[i] + next_step * 32);
    if (++next_step == end) {
      next_step = begin, next_tile += gridDim.x;
      enter_tile();
    }
  };
  enter_tile();
  if (begin == end) next_tile = tiles;
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch_weights(i);
  if constexpr (kNorm) ask_for_norms<T, kWarps>(p);
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
    make_resident<T, kRows, kWarps, kInputs>(p, x_shared, squares_of, warp, lane);
    __syncthreads();
    if (threadIdx.x < kInputs * kRows) {  // read after a tile's barrier
      const int input = threadIdx.x / kRows, m = threadIdx.x % kRows;
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) total += squares_of[input][w][m];
      const float size = static_cast<float>(input ? p.k - p.k_split : p.k_split);
      scales[input][m] = p.norm0 == nullptr ? 1.0f : rsqrtf(total / size + p.eps);
    }
  }

  // Of each turn's outputs a thread finishes two of one row at most.
  static_assert(8 * kTiles * kRows <= kWarps * 32);
  const int own_row = threadIdx.x % 8, own_tile = threadIdx.x / 8 % kTiles;
  const int own_m = threadIdx.x / (8 * kTiles);
  const bool finishes = own_m < p.rows;
  // With two tiles of two columns it is faster to wait for the residual first (measured; decision 007).
  using Residual = std::conditional_t<kTiles * kColumns == 4, float, T>;
  int stage = 0, parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= kSums - 1) {
    int n_lo, n_hi;
    tile_rows<E>(p, tile * kTiles + own_tile, own_row, n_lo, n_hi);
    Ending<T, Residual> ending;
    if (finishes) ending = ending_of<T, E, Residual>(p, own_m, n_lo, n_hi);
    float acc[kTiles][kColumns][4] = {};
    for (int step = begin; step < end; ++step) {
      copies_wait<kDepth - 1>();
      uint4 v[kColumns] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int m = c * 8 + g;
        if (m >= p.rows) continue;
        if constexpr (kNorm) {
          v[c] = *reinterpret_cast<const uint4*>(x_shared + m * (p.k * 2 + kPad) + step * 64 + t * 16);
        } else {
          v[c] = *place(stage, kOfWeights + c);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint4 a = *place(stage, 2 * i), b = *place(stage, 2 * i + 1);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          multiply_add(acc[i][c], a.x, b.x, a.y, b.y, v[c].x, v[c].y, T());
          multiply_add(acc[i][c], a.z, b.z, a.w, b.w, v[c].z, v[c].w, T());
        }
      }
      // The pieces are in registers: their places are free.
      if (next_tile < tiles) fetch_x(stage, next_step);
      fetch_weights(stage);
      copies_commit();
      if (++stage == kDepth) stage = 0;
    }
    if (kSums == 1 && tile != blockIdx.x) __syncthreads();  // the sums before have been read
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float* const to = sums[parity][warp][i * kTile + half * 8 + g] + c * 8 + t * 2;
          to[0] = acc[i][c][half * 2], to[1] = acc[i][c][half * 2 + 1];
        }
      }
    }
    __syncthreads();
    if (!finishes) continue;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      float scale = 1.0f;
      if constexpr (kNorm) scale = scales[kNorms == 2 && w >= kWarps / 2][own_m];
      lo = fmaf(scale, sums[parity][w][own_tile * kTile + own_row][own_m], lo);
      hi = fmaf(scale, sums[parity][w][own_tile * kTile + own_row + 8][own_m], hi);
    }
    finish<T, E>(p, own_m, n_lo, n_hi, lo, hi, ending);
  }
}

}  // namespace trtspec
