"""Attention of contexts by the CUDA C++ kernel of `csrc/`, on Hopper.

It multiplies 64 pairs of a row and a head with 128 keys at a time, by the products of a warpgroup,
which no other GPU has (csrc/include/trtspec/prompt_attention.cuh). Triton's kernel
(`triton_contexts.py`) serves what it does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import native
from ..ops.launch.machine import MULTIPROCESSORS
from .base import CachedLayer
from .csrc_kernels import is_readable
from .split_kv import Layer, Parts, Queries, Tables

TILE_PAIRS, TILE_KEYS = 128, 128
PART_TILES = 8
"""Tiles of keys of a part, at least: with fewer, joining takes longer than it saves."""
MAX_PARTS = 16


class Sizes(NamedTuple):
    """How work is cut."""

    tile_rows: int  # of a tile, at most
    parts: int  # of a tile's keys, at most
    part_tiles: int  # of keys in a part, at least


def most_parts(groups: int, keys: int) -> int:
    """Returns into how many parts the keys of tiles are cut, so that all multiprocessors have work.

    Args:
        groups: tiles, times KV heads.
        keys: of a request, at most.
    """
    if groups >= MULTIPROCESSORS or keys <= PART_TILES * TILE_KEYS:
        return 1
    return min(2 * MULTIPROCESSORS // groups, MAX_PARTS)


def module_for(queries: Queries, cached: CachedLayer, layer: Layer) -> Any:
    """Returns the module with the kernel if it can read these, else None."""
    q, k, v, sinks = queries.q, cached.k_slots, cached.v_slots, queries.sinks
    if not (q.is_cuda and layer.dim in (64, 128) and layer.per_kv <= TILE_PAIRS):
        return None
    if layer.cap != 0 or cached.k_scales is not None or queries.scale <= 0:
        return None
    if layer.page_size < 8 or layer.page_size & (layer.page_size - 1):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if any(x.dtype != q.dtype for x in (k, v, *(() if sinks is None else (sinks,)))):
        return None
    if not (native.is_hopper(q.device) and all(is_readable(x) for x in (q, k, v))):
        return None
    return native.kernels(q)


def attend(
    module: Any, queries: Queries, cached: CachedLayer, tables: Tables, tiles: torch.Tensor,
    layer: Layer, sizes: Sizes, parts: Parts,
) -> None:  # fmt: skip
    """Writes the attention of tiles into `queries.out`, or the sums of parts of their keys.

    Args:
        tiles: [N, 3] int32, as of `context_tiles`.
    """
    module.attend_prompts(
        queries.q, cached.k_slots, cached.v_slots, tables.blocks, tables.positions, tiles,
        sizes.tile_rows, layer.page_size, layer.window, queries.scale, queries.sinks, sizes.parts,
        sizes.part_tiles, parts.acc, parts.stats, queries.out,
    )  # fmt: skip
