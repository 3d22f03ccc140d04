"""The Triton kernels of `markov_walk.py`: a launch for each draft.

A program biases one chunk of the vocabulary, for some requests, and keeps the chunk's best. The
programs of the next draft find the best of all chunks, each for itself: nothing waits for all
programs of a launch but the next launch. The first columns of W2's rows are read before the launch
before has ended: all of them where the rank is no larger than a tile's depth. They serve what the
kernel in csrc does not: many requests, float32, large tables.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .markov_walk import MarkovTables

REQUESTS = 16
"""Of a program: rows of its product, the fewest that a tensor core takes."""
CHUNK, LARGE_CHUNK = 256, 512
MANY_TOKENS = 65_536
"""Vocabularies above it take the larger chunk: their chunks are compared by every program."""
TILE_BYTES = 64 * 1024
"""Of W2, in shared memory at a time: GPUs have from 99 KiB for a program."""


class _Best(NamedTuple):
    """The best of each chunk, of one draft."""

    scores: Tensor  # [B, chunks] float32
    ids: Tensor  # [B, chunks] int32, draft ids


class _Sizes(NamedTuple):
    batch: int
    tokens: int  # that may stand before: rows of W1
    drafts: int  # Vd
    rank: int
    chunks: int


def walk_by_draft(logits: Tensor, before: Tensor, tables: MarkovTables) -> Tensor:
    """As its twin."""
    batch, (drafts, rank) = before.shape[0], tables.w2.shape
    count, device = logits.shape[0] // batch, logits.device
    chunk = CHUNK if drafts <= MANY_TOKENS else LARGE_CHUNK
    sizes = _Sizes(batch, tables.w1.shape[0], drafts, rank, triton.cdiv(drafts, chunk))
    taken = torch.empty((count, batch), dtype=torch.int32, device=device)
    shape = count, batch, sizes.chunks
    values = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    tables = MarkovTables(tables.w1.contiguous(), tables.w2.contiguous(), tables.d2t)
    padded = max(16, triton.next_power_of_2(rank))
    depth = min(padded, TILE_BYTES // (chunk * tables.w2.element_size()))
    tiles, launch = triton.cdiv(batch, REQUESTS), dependent_launch(logits)
    blocks = {"REQUESTS": REQUESTS, "CHUNKS": triton.next_power_of_2(sizes.chunks)}
    for draft in range(count):
        _markov_kernel[(sizes.chunks, tiles)](
            logits[draft * batch :],
            logits.stride(0),
            before,
            before.stride(0),
            _Best(values[draft - 1], ids[draft - 1]) if draft else None,
            _Best(values[draft], ids[draft]),
            taken[draft - 1] if draft else None,
            tables,
            sizes,
            CHUNK=chunk,
            RANK=padded,
            DEPTH=depth,
            num_warps=4,
            **blocks,
            **launch,
        )
    _last_kernel[(tiles,)](
        _Best(values[-1], ids[-1]), taken[-1], tables, sizes, num_warps=4, **blocks, **launch
    )
    return taken


@triton.jit
def _markov_kernel(
    logits_ptr,
    stride,
    before_ptr,
    before_stride,
    earlier,  # of the draft before, None at the first
    best,
    taken_ptr,  # of the draft before
    tables,
    sizes,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the best draft of one chunk."""
    chunk = tl.program_id(0)
    request = tl.program_id(1) * REQUESTS + tl.arange(0, REQUESTS)
    in_batch = request < sizes.batch
    request = request.to(tl.int64)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    w2 = _columns_of_w2(tables, sizes, v, 0, DEPTH)
    after_previous(PDL)
    if earlier is None:
        entry = before_ptr + request * before_stride
        token = tl.load(entry, mask=in_batch, other=0).to(tl.int64)
    else:
        token = _taken(earlier, request, in_batch, tables, sizes, CHUNKS)
        tl.store(taken_ptr + request, token.to(tl.int32), mask=in_batch & (chunk == 0))
    token = tl.minimum(tl.maximum(token, 0), sizes.tokens - 1)
    own = tl.load(
        logits_ptr + request[:, None] * stride + v[None, :],
        mask=in_batch[:, None] & (v < sizes.drafts)[None, :],
        other=float("-inf"),
    )
    e = _columns_of_w1(tables, sizes, token, in_batch, 0, DEPTH)
    bias = tl.dot(e, w2, input_precision="ieee")
    for first in tl.static_range(DEPTH, RANK, DEPTH):
        e = _columns_of_w1(tables, sizes, token, in_batch, first, DEPTH)
        w2 = _columns_of_w2(tables, sizes, v, first, DEPTH)
        bias = tl.dot(e, w2, bias, input_precision="ieee")
    x = own.to(tl.float32) + bias.to(own.dtype).to(tl.float32)
    x = x.to(own.dtype).to(tl.float32)
    x = tl.where((x != x) | (v >= sizes.drafts)[None, :], float("-inf"), x)
    entry = request * sizes.chunks + chunk
    tl.store(best.scores + entry, tl.max(x, axis=1), mask=in_batch)
    # Of equals the first.
    index = chunk * CHUNK + tl.argmax(x, axis=1)
    tl.store(best.ids + entry, index.to(tl.int32), mask=in_batch)


@triton.jit
def _columns_of_w1(tables, sizes, token, in_batch, first, DEPTH: tl.constexpr):
    """Returns columns of the rows of the tokens before, [REQUESTS, DEPTH]."""
    r = first + tl.arange(0, DEPTH)
    entry = tables.w1 + token[:, None] * sizes.rank + r[None, :]
    return tl.load(entry, mask=in_batch[:, None] & (r < sizes.rank)[None, :], other=0.0)


@triton.jit
def _columns_of_w2(tables, sizes, v, first, DEPTH: tl.constexpr):
    """Returns columns of the rows of a chunk's drafts, [DEPTH, CHUNK]."""
    r = first + tl.arange(0, DEPTH)
    entry = tables.w2 + v[None, :].to(tl.int64) * sizes.rank + r[:, None]
    mask = (v < sizes.drafts)[None, :] & (r < sizes.rank)[:, None]
    return tl.load(entry, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _last_kernel(
    best, taken_ptr, tables, sizes, REQUESTS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    """Finds the last draft."""
    after_previous(PDL)
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    in_batch = request < sizes.batch
    request = request.to(tl.int64)
    token = _taken(best, request, in_batch, tables, sizes, CHUNKS)
    tl.store(taken_ptr + request, token.to(tl.int32), mask=in_batch)


@triton.jit
def _taken(best, request, in_batch, tables, sizes, CHUNKS: tl.constexpr):
    """Returns the best of all chunks, the first of equals, as target ids [REQUESTS] int64."""
    c = tl.arange(0, CHUNKS)
    entry = request[:, None] * sizes.chunks + c[None, :]
    mask = in_batch[:, None] & (c < sizes.chunks)[None, :]
    value = tl.load(best.scores + entry, mask=mask, other=float("-inf"))
    at = tl.argmax(value, axis=1)
    id = tl.load(best.ids + request * sizes.chunks + at, mask=in_batch, other=0).to(tl.int64)
    if tables.d2t is not None:
        id += tl.load(tables.d2t + id, mask=in_batch, other=0)
    return id
