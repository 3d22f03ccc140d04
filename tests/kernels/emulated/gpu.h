// A GPU's thread blocks on a CPU, as far as the attention kernels of csrc need them: each thread is a fiber, each
// block of a cluster a thread of this process.
//
// It is as unkind as a GPU may be:
// - Copies arrive when a thread waits for them and not before, or all at once: `Run::is_late`.
// - Warps run in an order that a seed chooses, each as far as it can or not.
// - What the previous kernel writes (`Run::fresh`) must not be read before the wait for it.
// - Nothing may be sent to a block before it has begun or when it is gone.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct Number {
  unsigned x = 0;
};
extern thread_local Number threadIdx, blockIdx, blockDim;

namespace gpu {

constexpr int kLanes = 32;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "A GPU may fail here: %s.\n", why);
  std::exit(3);
}

struct Copy {
  char* to;
  const char* from;
  bool is_there;

  void arrive() const {
    if (is_there) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool is_done = false, has_waited = false;  // for the previous kernel
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  long cluster_turn = 0;
};

struct Warp {
  int arrived = 0;
  long turn = 0;
  void* of_lanes[kLanes];
};

struct Block;

struct Cluster {
  std::mutex lock;
  std::vector<Block*> blocks;
  int live = 0, arrived = 0;  // threads
  std::atomic<long> turn{0};

  void meet_if_all() {
    if (arrived == live && live > 0) arrived = 0, ++turn;
  }
};

struct Run {
  bool is_late = false;
  std::vector<std::pair<const char*, const char*>> fresh;  // from, to before

  bool is_fresh(const void* at) const {
    return std::any_of(fresh.begin(), fresh.end(), [&](auto& part) { return at >= part.first && at < part.second; });
  }
};
extern Run run;

struct Block {
  Cluster& cluster;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<char> shared;
  std::mt19937 random;
  int live, arrived = 0;
  long turn = 0;
  void* barrier = nullptr;
  std::atomic<bool> is_gone{false};
  ucontext_t scheduler;
  int current = 0;

  Block(Cluster& cluster, int warps, int shared_bytes, unsigned seed)
      : cluster(cluster), threads(warps * kLanes), warps(warps), shared(shared_bytes, char(0xff)), random(seed),
        live(warps * kLanes) {}

  void meet_if_all() {
    if (arrived == live && live > 0) arrived = 0, ++turn;
  }
  void go_on(int thread) {
    current = thread, threadIdx.x = thread;
    swapcontext(&scheduler, &threads[thread].context);
  }
  void yield() { swapcontext(&threads[current].context, &scheduler); }
  Thread& thread() { return threads[current]; }
};
extern thread_local Block* block;

// All lanes of a warp come with what they have; `together` is called once with all of it.
template <typename T, typename Together>
void meet(T& own, Together together) {
  Warp& warp = block->warps[block->current / kLanes];
  const long turn = warp.turn;
  warp.of_lanes[block->current % kLanes] = &own;
  if (++warp.arrived == kLanes) {
    together([&](int lane) -> T& { return *static_cast<T*>(warp.of_lanes[lane]); });
    warp.arrived = 0, ++warp.turn;
  }
  while (warp.turn == turn) block->yield();
}

// Runs `body` as the block of that index.
void run_block(Block& block, int index, const std::function<void()>& body);

}  // namespace gpu

template <typename T>
T __ldcg(const T* at) {
  if (!gpu::block->thread().has_waited && gpu::run.is_fresh(at)) gpu::fail("it reads what may not be written yet");
  return *at;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  struct Of {
    T value, found;
    int lane;
  } own = {value, T(), lane};
  gpu::meet(own, [](auto of) {
    for (int i = 0; i < gpu::kLanes; ++i) of(i).found = of(of(i).lane).value;
  });
  return own.found;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % gpu::kLanes) ^ bits);
}

inline bool __all_sync(unsigned, bool value) {
  bool own = value;
  gpu::meet(own, [](auto of) {
    bool all = true;
    for (int i = 0; i < gpu::kLanes; ++i) all &= of(i);
    for (int i = 0; i < gpu::kLanes; ++i) of(i) = all;
  });
  return own;
}

inline void __syncwarp() {
  char own = 0;
  gpu::meet(own, [](auto) {});
}

inline void __syncthreads() {
  gpu::Block& block = *gpu::block;
  const long turn = block.turn;
  ++block.arrived, block.meet_if_all();
  while (block.turn == turn) block.yield();
}
