"""The Triton kernels of `markov_walk.py`: a launch for each draft.

A program biases one chunk of the vocabulary, for some requests. It sends each one's best score and
token as one number, of which the largest stays. The first columns of W2's rows are read before the
launch before has ended: all of them where the rank is no larger than a tile's depth. They serve
what the kernel in csrc does not: many requests, float32, large tables.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.tickets import StreamMemory
from ..launch.triton import after_previous, dependent_launch
from .markov_walk import MarkovTables

REQUESTS = 16
"""Of a program: rows of its product, the fewest that a tensor core takes."""
CHUNK = 256  # 512 took longer
TILE_BYTES = 64 * 1024
"""Of W2, in shared memory at a time: GPUs have from 99 KiB for a program."""


LAST_INDEX = tl.constexpr(2**31 - 1)
_KEYS = StreamMemory(torch.int64, least=1024)  # zeros between walks


class _Sizes(NamedTuple):
    batch: int
    tokens: int  # that may stand before: rows of W1
    drafts: int  # Vd
    rank: int


def walk_by_draft(logits: Tensor, before: Tensor, tables: MarkovTables) -> Tensor:
    """As its twin."""
    batch, (drafts, rank) = before.shape[0], tables.w2.shape
    count, device = logits.shape[0] // batch, logits.device
    sizes = _Sizes(batch, tables.w1.shape[0], drafts, rank)
    taken = torch.empty((count, batch), dtype=torch.int32, device=device)
    keys = _zeros(count * batch, device).view(count, batch)
    tables = MarkovTables(tables.w1.contiguous(), tables.w2.contiguous(), tables.d2t)
    padded = max(16, triton.next_power_of_2(rank))
    depth = min(padded, TILE_BYTES // (CHUNK * tables.w2.element_size()))
    tiles, launch = triton.cdiv(batch, REQUESTS), dependent_launch(logits)
    for draft in range(count):
        _markov_kernel[(triton.cdiv(drafts, CHUNK), tiles)](
            logits[draft * batch :],
            logits.stride(0),
            before,
            before.stride(0),
            keys[draft - 1] if draft else None,
            keys[draft],
            taken[draft - 1] if draft else None,
            tables,
            sizes,
            REQUESTS=REQUESTS,
            CHUNK=CHUNK,
            RANK=padded,
            DEPTH=depth,
            num_warps=4,
            **launch,
        )
    _last_kernel[(tiles,)](
        keys, count, taken[-1], tables, sizes, REQUESTS=REQUESTS, num_warps=4, **launch
    )
    return taken


def _zeros(count: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return _KEYS.on(device, count)[:count]
    return torch.zeros(count, dtype=torch.int64)


@triton.jit(do_not_specialize_on_alignment=["earlier_ptr", "key_ptr", "taken_ptr"])
def _markov_kernel(
    logits_ptr,
    stride,
    before_ptr,
    before_stride,
    earlier_ptr,  # keys of the draft before, None at the first
    key_ptr,
    taken_ptr,  # of the draft before
    tables,
    sizes,
    REQUESTS: tl.constexpr,
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
    if earlier_ptr is None:
        entry = before_ptr + request * before_stride
        token = tl.load(entry, mask=in_batch, other=0).to(tl.int64)
    else:
        token = _taken(earlier_ptr, request, in_batch, tables)
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
    index = (chunk * CHUNK + tl.argmax(x, axis=1)).to(tl.int64)
    key = (_in_order(tl.max(x, axis=1)) << 31) | (LAST_INDEX - index)  # of equals the first
    tl.atomic_max(key_ptr + request, key, mask=in_batch, sem="relaxed")


@triton.jit
def _in_order(x):
    """Returns integers from 1 to 2^32 - 1 in the order of float32 numbers, which are no NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # of one zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


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


@triton.jit(do_not_specialize_on_alignment=["taken_ptr"])
def _last_kernel(
    key_ptr, count, taken_ptr, tables, sizes, REQUESTS: tl.constexpr, PDL: tl.constexpr
):
    """Finds the last draft, and leaves zeros."""
    after_previous(PDL)
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    in_batch = request < sizes.batch
    request = request.to(tl.int64)
    last_ptr = key_ptr + (count - 1) * sizes.batch
    token = _taken(last_ptr, request, in_batch, tables)
    tl.store(taken_ptr + request, token.to(tl.int32), mask=in_batch)
    for draft in range(count):
        tl.store(key_ptr + draft * sizes.batch + request, request * 0, mask=in_batch)


@triton.jit
def _taken(key_ptr, request, in_batch, tables):
    """Returns the best of all chunks as target ids [REQUESTS] int64."""
    key = tl.load(key_ptr + request, mask=in_batch, other=LAST_INDEX, cache_modifier=".cg")
    id = LAST_INDEX - (key & LAST_INDEX)
    if tables.d2t is not None:
        id += tl.load(tables.d2t + id, mask=in_batch, other=0)
    return id
