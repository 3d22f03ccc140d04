// Attention, as Python sees them.
#include "bindings.cuh"

namespace {

using namespace bindings;

// mixed [T, C], gates [T, 2 * Hv], z [T, Hv * 128], conv [4, C] float32, a_log, dt_bias [Hv] float32, norm
// [128], matrices [S, Hv, 128, 128] float32, kept_mixed [S, R, C], kept_gates [S, R, 2 * Hv], slots, firsts,
// taken_in [G] int64, out [T, Hv * 128].
void delta_generations(TensorView mixed, TensorView gates, TensorView z, TensorView conv,
                       TensorView a_log, TensorView dt_bias, TensorView norm, double eps,
                       double length_eps, TensorView matrices, TensorView kept_mixed,
                       TensorView kept_gates, TensorView slots, TensorView firsts,
                       TensorView taken_in, TensorView out) {
  trtspec::DeltaParams p = {};
  p.mixed = mixed.data_ptr(), p.mixed_row = mixed.stride(0);
  p.gates = gates.data_ptr(), p.gates_row = gates.stride(0);
  p.z = z.data_ptr(), p.z_row = z.stride(0);
  p.conv = static_cast<const float*>(conv.data_ptr());
  p.a_log = static_cast<const float*>(a_log.data_ptr());
  p.dt_bias = static_cast<const float*>(dt_bias.data_ptr());
  p.norm = norm.data_ptr(), p.eps = static_cast<float>(eps);
  p.length_eps = static_cast<float>(length_eps);
  p.matrices = static_cast<float*>(matrices.data_ptr());
  p.kept_mixed = kept_mixed.data_ptr(), p.kept_gates = kept_gates.data_ptr();
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.firsts = static_cast<const int64_t*>(firsts.data_ptr());
  p.taken_in = static_cast<const int64_t*>(taken_in.data_ptr());
  p.out = out.data_ptr();
  constexpr int kSize = trtspec::kDeltaSize;
  p.requests = static_cast<int>(slots.size(0)), p.heads = static_cast<int>(matrices.size(1));
  p.key_heads = static_cast<int>((mixed.size(1) / kSize - p.heads) / 2);
  p.places = static_cast<int>(kept_mixed.size(1));
  if (p.requests == 0) return;
  p.own = static_cast<int>(mixed.size(0)) / p.requests;
  check(matrices.size(2) == kSize && matrices.size(3) == kSize, "heads of 128 keys and values");
  check(conv.size(0) == trtspec::kDeltaTaps && conv.size(1) == mixed.size(1), "four taps");
  check(mixed.size(1) == (2 * p.key_heads + p.heads) * kSize && p.key_heads > 0 &&
            p.heads % p.key_heads == 0,
        "channels of all heads");
  check((p.places - trtspec::kDeltaTaps) / 2 + p.own <= trtspec::kDeltaRows, "at most 40 rows");
  check(mixed.size(0) == p.own * p.requests && out.size(0) == mixed.size(0), "rows of each request");
  check(is_dense(mixed, 1) && is_dense(gates, 1) && is_dense(z, 1), "columns in one piece");
  check(is_dense(conv) && is_dense(matrices) && is_dense(kept_mixed) && is_dense(kept_gates) &&
            is_dense(slots) && is_dense(firsts) && is_dense(taken_in) && is_dense(out),
        "tensors in one piece");
  check(is_aligned(p.mixed) && is_aligned(p.z) && is_aligned(p.kept_mixed) && is_aligned(p.norm) &&
            is_aligned(p.matrices) && p.mixed_row % 8 == 0 && p.z_row % 8 == 0,
        "rows must begin at 16 bytes");
  by_half_type(mixed, [&](auto type) {
    return trtspec::launch_delta_generations<decltype(type)>(p, stream_of(mixed));
  });
}

// q, out [T, Hq, D], of each request `rows` rows, or with starts, [B+1] int32, at most so many; k, v
// [slots, Hkv, D]; tables [B, M] int32, positions [T] int64; sinks [Hq]. size, warps: as of ClusterShape.
// part_rows, is_beside: as of AttendParams.
void attend_clusters(TensorView q, TensorView k, TensorView v, TensorView tables,
                     TensorView positions, Optional<TensorView> starts, int64_t rows, int64_t part_rows,
                     int64_t page_size, int64_t window, double scale, Optional<TensorView> sinks,
                     int64_t size, int64_t warps, bool is_beside, TensorView out) {
  trtspec::AttendParams p = {};
  p.is_beside = is_beside;
  p.q = q.data_ptr(), p.q_row = q.stride(0), p.q_head = q.stride(1);
  p.out = out.data_ptr(), p.out_row = out.stride(0), p.out_head = out.stride(1);
  p.k = k.data_ptr(), p.k_row = static_cast<int>(k.stride(0)), p.k_head = k.stride(1);
  p.v = v.data_ptr(), p.v_row = static_cast<int>(v.stride(0)), p.v_head = v.stride(1);
  p.tables = static_cast<const int*>(tables.data_ptr()), p.table_row = tables.stride(0);
  p.table_width = static_cast<int>(tables.size(1)), p.page_size = static_cast<int>(page_size);
  p.positions = static_cast<const int64_t*>(positions.data_ptr());
  p.starts = static_cast<const int*>(data(starts));
  p.requests = static_cast<int>(tables.size(0)), p.rows = static_cast<int>(rows);
  p.kv_heads = static_cast<int>(k.size(1));
  p.per_kv = static_cast<int>(q.size(1)) / p.kv_heads, p.window = static_cast<int>(window);
  p.scale = static_cast<float>(scale), p.sinks = data(sinks);
  check(!sinks.has_value() || (sinks.value().dtype() == q.dtype() && is_dense(sinks.value())),
        "sinks of the queries' type");
  check(!sinks.has_value() || sinks.value().numel() == q.size(1), "a sink for each query head");
  check(p.per_kv > 0, "at least as many query heads as KV heads");
  p.kv_inverse = 65536 / p.per_kv + 1, p.part_rows = static_cast<int>(part_rows);
  check(scale > 0, "a positive scale");
  const int dim = static_cast<int>(q.size(2));
  check(dim == 64 || dim == 128 || dim == 256, "heads of 64, 128 or 256");
  check(p.part_rows > 0 && p.part_rows * p.per_kv <= (dim == 256 ? trtspec::kMaxWidePairs : trtspec::kMaxPairs),
        "1 to 32 pairs of a row and a head in a part, 16 with heads of 256");
  check(page_size % trtspec::kTileKeys == 0, "pages must be multiples of 16 keys");
  check(positions.size(0) == q.size(0) && is_dense(positions), "a position for each row");
  check(warps == 4 || warps == 8, "4 or 8 warps");
  if (starts.has_value()) {
    const TensorView& of = starts.value();
    check(is_dense(of) && of.size(0) == p.requests + 1, "the first row of each request");
  } else {
    check(q.size(0) == p.requests * rows, "rows of each request");
  }
  check(is_dense(q, 2) && is_dense(k, 2) && is_dense(v, 2) && is_dense(out, 2), "heads in one piece");
  if (p.requests == 0) return;
  const trtspec::ClusterShape shape = {static_cast<int>(size), static_cast<int>(warps)};
  by_half_type(q, [&](auto type) {
    return trtspec::launch_attend_clusters<decltype(type)>(p, dim, shape, stream_of(q));
  });
}

trtspec::PromptTensor prompt_tensor(const TensorView& x) {
  check(is_dense(x, 2) && is_aligned(x.data_ptr()), "heads in one piece that begin at 16 bytes");
  const int64_t head = x.size(1) > 1 ? x.stride(1) : x.size(2);  // torch may have any for one head
  check(x.stride(0) % 8 == 0 && head % 8 == 0, "heads must begin at 16 bytes");
  return {x.data_ptr(), x.size(0), x.size(1), x.stride(0), head};
}

// As attend_clusters, of contexts: tiles [N, 3] int32, of at most tile_rows rows each. Keys are cut into
// at most `parts` parts of at least part_tiles tiles of 128 keys. With several their sums go to
// acc [N * Hkv * parts, 128, D] and stats [N * Hkv * parts, 128, 2] float32.
void attend_prompts(TensorView q, TensorView k, TensorView v, TensorView tables,
                    TensorView positions, TensorView tiles, int64_t tile_rows, int64_t page_size,
                    int64_t window, double scale, Optional<TensorView> sinks, int64_t parts,
                    int64_t part_tiles, TensorView acc, TensorView stats, TensorView out) {
  const int num_tiles = static_cast<int>(tiles.size(0)), dim = static_cast<int>(q.size(2));
  if (num_tiles == 0) return;
  check(k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0, "query heads for each KV head");
  check(k.dtype() == q.dtype() && v.dtype() == q.dtype(), "keys and values of the queries' type");
  const trtspec::PromptTensors tensors = {prompt_tensor(q), prompt_tensor(k), prompt_tensor(v)};
  trtspec::PromptParams p = {};
  p.out = out.data_ptr(), p.out_row = out.stride(0), p.out_head = out.stride(1);
  p.tables = static_cast<const int*>(tables.data_ptr()), p.table_row = tables.stride(0);
  p.page_size = static_cast<int>(page_size);
  p.box_keys = std::min(p.page_size, trtspec::kPromptKeys);
  p.positions = static_cast<const int64_t*>(positions.data_ptr());
  p.tiles = static_cast<const int*>(tiles.data_ptr()), p.num_tiles = num_tiles;
  p.tile_rows = static_cast<int>(tile_rows), p.kv_heads = static_cast<int>(k.size(1));
  p.per_kv = static_cast<int>(q.size(1)) / p.kv_heads, p.window = static_cast<int>(window);
  p.scale = static_cast<float>(scale), p.sinks = data(sinks);
  p.parts = {static_cast<int>(parts), static_cast<int>(part_tiles),
             static_cast<float*>(acc.data_ptr()), static_cast<float2*>(stats.data_ptr())};
  const int64_t pairs = parts > 1 ? num_tiles * p.kv_heads * parts * trtspec::kPromptPairs : 0;
  check(acc.numel() >= pairs * dim && stats.numel() >= pairs * 2, "room for the parts' sums");
  check(is_dense(acc) && is_dense(stats) && parts > 0 && part_tiles > 0, "parts in one piece");
  check(dim == 64 || dim == 128, "heads of 64 or 128");
  check(tile_rows > 0 && tile_rows * p.per_kv <= trtspec::kPromptPairs, "at most 128 pairs of a tile");
  check(page_size >= 8 && (page_size & (page_size - 1)) == 0, "pages of a power of two keys, 8 or more");
  check(scale > 0, "a positive scale");
  check(positions.size(0) == q.size(0) && is_dense(positions), "a position for each row");
  check(is_dense(tiles) && tiles.size(1) == 3 && is_dense(tables, 1), "tiles and tables in one piece");
  check(is_dense(out, 2) && out.stride(0) % 2 == 0 && out.stride(1) % 2 == 0, "pairs of outputs");
  check(!sinks.has_value() || sinks.value().dtype() == q.dtype(), "sinks of the queries' type");
  by_half_type(q, [&](auto type) {
    return trtspec::launch_attend_prompts<decltype(type)>(p, tensors, dim, stream_of(q));
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_clusters, attend_clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_prompts, attend_prompts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(delta_generations, delta_generations);
