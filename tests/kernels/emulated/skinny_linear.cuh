// In place of csrc's: numbers of 16 bits, copies, products of tensor cores.
#pragma once

#include "gpu.h"

namespace trtspec {

struct bf16 {
  uint16_t bits;
};
using half_t = _Float16;

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float to_float(half_t x) { return x; }

template <typename T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, half_t>) {
    return static_cast<half_t>(x);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (std::isnan(x)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to the nearest, ties to even
  }
}

template <typename T>
uint32_t pack(float a, float b, T) {
  const T pair[2] = {from_float<T>(a), from_float<T>(b)};
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

template <typename T>
float2 unpack(uint32_t bits, T) {
  T pair[2];
  std::memcpy(pair, &bits, 4);
  return {to_float(pair[0]), to_float(pair[1])};
}

// c += a [16, 16] times b [16, 8], as mma.m16n8k16 has them in lanes.
template <typename T>
void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T) {
  struct Of {
    float* c;
    uint32_t a[4], b[2];
  } own = {c, {a0, a1, a2, a3}, {b0, b1}};
  gpu::meet(own, [](auto of) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(of(lane).a[i], T());
        float* const at = &a[g + i % 2 * 8][t * 2 + i / 2 * 8];
        at[0] = pair.x, at[1] = pair.y;
      }
      for (int i = 0; i < 2; ++i) {
        const float2 pair = unpack(of(lane).b[i], T());
        b[t * 2 + i * 8][g] = pair.x, b[t * 2 + i * 8 + 1][g] = pair.y;
      }
    }
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        of(lane).c[i] += sum;
      }
    }
  });
}

// Four 8x8 matrices, of which each lane has the address of a row.
template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], const char* at) {
  struct Of {
    const char* at;
    uint32_t* r;
  } own = {at, r};
  gpu::meet(own, [](auto of) {
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
          const int one = lane / 4, two = lane % 4 * 2 + j;
          const int row = kTransposed ? two : one, column = kTransposed ? one : two;
          std::memcpy(&pair[j], of(matrix * 8 + row).at + column * 2, 2);
        }
        std::memcpy(&of(lane).r[matrix], pair, 4);
      }
    }
  });
}

inline char* dynamic_shared() { return gpu::block->shared.data(); }

inline void copy_16_if(void* to, const void* from, bool is_there) {
  gpu::Thread& thread = gpu::block->thread();
  char* const begin = dynamic_shared();
  char* const place = static_cast<char*>(to);
  if (place < begin || place + 16 > begin + gpu::block->shared.size()) gpu::fail("a copy leaves shared memory");
  if (is_there && !thread.has_waited && gpu::run.is_fresh(from)) gpu::fail("it copies what may not be written yet");
  const gpu::Copy copy = {place, static_cast<const char*>(from), is_there};
  if (gpu::run.is_late) {
    std::memset(to, 0xff, 16);
    thread.open.push_back(copy);
  } else {
    copy.arrive();
  }
}

inline void copies_commit() {
  gpu::Thread& thread = gpu::block->thread();
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

template <int kPending>
void copies_wait() {
  auto& groups = gpu::block->thread().groups;
  while (groups.size() > kPending) {
    for (const gpu::Copy& copy : groups.front()) copy.arrive();
    groups.erase(groups.begin());
  }
}

inline void wait_for_previous() { gpu::block->thread().has_waited = true; }
inline void let_next_start() {}

inline void cluster_arrive() {
  gpu::Cluster& cluster = gpu::block->cluster;
  const std::lock_guard<std::mutex> guard(cluster.lock);
  gpu::block->thread().cluster_turn = cluster.turn;
  ++cluster.arrived, cluster.meet_if_all();
}

inline void cluster_wait() {
  while (gpu::block->cluster.turn == gpu::block->thread().cluster_turn) gpu::block->yield();
}

}  // namespace trtspec
