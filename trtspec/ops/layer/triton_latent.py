"""The Triton kernel of `latent.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

if TYPE_CHECKING:
    from .norm import Norm
    from .rope import Rope

HEADS = 16  # that one program rotates


def rope_and_write_latent(
    turning: Tensor, latent: Tensor, norm: Norm, rope: Rope, out: Tensor, k_slots: Tensor,
    slots: Tensor, scratch_slot: int, keeps_finite: bool,
) -> None:  # fmt: skip
    """As its twin in `latent.py`."""
    rows, heads, size = turning.shape
    rank = latent.shape[1] - size
    _rope_and_write_latent_kernel[(rows, 1 + triton.cdiv(heads, HEADS))](
        turning, latent, norm.weight, rope.cos_sin, rope.position_ids, slots, out, k_slots,
        norm.eps, scratch_slot, turning.stride(0), turning.stride(1), latent.stride(0),
        out.stride(0), out.stride(1), k_slots.stride(0), heads,
        rank=rank, size=size, KEEPS_FINITE=keeps_finite, HEADS=HEADS,
        BLOCK_L=triton.next_power_of_2(rank), BLOCK_R=triton.next_power_of_2(size), num_warps=4,
        **dependent_launch(latent),
    )  # fmt: skip


@triton.jit
def _rope_and_write_latent_kernel(
    q_ptr, x_ptr, weight_ptr, table_ptr, position_ptr, slot_ptr, out_ptr, k_ptr, eps, scratch_slot,
    q_row, q_head, x_row, out_row, out_head, k_row, heads,
    rank: tl.constexpr, size: tl.constexpr, KEEPS_FINITE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its latent and key, or HEADS of its query heads."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    table = table_ptr + tl.load(position_ptr + row) * size
    slot = tl.load(slot_ptr + row)
    slot = tl.where(slot < 0, scratch_slot, slot)
    r = tl.arange(0, BLOCK_R)[None, :]
    if tl.program_id(1) == 0:
        d = tl.arange(0, BLOCK_L)
        x = tl.load(x_ptr + row * x_row + d, mask=d < rank, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / rank + eps)
        weight = tl.load(weight_ptr + d, mask=d < rank, other=0.0).to(tl.float32)
        value = (x * scale * weight).to(k_ptr.dtype.element_ty)
        if KEEPS_FINITE:
            value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
        tl.store(k_ptr + slot * k_row + d, value, mask=d < rank)
        one = tl.zeros([1], tl.int64)
        key = _turned(x_ptr + row * x_row + rank + one, one == 0, table, size, BLOCK_R)
        if KEEPS_FINITE:
            key = tl.where(tl.abs(key.to(tl.float32)) < float("inf"), key, 0.0)
        tl.store(k_ptr + slot * k_row + rank + one[:, None] + r, key, mask=r < size)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        is_head = head < heads
        turned = _turned(q_ptr + row * q_row + head * q_head, is_head, table, size, BLOCK_R)
        place = out_ptr + row * out_row + head[:, None] * out_head + r
        tl.store(place, turned, mask=is_head[:, None] & (r < size))


@triton.jit
def _turned(start_ptr, exists, table, size: tl.constexpr, BLOCK_R: tl.constexpr):
    """The rotated vectors [N, BLOCK_R] that begin at start_ptr [N]; rounded in between as torch's
    two operations do."""
    kind = start_ptr.dtype.element_ty
    half: tl.constexpr = size // 2
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = exists[:, None] & (r < size)
    x = tl.load(start_ptr[:, None] + r, mask=inside, other=0.0)
    other = tl.load(start_ptr[:, None] + (r + half) % size, mask=inside, other=0.0)
    cos = tl.load(table + r % half, mask=r < size, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(table + half + r % half, mask=r < size, other=0.0).to(kind).to(tl.float32)
    sin = tl.where(r < half, -sin, sin)
    turned = (x.to(tl.float32) * cos).to(kind).to(tl.float32)
    return (turned + other.to(tl.float32) * sin).to(kind)
