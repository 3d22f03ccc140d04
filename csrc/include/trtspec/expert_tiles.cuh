// One product of a mixture of experts whose weights have 4 bits, of rows sorted by expert. Weights are the
// 16-row operand of the tensor cores and become bf16 in registers; rows of x are columns, and rest in shared
// memory.
// `expert_codes.cuh` has the forms of weights.
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

#include "expert_codes.cuh"
#include "gate.cuh"
#include "hopper.cuh"
#include "skinny_linear.cuh"

namespace trtspec {

constexpr int kTeams = 3, kTeamWarps = 4, kTiledThreads = kTeams * kTeamWarps * 32;
constexpr int kItemRows = 8 * kCodeGroups;  // outputs of an item
constexpr int kTiledExperts = 1024;

struct TiledExpertParams {
  const void* x;
  int64_t x_stride;
  const int64_t* rows;  // row of x of each pair, null: its own
  const int* ends;      // [experts], where each one's pairs end
  int experts;          // at most kTiledExperts
  const void* weight;   // as `expert_codes.cuh` says
  const void* scales;   // of MXFP4; of records the weight
  int n, k;             // n by 32; k by 64, of kTeamWarps steps at least
  const float* row_scales;  // [experts, n], of NVFP4
  const void* bias;     // [experts, n], null: none
  void* out;            // [pairs, n]; gated [pairs, n / 2]
  int tile_rows;        // rows of a tile: by 8, up to those of kEights
  Gate gate;
};

// Bytes between rows of x in shared memory, so that banks do not collide.
__host__ __device__ constexpr int tile_pitch(int k) { return fp4_steps(k) * kFp4Step * 2 + 64; }

__host__ __device__ constexpr int team_sums(int rows) { return kTeamWarps * kItemRows * rows * 4; }

__host__ __device__ constexpr int tile_shared(int k, int rows) {
  return rows * tile_pitch(k) + kTeams * team_sums(rows);
}

__device__ inline uint4 load_once(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
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

template <typename Codes, bool kGated>
__global__ void __launch_bounds__(kTiledThreads)
    expert_tiles(const __grid_constant__ TiledExpertParams p) {
  using Piece = typename Codes::Piece;
  constexpr int kEights = Codes::kEights;
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
  // need no branch.
  int next_tile = first_tile, next_item = first_item, next_step = begin;
  int entered_tile = -1, entered = 0;  // the tile of what is fetched, and its expert
  const int own_steps = Codes::steps_with_codes(p.k, t);
  const char *codes_at = nullptr, *scales_at = nullptr;
  const int64_t code_row = Codes::code_row(p.k), scale_row = Codes::scale_row(p.k);
  auto enter = [&] {
    while (next_item >= items_a_tile) next_item -= items_a_tile, ++next_tile;
    if (next_tile > last_tile || (next_tile == last_tile && next_item > last_item)) {
      next_tile = last_tile, next_item = last_item;
    }
    if (entered_tile != next_tile) entered_tile = next_tile, entered = expert_of(next_tile);
    const int64_t row = static_cast<int64_t>(entered) * p.n + first_row(next_item);
    codes_at = static_cast<const char*>(p.weight) + row * code_row + Codes::code_place(g, t);
    scales_at = static_cast<const char*>(p.scales) + row * scale_row + Codes::scale_place(g);
  };
  auto fetch = [&](Piece& piece, int zero) {
    const char* const codes = codes_at + min(next_step, own_steps - 1) * Codes::kStepCodes + zero;
    const char* const scales = scales_at + next_step * Codes::kStepScales + zero;
#pragma unroll
    for (int i = 0; i < kCodeGroups; ++i) {
      piece.codes[i] = load_once(codes + behind(i) * code_row);
      const char* const of_row = scales + behind(i) * scale_row;
      piece.scales[i] = __ldg(reinterpret_cast<const typename Codes::Scales*>(of_row));
    }
    if (++next_step == end) {
      next_step = begin, next_item += kTeams;
      enter();
    }
  };
  enter();
  Piece now, later;
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
      const int column = piece / 16 * kFp4Step + Codes::column(piece % 4, piece / 4 % 4);
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

  const Codes codes(t);
  const int my_x = kept(shared_address(shared) + g * pitch + t * 16), eight_rows = 8 * pitch;
  float acc[2][kEights][4] = {};
  // Multiplies what has come while what comes after it is on its way. (A thread cannot wait for some of its
  // loads: where all have one counter, it waits for all. So the next are made when these have come. A bit of
  // theirs that is 0 goes into the others' addresses, so that they are not made earlier.)
  auto multiply = [&](const Piece& piece, Piece& other) {
    const auto multipliers = codes.multipliers(piece);
    fetch(other, Codes::zero_of(piece, multipliers));
    const int x_at = my_x + step * (kFp4Step * 2);
    static_assert(kEights == 2 || kEights == 3);
    if (columns == 1) {
      codes.template multiply<1>(acc, piece, multipliers, x_at, eight_rows);
    } else if (columns == 2) {
      codes.template multiply<2>(acc, piece, multipliers, x_at, eight_rows);
    } else if constexpr (kEights == 3) {
      codes.template multiply<3>(acc, piece, multipliers, x_at, eight_rows);
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
    for (int c = 0; c < kEights; ++c) {
      if (c >= columns) break;
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float(&of)[4] = acc[quarter / 2][c];
        *place(quarter, warp, c) = {of[quarter % 2], of[2 + quarter % 2]};
      }
    }
    const int row = first_row(item) + g + behind(2 * own_half), up = behind(1);
    const int64_t of_expert = static_cast<int64_t>(expert) * p.n + row;
    float bias_lo = 0.0f, bias_hi = 0.0f, scale_lo = 1.0f, scale_hi = 1.0f;
    if (p.bias != nullptr) {
      const bf16* const bias = static_cast<const bf16*>(p.bias) + of_expert;
      bias_lo = to_float(bias[0]), bias_hi = to_float(bias[up]);
    }
    if constexpr (Codes::kHasRowScales) {
      scale_lo = p.row_scales[of_expert], scale_hi = p.row_scales[of_expert + up];
    }
    sync_named(full, kTeamWarps * 32);
#pragma unroll
    for (int c = 0; c < kEights; ++c) {
      if (c >= columns) break;
      float lo = 0.0f, hi = 0.0f;
#pragma unroll
      for (int w = 0; w < kTeamWarps; ++w) {
        const float2 part = *place(warp, w, c);
        lo += part.x, hi += part.y;
      }
      lo = fmaf(lo, scale_lo, bias_lo), hi = fmaf(hi, scale_hi, bias_hi);
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
      for (int c = 0; c < kEights; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][c][i] = 0.0f;
      }
    }
  };
  // Multiplies, and returns whether that was the last of all. (Each of the two pieces has this code of its
  // own: where registers that are being loaded are moved, the loads are waited for.)
  auto advance = [&](const Piece& piece, Piece& other) {
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
