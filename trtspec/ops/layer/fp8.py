"""Products with FP8 weights (e4m3, arXiv:2209.05433).

A weight is its code times a scale. Where each of its rows has one scale, activations are rounded to
e4m3 too, with a scale for each row, and codes are multiplied with codes. Where groups of columns
have scales, activations stay floats. Both are so for any number of rows. A row's result depends on
that row alone: text with and without speculation stays the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import kernels, twin
from . import weight_tiles
from .norm import Norm

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that e4m3 has."""
SMALLEST = 2.0**-110
"""A row of activations with nothing larger becomes zeros: 448 / this is near float32's end."""
MAX_ROWS = 256
"""With scales of groups: more rows than this are cuBLAS's, with the weight made float before."""


class Fp8Weight(NamedTuple):
    """A weight [out, in]: value(r, c) = codes[r, c] * scales[r, c // group].

    A stack of weights, as of experts, has one dimension more, before these.
    """

    codes: Tensor  # [out, in] float8_e4m3fn
    scales: Tensor  # [out, ceil(in / group)] float32
    group: int  # columns that share a scale; `in` where a row has one

    @property
    def by_rows(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape[-1] == 1

    def at(self, index: int | slice | Tensor) -> Fp8Weight:
        """Returns some rows of a weight, or some weights of a stack."""
        return Fp8Weight(self.codes[index], self.scales[index], self.group)


class Fp8Rows(NamedTuple):
    """Activations [T, in]: value(r, c) = codes[r, c] * scales[r]."""

    codes: Tensor  # [T, in] float8_e4m3fn
    scales: Tensor  # [T] float32


class Rescaling(NamedTuple):
    """What makes a product of codes the product of their values."""

    rows: Tensor  # [T] float32
    columns: Tensor  # [out] float32
    bias: Tensor | None  # [out]

    def apply(self, product: Tensor) -> Tensor:
        """Returns the values [T, out] in float32."""
        values = product.float() * self.rows[:, None] * self.columns
        return values if self.bias is None else values + self.bias.float()


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies FP8: a GPU of compute capability 8.9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


# -- weights ------------------------------------------------------------------------------------
def quantize(weight: Tensor) -> Fp8Weight:
    """Returns a float weight [out, in] in e4m3, to nearest, with a scale for each row.

    Rows smaller than any normal scale become zeros.
    """
    largest = weight.abs().amax(1, keepdim=True).float()
    # (CUDA divides by a number as it multiplies with its reciprocal: the CPU's scales are others.)
    scales = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(scales >= torch.finfo(scales.dtype).tiny, scales, 1.0)
    codes = (weight.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)
    return Fp8Weight(codes, scales, weight.shape[1])


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weight [out, in], or a stack of them, in a float dtype, rounded once."""
    codes, scales, group = weight
    # (For earlier GPUs Triton compiles no kernel that reads e4m3.)
    triton = kernels("layer.triton_fp8", codes) if has_fp8(codes.device) else None
    if triton is not None:
        rows, of_rows = (t.reshape(-1, t.shape[-1]).contiguous() for t in (codes, scales))
        return triton.dequantize(Fp8Weight(rows, of_rows, group), dtype).view(codes.shape)
    if not weight.by_rows:
        scales = scales.repeat_interleave(group, -1)[..., : codes.shape[-1]]
    return (codes.float() * scales).to(dtype)


# -- activations --------------------------------------------------------------------------------
@twin("layer.triton_fp8_rows")
def quantize_rows(x: Tensor, norm: Norm | None = None) -> Fp8Rows:
    """Returns x [T, in], perhaps normed, in e4m3 with a scale for each row.

    The norm's own scale goes into the scales, so codes are those of x times the norm's weight.
    """
    y = x.float()
    scales = torch.ones(x.shape[0], device=x.device)
    if norm is not None:
        scales = torch.rsqrt(y.square().mean(1) + norm.eps)
        y = y * (norm.weight.float() + norm.offset)
    return _rounded(y, scales)


def _rounded(y: Tensor, scales: Tensor) -> Fp8Rows:
    """y [T, in] float32 times scales [T]."""
    largest = y.abs().amax(1)
    # (A number divided by a tensor would be rounded twice.)
    to_codes = torch.where(largest <= SMALLEST, 0.0, torch.full_like(largest, LARGEST) / largest)
    codes = (y * to_codes[:, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return Fp8Rows(codes, largest / LARGEST * scales)


# -- products -----------------------------------------------------------------------------------
def multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Returns x [T, in] times the weight transposed, plus bias, [T, out], in x's dtype."""
    if weight.by_rows:
        return rescale(*product(quantize_rows(x), weight, bias, x.dtype), x.dtype)
    return multiply_floats(x, weight, bias=bias)


def product(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Rescaling]:
    """Returns the product of codes [T, out], and what makes it that of the values.

    Args:
        weight: with scales of rows.
        dtype: the model's. Sums of codes are beyond fp16: they are float32 where it is not bf16.
    """
    (rows, size), out = x.codes.shape, weight.codes.shape[0]
    rescaling = Rescaling(x.scales, weight.scales[:, 0], bias)
    if x.codes.is_cuda and rows and size % 16 == 0 and out % 16 == 0:
        one = _one(x.codes.device)
        kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return torch._scaled_mm(x.codes, weight.codes.t(), one, one, out_dtype=kind), rescaling
    return F.linear(x.codes.float(), weight.codes.float()), rescaling


def _one(device: torch.device) -> Tensor:
    """A scale of 1, kept. One made while a graph is captured is that graph's alone."""
    if device in _ones:
        return _ones[device]
    one = torch.ones((), device=device)
    if not torch.cuda.is_current_stream_capturing():
        _ones[device] = one
    return one


_ones: dict[torch.device, Tensor] = {}


@twin("layer.triton_fp8_rows")
def rescale(
    product: Tensor, by: Rescaling, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """Returns the values of a product of codes, [T, out].

    Args:
        residual: [T, out], to which they are added, in its memory; it is returned.
    """
    values = by.apply(product)
    return values.to(dtype) if residual is None else residual.copy_(values + residual.float())


@twin("layer.triton_fp8_rows")
def rescaled_swiglu(product: Tensor, by: Rescaling) -> Fp8Rows:
    """Returns silu(gate) * up [T, I] of a product of codes [T, 2I], in e4m3 again."""
    gate, up = by.apply(product).chunk(2, dim=-1)
    return _rounded(F.silu(gate) * up, torch.ones(len(gate), device=gate.device))


def multiply_floats(
    x: Tensor, weight: Fp8Weight, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Returns x [T, in] as it is times the weight transposed, plus bias, [T, out], in x's dtype.

    Args:
        residual: [T, out], to which the product is added, in its memory; it is returned.
    """
    if (csrc := _tiles(x, weight, residual)) is not None:

        def launch(x: Tensor, room: Tensor, out: Tensor, adds: bool) -> None:
            csrc.fp8_tiles(x, weight.codes, weight.scales, weight.group, room, out, adds)

        return weight_tiles.multiply(x, weight.codes.shape[0], residual, bias, launch)
    is_served = 0 < x.shape[0] <= MAX_ROWS and (weight.by_rows or weight.group % 32 == 0)
    triton = kernels("layer.triton_fp8", x) if is_served else None
    if triton is None:
        out = F.linear(x, dequantize(weight, x.dtype), bias)
        return out if residual is None else residual.add_(out)
    out = triton.multiply_floats(x, weight, residual)
    return out if bias is None else out.add_(bias)


def _tiles(x: Tensor, weight: Fp8Weight, residual: Tensor | None) -> Any:
    """Returns the module with the kernel of `weight_tiles.py` if it serves these, else None."""
    codes, scales, group = weight
    if x.shape[0] > MAX_ROWS or group % weight_tiles.STEP or codes.shape[0] % 4:
        return None
    is_readable = codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 16 == 0
    return weight_tiles.kernels(x, residual) if is_readable else None
