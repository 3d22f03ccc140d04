"""Products with FP8 weights (e4m3, arXiv:2209.05433). Activations stay floats.

A weight is its code times a scale. So a row's result depends on that row alone, however many rows
a step has, as with float weights: text with and without speculation stays the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import kernels

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that e4m3 has."""
MAX_ROWS = 256
"""More rows than this are cuBLAS's, with the weight made float before: its products are faster."""


class Fp8Weight(NamedTuple):
    """A weight [out, in]: value(r, c) = codes[r, c] * scales[r, c // group]."""

    codes: Tensor  # [out, in] float8_e4m3fn
    scales: Tensor  # [out, ceil(in / group)] float32
    group: int  # columns that share a scale; `in` where a row has one

    @property
    def by_rows(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape[-1] == 1


def quantize(weight: Tensor) -> Fp8Weight:
    """Returns a float weight [out, in] in e4m3, to nearest, with a scale for each row."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (weight.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)
    return Fp8Weight(codes, scales, weight.shape[1])


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weight [out, in] in a float dtype, rounded once."""
    triton = kernels("layer.triton_fp8", weight.codes)
    if triton is not None:
        return triton.dequantize(weight, dtype)
    scales = weight.scales
    if not weight.by_rows:
        columns = weight.codes.shape[1]
        scales = scales.repeat_interleave(weight.group, 1)[:, :columns]
    return (weight.codes.float() * scales).to(dtype)


def multiply(x: Tensor, weight: Fp8Weight, residual: Tensor | None = None) -> Tensor:
    """Returns x [T, in] times the weight transposed, [T, out], in x's dtype.

    Args:
        residual: [T, out], to which the product is added, in its memory; it is returned.
    """
    triton = kernels("layer.triton_fp8", x) if 0 < x.shape[0] <= MAX_ROWS else None
    if triton is not None:
        return triton.multiply(x, weight, residual)
    out = F.linear(x, dequantize(weight, x.dtype))
    return out if residual is None else residual.add_(out)
