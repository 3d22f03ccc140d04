"""Softmax sums of query rows over a range of keys in the paged cache ("online softmax").

Triton's kernels of generations and of contexts share them, and what they are called with.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.layer.kv_codes import as_bytes
from ..ops.layer.triton_fp8 import is_quick
from ..ops.layer.triton_kv_codes import decoded, starts_with_nan
from .base import CachedLayer
from .split_kv import LOG2_E, Keys, Layer, Queries

MAX_TILE = 128 * 128  # query rows times head size that one program's registers hold


class Cache(NamedTuple):
    """A layer's keys and values, [slots, Hkv, D]; rows and heads are strides."""

    k: Tensor
    v: Tensor
    k_row: int
    k_head: int
    v_row: int
    v_head: int
    k_scales: Tensor | None  # [Hkv], where k and v are codes in FP8; None is floats
    v_scales: Tensor | None

    @classmethod
    def of(cls, cached: CachedLayer) -> Cache:
        k, v = as_bytes(cached.k_slots), as_bytes(cached.v_slots)
        return cls(
            k=k,
            v=v,
            k_row=k.stride(0),
            k_head=k.stride(1),
            v_row=v.stride(0),
            v_head=v.stride(1),
            k_scales=cached.k_scales,
            v_scales=cached.v_scales,
        )


def kernel_arguments(q: Tensor, cached: CachedLayer, out: Tensor) -> tuple[Layer, Queries]:
    """Returns the kernels' arguments of a layer and of its queries."""
    dim = q.shape[2]
    factor, cap = _base_2(dim, cached.scale, cached.softcap)
    layer = Layer(
        kv_heads=cached.kv_heads,
        per_kv=q.shape[1] // cached.kv_heads,
        dim=dim,
        page_size=cached.page_size,
        window=-1 if cached.window is None else cached.window,
        cap=cap,
        CODES=cached.k_scales is not None,
        QUICK=is_quick(cached.k_slots, q.dtype),
    )
    return layer, Queries.of(q, out, factor, cached.sinks)


def _base_2(dim: int, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """Returns (factor, cap), both times log2 e.

    `factor` scales a product of query and key; with a softcap it is 2 * scale / softcap. No softcap
    is a cap of 0.
    """
    factor = (dim**-0.5 if scale is None else scale) * LOG2_E
    return (factor, 0.0) if softcap is None else (2 * factor / softcap, softcap * LOG2_E)


def padded_dim(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))  # tl.dot needs 16


@triton.jit
def keys_of(cache, kv_head, blocks, table_width):
    """Returns the `Keys` of a KV head."""
    k, v = cache.k + kv_head * cache.k_head, cache.v + kv_head * cache.v_head
    return Keys(k, v, cache.k_row, cache.v_row, blocks, table_width)


@triton.jit
def score_scale(queries, cache, kv_head):
    """Returns what a product of a query and a key is multiplied by."""
    scale = queries.scale
    if cache.k_scales is not None:
        scale = scale * tl.load(cache.k_scales + kv_head)
    return scale


@triton.jit
def as_values(acc, cache, kv_head):
    """Returns sums of weighted values as what the values stand for."""
    if cache.v_scales is not None:
        acc = acc * tl.load(cache.v_scales + kv_head)
    return acc


@triton.jit
def add_keys(
    sums,
    q,
    positions,
    firsts,
    start,
    end,
    keys,
    scale,
    layer: tl.constexpr,
    blocks: tl.constexpr,
    MASKED: tl.constexpr,
    FINDS_NAN: tl.constexpr,
):
    """Returns softmax sums with the keys at positions start … end - 1 added.

    They are those of query rows, in base 2: the largest score, the sum of weights, the sum of
    weighted values. Not MASKED are whole blocks of keys that every row sees.

    Args:
        firsts: the first key of each row; None is what the layer's window says.
        blocks: a `Cut` or `ContextBlocks`.
        FINDS_NAN: keys and values that are NaN count where they are codes too.
    """
    best, total, acc = sums
    d = tl.arange(0, blocks.BLOCK_D)
    for begin in range(start, end, blocks.BLOCK_N):
        n = begin + tl.arange(0, blocks.BLOCK_N)
        page = n // layer.page_size
        inside = (n[:, None] < end) & (d[None, :] < layer.dim)
        if MASKED:
            block = tl.load(keys.blocks + page, mask=(n < end) & (page < keys.table_width), other=0)
        else:
            block = tl.load(keys.blocks + page)
        slot = block.to(tl.int64) * layer.page_size + n % layer.page_size
        if MASKED or layer.dim < blocks.BLOCK_D:
            k = tl.load(keys.k + slot[:, None] * keys.k_row + d[None, :], mask=inside, other=0)
            v = tl.load(keys.v + slot[:, None] * keys.v_row + d[None, :], mask=inside, other=0)
        else:
            k = tl.load(keys.k + slot[:, None] * keys.k_row + d[None, :])
            v = tl.load(keys.v + slot[:, None] * keys.v_row + d[None, :])
        if layer.CODES:
            k = decoded(k, q.dtype, layer.QUICK)
            v = decoded(v, q.dtype, layer.QUICK)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if layer.cap > 0:  # tanh(x / 2) = 1 - 2 / (exp(x) + 1)
            scores = layer.cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if FINDS_NAN and layer.CODES:
            is_nan = starts_with_nan(keys.k + slot * keys.k_row, n < end)
            is_nan = is_nan | starts_with_nan(keys.v + slot * keys.v_row, n < end)
            scores = tl.where(is_nan[None, :], float("nan"), scores)
        if MASKED:
            seen = (n[None, :] <= positions[:, None]) & (n[None, :] < end)
            if firsts is not None:
                seen = seen & (n[None, :] >= firsts[:, None])
            elif layer.window > 0:
                seen = seen & (n[None, :] > positions[:, None] - layer.window)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet has no best: keep its weights at zero, not NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    return best, total, acc
