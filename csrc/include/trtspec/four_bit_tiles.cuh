// The product of `four_bit_linear.cuh` for more rows, by Hopper's products of warpgroups: each of two makes
// 64 kTiles outputs of up to kRows rows of x. Weights become bf16 in registers and are the left operand. One
// thread copies steps of records and of x to shared memory.
//
// Integers of wide groups, times up to 64 rows, are multiplied exactly, and their scale is applied to the
// sum of a step, as in `four_bit_linear.cuh`. Of more rows, and with narrow groups, that would be more work than
// to apply it to each weight, which is rounded to bf16 then.
//
// A kernel before arranges x: in the order in which words have their columns, as products read it. K may be
// divided among the blocks of a cluster, which then add their sums up in a fixed order, each for some rows.
#pragma once

#include <cooperative_groups.h>

#include "four_bit_linear.cuh"
#include "hopper.cuh"

namespace trtspec {

struct FourBitTileParams {
  const void* x;  // [rows, k] bf16
  int64_t x_stride;
  char* arranged;       // by `arrange_rows`, kArrangedStep bytes for each row and step
  const float* scales;  // of rows, of NVFP4
  bf16* out;            // [rows, n]
  int64_t out_stride;
  int rows, n, k;
  int steps;  // of a part
  bool adds;  // to what is there
};

constexpr int kArrangedRow = kFourBitStep * 2, kArrangedStep = kArrangedRow + 4;
constexpr int kFourBitTeams = 2, kFourBitThreads = kFourBitTeams * 128;  // of the warpgroups that multiply
constexpr int kFourBitCopyRegisters = 24, kFourBitRegisters = 240;

template <FourBits F, int kRows, int kTiles>
struct FourBitTile {
  static constexpr int kOuts = kFourBitTeams * 64 * kTiles, kRecords = kOuts / 8 * kFourBitRecord<F>;
  static constexpr int kX = kRows * kArrangedStep;
  static constexpr int kStage = (kX + kRecords + kTileBlockBytes - 1) / kTileBlockBytes * kTileBlockBytes;
  static constexpr int kStages = 224 * 1024 / kStage < 8 ? 224 * 1024 / kStage : 8;
  static constexpr int kShared = kStages * kStage + kTileBlockBytes;  // it begins at a multiple of a block
  static constexpr int kSumPitch = kOuts + 4;                         // floats
  static_assert(kX % 128 == 0 && kRows * kSumPitch * 4 <= kStages * kStage);
  static constexpr bool kIsExact = F == FourBits::kWide && kRows <= 64;
};

// x for products, [tiles of kRows rows, steps, bytes]: halves of 64 columns, [2, kRows, 128 bytes] as hopper.cuh
// has tiles, then the sum of each row's columns. Of 32 columns pair j of eight t becomes pair t of eight j. Rows
// that are not there are zeros. A thread has 32 columns of a row, a block 128 of them.
template <int kRows>
__global__ void arrange_rows(const __grid_constant__ FourBitTileParams p) {
  wait_for_previous();
  let_next_start();
  const int blocks = p.k / 32, item = blockIdx.x * blockDim.x + threadIdx.x;
  const int block = item % blocks, row = item / blocks;
  uint4 eights[4] = {};
  if (row < p.rows) {
    const bf16* const from = static_cast<const bf16*>(p.x) + row * p.x_stride + block * 32;
#pragma unroll
    for (int t = 0; t < 4; ++t) eights[t] = reinterpret_cast<const uint4*>(from)[t];
  }
  const int r = row % kRows;
  const int64_t step = static_cast<int64_t>(row / kRows) * (p.k / kFourBitStep) + block / 4;
  char* const of_step = p.arranged + step * kRows * kArrangedStep;
  char* const to = of_step + (block / 2 % 2 * kRows + r) * kTileRowBytes;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t pair = word_of(eights[t], j);
      sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
    }
    const int piece = (block % 2 * 4 + j) ^ r % 8;
    *reinterpret_cast<uint4*>(to + piece * 16) = make_uint4(word_of(eights[0], j), word_of(eights[1], j),
                                                            word_of(eights[2], j), word_of(eights[3], j));
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (block % 4 == 0) reinterpret_cast<float*>(of_step + kRows * kArrangedRow)[r] = sum;
}

// Integers' scale as the sum of two numbers in bf16, and 16 + their zero, twice each.
struct FourBitScale {
  uint32_t high, low, sixteen_more;
};

__device__ inline uint32_t pair_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline FourBitScale scale_of(uint32_t entry) {
  const float scale = __uint_as_float(entry & 0xffffff00u);
  const uint32_t high = pair_of(scale, scale);
  const float rest = scale - __uint_as_float(high << 16);
  return {high, pair_of(rest, rest), ((entry & 0xffu) * 8u + 0x4180u) * 0x10001u};  // an eighth is the last place
}

// Eight columns of a weight row times their scale.
__device__ inline void widen_scaled(uint32_t word, uint32_t sixteen, const FourBitScale& of,
                                    uint32_t (&pairs)[4]) {
  widen_integers(word, sixteen, pairs);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t number, low;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(number) : "r"(pairs[j]), "r"(of.sixteen_more));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(low) : "r"(number), "r"(of.low));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pairs[j]) : "r"(number), "r"(of.high), "r"(low));
  }
}

// A block's part of the product: steps of K of a tile of outputs and one of rows.
struct FourBitPart {
  int begin, count, first_out, first_row;
};

// Copies the part's steps, one stage after the other. Weights may come before x is there.
template <typename Tile, int kStages>
__device__ inline void copy_steps(const FourBitTileParams& p, const FourBitPart& part, int row_tile,
                                  const CUtensorMap& weight, char* shared, Barrier (&there)[kStages],
                                  Barrier (&read)[kStages]) {
  const int64_t first = static_cast<int64_t>(row_tile) * (p.k / kFourBitStep) + part.begin;
  auto copy_records = [&](int step, int stage) {
    there[stage].arrive_and_expect(Tile::kRecords + Tile::kX);
    copy_box(shared + stage * Tile::kStage + Tile::kX, weight, there[stage], 0, part.begin + step,
             part.first_out / 8);
  };
  for (int i = 0; i < min(kStages, part.count); ++i) copy_records(i, i);
  wait_for_previous();
  let_next_start();
  for (int step = 0, stage = 0, parity = 1; step < part.count; ++step) {
    read[stage].wait(parity);
    if (step >= kStages) copy_records(step, stage);
    const char* const x = p.arranged + (first + step) * Tile::kX;
    copy_piece(shared + stage * Tile::kStage, x, there[stage], Tile::kX);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// Adds up what the cluster's blocks have at `sums`, [kRows, kSumPitch] each, and writes some of the rows.
template <typename Tile, int kRows, typename Cluster>
__device__ inline void write_rows(const FourBitTileParams& p, const FourBitPart& part, const Cluster& cluster,
                                  float* sums) {
  constexpr int kPieces = Tile::kOuts / 4, kAtOnce = kFourBitThreads / kPieces;
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

// What a warp reads of a stage: x, and the records of its two groups of each tile.
template <FourBits F, int kRows, int kTiles>
struct FourBitStage {
  const char *x, *records;

  __device__ const char* record(int i) const { return records + (i / 2 * 8 + i % 2) * kFourBitRecord<F>; }
  __device__ const uint32_t* scales(int i, int g) const {
    return reinterpret_cast<const uint32_t*>(record(i) + kFourBitCodes + g * kFourBitScales<F>);
  }
  // Of the step, for the rows that a thread has sums of.
  __device__ float2 sum_of_x(int eight, int t) const {
    return reinterpret_cast<const float2*>(x + kRows * kArrangedRow)[eight * 4 + t];
  }
};

// Begins the products of 32 columns. widen(i, pairs) makes eight columns of group i's row.
template <int kRows, int kTiles, typename Widen>
__device__ inline void multiply_word(float (&sums)[kTiles][kRows / 2], const char* x, int word, Widen widen) {
  uint32_t a[kTiles][2][4];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    uint32_t pairs[4];
    widen(i, pairs);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[i / 2][j / 2][j % 2 * 2 + i % 2] = pairs[j];
  }
  const uint64_t operand = tile_operand(x + word / 2 * kRows * kTileRowBytes);
  products_begin();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      product_with_columns(sums[tile], a[tile][half], moved(operand, (word % 2 * 2 + half) * 32));
    }
  }
  products_commit();
}

template <FourBits F, int kRows, int kTiles>
__global__ void __launch_bounds__(kFourBitThreads + 128, 1)
    four_bit_tiles(const __grid_constant__ FourBitTileParams p, const __grid_constant__ CUtensorMap weight) {
  using Tile = FourBitTile<F, kRows, kTiles>;
  constexpr int kStages = Tile::kStages;
  constexpr bool kFloats = F == FourBits::kFloats, kNarrow = F == FourBits::kNarrow;
  extern __shared__ char anywhere[];
  __shared__ Barrier there[kStages], read[kStages];
  char* const shared =
      anywhere + (kTileBlockBytes - shared_address(anywhere) % kTileBlockBytes) % kTileBlockBytes;
  const auto cluster = cooperative_groups::this_cluster();
  const int parts = cluster.num_blocks(), begin = cluster.block_rank() * p.steps;
  const int tile_of_outs = blockIdx.x / parts, tile_of_rows = blockIdx.y;
  const FourBitPart part = {begin, min(p.steps, p.k / kFourBitStep - begin), tile_of_outs * Tile::kOuts,
                            tile_of_rows * kRows};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) there[i].init(1), read[i].init(kFourBitThreads / 32);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kFourBitThreads) {
    keep_registers<kFourBitCopyRegisters>();
    if (threadIdx.x == kFourBitThreads) {
      copy_steps<Tile>(p, part, tile_of_rows, weight, shared, there, read);
    }
    return;
  }
  take_registers<kFourBitRegisters>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // This warp's two groups of a tile. Those of its next tile are eight further on.
  const int group = (warp / 4 * kTiles * 4 + warp % 4) * 2;
  uint32_t sixteen = 0x41804180u;
  asm("" : "+r"(sixteen));  // a register, so that masking and adding is one instruction
  float acc[kTiles][kRows / 2] = {};
  int before = -1;
#pragma unroll 1
  for (int step = 0, stage = 0, parity = 0; step < part.count; ++step) {
    there[stage].wait(parity);
    const char* const x = shared + stage * Tile::kStage;
    const FourBitStage<F, kRows, kTiles> of = {x, x + Tile::kX + group * kFourBitRecord<F>};
    uint4 codes[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) codes[i] = reinterpret_cast<const uint4*>(of.record(i))[lane];
    if constexpr (Tile::kIsExact) {
      float sums[kTiles][kRows / 2] = {};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        multiply_word<kRows, kTiles>(sums, x, word, [&](int i, uint32_t (&pairs)[4]) {
          widen_integers(word_of(codes[i], word), sixteen, pairs);
        });
        if (word < 3) products_wait<1>();  // registers of numbers are free again
      }
      FourBitGroup groups[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) groups[i] = group_of(of.scales(i, g)[0]);
      float2 sums_of_x[kRows / 8];
#pragma unroll
      for (int c = 0; c < kRows / 8; ++c) sums_of_x[c] = of.sum_of_x(c, t);
      products_wait<0>();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) pin(sums[tile]);
      __syncwarp();
      if (lane == 0) read[stage].arrive();
#pragma unroll
      for (int c = 0; c < kRows / 8; ++c) {
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int at = c * 4 + i % 2 * 2 + j;
            const float ones = j ? sums_of_x[c].y : sums_of_x[c].x;
            acc[i / 2][at] =
                fmaf(groups[i].scale, fmaf(groups[i].less, ones, sums[i / 2][at]), acc[i / 2][at]);
          }
        }
      }
    } else {
      FourBitScale scales[2 * kTiles];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        multiply_word<kRows, kTiles>(acc, x, word, [&](int i, uint32_t (&pairs)[4]) {
          if constexpr (kFloats) {
            const uint32_t power = power_of_scale(of.scales(i, g)[word / 2], word % 2 * 2 + t / 2);
            widen_floats(word_of(codes[i], word), power, pairs);
          } else {
            if (kNarrow || word == 0) scales[i] = scale_of(of.scales(i, g)[kNarrow ? word : 0]);
            widen_scaled(word_of(codes[i], word), sixteen, scales[i], pairs);
          }
        });
        products_wait<1>();
        if (word == 0 && before >= 0 && lane == 0) read[before].arrive();  // its last products have ended
      }
      before = stage;
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  products_wait<0>();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) pin(acc[tile]);
  sync_named(1, kFourBitThreads);  // nobody reads the stages any more
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const int out = (group + i / 2 * 8 + i % 2) * 8 + g;
    const float scale = kFloats ? p.scales[min(part.first_out + out, p.n - 1)] : 1.0f;
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
    sync_named(1, kFourBitThreads);
  }
  write_rows<Tile, kRows>(p, part, cluster, sums);
  if (parts > 1) cluster.sync();  // others may still be reading this block's sums
}

}  // namespace trtspec
