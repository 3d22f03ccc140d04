// Attention kernels of csrc on a CPU, compared with float64: attention FIRST_SEED SEEDS
// Sizes, lengths, windows, pages, orders of warps and of copies are random. It prints a line for each that is wrong.
#include <memory>
#include <numeric>

#include "trtspec/narrow_attention.cuh"
#include "trtspec/wide_attention.cuh"

using namespace trtspec;

// What is attended: requests with pages of their own.
template <typename T>
struct Case {
  std::mt19937 random;
  int dim, kv_heads, per_kv, rows, part_rows, requests, page_size, window;
  bool is_packed, has_sinks, is_beside;
  std::vector<int> lengths, starts, pages;
  int width;
  std::vector<T> q, k, v, out, sinks;
  std::vector<int64_t> positions;

  int any(int from, int to) { return from + static_cast<int>(random() % (to - from + 1)); }
  T number() { return from_float<T>(std::normal_distribution<float>()(random)); }
  int first_of(int request, int key) const {
    const int slot = pages[request * width + key / page_size] * page_size + key % page_size;
    return slot * kv_heads * dim;
  }

  Case(unsigned seed, int dim, int most_pairs, int keys_at_once) : random(seed), dim(dim) {
    kv_heads = any(1, 2), per_kv = any(1, most_pairs / 2), part_rows = any(1, most_pairs / per_kv);
    rows = part_rows + (any(0, 2) == 0 ? any(0, 4) : 0), requests = any(1, 2), page_size = 16 << any(0, 2);
    window = any(0, 3) == 0 ? any(1, 200) : 0;
    is_packed = any(0, 2) == 0, has_sinks = any(0, 2) == 0, is_beside = any(0, 5) == 0;
    starts = {0};
    for (int request = 0; request < requests; ++request) {
      const int kind = any(0, 15);
      lengths.push_back(kind == 0 ? 33 * keys_at_once + any(0, 99) : kind < 5 ? any(0, 70) : any(0, 7 * keys_at_once));
      starts.push_back(starts.back() + (is_packed ? any(0, rows) : rows));
    }
    // A table may end before a request's keys do.
    const int whole = (*std::max_element(lengths.begin(), lengths.end()) + rows) / page_size + any(1, 2);
    width = any(0, 7) == 0 ? any(1, whole) : whole;
    pages.resize(requests * width);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    q.resize(starts.back() * kv_heads * per_kv * dim), out.resize(q.size());
    k.assign(requests * width * page_size * kv_heads * dim, from_float<T>(NAN)), v = k;
    for (T& x : q) x = number();
    for (int i = 0; i < kv_heads * per_kv; ++i) sinks.push_back(number());
    auto& fresh = gpu::run.fresh;
    auto add_fresh = [&](const std::vector<T>& of, size_t first, size_t count) {
      const char* const begin = reinterpret_cast<const char*>(of.data() + first);
      if (!is_beside) fresh.push_back({begin, begin + count * sizeof(T)});
    };
    fresh.clear(), gpu::run.is_late = any(0, 1);
    add_fresh(q, 0, q.size());
    for (int request = 0; request < requests; ++request) {
      const int own = starts[request + 1] - starts[request], end = lengths[request] + own;
      for (int i = lengths[request]; i < end; ++i) positions.push_back(i);
      for (int key = 0; key < min(end, width * page_size); ++key) {
        const int first = first_of(request, key), count = kv_heads * dim;
        for (int i = first; i < first + count; ++i) k[i] = number(), v[i] = number();
        if (key >= lengths[request] - kNewKeys) add_fresh(k, first, count), add_fresh(v, first, count);
      }
    }
  }

  AttendParams params() {
    AttendParams p = {};
    p.q = q.data(), p.out = out.data(), p.q_head = p.out_head = dim, p.q_row = p.out_row = kv_heads * per_kv * dim;
    p.k = k.data(), p.v = v.data(), p.k_head = p.v_head = dim, p.k_row = p.v_row = kv_heads * dim;
    p.tables = pages.data(), p.table_row = p.table_width = width, p.page_size = page_size;
    p.positions = positions.data(), p.starts = is_packed ? starts.data() : nullptr;
    p.requests = requests, p.rows = rows, p.part_rows = part_rows, p.kv_heads = kv_heads, p.per_kv = per_kv;
    p.kv_inverse = 65536 / per_kv + 1, p.window = window, p.sinks = has_sinks ? sinks.data() : nullptr;
    p.scale = 1.4426950408889634f / std::sqrt(static_cast<float>(dim)), p.is_beside = is_beside;
    return p;
  }

  // The largest difference from attention in float64.
  double error() const {
    double largest = 0;
    for (int request = 0; request < requests; ++request) {
      for (int row = starts[request]; row < starts[request + 1]; ++row) {
        for (int head = 0; head < kv_heads * per_kv; ++head) {
          largest = std::max(largest, error_of(request, row, head));
        }
      }
    }
    return largest;
  }

  double error_of(int request, int row, int head) const {
    const int position = positions[row], from = window > 0 ? std::max(position - window + 1, 0) : 0;
    const int before = min(position + 1, width * page_size);
    const size_t at = (static_cast<size_t>(row) * kv_heads * per_kv + head) * dim;
    std::vector<double> weights, sums(dim, 0.0);
    for (int key = from; key < before; ++key) {
      const T* const own = k.data() + first_of(request, key) + head / per_kv * dim;
      double score = 0;
      for (int d = 0; d < dim; ++d) score += static_cast<double>(to_float(q[at + d])) * to_float(own[d]);
      weights.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
    }
    double total = has_sinks ? std::exp(static_cast<double>(to_float(sinks[head]))) : 0.0;
    for (int key = from; key < before; ++key) {
      const T* const own = v.data() + first_of(request, key) + head / per_kv * dim;
      total += weights[key - from];
      for (int d = 0; d < dim; ++d) sums[d] += weights[key - from] * to_float(own[d]);
    }
    double largest = 0;
    for (int d = 0; d < dim; ++d) {
      const double right = before > from ? sums[d] / total : 0.0;
      const double error = std::abs(right - to_float(out[at + d]));
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
    }
    return largest;
  }
};

// Runs a kernel, one cluster after the other.
template <int kSize, int kWarps, typename Kernel>
void launch(Kernel kernel, const AttendParams& p, int shared_bytes, std::mt19937& random) {
  for (int number = 0; number < p.requests * parts_of(p) * p.kv_heads; ++number) {
    gpu::Cluster cluster;
    cluster.live = kSize * kWarps * gpu::kLanes;
    std::vector<std::unique_ptr<gpu::Block>> blocks;
    for (int rank = 0; rank < kSize; ++rank) {
      blocks.push_back(std::make_unique<gpu::Block>(cluster, kWarps, shared_bytes, random()));
      cluster.blocks.push_back(blocks.back().get());
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank) {
      threads.emplace_back([&, rank] { gpu::run_block(*blocks[rank], number * kSize + rank, [&] { kernel(p); }); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

template <typename T, int kDim, int kTiles, int kSize, int kWarps>
bool is_right(unsigned seed) {
  Case<T> given(seed, kDim, kTiles * 16, kWarps * kTileKeys);
  if (given.positions.empty()) return true;
  if constexpr (kDim == 64) {
    launch<kSize, kWarps>(narrow_attention<T, kDim, kTiles, kSize, kWarps>, given.params(),
                          NarrowPlaces<kDim, kTiles, kSize, kWarps>::kBytes, given.random);
  } else {
    launch<kSize, kWarps>(wide_attention<T, kDim, kTiles, kSize, kWarps>, given.params(),
                          WidePlaces<kDim, kTiles, kSize, kWarps>::kBytes, given.random);
  }
  const double error = given.error();
  if (error < 0.02) return true;
  std::printf("heads of %d, %d tiles, %d blocks of %d warps, seed %u: %g apart\n", kDim, kTiles, kSize, kWarps, seed,
              error);
  return false;
}

int main(int count, char** words) {
  if (count != 3) return 2;
  bool is_all_right = true;
  const unsigned first = std::atoi(words[1]);
  for (unsigned seed = first; seed < first + std::atoi(words[2]); ++seed) {
    is_all_right &= is_right<bf16, 64, 1, 1, 4>(seed);
    is_all_right &= is_right<bf16, 64, 2, 2, 8>(seed);
    is_all_right &= is_right<half_t, 64, 1, 16, 4>(seed);
    is_all_right &= is_right<bf16, 128, 2, 1, 4>(seed);
    is_all_right &= is_right<bf16, 128, 1, 8, 8>(seed);
    is_all_right &= is_right<half_t, 256, 1, 2, 4>(seed);
  }
  return is_all_right ? 0 : 1;
}
