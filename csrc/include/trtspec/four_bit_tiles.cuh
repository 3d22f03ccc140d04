// Weights of 4 bits as a form of `weight_tiles.cuh`: the records of `four_bit_linear.cuh`.
//
// Integers of wide groups, times up to 64 rows, are multiplied exactly, as there. Of more rows, and with narrow
// groups, it would be more work than to apply the scale to each weight, which is rounded to bf16 then. NVFP4's
// numbers times their scale have no need of rounding.
#pragma once

#include "four_bit_linear.cuh"
#include "weight_tiles.cuh"

namespace trtspec {

static_assert(kFourBitStep == kWeightStep);

// Integers' scale as the sum of two numbers in bf16, and 16 + their zero, twice each.
struct FourBitScale {
  uint32_t high, low, sixteen_more;
};

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

template <FourBits F>
struct FourBitForm {
  static constexpr bool kFloats = F == FourBits::kFloats, kNarrow = F == FourBits::kNarrow;
  static constexpr int kRecord = kFourBitRecord<F>, kOutBytes = kRecord / 8;
  static constexpr int kMostExactRows = F == FourBits::kWide ? 64 : 0, kTilesOf128 = 2;
  static constexpr bool kHasZeros = true;
  using Codes = uint4;
  using Scale = FourBitGroup;
  using Multiplier = std::conditional_t<kFloats, uint32_t, FourBitScale>;  // of NVFP4 a power
  uint32_t sixteen = 0x41804180u;

  __device__ FourBitForm() { asm("" : "+r"(sixteen)); }  // a register: masking and adding is one instruction

  static __device__ void copy(char* to, const CUtensorMap& weight, Barrier& there, int step, int first_out) {
    copy_box(to, weight, there, 0, step, first_out / 8);
  }
  static __device__ int column(int u, int t) { return u * 32 + t * 8; }
  static __device__ uint4 mixed(const uint4 (&eights)[4], int i) {
    return make_uint4(word_of(eights[0], i), word_of(eights[1], i), word_of(eights[2], i), word_of(eights[3], i));
  }
  static __device__ uint4 codes(const char* weights, int eight, int lane) {
    return reinterpret_cast<const uint4*>(weights + eight * kRecord)[lane];
  }
  static __device__ const uint32_t* entries(const char* weights, int eight, int g) {
    return reinterpret_cast<const uint32_t*>(weights + eight * kRecord + kFourBitCodes + g * kFourBitScales<F>);
  }
  static __device__ FourBitGroup scale(const WeightTileParams&, const char* weights, int eight, int g, int, int) {
    return group_of(entries(weights, eight, g)[0]);
  }
  static __device__ void set_multiplier(Multiplier& to, const char* weights, int eight, int lane, int u) {
    const uint32_t* const of = entries(weights, eight, lane / 4);
    if constexpr (kFloats) {
      to = power_of_scale(of[u / 2], u % 2 * 2 + lane % 4 / 2);
    } else if (kNarrow || u == 0) {
      to = scale_of(of[kNarrow ? u : 0]);
    }
  }
  __device__ void widen(const uint4& codes, int u, uint32_t (&pairs)[4]) const {
    widen_integers(word_of(codes, u), sixteen, pairs);
  }
  __device__ void widen(const uint4& codes, int u, const Multiplier& by, uint32_t (&pairs)[4]) const {
    if constexpr (kFloats) {
      widen_floats(word_of(codes, u), by, pairs);
    } else {
      widen_scaled(word_of(codes, u), sixteen, by, pairs);
    }
  }
  static __device__ float last_scale(const WeightTileParams& p, int out) { return kFloats ? p.scales[out] : 1.0f; }
};

}  // namespace trtspec
