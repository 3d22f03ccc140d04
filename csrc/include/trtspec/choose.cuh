// From logits to tokens: the greedy choice of every row, and what follows from it.
//
// The vocabulary of a row is cut into chunks, one block each. A block leaves its best entry in
// `partial` and takes a ticket. The block with the last ticket of a request joins the chunks of all
// its rows and finishes the request: one kernel from logits to accepted tokens. At the end the
// tickets are zero again. A draft of a row that is one chunk needs neither.
//
// Ranks that each have a part of the vocabulary compare their best entries before that: one packet
// for each row and rank.
//
// A NaN is never chosen; it marks the row. Among equal entries the lowest index is chosen.
#pragma once

#include <type_traits>

#include "exchange.cuh"

namespace trtspec {

constexpr int kMaxChunks = 64;
constexpr int kLoads = 4;  // of 16 bytes, by each thread at a time
constexpr int kMaxRowsPerRequest = 64;
constexpr int kMaxRowsOverRanks = 512;  // blocks wait for other ranks: all must run at once

struct ChunkBest {
  float value;
  int index;
  int has_nan;
  // Relaxed acceptance alone: sum of exp(x - value), and how many entries exceed the draft's.
  float sum;
  int above;
};

// Requests: `num_contexts` of one row, then requests of `rows` rows.
struct ChooseParams {
  const void* logits;  // [R, vocab]
  int64_t row_stride;
  int vocab, num_contexts, rows, chunks;
  ChunkBest* partial;  // [R, chunks]
  int* tickets;        // [B], zero before and after
  Peers peers;         // kRanks alone
  int first_index;     // of this rank's part of the vocabulary
};

struct AcceptParams {
  ChooseParams choose;
  const int* drafts;  // [G, rows - 1], -1 is none
  int64_t draft_stride;
  int width;       // K + 1
  int forced_len;  // 0: off, else the length of every generation, at most rows
  int* tokens;     // [B, width], -1 past the length
  int* lens;       // [B]
  int* num_accepted_drafts;  // [B]
  bool* bad;                 // [B]
  // Relaxed acceptance, null deltas: off.
  float* deltas;         // [S], below zero: this request is judged strictly
  const int64_t* slots;  // [B]
  int top_k, end_token;
};

struct DraftParams {
  ChooseParams choose;
  const int64_t* d2t;  // [vocab] offsets, null: none
  int* tokens;         // [R]
};

__device__ inline bool is_better(float value, int index, float than, int than_index) {
  return value > than || (value == than && index < than_index);
}

// The best entry of one chunk, in thread 0. `own`: the draft's logit, NaN if there is none.
template <typename T, bool kRelaxed, int kThreads>
__device__ inline ChunkBest best_of_chunk(const ChooseParams& p, int row, int chunk, float own) {
  constexpr int kVector = 16 / sizeof(T);
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const int size = ((p.vocab + p.chunks - 1) / p.chunks + kVector - 1) / kVector * kVector;
  const int begin = chunk * size, end = min(begin + size, p.vocab);
  ChunkBest best = {-INFINITY, begin < p.vocab ? begin : 0, 0, 0.0f, 0};
  auto take = [&](T entry, int index) {
    const float x = to_float(entry);
    best.has_nan |= isnan(x);
    if constexpr (kRelaxed) {
      best.above += x > own;
      const float top = fmaxf(best.value, x);  // a NaN x is not the larger
      if (top > -INFINITY) {
        best.sum = best.sum * __expf(best.value - top) + (isnan(x) ? 0.0f : __expf(x - top));
      }
    }
    if (x > best.value) best.value = x, best.index = index;  // indices only grow
  };
  constexpr int kStep = kThreads * kVector;
  int i = begin + threadIdx.x * kVector;
  auto take_vectors = [&](auto count) {  // so many loads are under way at a time
    constexpr int kCount = decltype(count)::value;
    for (; i + (kCount - 1) * kStep + kVector <= end; i += kCount * kStep) {
      uint4 words[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        words[n] = *reinterpret_cast<const uint4*>(logits + i + n * kStep);
      }
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const T* entries = reinterpret_cast<const T*>(&words[n]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) take(entries[j], i + n * kStep + j);
      }
    }
  };
  if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
    take_vectors(std::integral_constant<int, kLoads>{});
    take_vectors(std::integral_constant<int, 1>{});
  }
  for (; i < end; i += kStep) {
    for (int j = i; j < min(i + kVector, end); ++j) take(logits[j], j);
  }

  auto join = [&](const ChunkBest& other) {
    if constexpr (kRelaxed) {
      const float top = fmaxf(best.value, other.value);
      if (top > -INFINITY) {
        best.sum = best.sum * __expf(best.value - top) + other.sum * __expf(other.value - top);
      }
      best.above += other.above;
    }
    best.has_nan |= other.has_nan;
    if (is_better(other.value, other.index, best.value, best.index)) {
      best.value = other.value, best.index = other.index;
    }
  };
  auto across = [&](int mask) {
    ChunkBest other;
    other.value = __shfl_xor_sync(0xffffffffu, best.value, mask);
    other.index = __shfl_xor_sync(0xffffffffu, best.index, mask);
    other.has_nan = __shfl_xor_sync(0xffffffffu, best.has_nan, mask);
    if constexpr (kRelaxed) {
      other.sum = __shfl_xor_sync(0xffffffffu, best.sum, mask);
      other.above = __shfl_xor_sync(0xffffffffu, best.above, mask);
    }
    return other;
  };
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) join(across(mask));
  constexpr int kWarps = kThreads / 32;
  __shared__ ChunkBest of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = of_warp[threadIdx.x % kWarps];  // of each as often
#pragma unroll
    for (int mask = kWarps / 2; mask > 0; mask /= 2) join(across(mask));
  }
  return best;
}

// Whether this block is the last of its request; it then sees what the others left.
__device__ inline bool is_last(const ChooseParams& p, int request, int blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(p.tickets + request, 1) == blocks - 1;
    if (last) p.tickets[request] = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// The whole row from its chunks, by one warp; the result is in every lane.
template <bool kRelaxed>
__device__ inline ChunkBest join_chunks(const ChooseParams& p, int row) {
  const int lane = threadIdx.x % 32;
  ChunkBest best = {-INFINITY, 0, 0, 0.0f, 0};
  bool any = false;
  for (int c = lane; c < p.chunks; c += 32) {
    const ChunkBest* place = p.partial + static_cast<int64_t>(row) * p.chunks + c;
    const ChunkBest other = {__ldcg(&place->value), __ldcg(&place->index), __ldcg(&place->has_nan),
                             kRelaxed ? __ldcg(&place->sum) : 0.0f,
                             kRelaxed ? __ldcg(&place->above) : 0};
    const float top = fmaxf(best.value, other.value);
    if (kRelaxed && top > -INFINITY) {
      best.sum = best.sum * __expf(best.value - top) + other.sum * __expf(other.value - top);
    }
    best.above += other.above;
    best.has_nan |= other.has_nan;
    if (!any || is_better(other.value, other.index, best.value, best.index)) {
      best.value = other.value, best.index = other.index;
    }
    any = true;
  }
  if (!any) best.index = INT_MAX;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, mask);
    const int index = __shfl_xor_sync(0xffffffffu, best.index, mask);
    const float sum = __shfl_xor_sync(0xffffffffu, best.sum, mask);
    best.above += __shfl_xor_sync(0xffffffffu, best.above, mask);
    best.has_nan |= __shfl_xor_sync(0xffffffffu, best.has_nan, mask);
    const float top = fmaxf(best.value, value);
    if (kRelaxed && top > -INFINITY) {
      best.sum = best.sum * __expf(best.value - top) + sum * __expf(value - top);
    }
    if (is_better(value, index, best.value, best.index)) best.value = value, best.index = index;
  }
  return best;
}

// Begins the round of a kernel over ranks.
template <bool kRanks>
__device__ inline Round begin(const ChooseParams& p) {
  if constexpr (!kRanks) return {};
  const Round round = begin_round(p.peers);
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  empty_last_round(p.peers, round, block * blockDim.x + threadIdx.x,
                   gridDim.x * gridDim.y * blockDim.x);
  return round;
}

// The best entry of a row over all ranks, by one warp; indices are then those of the vocabulary.
__device__ inline ChunkBest join_ranks(const ChooseParams& p, const Round& round, int row,
                                       ChunkBest best) {
  const Peers& peers = p.peers;
  const int lane = threadIdx.x % 32;
  best.index += p.first_index;
  const float value = best.value > -INFINITY ? best.value : -INFINITY;
  const uint4 own = {__float_as_uint(value), static_cast<uint32_t>(best.index),
                     static_cast<uint32_t>(best.has_nan), 0};
  if (lane < peers.size && lane != peers.rank) {
    send(place_of(peers, lane, round.part, peers.rank) + row, own);
    const uint4 other = receive(place_of(peers, peers.rank, round.part, lane) + row);
    best.value = __uint_as_float(other.x);
    best.index = static_cast<int>(other.y), best.has_nan = static_cast<int>(other.z);
  } else if (lane >= peers.size) {
    best.value = -INFINITY, best.index = INT_MAX, best.has_nan = 0;
  }
#pragma unroll
  for (int mask = kMaxRanks / 2; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best.value, mask);
    const int index = __shfl_xor_sync(0xffffffffu, best.index, mask);
    best.has_nan |= __shfl_xor_sync(0xffffffffu, best.has_nan, mask);
    if (is_better(other, index, best.value, best.index)) best.value = other, best.index = index;
  }
  return best;
}

// Grid (chunks, rows of logits).
template <typename T, bool kRelaxed, bool kRanks, int kThreads>
__global__ void __launch_bounds__(kThreads) accept_greedy(const __grid_constant__ AcceptParams p) {
  wait_for_previous();
  let_next_start();
  const ChooseParams& c = p.choose;
  const Round round = begin<kRanks>(c);
  const int row = blockIdx.y;
  const bool is_context = row < c.num_contexts;
  const int generation = is_context ? 0 : (row - c.num_contexts) / c.rows;
  const int request = is_context ? row : c.num_contexts + generation;
  const int place = is_context ? 0 : (row - c.num_contexts) % c.rows;
  const int rows = is_context ? 1 : c.rows, num_drafts = rows - 1;
  const int first_row = row - place;
  const int* drafts = p.drafts + generation * p.draft_stride;
  const T* logits = static_cast<const T*>(c.logits);
  float own = NAN;
  if (kRelaxed && place < num_drafts && drafts[place] >= 0 && drafts[place] < c.vocab) {
    own = to_float(logits[row * c.row_stride + drafts[place]]);
  }
  const ChunkBest mine = best_of_chunk<T, kRelaxed, kThreads>(c, row, blockIdx.x, own);
  if (threadIdx.x == 0) c.partial[static_cast<int64_t>(row) * c.chunks + blockIdx.x] = mine;
  const bool finishes = is_last(c, request, rows * c.chunks);
  if (kRanks && threadIdx.x == 0) end_round(c.peers, round, gridDim.y, gridDim.x * gridDim.y);
  if (!finishes) return;

  __shared__ int chosen[kMaxRowsPerRequest];
  __shared__ bool is_bad[kMaxRowsPerRequest], is_kept[kMaxRowsPerRequest];
  const float delta = kRelaxed ? p.deltas[p.slots[request]] : -1.0f;
  for (int i = threadIdx.x / 32; i < rows; i += kThreads / 32) {
    ChunkBest best = join_chunks<kRelaxed>(c, first_row + i);
    if constexpr (kRanks) best = join_ranks(c, round, first_row + i, best);
    if (threadIdx.x % 32 != 0) continue;
    chosen[i] = best.index;
    is_bad[i] = best.has_nan || !(best.value > -INFINITY);
    if (i < num_drafts) {
      const int draft = drafts[i];
      is_kept[i] = draft == best.index;
      if (kRelaxed && draft >= 0 && draft < c.vocab && delta >= 0.0f && !best.has_nan && best.above < p.top_k) {
        const float x = to_float(logits[(first_row + i) * c.row_stride + draft]);
        const float top = 1.0f / best.sum;  // the best entry's probability
        is_kept[i] |= x > -INFINITY && __expf(x - best.value) * top >= top - delta;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int len = 1;
  while (len <= num_drafts && is_kept[len - 1]) ++len;
  for (int i = 0; kRelaxed && i < len - 1; ++i) chosen[i] = drafts[i];
  if (p.forced_len > 0 && !is_context) len = min(p.forced_len, rows);
  bool bad = false, has_ended = false;
  for (int i = 0; i < rows; ++i) bad |= is_bad[i];
  int* tokens = p.tokens + static_cast<int64_t>(request) * p.width;
  for (int i = 0; i < p.width; ++i) {
    tokens[i] = i < len ? chosen[i] : -1;
    if (kRelaxed && i < len) has_ended |= chosen[i] == p.end_token;
  }
  p.lens[request] = len;
  p.num_accepted_drafts[request] = len - 1;
  p.bad[request] = bad;
  if (kRelaxed && has_ended) p.deltas[p.slots[request]] = -1.0f;
}

// Grid (chunks, rows of logits): each row its own request.
template <typename T, bool kRanks, int kThreads>
__global__ void __launch_bounds__(kThreads) choose_drafts(const __grid_constant__ DraftParams p) {
  wait_for_previous();
  let_next_start();
  const ChooseParams& c = p.choose;
  const Round round = begin<kRanks>(c);
  const int row = blockIdx.y;
  ChunkBest best = best_of_chunk<T, false, kThreads>(c, row, blockIdx.x, NAN);
  if (kRanks || c.chunks > 1) {
    if (threadIdx.x == 0) c.partial[static_cast<int64_t>(row) * c.chunks + blockIdx.x] = best;
    const bool finishes = is_last(c, row, c.chunks);
    if (kRanks && threadIdx.x == 0) end_round(c.peers, round, gridDim.y, gridDim.x * gridDim.y);
    if (!finishes) return;
    if (threadIdx.x < 32) best = join_chunks<false>(c, row);
  }
  if (threadIdx.x >= 32) return;
  if constexpr (kRanks) best = join_ranks(c, round, row, best);
  const int index = best.index;
  if (threadIdx.x == 0) {
    p.tokens[row] = index + (p.d2t == nullptr ? 0 : static_cast<int>(p.d2t[index]));
  }
}

// The window of vanilla MTP: hidden states and tokens of each request's last rows. Grid
// (width, requests). In place of a row before the batch's first it takes the first; that window is
// never read.
struct WindowParams {
  const void* hidden;  // [T, size], in units of 2 bytes
  const int64_t* ids;  // [T]
  const int64_t* last;   // [B], the newest row to keep
  const int64_t* slots;  // [B]
  void* window_hidden;   // [S, width, size]
  int64_t* window_ids;   // [S, width]
  int size, width;       // size in bytes
};

__global__ void inline update_window(const __grid_constant__ WindowParams p) {
  wait_for_previous();
  let_next_start();
  const int request = blockIdx.y, i = blockIdx.x;
  const int64_t row = max(p.last[request] - p.width + 1 + i, static_cast<int64_t>(0));
  const int64_t place = p.slots[request] * p.width + i;
  const char* source = static_cast<const char*>(p.hidden) + row * p.size;
  char* target = static_cast<char*>(p.window_hidden) + place * p.size;
  for (int b = threadIdx.x * 16; b < p.size; b += blockDim.x * 16) {
    if (b + 16 <= p.size && p.size % 16 == 0) {
      *reinterpret_cast<uint4*>(target + b) = *reinterpret_cast<const uint4*>(source + b);
    } else {
      for (int j = b; j < min(b + 16, p.size); ++j) target[j] = source[j];
    }
  }
  if (threadIdx.x == 0) p.window_ids[place] = p.ids[row];
}

}  // namespace trtspec
