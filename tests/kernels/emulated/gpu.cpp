#include "gpu.h"

thread_local Number threadIdx, blockIdx, blockDim;

namespace gpu {

Run run;
thread_local Block* block;
static thread_local const std::function<void()>* body_of_block;

static void run_thread() {
  (*body_of_block)();
  Block& own = *block;
  own.thread().is_done = true;
  --own.live, own.meet_if_all();
  {
    const std::lock_guard<std::mutex> guard(own.cluster.lock);
    --own.cluster.live, own.cluster.meet_if_all();
    if (own.live == 0) own.is_gone = true;
  }
  own.yield();
}

void run_block(Block& own, int index, const std::function<void()>& body) {
  block = &own, body_of_block = &body, blockIdx.x = index, blockDim.x = own.threads.size();
  for (Thread& thread : own.threads) {
    thread.stack.resize(192 << 10);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  std::vector<int> order(own.warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const bool is_mixed = own.random() % 2;
  std::shuffle(order.begin(), order.end(), own.random);
  while (own.live > 0) {
    if (is_mixed) std::shuffle(order.begin(), order.end(), own.random);
    for (const int warp : order) {
      // It goes on until it waits for others, or for a while.
      for (int idle = 0; idle < 2;) {
        const long before = own.warps[warp].turn;
        for (int lane = 0; lane < kLanes; ++lane) {
          if (!own.threads[warp * kLanes + lane].is_done) own.go_on(warp * kLanes + lane);
        }
        idle = own.warps[warp].turn == before ? idle + 1 : 0;
        if (is_mixed && own.random() % 16 == 0) break;
      }
    }
  }
}

}  // namespace gpu
