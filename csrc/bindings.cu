// Python's view of the kernels, through apache-tvm-ffi. Checks of shapes are in trtspec/ops; here is
// only what would read or write outside a tensor.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>

#include "trtspec/dense.h"
#include "trtspec/launchers.h"

namespace {

using trtspec::Epilogue;
using trtspec::is_dense;
using trtspec::LinearParams;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

void check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << "trtspec kernels: " << what;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "trtspec kernels: " << cudaGetErrorString(error);
  }
}

cudaStream_t stream_of(const TensorView& x) {
  const DLDevice device = x.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

void* data(const Optional<TensorView>& x) {
  return x.has_value() ? x.value().data_ptr() : nullptr;
}

bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Calls `run` with a value of x's element type, one of 16 bits.
template <typename Run>
void by_half_type(const TensorView& x, Run run) {
  const DLDataType type = x.dtype();
  if (type.code == kDLBfloat) {
    check(run(trtspec::bf16()));
  } else {
    check(type.code == kDLFloat && type.bits == 16, "bfloat16 or float16");
    check(run(trtspec::half_t()));
  }
}

void run_fp8(Epilogue epilogue, const LinearParams& p, const TensorView& x) {
  check(p.rows <= trtspec::kMaxFp8Rows && p.k % 64 == 0, "FP8: at most 8 rows, inputs by 64");
  check(x.dtype().code == kDLBfloat && p.x1 == nullptr, "FP8 weights are for one bfloat16 input");
  check(p.groups == 1 || p.group % 64 == 0, "groups must be multiples of 64");
  check(p.groups == 1 ? trtspec::launch_fp8_linear<false>(epilogue, p, stream_of(x))
                      : trtspec::launch_fp8_linear<true>(epilogue, p, stream_of(x)));
}

// Calls `run` with the form that records of these bytes have.
template <typename Run>
cudaError_t by_form(int record, Run run) {
  using trtspec::FourBits;
  constexpr FourBits kWide = FourBits::kWide, kNarrow = FourBits::kNarrow, kFloats = FourBits::kFloats;
  switch (record) {
    case trtspec::kFourBitRecord<kWide>: return run(std::integral_constant<FourBits, kWide>());
    case trtspec::kFourBitRecord<kNarrow>: return run(std::integral_constant<FourBits, kNarrow>());
    case trtspec::kFourBitRecord<kFloats>: return run(std::integral_constant<FourBits, kFloats>());
  }
  return cudaErrorInvalidValue;
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

// Those of rows that records of these bytes have; null: none.
const float* row_scales(int record, const Optional<TensorView>& scales, int64_t rows) {
  const bool has_scales = record == trtspec::kFourBitRecord<trtspec::FourBits::kFloats>;
  check(scales.has_value() == has_scales, "NVFP4 weights have scales of rows, integers none");
  if (!has_scales) return nullptr;
  const TensorView& of = scales.value();
  check(is_dense(of) && of.numel() == rows && of.dtype().bits == 32, "a scale in float32 for each row");
  return static_cast<const float*>(of.data_ptr());
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

// Calls `run` with a value of the logits' element type.
template <typename Run>
void by_type(const TensorView& logits, Run run) {
  const DLDataType type = logits.dtype();
  if (type.code == kDLBfloat) {
    check(run(trtspec::bf16()));
  } else if (type.bits == 16) {
    check(run(trtspec::half_t()));
  } else {
    check(type.code == kDLFloat && type.bits == 32, "float32, bfloat16 or float16");
    check(run(float()));
  }
}

// What this rank knows of all ranks' memory: [4 + n] int64 on the host, as `PeerMemory.handle`.
trtspec::Peers peers_of(const TensorView& handle) {
  const int64_t* values = static_cast<const int64_t*>(handle.data_ptr());
  trtspec::Peers peers = {};
  peers.rank = static_cast<int>(values[0]), peers.size = static_cast<int>(values[1]);
  peers.part_packets = values[2];
  peers.state = reinterpret_cast<trtspec::ExchangeState*>(values[3]);
  check(peers.size <= trtspec::kMaxRanks && handle.size(0) == 4 + peers.size, "at most 16 ranks");
  for (int r = 0; r < peers.size; ++r) peers.memory[r] = reinterpret_cast<uint4*>(values[4 + r]);
  return peers;
}

trtspec::CollectiveParams collective(const TensorView& x, const TensorView& handle,
                                     const TensorView& out) {
  const int64_t bytes = x.numel() * x.dtype().bits / 8;
  const trtspec::Peers peers = peers_of(handle);
  check(is_dense(x) && is_dense(out) && bytes % 16 == 0, "16 bytes at a time, in one piece");
  check(is_aligned(x.data_ptr()) && is_aligned(out.data_ptr()), "16 bytes must be aligned");
  check(bytes / 16 <= peers.part_packets, "more than the ranks' memory holds");
  return {peers, static_cast<const uint4*>(x.data_ptr()), static_cast<uint4*>(out.data_ptr()),
          static_cast<int>(bytes / 16)};
}

// out may be x.
void all_reduce(TensorView x, TensorView handle, TensorView out) {
  const trtspec::CollectiveParams p = collective(x, handle, out);
  check(out.numel() == x.numel(), "room for the sum");
  if (p.packets == 0) return;
  by_type(x, [&](auto type) {
    return trtspec::launch_all_reduce<decltype(type)>(p, stream_of(x));
  });
}

void all_gather(TensorView x, TensorView handle, TensorView out) {
  const trtspec::CollectiveParams p = collective(x, handle, out);
  check(out.numel() == x.numel() * p.peers.size, "room for all parts");
  if (p.packets > 0) check(trtspec::launch_all_gather(p, stream_of(x)));
}

// Logits of which every rank has a part: `handle` and the part's first index.
struct Ranks {
  const Optional<TensorView>& handle;
  int64_t first_index;
};

// partial [R, chunks, 5] and tickets [>= B] int32.
trtspec::ChooseParams chooser(const TensorView& logits, int num_contexts, int rows,
                              const TensorView& partial, const TensorView& tickets,
                              const Ranks& ranks) {
  const int count = static_cast<int>(logits.size(0)), chunks = static_cast<int>(partial.size(1));
  check(chunks <= trtspec::kMaxChunks && rows <= trtspec::kMaxRowsPerRequest, "too many rows");
  check(partial.size(0) >= count && sizeof(trtspec::ChunkBest) == 20, "room for partial results");
  check(tickets.size(0) >= num_contexts + (count - num_contexts) / rows, "a ticket per request");
  check(is_dense(logits, 1), "logits must have rows in one piece");
  trtspec::ChooseParams p = {logits.data_ptr(), logits.stride(0), static_cast<int>(logits.size(1)),
                             num_contexts, rows, chunks,
                             static_cast<trtspec::ChunkBest*>(partial.data_ptr()),
                             static_cast<int*>(tickets.data_ptr())};
  if (ranks.handle.has_value()) {
    check(count <= trtspec::kMaxRowsOverRanks, "too many rows for all blocks to run at once");
    p.peers = peers_of(ranks.handle.value());
    check(count <= p.peers.part_packets, "more rows than the ranks' memory holds");
    p.first_index = static_cast<int>(ranks.first_index);
  }
  return p;
}

void accept_greedy(TensorView logits, TensorView drafts, int64_t num_contexts, int64_t forced_len,
                   Optional<TensorView> deltas, Optional<TensorView> slots, int64_t top_k,
                   int64_t end_token, Optional<TensorView> handle, int64_t first_index,
                   TensorView partial, TensorView tickets, TensorView tokens, TensorView lens,
                   TensorView num_accepted_drafts, TensorView bad) {
  const int num_rows = static_cast<int>(logits.size(0));
  if (num_rows == 0) return;
  trtspec::AcceptParams p = {};
  const int rows = static_cast<int>(drafts.size(1)) + 1;
  p.choose = chooser(logits, static_cast<int>(num_contexts), rows, partial, tickets,
                     {handle, first_index});
  check(is_dense(drafts, 1), "drafts must have rows in one piece");
  p.drafts = static_cast<const int*>(drafts.data_ptr()), p.draft_stride = drafts.stride(0);
  p.width = static_cast<int>(tokens.size(1)), p.forced_len = static_cast<int>(forced_len);
  check(p.width >= rows && is_dense(tokens), "room for the tokens");
  p.tokens = static_cast<int*>(tokens.data_ptr()), p.lens = static_cast<int*>(lens.data_ptr());
  p.num_accepted_drafts = static_cast<int*>(num_accepted_drafts.data_ptr());
  p.bad = static_cast<bool*>(bad.data_ptr());
  p.deltas = static_cast<float*>(data(deltas));
  p.slots = static_cast<const int64_t*>(data(slots));
  p.top_k = static_cast<int>(top_k), p.end_token = static_cast<int>(end_token);
  check(p.deltas == nullptr || !handle.has_value(), "relaxed acceptance needs all logits");
  by_type(logits, [&](auto type) {
    return trtspec::launch_accept<decltype(type)>(p, num_rows, stream_of(logits));
  });
}

void choose_drafts(TensorView logits, Optional<TensorView> d2t, Optional<TensorView> handle,
                   int64_t first_index, TensorView partial, TensorView tickets,
                   TensorView tokens) {
  const int num_rows = static_cast<int>(logits.size(0));
  if (num_rows == 0) return;
  const trtspec::DraftParams p = {chooser(logits, 0, 1, partial, tickets, {handle, first_index}),
                                  static_cast<const int64_t*>(data(d2t)),
                                  static_cast<int*>(tokens.data_ptr())};
  by_type(logits, [&](auto type) {
    return trtspec::launch_choose<decltype(type)>(p, num_rows, stream_of(logits));
  });
}

// logits [P * B, Vd], before [B] int32, taken [P, B] int32. memory: int64, zeros at first; a state, then
// [2, kWalkRequests, blocks]. chunk: entries of a block.
void walk_markov(TensorView logits, TensorView before, TensorView w1, TensorView w2,
                 Optional<TensorView> d2t, int64_t chunk, TensorView memory, TensorView taken) {
  trtspec::WalkParams p = {};
  p.logits = logits.data_ptr(), p.row_stride = logits.stride(0);
  p.before = static_cast<const int*>(before.data_ptr()), p.before_stride = before.stride(0);
  p.w1 = w1.data_ptr(), p.w2 = w2.data_ptr(), p.d2t = static_cast<const int64_t*>(data(d2t));
  p.taken = static_cast<int*>(taken.data_ptr());
  p.state = static_cast<trtspec::WalkState*>(memory.data_ptr());
  p.places = static_cast<uint64_t*>(memory.data_ptr()) + 1;
  p.count = static_cast<int>(taken.size(0)), p.batch = static_cast<int>(taken.size(1));
  p.tokens = static_cast<int>(w1.size(0)), p.drafts = static_cast<int>(w2.size(0));
  p.chunk = static_cast<int>(chunk);
  const int blocks = static_cast<int>((memory.size(0) - 1) / (2 * trtspec::kWalkRequests));
  check(is_dense(logits, 1) && is_dense(w1) && is_dense(w2) && is_dense(taken), "rows in one piece");
  check(logits.size(0) == taken.numel() && logits.size(1) == p.drafts, "logits of each draft");
  check(before.size(0) == p.batch && p.batch <= trtspec::kWalkRequests, "at most 8 requests");
  check(w1.size(1) == w2.size(1) && p.drafts < static_cast<int>(trtspec::kNoIndex), "two tables");
  check(blocks > 0 && blocks <= trtspec::kMaxWalkBlocks, "room for what blocks send");
  check(chunk % 16 == 0 && chunk * blocks >= p.drafts, "blocks have all entries");
  if (taken.numel() == 0) return;
  by_half_type(logits, [&](auto type) {
    return trtspec::launch_walk<decltype(type)>(p, static_cast<int>(w1.size(1)), blocks,
                                                stream_of(logits));
  });
}

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

void update_window(TensorView hidden, TensorView ids, TensorView last, TensorView slots,
                   TensorView window_hidden, TensorView window_ids) {
  const int size = static_cast<int>(hidden.size(1)) * hidden.dtype().bits / 8;
  const int width = static_cast<int>(window_ids.size(1)), count = static_cast<int>(last.size(0));
  if (width == 0 || count == 0) return;
  check(is_dense(hidden) && is_dense(window_hidden) && is_dense(window_ids), "contiguous windows");
  check(trtspec::launch_window(
      {hidden.data_ptr(), static_cast<const int64_t*>(ids.data_ptr()),
       static_cast<const int64_t*>(last.data_ptr()), static_cast<const int64_t*>(slots.data_ptr()),
       window_hidden.data_ptr(), static_cast<int64_t*>(window_ids.data_ptr()), size, width},
      count, stream_of(hidden)));
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(four_bit_tiles, four_bit_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_tiles, fp8_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen_four_bits, widen_four_bits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_gated, linear_gated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_rope, linear_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, experts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_tiles, expert_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce, all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_gather, all_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_greedy, accept_greedy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(choose_drafts, choose_drafts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_clusters, attend_clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(delta_generations, delta_generations);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_prompts, attend_prompts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(update_window, update_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(walk_markov, walk_markov);
