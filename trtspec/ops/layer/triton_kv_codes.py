"""What Triton kernels do with keys and values in FP8 (`kv_codes.py`). They see codes as uint8."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from .triton_fp8 import codes_to, nearest_codes


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
    return nearest_codes(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))


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
