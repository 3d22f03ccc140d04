// y = x W^T for some 1 to 256 rows of x and a small weight: bound by latency. What stands before and
// after the product is done in the same kernel, as in skinny_linear.cuh.
//
// A block makes a tile of rows and outputs. Columns of x and W come through a ring in shared memory, 128
// at a time, of which each warp multiplies 16. The warps' sums are joined at the end. The first weights are
// on their way before the previous kernel has ended. With short rings so is a request to have the others in
// L2. Where all columns have room at once (kRests) a block waits once, and reads all that it multiplies
// before it begins.
//
// Where queries and keys have norms, a cluster of blocks has the outputs of one head, and its blocks send each
// other the sums of their squares.
//
// Of deep weights with few rows or few outputs a cluster of blocks divides K: a block would be long with
// so many columns, and most multiprocessors would have none.
//
// For one size of cluster, which launch_tiles chooses by rows, K and outputs, a row's result does not depend on
// how many rows there are, nor on the tile's size: K fixes the order of its sum.
#pragma once

#include <cooperative_groups.h>

#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kTileWarps = 8;
constexpr int kStep = 16 * kTileWarps;  // columns
constexpr int kPieces = kStep / 8;      // of 16 bytes
constexpr int kHeadOuts = 32;           // outputs of a block where heads have norms
constexpr int kMaxHeadBlocks = 8;       // of such a head

// Sizes of a block with kBlocks times 16 rows and kOuts outputs, kStages steps on their way, of a
// cluster of kSplit blocks. kTwo: the sums of two inputs are kept apart.
template <int kBlocks, int kOuts, int kStages, int kSplit, bool kTwo>
struct Tiling {
  static constexpr int kRows = 16 * kBlocks;
  static constexpr int kStageBytes = (kRows + kOuts) * kStep * 2;
  static constexpr int kSumRow = kOuts + 8;
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr int kPart = kRows * kSumRow;  // sums of a warp, or of the block for its cluster
  static constexpr int kSums = (kTileWarps * (kTwo ? 2 : 1) + (kSplit > 1 ? 1 : 0)) * kPart * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;

  static int shared_bytes(const LinearParams& p) {
    return kShared + (p.norm0 == nullptr ? 0 : (p.k + kStep - 1) / kStep * kStep * 2);
  }
};

__device__ inline void add_pair(float2& sum, const float* from) {
  const float2 more = *reinterpret_cast<const float2*>(from);
  sum.x += more.x, sum.y += more.y;
}

// As `Ending`, of two neighbours each. Pairs of T are packed.
struct PairEnding {
  uint32_t bias_lo, bias_hi, residual_lo, residual_hi;
  uint32_t norm_lo, norm_hi;
  float2 cosine, sine;
  int64_t slot;
};

template <typename T, Epilogue E>
__device__ inline PairEnding pair_ending_of(const LinearParams& p, int m, int n_lo, int n_hi) {
  PairEnding end = {};
  auto pair = [](const T* at) { return *reinterpret_cast<const uint32_t*>(at); };
  if (p.bias != nullptr) {
    const T* const bias = static_cast<const T*>(p.bias);
    end.bias_lo = pair(bias + n_lo), end.bias_hi = pair(bias + n_hi);
  }
  if constexpr (E == Epilogue::kResidual) {
    const T* const residual = static_cast<const T*>(p.residual) + m * p.residual_stride;
    end.residual_lo = pair(residual + n_lo), end.residual_hi = pair(residual + n_hi);
  }
  if constexpr (is_rope(E)) {
    end.slot = p.slots[m];
    if (is_turned(p, n_lo)) {
      const float* const table = p.cos_sin + p.positions[m] * p.dim + n_lo % p.dim;
      end.cosine = *reinterpret_cast<const float2*>(table);
      end.sine = *reinterpret_cast<const float2*>(table + p.dim / 2);
      if constexpr (E == Epilogue::kNormedRope) {
        const T* const norm = static_cast<const T*>(n_lo < p.q_heads * p.dim ? p.q_norm : p.k_norm);
        end.norm_lo = pair(norm + n_lo % p.dim), end.norm_hi = pair(norm + n_lo % p.dim + p.dim / 2);
      }
    }
  }
  return end;
}

// Two neighbouring sums each of outputs n_lo and n_hi of row m.
template <typename T, Epilogue E>
__device__ inline void finish_pair(const LinearParams& p, int m, int n_lo, int n_hi, float2 lo,
                                   float2 hi, const PairEnding& end) {
  auto add = [](float2& sum, uint32_t other) {
    const float2 v = unpack(other, T());
    sum.x += v.x, sum.y += v.y;
  };
  if (p.bias != nullptr) add(lo, end.bias_lo), add(hi, end.bias_hi);
  auto store = [](T* at, float2 v) { *reinterpret_cast<uint32_t*>(at) = pack(v.x, v.y, T()); };
  T* const out = static_cast<T*>(p.out) + m * p.out_stride;
  if constexpr (E == Epilogue::kGated) {
    store(out + n_lo, {activate(lo.x, p.is_gelu) * hi.x, activate(lo.y, p.is_gelu) * hi.y});
  } else if constexpr (is_rope(E)) {
    if (p.keeps_finite) {
      lo = {finite_or_zero(lo.x), finite_or_zero(lo.y)};
      hi = {finite_or_zero(hi.x), finite_or_zero(hi.y)};
    }
    if (is_turned(p, n_lo)) {
      rotate<T>(end.cosine.x, end.sine.x, lo.x, hi.x);
      rotate<T>(end.cosine.y, end.sine.y, lo.y, hi.y);
    }
    auto held = [&](float x) { return to_float(rounded<T>(x, p.keeps_finite)); };
    T* const target = rope_target<T>(p, m, n_lo, end.slot);
    store(target, {held(lo.x), held(lo.y)});
    store(target + p.dim / 2, {held(hi.x), held(hi.y)});
  } else {
    if constexpr (E == Epilogue::kResidual) add(lo, end.residual_lo), add(hi, end.residual_hi);
    store(out + n_lo, lo);
    store(out + n_hi, hi);
    if constexpr (E == Epilogue::kResidual) {
      if (p.copy == nullptr) return;
      T* const copy = static_cast<T*>(p.copy) + m * p.copy_stride;
      store(copy + n_lo, lo);
      store(copy + n_hi, hi);
    }
  }
}

// Sums of a head as they are before its norm: with their bias, and as T holds them.
template <typename T>
__device__ inline float2 before_norm(const LinearParams& p, float2 sum, uint32_t bias) {
  const float2 more = unpack(bias, T());
  return {to_float(rounded<T>(sum.x + more.x, p.keeps_finite)), to_float(rounded<T>(sum.y + more.y, p.keeps_finite))};
}

template <typename T>
__device__ inline float2 after_norm(float2 x, uint32_t weights, float offset, float scale) {
  const float2 w = unpack(weights, T());
  return {to_float(from_float<T>(x.x * scale * (w.x + offset))), to_float(from_float<T>(x.y * scale * (w.y + offset)))};
}

// Scales a fragment of two rows by a norm's weights at a lane's columns, and adds up the rows' squares.
template <typename T>
__device__ inline void scale_rows(uint32_t (&a)[4], const char* weights, float offset, float (&squares)[2]) {
  const uint32_t first = *reinterpret_cast<const uint32_t*>(weights);
  const uint32_t second = *reinterpret_cast<const uint32_t*>(weights + 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = scale_pair<T>(a[i], i < 2 ? first : second, offset, squares[i % 2]);
}

// Whether a thread has registers for the fragments of all steps, beside its sums.
__host__ __device__ constexpr bool has_registers(int blocks, int outs, int stages) {
  return blocks == 1 ? stages * (16 + outs) <= 288 : blocks * outs == 64 && stages == 5;
}

// Blocks that a multiprocessor must have registers for, by a block's outputs (rows times outputs of a row) in
// sixteens, and by whether threads keep fragments of all steps or a second input's sums.
__host__ __device__ constexpr int least_at_once(int outputs_by_16, bool keeps_more) {
  if (outputs_by_16 > 128 || (keeps_more && outputs_by_16 > 64)) return 1;
  return outputs_by_16 > 64 || keeps_more ? 2 : 3;
}

// The row of x0 that row m of the product reads.
__device__ inline int64_t row_of_table(const LinearParams& p, int m) {
  if (p.ids == nullptr) return m;
  const int64_t id = p.has_wide_ids ? static_cast<const int64_t*>(p.ids)[m] : static_cast<const int*>(p.ids)[m];
  return min(max(id, static_cast<int64_t>(0)), static_cast<int64_t>(p.table_rows - 1));
}

// n and, if gated, n / 2 multiples of 16 and 8. kNorms: 0 or 1 of one input, or one for each of two.
template <typename T, Epilogue E, int kNorms, int kBlocks, int kOuts, int kStages, int kSplit, bool kRests>
__global__ void __launch_bounds__(kTileWarps * 32, least_at_once(kBlocks * kOuts, kNorms == 2 || kRests))
    tile_linear(const __grid_constant__ LinearParams p) {
  constexpr bool kNorm = kNorms > 0, kTwo = kNorms == 2, kNormsHeads = E == Epilogue::kNormedRope;
  // Rings of six steps and more have enough on their way: further requests took longer.
  constexpr bool kAsks = kTwo || kStages <= 5;
  static_assert(!kTwo || kSplit == 1, "two inputs' sums are joined in one block");
  static_assert(!kNormsHeads || (kSplit == 1 && !kTwo && kOuts == kHeadOuts), "a cluster has a head");
  static_assert(!kRests || has_registers(kBlocks, kOuts, kStages), "fragments of all steps are registers");
  using Sizes = Tiling<kBlocks, kOuts, kStages, kSplit, kTwo>;
  constexpr int kRows = Sizes::kRows;
  constexpr int kThreads = kTileWarps * 32, kRowBytes = kStep * 2;
  extern __shared__ __align__(128) char shared[];
  char* const norm = shared + Sizes::kShared;  // weights of the norm
  __shared__ float squares_of[kTwo ? 2 : 1][kTileWarps][kRows];
  __shared__ float of_head[kNormsHeads ? kMaxHeadBlocks : 1][kRows];  // squares of its blocks' outputs
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % kSplit, first_tile = blockIdx.x / kSplit * (kOuts / kTile);
  const int first_row = blockIdx.y * kRows, rows_here = p.rows - first_row;
  const int all_steps = (p.k + kStep - 1) / kStep, first_step = all_steps * rank / kSplit;
  const int steps = all_steps * (rank + 1) / kSplit - first_step;
  const T* const weight = static_cast<const T*>(p.weight);

  // Row `index` of the block's weights: of each tile of 16 first the 8 `lo`, then the 8 `hi`.
  auto weight_row = [&](int index) {
    int lo, hi;
    tile_rows<E>(p, first_tile + index / kTile, index % 8, lo, hi);
    return weight + static_cast<int64_t>(min(index % kTile < 8 ? lo : hi, p.n - 1)) * p.k;
  };
  auto place = [](char* base, int row, int piece) {
    return base + row * kRowBytes + (piece ^ (row & 7)) * 16;
  };
  // A thread copies one piece of every kApart-th row.
  constexpr int kApart = kThreads / kPieces, kOfX = (kRows + kApart - 1) / kApart;
  constexpr int kOfWeights = (kOuts + kApart - 1) / kApart;
  const int own_row = threadIdx.x / kPieces, own_piece = threadIdx.x % kPieces;
  const int own_column = first_step * kStep + own_piece * 8;
  const T* w_from[kOfWeights];
  const T *x_from[kOfX], *x1_from[kTwo ? kOfX : 1];
#pragma unroll
  for (int j = 0; j < kOfWeights; ++j) w_from[j] = weight_row(own_row + j * kApart) + own_column;
  auto find_x = [&] {
#pragma unroll
    for (int j = 0; j < kOfX; ++j) {
      const int row = min(first_row + own_row + j * kApart, p.rows - 1);
      const int64_t of_x0 = kTwo ? row_of_table(p, row) : row;
      x_from[j] = static_cast<const T*>(p.x0) + of_x0 * p.x0_stride + own_column;
      if constexpr (kTwo) {
        x1_from[j] = static_cast<const T*>(p.x1) + row * p.x1_stride + own_column - p.k_split;
      }
    }
  };
  if constexpr (!kTwo) find_x();
  char* const own_place = place(shared, own_row, own_piece);  // kApart is a multiple of 8
  auto fetch_weights = [&](int step) {
    char* const stage = own_place + step % kStages * Sizes::kStageBytes + kRows * kRowBytes;
    const bool is_there = step < steps && step * kStep + own_column < p.k;
#pragma unroll
    for (int j = 0; j < kOfWeights; ++j) {
      const T* const from = is_there ? w_from[j] + step * kStep : weight;
      copy_16_if(stage + j * kApart * kRowBytes, from, is_there);
    }
  };
  auto fetch_x = [&](int step) {
    char* const stage = own_place + step % kStages * Sizes::kStageBytes;
#pragma unroll
    for (int j = 0; j < kOfX; ++j) {
      // (Rows that are not there: all blocks would wait for the last one's bytes.)
      const bool is_row = own_row + j * kApart < rows_here;
      const bool is_there = is_row && step < steps && step * kStep + own_column < p.k;
      const T* from = x_from[j];
      if constexpr (kTwo) from = step * kStep + own_column < p.k_split ? from : x1_from[j];
      from = is_there ? from + step * kStep : weight;
      copy_16_if(stage + j * kApart * kRowBytes, from, is_there);
    }
  };

  const int early = kRests ? kStages : min(steps, kStages);  // steps that are not there are zeros
#pragma unroll 1
  for (int step = 0; step < early; ++step) fetch_weights(step);
#pragma unroll 1
  for (int i = threadIdx.x; kAsks && i < kOuts * (steps - early); i += kThreads) {
    const int column = (first_step + early + i / kOuts) * kStep;
    const T* const line = weight_row(i % kOuts) + min(column, p.k - 8);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
  if constexpr (kNorm) {
#pragma unroll 1
    for (int piece = threadIdx.x; piece < steps * kPieces; piece += kThreads) {
      const int column = first_step * kStep + piece * 8;
      const T* from = static_cast<const T*>(p.norm0) + column;
      if constexpr (kTwo) {
        if (column >= p.k_split) from = static_cast<const T*>(p.norm1) + column - p.k_split;
      }
      copy_16_if(norm + piece * 16, from, column < p.k);
    }
  }
  wait_for_previous();
  let_next_start();
  if constexpr (kNormsHeads) cluster_arrive();
  if constexpr (kTwo) find_x();  // the kernel before may have written which rows they are
#pragma unroll
  for (int step = 0; step < kStages; ++step) {
    if (kRests || step < steps) fetch_x(step);
    copies_commit();
  }

  // What this thread will finish: two neighbours of `lo` and of `hi` each, of the block's own rows.
  constexpr int kPairs = kOuts / kTile * 4, kOwnRows = kRows / kSplit;
  constexpr int kItems = (kOwnRows * kPairs + kThreads - 1) / kThreads;
  auto item = [&](int j, int& row, int& column, int& n_lo, int& n_hi) {
    const int i = threadIdx.x + j * kThreads, pair = i % kPairs;
    row = rank * kOwnRows + i / kPairs, column = pair / 4 * kTile + pair % 4 * 2;
    tile_rows<E>(p, first_tile + pair / 4, pair % 4 * 2, n_lo, n_hi);
    return i < kOwnRows * kPairs && first_row + row < p.rows && first_tile + pair / 4 < p.n / kTile;
  };
  PairEnding endings[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    int row, column, n_lo, n_hi;
    if (!item(j, row, column, n_lo, n_hi)) continue;
    endings[j] = pair_ending_of<T, E>(p, first_row + row, n_lo, n_hi);
  }

  float acc[kBlocks][kOuts / 8][4] = {};
  float squares[kBlocks][2] = {};
  float* const sums = reinterpret_cast<float*>(shared);
  // Of two inputs a warp ends the first one's sums before it begins the second's.
  float first_acc[kTwo ? kBlocks : 1][kOuts / 8][4], first_squares[kTwo ? kBlocks : 1][2];
  bool is_second = false;
  auto enter_second = [&] {
#pragma unroll
    for (int m = 0; m < (kTwo ? kBlocks : 0); ++m) {
#pragma unroll
      for (int n = 0; n < kOuts / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) first_acc[m][n][i] = acc[m][n][i], acc[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) first_squares[m][i] = squares[m][i], squares[m][i] = 0.0f;
    }
    is_second = true;
  };
  if constexpr (kRests) {
    copies_wait<0>();
    __syncthreads();
    uint32_t a[kStages][kBlocks][4], b[kStages][kOuts / 16][4];
    const char* const xs = place(shared, lane % 16, warp * 2 + lane / 16);
    const int row_of_w = lane / 16 * 8 + lane % 8;
    const char* const ws = place(shared + kRows * kRowBytes, row_of_w, warp * 2 + lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kStages; ++step) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        load_matrices<false>(a[step][m], xs + step * Sizes::kStageBytes + m * 16 * kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kOuts / 16; ++n) {
        load_matrices<false>(b[step][n], ws + step * Sizes::kStageBytes + n * 16 * kRowBytes);
      }
    }
#pragma unroll
    for (int step = 0; step < kStages; ++step) {
      if (kTwo && !is_second && step * kStep + warp * 16 >= p.k_split) enter_second();
      if constexpr (kNorm) {
        // (The norm's weights end with the last step.)
        const char* const of_lane = norm + (min(step, steps - 1) * kStep + warp * 16 + t * 2) * 2;
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) scale_rows<T>(a[step][m], of_lane, p.offset, squares[m]);
      }
#pragma unroll
      for (int n = 0; n < kOuts / 16; ++n) {
        const uint32_t(&w)[4] = b[step][n];
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          const uint32_t(&x)[4] = a[step][m];
          multiply_add(acc[m][n * 2], x[0], x[1], x[2], x[3], w[0], w[1], T());
          multiply_add(acc[m][n * 2 + 1], x[0], x[1], x[2], x[3], w[2], w[3], T());
        }
      }
    }
  }
#pragma unroll 1
  for (int step = 0; step < (kRests ? 0 : steps); ++step) {
    if (kTwo && !is_second && step * kStep + warp * 16 >= p.k_split) enter_second();
    if (step == 0) {
      copies_wait<kStages - 1>();
    } else {
      copies_wait<kStages - 2>();
    }
    __syncthreads();  // the step is here, and all are done with the one before
    if (const int next = step - 1 + kStages; step > 0) {
      if (next < steps) fetch_weights(next), fetch_x(next);
      copies_commit();
    }
    char* const xs = shared + step % kStages * Sizes::kStageBytes;
    char* const ws = xs + kRows * kRowBytes;
    uint32_t a[kBlocks][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      load_matrices<false>(a[m], place(xs, m * 16 + lane % 16, warp * 2 + lane / 16));
    }
    if constexpr (kNorm) {
      const char* const of_lane = norm + (step * kStep + warp * 16 + t * 2) * 2;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) scale_rows<T>(a[m], of_lane, p.offset, squares[m]);
    }
#pragma unroll
    for (int n = 0; n < kOuts / 16; ++n) {
      uint32_t b[4];
      const int row = n * 16 + lane / 16 * 8 + lane % 8;
      load_matrices<false>(b, place(ws, row, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        multiply_add(acc[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1], T());
        multiply_add(acc[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3], T());
      }
    }
  }
  if (kTwo && !is_second) enter_second();
  copies_wait<0>();
  __syncthreads();  // the ring becomes the sums
  if constexpr (kSplit > 1) cluster_arrive();

  auto put_sums = [&](int input, float(&of)[kBlocks][kOuts / 8][4], float(&squares)[kBlocks][2]) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + g, part = input * kTileWarps + warp;
        float* const to = sums + part * Sizes::kPart + row * Sizes::kSumRow + t * 2;
#pragma unroll
        for (int n = 0; n < kOuts / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) = {of[m][n][half * 2], of[m][n][half * 2 + 1]};
        }
        if constexpr (kNorm) {
          float& total = squares[m][half];
          total += __shfl_xor_sync(0xffffffffu, total, 1);
          total += __shfl_xor_sync(0xffffffffu, total, 2);
          if (t == 0) squares_of[input][warp][row] = total;
        }
      }
    }
  };
  if constexpr (kTwo) put_sums(0, first_acc, first_squares);
  put_sums(kTwo ? 1 : 0, acc, squares);
  __syncthreads();

  // The warps' sums of two neighbours of `lo` and of `hi`.
  auto join_warps = [&](int input, int row, int column, float2& lo, float2& hi) {
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) {
      const float* from =
          sums + (input * kTileWarps + w) * Sizes::kPart + row * Sizes::kSumRow + column;
      add_pair(lo, from), add_pair(hi, from + 8);
    }
  };
  // What the cluster's blocks send of this block's own rows: [blocks, own rows, kSumRow].
  float* const parts = sums + kTileWarps * Sizes::kPart;
  // Of a row, over the block's columns. In a cluster it stands behind the row's sums.
  auto sum_squares = [&](int input, int row) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) total += squares_of[input][w][row];
    return total;
  };
  if constexpr (kSplit > 1) {
    cluster_wait();  // all blocks are done with their rings
    auto place_of = [&](int row) {
      float* const own = parts + (rank * kOwnRows + row % kOwnRows) * Sizes::kSumRow;
      return cooperative_groups::this_cluster().map_shared_rank(own, row / kOwnRows);
    };
    if constexpr (kNorm) {
      for (int row = threadIdx.x; row < kRows; row += kThreads) place_of(row)[kOuts] = sum_squares(0, row);
    }
    for (int i = threadIdx.x; i < kRows * kPairs; i += kThreads) {
      const int row = i / kPairs, column = i % kPairs / 4 * kTile + i % 4 * 2;
      float2 lo = {}, hi = {};
      join_warps(0, row, column, lo, hi);
      float* const to = place_of(row) + column;
      *reinterpret_cast<float2*>(to) = lo, *reinterpret_cast<float2*>(to + 8) = hi;
    }
    cluster_arrive();
    cluster_wait();
  }
  auto sum_of = [&](int row, int column, float2& lo, float2& hi) {
    lo = {}, hi = {};
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int r = 0; r < kSplit; ++r) {
        const float* const from = parts + (r * kOwnRows + row % kOwnRows) * Sizes::kSumRow + column;
        add_pair(lo, from), add_pair(hi, from + 8);
      }
    } else {
      join_warps(0, row, column, lo, hi);
    }
    auto normalise = [&](int input, float2& lo, float2& hi) {
      float total = 0.0f;
      if constexpr (kSplit > 1) {
#pragma unroll
        for (int r = 0; r < kSplit; ++r) {
          total += parts[(r * kOwnRows + row % kOwnRows) * Sizes::kSumRow + kOuts];
        }
      } else {
        total = sum_squares(input, row);
      }
      const float scale = rsqrtf(total / static_cast<float>(kTwo ? p.k_split : p.k) + p.eps);
      lo.x *= scale, lo.y *= scale, hi.x *= scale, hi.y *= scale;
    };
    if constexpr (kNorm) normalise(0, lo, hi);
    if constexpr (kTwo) {
      float2 more_lo = {}, more_hi = {};
      join_warps(1, row, column, more_lo, more_hi);
      normalise(1, more_lo, more_hi);
      lo.x += more_lo.x, lo.y += more_lo.y, hi.x += more_hi.x, hi.y += more_hi.y;
    }
  };
  float2 los[kNormsHeads ? kItems : 1], his[kNormsHeads ? kItems : 1];
  const int head_blocks = kNormsHeads ? p.dim / kOuts : 1;
  if constexpr (kNormsHeads) {
    cluster_wait();  // all blocks have begun
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      int row, column, n_lo, n_hi;
      const bool is_there = item(j, row, column, n_lo, n_hi);
      float2 &lo = los[j], &hi = his[j];
      lo = {}, hi = {};
      if (is_there) {
        sum_of(row, column, lo, hi);
        lo = before_norm<T>(p, lo, endings[j].bias_lo), hi = before_norm<T>(p, hi, endings[j].bias_hi);
        endings[j].bias_lo = endings[j].bias_hi = 0;
      }
      float squares = lo.x * lo.x + lo.y * lo.y + hi.x * hi.x + hi.y * hi.y;
#pragma unroll
      for (int mask = 1; mask < kPairs; mask *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
      if (is_there && column == 0) {
        float* const own = &of_head[blockIdx.x % head_blocks][row];
        for (int r = 0; r < head_blocks; ++r) *cooperative_groups::this_cluster().map_shared_rank(own, r) = squares;
      }
      __syncwarp();
    }
    cluster_arrive();
    cluster_wait();
  }
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    int row, column, n_lo, n_hi;
    if (!item(j, row, column, n_lo, n_hi)) continue;
    float2 lo, hi;
    if constexpr (kNormsHeads) {
      lo = los[j], hi = his[j];
      if (is_turned(p, n_lo)) {
        float total = 0.0f;
        for (int r = 0; r < head_blocks; ++r) total += of_head[r][row];
        const float scale = rsqrtf(total / static_cast<float>(p.dim) + p.head_eps);
        lo = after_norm<T>(lo, endings[j].norm_lo, p.head_offset, scale);
        hi = after_norm<T>(hi, endings[j].norm_hi, p.head_offset, scale);
      }
    } else {
      sum_of(row, column, lo, hi);
    }
    finish_pair<T, E>(p, first_row + row, n_lo, n_hi, lo, hi, endings[j]);
  }
}

}  // namespace trtspec
