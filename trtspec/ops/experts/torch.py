"""What a mixture of experts computes beside its products: routing, sorting, combining.

The routing is DeepSeek-V3's (arXiv:2412.19437, section 2.1.2), which GLM-4-MoE shares. With one
group, softmax scores and no bias it is the classic one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import kernels, twin
from ..launch.machine import INVARIANT_ROWS
from ..layer import four_bits
from ..layer.activation import SWIGLU, GateAndMul
from ..layer.four_bits import FourBitWeight
from ..layer.fp8 import Fp8Weight, dequantize
from ..layer.norm import Norm, rms_norm
from . import fp4, tiles
from .fp4 import Fp4Weight

MAX_ROUTER_PRODUCTS, MAX_ROUTER_ROWS, UNCOUNTED_ROUTER_ROWS = 11 << 20, 1024, 5
"""Scores of few rows are a kernel of ours: cuBLAS has few programs for them. Ours takes longer from
that many products on. The first rows do not count, for cuBLAS reads the weight, too."""
MAX_NORMED_COLUMNS = 8192
"""Up to here a program normalizes a whole row by itself."""
MIN_LIBRARY_ROWS = 64
"""Rows an expert, on average, from which on torch's `grouped_mm` is faster than our kernel."""


@twin("experts.triton")
def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    scoring: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row and their weights, [T, top_k] int64 and float32.

    Args:
        logits: [T, E] float32.
        bias: [E] float32, added to the scores for the choice, not for the weights; or None.
        scoring: "sigmoid" of each logit or "softmax" over all.
        n_group, topk_group: experts come from the `topk_group` of `n_group` groups whose two best
            scores have the largest sums.
        normalize: weights sum to 1 before `scale` is applied.
        logit_bias: [E] float32, added to the logits; or None.
    """
    if logit_bias is not None:
        logits = logits + logit_bias
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)  # [T, E]
    choice = scores if bias is None else scores + bias
    if n_group > 1:
        grouped = choice.unflatten(-1, (n_group, -1))  # [T, G, E/G]
        groups = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
        inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, groups, True)
        choice = grouped.masked_fill(~inside[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [T, D] times weight [E, D], [T, E] in float32 whatever the model's dtype.

    So does transformers for DeepSeek. (Gemma's it rounds, so that near-ties in bf16 may go another
    way.) On the CPU few rows are padded, so that a row's logits do not depend on their number
    (`layers/linear.py` has the reason).
    """
    rows = x.shape[0]
    triton = kernels("experts.triton", x) if is_few_for_router(rows, weight) else None
    if triton is not None:
        return triton.router_logits(x, weight)
    if not x.is_cuda and rows < INVARIANT_ROWS:
        x = F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows))
    return F.linear(x.float(), weight.float())[:rows]


def is_few_for_router(rows: int, weight: Tensor) -> bool:
    """Whether our kernel takes less time than cuBLAS for the scores of that number of rows."""
    counted = rows - UNCOUNTED_ROUTER_ROWS
    return 0 < rows <= MAX_ROUTER_ROWS and counted * weight.numel() <= MAX_ROUTER_PRODUCTS


def normed_router_logits(x: Tensor, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x), [T, D] in x's dtype, and its `router_logits`."""
    is_few = is_few_for_router(x.shape[0], weight) and x.shape[1] <= MAX_NORMED_COLUMNS
    is_trained = norm.weight.requires_grad and torch.is_grad_enabled()
    triton = kernels("experts.triton", x) if is_few and not is_trained else None
    if triton is not None:
        return triton.normed_router_logits(x, norm, weight)
    normed = rms_norm(x, norm)
    return normed, router_logits(normed, weight)


Quantized = Fp8Weight | Fp4Weight | FourBitWeight
Weight = Tensor | Quantized
"""A stack of experts' weights."""
_KERNELS = {Fp8Weight: "fp8", Fp4Weight: "fp4", FourBitWeight: "four_bits"}


class ExpertBiases(NamedTuple):
    """What experts add to their two products."""

    gate_up: Tensor  # [E, 2I]
    down: Tensor  # [E, D]


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    gate_and_mul: GateAndMul = SWIGLU,
    total: int | None = None,
    biases: ExpertBiases | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `Experts.forward`, by two grouped products over the rows sorted by expert.

    On CUDA with Triton the host waits for nothing.

    Args:
        gate_up: [E, 2I, D]. down: [E, D, I]. Both are of one kind. On CUDA 16 divides an FP8
            weight's group, unless it is the whole row.
        total: experts of all ranks. If more than E, an id may be E, that of an expert which is not
            here and adds nothing.
        residual: as `combine`'s.
    """
    count = (gate_up if isinstance(gate_up, Tensor) else gate_up[0]).shape[0]
    total = total or count
    has_others = total > count
    rows, ends, positions = sort_by_expert(ids, count + has_others)
    ends = ends[:count]
    average = ids.numel() / total
    first, second = biases or (None, None)
    if (
        isinstance(gate_up, Fp4Weight | FourBitWeight)
        and isinstance(down, Fp4Weight | FourBitWeight)
        and tiles.serve(x, (gate_up, down), average)
    ):
        inner = tiles.gated(x, rows, gate_up, ends, gate_and_mul, first)  # [T*k, I]
        y = tiles.grouped_matmul(inner, down, ends, second)
    else:
        inner = gate_and_mul(grouped_matmul(x[rows], gate_up, ends, average, first))
        y = grouped_matmul(inner, down, ends, average, second)
    if has_others:  # nothing was written to the rows behind the last expert's
        is_here = torch.arange(len(y), device=y.device) < ends[-1]
        y = torch.where(is_here[:, None], y, 0)
    return combine(y, positions, weights, residual)


def grouped_matmul(
    x: Tensor,
    weight: Weight,
    ends: Tensor,
    average: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiplies rows x [N, K], sorted by expert, each with its expert's of weight [E, M, K].

    Args:
        weight: float, FP8 with codes [E, M, K] and scales [E, M, ceil(K / group)], or of 4 bits.
        ends: [E] int32, where each expert's rows end.
        average: rows of an expert, as may be expected; a hint for the choice of kernels.
        bias: [E, M], added to the rows of each expert; or None.

    Returns:
        [N, M]; what rows behind the last expert's have is not defined.
    """
    if not isinstance(weight, Tensor):
        triton = kernels(f"experts.triton_{_KERNELS[type(weight)]}", x)
        if triton is not None:
            return triton.grouped_matmul(x, weight, ends, average, bias)
        return _with_bias(_one_expert_at_a_time(x, weight, ends), bias, ends)
    by_library = average >= MIN_LIBRARY_ROWS and has_grouped_mm(x, weight)
    triton = None if by_library else kernels("experts.triton", x)
    if triton is not None:
        return triton.grouped_matmul(x, weight, ends, average, bias)
    return _with_bias(F.grouped_mm(x, weight.transpose(1, 2), offs=ends), bias, ends)


def _with_bias(y: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Adds each expert's bias [M] to its rows of y [N, M], in y's memory."""
    if bias is None:
        return y
    rows = torch.arange(len(y), device=y.device, dtype=ends.dtype)
    owners = torch.searchsorted(ends, rows, right=True)
    return y.add_(bias[owners.clamp_(max=len(bias) - 1)])  # rows behind the last have no owner


def _one_expert_at_a_time(x: Tensor, weight: Quantized, ends: Tensor) -> Tensor:
    """As `grouped_matmul`, in float32, with the chosen experts' weights made float for a moment."""
    columns = (weight.codes if isinstance(weight, Fp8Weight) else weight).shape[1]
    out, begin = x.new_zeros(x.shape[0], columns), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            own = floats_of(weight, expert, torch.float32)
            product = F.linear(x[begin:end].float(), own)
            out[begin:end] = product.to(x.dtype)
        begin = end
    return out


def floats_of(weight: Quantized, expert: int, dtype: torch.dtype) -> Tensor:
    """Returns one expert's weight [M, K] in a float dtype."""
    if isinstance(weight, Fp8Weight):
        return dequantize(weight.at(expert), dtype)
    if isinstance(weight, FourBitWeight):
        return four_bits.dequantize(weight.at(expert), dtype)
    return fp4.dequantize(weight.one(expert), dtype)[0]


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's `grouped_mm` is one kernel for these; else it asks the host for `ends`."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    is_aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0  # rows of 16 bytes
    return is_aligned and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


@twin("experts.triton")
def sort_by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the (row, choice) pairs of ids [T, k] by expert, of which there are `count`.

    Returns:
        The row of each sorted pair, [T*k] int64; where each expert's pairs end, [E] int32; the
        position of each pair in that order, [T*k] int64.
    """
    by_expert, order = ids.flatten().sort(stable=True)
    experts = torch.arange(count, device=ids.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    pairs = torch.arange(len(order), device=ids.device)
    return order // ids.shape[1], ends, torch.empty_like(order).scatter_(0, order, pairs)


@twin("experts.triton")
def combine(
    y: Tensor, positions: Tensor, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Returns each row's weighted sum of what its experts returned, [T, D] in y's dtype.

    It is added up in float32.

    Args:
        y: [T*k, D], sorted by expert.
        positions: [T*k] int64, each pair's position in that order.
        weights: [T, k].
        residual: [T, D] of rows in one piece each that the sum is added to, in its memory; or None.
    """
    chosen = y[positions].unflatten(0, weights.shape).float()  # [T, k, D]
    total = (chosen * weights[..., None]).sum(1)
    return total.to(y.dtype) if residual is None else residual.copy_(residual.float() + total)
