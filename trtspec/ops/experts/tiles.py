"""Products of MXFP4 experts by csrc's kernel (csrc/include/trtspec/expert_tiles.cuh)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import native
from ..layer.activation import GateAndMul
from .fp4 import Fp4Weight

MAX_ROWS = 64
"""Rows an expert, on average, from which on Triton's product is faster."""
MAX_EXPERTS, MIN_COLUMNS, MAX_COLUMNS = 1024, 385, 12288
"""What the kernel takes; a row's columns are four steps at least, and eight rows rest at once."""


def serve(x: Tensor, weights: tuple[Fp4Weight, Fp4Weight], average: float) -> bool:
    """Whether the kernel takes both products of rows x [T, D], with that many rows an expert."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):  # it has no derivative
        return False
    is_readable = x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    if not is_readable or x.data_ptr() % 16 != 0 or not 0 < average < MAX_ROWS:
        return False
    return all(map(_fits, weights)) and native.kernels(x) is not None


def _fits(weight: Fp4Weight) -> bool:
    count, out, columns = weight.shape
    return count <= MAX_EXPERTS and out % 32 == 0 and MIN_COLUMNS <= columns <= MAX_COLUMNS


def gated(
    x: Tensor,
    rows: Tensor,
    weight: Fp4Weight,
    ends: Tensor,
    gate_and_mul: GateAndMul,
    bias: Tensor | None,
) -> Tensor:
    """Returns gate_and_mul of the grouped product of rows [N] int64 of x, [N, M / 2]."""
    out = x.new_empty(len(rows), weight.shape[1] // 2)
    _run(x, rows, weight, ends, gate_and_mul, bias, out)
    return out


def grouped_matmul(x: Tensor, weight: Fp4Weight, ends: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.py`'s."""
    out = x.new_empty(len(x), weight.shape[1])
    _run(x, None, weight, ends, None, bias, out)
    return out


def _run(
    x: Tensor,
    rows: Tensor | None,
    weight: Fp4Weight,
    ends: Tensor,
    between: GateAndMul | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    limit = None if between is None else between.limit
    native.kernels(x).expert_tiles(
        x,
        rows,
        ends,
        weight.codes,
        weight.scales,
        None if bias is None else bias.to(x.dtype),
        between is not None,
        between is not None and between.is_gelu,
        math.inf if limit is None else limit,
        0.0 if between is None else between.alpha or 0.0,
        out,
    )
