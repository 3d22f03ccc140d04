// Attention of prompts over a paged cache, by Hopper's products of warpgroups.
//
// An item of work is a tile of some rows of one request, with the query heads that read one KV head:
// up to 128 pairs of a row and a head. A thread block stays for several items. One of its warps copies
// what they read to shared memory: queries, and keys and values, 128 at a time, a page after the other.
// Two warpgroups have 64 pairs each. While a warpgroup's queries are multiplied with the next keys, and
// its weights with values, it makes weights of the scores that it has (after Shah et al. 2024,
// FlashAttention-3). The next item's first tiles come while an item's last ones are worked on.
#pragma once

#include "attend_group.cuh"
#include "hopper.cuh"

namespace trtspec {

// How the keys of a tile are cut where tiles are few, and where the sums of its parts go: for each tile,
// KV head and part of `most`, those of kPromptPairs pairs.
struct PromptParts {
  int most;       // 1: they are not cut
  int least;      // tiles of keys of a part, at least
  float* acc;     // [kPromptPairs, kDim] each, weighted values
  float2* stats;  // [kPromptPairs] each: the largest score in base 2, the sum of weights
};

struct PromptParams {
  void* out;  // [rows of all, heads, kDim]
  int64_t out_row, out_head;
  const int* tables;  // [requests, table_width]
  int64_t table_row;
  int page_size, box_keys;   // a power of two from 8 on; the smaller of a page and kPromptKeys
  const int64_t* positions;  // [rows of all], growing or the same in a tile
  const int* tiles;          // [num_tiles, 3]: request, first row, rows; without rows there is no work
  int num_tiles, tile_rows;  // rows: at most, kPromptPairs / per_kv
  int kv_heads, per_kv, window;
  PromptParts parts;
  float scale;        // of scores in base 2, positive
  const void* sinks;  // [heads], of the queries' type, or null
};

// What copies read. The queries' boxes are the rows of a tile times the heads of a KV head.
struct PromptMaps {
  CUtensorMap q, k, v;
};

constexpr int kPromptKeys = 128, kPromptStages = 2, kPromptGroups = 2, kGroupPairs = 64;
constexpr int kPromptPairs = kPromptGroups * kGroupPairs;
constexpr int kPromptThreads = (kPromptGroups + 1) * 128;

template <int kDim>
struct PromptTiles {
  static constexpr int kHalves = kDim / 64;
  static constexpr int kHalfBytes = kPromptKeys * kTileRowBytes;  // 64 columns of a tile
  static constexpr int kTileBytes = kHalves * kHalfBytes;
  static_assert(kPromptKeys == kPromptPairs);

  alignas(1024) char queries[kTileBytes];
  alignas(1024) char keys[kPromptStages][kTileBytes];
  alignas(1024) char values[kPromptStages][kTileBytes];
  Barrier queries_there, queries_free;
  Barrier keys_there[kPromptStages], keys_free[kPromptStages];
  Barrier values_there[kPromptStages], values_free[kPromptStages];
};

// An item of work: rows of one request, and the keys that they see or a part of them.
struct PromptItem {
  int request, row, rows, head;
  int first, last;  // positions of the first row and the last
  int start;        // the first key, a multiple of kPromptKeys
  int count;        // tiles of keys; 0: there is no work
  int sums;         // where they go if this is a part, else -1
};

// A thread block's items: one of every row of blocks, forwards and backwards in turns. So blocks have
// about as much to do where tiles with fewer and fewer keys follow one another.
__device__ inline PromptItem prompt_item(const PromptParams& p, int turn) {
  const int blocks = gridDim.x;
  const int number = turn * blocks + (turn % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
  const int part = number % p.parts.most, tile_head = number / p.parts.most;
  PromptItem item = {};
  if (tile_head >= p.num_tiles * p.kv_heads) return item;
  const int* const of = p.tiles + tile_head / p.kv_heads * 3;
  item.request = __ldcg(of), item.row = __ldcg(of + 1), item.rows = __ldcg(of + 2);
  if (item.rows == 0) return item;
  item.head = tile_head % p.kv_heads;
  item.first = static_cast<int>(__ldcg(p.positions + item.row));
  item.last = static_cast<int>(__ldcg(p.positions + item.row + item.rows - 1));
  const int start = p.window > 0 ? max(item.first - p.window + 1, 0) / kPromptKeys : 0;
  const int count = item.last / kPromptKeys + 1 - start;
  const int size = max((count + p.parts.most - 1) / p.parts.most, p.parts.least);
  item.start = (start + part * size) * kPromptKeys;
  item.count = max(min(size, count - part * size), 0);
  item.sums = size < count ? number : -1;
  return item;
}

__device__ inline int prompt_turns(const PromptParams& p) {
  return (p.num_tiles * p.kv_heads * p.parts.most + gridDim.x - 1) / gridDim.x;
}

// Where the n-th tile of keys goes, and the parity of its copies.
struct Stage {
  int index, parity;
};

__device__ inline Stage stage_of(int n) { return {n % kPromptStages, n / kPromptStages % 2}; }

// Copies what the items read, one after the other. Called by one whole warp.
template <int kDim>
__device__ inline void copy_items(const PromptParams& p, const PromptMaps& maps,
                                  PromptTiles<kDim>& shared) {
  using Tiles = PromptTiles<kDim>;
  const int lane = threadIdx.x % 32, boxes = kPromptKeys / p.box_keys;
  const int query_bytes = p.tile_rows * p.per_kv * kDim * 2;
  // A lane has every so many keys of each tile. Pages that begin after the last key are not there.
  const auto slot_of = [&](const PromptItem& item, int i) {
    const int key = item.start + i * kPromptKeys + lane * p.box_keys;
    if (lane >= boxes || key > item.last) return 0;
    const int block = __ldcg(p.tables + item.request * p.table_row + key / p.page_size);
    return block * p.page_size + key % p.page_size;
  };
  const auto copy = [&](char* to, const CUtensorMap& from, Barrier& there, int head, int slot) {
    if (lane == 0) there.arrive_and_expect(Tiles::kTileBytes);
    __syncwarp();
    if (lane >= boxes) return;
    char* const box = to + lane * p.box_keys * kTileRowBytes;
#pragma unroll
    for (int half = 0; half < Tiles::kHalves; ++half) {
      copy_box(box + half * Tiles::kHalfBytes, from, there, half * 64, head, slot);
    }
  };
  int n = 0, items = 0;
  for (int turn = 0; turn < prompt_turns(p); ++turn) {
    const PromptItem item = prompt_item(p, turn);
    if (item.count == 0) continue;
    int slot = slot_of(item, 0);
    shared.queries_free.wait(items++ % 2 ^ 1);
    if (lane == 0) {
      shared.queries_there.arrive_and_expect(query_bytes);
      for (int half = 0; half < Tiles::kHalves; ++half) {
        copy_box(shared.queries + half * Tiles::kHalfBytes, maps.q, shared.queries_there, half * 64,
                 item.head * p.per_kv, item.row);
      }
    }
    for (int i = 0; i < item.count; ++i, ++n) {
      const auto [stage, parity] = stage_of(n);
      const int next = i + 1 < item.count ? slot_of(item, i + 1) : 0;
      shared.keys_free[stage].wait(parity ^ 1);
      copy(shared.keys[stage], maps.k, shared.keys_there[stage], item.head, slot);
      shared.values_free[stage].wait(parity ^ 1);
      copy(shared.values[stage], maps.v, shared.values_there[stage], item.head, slot);
      slot = next;
    }
  }
}

// Zeros in place of values that lie behind the last key: 0 times what is there must be 0. Each
// warpgroup writes them.
template <int kDim>
__device__ inline void clear_values(char* values, int from) {
  constexpr int kPieces = kDim / 8;
  for (int i = from * kPieces + threadIdx.x % 128; i < kPromptKeys * kPieces; i += 128) {
    const int key = i / kPieces, piece = i % kPieces;
    char* const half = values + piece / 8 * PromptTiles<kDim>::kHalfBytes;
    *reinterpret_cast<uint4*>(half + key * kTileRowBytes + piece % 8 * 16) = uint4{};
  }
}

// The sum over the four threads that share a row of a product.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A thread's two pairs of a row and a head, and their softmax sums in base 2.
template <int kDim>
struct PromptSums {
  int position[2];
  float best[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float acc[kDim / 2] = {};  // weighted values
};

// Makes weights of the scores of a tile of keys. `keep`: what sums over the keys before are times.
template <int kDim>
__device__ inline void weigh(const PromptParams& p, int key, bool is_masked, float (&scores)[64],
                             PromptSums<kDim>& sums, float (&keep)[2]) {
  const int column = key + threadIdx.x % 4 * 2;
  if (is_masked) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int n = column + i / 4 * 8 + i % 2, at = sums.position[i % 4 / 2];
      if (n > at || (p.window > 0 && n <= at - p.window)) scores[i] = -INFINITY;
    }
  }
  float base[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float best = sums.best[half];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      best = fmaxf(best, fmaxf(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
    }
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    base[half] = base_of(best) * p.scale;
    keep[half] = exp2_of(fmaf(sums.best[half], p.scale, -base[half]));
    sums.best[half] = best;
    sums.total[half] *= keep[half];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int half = i % 4 / 2;
    scores[i] = exp2_of(fmaf(scores[i], p.scale, -base[half]));
    sums.total[half] += scores[i];
  }
}

// Writes the sums of a thread's pairs over a part of their keys.
template <int kDim>
__device__ inline void write_part(const PromptParams& p, const PromptItem& item, int pair,
                                  const PromptSums<kDim>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = static_cast<int64_t>(item.sums) * kPromptPairs + pair + half * 8;
    const float total = quad_sum(sums.total[half]);
    if (threadIdx.x % 4 == 0) p.parts.stats[at] = {sums.best[half] * p.scale, total};
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float* const acc = sums.acc + i * 4 + half * 2;
      float* const to = p.parts.acc + at * kDim + i * 8 + threadIdx.x % 4 * 2;
      *reinterpret_cast<float2*>(to) = {acc[0], acc[1]};
    }
  }
}

// Writes the attention of a thread's pairs.
template <typename T, int kDim>
__device__ inline void write_prompt(const PromptParams& p, const PromptItem& item, int pair,
                                    const PromptSums<kDim>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = quad_sum(sums.total[half]);
    const int of = pair + half * 8, row = of / p.per_kv;
    const int head = item.head * p.per_kv + of % p.per_kv;
    if (row >= item.rows) continue;
    float weight = 1.0f;
    if (p.sinks != nullptr) {
      constexpr float kLog2E = 1.4426950408889634f;
      const float sink = to_float(static_cast<const T*>(p.sinks)[head]) * kLog2E;
      const float best = sums.best[half] * p.scale, base = fmaxf(best, sink);
      weight = exp2_of(best - base);
      total = fmaf(total, weight, exp2_of(sink - base));
    }
    weight /= total;
    T* const out = static_cast<T*>(p.out) + (item.row + row) * p.out_row + head * p.out_head;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float* const acc = sums.acc + i * 4 + half * 2;
      *reinterpret_cast<uint32_t*>(out + i * 8 + threadIdx.x % 4 * 2) =
          pack(acc[0] * weight, acc[1] * weight, T());
    }
  }
}

// A warpgroup's pairs of all items.
template <typename T, int kDim>
__device__ inline void attend_items(const PromptParams& p, int group, PromptTiles<kDim>& shared) {
  using Tiles = PromptTiles<kDim>;
  const int pair = group * kGroupPairs + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint64_t queries = tile_operand(shared.queries + group * kGroupPairs * kTileRowBytes);
  float scores[64], keep[2];
  uint32_t weights[32];
  PromptSums<kDim> sums;
  const auto multiply_keys = [&](int stage) {
    const uint64_t keys = tile_operand(shared.keys[stage]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int bytes = i / 4 * Tiles::kHalfBytes + i % 4 * 32;
      product_of_tiles<T>(scores, moved(queries, bytes), moved(keys, bytes), i > 0);
    }
    products_commit();
  };
  const auto add_values = [&](int stage) {
    const uint64_t values = tile_operand(shared.values[stage], Tiles::kHalfBytes);
    products_begin();
#pragma unroll
    for (int i = 0; i < kPromptKeys / 16; ++i) {
      product_with_rows<T>(sums.acc, weights + i * 4, moved(values, i * 2 * kTileBlockBytes));
    }
    products_commit();
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1], T());
  };
  const auto free = [&](Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  };

  int n = 0, items = 0;
  PromptItem item = prompt_item(p, 0);
  for (int turn = 0; turn < prompt_turns(p); ++turn) {
    const PromptItem next = prompt_item(p, turn + 1);
    if (item.count > 0) {
      const auto is_masked = [&](int key) {
        const bool has_later = key + kPromptKeys - 1 > item.first;
        return has_later || (p.window > 0 && key <= item.last - p.window);
      };
      sums = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min((pair + half * 8) / p.per_kv, item.rows - 1);
        sums.position[half] = static_cast<int>(__ldcg(p.positions + item.row + row));
      }
      shared.queries_there.wait(items++ % 2);
      const auto [first, of_first] = stage_of(n);
      shared.keys_there[first].wait(of_first);
      multiply_keys(first);
      products_wait<0>();
      pin(scores);
      free(shared.keys_free[first]);
      weigh<kDim>(p, item.start, is_masked(item.start), scores, sums, keep);
      pack_weights();
      for (int i = 1; i < item.count; ++i) {
        const auto [before, of_before] = stage_of(n++);
        const auto [stage, parity] = stage_of(n);
        shared.keys_there[stage].wait(parity);
        multiply_keys(stage);
        shared.values_there[before].wait(of_before);
        add_values(before);
        products_wait<1>();
        pin(scores);
        free(shared.keys_free[stage]);
        const int key = item.start + i * kPromptKeys;
        weigh<kDim>(p, key, is_masked(key), scores, sums, keep);
        products_wait<0>();
        pin(sums.acc);
        free(shared.values_free[before]);
#pragma unroll
        for (int j = 0; j < kDim / 2; ++j) sums.acc[j] *= keep[j % 4 / 2];
        pack_weights();
      }
      free(shared.queries_free);
      const auto [stage, parity] = stage_of(n++);
      shared.values_there[stage].wait(parity);
      const int behind = item.last + 1 - (item.start + (item.count - 1) * kPromptKeys);
      if (behind < kPromptKeys) {
        clear_values<kDim>(shared.values[stage], behind);
        fence_for_products();
        sync_named(1 + group, 128);
      }
      add_values(stage);
      products_wait<0>();
      pin(sums.acc);
      free(shared.values_free[stage]);
      if (item.sums < 0) {
        write_prompt<T, kDim>(p, item, pair, sums);
      } else {
        write_part<kDim>(p, item, pair, sums);
      }
    }
    item = next;
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kPromptThreads, 1)
    prompt_attention(const __grid_constant__ PromptParams p, const __grid_constant__ PromptMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const uint32_t offset = (1024 - shared_address(memory) % 1024) % 1024;
  auto& shared = *reinterpret_cast<PromptTiles<kDim>*>(memory + offset);
  if (threadIdx.x == 0) {
    shared.queries_there.init(1), shared.queries_free.init(kPromptGroups * 4);
    for (int i = 0; i < kPromptStages; ++i) {
      shared.keys_there[i].init(1), shared.values_there[i].init(1);
      shared.keys_free[i].init(kPromptGroups * 4), shared.values_free[i].init(kPromptGroups * 4);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const int group = threadIdx.x / 128;
  if (group == kPromptGroups) {
    keep_registers<24>();
    if (threadIdx.x < kPromptGroups * 128 + 32) copy_items<kDim>(p, maps, shared);
  } else {
    take_registers<240>();
    attend_items<T, kDim>(p, group, shared);
  }
#endif
}

}  // namespace trtspec
