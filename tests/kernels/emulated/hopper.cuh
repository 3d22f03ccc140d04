// In place of csrc's: a barrier that counts bytes, and what blocks send each other.
#pragma once

#include "gpu.h"

namespace trtspec {

struct Barrier {
  long arrivals, bytes;  // still to come
  bool is_over;

  void init(int count) {
    arrivals = count, bytes = 0, is_over = false;
    gpu::block->barrier = this;
  }
  void count(int arrived, long of_bytes) {
    arrivals -= arrived, bytes += of_bytes;
    is_over |= arrivals == 0 && bytes == 0;
  }
  void arrive_and_expect(int of_bytes) {
    const std::lock_guard<std::mutex> guard(gpu::block->cluster.lock);
    count(1, of_bytes);
  }
  void wait(int) {
    for (bool ended = false; !ended; gpu::block->yield()) {
      const std::lock_guard<std::mutex> guard(gpu::block->cluster.lock);
      ended = is_over;
    }
  }
};

inline void fence_barriers() {}

constexpr uint32_t kOfBarrier = 0xffffff, kRankShift = 24;

// A rank, and an offset in shared memory or kOfBarrier.
inline uint32_t remote_address(const void* own, int rank) {
  const char* const begin = gpu::block->shared.data();
  const char* const at = static_cast<const char*>(own);
  const bool is_shared = at >= begin && at < begin + gpu::block->shared.size();
  return static_cast<uint32_t>(rank) << kRankShift | (is_shared ? static_cast<uint32_t>(at - begin) : kOfBarrier);
}

inline void send_pair(uint32_t to, uint32_t barrier, float x, float y) {
  gpu::Cluster& cluster = gpu::block->cluster;
  const std::lock_guard<std::mutex> guard(cluster.lock);
  gpu::Block& target = *cluster.blocks.at(to >> kRankShift);
  const uint32_t at = to & kOfBarrier;
  if (target.is_gone || target.barrier == nullptr) gpu::fail("it sends to a block that is not there");
  if (at % 8 != 0 || at + 8 > target.shared.size()) gpu::fail("it sends to no place for a pair");
  if (barrier != ((to & ~kOfBarrier) | kOfBarrier)) gpu::fail("another block's barrier counts");
  const float pair[2] = {x, y};
  std::memcpy(target.shared.data() + at, pair, 8);
  Barrier& counts = *static_cast<Barrier*>(target.barrier);
  if (counts.is_over) gpu::fail("it sends more than is waited for");
  counts.count(0, -8);
}

}  // namespace trtspec
