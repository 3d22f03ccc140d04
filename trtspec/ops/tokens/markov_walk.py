"""Drafts of a block chosen in turn, the logits of each biased by the token before it (DSpark).

    logits of the draft behind token a = own logits + W2 W1[a]

Bias and sum are rounded to the logits' dtype, as where they are made one after the other.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import native
from ..launch.dispatch import twin
from ..launch.tickets import StreamMemory
from .sample import greedy_tokens

RANKS, DTYPES = (64, 128, 256), (torch.bfloat16, torch.float16)
MAX_REQUESTS, MAX_BLOCKS = 8, 160
PAD = 64  # bytes between rows of W2 in shared memory
MAX_SHARED = 112 * 1024  # bytes of a block: a multiprocessor has room for two
"""What the kernel in csrc/include/trtspec/markov_walk.cuh serves."""

_SENT = StreamMemory(torch.int64, least=0)


class MarkovTables(NamedTuple):
    """A bias of low rank r, and what a draft stands for."""

    w1: Tensor  # [V, r], by the token before
    w2: Tensor  # [Vd, r], by the draft
    d2t: Tensor | None  # [Vd] int64 offsets, target id = draft id + d2t[draft id]


def walk_markov(logits: Tensor, before: Tensor, tables: MarkovTables) -> Tensor:
    """Takes the best draft behind the one just taken: [P, B] int32, target ids.

    A NaN is never taken, and of equals the first is.

    Args:
        logits: [P * B, Vd], by draft and then by request, each row contiguous.
        before: [B] int, the last known tokens.
    """
    batch = before.shape[0]
    walk = _Walk.of(logits, batch, tables)
    if walk is None:
        return walk_by_draft(logits, before, tables)
    shape = logits.shape[0] // batch, batch
    taken = torch.empty(shape, dtype=torch.int32, device=logits.device)
    count = 1 + 2 * MAX_REQUESTS * walk.blocks
    sent = _SENT.on(logits.device, count)[:count]
    walk.kernels.walk_markov(
        logits, before.to(torch.int32), tables.w1, tables.w2, tables.d2t, walk.chunk, sent, taken
    )
    return taken


class _Walk(NamedTuple):
    """A walk in one kernel, whose thread blocks each compare a chunk of the drafts."""

    kernels: Any
    blocks: int
    chunk: int  # drafts, a multiple of 16

    @classmethod
    def of(cls, logits: Tensor, batch: int, tables: MarkovTables) -> _Walk | None:
        """Returns None if the kernel does not serve these."""
        kernels = native.kernels(logits)
        rank, dtype = tables.w2.shape[1], logits.dtype
        if kernels is None or not 0 < batch <= MAX_REQUESTS:
            return None
        if rank not in RANKS or dtype not in DTYPES or logits.stride(1) != 1:
            return None
        if any(w.dtype != dtype or not w.is_contiguous() for w in (tables.w1, tables.w2)):
            return None
        if tables.d2t is not None and not tables.d2t.is_contiguous():
            return None
        blocks = _blocks(logits.device.index)
        chunk = 16 * math.ceil(tables.w2.shape[0] / (16 * blocks))
        own_logits = 2 * batch * dtype.itemsize  # of a draft, twice
        fits = chunk * (rank * dtype.itemsize + PAD + own_logits) <= MAX_SHARED
        return cls(kernels, blocks, chunk) if fits else None


@functools.cache
def _blocks(device: int) -> int:
    """Returns how many of the kernel's thread blocks run at once, one on a multiprocessor."""
    return min(torch.cuda.get_device_properties(device).multi_processor_count, MAX_BLOCKS)


@twin("tokens.triton_markov_walk")
def walk_by_draft(logits: Tensor, before: Tensor, tables: MarkovTables) -> Tensor:
    """As `walk_markov`, by an operation or a launch for each draft."""
    batch = before.shape[0]
    taken: list[Tensor] = []
    for own in logits.split(batch):
        known = before.to(torch.int64).clamp(0, tables.w1.shape[0] - 1)
        biased = own + torch.nn.functional.linear(tables.w1[known], tables.w2)
        before = greedy_tokens(biased.masked_fill(biased.isnan(), float("-inf")))
        if tables.d2t is not None:
            before = (before + tables.d2t[before.to(torch.int64)]).to(torch.int32)
        taken.append(before)
    return torch.stack(taken)
