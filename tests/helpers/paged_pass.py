"""Metadata of a pass over a random paged cache, in floats or in FP8."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trtspec.attention.base import AttentionBackend, CachedLayer
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS, AttentionMetadata, KVGroup
from trtspec.ops.layer.kv_codes import encode
from trtspec.ops.layer.rope import CacheWrite
from trtspec.ops.step.slots import draft_step_metadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pass(
    lengths: list[int], rows: int, kv_heads: int, dim: int, page: int, max_seq_len: int
) -> AttentionMetadata:
    """Generation rows at the ends of texts of `lengths`, random caches, scattered blocks."""
    generator = torch.Generator().manual_seed(len(lengths) * 31 + rows)
    pages = [-(-(n + rows) // page) for n in lengths]
    total = NUM_RESERVED_BLOCKS + sum(pages)
    order = list(range(NUM_RESERVED_BLOCKS, total))
    random.Random(0).shuffle(order)
    table = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int32)
    for i, count in enumerate(pages):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    caches = [torch.randn(1, total, page, kv_heads, dim, generator=generator) for _ in range(2)]
    for cache in caches:
        cache[:, 0] = 0
    positions = torch.tensor([[n + r for r in range(rows)] for n in lengths])
    group = KVGroup(*(cache.to(DEVICE) for cache in caches))
    meta = AttentionMetadata(
        context_lens=(), num_generations=len(lengths), rows_per_generation=rows,
        position_ids=positions.flatten().to(DEVICE),
        kv_lens=(positions[:, -1] + 1).to(torch.int32).to(DEVICE),
        max_kv_len=max(lengths) + rows, kv_groups=(group,), block_tables=(table.to(DEVICE),),
        slot_mappings=(torch.empty(0, dtype=torch.int64),), max_seq_len=max_seq_len,
    )  # fmt: skip
    return draft_step_metadata(meta, positions.to(DEVICE), 0)


def attend(
    backend: AttentionBackend, q: Tensor, meta: AttentionMetadata, *, layer: int = 0,
    window: int | None = None, **how: Any,
) -> Tensor:  # fmt: skip
    """Attends over the first KV group; `how` is as of `CachedLayer.of`."""
    return backend.attend(q, meta, CachedLayer.of(meta, 0, layer, window, **how))


def write_and_attend(
    backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, *,
    layer: int = 0, **how: Any,
) -> Tensor:  # fmt: skip
    """Writes k and v [T, Hkv, D] to the cache, then attends."""
    to = CacheWrite.of(meta, 0, layer, keeps_finite=False)
    for cache, x in ((to.k_slots, k), (to.v_slots, v)):
        cache[to.written_slots()] = x
    return attend(backend, q, meta, layer=layer, **how)


def in_fp8(meta: AttentionMetadata) -> tuple[AttentionMetadata, AttentionMetadata]:
    """The pass over a cache in FP8 with a scale for each head, and over what that stands for, in
    float64."""
    group = meta.kv_groups[0]
    layers, heads, value_dim = group.k_cache.shape[0], group.k_cache.shape[3], None
    if group.v_cache.shape[-1] != group.k_cache.shape[-1]:
        value_dim = group.v_cache.shape[-1]
    generator = torch.Generator().manual_seed(9)
    caches, exact, scales = [], [], []
    for cache in (group.k_cache, group.v_cache)[: 1 if value_dim else 2]:
        of_heads = (0.015 + 0.01 * torch.rand(layers, heads, generator=generator)).to(cache.device)
        codes = torch.stack([
            encode(layer.flatten(0, 1), of_layer).view(layer.shape)
            for layer, of_layer in zip(cache, of_heads, strict=True)
        ])  # fmt: skip
        caches.append(codes)
        scales.append(of_heads)
        exact.append(codes.double() * of_heads.double()[:, None, None, :, None])
    if value_dim is not None:
        caches.append(caches[0][..., :value_dim])
        exact.append(exact[0][..., :value_dim])
        scales.append(scales[0])
    wide = KVGroup(*exact)
    error = (exact[0].float() - group.k_cache).abs()
    assert (error <= group.k_cache.abs() * 2**-4 + 2**-9 * scales[0].max()).all()
    return (
        replace(meta, kv_groups=(KVGroup(*caches, *scales),), derived={}),
        replace(meta, kv_groups=(wide,), derived={}),
    )
