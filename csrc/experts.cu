#include <algorithm>

#include "trtspec/expert_linear.cuh"
#include "trtspec/launchers.h"

namespace trtspec {

constexpr int kExpertWarps = 12, kExpertSplit = 4;  // of gate and up; down's warps all share k
// Stages of the rings. A block of down finds room beside one of gate and up, unless many rows rest there,
// and so starts early.
constexpr int kUpDepth = 6, kDownDepth = 4, kUpDepthOfFp8 = 5, kDownDepthOfFp8 = 3;
constexpr int kUpDepthOfFp4 = 5, kDownDepthOfFp4 = 2;
// Two blocks of gate and up must not: where two are, another multiprocessor has none, and the kernel takes
// twice as long. So each takes at least this much.
constexpr int kLeastShared = 97 << 10;

template <typename T, typename Codes, bool kDown>
cudaError_t launch_product(const ExpertParams& p, cudaStream_t stream) {
  constexpr int kBits = Codes::kBits, kSplit = kDown ? kExpertWarps : kExpertSplit;
  constexpr int kUp = kBits == 16 ? kUpDepth : kBits == 8 ? kUpDepthOfFp8 : kUpDepthOfFp4;
  constexpr int kOfDown = kBits == 16 ? kDownDepth : kBits == 8 ? kDownDepthOfFp8 : kDownDepthOfFp4;
  constexpr int kDepth = kDown ? kOfDown : kUp;
  const auto kernel = expert_linear<T, Codes, kDown, kExpertWarps, kSplit, kDepth>;
  const int ring = kDepth * kExpertWarps * 32 * kExpertStageBytes<Codes, kDown>;
  const int resting = p.rows * expert_pitch<Codes>(p.k);
  const int shared = kDown ? ring : std::max(ring + resting, kLeastShared);
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return raised;
  keep_shared_memory(kernel);
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int tiles = p.n / kTile;
  const int blocks = kDown ? tiles : std::min(multiprocessors, p.rows * p.choices * tiles);
  return launch(kernel, dim3(blocks), dim3(kExpertWarps * 32), shared, stream, p);
}

template <typename T, typename Codes>
cudaError_t launch_experts(const ExpertParams& up, const ExpertParams& down, cudaStream_t stream) {
  const cudaError_t raised = launch_product<T, Codes, false>(up, stream);
  return raised != cudaSuccess ? raised : launch_product<T, Codes, true>(down, stream);
}

using Wide = RecordCodes<FourBits::kWide>;
using Narrow = RecordCodes<FourBits::kNarrow>;
using Floats = RecordCodes<FourBits::kFloats>;
template cudaError_t launch_experts<bf16, HalfWeights>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<half_t, HalfWeights>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<bf16, Fp8Codes>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<bf16, PowerCodes>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<bf16, Wide>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<bf16, Narrow>(const ExpertParams&, const ExpertParams&, cudaStream_t);
template cudaError_t launch_experts<bf16, Floats>(const ExpertParams&, const ExpertParams&, cudaStream_t);

}  // namespace trtspec
