"""Attention of generations by the CUDA C++ kernel of `csrc/`.

A group is some rows of a request and a KV head. A cluster of thread blocks reads its keys, or one
block alone (csrc/include/trtspec/cluster_attention.cuh). Triton's kernel (`triton_generations.py`)
serves what it does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from .base import CachedLayer
from .split_kv import Layer, Queries, Tables

TILE_KEYS = 16
FEW_PAIRS, MAX_PAIRS = 16, {64: 32, 128: 32, 256: 16}
"""Of a row and a query head, for each KV head; the most of a cluster by the heads' size."""
MAX_PARTED_PAIRS = 64
"""Of a request, where several clusters share its rows."""


class Cluster(NamedTuple):
    """Thread blocks of a group, and the warps of each."""

    size: int
    warps: int

    @property
    def most_keys(self) -> int:
        """The keys that a request's block table may have room for. With more, a long request would
        end last. A graph's tables have room for the engine's longest text.
        """
        return self.size * self.warps * 1024


FEW_GROUPS, MOST_PARTS, LEAST_PART = 8, 12, 2
"""Heads of 64 of so few requests times KV heads have further parts, which fill a GPU: groups and
parts of all groups at most, rows of a part at least."""
PARTED_GROUPS = 17, 32
"""Groups of heads of 128 whose rows are parted, at least and at most."""
WIDE_GROUPS = {8: 16, 4: 24, 2: 66}
"""Thread blocks of a group, and the most groups. (32 clusters of four have no room at once.)"""
MANY_GROUPS = 64  # these have two blocks each at most: with more, Triton's kernels are faster
WIDE = 256
"""Heads of which four warps have room for keys, in place of eight."""


def attend(
    queries: Queries, cached: CachedLayer, tables: Tables, layer: Layer, rows: int, is_beside: bool
) -> bool:
    """Writes the attention of generations' rows into `queries.out` if the kernel serves them.

    Args:
        rows: of each request, or at most where the tables have `starts`.
        is_beside: as of `triton_generations.paged_attention`.

    Returns:
        Whether it does.
    """
    module = _module(queries, cached, tables, layer, rows)
    if module is None:
        return False
    groups = tables.blocks.shape[0] * layer.kv_heads
    keys = tables.blocks.shape[1] * layer.page_size
    for cluster in (best_cluster(layer, groups, rows), *larger(layer)):
        if keys <= cluster.most_keys and (groups < MANY_GROUPS or cluster.size <= 2):
            attend_clusters(module, queries, cached, tables, layer, rows, cluster, is_beside)
            return True
    return False


def best_cluster(layer: Layer, groups: int, rows: int) -> Cluster:
    """Returns what is fastest for up to a few thousand tokens, with exceptions (decision 029).

    One row and a few have the same cluster: so most rows have the same bits alone and among drafts.

    Args:
        groups: requests times KV heads.
        rows: of each request, at most.
    """
    if layer.dim == WIDE:
        sizes = (Cluster(size, 4) for size, most in WIDE_GROUPS.items() if groups <= most)
        return next(sizes, Cluster(1, 4))
    if layer.dim == 64 and groups <= FEW_GROUPS:
        return Cluster(16, 4)
    if layer.dim == 64 and rows * layer.per_kv > FEW_PAIRS and 72 <= groups < 160:
        return Cluster(2, 4)
    most_of = {4: 36, 2: 71, 1: 256} if layer.dim == 64 else {8: 8, 4: 24, 2: 64, 1: 160}
    sizes = (Cluster(size, 8) for size, most in most_of.items() if groups <= most)
    return next(sizes, Cluster(1, 4))


def most_pairs(layer: Layer, groups: int) -> int:
    """Returns how many pairs of a row and a query head a request may have for each KV head."""
    most = MAX_PAIRS.get(layer.dim, 0)
    is_parted = groups <= FEW_GROUPS if layer.dim == 64 else _parts_rows(layer, groups)
    return MAX_PARTED_PAIRS if is_parted and layer.per_kv <= most else most


def _parts_rows(layer: Layer, groups: int) -> bool:
    """Whether clusters of up to `FEW_PAIRS` each are faster than one of more."""
    least, most = PARTED_GROUPS
    return layer.dim == 64 or (layer.dim == 128 and least <= groups <= most)


def rows_of_part(layer: Layer, groups: int, rows: int) -> int:
    """Returns how many of a request's rows a cluster takes: other clusters take the others.

    Each reads all keys. What a cluster does beside that takes longer with more rows. A row's sums
    are the same in any part (decision 029).

    Args:
        groups, rows: as of `best_cluster`; at least 1.
    """
    parts = 1
    if _parts_rows(layer, groups):
        parts = -(-rows * layer.per_kv // FEW_PAIRS)
    if layer.dim == 64 and groups <= FEW_GROUPS:
        parts = max(parts, min(MOST_PARTS // groups, -(-rows // LEAST_PART)))
    return min(-(-rows // parts), MAX_PAIRS[layer.dim] // layer.per_kv)


def larger(layer: Layer) -> list[Cluster]:
    """Returns the clusters for longer texts, the smallest first."""
    return [Cluster(size, 4 if layer.dim == WIDE else 8) for size in (1, 2, 4, 8)]


def _module(queries: Queries, cached: CachedLayer, tables: Tables, layer: Layer, rows: int) -> Any:
    """Returns the module with the kernels if they can read these, else None."""
    q, k, v, sinks = queries.q, cached.k_slots, cached.v_slots, queries.sinks
    is_plain = layer.cap == 0 and tables.firsts is None
    is_plain = is_plain and (sinks is None or sinks.dtype == q.dtype)
    groups = tables.blocks.shape[0] * layer.kv_heads
    fits = 0 < rows * layer.per_kv <= most_pairs(layer, groups) and queries.scale > 0
    if not (is_plain and fits and layer.page_size % TILE_KEYS == 0 and q.is_cuda):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or not k.dtype == v.dtype == q.dtype:
        return None
    return native.kernels(q) if all(is_readable(x) for x in (q, k, v)) else None


def is_readable(x: Tensor) -> bool:
    """Whether every head begins at 16 bytes and is in one piece."""
    starts = x.data_ptr() // x.element_size(), x.stride(0), x.stride(1)
    return x.stride(2) == 1 and all(start % 8 == 0 for start in starts)


def attend_clusters(
    module: Any, queries: Queries, cached: CachedLayer, tables: Tables, layer: Layer, rows: int,
    cluster: Cluster, is_beside: bool = False,
) -> None:  # fmt: skip
    """`attend`, by a cluster of thread blocks for each group."""
    part = rows_of_part(layer, tables.blocks.shape[0] * layer.kv_heads, rows)
    module.attend_clusters(
        queries.q, cached.k_slots, cached.v_slots, tables.blocks, tables.positions, tables.starts,
        rows, part, layer.page_size, layer.window, queries.scale, queries.sinks, cluster.size,
        cluster.warps, is_beside, queries.out,
    )  # fmt: skip
