// The product of `skinny_linear.cuh` for large weights with few columns, as an lm_head of a small model
// has: bound by memory bandwidth, if nothing waits. A warp makes 16 outputs by itself, over all of k,
// so that no block meets at a tile's end. The rows of x, perhaps normed, rest in shared memory. Weights
// come as in `stream_linear.cuh`: each thread's next pieces are on their way into places of its own, and
// the first start before the previous kernel is done.
//
// Where only each row's largest output is asked for, none is written. A block sends the largest of its
// own, and the block that ends last writes the indices.
//
// A row's result does not depend on how many rows there are.
#pragma once

#include "stream_linear.cuh"

namespace trtspec {

constexpr int kMaxNarrow = 1024, kNarrowRows = 8;  // columns and rows
constexpr int kNarrowPieces = kMaxNarrow / 256;    // of 16 bytes of a row, by each lane of a warp

// The largest of each row's outputs, the first among equals; they are compared as T holds them. A NaN is
// never chosen. Where there is nothing else, or nothing above -inf, it is output 0.
struct LargestParams {
  unsigned long long* keys;  // [rows], then one that counts blocks; zero before and after
  const int64_t* d2t;        // [n] is added to an index, null: none
  int* tokens;               // [rows]
};

// Larger for a larger value, and for a smaller index of equal ones; never 0.
__device__ inline unsigned long long key_of(float value, int index) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // no -0
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<uint32_t>(index);
}

// One input, nothing after the product but a bias.
template <typename T, bool kNorm, bool kLargest, int kWarps, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    narrow_linear(const __grid_constant__ LinearParams p, const __grid_constant__ LargestParams largest) {
  static_assert(kWarps == kNarrowRows, "a warp prepares a row");
  extern __shared__ __align__(128) char shared[];
  __shared__ float scale_of[kNarrowRows];
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
  const int pieces = p.k / 8;  // of the warp's row, of which each lane has every 32nd
  uint4 norm[kNorm ? kNarrowPieces : 1];
  if constexpr (kNorm) {
#pragma unroll
    for (int j = 0; j < kNarrowPieces; ++j) {
      const int piece = lane + j * 32;
      if (piece < pieces) norm[j] = static_cast<const uint4*>(p.norm0)[piece];
    }
  }
  wait_for_previous();
  let_next_start();
  uint4 x[kNarrowPieces];
  const uint4* const row =
      reinterpret_cast<const uint4*>(static_cast<const T*>(p.x0) + warp * p.x0_stride);
#pragma unroll
  for (int j = 0; j < kNarrowPieces; ++j) {
    x[j] = {0, 0, 0, 0};  // of a row that is not there
    if (warp < p.rows && lane + j * 32 < pieces) x[j] = row[lane + j * 32];
  }
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kNarrowPieces; ++j) {
    const int piece = lane + j * 32;
    if (piece >= pieces) break;
    uint4 v = x[j];
    if constexpr (kNorm) {
      const uint4 w = norm[j];
      v = {scale_pair<T>(v.x, w.x, p.offset, squares), scale_pair<T>(v.y, w.y, p.offset, squares),
           scale_pair<T>(v.z, w.z, p.offset, squares), scale_pair<T>(v.w, w.w, p.offset, squares)};
    }
    *reinterpret_cast<uint4*>(x_shared + warp * pitch + piece * 16) = v;
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
    if (lane == 0) scale_of[warp] = rsqrtf(squares / static_cast<float>(p.k) + p.eps);
  }
  __syncthreads();
  float scales[2], best[2] = {-INFINITY, -INFINITY};  // of this thread's rows
  int index_of_best[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) scales[i] = kNorm ? scale_of[t * 2 + i] : 1.0f;

  int stage = 0;
  for (int tile = first_tile; tile < tiles; tile += stride) {
    float acc[4] = {};
    for (int step = 0; step < steps; ++step) {
      copies_wait<kDepth - 1>();
      const uint4 a = *place(stage, 0), b = *place(stage, 1);
      const uint4 v = *reinterpret_cast<const uint4*>(x_shared + g * pitch + step * 64 + t * 16);
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
      const float lo = acc[i] * scales[i], hi = acc[2 + i] * scales[i];
      if constexpr (kLargest) {
        auto take = [&](float sum, int n) {  // a thread's indices only grow
          const float value = to_float(from_float<T>(sum));
          if (n < p.n && value > best[i]) best[i] = value, index_of_best[i] = n;
        };
        take(lo, n_lo), take(hi, n_hi);
      } else if (m < p.rows) {
        finish<T, Epilogue::kPlain>(p, m, n_lo, n_hi, lo, hi,
                                    ending_of<T, Epilogue::kPlain>(p, m, n_lo, n_hi));
      }
    }
  }

  if constexpr (kLargest) {
    __shared__ unsigned long long key_of_warp[kWarps][kNarrowRows];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned long long key = key_of(best[i], index_of_best[i]);
#pragma unroll
      for (int mask = 16; mask >= 4; mask /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, mask));
      if (g == 0) key_of_warp[warp][t * 2 + i] = key;
    }
    __syncthreads();
    if (warp != 0) return;
    unsigned long long key = 0;
    if (lane < p.rows) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) key = max(key, key_of_warp[w][lane]);
      atomicMax(largest.keys + lane, key);
    }
    __threadfence();
    __syncwarp();
    bool is_last = false;
    unsigned long long* const ended = largest.keys + p.rows;
    if (lane == 0) is_last = atomicAdd(ended, 1ull) == gridDim.x - 1;
    if (!__shfl_sync(0xffffffffu, is_last, 0)) return;
    __threadfence();
    if (lane == 0) *ended = 0;
    if (lane >= p.rows) return;
    key = atomicExch(largest.keys + lane, 0ull);
    const int index = static_cast<int>(~static_cast<uint32_t>(key));
    largest.tokens[lane] = index + (largest.d2t == nullptr ? 0 : static_cast<int>(largest.d2t[index]));
  }
}

}  // namespace trtspec
