"""What the paged attention kernels share: how work is cut.

Contexts are cut into tiles of query rows. The keys of generations are cut into parts of one size,
all requests' together, and each program finds its part from the requests' positions: `share_out`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..metadata.attention import AttentionMetadata

BLOCK_N = 64  # keys that a program looks at in one turn, where nothing is said
LOG2_E = 1.4426950408889634
MULTIPROCESSORS = 132  # of an H100 or H200
JOIN_PROGRAMS = 8 * MULTIPROCESSORS


def context_tiles(meta: AttentionMetadata, size: int) -> Tensor:
    """[tiles, 3] int32 on the device: a tile's request, first row and number of rows."""
    key = "context tiles", size
    if key not in meta.derived and meta.last_context_rows is not None:
        meta.derived[key] = tiles_on_device(meta.last_context_rows, meta.num_context_tokens, size)
    if key not in meta.derived:
        tiles, start = [], 0
        for i, rows in enumerate(meta.context_lens):
            tiles += [(i, start + j, min(size, rows - j)) for j in range(0, rows, size)]
            start += rows
        tiles.reverse()  # a text's last tiles see most keys and had better begin first
        device = meta.position_ids.device
        host = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
        meta.derived[key] = host.to(device, non_blocking=True)
    return meta.derived[key]


def tiles_on_device(last_rows: Tensor, num_rows: int, size: int) -> Tensor:
    """The same from [C] device rows: as many tiles as there can be, some of no rows."""
    ends = last_rows + 1
    lens = torch.diff(ends, prepend=ends.new_zeros(1))
    counts = (lens + size - 1) // size
    tile_ends = counts.cumsum(0)
    n = torch.arange(num_rows // size + len(ends) - 1, -1, -1, device=ends.device)
    request = torch.searchsorted(tile_ends, n, right=True).clamp_max(len(ends) - 1)
    before = (n - tile_ends[request] + counts[request]) * size  # rows of the text before the tile
    rows = (lens[request] - before).clamp(0, size)
    first = (ends[request] - lens[request] + before).clamp_max(num_rows - 1)
    return torch.stack([request, first, rows], dim=1).to(torch.int32)


@triton.jit
def blocks_of(
    position, table_width, rows: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block of keys that rows see which begin at `position`, and how many blocks. Rows
    follow one another, so that they see no key past that position plus their number."""
    first = position * 0
    if window > 0:
        first = tl.maximum(position - window + 1, 0) // BLOCK_N
    end = tl.minimum(position + rows, table_width * page_size)
    return first, tl.cdiv(end, BLOCK_N) - first


@triton.jit
def share_out(
    position_ptr, num_seqs, table_width, rows: tl.constexpr, kv_heads: tl.constexpr,
    page_size: tl.constexpr, window: tl.constexpr, PROGRAMS: tl.constexpr, SEQS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How the keys of all requests are cut into parts: the requests' first positions [SEQS], their
    full parts, whether there is a rest (0 or 1), and the blocks of a full part."""
    s = tl.arange(0, SEQS)
    positions = tl.load(
        position_ptr + s * rows, mask=s < num_seqs, other=0, cache_modifier=".cg"
    ).to(tl.int32)
    _first, blocks = blocks_of(positions, table_width, rows, page_size, window, BLOCK_N)
    blocks = tl.where(s < num_seqs, blocks, 0)
    part = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * kv_heads, PROGRAMS), 1)
    return positions, blocks // part, (blocks % part > 0).to(tl.int32), part


@triton.jit
def prefetch(
    begin, end, k_ptr, v_ptr, k_row, v_row, table_ptr, table_width,
    page_size: tl.constexpr, dim: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Asks for a block of keys and values, so that they are in L2 when they are read."""
    n = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    block = tl.load(table_ptr + tl.minimum(n // page_size, table_width - 1), cache_modifier=".cg")
    slot = block.to(tl.int64) * page_size + n % page_size
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    for line in tl.static_range(0, dim * size, 128):
        for_k = (k_ptr + slot * k_row + line // size).to(tl.int64)
        for_v = (v_ptr + slot * v_row + line // size).to(tl.int64)
        _prefetch_l2(for_k)
        _prefetch_l2(for_v)


@triton.jit
def _prefetch_l2(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
