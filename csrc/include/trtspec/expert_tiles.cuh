// One product of a mixture of experts in MXFP4, of rows sorted by expert. Weights are the 16-row operand of
// the tensor cores and become bf16 in registers; rows of x are columns, and rest in shared memory.
//
// An expert's rows are cut into tiles of up to 24, and a tile's outputs into items of 32: four groups. There
// is one block for each multiprocessor, and each has as many items, one after the other: so few blocks change
// from one tile to the next. A team of four warps makes an item, and divides k. While a warp multiplies, what
// it will multiply next is on its way into registers.
//
// Codes of 8 rows lie together. Where a warp read 64 bytes of each of 8 rows that were apart, this took 1.8
// times as long: lines of 128 bytes count, not bytes.
//
// A row's result does not depend on the rows beside it: the order of its sum is fixed by k.
#pragma once

#include "fp4.cuh"
#include "gate.cuh"
#include "hopper.cuh"
#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kTeams = 3, kTeamWarps = 4, kTiledThreads = kTeams * kTeamWarps * 32;
constexpr int kItemRows = 32, kColumns = 3;  // outputs of an item; eights of rows of x, at most
constexpr int kTiledExperts = 1024;

struct TiledExpertParams {
  const void* x;
  int64_t x_stride;
  const int64_t* rows;  // row of x of each pair, null: its own
  const int* ends;      // [experts], where each one's pairs end
  int experts;          // at most kTiledExperts
  const void* weight;   // [experts, n / 8, k / 64, 8, 32] codes, as `fp4.cuh` has them
  const void* scales;   // [experts, n / 8, ceil(k / 128), 8, 4] e8m0 codes
  int n, k;             // n by 32; k by 64, of kTeamWarps steps at least
  const void* bias;     // [experts, n], null: none
  void* out;            // [pairs, n]; gated [pairs, n / 2]
  int tile_rows;        // rows of a tile: by 8, up to those of kColumns
  Gate gate;
};

// Bytes between rows of x in shared memory, so that banks do not collide.
__host__ __device__ constexpr int tile_pitch(int k) { return fp4_steps(k) * kFp4Step * 2 + 64; }

__host__ __device__ constexpr int team_sums(int rows) { return kTeamWarps * kItemRows * rows * 4; }

__host__ __device__ constexpr int tile_shared(int k, int rows) {
  return rows * tile_pitch(k) + kTeams * team_sums(rows);
}

// What a lane multiplies in a step: 16 bytes of each group, and its row's scales.
struct Fp4Piece {
  uint4 codes[4];
  uint32_t scales[4];
};

__device__ inline uint4 load_once(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ inline uint4 load_shared(int address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Keeps a value in a register where the compiler would rather compute it anew, again and again.
__device__ inline int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// How many tiles there are up to and with each expert's; by one warp.
__device__ inline void count_tiles(const TiledExpertParams& p, int* last_tiles, int lane) {
  int before = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int expert = first + lane;
    int tiles = 0;
    if (expert < p.experts) {
      const int count = p.ends[expert] - (expert > 0 ? p.ends[expert - 1] : 0);
      tiles = (count + p.tile_rows - 1) / p.tile_rows;
    }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, tiles, apart);
      if (lane >= apart) tiles += other;
    }
    if (expert < p.experts) last_tiles[expert] = before + tiles;
    before += __shfl_sync(0xffffffffu, tiles, 31);
  }
}

// A step of an item times kOf eights of rows of x, of which this lane's first piece is at x_at.
template <int kOf>
__device__ inline void multiply_item_step(float (&acc)[2][kColumns][4], const uint4 (&codes)[4],
                                          const uint32_t (&powers)[4][2], int x_at, int eight_rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 low_x[kOf], high_x[kOf];
#pragma unroll
    for (int c = 0; c < kOf; ++c) {
      low_x[c] = load_shared(x_at + c * eight_rows + half * 64);
      high_x[c] = load_shared(x_at + c * eight_rows + half * 64 + 128);
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t lo = word_of(codes[2 * m], half * 2 + w);
        const uint32_t hi = word_of(codes[2 * m + 1], half * 2 + w);
        const uint2 a = widen_fp4<false>(lo, powers[2 * m][0]);
        const uint2 b = widen_fp4<false>(hi, powers[2 * m + 1][0]);
#pragma unroll
        for (int c = 0; c < kOf; ++c) {
          multiply_add(acc[m][c], a.x, b.x, a.y, b.y, word_of(low_x[c], 2 * w),
                       word_of(low_x[c], 2 * w + 1), bf16());
        }
        const uint2 d = widen_fp4<true>(lo, powers[2 * m][1]);
        const uint2 e = widen_fp4<true>(hi, powers[2 * m + 1][1]);
#pragma unroll
        for (int c = 0; c < kOf; ++c) {
          multiply_add(acc[m][c], d.x, e.x, d.y, e.y, word_of(high_x[c], 2 * w),
                       word_of(high_x[c], 2 * w + 1), bf16());
        }
      }
    }
  }
}

template <bool kGated>
__global__ void __launch_bounds__(kTiledThreads)
    expert_tiles(const __grid_constant__ TiledExpertParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int last_tiles[kTiledExperts];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = threadIdx.x / 32 / kTeamWarps, warp = threadIdx.x / 32 % kTeamWarps;
  const int steps = fp4_steps(p.k), pitch = tile_pitch(p.k), items_a_tile = p.n / kItemRows;
  const int begin = steps * warp / kTeamWarps, end = steps * (warp + 1) / kTeamWarps;
  float2* const sums =
      reinterpret_cast<float2*>(shared + p.tile_rows * pitch + team * team_sums(p.tile_rows));
  const int full = 1 + 2 * team, empty = 2 + 2 * team;  // named barriers of the sums

  wait_for_previous();
  let_next_start();
  if (threadIdx.x < 32) count_tiles(p, last_tiles, lane);
  __syncthreads();
  const int64_t items = static_cast<int64_t>(last_tiles[p.experts - 1]) * items_a_tile;
  const int64_t first = items * blockIdx.x / gridDim.x, last = items * (blockIdx.x + 1) / gridDim.x - 1;
  if (first > last) return;
  const int first_tile = static_cast<int>(first / items_a_tile);
  const int first_item = static_cast<int>(first % items_a_tile) + team;  // of this team, in that tile
  const int last_tile = static_cast<int>(last / items_a_tile);
  const int last_item = static_cast<int>(last % items_a_tile);  // of all teams, in that tile
  auto expert_of = [&](int tile) {  // the first one whose tiles end behind it
    int from = 0, to = p.experts - 1;
    while (from < to) {
      const int middle = (from + to) / 2;
      if (last_tiles[middle] > tile) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return from;
  };
  // The first weight row of an item, and how far behind it its four groups begin. Groups 0 and 1 are a
  // lane's rows lo and hi, then 2 and 3 are; where outputs are gated, these are a gate's row and its up's.
  auto first_row = [&](int item) { return item * (kGated ? kItemRows / 2 : kItemRows); };
  auto behind = [&](int i) { return kGated ? i / 2 * 8 + i % 2 * (p.n / 2) : i * 8; };

  // What is fetched next. After the last item it is fetched again and not used: loads without a condition
  // need no branch. Behind k there are zeros of x, which any codes do for.
  int next_tile = first_tile, next_item = first_item, next_step = begin;
  int entered_tile = -1, entered = 0;  // the tile of what is fetched, and its expert
  const int own_steps = (p.k - t / 2 * 64 + kFp4Step - 64) / kFp4Step;  // that this lane has codes in
  const char *codes_at = nullptr, *scales_at = nullptr;
  const int64_t code_row = p.k / 2, scale_row = steps * 4;
  auto enter = [&] {
    while (next_item >= items_a_tile) next_item -= items_a_tile, ++next_tile;
    if (next_tile > last_tile || (next_tile == last_tile && next_item > last_item)) {
      next_tile = last_tile, next_item = last_item;
    }
    if (entered_tile != next_tile) entered_tile = next_tile, entered = expert_of(next_tile);
    const int64_t row = static_cast<int64_t>(entered) * p.n + first_row(next_item);
    codes_at = static_cast<const char*>(p.weight) + row * code_row + fp4_place(g, t);
    scales_at = static_cast<const char*>(p.scales) + row * scale_row + g * 4;
  };
  auto fetch = [&](Fp4Piece& piece, int zero) {
    const char* const codes = codes_at + min(next_step, own_steps - 1) * kGroupCodes + zero;
    const char* const scales = scales_at + next_step * kGroupScales + zero;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      piece.codes[i] = load_once(codes + behind(i) * code_row);
      piece.scales[i] = __ldg(reinterpret_cast<const uint32_t*>(scales + behind(i) * scale_row));
    }
    if (++next_step == end) {
      next_step = begin, next_item += kTeams;
      enter();
    }
  };
  enter();
  Fp4Piece now, later;
  fetch(now, 0);

  // The tile whose rows rest in shared memory. (`next_rows` goes on by one, and so is called for the first.)
  int tile = first_tile - 1, expert = 0, first_pair = 0, count = 0, columns = 0;
  int item = first_item + items_a_tile, step = begin;
  auto is_tile_done = [&] { return item >= (tile == last_tile ? last_item + 1 : items_a_tile); };
  auto next_rows = [&] {
    ++tile, item -= items_a_tile;
    expert = expert_of(tile);
    const int begin_pair = expert > 0 ? p.ends[expert - 1] : 0;
    first_pair = begin_pair + (tile - (expert > 0 ? last_tiles[expert - 1] : 0)) * p.tile_rows;
    count = min(p.tile_rows, p.ends[expert] - first_pair), columns = (count + 7) / 8;
    __syncthreads();
    // Of a step's 16 pieces of 8 columns a lane multiplies four, which lie 64 bytes apart.
    const int pieces = steps * 16;
    for (int i = threadIdx.x; i < columns * 8 * pieces; i += kTiledThreads) {
      const int row = i / pieces, piece = i % pieces;
      const int column = piece / 16 * kFp4Step + fp4_column(piece % 4, piece / 4 % 4);
      const bool inside = row < count && column < p.k;
      const int64_t pair = first_pair + row;
      const bf16* from = static_cast<const bf16*>(p.x);
      if (inside) from += (p.rows == nullptr ? pair : p.rows[pair]) * p.x_stride + column;
      copy_16_if(shared + row * pitch + piece * 16, from, inside);
    }
    copies_commit();
    copies_wait<0>();
    __syncthreads();
  };
  while (is_tile_done()) {
    if (tile == last_tile) return;
    next_rows();
  }

  const int low = kept(fp4_selector(t / 2 * 2)), high = kept(fp4_selector(t / 2 * 2 + 1));
  const int my_x = kept(shared_address(shared) + g * pitch + t * 16), eight_rows = 8 * pitch;
  float acc[2][kColumns][4] = {};
  // Multiplies what has come while what comes after it is on its way. (A thread cannot wait for some of its
  // loads: where all have one counter, it waits for all. So the next are made when these have come. A power's
  // first bit, which is 0, goes into their addresses, so that they are not made earlier.)
  auto multiply = [&](const Fp4Piece& piece, Fp4Piece& other) {
    uint32_t powers[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      powers[i][0] = fp4_power(piece.scales[i], low), powers[i][1] = fp4_power(piece.scales[i], high);
    }
    fetch(other, powers[0][0] >> 31);
    const int x_at = my_x + step * (kFp4Step * 2);
    static_assert(kColumns == 3);
    if (columns == 1) {
      multiply_item_step<1>(acc, piece.codes, powers, x_at, eight_rows);
    } else if (columns == 2) {
      multiply_item_step<2>(acc, piece.codes, powers, x_at, eight_rows);
    } else {
      multiply_item_step<3>(acc, piece.codes, powers, x_at, eight_rows);
    }
  };
  // A lane has sums of row g of each of the four groups, and of columns 2 t and 2 t + 1 of each eight. Each
  // warp finishes a quarter of an item: two groups of every second column.
  const int own_half = warp / 2, own_column = warp % 2;
  auto place = [&](int quarter, int of_warp, int c) {
    return sums + ((quarter * kTeamWarps + of_warp) * (p.tile_rows / 8) + c) * 32 + lane;
  };
  bool has_summed = false;
  auto finish = [&] {
    if (has_summed) sync_named(empty, 2 * kTeamWarps * 32);
    has_summed = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c >= columns) break;
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float(&of)[4] = acc[quarter / 2][c];
        *place(quarter, warp, c) = {of[quarter % 2], of[2 + quarter % 2]};
      }
    }
    const int row = first_row(item) + g + behind(2 * own_half), up = behind(1);
    float bias_lo = 0.0f, bias_hi = 0.0f;
    if (p.bias != nullptr) {
      const int64_t of_expert = static_cast<int64_t>(expert) * p.n;
      const bf16* const bias = static_cast<const bf16*>(p.bias) + of_expert + row;
      bias_lo = to_float(bias[0]), bias_hi = to_float(bias[up]);
    }
    sync_named(full, kTeamWarps * 32);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c >= columns) break;
      float lo = bias_lo, hi = bias_hi;
#pragma unroll
      for (int w = 0; w < kTeamWarps; ++w) {
        const float2 part = *place(warp, w, c);
        lo += part.x, hi += part.y;
      }
      const int token = c * 8 + t * 2 + own_column;
      if (token >= count) continue;
      const int64_t pair = first_pair + token;
      bf16* const to = static_cast<bf16*>(p.out) + pair * (kGated ? p.n / 2 : p.n) + row;
      if constexpr (kGated) {
        to[0] = from_float<bf16>(gated(p.gate, lo, hi));
      } else {
        to[0] = from_float<bf16>(lo), to[up] = from_float<bf16>(hi);
      }
    }
    arrive_named(empty, 2 * kTeamWarps * 32);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][c][i] = 0.0f;
      }
    }
  };
  // Multiplies, and returns whether that was the last of all. (Each of the two pieces has this code of its
  // own: where registers that are being loaded are moved, the loads are waited for.)
  auto advance = [&](const Fp4Piece& piece, Fp4Piece& other) {
    multiply(piece, other);
    if (++step < end) return false;
    step = begin;
    finish();
    item += kTeams;
    while (is_tile_done()) {
      if (tile == last_tile) return true;
      next_rows();
    }
    return false;
  };
#pragma unroll 1
  while (!advance(now, later) && !advance(later, now)) {
  }
}

}  // namespace trtspec
