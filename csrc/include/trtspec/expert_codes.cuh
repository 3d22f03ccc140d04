// The forms of experts' weights of 4 bits: where a lane finds its part of a step of 128 columns, and what it
// does with it. Of a group of eight rows it has 16 bytes of codes: 32 columns of a row. Two groups are the upper
// and the lower half of a tile of the tensor cores. `expert_tiles.cuh` makes two tiles at once,
// `expert_linear.cuh` one. A form's kEights says how many eights of rows of x there may be beside two tiles.
#pragma once

#include "four_bit_linear.cuh"

namespace trtspec {

constexpr int kCodeGroups = 4;  // of two tiles

__device__ inline uint4 load_shared(int address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Keeps a value in a register where the compiler would rather compute it anew, again and again.
__device__ inline int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a lane multiplies in a step.
template <typename Scales>
struct CodePiece {
  uint4 codes[kCodeGroups];
  Scales scales[kCodeGroups];  // of its row
};

// MXFP4: [experts, n / 8, k / 64, 8, 32] codes as `fp4.cuh` has them, and
// [experts, n / 8, ceil(k / 128), 8, 4] e8m0 codes. (Behind k there are zeros of x, which any codes do for.)
struct PowerCodes {
  static constexpr int kBits = 4, kEights = 3, kStepCodes = kGroupCodes, kStepScales = kGroupScales;
  static constexpr bool kHasRowScales = false;
  using Scales = uint32_t;
  using Piece = CodePiece<Scales>;
  const int low, high;  // which of four powers are this lane's

  __device__ explicit PowerCodes(int t)
      : low(kept(fp4_selector(t / 2 * 2))), high(kept(fp4_selector(t / 2 * 2 + 1))) {}

  // Bytes of a row, and where a lane's part of the first step is.
  static __device__ int64_t code_row(int k) { return k / 2; }
  static __device__ int64_t scale_row(int k) { return fp4_steps(k) * 4; }
  static __device__ int code_place(int g, int t) { return fp4_place(g, t); }
  static __device__ int scale_place(int g) { return g * 4; }
  static __device__ int steps_with_codes(int k, int t) { return (k - t / 2 * 64 + kFp4Step - 64) / kFp4Step; }
  // The first of the eight columns of x that are `piece`th of lane t.
  static __device__ int column(int t, int piece) { return fp4_column(t, piece); }

  struct Multipliers {
    uint32_t powers[kCodeGroups][2];
  };
  __device__ Multipliers multipliers(const Piece& piece) const {
    Multipliers of;
#pragma unroll
    for (int i = 0; i < kCodeGroups; ++i) {
      of.powers[i][0] = fp4_power(piece.scales[i], low), of.powers[i][1] = fp4_power(piece.scales[i], high);
    }
    return of;
  }
  // 0, which is known when the scales are there.
  static __device__ int zero_of(const Piece&, const Multipliers& of) { return of.powers[0][0] >> 31; }

  // A step of an item times kOf eights of rows of x, of which this lane's first piece is at x_at.
  template <int kOf>
  __device__ void multiply(float (&acc)[2][kEights][4], const Piece& piece, const Multipliers& of, int x_at,
                           int eight_rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 low_x[kOf], high_x[kOf];
#pragma unroll
      for (int c = 0; c < kOf; ++c) {
        low_x[c] = load_shared(x_at + c * eight_rows + half * 64);
        high_x[c] = load_shared(x_at + c * eight_rows + half * 64 + 128);
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint32_t lo = word_of(piece.codes[2 * m], half * 2 + w);
          const uint32_t hi = word_of(piece.codes[2 * m + 1], half * 2 + w);
          const uint2 a = widen_fp4<false>(lo, of.powers[2 * m][0]);
          const uint2 b = widen_fp4<false>(hi, of.powers[2 * m + 1][0]);
#pragma unroll
          for (int c = 0; c < kOf; ++c) {
            multiply_add(acc[m][c], a.x, b.x, a.y, b.y, word_of(low_x[c], 2 * w), word_of(low_x[c], 2 * w + 1),
                         bf16());
          }
          const uint2 d = widen_fp4<true>(lo, of.powers[2 * m][1]);
          const uint2 e = widen_fp4<true>(hi, of.powers[2 * m + 1][1]);
#pragma unroll
          for (int c = 0; c < kOf; ++c) {
            multiply_add(acc[m][c], d.x, e.x, d.y, e.y, word_of(high_x[c], 2 * w), word_of(high_x[c], 2 * w + 1),
                         bf16());
          }
        }
      }
    }
  }

  // A step of one tile of two groups times eight rows of x, of which lane t's four pieces are `v`.
  static __device__ void multiply_tile(float (&acc)[4], const uint4& lo, const uint4& hi, Scales lo_scales,
                                       Scales hi_scales, const uint4 (&v)[4], int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int selector = fp4_selector(t / 2 * 2 + half);
      const uint32_t lo_power = fp4_power(lo_scales, selector), hi_power = fp4_power(hi_scales, selector);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t first = word_of(lo, i), second = word_of(hi, i);
        const uint2 a = half ? widen_fp4<true>(first, lo_power) : widen_fp4<false>(first, lo_power);
        const uint2 b = half ? widen_fp4<true>(second, hi_power) : widen_fp4<false>(second, hi_power);
        const uint4& x = v[2 * half + i / 2];
        multiply_add(acc, a.x, b.x, a.y, b.y, word_of(x, i % 2 * 2), word_of(x, i % 2 * 2 + 1), bf16());
      }
    }
  }
};

// Integers and NVFP4: the records of `four_bit_linear.cuh`, [experts, n / 8, k / 128, bytes]. k by 128.
template <FourBits F>
struct RecordCodes {
  static constexpr bool kFloats = F == FourBits::kFloats, kNarrow = F == FourBits::kNarrow;
  static constexpr int kBits = 4, kEights = kNarrow ? 2 : 3;  // as registers allow
  static constexpr int kStepCodes = kFourBitRecord<F>, kStepScales = kFourBitRecord<F>;
  static constexpr bool kHasRowScales = kFloats;
  static constexpr uint32_t kOnes = 0x3f803f80u;
  using Scales = std::conditional_t<kFloats, uint2, std::conditional_t<kNarrow, uint4, uint32_t>>;
  using Piece = CodePiece<Scales>;
  const int first, second;  // of NVFP4: which of four scales are this lane's

  __device__ explicit RecordCodes(int t)
      : first(kept(fp4_selector(t / 2))), second(kept(fp4_selector(t / 2 + 2))) {}

  // As of `PowerCodes`. Scales lie behind the codes, so what rows have of both is as far apart.
  static __device__ int64_t code_row(int k) {
    return static_cast<int64_t>(k) / kFourBitStep * kFourBitRecord<F> / 8;
  }
  static __device__ int64_t scale_row(int k) { return code_row(k); }
  static __device__ int code_place(int g, int t) { return g * 64 + t * 16; }
  static __device__ int scale_place(int g) { return kFourBitCodes + g * kFourBitScales<F>; }
  static __device__ int steps_with_codes(int k, int) { return k / kFourBitStep; }
  static __device__ int column(int t, int piece) { return piece * 32 + t * 8; }

  static __device__ uint32_t word_of_scales(const Scales& of, int i) {
    if constexpr (kFloats) {
      return i < 2 ? of.x : of.y;
    } else if constexpr (kNarrow) {
      return word_of(of, i);
    } else {
      return of;
    }
  }

  struct Multipliers {};
  static __device__ Multipliers multipliers(const Piece&) { return {}; }
  // A zero of integers is 16 at most, and two bits of a float's scale are never both there.
  static __device__ int zero_of(const Piece& piece, const Multipliers&) {
    const uint32_t word = word_of_scales(piece.scales[0], 0);
    return kFloats ? word >> 7 & word >> 6 & 1 : word >> 7 & 1;
  }

  template <int kOf>
  __device__ void multiply(float (&acc)[2][kEights][4], const Piece& piece, const Multipliers&, int x_at,
                           int eight_rows) const {
    multiply_tiles<2, kOf>(acc, piece.codes, piece.scales, first, second,
                           [&](int c, int i) { return load_shared(x_at + c * eight_rows + i * 64); });
  }

  static __device__ void multiply_tile(float (&acc)[4], const uint4& lo, const uint4& hi,
                                       const Scales& lo_scales, const Scales& hi_scales,
                                       const uint4 (&v)[4], int t) {
    const uint4 codes[2] = {lo, hi};
    const Scales scales[2] = {lo_scales, hi_scales};
    auto& sums = reinterpret_cast<float(&)[1][1][4]>(acc);
    multiply_tiles<1, 1>(sums, codes, scales, fp4_selector(t / 2), fp4_selector(t / 2 + 2),
                         [&](int, int i) { return v[i]; });
  }

 private:
  // A step of kTiles tiles times kOf eights of rows of x; x_of(c, i) is the lane's ith piece of eight c. Of
  // NVFP4 `first` and `second` select the lane's scales.
  template <int kTiles, int kOf, int kEightsOf, typename XOf>
  static __device__ void multiply_tiles(float (&acc)[kTiles][kEightsOf][4], const uint4 (&of_codes)[2 * kTiles],
                                        const Scales (&of_scales)[2 * kTiles], int first, int second, XOf x_of) {
    uint32_t sixteen = 0x41804180u;
    asm("" : "+r"(sixteen));  // a register, so that masking and adding is one instruction
    float part[kTiles][kOf][4] = {}, ones[kOf][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v[kOf];
#pragma unroll
      for (int c = 0; c < kOf; ++c) {
        v[c] = x_of(c, i);
        if constexpr (!kFloats) {
          multiply_add(ones[c], kOnes, kOnes, kOnes, kOnes, v[c].x, v[c].y, bf16());
          multiply_add(ones[c], kOnes, kOnes, kOnes, kOnes, v[c].z, v[c].w, bf16());
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int of = 2 * m + half;
          const uint32_t word = word_of(of_codes[of], i);
          if constexpr (kFloats) {
            const uint32_t codes = word_of_scales(of_scales[of], i);
            widen_floats(word, power_of_selected(codes, i % 2 ? second : first), pairs[half]);
          } else {
            widen_integers(word, sixteen, pairs[half]);
          }
        }
#pragma unroll
        for (int c = 0; c < kOf; ++c) {
          float(&sum)[4] = kFloats ? acc[m][c] : part[m][c];
          multiply_add(sum, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], v[c].x, v[c].y, bf16());
          multiply_add(sum, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], v[c].z, v[c].w, bf16());
        }
        if constexpr (!kFloats) {
          if (!kNarrow && i < 3) continue;
          const auto lo = group_of(word_of_scales(of_scales[2 * m], i));
          const auto hi = group_of(word_of_scales(of_scales[2 * m + 1], i));
#pragma unroll
          for (int c = 0; c < kOf; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const FourBitGroup& of = j < 2 ? lo : hi;
              acc[m][c][j] = fmaf(of.scale, fmaf(of.less, ones[c][j], part[m][c][j]), acc[m][c][j]);
              part[m][c][j] = 0.0f;
            }
          }
        }
      }
      if constexpr (kNarrow) {
#pragma unroll
        for (int c = 0; c < kOf; ++c) ones[c][0] = ones[c][1] = ones[c][2] = ones[c][3] = 0.0f;
      }
    }
  }
};

}  // namespace trtspec
