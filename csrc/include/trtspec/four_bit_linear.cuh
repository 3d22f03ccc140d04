// The product of `stream_linear.cuh` for weights of 4 bits: integers with a zero and a scale for each group of
// columns (AWQ, GPTQ), or NVFP4's floats (e2m1) with a scale for each 16.
//
// x stays bf16. Numbers become bf16 in registers, exactly: integers with 16 added, and floats of e2m1 times
// their scale of e4m3, which have six digits together. What the 16 and an integer's zero add to a sum is taken
// off again: a product with ones says how much x there was. Integers' scales are applied to their groups' sums.
//
// Eight weight rows are a group, and 128 columns a step. A group's record of a step has its rows' numbers, 64
// bytes each, and then their scales. Of these lane t of four reads 16 bytes of a row: word i has columns
// 32 i + 8 t … 32 i + 8 t + 7, in four pairs. Of integers the first number of pair j is at bits 3 + 4 j, the
// second one 16 bits further on; the word is a ring. Those of e2m1 are pairs 0 … 3 of fp4.cuh.
// `ops/layer/four_bits.py` writes them so.
//
// A row's result does not depend on how many rows there are: the order of its sum is fixed by K.
#pragma once

#include "fp4.cuh"
#include "stream_linear.cuh"

namespace trtspec {

constexpr int kFourBitStep = 128, kFourBitWarps = 16;
constexpr int kFourBitCodes = 8 * kFourBitStep / 2;  // bytes of a record's numbers
constexpr int kMaxFourBitRows = 16;

// The forms of scales. Of integers 4 bytes for each 128 or 32 columns: a float's upper 24 bits, and below them
// the zero. Of NVFP4 a byte for each 16: five bits of an exponent, three of a mantissa.
enum class FourBits { kWide, kNarrow, kFloats };

template <FourBits F>
constexpr int kFourBitScales = F == FourBits::kWide ? 4 : F == FourBits::kNarrow ? 16 : 8;  // bytes of a row

template <FourBits F>
constexpr int kFourBitRecord = kFourBitCodes + 8 * kFourBitScales<F>;

// Eight columns of a weight row as pairs in bf16; of integers with 16 added.
__device__ inline void widen_integers(uint32_t word, uint32_t sixteen, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t turned = j ? __funnelshift_r(word, word, 4 * j) : word;
    asm("lop3.b32 %0, %1, 0x00780078, %2, 0xea;" : "=r"(pairs[j]) : "r"(turned), "r"(sixteen));
  }
}

// power: twice what `widen_fp4` takes.
__device__ inline void widen_floats(uint32_t word, uint32_t power, uint32_t (&pairs)[4]) {
  const uint2 low = widen_fp4<false>(word, power), high = widen_fp4<true>(word, power);
  pairs[0] = low.x, pairs[1] = low.y, pairs[2] = high.x, pairs[3] = high.y;
}

// 2^118 times a scale, twice: a pair of `widen_fp4` has 2^-8 of its value then.
__device__ inline uint32_t power_of_selected(uint32_t codes, int selector) {
  return __byte_perm(codes, 0, selector) * 16u + 0x75807580u;
}
__device__ inline uint32_t power_of_scale(uint32_t codes, int byte) {
  return power_of_selected(codes, fp4_selector(byte));
}

struct FourBitGroup {  // of integers
  float scale, less;   // `less`: what is taken off each x
};
__device__ inline FourBitGroup group_of(uint32_t entry) {
  return {__uint_as_float(entry & 0xffffff00u), 8388592.0f - __uint_as_float((entry & 0xffu) | 0x4b000000u)};
}

// What a block has in shared memory.
template <FourBits F, int kTiles, int kColumns>
struct FourBitShared {
  static constexpr int kRows = 8 * kColumns, kCodes = 2 * kTiles;
  static constexpr int kScales = kCodes * 8 * kFourBitScales<F>;  // of a warp and a stage
  static constexpr int kStage = kFourBitWarps * (kCodes * 512 + kScales);
  static constexpr int kSums = kColumns == 1 ? 2 : 1;
  static constexpr int kDepth = kTiles * kColumns == 1 ? 6 : 3, kRing = kDepth * kStage;
};

// kTiles: tiles of 16 outputs that are made at once. kColumns: tiles of 8 rows of x.
template <FourBits F, Epilogue E, bool kNorm, int kTiles, int kColumns>
__global__ void __launch_bounds__(kFourBitWarps * 32)
    four_bit_linear(const __grid_constant__ LinearParams p) {
  using Shared = FourBitShared<F, kTiles, kColumns>;
  constexpr int kWarps = kFourBitWarps, kRows = Shared::kRows, kCodes = Shared::kCodes;
  constexpr int kDepth = Shared::kDepth, kSums = Shared::kSums;
  constexpr bool kFloats = F == FourBits::kFloats;
  constexpr int kScaleBytes = kFourBitScales<F>, kRecord = kFourBitRecord<F>;
  extern __shared__ __align__(128) char shared[];
  __shared__ float sums[kSums][kWarps][kTiles * kTile][kRows + 1];
  __shared__ float squares_of[1][kWarps][kRows], scales[kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = p.n / kTile, turns = (tiles + kTiles - 1) / kTiles, steps = p.k / kFourBitStep;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  char* const x_shared = shared + Shared::kRing;
  // A stage has for each thread its pieces of numbers, then for each warp its scales.
  char* const mine = shared + threadIdx.x * 16;
  char* const scales_of_warp = shared + kCodes * kWarps * 512 + warp * Shared::kScales;
  auto place = [&](int at, int part) { return reinterpret_cast<uint4*>(mine + at + part * kWarps * 512); };

  // What is fetched next: records of each tile's two groups.
  int next_turn = blockIdx.x, next_step = begin;
  const char* from[kCodes];
  auto enter_turn = [&] {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      int n[2];
      tile_rows<E>(p, min(next_turn * kTiles + i, tiles - 1), 0, n[0], n[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        from[2 * i + half] = static_cast<const char*>(p.weight) + lane * 16 +
                             (static_cast<int64_t>(n[half] / 8) * steps + begin) * kRecord;
      }
    }
  };
  auto fetch_weights = [&](int at) {
    if (next_turn >= turns) return;
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      copy_16(place(at, i), from[i]);
      if (lane < kScaleBytes / 2) {
        copy_16(scales_of_warp + at + i * 8 * kScaleBytes + lane * 16, from[i] + kFourBitCodes);
      }
      from[i] += kRecord;
    }
    if (++next_step == end) {
      next_step = begin, next_turn += gridDim.x;
      enter_turn();
    }
  };
  // x of the next step, where it does not rest: asked for a step before. Sums of rows that are not there are
  // nobody's, so any row will do for these.
  uint4 ahead[kNorm ? 1 : kColumns][4];
  auto fetch_x = [&](int step) {
    if constexpr (!kNorm) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bf16* const row = static_cast<const bf16*>(p.x0) + min(c * 8 + g, p.rows - 1) * p.x0_stride;
        const bf16* const x = row + step * kFourBitStep + t * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) ahead[c][i] = *reinterpret_cast<const uint4*>(x + i * 32);
      }
    }
  };
  enter_turn();
  if (begin == end) next_turn = turns;
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    fetch_weights(i * Shared::kStage);
    copies_commit();
  }
  if constexpr (kNorm) ask_for_norms<bf16, kWarps>(p);
  wait_for_previous();
  let_next_start();
  if (begin < end) fetch_x(begin);
  if constexpr (kNorm) {
    make_resident<bf16, kRows, kWarps, 1>(p, x_shared, squares_of, warp, lane);
    __syncthreads();
    if (threadIdx.x < kRows) {  // read after a turn's barrier
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) total += squares_of[0][w][threadIdx.x];
      scales[threadIdx.x] = rsqrtf(total / static_cast<float>(p.k) + p.eps);
    }
  }

  // Of each turn's outputs a thread finishes two of one row at most.
  static_assert(8 * kTiles * kRows <= kWarps * 32);
  const int own_row = threadIdx.x % 8, own_tile = threadIdx.x / 8 % kTiles, own_m = threadIdx.x / (8 * kTiles);
  const bool has_row = own_m < p.rows;
  const int x_bytes = p.k * 2 + kPad;  // of a row in shared memory
  uint32_t sixteen = 0x41804180u;
  asm volatile("" : "+r"(sixteen));  // a register, so that masking and adding is one instruction
  constexpr uint32_t kOnes = 0x3f803f80u;
  int at = 0, parity = 0;
  for (int turn = blockIdx.x; turn < turns; turn += gridDim.x, parity ^= kSums - 1) {
    int n_lo, n_hi;
    const int tile = turn * kTiles + own_tile;
    const bool finishes = has_row && tile < tiles;
    tile_rows<E>(p, min(tile, tiles - 1), own_row, n_lo, n_hi);
    Ending<bf16> ending;
    float lo_scale = 1.0f, hi_scale = 1.0f;
    if (finishes) {
      ending = ending_of<bf16, E>(p, own_m, n_lo, n_hi);
      if constexpr (kFloats) lo_scale = p.scales[n_lo], hi_scale = p.scales[n_hi];
    }
    float acc[kTiles][kColumns][4] = {};
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      copies_wait<kDepth - 1>();
      __syncwarp();  // scales are other lanes' copies
      const char* const of_scales = scales_of_warp + at + g * kScaleBytes;
      auto scales_at = [&](int i) { return of_scales + i * 8 * kScaleBytes; };
      float part[kTiles][kColumns][4] = {}, ones[kColumns][4] = {};
      uint4 now[kNorm ? 1 : kColumns][4];
      if constexpr (!kNorm) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i) now[c][i] = ahead[c][i];
        }
        fetch_x(step + 1 < end ? step + 1 : begin);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 v[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if constexpr (kNorm) {
            const int m = min(c * 8 + g, p.rows - 1);
            v[c] = *reinterpret_cast<const uint4*>(x_shared + m * x_bytes + step * 256 + i * 64 + t * 16);
          } else {
            v[c] = now[c][i];
          }
          if constexpr (!kFloats) {
            multiply_add(ones[c], kOnes, kOnes, kOnes, kOnes, v[c].x, v[c].y, bf16());
            multiply_add(ones[c], kOnes, kOnes, kOnes, kOnes, v[c].z, v[c].w, bf16());
          }
        }
#pragma unroll
        for (int tile_of = 0; tile_of < kTiles; ++tile_of) {
          uint32_t pairs[2][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int of = 2 * tile_of + half;
            const uint32_t word = reinterpret_cast<const uint32_t*>(place(at, of))[i];
            if constexpr (kFloats) {
              const uint32_t codes = reinterpret_cast<const uint32_t*>(scales_at(of))[i / 2];
              widen_floats(word, power_of_scale(codes, i % 2 * 2 + t / 2), pairs[half]);
            } else {
              widen_integers(word, sixteen, pairs[half]);
            }
          }
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            float(&sum)[4] = kFloats ? acc[tile_of][c] : part[tile_of][c];
            multiply_add(sum, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], v[c].x, v[c].y, bf16());
            multiply_add(sum, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], v[c].z, v[c].w, bf16());
          }
          if constexpr (!kFloats) {
            if (F == FourBits::kNarrow || i == 3) {
              const int entry = F == FourBits::kNarrow ? i : 0;
              const auto lo = group_of(reinterpret_cast<const uint32_t*>(scales_at(2 * tile_of))[entry]);
              const auto hi = group_of(reinterpret_cast<const uint32_t*>(scales_at(2 * tile_of + 1))[entry]);
#pragma unroll
              for (int c = 0; c < kColumns; ++c) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  const FourBitGroup& of = j < 2 ? lo : hi;
                  const float sum = fmaf(of.less, ones[c][j], part[tile_of][c][j]);
                  acc[tile_of][c][j] = fmaf(of.scale, sum, acc[tile_of][c][j]);
                  part[tile_of][c][j] = 0.0f;
                }
              }
            }
          }
        }
        if constexpr (F == FourBits::kNarrow) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) ones[c][0] = ones[c][1] = ones[c][2] = ones[c][3] = 0.0f;
        }
      }
      __syncwarp();  // the scales' places are free
      fetch_weights(at);
      copies_commit();
      at = at + Shared::kStage == Shared::kRing ? 0 : at + Shared::kStage;
    }
    if (kSums == 1 && turn != blockIdx.x) __syncthreads();  // the sums before have been read
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
      lo += sums[parity][w][own_tile * kTile + own_row][own_m];
      hi += sums[parity][w][own_tile * kTile + own_row + 8][own_m];
    }
    if constexpr (kNorm) lo *= scales[own_m], hi *= scales[own_m];
    finish<bf16, E>(p, own_m, n_lo, n_hi, lo * lo_scale, hi * hi_scale, ending);
  }
}

// The weights in bf16, [n, k] at p.out, each rounded once: of a warp one record.
template <FourBits F>
__global__ void widen_records(const __grid_constant__ LinearParams p) {
  const int steps = p.k / kFourBitStep, record = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  wait_for_previous();
  let_next_start();
  if (record >= p.n / 8 * steps) return;
  const int row = record / steps * 8 + g;
  const char* const from = static_cast<const char*>(p.weight) + static_cast<int64_t>(record) * kFourBitRecord<F>;
  const uint4 words = *reinterpret_cast<const uint4*>(from + lane * 16);
  const auto entries = reinterpret_cast<const uint32_t*>(from + kFourBitCodes + g * kFourBitScales<F>);
  bf16* const to = static_cast<bf16*>(p.out) + static_cast<int64_t>(row) * p.k + record % steps * kFourBitStep;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    float scale, less = 0.0f;
    if constexpr (F == FourBits::kFloats) {
      widen_floats(word_of(words, i), power_of_scale(entries[i / 2], i % 2 * 2 + t / 2), pairs);
      scale = p.scales[row];
    } else {
      widen_integers(word_of(words, i), 0x41804180u, pairs);
      const FourBitGroup group = group_of(entries[F == FourBits::kNarrow ? i : 0]);
      scale = group.scale, less = group.less;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 both = unpack(pairs[j], bf16());
      pairs[j] = pack((both.x + less) * scale, (both.y + less) * scale, bf16());
    }
    *reinterpret_cast<uint4*>(to + i * 32 + t * 8) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

}  // namespace trtspec
