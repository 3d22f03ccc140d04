// Products, as Python sees them.
#include "bindings.cuh"

namespace {

using namespace bindings;
using trtspec::Epilogue;
using trtspec::LinearParams;

void run_fp8(Epilogue epilogue, const LinearParams& p, const TensorView& x) {
  check(p.rows <= trtspec::kMaxFp8Rows && p.k % 64 == 0, "FP8: at most 8 rows, inputs by 64");
  check(x.dtype().code == kDLBfloat && p.x1 == nullptr, "FP8 weights are for one bfloat16 input");
  check(p.groups == 1 || p.group % 64 == 0, "groups must be multiples of 64");
  check(p.groups == 1 ? trtspec::launch_fp8_linear<false>(epilogue, p, stream_of(x))
                      : trtspec::launch_fp8_linear<true>(epilogue, p, stream_of(x)));
}

void run_four_bits(Epilogue epilogue, const LinearParams& p, const TensorView& x) {
  check(p.rows <= trtspec::kMaxFourBitRows && p.n % 16 == 0, "4 bits: at most 16 rows, outputs by 16");
  check(x.dtype().code == kDLBfloat && p.x1 == nullptr, "weights of 4 bits are for one bfloat16 input");
  check(by_form(p.record, [&](auto form) {
    return trtspec::launch_four_bits<form.value>(epilogue, p, stream_of(x));
  }));
}

void run(Epilogue epilogue, const LinearParams& p, const TensorView& x) {
  check(p.rows <= trtspec::kMaxLinearRows, "at most 256 rows");
  check(p.k % 32 == 0 && p.k_split % 32 == 0, "input sizes must be multiples of 32");
  check(p.k_split == p.k || p.k_split * 2 == p.k, "two inputs must be of one size");
  if (p.rows == 0) return;
  if (p.record != 0) return run_four_bits(epilogue, p, x);
  if (p.scales != nullptr) return run_fp8(epilogue, p, x);
  by_half_type(x, [&](auto type) {
    return trtspec::launch_linear<decltype(type)>(epilogue, p, stream_of(x));
  });
}

// [n / 8, k / 128, bytes], and of floats a scale for each row.
void set_four_bits(LinearParams& p, const TensorView& weight, const Optional<TensorView>& scales) {
  p.weight = weight.data_ptr(), p.record = static_cast<int>(weight.size(2));
  p.n = static_cast<int>(weight.size(0)) * 8;
  check(is_dense(weight) && is_aligned(p.weight) && weight.dtype().bits == 8,
        "records of bytes in one piece, by 16 of them");
  p.scales = row_scales(p.record, scales, p.n);
}

// ids: rows of a table x0 that the product reads, int32 or int64; none: x0 has them itself.
LinearParams inputs(const TensorView& x0, const Optional<TensorView>& ids, const Optional<TensorView>& x1,
                    const Optional<TensorView>& norm0, const Optional<TensorView>& norm1,
                    double eps, double offset, const TensorView& weight,
                    const Optional<TensorView>& scales, int64_t group,
                    const Optional<TensorView>& bias, const TensorView& out) {
  LinearParams p = {};
  p.x0 = x0.data_ptr(), p.x0_stride = x0.stride(0);
  p.k_split = static_cast<int>(x0.size(1));
  p.k = p.k_split, p.rows = static_cast<int>(x0.size(0));
  if (ids.has_value()) {
    const TensorView& of = ids.value();
    p.ids = of.data_ptr(), p.has_wide_ids = of.dtype().bits == 64, p.table_rows = p.rows;
    p.rows = static_cast<int>(of.size(0));
    check(is_dense(of) && (p.has_wide_ids || of.dtype().bits == 32), "ids in int32 or int64");
    check(x1.has_value() && norm1.has_value() && !scales.has_value(), "ids are for two normed inputs");
  }
  if (x1.has_value()) {
    p.x1 = x1.value().data_ptr(), p.x1_stride = x1.value().stride(0);
    p.k += static_cast<int>(x1.value().size(1));
    check(x1.value().size(0) == p.rows, "both inputs need the same rows");
  }
  p.norm0 = data(norm0), p.norm1 = data(norm1), p.eps = static_cast<float>(eps);
  p.offset = static_cast<float>(offset);
  p.weight = weight.data_ptr(), p.bias = data(bias);
  p.n = static_cast<int>(weight.size(0));
  p.out = out.data_ptr(), p.out_stride = out.stride(0);
  const bool has_records = weight.ndim() == 3;
  check(weight.size(1) * (has_records ? trtspec::kFourBitStep : 1) == p.k,
        "the weight's columns must be the inputs'");
  if (has_records) {
    set_four_bits(p, weight, scales);
    return p;
  }
  check(scales.has_value() == (weight.dtype().bits == 8), "FP8 weights have scales, no others");
  if (scales.has_value()) {
    const TensorView& of = scales.value();
    p.scales = static_cast<const float*>(of.data_ptr());
    p.group = static_cast<int>(group), p.groups = static_cast<int>(of.size(1));
    check(is_dense(of) && of.size(0) == p.n && (p.k + group - 1) / group == p.groups,
          "a scale for each group of each row");
  }
  return p;
}

// ids: as of `inputs`.
void linear(TensorView x0, Optional<TensorView> ids, Optional<TensorView> x1, Optional<TensorView> norm0,
            Optional<TensorView> norm1, double eps, double offset, TensorView weight,
            Optional<TensorView> scales, int64_t group, Optional<TensorView> bias,
            Optional<TensorView> residual, TensorView out, Optional<TensorView> copy) {
  LinearParams p = inputs(x0, ids, x1, norm0, norm1, eps, offset, weight, scales, group, bias, out);
  if (residual.has_value()) {
    check(!norm0.has_value(), "a residual and a norm in one product are not there");
    p.residual = residual.value().data_ptr(), p.residual_stride = residual.value().stride(0);
  }
  if (copy.has_value()) {
    check(residual.has_value(), "only a sum with a residual has a copy");
    check(copy.value().size(0) == p.rows && copy.value().size(1) == p.n, "room for the copy");
    p.copy = copy.value().data_ptr(), p.copy_stride = copy.value().stride(0);
  }
  run(residual.has_value() ? Epilogue::kResidual : Epilogue::kPlain, p, x0);
}

void linear_gated(TensorView x, Optional<TensorView> norm, double eps, double offset,
                  TensorView weight, Optional<TensorView> scales, int64_t group,
                  Optional<TensorView> bias, bool is_gelu, TensorView out) {
  LinearParams p = inputs(x, {}, {}, norm, {}, eps, offset, weight, scales, group, bias, out);
  p.is_gelu = is_gelu;
  run(Epilogue::kGated, p, x);
}

// ids: as of `inputs`. q_norm, k_norm: [dim] of heads, both or none.
void linear_rope(TensorView x0, Optional<TensorView> ids, Optional<TensorView> x1, Optional<TensorView> norm0,
                 Optional<TensorView> norm1, double eps, double offset, TensorView weight,
                 Optional<TensorView> scales, int64_t group, Optional<TensorView> bias,
                 TensorView cos_sin, TensorView positions, TensorView slots, int64_t scratch_slot,
                 TensorView k_cache, TensorView v_cache, int64_t q_heads, bool keeps_finite,
                 Optional<TensorView> q_norm, Optional<TensorView> k_norm, double head_eps, double head_offset,
                 TensorView out) {
  LinearParams p = inputs(x0, ids, x1, norm0, norm1, eps, offset, weight, scales, group, bias, out);
  p.cos_sin = static_cast<const float*>(cos_sin.data_ptr());
  p.positions = static_cast<const int64_t*>(positions.data_ptr());
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.scratch_slot = scratch_slot;
  p.k_cache = k_cache.data_ptr(), p.v_cache = v_cache.data_ptr();
  p.k_slot_stride = k_cache.stride(0), p.k_head_stride = k_cache.stride(1);
  p.v_slot_stride = v_cache.stride(0), p.v_head_stride = v_cache.stride(1);
  p.q_heads = static_cast<int>(q_heads), p.kv_heads = static_cast<int>(k_cache.size(1));
  p.dim = static_cast<int>(k_cache.size(2)), p.keeps_finite = keeps_finite;
  check(p.dim % 16 == 0 && p.n == (p.q_heads + 2 * p.kv_heads) * p.dim, "heads and head_dim");
  check(q_norm.has_value() == k_norm.has_value(), "norms of queries and of keys, or none");
  if (!q_norm.has_value()) return run(Epilogue::kRope, p, x0);
  check(!scales.has_value() && p.record == 0, "norms of heads are for floats");
  check(norm0.has_value() && !norm1.has_value(), "norms of heads are behind a norm of one input");
  check(q_norm.value().numel() == p.dim && k_norm.value().numel() == p.dim, "norms of heads by head_dim");
  p.q_norm = data(q_norm), p.k_norm = data(k_norm);
  p.head_eps = static_cast<float>(head_eps), p.head_offset = static_cast<float>(head_offset);
  run(Epilogue::kNormedRope, p, x0);
}

// keys: int64 [> rows], zero before and after. tokens: int32 [rows].
void largest_output(TensorView x, Optional<TensorView> norm, double eps, double offset, TensorView weight,
                    Optional<TensorView> d2t, TensorView keys, TensorView tokens) {
  const LinearParams p = inputs(x, {}, {}, norm, {}, eps, offset, weight, {}, 0, {}, x);
  check(0 < p.rows && p.rows <= trtspec::kNarrowRows, "1 to 8 rows");
  check(p.k % 32 == 0 && p.k <= trtspec::kMaxNarrow, "input sizes by 32, at most 1,024");
  check(is_dense(keys) && keys.dtype().bits == 64 && keys.size(0) > p.rows, "a key for each row, and one");
  check(is_dense(tokens) && tokens.dtype().bits == 32 && tokens.size(0) == p.rows, "room for the tokens");
  if (d2t.has_value()) {
    const TensorView& of = d2t.value();
    check(is_dense(of) && of.dtype().bits == 64 && of.size(0) == p.n, "an offset for each output, int64");
  }
  const trtspec::LargestParams largest = {static_cast<unsigned long long*>(keys.data_ptr()),
                                          static_cast<const int64_t*>(data(d2t)),
                                          static_cast<int*>(tokens.data_ptr())};
  by_half_type(x, [&](auto type) {
    return trtspec::launch_largest<decltype(type)>(p, largest, stream_of(x));
  });
}

// The parameters of a product of more rows. out [rows, n], with `adds` what the product is added to; room for x
// arranged [tiles, 32 | 64 | 128, bytes].
trtspec::WeightTileParams tile_params(const TensorView& x, const TensorView& room, const TensorView& out, bool adds) {
  trtspec::WeightTileParams p = {};
  p.x = x.data_ptr(), p.x_stride = x.stride(0), p.arranged = static_cast<char*>(room.data_ptr());
  p.out = static_cast<trtspec::bf16*>(out.data_ptr()), p.out_stride = out.stride(0), p.adds = adds;
  p.rows = static_cast<int>(x.size(0)), p.n = static_cast<int>(out.size(1)), p.k = static_cast<int>(x.size(1));
  check(x.dtype().code == kDLBfloat && is_aligned(p.x) && p.x_stride % 8 == 0 && x.stride(1) == 1,
        "rows in bfloat16, by 16 bytes");
  check(p.k % trtspec::kWeightStep == 0 && p.n % 4 == 0, "columns by 128, outputs by 4");
  check(is_dense(room) && room.size(0) * room.size(1) >= p.rows && room.dtype().bits == 8 &&
            room.size(2) == p.k / trtspec::kWeightStep * trtspec::kArrangedStep && is_aligned(p.arranged),
        "room for the tiles of rows, by 16 bytes");
  check(out.size(0) == p.rows && out.dtype().code == kDLBfloat && out.stride(1) == 1 && p.out_stride % 4 == 0 &&
            reinterpret_cast<uintptr_t>(p.out) % 8 == 0,
        "a result in bfloat16, by 8 bytes");
  return p;
}

void four_bit_tiles(TensorView x, TensorView weight, Optional<TensorView> scales, TensorView room, TensorView out,
                    bool adds) {
  LinearParams of = {};
  set_four_bits(of, weight, scales);
  trtspec::WeightTileParams p = tile_params(x, room, out, adds);
  check(weight.size(1) * trtspec::kWeightStep == p.k && of.n == p.n, "the weight must be of this size");
  if (p.rows == 0) return;
  p.scales = of.scales;
  check(by_form(of.record, [&](auto form) {
    return trtspec::launch_four_bit_tiles<form.value>(p, of.weight, static_cast<int>(room.size(1)), stream_of(x));
  }));
}

// weight [n, k] e4m3; scales [n, groups] float32, each of `group` columns.
void fp8_tiles(TensorView x, TensorView weight, TensorView scales, int64_t group, TensorView room, TensorView out,
               bool adds) {
  trtspec::WeightTileParams p = tile_params(x, room, out, adds);
  p.scales = static_cast<const float*>(scales.data_ptr());
  check(is_dense(weight) && is_aligned(weight.data_ptr()) && weight.dtype().bits == 8 && weight.size(0) == p.n &&
            weight.size(1) == p.k,
        "a weight of this size, by 16 bytes");
  check(group > 0 && group % trtspec::kWeightStep == 0, "groups of columns by 128");
  p.group = static_cast<int>(group / trtspec::kWeightStep);
  check(is_dense(scales) && scales.dtype().bits == 32 && scales.size(0) == p.n &&
            scales.size(1) == (p.k + group - 1) / group,
        "a scale in float32 for each group");
  if (p.rows == 0) return;
  check(trtspec::launch_fp8_tiles(p, weight.data_ptr(), static_cast<int>(room.size(1)), stream_of(x)));
}

void widen_four_bits(TensorView weight, Optional<TensorView> scales, TensorView out) {
  LinearParams p = {};
  p.k = static_cast<int>(weight.size(1)) * trtspec::kFourBitStep;
  set_four_bits(p, weight, scales);
  check(is_dense(out) && out.size(0) == p.n && out.size(1) == p.k && out.dtype().code == kDLBfloat,
        "room for the weight in bfloat16");
  p.out = out.data_ptr();
  check(by_form(p.record,
                [&](auto form) { return trtspec::launch_widen<form.value>(p, stream_of(weight)); }));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(largest_output, largest_output);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_gated, linear_gated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_rope, linear_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(four_bit_tiles, four_bit_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_tiles, fp8_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen_four_bits, widen_four_bits);
