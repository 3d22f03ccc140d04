"""The Triton kernel of `rope.py`: one program works on a few heads of one row."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .kv_codes import as_bytes
from .triton_kv_codes import codes_of_heads

if TYPE_CHECKING:
    from .norm import Norm
    from .rope import CacheWrite, KeysAndValues, Rope

FEW_HEADS = 512  # heads of all rows that get a program each: few want every multiprocessor
MANY = 16  # heads of a row that a program works on elsewhere


class Heads(NamedTuple):
    """Heads [T, H, D]; rows and heads are strides."""

    x: Tensor
    row: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        return cls(x, x.stride(0), x.stride(1))


class Rotation(NamedTuple):
    table: Tensor  # [positions, D], as of `Rope`
    positions: Tensor  # [T]

    @classmethod
    def of(cls, rope: Rope) -> Rotation:
        return cls(rope.cos_sin, rope.position_ids)


class CacheSlots(NamedTuple):
    """Where keys and values go; rows and heads are strides."""

    slots: Tensor  # [T], -1 is `scratch_slot`
    scratch_slot: int
    k: Tensor
    k_row: int
    k_head: int
    v: Tensor
    v_row: int
    v_head: int
    k_scales: Tensor  # [Hkv], where k and v are codes in FP8; any tensor where they are floats
    v_scales: Tensor

    @classmethod
    def of(cls, to: CacheWrite) -> CacheSlots:
        return cls(
            slots=to.slots,
            scratch_slot=to.scratch_slot,
            k=as_bytes(to.k_slots),
            k_row=to.k_slots.stride(0),
            k_head=to.k_slots.stride(1),
            v=as_bytes(to.v_slots),
            v_row=to.v_slots.stride(0),
            v_head=to.v_slots.stride(1),
            k_scales=to.slots if to.k_scales is None else to.k_scales,
            v_scales=to.slots if to.v_scales is None else to.v_scales,
        )


class HeadNorms(NamedTuple):
    q: Tensor  # [D], the weight; any tensor where there are no norms
    k: Tensor
    eps: float

    @classmethod
    def of(cls, qk_norms: tuple[Norm, Norm] | None, x: Tensor) -> HeadNorms:
        if qk_norms is None:
            return cls(x, x, 0.0)
        q_norm, k_norm = qk_norms
        return cls(q_norm.weight, k_norm.weight, q_norm.eps)


class HeadSizes(NamedTuple):
    q_heads: int
    kv_heads: int
    dim: int
    HAS_NORMS: bool
    HAS_SCALES: bool  # the cache holds codes in FP8
    OFFSET: float  # of the norms' weights
    NORMS_VALUES: bool
    KEEPS_FINITE: bool
    HEADS: int  # that a program works on
    BLOCK: int  # at least dim, a power of two


def rope_and_write(
    qkv: Tensor,
    rope: Rope,
    q_heads: int,
    to: CacheWrite,
    qk_norms: tuple[Norm, Norm] | None = None,
    norms_values: bool = False,
) -> Tensor:
    """As its twin."""
    rows, _, dim = qkv.shape
    sizes = _sizes_of(qkv, q_heads, to, qk_norms, norms_values)
    q = torch.empty((rows, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    _launch(qkv, rope, CacheSlots.of(to), HeadNorms.of(qk_norms, qkv), q, sizes)
    return q


def _sizes_of(
    heads: Tensor,
    q_heads: int,
    to: CacheWrite,
    qk_norms: tuple[Norm, Norm] | None,
    norms_values: bool,
) -> HeadSizes:
    rows, count, dim = heads.shape
    return HeadSizes(
        q_heads=q_heads,
        kv_heads=to.k_slots.shape[1],
        dim=dim,
        HAS_NORMS=qk_norms is not None,
        HAS_SCALES=to.k_scales is not None,
        OFFSET=0.0 if qk_norms is None else qk_norms[0].offset,
        NORMS_VALUES=norms_values,
        KEEPS_FINITE=to.keeps_finite,
        HEADS=_heads_per_program(rows * count),
        BLOCK=triton.next_power_of_2(dim),
    )


class LayerHeads(NamedTuple):
    """What one layer of `write_layers` has."""

    heads: Heads
    rotation: Rotation
    cache: CacheSlots
    norms: HeadNorms


def write_layers(layers: tuple[KeysAndValues, ...]) -> None:
    """As its twin, in one launch where all layers are alike."""
    sizes = [_sizes_of(x.heads, 0, x.to, x.qk_norms, x.norms_values) for x in layers]
    if len({*sizes}) > 1:
        for x in layers:
            rope_and_write(x.heads, x.rope, 0, x.to, x.qk_norms, x.norms_values)
        return
    heads = layers[0].heads
    programs = triton.cdiv(heads.shape[1], sizes[0].HEADS)
    _write_layers_kernel[(heads.shape[0], programs, len(layers))](
        tuple(
            LayerHeads(
                Heads.of(x.heads),
                Rotation.of(x.rope),
                CacheSlots.of(x.to),
                HeadNorms.of(x.qk_norms, x.heads),
            )
            for x in layers
        ),
        heads,
        sizes=sizes[0],
        num_warps=1 if sizes[0].HEADS == 1 else 4,
        **dependent_launch(heads),
    )


def rope_queries(q: Tensor, rope: Rope, norm: Norm) -> Tensor:
    """As its twin."""
    rows, heads, dim = q.shape
    sizes = HeadSizes(
        q_heads=heads,
        kv_heads=0,
        dim=dim,
        HAS_NORMS=True,
        HAS_SCALES=False,
        OFFSET=norm.offset,
        NORMS_VALUES=False,
        KEEPS_FINITE=False,
        HEADS=_heads_per_program(rows * heads),
        BLOCK=triton.next_power_of_2(dim),
    )
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    nowhere = CacheSlots(
        slots=rope.position_ids,  # any numbers: there are no keys and values
        scratch_slot=0,
        k=out,
        k_row=0,
        k_head=0,
        v=out,
        v_row=0,
        v_head=0,
        k_scales=out,
        v_scales=out,
    )
    _launch(q, rope, nowhere, HeadNorms(norm.weight, norm.weight, norm.eps), out, sizes)
    return out


def _heads_per_program(heads: int) -> int:
    return 1 if heads <= FEW_HEADS else MANY


def _launch(
    x: Tensor, rope: Rope, cache: CacheSlots, norms: HeadNorms, out: Tensor, sizes: HeadSizes
) -> None:
    _rope_and_write_kernel[(x.shape[0], triton.cdiv(x.shape[1], sizes.HEADS))](
        Heads.of(x),
        Rotation.of(rope),
        cache,
        norms,
        out,
        sizes=sizes,
        num_warps=1 if sizes.HEADS == 1 else 4,
        **dependent_launch(x),
    )


@triton.jit
def _rope_and_write_kernel(
    heads, rotation, cache, norms, out, sizes: tl.constexpr, PDL: tl.constexpr
):
    _rope_and_write(heads, rotation, cache, norms, out, sizes, PDL)


@triton.jit
def _write_layers_kernel(layers, heads, sizes: tl.constexpr, PDL: tl.constexpr):
    for i in tl.static_range(len(layers)):
        if tl.program_id(2) == i:
            layer = layers[i]
            _rope_and_write(
                layer.heads, layer.rotation, layer.cache, layer.norms, heads, sizes, PDL
            )


@triton.jit
def _rope_and_write(heads, rotation, cache, norms, out, sizes: tl.constexpr, PDL: tl.constexpr):
    """HEADS heads of one row. `out` is read for its type alone where there are no queries."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * sizes.HEADS + tl.arange(0, sizes.HEADS))[:, None]
    kind = out.dtype.element_ty
    half: tl.constexpr = sizes.dim // 2
    qk_heads: tl.constexpr = sizes.q_heads + sizes.kv_heads
    all_heads: tl.constexpr = qk_heads + sizes.kv_heads
    d = tl.arange(0, sizes.BLOCK)[None, :]
    is_q, is_value = head < sizes.q_heads, head >= qk_heads
    in_dim = d < sizes.dim
    inside = in_dim & (head < all_heads)
    opposite = (d + half) % sizes.dim
    slot = tl.load(cache.slots + row, cache_modifier=".cg")
    slot = tl.where(slot < 0, cache.scratch_slot, slot)
    position = tl.load(rotation.positions + row, cache_modifier=".cg")
    table = rotation.table + position * sizes.dim + d % half
    # Rounded as the model's dtype holds them, and in between, as torch's two operations do.
    cos = tl.load(table, mask=in_dim, other=0.0, cache_modifier=".cg").to(kind).to(tl.float32)
    sin = tl.load(table + half, mask=in_dim, other=0.0, cache_modifier=".cg")
    sin = sin.to(kind).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    after_previous(PDL)  # which made q, k and v; positions and slots are older
    source = heads.x + row * heads.row + head * heads.head
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + opposite, mask=inside, other=0.0)
    if sizes.KEEPS_FINITE:
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)
        other = tl.where(tl.abs(other.to(tl.float32)) < float("inf"), other, 0.0)
    pointer = cache.v + slot * cache.v_row + (head - qk_heads) * cache.v_head
    value = x.to(tl.float32)
    if sizes.HAS_NORMS:
        scale = tl.rsqrt(tl.sum(value * value, 1) / sizes.dim + norms.eps)[:, None]
    stored = (value * scale).to(kind) if sizes.NORMS_VALUES else x
    if not sizes.HAS_SCALES:
        stored = stored.to(cache.v.dtype.element_ty)
    else:
        stored = codes_of_heads(
            stored, cache.v_scales, head - qk_heads, is_value & (head < all_heads), in_dim
        )
    tl.store(pointer + d, stored, mask=inside & is_value)
    if sizes.HAS_NORMS:
        q_weight = tl.load(norms.q + d, mask=in_dim, other=0.0)
        k_weight = tl.load(norms.k + d, mask=in_dim, other=0.0)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32) + sizes.OFFSET
        x = (value * scale * weight).to(kind)
        q_weight = tl.load(norms.q + opposite, mask=in_dim, other=0.0)
        k_weight = tl.load(norms.k + opposite, mask=in_dim, other=0.0)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32) + sizes.OFFSET
        other = (other.to(tl.float32) * scale * weight).to(kind)
    rotated = (x.to(tl.float32) * cos).to(kind).to(tl.float32)
    rotated = (rotated + other.to(tl.float32) * sin).to(kind)
    if sizes.KEEPS_FINITE:  # a rotation may overflow too
        rotated = tl.where(tl.abs(rotated.to(tl.float32)) < float("inf"), rotated, 0.0)
    tl.store(out + (row * sizes.q_heads + head) * sizes.dim + d, rotated, mask=inside & is_q)
    pointer = cache.k + slot * cache.k_row + (head - sizes.q_heads) * cache.k_head
    is_key = ~is_q & ~is_value
    if sizes.HAS_SCALES:
        rotated = codes_of_heads(rotated, cache.k_scales, head - sizes.q_heads, is_key, in_dim)
    tl.store(pointer + d, rotated, mask=inside & is_key)
