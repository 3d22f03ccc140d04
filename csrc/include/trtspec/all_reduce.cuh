// All-reduce and all-gather of the few rows of a decoding step, each one kernel: every rank sends
// its part to all others and takes theirs.
#pragma once

#include "exchange.cuh"

namespace trtspec {

struct CollectiveParams {
  Peers peers;
  const uint4* x;
  uint4* out;   // all-reduce: may be x; all-gather: `size` parts
  int packets;  // of x, at most peers.part_packets
};

// kSums: out is the sum over ranks, in float32 and in their order, so all ranks have the same bits.
template <typename T, bool kSums>
__global__ void exchange(const __grid_constant__ CollectiveParams p) {
  wait_for_previous();
  let_next_start();
  const Round round = begin_round(p.peers);
  const int index = blockIdx.x * blockDim.x + threadIdx.x, count = gridDim.x * blockDim.x;
  for (int i = index; i < p.packets; i += count) {
    const uint4 own = sendable(p.x[i]);
    for (int r = 1; r < p.peers.size; ++r) {
      const int to = (p.peers.rank + r) % p.peers.size;  // not all to one rank at first
      send(place_of(p.peers, to, round.part, p.peers.rank) + i, own);
    }
  }
  empty_last_round(p.peers, round, index, count);
  for (int i = index; i < p.packets; i += count) {
    constexpr int kVector = 16 / sizeof(T);
    const uint4 own = p.x[i];
    float sums[kVector] = {};
    for (int r = 0; r < p.peers.size; ++r) {
      uint4 packet = sendable(own);
      if (r != p.peers.rank) packet = receive(place_of(p.peers, p.peers.rank, round.part, r) + i);
      if constexpr (kSums) {
        const T* values = reinterpret_cast<const T*>(&packet);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[j] += to_float(values[j]);
      } else {
        p.out[static_cast<int64_t>(r) * p.packets + i] = packet;
      }
    }
    if constexpr (kSums) {
      uint4 packet;
      T* values = reinterpret_cast<T*>(&packet);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = from_float<T>(sums[j]);
      p.out[i] = packet;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) end_round(p.peers, round, p.packets, gridDim.x);
}

}  // namespace trtspec
