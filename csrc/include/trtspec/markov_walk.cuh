// Drafts chosen in turn, each row of logits biased by the token before it (DSpark), in one kernel:
//
//     logits of the draft behind token a = own logits + W2 W1[a]
//
// Every block has a chunk of the vocabulary and keeps its rows of W2 in shared memory. For each draft
// it sends its best entry to all blocks, and takes the best of what all have sent. So all blocks must
// run at once. Those of two kernels do if both fit into each multiprocessor.
//
// What a block sends is one word of 64 bits: score, index and the draft's number, counted on from
// launch to launch. A reader waits for the number. Two places for each block take turns: a block that
// sends draft n has draft n - 1 of all others, who had then read n - 2. Every block sends for
// kWalkRequests requests, whether they are there or not, so no place keeps an old number.
#pragma once

#include "choose.cuh"
#include "stream_linear.cuh"

namespace trtspec {

constexpr int kWalkWarps = 8, kWalkRequests = 8;
constexpr int kPacketsOfLane = 5, kMaxWalkBlocks = 32 * kPacketsOfLane;
constexpr int kIndexBits = 24;  // the number has as many
constexpr uint32_t kNoIndex = (1u << kIndexBits) - 1;

struct WalkState {
  uint32_t drafts;  // so far, of all launches
  int tickets;
};

struct WalkParams {
  const void* logits;  // [count * batch, drafts], by draft and then by request
  int64_t row_stride;
  const int* before;  // [batch], the last known tokens
  int64_t before_stride;
  const void* w1;       // [tokens, rank]
  const void* w2;       // [drafts, rank]
  const int64_t* d2t;   // [drafts] offsets, null: none
  int* taken;           // [count, batch]
  WalkState* state;     // zeros at first, as the places
  uint64_t* places;     // [2, kWalkRequests, blocks]
  int batch, count, tokens, drafts;
  int chunk;  // entries of a block, a multiple of 16
};

struct Entry {
  float score;
  int index;
};

__device__ inline void take_better(Entry& best, Entry other) {
  if (is_better(other.score, other.index, best.score, best.index)) best = other;
}

__device__ inline Entry across(Entry entry, int mask) {
  return {__shfl_xor_sync(0xffffffffu, entry.score, mask),
          __shfl_xor_sync(0xffffffffu, entry.index, mask)};
}

template <typename T>
__device__ inline uint64_t packet_of(Entry entry, uint32_t number) {
  const T score = from_float<T>(entry.score);  // exact: it was rounded before
  const uint64_t bits = *reinterpret_cast<const uint16_t*>(&score);
  const uint64_t index = min(static_cast<uint32_t>(entry.index), kNoIndex);
  return bits << (2 * kIndexBits) | index << kIndexBits | (number & kNoIndex);
}

template <typename T>
__device__ inline Entry entry_of(uint64_t packet) {
  const uint16_t bits = static_cast<uint16_t>(packet >> (2 * kIndexBits));
  return {to_float(*reinterpret_cast<const T*>(&bits)),
          static_cast<int>(packet >> kIndexBits & kNoIndex)};
}

// The best of what all blocks sent for one request, by one warp; in every lane.
template <typename T>
__device__ inline Entry best_of_blocks(const uint64_t* places, uint32_t number) {
  const int lane = threadIdx.x % 32, blocks = gridDim.x;
  uint64_t packets[kPacketsOfLane];
  bool waits = true;
  while (waits) {
#pragma unroll
    for (int i = 0; i < kPacketsOfLane; ++i) {
      const uint64_t* place = places + min(i * 32 + lane, blocks - 1);
      asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(packets[i]) : "l"(place) : "memory");
    }
    waits = false;
#pragma unroll
    for (int i = 0; i < kPacketsOfLane; ++i) waits |= (packets[i] & kNoIndex) != (number & kNoIndex);
  }
  Entry best = entry_of<T>(packets[0]);
#pragma unroll
  for (int i = 1; i < kPacketsOfLane; ++i) take_better(best, entry_of<T>(packets[i]));
  __syncwarp();
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) take_better(best, across(best, mask));
  return best;
}

// One block for each of the GPU's multiprocessors, at most kMaxWalkBlocks, the same number in every
// launch that uses the memory.
template <typename T, int kRank>
__global__ void __launch_bounds__(kWalkWarps * 32) walk_markov(const __grid_constant__ WalkParams p) {
  constexpr int kPieces = kRank / 8, kThreads = kWalkWarps * 32;
  constexpr int kStride = kRank * 2 + kPad;  // bytes between rows, so that banks do not collide
  extern __shared__ __align__(16) char shared[];
  __shared__ int tokens[kWalkRequests];
  __shared__ Entry of_warp[kWalkWarps][kWalkRequests];
  T* const own = reinterpret_cast<T*>(shared + p.chunk * kStride);  // [2, batch, chunk]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * p.chunk;
  const int entries = max(min(p.chunk, p.drafts - first), 0);

  const T* w2 = static_cast<const T*>(p.w2) + static_cast<int64_t>(first) * kRank;
  for (int i = thread; i < entries * kPieces; i += kThreads) {
    copy_16(shared + i / kPieces * kStride + i % kPieces * 16, w2 + i * 8);
  }
  copies_commit();
  wait_for_previous();
  let_next_start();

  auto load_own = [&](int draft) {
    const T* logits = static_cast<const T*>(p.logits) + draft * p.batch * p.row_stride + first;
    T* to = own + (draft & 1) * p.batch * p.chunk;
    for (int request = 0; request < p.batch; ++request) {
      for (int i = thread; i < entries; i += kThreads) {
        to[request * p.chunk + i] = logits[request * p.row_stride + i];
      }
    }
  };
  auto token_of = [&](int index) {
    return index + (p.d2t == nullptr ? 0 : static_cast<int>(__ldg(p.d2t + index)));
  };
  auto known = [&](int token) { return min(max(token, 0), p.tokens - 1); };  // with a row of W1

  const uint32_t number = __ldcg(&p.state->drafts) + 1;  // of the first draft; places begin with 0
  if (thread < p.batch) {
    tokens[thread] = known(p.before[thread * p.before_stride]);
  }
  load_own(0);
  copies_wait<0>();
  for (int draft = 0; draft < p.count; ++draft) {
    __syncthreads();
    if (draft == 0 && thread == 0 && atomicAdd(&p.state->tickets, 1) == gridDim.x - 1) {
      *p.state = {number - 1 + p.count, 0};  // every block has its number
    }
    uint4 embedding[kRank / 32] = {};
    if (g < p.batch) {
      const T* row = static_cast<const T*>(p.w1) + static_cast<int64_t>(tokens[g]) * kRank;
#pragma unroll
      for (int j = 0; j < kRank / 32; ++j) {
        embedding[j] = __ldg(reinterpret_cast<const uint4*>(row + j * 32 + t * 8));
      }
    }
    Entry best[2] = {{-INFINITY, INT_MAX}, {-INFINITY, INT_MAX}};  // of requests 2t and 2t + 1
    const T* logits = own + (draft & 1) * p.batch * p.chunk;
    for (int tile = warp * 16; tile < entries; tile += kWalkWarps * 16) {
      float bias[4] = {};
      const char* weights = shared + (tile + g) * kStride + t * 16;
#pragma unroll
      for (int j = 0; j < kRank / 32; ++j) {
        const uint4 low = *reinterpret_cast<const uint4*>(weights + j * 64);
        const uint4 high = *reinterpret_cast<const uint4*>(weights + 8 * kStride + j * 64);
        const uint4 e = embedding[j];
        multiply_add(bias, low.x, high.x, low.y, high.y, e.x, e.y, T());
        multiply_add(bias, low.z, high.z, low.w, high.w, e.z, e.w, T());
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = tile + g + i / 2 * 8, request = 2 * t + i % 2;
        if (at >= entries || request >= p.batch) continue;
        const float rounded = to_float(from_float<T>(bias[i]));
        float x = to_float(from_float<T>(to_float(logits[request * p.chunk + at]) + rounded));
        if (isnan(x)) x = -INFINITY;
        take_better(best[i % 2], {x, first + at});
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) take_better(best[i], across(best[i], mask));
      if (g == 0) of_warp[warp][2 * t + i] = best[i];
    }
    __syncthreads();
    const uint32_t sent = number + draft;
    uint64_t* const places = p.places + (sent & 1) * kWalkRequests * gridDim.x;
    if (thread < kWalkRequests) {
      Entry chosen = of_warp[0][thread];
      for (int w = 1; w < kWalkWarps; ++w) take_better(chosen, of_warp[w][thread]);
      asm volatile("st.relaxed.gpu.global.b64 [%0], %1;"
                   :
                   : "l"(places + thread * gridDim.x + blockIdx.x), "l"(packet_of<T>(chosen, sent))
                   : "memory");
      if (thread < p.batch && chosen.index < p.drafts) {  // its row of W1 may be the next to be read
        const T* row = static_cast<const T*>(p.w1) +
                       static_cast<int64_t>(known(token_of(chosen.index))) * kRank;
        for (int j = 0; j < kRank; j += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + j));
      }
    }
    const bool is_last = draft + 1 == p.count;
    if (!is_last) load_own(draft + 1);
    if (warp >= p.batch || (is_last && blockIdx.x != 0)) continue;
    const int token = token_of(best_of_blocks<T>(places + warp * gridDim.x, sent).index);
    if (lane != 0) continue;
    tokens[warp] = known(token);
    if (blockIdx.x == 0) p.taken[draft * p.batch + warp] = token;
  }
}

}  // namespace trtspec
