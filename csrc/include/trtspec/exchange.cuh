// What ranks tell each other inside a kernel: each writes packets into the others' memory and waits
// for theirs in its own. There is no barrier, and no flag beside the data: memory is empty (every
// word kEmpty) until a packet is there, and no packet holds such a word.
//
// Kernels that exchange are numbered; each such number is a round, the same on all ranks. Three
// rounds have memory of their own and take turns. A round empties what the one before it received.
// That memory is written again two rounds later. By then its owner has emptied it: the writer has
// finished the round between, so it had packets of that round, which the owner sent afterwards.
#pragma once

#include "common.cuh"

namespace trtspec {

constexpr int kMaxRanks = 16;
constexpr uint32_t kEmpty = 0xffffffffu;     // NaN in float32, a pair of them in 16 bits
constexpr uint32_t kOtherNaN = 0x7fff7fffu;  // the same, sent in its place

// This rank's own, zero at first.
struct ExchangeState {
  int part;  // of the memory that the round uses: 0, 1, 2, 0 …
  int tickets;
  int packets;  // from each rank in the round before
};

// `memory`: as this rank sees every rank's, 3 rounds x `size` senders x `part_packets`.
struct Peers {
  int rank, size;
  int64_t part_packets;
  ExchangeState* state;
  uint4* memory[kMaxRanks];
};

struct Round {
  int part;
  int packets_before;
};

__device__ inline int after(int part) { return part == 2 ? 0 : part + 1; }

__device__ inline uint4* place_of(const Peers& p, int owner, int part, int sender) {
  return p.memory[owner] + (part * p.size + sender) * p.part_packets;
}

__device__ inline uint4 sendable(uint4 packet) {
  if (packet.x == kEmpty) packet.x = kOtherNaN;
  if (packet.y == kEmpty) packet.y = kOtherNaN;
  if (packet.z == kEmpty) packet.z = kOtherNaN;
  if (packet.w == kEmpty) packet.w = kOtherNaN;
  return packet;
}

__device__ inline void send(uint4* target, uint4 packet) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(packet.x),
               "r"(packet.y), "r"(packet.z), "r"(packet.w)
               : "memory");
}

__device__ inline uint4 receive(const uint4* source) {
  uint4 packet;
  do {
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
                 : "l"(source)
                 : "memory");
  } while (packet.x == kEmpty || packet.y == kEmpty || packet.z == kEmpty || packet.w == kEmpty);
  return packet;
}

// After `wait_for_previous`, before the first packet.
__device__ inline Round begin_round(const Peers& p) {
  return {__ldcg(&p.state->part), __ldcg(&p.state->packets)};
}

// Empties what the round before received; thread `index` of `count` in the grid.
__device__ inline void empty_last_round(const Peers& p, const Round& round, int index, int count) {
  const uint4 empty = {kEmpty, kEmpty, kEmpty, kEmpty};
  for (int sender = 0; sender < p.size; ++sender) {
    if (sender == p.rank) continue;
    uint4* place = place_of(p, p.rank, after(after(round.part)), sender);
    for (int i = index; i < round.packets_before; i += count) place[i] = empty;
  }
}

// One thread of every block, once all of the block have begun the round. The last of `blocks` ends
// it.
__device__ inline void end_round(const Peers& p, const Round& round, int packets, int blocks) {
  if (atomicAdd(&p.state->tickets, 1) != blocks - 1) return;
  *p.state = {after(round.part), 0, packets};
}

}  // namespace trtspec
