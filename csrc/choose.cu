// Launchers of the kernels from logits to tokens.
#include "trtspec/launchers.h"

namespace trtspec {

constexpr int kThreads = 256, kThreadsOfRow = 1024;

template <typename T>
cudaError_t launch_accept(const AcceptParams& p, int num_rows, cudaStream_t stream) {
  const dim3 grid(p.choose.chunks, num_rows);
  if (p.choose.peers.size > 1) {
    return launch(accept_greedy<T, false, true, kThreads>, grid, kThreads, 0, stream, p);
  }
  return p.deltas == nullptr
             ? launch(accept_greedy<T, false, false, kThreads>, grid, kThreads, 0, stream, p)
             : launch(accept_greedy<T, true, false, kThreads>, grid, kThreads, 0, stream, p);
}

template <typename T>
cudaError_t launch_choose(const DraftParams& p, int num_rows, cudaStream_t stream) {
  const dim3 grid(p.choose.chunks, num_rows);
  if (p.choose.peers.size > 1) {
    return launch(choose_drafts<T, true, kThreads>, grid, kThreads, 0, stream, p);
  }
  if (p.choose.chunks == 1) {
    return launch(choose_drafts<T, false, kThreadsOfRow>, grid, kThreadsOfRow, 0, stream, p);
  }
  return launch(choose_drafts<T, false, kThreads>, grid, kThreads, 0, stream, p);
}

cudaError_t launch_window(const WindowParams& p, int num_requests, cudaStream_t stream) {
  return launch(update_window, dim3(p.width, num_requests), 128, 0, stream, p);
}

#define INSTANTIATE(T)                                                             \
  template cudaError_t launch_accept<T>(const AcceptParams&, int, cudaStream_t); \
  template cudaError_t launch_choose<T>(const DraftParams&, int, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(bf16)
INSTANTIATE(half_t)

}  // namespace trtspec
