"""Attention of generations by the CUDA C++ kernels of `csrc/`.

A group is a request and a KV head, whose keys several thread blocks read. There are two ways to cut
them: a cluster of blocks for each group (csrc/include/trtspec/cluster_attention.cuh), or all keys
in equal shares (share_attention.cuh). Triton's kernel (`paged.py`) serves what these do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import native
from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.tickets import tickets
from .split_kv import Layer, Queries, Tables

TILE_KEYS, TILE_PAIRS = 16, 16
MAX_PAIRS = {64: 32, 128: 16}
"""By head size: pairs of a row and a query head, for each KV head."""
SHARES = 2 * MULTIPROCESSORS  # thread blocks that shared memory has room for at once
GROUPS, GROUPS_OF_DRAFTS = range(64, 2**31), range(128, 512)
"""Groups with heads of 128 for which equal shares are faster than Triton, with one row of each
request and with several (decision 027)."""
MAX_KEYS = 4096
"""That a request's block table has room for, for each block of a cluster: with more, one long
request would end last. A graph's tables have room for the engine's longest text."""


def attend(queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int) -> bool:
    """Writes the attention of generations' rows into `queries.out` if a kernel here serves them.

    Args:
        k, v: [slots, Hkv, D].
        rows: of each request, or at most where the tables have `starts`.

    Returns:
        Whether one does.
    """
    module = _module(queries, k, v, tables, layer, rows)
    if module is None:
        return False
    groups = tables.blocks.shape[0] * layer.kv_heads
    size = cluster_size(layer, groups, rows)
    if size and tables.blocks.shape[1] * layer.page_size <= size * MAX_KEYS:
        attend_clusters(module, queries, k, v, tables, layer, rows, size)
        return True
    if layer.dim == 128 and groups in (GROUPS if rows == 1 else GROUPS_OF_DRAFTS):
        attend_shares(module, queries, k, v, tables, layer, rows)
        return True
    return False


def cluster_size(layer: Layer, groups: int, rows: int) -> int:
    """Returns the thread blocks of a cluster; 0: other kernels are faster.

    By measurement (decision 029).

    Args:
        groups: requests times KV heads.
        rows: of each request, at most.
    """
    if layer.dim == 64:
        most_of_4 = 96 if rows > 1 and rows * layer.per_kv <= TILE_PAIRS else 64
        return 0 if groups < 24 else 4 if groups <= most_of_4 else 2
    return 4 if 32 <= groups < 48 else 2 if 48 <= groups < 192 else 0


def _module(queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int) -> Any:
    """Returns the module with the kernels if they can read these, else None."""
    q = queries.q
    is_plain = layer.cap == 0 and queries.sinks is None and tables.firsts is None
    fits = rows * layer.per_kv <= MAX_PAIRS.get(layer.dim, 0)
    if not (is_plain and fits and layer.page_size % TILE_KEYS == 0 and q.is_cuda):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or not k.dtype == v.dtype == q.dtype:
        return None
    return native.kernels(q) if all(_is_readable(x) for x in (q, k, v)) else None


def _is_readable(x: Tensor) -> bool:
    """Whether every head begins at 16 bytes and is in one piece."""
    starts = x.data_ptr() // x.element_size(), x.stride(0), x.stride(1)
    return x.stride(2) == 1 and all(start % 8 == 0 for start in starts)


def attend_shares(
    module: Any, queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int
) -> None:
    """`attend`, by equal shares of all keys."""
    q, pairs = queries.q, rows * layer.per_kv
    sums = torch.empty((2 * SHARES, pairs, layer.dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((2 * SHARES, pairs, 2), dtype=torch.float32, device=q.device)
    groups = tables.blocks.shape[0] * layer.kv_heads
    module.attend_shares(
        q, k, v, tables.blocks, tables.positions, tables.starts, rows, layer.page_size,
        layer.window, queries.scale, sums, stats, tickets(q.device, groups), queries.out,
    )  # fmt: skip


def attend_clusters(
    module: Any, queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int,
    size: int,
) -> None:  # fmt: skip
    """`attend`, by clusters of `size` thread blocks."""
    module.attend_clusters(
        queries.q, k, v, tables.blocks, tables.positions, tables.starts, rows, layer.page_size,
        layer.window, queries.scale, size, queries.out,
    )  # fmt: skip
