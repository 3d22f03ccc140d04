"""Products of experts of 4 bits by csrc's kernel (csrc/include/trtspec/expert_tiles.cuh)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import native
from ..layer.activation import GateAndMul
from ..layer.four_bits import FourBitWeight
from .fp4 import Fp4Weight

Weight = Fp4Weight | FourBitWeight
MAX_ROWS = {Fp4Weight: 64, FourBitWeight: 24}
"""Rows an expert, on average, from which on Triton's product is faster."""
MAX_EXPERTS, MIN_COLUMNS, MAX_COLUMNS = 1024, 385, 12288
"""What the kernel takes; a row's columns are four steps at least, and eight rows rest at once."""


def serve(x: Tensor, weights: tuple[Weight, Weight], average: float) -> bool:
    """Whether the kernel takes both products of rows x [T, D], with that many rows an expert."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):  # it has no derivative
        return False
    is_readable = x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    if not is_readable or x.data_ptr() % 16 or not 0 < average < MAX_ROWS[type(weights[0])]:
        return False
    return all(fits(weight.shape) for weight in weights) and native.kernels(x) is not None


def fits(shape: Sequence[int]) -> bool:
    """Whether the kernel takes a stack [E, out, in] of that shape."""
    count, out, columns = shape
    return count <= MAX_EXPERTS and out % 32 == 0 and MIN_COLUMNS <= columns <= MAX_COLUMNS


def gated(
    x: Tensor,
    rows: Tensor,
    weight: Weight,
    ends: Tensor,
    gate_and_mul: GateAndMul,
    bias: Tensor | None,
) -> Tensor:
    """Returns gate_and_mul of the grouped product of rows [N] int64 of x, [N, M / 2]."""
    out = x.new_empty(len(rows), weight.shape[1] // 2)
    _run(x, rows, weight, ends, gate_and_mul, bias, out)
    return out


def grouped_matmul(x: Tensor, weight: Weight, ends: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.py`'s."""
    out = x.new_empty(len(x), weight.shape[1])
    _run(x, None, weight, ends, None, bias, out)
    return out


def _run(
    x: Tensor,
    rows: Tensor | None,
    weight: Weight,
    ends: Tensor,
    between: GateAndMul | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    limit = None if between is None else between.limit
    codes, scales = weight
    native.kernels(x).expert_tiles(
        x,
        rows,
        ends,
        codes,
        scales,
        None if bias is None else bias.to(x.dtype),
        between is not None,
        between is not None and between.is_gelu,
        math.inf if limit is None else limit,
        0.0 if between is None else between.alpha or 0.0,
        out,
    )
