"""The Triton kernel of `latent.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .kv_codes import as_bytes
from .triton_kv_codes import encoded
from .triton_norm import NormWeight, Rows
from .triton_rope import Heads, Rotation

if TYPE_CHECKING:
    from .norm import Norm
    from .rope import CacheWrite, Rope

HEADS = 16  # that one program rotates


class LatentSlots(NamedTuple):
    """Where latents and keys go; the row is a stride."""

    slots: Tensor  # [T], -1 is `scratch_slot`
    scratch_slot: int
    k: Tensor  # [slots, 1, L + R]
    k_row: int
    k_scale: Tensor | None  # [1], where k is codes in FP8; None is floats


class LatentSizes(NamedTuple):
    rank: int  # L
    size: int  # R
    KEEPS_FINITE: bool
    HEADS: int
    BLOCK_L: int  # at least L, a power of two
    BLOCK_R: int


def rope_and_write_latent(
    q: Tensor, latent: Tensor, norm: Norm, rope: Rope, out: Tensor, to: CacheWrite
) -> None:
    """As its twin."""
    rows, heads, size = q.shape
    rank = latent.shape[1] - size
    sizes = LatentSizes(
        rank=rank,
        size=size,
        KEEPS_FINITE=to.keeps_finite,
        HEADS=HEADS,
        BLOCK_L=triton.next_power_of_2(rank),
        BLOCK_R=triton.next_power_of_2(size),
    )
    cache = LatentSlots(
        slots=to.slots,
        scratch_slot=to.scratch_slot,
        k=as_bytes(to.k_slots),
        k_row=to.k_slots.stride(0),
        k_scale=to.k_scales,
    )
    _rope_and_write_latent_kernel[(rows, 1 + triton.cdiv(heads, HEADS))](
        Heads.of(q),
        Rows.of(latent),
        NormWeight(norm.weight, norm.eps),
        Rotation.of(rope),
        cache,
        Heads.of(out),
        heads,
        sizes=sizes,
        num_warps=4,
        **dependent_launch(latent),
    )


@triton.jit
def _rope_and_write_latent_kernel(
    q, latent, norm, rotation, cache, out, num_heads, sizes: tl.constexpr, PDL: tl.constexpr
):
    """One row: its latent and key, or HEADS of its query heads."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    rank: tl.constexpr = sizes.rank
    size: tl.constexpr = sizes.size
    table = rotation.table + tl.load(rotation.positions + row) * size
    slot = tl.load(cache.slots + row)
    slot = tl.where(slot < 0, cache.scratch_slot, slot)
    r = tl.arange(0, sizes.BLOCK_R)[None, :]
    if tl.program_id(1) == 0:
        d = tl.arange(0, sizes.BLOCK_L)
        x = tl.load(latent.x + row * latent.row + d, mask=d < rank, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / rank + norm.eps)
        weight = tl.load(norm.weight + d, mask=d < rank, other=0.0).to(tl.float32)
        value = (x * scale * weight).to(latent.x.dtype.element_ty)
        if sizes.KEEPS_FINITE:
            value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
        one = tl.zeros([1], tl.int64)
        key_ptr = latent.x + row * latent.row + rank + one
        key = _rotated(key_ptr, one == 0, table, size, sizes.BLOCK_R)
        if sizes.KEEPS_FINITE:
            key = tl.where(tl.abs(key.to(tl.float32)) < float("inf"), key, 0.0)
        if cache.k_scale is not None:
            has_nan = tl.max((value != value).to(tl.int32), 0)
            has_nan += tl.max(tl.max((key != key).to(tl.int32), 1), 0)
            by = tl.load(cache.k_scale)
            value = tl.where(has_nan > 0, 0x7F, encoded(value.to(tl.float32), by)).to(tl.uint8)
            key = tl.where(has_nan > 0, 0x7F, encoded(key.to(tl.float32), by)).to(tl.uint8)
        tl.store(cache.k + slot * cache.k_row + d, value, mask=d < rank)
        tl.store(cache.k + slot * cache.k_row + rank + one[:, None] + r, key, mask=r < size)
    else:
        head = (tl.program_id(1) - 1) * sizes.HEADS + tl.arange(0, sizes.HEADS)
        is_head = head < num_heads
        head_ptr = q.x + row * q.row + head * q.head
        rotated = _rotated(head_ptr, is_head, table, size, sizes.BLOCK_R)
        pointer = out.x + row * out.row + head[:, None] * out.head + r
        tl.store(pointer, rotated, mask=is_head[:, None] & (r < size))


@triton.jit
def _rotated(start_ptr, exists, table, size: tl.constexpr, BLOCK_R: tl.constexpr):
    """Returns the rotated numbers [N, BLOCK_R] that begin at start_ptr [N].

    They are rounded in between, as torch's two operations do.
    """
    kind = start_ptr.dtype.element_ty
    half: tl.constexpr = size // 2
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = exists[:, None] & (r < size)
    x = tl.load(start_ptr[:, None] + r, mask=inside, other=0.0)
    other = tl.load(start_ptr[:, None] + (r + half) % size, mask=inside, other=0.0)
    cos = tl.load(table + r % half, mask=r < size, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(table + half + r % half, mask=r < size, other=0.0).to(kind).to(tl.float32)
    sin = tl.where(r < half, -sin, sin)
    rotated = (x.to(tl.float32) * cos).to(kind).to(tl.float32)
    return (rotated + other.to(tl.float32) * sin).to(kind)
