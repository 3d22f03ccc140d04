// The two products of a mixture of experts for few rows: of gate and up with what follows, and of down
// with the weighted sum over each row's experts.
//
// Each expert that a row chose is read once, for all rows that chose it: they are columns of the
// tensor cores' instruction, as in `skinny_linear.cuh`, and rows that did not are zeros. Weights come as
// in `stream_linear.cuh`. FP8 codes (e4m3) are widened to bf16, and their scales come with them. So are
// weights of 4 bits, of which `expert_codes.cuh` has the forms.
//
// A row's result does not depend on the rows beside it, if weights are finite: its experts are added up in
// the order of their numbers, and the order of each sum is fixed by its length.
#pragma once

#include "expert_codes.cuh"
#include "fp8_linear.cuh"
#include "gate.cuh"
#include "stream_linear.cuh"

namespace trtspec {

constexpr int kExpertRows = 8, kMaxChoices = 16, kMaxExperts = 1024;
constexpr int kMaxChosen = kExpertRows * kMaxChoices;

struct ExpertParams {
  const void* x;  // gate and up: [rows, k]; down: [rows, choices, k] in one piece
  int64_t x_stride;
  const int64_t* ids;    // [rows, choices] in one piece; others than 0 … experts - 1 add nothing, nor
                         // what a row chose before
  const float* weights;  // [rows, choices] in one piece
  int rows, choices, experts;
  const void* weight;  // [experts, n, k]; of 4 bits as `expert_codes.cuh` says
  const void* scales;  // [experts, n, groups] float of FP8 codes; MXFP4's; of records the weight
  const float* row_scales;  // [experts, n], of NVFP4
  int group, groups;   // of FP8: columns that share a scale; scales of a row
  int n, k;            // n by 16; k by 32, of codes by 64 (of MXFP4 the last step may be half a one)
  const void* bias;    // [experts, n], null: none
  void* out;  // gate and up: [rows, choices, n / 2], times the choice's weight; down: [rows, n]
  int64_t out_stride;    // down
  const void* residual;  // down: [rows, n] that is added, null: none
  int64_t residual_stride;
  Gate gate;
};

// The experts that were chosen, in the order of their numbers.
struct ChosenExperts {
  uint32_t is_chosen[kMaxExperts / 32];      // bits
  int ids[kMaxChosen];                       // of each choice
  int experts[kMaxChosen];
  uint8_t choices[kMaxChosen][kExpertRows];  // which choice of each row an expert is, from 1; 0: of none
  float weights[kMaxChosen][kExpertRows];
};

// Ends with a barrier.
__device__ inline void clear(const ExpertParams& p, ChosenExperts& chosen) {
  for (int i = threadIdx.x; i < (p.experts + 31) / 32; i += blockDim.x) chosen.is_chosen[i] = 0;
  for (int i = threadIdx.x; i < p.rows * p.choices * kExpertRows / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(chosen.choices)[i] = 0;
  }
  __syncthreads();
}

// Fills what is clear, and returns how many experts were chosen. Ids are read past L1, for they may be
// read before the previous kernel is done; weights (kWeights) may not.
template <bool kWeights>
__device__ inline int find_chosen(const ExpertParams& p, ChosenExperts& chosen) {
  const int pair = threadIdx.x;
  int64_t expert = -1;
  if (pair < p.rows * p.choices) expert = __ldcg(reinterpret_cast<const long long*>(p.ids + pair));
  bool is_here = expert >= 0 && expert < p.experts;
  float weight = 0.0f;
  if (kWeights && is_here) weight = p.weights[pair];
  if (is_here) atomicOr(chosen.is_chosen + expert / 32, 1u << expert % 32);
  if (pair < kMaxChosen) chosen.ids[pair] = is_here ? static_cast<int>(expert) : -1;
  __syncthreads();
  // A row that is not a number may choose one expert each time.
  for (int i = pair / p.choices * p.choices; is_here && i < pair; ++i) is_here = chosen.ids[i] != expert;
  int count = 0, rank = 0;
  for (int i = 0; i < (p.experts + 31) / 32; ++i) {
    const uint32_t bits = chosen.is_chosen[i];
    if (is_here && i == expert / 32) rank = count + __popc(bits & ((1u << expert % 32) - 1));
    count += __popc(bits);
  }
  if (is_here) {
    const int row = pair / p.choices;
    chosen.experts[rank] = static_cast<int>(expert);
    chosen.choices[rank][row] = static_cast<uint8_t>(pair % p.choices + 1);
    if (kWeights) chosen.weights[rank][row] = weight;
  }
  __syncthreads();
  return count;
}

// 4, 8 or 16 bytes from global to shared memory, asynchronously.
template <int kBytes>
__device__ inline void copy_scales(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source), "n"(kBytes)
               : "memory");
}

// The other forms of weights. Scales: what one row has of them in a step.
struct HalfWeights {
  static constexpr int kBits = 16;
  static constexpr bool kHasRowScales = false;
  using Scales = uint32_t;
};
struct Fp8Codes {
  static constexpr int kBits = 8;
  static constexpr bool kHasRowScales = false;
  using Scales = uint32_t;
};

template <typename Codes>
constexpr int kExpertStep = 512 / Codes::kBits;  // values of k that four lanes of a weight row read at once

// Bytes of a thread's places in the ring, of a stage: two pieces of weights, of codes two rows' scales, and
// for down the same columns of x.
template <typename Codes, bool kDown>
constexpr int kExpertStageBytes = 32 + (Codes::kBits < 16 ? 2 * sizeof(typename Codes::Scales) : 0) +
                                  (kDown ? 256 / Codes::kBits : 0);

// Bytes between rows of gate and up's x, which rest in shared memory.
template <typename Codes>
__host__ __device__ constexpr int expert_pitch(int k) {
  return 2 * k + (Codes::kBits == 8 ? 16 : kPad);
}

// Waits for the other warps of a team of kWarps.
template <int kWarps>
__device__ inline void meet(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kWarps * 32) : "memory");
}

// A team of kSplit warps divides k among them, and makes 16 outputs at a time. Gate and up: of one expert,
// then of the grid's next. Down: of all experts, one after the other; a block makes no others.
template <typename T, typename Codes, bool kDown, int kWarps, int kSplit, int kDepth>
__global__ void __launch_bounds__(kWarps * 32)
    expert_linear(const __grid_constant__ ExpertParams p) {
  static_assert(!kDown || kSplit == kWarps);
  constexpr int kBits = Codes::kBits, kStep = kExpertStep<Codes>, kThreads = kWarps * 32;
  constexpr int kPieces = 16 / kBits;  // of 16 bytes: x in the columns of a lane's weights
  constexpr int kParts = 2 + (kDown ? kPieces : 0);
  extern __shared__ __align__(128) char shared[];
  __shared__ ChosenExperts chosen;
  __shared__ float sums[2][kWarps][kTile][kExpertRows + 1];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = threadIdx.x / 32 / kSplit, warp = threadIdx.x / 32 % kSplit;
  const int steps = (p.k + kStep - 1) / kStep, tiles = p.n / kTile, pitch = expert_pitch<Codes>(p.k);
  const int begin = steps * warp / kSplit, end = steps * (warp + 1) / kSplit;
  uint4* const mine = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  auto place = [&](int stage, int part) { return mine + (stage * kParts + part) * kThreads; };
  using Scales = typename Codes::Scales;
  struct TwoScales {
    Scales lo, hi;
  };
  TwoScales* const my_scales =
      reinterpret_cast<TwoScales*>(shared + kDepth * kParts * kThreads * 16) + threadIdx.x;
  char* const resting = shared + kDepth * kThreads * kExpertStageBytes<Codes, kDown>;

  // Where this lane's piece of x is in a step's columns.
  auto column_of = [&](int piece) {
    if constexpr (kBits == 4) {
      return Codes::column(t, piece);
    } else {
      return (t * kPieces + piece) * 8;
    }
  };
  auto is_inside = [&](int step) {
    if constexpr (kBits == 4) return step < Codes::steps_with_codes(p.k, t);
    return true;
  };

  clear(p, chosen);
  if constexpr (!kDown) {
    wait_for_previous();
    let_next_start();
    const int pieces = p.k / 8;
    for (int i = threadIdx.x; i < p.rows * pieces; i += kThreads) {
      const int m = i / pieces, piece = i % pieces;
      copy_16(resting + m * pitch + piece * 16,
              static_cast<const T*>(p.x) + m * p.x_stride + piece * 8);
    }
    copies_commit();
  }
  // Down's ids are older than the kernel before it, which has made gate and up of them.
  const int count = find_chosen<!kDown>(p, chosen);
  // What is multiplied one after the other: (expert, tile) of gate and up; experts of down.
  const int first = kDown ? 0 : blockIdx.x + gridDim.x * team;
  const int stride = kDown ? 1 : gridDim.x * (kWarps / kSplit);
  const int turns = kDown ? count : count * tiles;
  auto rank_of = [&](int turn) { return kDown ? turn : turn / tiles; };
  auto rows_of = [&](int turn, int row, int& lo, int& hi) {
    const int tile = kDown ? blockIdx.x : turn % tiles;
    lo = tile * (kDown ? kTile : kTile / 2) + row;
    hi = lo + (kDown ? kTile / 2 : p.n / 2);
  };

  // What is fetched next. A warp without steps fetches nothing.
  int next = begin == end ? turns : first, next_step = begin;
  const char *w_lo = nullptr, *w_hi = nullptr;
  const char *s_lo = nullptr, *s_hi = nullptr;
  auto enter = [&] {
    if (next >= turns) return;
    int n_lo, n_hi;
    rows_of(next, g, n_lo, n_hi);
    const int64_t row = static_cast<int64_t>(chosen.experts[rank_of(next)]) * p.n;
    const char* const weight = static_cast<const char*>(p.weight);
    const char* const scales = static_cast<const char*>(p.scales);
    if constexpr (kBits == 4) {
      const int64_t lo = row + n_lo - g, hi = row + n_hi - g;  // groups' first rows
      const int64_t code_row = Codes::code_row(p.k), scale_row = Codes::scale_row(p.k);
      w_lo = weight + lo * code_row + Codes::code_place(g, t);
      s_lo = scales + lo * scale_row + Codes::scale_place(g);
      w_hi = weight + hi * code_row + Codes::code_place(g, t);
      s_hi = scales + hi * scale_row + Codes::scale_place(g);
    } else {
      const int64_t bytes = static_cast<int64_t>(p.k) * kBits / 8;
      w_lo = weight + (row + n_lo) * bytes + t * 16, w_hi = weight + (row + n_hi) * bytes + t * 16;
      s_lo = scales + (row + n_lo) * p.groups * 4, s_hi = scales + (row + n_hi) * p.groups * 4;
    }
  };
  auto fetch_weights = [&](int stage) {
    if (next >= turns) return;
    if constexpr (kBits == 4) {
      const bool inside = is_inside(next_step);
      copy_16_if(place(stage, 0), w_lo + next_step * Codes::kStepCodes, inside);
      copy_16_if(place(stage, 1), w_hi + next_step * Codes::kStepCodes, inside);
    } else {
      copy_16(place(stage, 0), w_lo + next_step * 64);
      copy_16(place(stage, 1), w_hi + next_step * 64);
    }
    if constexpr (kBits < 16) {
      int of;
      if constexpr (kBits == 4) {
        of = next_step * Codes::kStepScales;
      } else {
        of = next_step * kStep / p.group * 4;
      }
      copy_scales<sizeof(Scales)>(&my_scales[stage * kThreads].lo, s_lo + of);
      copy_scales<sizeof(Scales)>(&my_scales[stage * kThreads].hi, s_hi + of);
    }
    if (++next_step == end) {
      next_step = begin, next += stride;
      enter();
    }
  };
  int x_next = next, x_step = begin;
  auto fetch_x = [&](int stage) {
    if (!kDown || x_next >= turns) return;
    const int choice = chosen.choices[rank_of(x_next)][g];
    if (choice > 0 && is_inside(x_step)) {
      const T* const from = static_cast<const T*>(p.x) +
                            static_cast<int64_t>(g * p.choices + choice - 1) * p.k +
                            x_step * kStep;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) copy_16(place(stage, 2 + i), from + column_of(i));
    }
    if (++x_step == end) x_step = begin, x_next += stride;
  };
  enter();
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) {
    fetch_weights(i);
    if constexpr (!kDown) copies_commit();
  }
  float of_residual[2] = {}, of_bias[2] = {};
  if constexpr (kDown) {
    // Weights of choices are as old as ids.
    if (p.bias != nullptr && threadIdx.x < 8 * p.rows) {
      int n_lo, n_hi;
      rows_of(0, threadIdx.x % 8, n_lo, n_hi);
      const int m = threadIdx.x / 8;
#pragma unroll 4
      for (int rank = 0; rank < count; ++rank) {
        const int choice = chosen.choices[rank][m];
        if (choice == 0) continue;
        const T* const of = static_cast<const T*>(p.bias) + static_cast<int64_t>(chosen.experts[rank]) * p.n;
        const float weight = __ldcg(p.weights + m * p.choices + choice - 1);
        of_bias[0] = fmaf(weight, to_float(of[n_lo]), of_bias[0]);
        of_bias[1] = fmaf(weight, to_float(of[n_hi]), of_bias[1]);
      }
    }
    wait_for_previous();
    let_next_start();
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) {
      fetch_x(i);
      copies_commit();
    }
    if (p.residual != nullptr && threadIdx.x < 8 * p.rows) {
      int n_lo, n_hi;
      rows_of(0, threadIdx.x % 8, n_lo, n_hi);
      const T* const of = static_cast<const T*>(p.residual) + threadIdx.x / 8 * p.residual_stride;
      of_residual[0] = to_float(of[n_lo]), of_residual[1] = to_float(of[n_hi]);
    }
  } else {
    copies_wait<kDepth>();  // the rows are there
    __syncthreads();
  }

  int stage = 0, parity = 0;
  float acc[4] = {};
  auto multiply = [&](bool is_row, int step) {
    copies_wait<kDepth - 1>();
    const uint4 a = *place(stage, 0), b = *place(stage, 1);
    uint4 v[kPieces] = {};
    if (is_row && is_inside(step)) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const char* const at = resting + g * pitch + (step * kStep + column_of(i)) * 2;
        v[i] = kDown ? *place(stage, 2 + i) : *reinterpret_cast<const uint4*>(at);
      }
    }
    if constexpr (kBits == 8) {
      const TwoScales scales = my_scales[stage * kThreads];
      const float lo = __uint_as_float(scales.lo), hi = __uint_as_float(scales.hi);
      float part[4] = {};
      multiply_widened(part, a, b, v);
      acc[0] = fmaf(lo, part[0], acc[0]), acc[1] = fmaf(lo, part[1], acc[1]);
      acc[2] = fmaf(hi, part[2], acc[2]), acc[3] = fmaf(hi, part[3], acc[3]);
    } else if constexpr (kBits == 4) {
      const TwoScales scales = my_scales[stage * kThreads];
      Codes::multiply_tile(acc, a, b, scales.lo, scales.hi, v, t);
    } else {
      multiply_add(acc, a.x, b.x, a.y, b.y, v[0].x, v[0].y, T());
      multiply_add(acc, a.z, b.z, a.w, b.w, v[0].z, v[0].w, T());
    }
    // The pieces are in registers: their places are free.
    fetch_x(stage);
    fetch_weights(stage);
    copies_commit();
    if (++stage == kDepth) stage = 0;
  };
  auto finish = [&](int turn) {
    float(&of_team)[kWarps][kTile][kExpertRows + 1] = sums[parity];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = of_team[team * kSplit + warp][half * 8 + g] + t * 2;
      to[0] = acc[half * 2], to[1] = acc[half * 2 + 1];
      acc[half * 2] = acc[half * 2 + 1] = 0.0f;
    }
    meet<kSplit>(team);
    for (int i = warp * 32 + lane; i < 8 * p.rows; i += kSplit * 32) {
      const int row = i % 8, m = i / 8;
      float lo = 0.0f, hi = 0.0f;
#pragma unroll
      for (int w = 0; w < kSplit; ++w) {
        lo += of_team[team * kSplit + w][row][m], hi += of_team[team * kSplit + w][row + 8][m];
      }
      int n_lo, n_hi;
      rows_of(turn, row, n_lo, n_hi);
      T* const out = static_cast<T*>(p.out);
      if constexpr (kDown) {
        out[m * p.out_stride + n_lo] = from_float<T>(of_residual[0] + of_bias[0] + lo);
        out[m * p.out_stride + n_hi] = from_float<T>(of_residual[1] + of_bias[1] + hi);
      } else {
        const int rank = rank_of(turn), choice = chosen.choices[rank][m];
        if (choice == 0) continue;
        if (p.bias != nullptr) {
          const T* const of = static_cast<const T*>(p.bias) + static_cast<int64_t>(chosen.experts[rank]) * p.n;
          lo += to_float(of[n_lo]), hi += to_float(of[n_hi]);
        }
        const int64_t pair = m * p.choices + choice - 1;
        out[pair * (p.n / 2) + n_lo] = from_float<T>(chosen.weights[rank][m] * gated(p.gate, lo, hi));
      }
    }
    parity ^= 1;
  };
  float total[4] = {};  // of all experts, where these have scales of their own
  for (int turn = first; turn < turns; turn += stride) {
    const bool is_row = chosen.choices[rank_of(turn)][g] > 0;
    float scale_lo = 1.0f, scale_hi = 1.0f;
    if constexpr (Codes::kHasRowScales) {
      int n_lo, n_hi;
      rows_of(turn, g, n_lo, n_hi);
      const float* const of = p.row_scales + static_cast<int64_t>(chosen.experts[rank_of(turn)]) * p.n;
      scale_lo = __ldg(of + n_lo), scale_hi = __ldg(of + n_hi);
    }
#pragma unroll 1
    for (int step = begin; step < end; ++step) multiply(is_row, step);
    if constexpr (Codes::kHasRowScales) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[i] = fmaf(i < 2 ? scale_lo : scale_hi, acc[i], total[i]);
        if constexpr (kDown) total[i] = acc[i], acc[i] = 0.0f;
      }
    }
    if constexpr (!kDown) finish(turn);
  }
  if constexpr (kDown && Codes::kHasRowScales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] = total[i];
  }
  if constexpr (kDown) finish(0);
}

}  // namespace trtspec
