"""What Triton kernels do with keys and values in FP8 (`kv_codes.py`). They see codes as uint8."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from .triton_fp8 import codes_to


@triton.jit
def decoded(codes, dtype: tl.constexpr, QUICK: tl.constexpr):
    """Codes as numbers of a float dtype, without their scale.

    Args:
        QUICK: as of `codes_to`; NaN then comes out as 480.
    """
    if QUICK:
        return codes_to(codes, dtype, True)
    return codes_to(codes.to(tl.float8e4nv, bitcast=True), dtype, False)


@triton.jit
def starts_with_nan(pointers, mask):
    """Whether the codes at some pointers are NaN."""
    codes = tl.load(pointers, mask=mask, other=0)
    return (codes & 0x7F) == 0x7F


@triton.jit
def encoded(x, scale):
    """Returns the codes of float32 numbers: to nearest, even in ties, cut off at ±448 scales."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    magnitude = tl.minimum(tl.abs(scaled), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # A float32 has 20 bits of mantissa more, and an exponent that is 120 larger.
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last bit of a float32 at 2^14.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, code)
    code = code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(scaled != scaled, 0x7F, code)


@triton.jit
def codes_of_heads(x, scales, head, is_head, in_dim):
    """Returns the codes of heads x [N, BLOCK], uint8.

    Args:
        scales: pointer to those of all KV heads.
        head, is_head: [N, 1]. in_dim: [1, BLOCK].
    """
    codes = encoded(x.to(tl.float32), tl.load(scales + head, mask=is_head, other=1.0))
    has_nan = tl.max((((codes & 0x7F) == 0x7F) & in_dim).to(tl.int32), 1)[:, None]
    return tl.where(has_nan > 0, 0x7F, codes).to(tl.uint8)
