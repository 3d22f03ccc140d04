"""Rotary position embedding (Su et al., 2021), the half-split ("NeoX") layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...metadata.attention import SCRATCH_BLOCK, AttentionMetadata
from ..launch.dispatch import twin
from .kv_codes import put
from .norm import Norm, rms_norm


class Rope:
    """The rotations of one pass: a table, and each row's position in it.

    Args:
        cos_sin: [positions, D] float32, the cosines of the D/2 frequencies, then the sines.
        position_ids: [T] int64.
    """

    def __init__(self, cos_sin: Tensor, position_ids: Tensor):
        self.cos_sin, self.position_ids = cos_sin, position_ids
        self._rotation: tuple[Tensor, Tensor] | None = None

    def rotation(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [T, 1, D] in `dtype`; the first half of sin is negated.

        They are made once and used by every layer.
        """
        if self._rotation is None:
            cos, sin = self.cos_sin[self.position_ids].to(dtype)[:, None].chunk(2, dim=-1)
            self._rotation = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return self._rotation


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by `Rope.rotation`'s (cos, sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class CacheWrite(NamedTuple):
    """Where a pass's keys and values go."""

    k_slots: Tensor  # [slots, Hkv, D]
    v_slots: Tensor  # [slots, Hkv, Dv]; of latent attention a view of k_slots
    slots: Tensor  # [T] int64, -1 is `scratch_slot`
    scratch_slot: int
    keeps_finite: bool = False  # NaN and infinities enter the cache as 0
    k_scales: Tensor | None = None  # [Hkv] float32, of a cache in FP8; None is floats
    v_scales: Tensor | None = None
    slots_are_final: bool = False  # none is -1

    @classmethod
    def of(
        cls, meta: AttentionMetadata, kv_group: int, layer: int, keeps_finite: bool
    ) -> CacheWrite:
        group = meta.kv_groups[kv_group]
        k_slots, v_slots = group.layer_slots[layer]
        k_scales, v_scales = group.layer_scales[layer]
        slots, is_cpu = meta.slot_mappings[kv_group], k_slots.device.type == "cpu"
        if is_cpu:  # once for all layers
            key = "written slots", kv_group
            if key not in meta.derived:
                meta.derived[key] = slots.where(slots >= 0, SCRATCH_BLOCK * group.page_size)
            slots = meta.derived[key]
        return cls(
            k_slots=k_slots,
            v_slots=v_slots,
            slots=slots,
            scratch_slot=SCRATCH_BLOCK * group.page_size,
            keeps_finite=keeps_finite,
            k_scales=k_scales,
            v_scales=v_scales,
            slots_are_final=is_cpu,
        )

    def written_slots(self) -> Tensor:
        """Returns `slots` with the scratch slot in the place of -1."""
        if self.slots_are_final:
            return self.slots
        return torch.where(self.slots < 0, self.scratch_slot, self.slots)


@twin("layer.triton_rope")
def rope_and_write(
    qkv: Tensor,
    rope: Rope,
    q_heads: int,
    to: CacheWrite,
    qk_norms: tuple[Norm, Norm] | None = None,
    norms_values: bool = False,
) -> Tensor:
    """Rotates queries and keys, and writes keys and values to the paged cache.

    Args:
        qkv: [T, Hq + 2 Hkv, D].
        qk_norms: over the heads of queries and of keys, before the rotation.
        norms_values: values have the keys' norm too, without a weight.

    Returns:
        The rotated queries, [T, Hq, D].
    """
    if to.keeps_finite:
        qkv = torch.nan_to_num(qkv, 0.0, 0.0, 0.0)
    kv_heads = to.k_slots.shape[1]
    qk = qkv[:, : q_heads + kv_heads]
    if qk_norms is not None:
        q_norm, k_norm = qk_norms
        normed = rms_norm(qk[:, :q_heads], q_norm), rms_norm(qk[:, q_heads:], k_norm)
        qk = torch.cat(normed, dim=1)
    qk = apply_rope(qk, *rope.rotation(qkv.dtype))
    if to.keeps_finite:  # a rotation may overflow too
        qk = torch.nan_to_num(qk, 0.0, 0.0, 0.0)
    slots = to.written_slots()
    put(to.k_slots, slots, qk[:, q_heads:], to.k_scales)
    values = qkv[:, q_heads + kv_heads :]
    if norms_values:
        assert qk_norms is not None
        values = F.rms_norm(values, values.shape[-1:], eps=qk_norms[1].eps)
    put(to.v_slots, slots, values, to.v_scales)
    return qk[:, :q_heads]


class KeysAndValues(NamedTuple):
    """Of one layer: what `write_layers` writes, and where."""

    heads: Tensor  # [T, 2 Hkv, D]
    rope: Rope
    to: CacheWrite
    qk_norms: tuple[Norm, Norm] | None = None
    norms_values: bool = False


@twin("layer.triton_rope")
def write_layers(layers: tuple[KeysAndValues, ...]) -> None:
    """Rotates and writes the keys and values of several layers, as `rope_and_write` without
    queries."""
    for x in layers:
        rope_and_write(x.heads, x.rope, 0, x.to, x.qk_norms, x.norms_values)


@twin("layer.triton_rope")
def rope_queries(q: Tensor, rope: Rope, norm: Norm) -> Tensor:
    """Normalizes and rotates queries head by head, [T, Hq, D], where nothing is written."""
    return apply_rope(rms_norm(q, norm), *rope.rotation(q.dtype))
