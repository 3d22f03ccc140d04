"""Rotary position embedding (Su et al., 2021), the half-split ("NeoX") layout."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_kernels


def rotation(cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotations of one pass, made once and used by every layer.

    Args:
        cos_sin: [T, D] float32, the cosines of the D/2 frequencies, then the sines.

    Returns:
        (cos, sin), each [T, 1, D] in `dtype`; the first half of sin is negated.
    """
    cos, sin = cos_sin.to(dtype)[:, None].chunk(2, dim=-1)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by `rotation`'s (cos, sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_heads: int, k_slots: Tensor, v_slots: Tensor,
    slots: Tensor, *, keeps_finite: bool = False,
) -> Tensor:  # fmt: skip
    """Rotates queries and keys, and puts keys and values into the paged cache.

    Args:
        qkv: [T, Hq + 2 Hkv, D].
        cos, sin: [T, 1, D] of `rotation`.
        k_slots, v_slots: [slots, Hkv, D]; slots: [T] int64, all of them valid.
        keeps_finite: NaN and infinities are read as 0.

    Returns:
        The rotated queries, [T, Hq, D].
    """
    kernels = triton_kernels(qkv)
    if kernels is not None:
        return kernels.rope_and_write(qkv, cos, sin, q_heads, k_slots, v_slots, slots, keeps_finite)
    if keeps_finite:
        qkv = torch.nan_to_num(qkv, 0.0, 0.0, 0.0)
    kv_heads = k_slots.shape[1]
    qk = apply_rope(qkv[:, : q_heads + kv_heads], cos, sin)
    k_slots.index_copy_(0, slots, qk[:, q_heads:])
    v_slots.index_copy_(0, slots, qkv[:, q_heads + kv_heads :])
    return qk[:, :q_heads]
