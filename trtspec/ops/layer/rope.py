"""Rotary position embedding (Su et al., 2021), the half-split ("NeoX") layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import triton_kernels
from .norm import Norm, rms_norm


class Rope:
    """The rotations of one pass: a table, and each row's place in it.

    Args:
        cos_sin: [positions, D] float32, the cosines of the D/2 frequencies, then the sines.
        position_ids: [T] int64.
    """

    def __init__(self, cos_sin: Tensor, position_ids: Tensor):
        self.cos_sin, self.position_ids = cos_sin, position_ids
        self._rotation: tuple[Tensor, Tensor] | None = None

    def rotation(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, D] in `dtype`; the first half of sin is negated. Made once and
        used by every layer."""
        if self._rotation is None:
            cos, sin = self.cos_sin[self.position_ids].to(dtype)[:, None].chunk(2, dim=-1)
            self._rotation = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return self._rotation


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by `Rope.rotation`'s (cos, sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_and_write(
    qkv: Tensor, rope: Rope, q_heads: int, k_slots: Tensor, v_slots: Tensor, slots: Tensor,
    scratch_slot: int, *, qk_norms: tuple[Norm, Norm] | None = None,
    norms_values: bool = False, keeps_finite: bool = False,
) -> Tensor:  # fmt: skip
    """Rotates queries and keys, and puts keys and values into the paged cache.

    Args:
        qkv: [T, Hq + 2 Hkv, D].
        k_slots, v_slots: [slots, Hkv, D]; slots: [T] int64, -1 is `scratch_slot`.
        qk_norms: over the heads of queries and of keys, before the rotation.
        norms_values: values have that norm too, without a weight.
        keeps_finite: NaN and infinities are read as 0.

    Returns:
        The rotated queries, [T, Hq, D].
    """
    kernels = triton_kernels(qkv)
    if kernels is not None:
        return kernels.rope_and_write(
            qkv, rope, q_heads, k_slots, v_slots, slots, scratch_slot, qk_norms, keeps_finite,
            norms_values,
        )  # fmt: skip
    if keeps_finite:
        qkv = torch.nan_to_num(qkv, 0.0, 0.0, 0.0)
    kv_heads = k_slots.shape[1]
    qk = qkv[:, : q_heads + kv_heads]
    if qk_norms is not None:
        q_norm, k_norm = qk_norms
        normed = rms_norm(qk[:, :q_heads], q_norm), rms_norm(qk[:, q_heads:], k_norm)
        qk = torch.cat(normed, dim=1)
    qk = apply_rope(qk, *rope.rotation(qkv.dtype))
    if keeps_finite:  # a rotation may overflow too
        qk = torch.nan_to_num(qk, 0.0, 0.0, 0.0)
    slots = torch.where(slots < 0, scratch_slot, slots)
    k_slots.index_copy_(0, slots, qk[:, q_heads:])
    values = qkv[:, q_heads + kv_heads :]
    if norms_values:
        assert qk_norms is not None
        values = F.rms_norm(values, values.shape[-1:], eps=qk_norms[1].eps)
    v_slots.index_copy_(0, slots, values)
    return qk[:, :q_heads]


def rope_queries(q: Tensor, rope: Rope, norm: Norm) -> Tensor:
    """q [T, Hq, D] -> the same, normed head by head and rotated: where nothing is written."""
    kernels = triton_kernels(q)
    if kernels is not None:
        return kernels.rope_queries(q, rope, norm)
    return apply_rope(rms_norm(q, norm), *rope.rotation(q.dtype))
