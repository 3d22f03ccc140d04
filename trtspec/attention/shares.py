"""Attention of generations by the CUDA C++ kernel of `csrc/`: all keys in equal shares.

csrc/include/trtspec/paged_attention.cuh says how keys are cut and joined. Triton's kernel
(`paged.py`) serves what this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import native
from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.tickets import tickets
from .split_kv import Layer, Queries, Tables

DIM, TILE_KEYS = 128, 16
MAX_PAIRS = 16  # of a row and a query head, for each KV head; the kernel takes 32, never timed
SHARES = 2 * MULTIPROCESSORS  # thread blocks that shared memory has room for at once
GROUPS, GROUPS_OF_DRAFTS = range(64, 2**31), range(128, 512)
"""Requests times KV heads for which this kernel is the faster one, with one row of each request and
with several (decision 027 has the figures)."""


def kernels(queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int) -> Any:
    """Returns the module with the kernel if it serves these, else None.

    Args:
        k, v: [slots, Hkv, D].
        rows: of each request.
    """
    q = queries.q
    is_plain = layer.cap == 0 and queries.sinks is None and tables.firsts is None
    is_plain = is_plain and tables.starts is None
    fits = layer.dim == DIM and rows * layer.per_kv <= MAX_PAIRS
    if not (is_plain and fits and layer.page_size % TILE_KEYS == 0 and q.is_cuda):
        return None
    groups = tables.blocks.shape[0] * layer.kv_heads
    if groups not in (GROUPS if rows == 1 else GROUPS_OF_DRAFTS):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or not k.dtype == v.dtype == q.dtype:
        return None
    return native.kernels(q) if all(_is_readable(x) for x in (q, k, v)) else None


def _is_readable(x: Tensor) -> bool:
    """Whether every head begins at 16 bytes and is in one piece."""
    starts = x.data_ptr() // x.element_size(), x.stride(0), x.stride(1)
    return x.stride(2) == 1 and all(start % 8 == 0 for start in starts)


def attend(
    module: Any, queries: Queries, k: Tensor, v: Tensor, tables: Tables, layer: Layer, rows: int
) -> None:
    """Writes the attention of generations' rows into `queries.out`.

    Args:
        module: as `kernels` returns it.
        rows: of each request.
    """
    q, pairs = queries.q, rows * layer.per_kv
    sums = torch.empty((2 * SHARES, pairs, DIM), dtype=torch.float32, device=q.device)
    stats = torch.empty((2 * SHARES, pairs, 2), dtype=torch.float32, device=q.device)
    groups = tables.blocks.shape[0] * layer.kv_heads
    module.attend(
        q, k, v, tables.blocks, tables.positions, rows, layer.page_size, layer.window,
        queries.scale, sums, stats, tickets(q.device, groups), queries.out,
    )  # fmt: skip
