// FP8 weights (e4m3) as a form of `weight_tiles.cuh`, with scales of groups of columns, a multiple of a step's: the
// products are exact, and a step's sums get the scale.
#pragma once

#include "weight_tiles.cuh"

namespace trtspec {

struct Fp8Form {
  static constexpr int kOutBytes = kWeightStep, kMostExactRows = 128, kTilesOf128 = 1;
  static constexpr bool kHasZeros = false;
  struct Codes {
    uint4 of[2];
  };
  struct Scale {
    float scale;
  };

  static __device__ void copy(char* to, const CUtensorMap& weight, Barrier& there, int step, int first_out) {
    copy_box(to, weight, there, step * kWeightStep, 0, first_out);
  }
  // Lane t has columns 32 t … 32 t + 31. Of four the odd ones come first.
  static __device__ int column(int u, int t) { return t * 32 + u * 8; }
  static __device__ uint4 mixed(const uint4 (&eights)[4], int i) {
    auto pair = [&](int t) {
      const uint32_t first = word_of(eights[t], i / 2 * 2), second = word_of(eights[t], i / 2 * 2 + 1);
      return __byte_perm(first, second, i % 2 ? 0x5410 : 0x7632);
    };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
  static __device__ Codes codes(const char* weights, int eight, int lane) {
    const int g = lane / 4, piece = lane % 4 * 2;
    const uint4* const row = reinterpret_cast<const uint4*>(weights + (eight * 8 + g) * kTileRowBytes);
    return {row[piece ^ g], row[(piece + 1) ^ g]};
  }
  static __device__ Scale scale(const WeightTileParams& p, const char*, int eight, int g, int first_out, int step) {
    const int64_t out = min(first_out + eight * 8 + g, p.n - 1);
    const int groups = (p.k / kWeightStep + p.group - 1) / p.group;
    return {__ldg(p.scales + out * groups + step / p.group)};
  }
  // A bf16 with e4m3's exponent and mantissa is 2^120 times too small.
  static __device__ uint32_t widen_pair(uint32_t signs, uint32_t numbers) {
    uint32_t pair = (signs & 0x80008000u) | (numbers & 0x07f007f0u);
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x7b807b80u));
    return pair;
  }
  __device__ void widen(const Codes& codes, int u, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(codes.of[u / 2], u % 2 * 2 + i);
      pairs[2 * i] = widen_pair(word, word >> 4);
      pairs[2 * i + 1] = widen_pair(word << 8, word << 4);
    }
  }
  static __device__ float last_scale(const WeightTileParams&, int) { return 1.0f; }
};

}  // namespace trtspec
