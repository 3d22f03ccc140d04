// What the bindings call: one function per operation and element type, raw pointers only.
#pragma once

#include <cuda_runtime.h>

#include "all_reduce.cuh"
#include "attend_group.cuh"
#include "choose.cuh"
#include "delta_rule.cuh"
#include "expert_linear.cuh"
#include "expert_tiles.cuh"
#include "four_bit_tiles.cuh"
#include "fp8_tiles.cuh"
#include "markov_walk.cuh"
#include "narrow_linear.cuh"
#include "prompt_attention.cuh"
#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kMaxLinearRows = 256;

// Rows 1 … kMaxLinearRows; from 33 on with small weights and a multiple of 16 outputs, of one input or
// of two with norms. k and k_split multiples of 32. A norm with bf16 alone.
template <typename T>
cudaError_t launch_linear(Epilogue epilogue, const LinearParams& params, cudaStream_t stream);

// The largest output of each row. Rows 1 … kNarrowRows; k at most kMaxNarrow, a multiple of 32; one input,
// no bias. A norm with bf16 alone.
template <typename T>
cudaError_t launch_largest(const LinearParams& params, const LargestParams& largest, cudaStream_t stream);

// FP8 weights, bf16 otherwise. Rows 1 … kMaxFp8Rows, as many as fit into shared memory; k, and with
// kGroups the group, a multiple of 64; one input.
constexpr int kMaxFp8Rows = 8;
template <bool kGroups>
cudaError_t launch_fp8_linear(Epilogue epilogue, const LinearParams& params, cudaStream_t stream);

// Weights of 4 bits, bf16 otherwise. Rows 1 … kMaxFourBitRows, normed ones as many as fit into shared memory;
// n a multiple of 16, k of 128; one input. What is gated has a norm.
template <FourBits F>
cudaError_t launch_four_bits(Epilogue epilogue, const LinearParams& params, cudaStream_t stream);
// Any number of rows of the same, in tiles of 32, 64 or 128. params.arranged has room for as many whole tiles;
// params.steps is set there. FP8 weights have scales of groups, [n, ceil(k / 128 / params.group)].
template <FourBits F>
cudaError_t launch_four_bit_tiles(const WeightTileParams& params, const void* weight, int tile_rows,
                                  cudaStream_t stream);
cudaError_t launch_fp8_tiles(const WeightTileParams& params, const void* weight, int tile_rows, cudaStream_t stream);
// Those weights in bf16, [n, k] at `out`.
template <FourBits F>
cudaError_t launch_widen(const LinearParams& params, cudaStream_t stream);

// Rows 1 … kExpertRows, up to kMaxChoices experts of kMaxExperts each. Weights of 16 bits (HalfWeights), or with
// bf16 of 8 (Fp8Codes) or 4 (PowerCodes, RecordCodes).
template <typename T, typename Codes>
cudaError_t launch_experts(const ExpertParams& up, const ExpertParams& down, cudaStream_t stream);

// MXFP4 weights, or ones of 4 bits in records; any number of rows. They set tile_rows themselves.
cudaError_t launch_expert_tiles(bool is_gated, const TiledExpertParams& params, cudaStream_t stream);
template <FourBits F>
cudaError_t launch_record_tiles(bool is_gated, const TiledExpertParams& params, cudaStream_t stream);

// num_rows: of the logits.
template <typename T>
cudaError_t launch_accept(const AcceptParams& params, int num_rows, cudaStream_t stream);
template <typename T>
cudaError_t launch_choose(const DraftParams& params, int num_rows, cudaStream_t stream);

// Ranks 64, 128 and 256; batch at most kWalkRequests. `blocks` must all run at once, at most
// kMaxWalkBlocks; p.chunk of their entries each.
template <typename T>
cudaError_t launch_walk(const WalkParams& params, int rank, int blocks, cudaStream_t stream);

// Heads of 128 keys and 128 values, 4 taps, rows of places and own ones together at most kDeltaRows.
template <typename T>
cudaError_t launch_delta_generations(const DeltaParams& params, cudaStream_t stream);

// Over the ranks of `peers`, at most kMaxRanks.
template <typename T>
cudaError_t launch_all_reduce(const CollectiveParams& params, cudaStream_t stream);
cudaError_t launch_all_gather(const CollectiveParams& params, cudaStream_t stream);

// Thread blocks for each group, and the warps of each.
struct ClusterShape {
  int size, warps;
};

// Heads of 64 or 128, part_rows * per_kv up to kMaxPairs, pages a multiple of kTileKeys. With 8 warps a
// cluster has 1, 2, 4 or 8 blocks; with 4 it has 1, and for heads of 64 also 2 or 16.
// Heads of 256, part_rows * per_kv up to kMaxWidePairs: with 4 warps 1, 2, 4 or 8 blocks.
constexpr int kMaxPairs = 32, kMaxWidePairs = 16;
template <typename T>
cudaError_t launch_attend_clusters(const AttendParams& params, int dim, ClusterShape shape,
                                   cudaStream_t stream);

// [rows, heads, columns] in global memory; strides in elements.
struct PromptTensor {
  const void* data;
  int64_t rows, heads, row, head;
};

struct PromptTensors {
  PromptTensor q, k, v;
};

// On Hopper alone. Heads of 64 or 128, pages a power of two from 8 on. All begin at 16 bytes, and have
// strides by 16 bytes.
template <typename T>
cudaError_t launch_attend_prompts(const PromptParams& params, const PromptTensors& tensors, int dim,
                                  cudaStream_t stream);

cudaError_t launch_window(const WindowParams& params, int num_requests, cudaStream_t stream);

}  // namespace trtspec
