// Mixtures of experts, as Python sees them.
#include "bindings.cuh"

namespace {

using namespace bindings;

void check_fp4(const TensorView& weight, const TensorView& scales) {
  const int64_t steps = trtspec::fp4_steps(static_cast<int>(weight.size(2)) * 64);
  check(is_dense(weight) && weight.size(3) == 8 && weight.size(4) == 32, "codes by 8 rows, 64 columns");
  check(is_dense(scales) && scales.size(0) == weight.size(0) && scales.size(1) == weight.size(1) &&
            scales.size(2) == steps && scales.size(3) == 8 && scales.size(4) == 4,
        "scales by 8 rows, 128 columns");
}

trtspec::ExpertParams stacked(const TensorView& ids, const TensorView& weights,
                              const TensorView& weight, const Optional<TensorView>& scales,
                              int64_t group, const Optional<TensorView>& bias) {
  trtspec::ExpertParams p = {};
  p.ids = static_cast<const int64_t*>(ids.data_ptr());
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.rows = static_cast<int>(ids.size(0)), p.choices = static_cast<int>(ids.size(1));
  p.weight = weight.data_ptr(), p.experts = static_cast<int>(weight.size(0));
  const bool is_fp4 = weight.ndim() == 5, has_records = weight.ndim() == 4;
  p.n = static_cast<int>(weight.size(1)) * (is_fp4 || has_records ? 8 : 1);
  p.k = static_cast<int>(weight.size(2)) * (is_fp4 ? 64 : has_records ? trtspec::kFourBitStep : 1);
  check(is_dense(ids) && is_dense(weights) && is_dense(weight), "choices and weights in one piece");
  check(weights.size(0) == p.rows && weights.size(1) == p.choices, "a weight for each choice");
  check(ids.dtype().bits == 64 && weights.dtype().bits == 32, "ids in int64, their weights in float32");
  check(is_aligned(weight.data_ptr()), "experts must be aligned to 16 bytes");
  check(0 < p.rows && p.rows <= trtspec::kExpertRows, "1 to 8 rows");
  check(p.choices <= trtspec::kMaxChoices && p.experts <= trtspec::kMaxExperts,
        "at most 16 choices of 1,024 experts");
  check(p.n % 16 == 0 && p.k % 32 == 0, "experts' outputs by 16, inputs by 32");
  if (has_records) {
    p.scales = p.weight;
    p.row_scales = row_scales(static_cast<int>(weight.size(3)), scales, static_cast<int64_t>(p.experts) * p.n);
  } else {
    check(scales.has_value() == (weight.dtype().bits == 8), "codes have scales, no other weights");
  }
  if (scales.has_value() && !has_records) {
    const TensorView& of = scales.value();
    p.scales = of.data_ptr();
    p.group = static_cast<int>(group), p.groups = static_cast<int>(of.size(2));
    check(p.k % 64 == 0, "inputs by 64");
    if (is_fp4) {
      check_fp4(weight, of);
    } else {
      check(is_dense(of) && of.size(0) == p.experts && of.size(1) == p.n, "scales of each row");
      check((p.groups == 1 || group % 64 == 0) && (p.k + group - 1) / group == p.groups,
            "a scale for each group of each row, groups by 64");
    }
  }
  if (bias.has_value()) {
    const TensorView& of = bias.value();
    p.bias = of.data_ptr();
    check(is_dense(of) && of.size(0) == p.experts && of.size(1) == p.n, "a bias for each output");
  }
  return p;
}

// inner: [rows, choices, I] of the products between. limit: infinity for none. alpha: 0 for none.
void experts(TensorView x, TensorView ids, TensorView weights, TensorView gate_up,
             Optional<TensorView> gate_up_scales, int64_t gate_up_group,
             Optional<TensorView> gate_up_bias, TensorView down, Optional<TensorView> down_scales,
             int64_t down_group, Optional<TensorView> down_bias, bool is_gelu, double limit,
             double alpha, Optional<TensorView> residual, TensorView inner, TensorView out) {
  trtspec::ExpertParams up =
      stacked(ids, weights, gate_up, gate_up_scales, gate_up_group, gate_up_bias);
  trtspec::ExpertParams last = stacked(ids, weights, down, down_scales, down_group, down_bias);
  check(x.size(0) == up.rows && x.size(1) == up.k && last.n == up.k, "rows of the experts' size");
  check(up.n == 2 * last.k && last.experts == up.experts, "gate, up and down of the same experts");
  check(inner.numel() == static_cast<int64_t>(up.rows) * up.choices * last.k && is_dense(inner),
        "room for what is between");
  check(out.size(0) == up.rows && out.size(1) == last.n, "room for the sums");
  up.x = x.data_ptr(), up.x_stride = x.stride(0), up.out = inner.data_ptr();
  up.gate = {is_gelu, static_cast<float>(limit), static_cast<float>(alpha)};
  last.x = inner.data_ptr(), last.out = out.data_ptr(), last.out_stride = out.stride(0);
  if (residual.has_value()) {
    const TensorView& of = residual.value();
    check(of.size(0) == up.rows && of.size(1) == last.n, "a residual of the sums' shape");
    last.residual = of.data_ptr(), last.residual_stride = of.stride(0);
  }
  check(x.dtype() == inner.dtype() && x.dtype() == out.dtype(), "one type of rows");
  for (const Optional<TensorView>& bias : {gate_up_bias, down_bias}) {
    check(!bias.has_value() || bias.value().dtype() == x.dtype(), "biases of the rows' type");
  }
  if (up.scales != nullptr) {
    check(x.dtype().code == kDLBfloat && last.scales != nullptr, "codes are for bfloat16");
    check(gate_up.ndim() == down.ndim(), "both products' weights of one kind");
    using trtspec::bf16;
    if (gate_up.ndim() == 4) {
      check(gate_up.size(3) == down.size(3), "both products' records of one form");
      check(by_form(static_cast<int>(gate_up.size(3)), [&](auto form) {
        return trtspec::launch_experts<bf16, trtspec::RecordCodes<form.value>>(up, last, stream_of(x));
      }));
    } else if (gate_up.ndim() == 5) {
      check(trtspec::launch_experts<bf16, trtspec::PowerCodes>(up, last, stream_of(x)));
    } else {
      check(trtspec::launch_experts<bf16, trtspec::Fp8Codes>(up, last, stream_of(x)));
    }
    return;
  }
  check(x.dtype() == gate_up.dtype() && x.dtype() == down.dtype(), "experts of the rows' type");
  by_half_type(x, [&](auto type) {
    return trtspec::launch_experts<decltype(type), trtspec::HalfWeights>(up, last, stream_of(x));
  });
}

// x [n, k]; rows [pairs] of it, or none: pair i has row i. limit: infinity for none. alpha: 0 for none.
void expert_tiles(TensorView x, Optional<TensorView> rows, TensorView ends, TensorView weight,
                  Optional<TensorView> scales, Optional<TensorView> bias, bool is_gated, bool is_gelu,
                  double limit, double alpha, TensorView out) {
  trtspec::TiledExpertParams p = {};
  p.x = x.data_ptr(), p.x_stride = x.stride(0);
  p.ends = static_cast<const int*>(ends.data_ptr());
  p.weight = weight.data_ptr(), p.out = out.data_ptr();
  p.experts = static_cast<int>(weight.size(0)), p.n = static_cast<int>(weight.size(1)) * 8;
  const bool has_records = weight.ndim() == 4;
  p.k = static_cast<int>(weight.size(2)) * (has_records ? trtspec::kFourBitStep : 64);
  p.gate = {is_gelu, static_cast<float>(limit), static_cast<float>(alpha)};
  const int64_t pairs = out.size(0);
  check(is_dense(ends) && ends.size(0) == p.experts && ends.dtype().bits == 32,
        "an end of each expert, int32");
  check(p.experts <= trtspec::kTiledExperts, "at most 1,024 experts");
  const int record = has_records ? static_cast<int>(weight.size(3)) : 0;
  if (has_records) {
    check(is_dense(weight), "records of bytes in one piece");
    p.scales = p.weight, p.row_scales = row_scales(record, scales, static_cast<int64_t>(p.experts) * p.n);
  } else {
    check_fp4(weight, scales.value());
    p.scales = scales.value().data_ptr();
  }
  check(p.n % trtspec::kItemRows == 0 && trtspec::fp4_steps(p.k) >= trtspec::kTeamWarps,
        "outputs by 32, more than 384 inputs");
  check(x.size(1) == p.k && x.stride(1) == 1 && x.stride(0) % 8 == 0, "rows of the inputs' size");
  check(is_aligned(x.data_ptr()) && is_aligned(weight.data_ptr()), "aligned to 16 bytes");
  check(x.dtype().code == kDLBfloat && out.dtype().code == kDLBfloat, "rows in bfloat16");
  check(is_dense(out) && out.size(1) == (is_gated ? p.n / 2 : p.n), "room for the outputs");
  check(rows.has_value() || x.size(0) == pairs, "a row of each pair");
  if (rows.has_value()) {
    const TensorView& of = rows.value();
    p.rows = static_cast<const int64_t*>(of.data_ptr());
    check(is_dense(of) && of.size(0) == pairs && of.dtype().bits == 64, "a row of each pair, int64");
  }
  if (bias.has_value()) {
    const TensorView& of = bias.value();
    p.bias = of.data_ptr();
    check(is_dense(of) && of.size(0) == p.experts && of.size(1) == p.n, "a bias for each output");
    check(of.dtype().code == kDLBfloat, "biases in bfloat16");
  }
  if (!has_records) return check(trtspec::launch_expert_tiles(is_gated, p, stream_of(x)));
  check(by_form(record, [&](auto form) {
    return trtspec::launch_record_tiles<form.value>(is_gated, p, stream_of(x));
  }));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, experts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_tiles, expert_tiles);
