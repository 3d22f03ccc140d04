// Products of bf16 rows with narrower weights, by Hopper's products of warpgroups: each of two makes 64 kTiles
// outputs of up to kRows rows of x. Weights become bf16 in registers and are the left operand. One thread copies
// steps of weights and of x to shared memory.
//
// A kernel before arranges x: in the order in which weights have their columns, as products read it. K may be
// divided among the blocks of a cluster, which then add their sums up in a fixed order, each for some rows.
//
// A form says what weights are (`four_bit_tiles.cuh`, `fp8_tiles.cuh`):
//   kOutBytes, copy              bytes of an output in a step, and how a step comes to shared memory
//   column, mixed                where lane t's uth eight columns of x are; the ith pairs of these, of all lanes
//   Codes, codes                 what a lane has of an output in a step
//   kMostExactRows               to so many rows weights are multiplied without their scale
//   Scale, scale, kHasZeros      then a step's sums become scale * (sum + less * sum of x), less with zeros alone
//   kTilesOf128                  so many tiles of outputs have room in registers with 128 rows: 1, or 2 as with fewer
//   Multiplier, set_multiplier   of more rows: what 32 columns of a weight are multiplied by
//   widen                        eight columns in bf16, without a multiplier or with one
//   last_scale                   of an output's whole sum
#pragma once

#include <cooperative_groups.h>

#include "hopper.cuh"
#include "pieces.cuh"

namespace trtspec {

struct WeightTileParams {
  const void* x;  // [rows, k] bf16
  int64_t x_stride;
  char* arranged;       // by `arrange_rows`, kArrangedStep bytes for each row and step
  const float* scales;  // as the form has them
  int group;            // steps that share a scale
  bf16* out;            // [rows, n]
  int64_t out_stride;
  int rows, n, k;
  int steps;  // of a part
  bool adds;  // to what is there
};

constexpr int kWeightStep = 128;  // columns
constexpr int kArrangedRow = kWeightStep * 2, kArrangedStep = kArrangedRow + 4;
constexpr int kWeightTeams = 2, kWeightThreads = kWeightTeams * 128;  // of the warpgroups that multiply
constexpr int kWeightCopyRegisters = 24, kWeightRegisters = 240;

template <typename Form, int kRows, int kTiles>
struct WeightTile {
  static constexpr int blocks(int bytes) {
    return (bytes + kTileBlockBytes - 1) / kTileBlockBytes * kTileBlockBytes;
  }
  static constexpr int kOuts = kWeightTeams * 64 * kTiles, kWeights = kOuts * Form::kOutBytes;
  static constexpr int kX = kRows * kArrangedStep, kWeightsAt = blocks(kX), kStage = blocks(kWeightsAt + kWeights);
  static constexpr int kStages = 224 * 1024 / kStage < 8 ? 224 * 1024 / kStage : 8;
  static constexpr int kShared = kStages * kStage + kTileBlockBytes;  // it begins at a multiple of a block
  static constexpr int kSumPitch = kOuts + 4;                         // floats
  static_assert(kRows * kSumPitch * 4 <= kStages * kStage);
};

// x for products, [tiles of kRows rows, steps, bytes]: halves of 64 columns, [2, kRows, 128 bytes] as hopper.cuh
// has tiles, then the sum of each row's columns where it is read. Rows that are not there are zeros. A thread has
// 32 columns of a row, a block 128 of them.
template <typename Form, int kRows>
__global__ void arrange_rows(const __grid_constant__ WeightTileParams p) {
  wait_for_previous();
  let_next_start();
  const int item = blockIdx.x * blockDim.x + threadIdx.x, u = item % 4;
  const int steps = p.k / kWeightStep, step = item / 4 % steps, row = item / 4 / steps, r = row % kRows;
  uint4 eights[4] = {};
  if (row < p.rows) {
    const bf16* const from = static_cast<const bf16*>(p.x) + row * p.x_stride + step * kWeightStep;
#pragma unroll
    for (int t = 0; t < 4; ++t) eights[t] = *reinterpret_cast<const uint4*>(from + Form::column(u, t));
  }
  char* const of_step = p.arranged + (static_cast<int64_t>(row / kRows) * steps + step) * kRows * kArrangedStep;
  char* const to = of_step + (u / 2 * kRows + r) * kTileRowBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(to + ((u % 2 * 4 + i) ^ r % 8) * 16) = Form::mixed(eights, i);
  }
  if constexpr (!Form::kHasZeros || kRows > Form::kMostExactRows) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t pair = word_of(eights[t], i);
      sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (u == 0) reinterpret_cast<float*>(of_step + kRows * kArrangedRow)[r] = sum;
}

// A block's part of the product: steps of K of a tile of outputs and one of rows.
struct WeightPart {
  int begin, count, first_out, first_row;
};

// Copies the part's steps, one stage after the other. Weights may come before x is there.
template <typename Form, typename Tile, int kStages>
__device__ inline void copy_steps(const WeightTileParams& p, const WeightPart& part, int tile_of_rows,
                                  const CUtensorMap& weight, char* shared, Barrier (&there)[kStages],
                                  Barrier (&read)[kStages]) {
  const int64_t first = static_cast<int64_t>(tile_of_rows) * (p.k / kWeightStep) + part.begin;
  auto copy_weights = [&](int step, int stage) {
    there[stage].arrive_and_expect(Tile::kWeights + Tile::kX);
    Form::copy(shared + stage * Tile::kStage + Tile::kWeightsAt, weight, there[stage], part.begin + step,
               part.first_out);
  };
  for (int i = 0; i < min(kStages, part.count); ++i) copy_weights(i, i);
  wait_for_previous();
  let_next_start();
  for (int step = 0, stage = 0, parity = 1; step < part.count; ++step) {
    read[stage].wait(parity);
    if (step >= kStages) copy_weights(step, stage);
    const char* const x = p.arranged + (first + step) * Tile::kX;
    copy_piece(shared + stage * Tile::kStage, x, there[stage], Tile::kX);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// Begins the products of the uth 32 columns. widen(i, pairs) makes eight of them, of the ith eight outputs.
template <int kRows, int kTiles, typename Widen>
__device__ inline void multiply_columns(float (&sums)[kTiles][kRows / 2], const char* x, int u, Widen widen) {
  uint32_t a[kTiles][2][4];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    uint32_t pairs[4];
    widen(i, pairs);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[i / 2][j / 2][j % 2 * 2 + i % 2] = pairs[j];
  }
  const uint64_t operand = tile_operand(x + u / 2 * kRows * kTileRowBytes);
  products_begin();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      product_with_columns(sums[tile], a[tile][half], moved(operand, (u % 2 * 2 + half) * 32));
    }
  }
  products_commit();
}

// acc += scale * (sums + less * sum of x), of a step. sums_of_x: of each row.
template <typename Form, int kRows, int kTiles>
__device__ inline void add_scaled(float (&acc)[kTiles][kRows / 2], const float (&sums)[kTiles][kRows / 2],
                                  const typename Form::Scale (&scales)[2 * kTiles], const float2* sums_of_x) {
#pragma unroll
  for (int c = 0; c < kRows / 8; ++c) {
    float2 ones = {};
    if constexpr (Form::kHasZeros) ones = sums_of_x[c * 4];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& to = acc[i / 2][c * 4 + i % 2 * 2 + j];
        float sum = sums[i / 2][c * 4 + i % 2 * 2 + j];
        if constexpr (Form::kHasZeros) sum = fmaf(scales[i].less, j ? ones.y : ones.x, sum);
        to = fmaf(scales[i].scale, sum, to);
      }
    }
  }
}

// Adds up what the cluster's blocks have at `sums`, [kRows, kSumPitch] each, and writes some of the rows.
template <typename Tile, int kRows, typename Cluster>
__device__ inline void write_rows(const WeightTileParams& p, const WeightPart& part, const Cluster& cluster,
                                  float* sums) {
  constexpr int kPieces = Tile::kOuts / 4, kAtOnce = kWeightThreads / kPieces;
  const int parts = cluster.num_blocks(), column = threadIdx.x % kPieces * 4, out = part.first_out + column;
  if (out >= p.n) return;
  for (int r = cluster.block_rank() * kAtOnce + threadIdx.x / kPieces; r < kRows; r += parts * kAtOnce) {
    const int row = part.first_row + r;
    if (row >= p.rows) return;
    float* const own = sums + r * Tile::kSumPitch + column;
    float4 total = {};
    for (int i = 0; i < parts; ++i) {
      const float4 of = *reinterpret_cast<const float4*>(parts > 1 ? cluster.map_shared_rank(own, i) : own);
      total.x += of.x, total.y += of.y, total.z += of.z, total.w += of.w;
    }
    uint2* const to = reinterpret_cast<uint2*>(p.out + row * p.out_stride + out);
    if (p.adds) {
      const uint2 is = *to;
      total.x += __uint_as_float(is.x << 16), total.y += __uint_as_float(is.x & 0xffff0000u);
      total.z += __uint_as_float(is.y << 16), total.w += __uint_as_float(is.y & 0xffff0000u);
    }
    *to = make_uint2(pair_of(total.x, total.y), pair_of(total.z, total.w));
  }
}

template <typename Form, int kRows, int kTiles>
__global__ void __launch_bounds__(kWeightThreads + 128, 1)
    weight_tiles(const __grid_constant__ WeightTileParams p, const __grid_constant__ CUtensorMap weight) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = WeightTile<Form, kRows, kTiles>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ char anywhere[];
  __shared__ Barrier there[kStages], read[kStages];
  char* const shared =
      anywhere + (kTileBlockBytes - shared_address(anywhere) % kTileBlockBytes) % kTileBlockBytes;
  const auto cluster = cooperative_groups::this_cluster();
  const int parts = cluster.num_blocks(), begin = cluster.block_rank() * p.steps;
  const int tile_of_outs = blockIdx.x / parts, tile_of_rows = blockIdx.y;
  const WeightPart part = {begin, min(p.steps, p.k / kWeightStep - begin), tile_of_outs * Tile::kOuts,
                           tile_of_rows * kRows};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) there[i].init(1), read[i].init(kWeightThreads / 32);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kWeightThreads) {
    keep_registers<kWeightCopyRegisters>();
    if (threadIdx.x == kWeightThreads) {
      copy_steps<Form, Tile>(p, part, tile_of_rows, weight, shared, there, read);
    }
    return;
  }
  take_registers<kWeightRegisters>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Of this warp's 16 outputs of each tile, the eights.
  auto eight = [&](int i) { return ((warp / 4 * kTiles + i / 2) * 4 + warp % 4) * 2 + i % 2; };
  const Form form;
  float acc[kTiles][kRows / 2] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) pin(acc[tile]);  // zeros before the first products begin
  int before = -1;
#pragma unroll 1
  for (int step = 0, stage = 0, parity = 0; step < part.count; ++step) {
    there[stage].wait(parity);
    const char* const x = shared + stage * Tile::kStage;
    const char* const weights = x + Tile::kWeightsAt;
    typename Form::Codes codes[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) codes[i] = Form::codes(weights, eight(i), lane);
    if constexpr (kRows <= Form::kMostExactRows) {
      typename Form::Scale scales[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        scales[i] = Form::scale(p, weights, eight(i), g, part.first_out, part.begin + step);
      }
      float sums[kTiles][kRows / 2] = {};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) pin(sums[tile]);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        multiply_columns<kRows, kTiles>(
            sums, x, u, [&](int i, uint32_t (&pairs)[4]) { form.widen(codes[i], u, pairs); });
        if (u < 3) products_wait<1>();  // registers of weights are free again
      }
      products_wait<0>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) pin(sums[tile]);
      add_scaled<Form, kRows, kTiles>(acc, sums, scales,
                                      reinterpret_cast<const float2*>(x + kRows * kArrangedRow) + t);
      __syncwarp();
      if (lane == 0) read[stage].arrive();
    } else {
      typename Form::Multiplier multipliers[2 * kTiles];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        multiply_columns<kRows, kTiles>(acc, x, u, [&](int i, uint32_t (&pairs)[4]) {
          Form::set_multiplier(multipliers[i], weights, eight(i), lane, u);
          form.widen(codes[i], u, multipliers[i], pairs);
        });
        products_wait<1>();
        if (u == 0 && before >= 0 && lane == 0) read[before].arrive();  // its last products have ended
      }
      before = stage;
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  products_wait<0>();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) pin(acc[tile]);
  sync_named(1, kWeightThreads);  // nobody reads the stages any more
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const int out = eight(i) * 8 + g;
    const float scale = Form::last_scale(p, min(part.first_out + out, p.n - 1));
#pragma unroll
    for (int c = 0; c < kRows / 8; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[(c * 8 + t * 2 + j) * Tile::kSumPitch + out] = acc[i / 2][c * 4 + i % 2 * 2 + j] * scale;
      }
    }
  }
  if (parts > 1) {
    cluster.sync();  // of the threads that have not returned
  } else {
    sync_named(1, kWeightThreads);
  }
  write_rows<Tile, kRows>(p, part, cluster, sums);
  if (parts > 1) cluster.sync();  // others may still be reading this block's sums
#endif
}

}  // namespace trtspec
