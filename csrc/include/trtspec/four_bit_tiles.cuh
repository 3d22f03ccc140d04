// The product of `four_bit_linear.cuh` for more rows: a block makes 256 outputs of up to 64 rows, a warp 32 of
// them, so that numbers are made bf16 once for all of these rows. Steps of x are copied to shared memory for
// the block, records for the thread that reads them. Zeros are taken off the numbers, which is exact too: a
// product with ones would be one more for each tile of rows.
//
// K may be divided among blocks: sums of parts are added up afterwards, in a fixed order.
#pragma once

#include "four_bit_linear.cuh"

namespace trtspec {

constexpr int kTileRowsWarps = 8, kTileRowsTiles = 2;
constexpr int kTileRowsOuts = kTileRowsWarps * kTileRowsTiles * kTile;  // of a block
constexpr int kTileRowsStages = 3, kTileRowsPitch = 2 * kFourBitStep + kPad;  // bytes of a row of x

struct FourBitTileParams {
  const void* x;  // [rows, k] bf16
  int64_t x_stride;
  const void* weight;   // records
  const float* scales;  // of rows, of NVFP4
  float* sums;          // [parts, rows, n]
  int rows, n, k;
  int steps;  // of a part
};

template <FourBits F, int kColumns>
constexpr int kTileRowsStage = 8 * kColumns * kTileRowsPitch + kTileRowsOuts / 8 * kFourBitRecord<F>;

// Eight columns of a weight row as pairs in bf16, less the zero. `zero`: 16 + it, twice.
__device__ inline void widen_less_zero(uint32_t word, uint32_t sixteen, uint32_t zero, uint32_t (&pairs)[4]) {
  widen_integers(word, sixteen, pairs);
#pragma unroll
  for (int j = 0; j < 4; ++j) asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(pairs[j]) : "r"(zero));
}

// 16 + a zero, twice in bf16, whose last place is an eighth there.
__device__ inline uint32_t zero_of(uint32_t entry) { return ((entry & 0xffu) * 8u + 0x4180u) * 0x10001u; }

template <FourBits F, int kColumns>
__global__ void __launch_bounds__(kTileRowsWarps * 32)
    four_bit_tiles(const __grid_constant__ FourBitTileParams p) {
  constexpr int kWarps = kTileRowsWarps, kTiles = kTileRowsTiles, kRows = 8 * kColumns;
  constexpr int kStages = kTileRowsStages, kStage = kTileRowsStage<F, kColumns>;
  constexpr bool kFloats = F == FourBits::kFloats;
  constexpr int kScaleBytes = kFourBitScales<F>, kRecord = kFourBitRecord<F>, kGroups = 2 * kTiles;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int all_steps = p.k / kFourBitStep, first_row = blockIdx.y * kRows;
  const int begin = blockIdx.z * p.steps, end = min(begin + p.steps, all_steps);
  const int first_group = (blockIdx.x * kWarps + warp) * kGroups, groups = p.n / 8;
  char* const records_of_warp = shared + kRows * kTileRowsPitch + warp * kGroups * kRecord;

  const char* from[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t group = min(first_group + i, groups - 1);
    from[i] = static_cast<const char*>(p.weight) + (group * all_steps + begin) * kRecord + lane * 16;
  }
  auto fetch_records = [&](int step, int at) {
    if (step >= end) return;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      char* const to = records_of_warp + at + i * kRecord + lane * 16;
      copy_16(to, from[i]);
      if (lane < kScaleBytes / 2) copy_16(to + kFourBitCodes, from[i] + kFourBitCodes);
      from[i] += kRecord;
    }
  };
  // Pieces of x that this thread copies. Sums of rows that are not there are nobody's.
  constexpr int kPieces = (kRows * 16 + kWarps * 32 - 1) / (kWarps * 32);
  int offsets[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int piece = threadIdx.x + j * kWarps * 32;
    const int row = min(first_row + min(piece / 16, kRows - 1), p.rows - 1);
    offsets[j] = row * static_cast<int>(p.x_stride) + piece % 16 * 8;
  }
  char* const to_x = shared + threadIdx.x / 16 * kTileRowsPitch + threadIdx.x % 16 * 16;
  auto fetch_x = [&](int step, int at) {
    if (step >= end) return;
    const bf16* const x = static_cast<const bf16*>(p.x) + step * kFourBitStep;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (kRows * 16 % (kWarps * 32) != 0 && threadIdx.x + j * kWarps * 32 >= kRows * 16) break;
      copy_16(to_x + at + j * kWarps * 2 * kTileRowsPitch, x + offsets[j]);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch_records(begin + i, i * kStage);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch_x(begin + i, i * kStage);
    copies_commit();
  }
  uint32_t sixteen = 0x41804180u;
  float acc[kTiles][kColumns][4] = {};
  int at = 0, next = (kStages - 1) * kStage;
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    copies_wait<kStages - 2>();
    __syncthreads();  // all threads' copies are there, and the stage before has been read
    fetch_records(step + kStages - 1, next);
    fetch_x(step + kStages - 1, next);
    copies_commit();
    next = next + kStage == kStages * kStage ? 0 : next + kStage;
    const char* const x = shared + at + g * kTileRowsPitch + t * 16;
    const char* const records = records_of_warp + at;
    float part[kFloats ? 1 : kTiles][kFloats ? 1 : kColumns][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[kGroups][4];
      float scale[kGroups];
#pragma unroll
      for (int of = 0; of < kGroups; ++of) {
        const char* const record = records + of * kRecord;
        const uint32_t word = reinterpret_cast<const uint32_t*>(record + lane * 16)[i];
        const auto entries = reinterpret_cast<const uint32_t*>(record + kFourBitCodes + g * kScaleBytes);
        if constexpr (kFloats) {
          widen_floats(word, power_of_scale(entries[i / 2], i % 2 * 2 + t / 2), pairs[of]);
        } else {
          const uint32_t entry = entries[F == FourBits::kNarrow ? i : 0];
          widen_less_zero(word, sixteen, zero_of(entry), pairs[of]);
          scale[of] = __uint_as_float(entry & 0xffffff00u);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + c * 8 * kTileRowsPitch + i * 64);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t(&lo)[4] = pairs[2 * tile], (&hi)[4] = pairs[2 * tile + 1];
          if constexpr (kFloats) {
            multiply_add(acc[tile][c], lo[0], hi[0], lo[1], hi[1], v.x, v.y, bf16());
            multiply_add(acc[tile][c], lo[2], hi[2], lo[3], hi[3], v.z, v.w, bf16());
          } else {
            float(&sum)[4] = part[tile][c];
            multiply_add(sum, lo[0], hi[0], lo[1], hi[1], v.x, v.y, bf16());
            multiply_add(sum, lo[2], hi[2], lo[3], hi[3], v.z, v.w, bf16());
            if (F == FourBits::kNarrow || i == 3) {
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                acc[tile][c][j] = fmaf(scale[2 * tile + j / 2], sum[j], acc[tile][c][j]);
                sum[j] = 0.0f;
              }
            }
          }
        }
      }
    }
    at = at + kStage == kStages * kStage ? 0 : at + kStage;
  }
  float* const sums = p.sums + static_cast<int64_t>(blockIdx.z) * p.rows * p.n;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = (first_group + 2 * tile + half) * 8 + g;
      if (n >= p.n) continue;
      const float scale = kFloats ? p.scales[n] : 1.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int m = first_row + c * 8 + t * 2 + j;
          if (m < p.rows) sums[static_cast<int64_t>(m) * p.n + n] = acc[tile][c][half * 2 + j] * scale;
        }
      }
    }
  }
}

}  // namespace trtspec
