"""The Triton kernel of `walk.py`: a whole path in one launch."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .walk import Codebooks, PathCandidates


def walk_candidates(candidates: PathCandidates, before: Tensor, books: Codebooks) -> Tensor:
    """As its twin."""
    ids, unary, states = (tensor.contiguous() for tensor in candidates)
    num_drafts, batch, count = ids.shape
    vocab, rank = books.predecessors.shape
    taken = torch.empty((num_drafts, batch), dtype=torch.int32, device=ids.device)
    _walk_kernel[(batch,)](
        PathCandidates(ids, unary, states),
        Codebooks(books.predecessors.contiguous(), books.successors.contiguous()),
        before,
        before.stride(0),
        taken,
        num_drafts,
        batch,
        count,
        vocab,
        rank,
        COUNT=triton.next_power_of_2(count),
        RANK=triton.next_power_of_2(rank),
        num_warps=4,
        **dependent_launch(ids),
    )
    return taken


@triton.jit
def _walk_kernel(
    candidates,
    books,
    before_ptr,
    before_stride,
    taken_ptr,
    num_drafts,
    batch,
    count,
    vocab,
    rank,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The path of one request."""
    after_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, COUNT), tl.arange(0, RANK)
    is_candidate, in_rank = c < count, r < rank
    token = tl.load(before_ptr + request * before_stride).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    for draft in range(num_drafts):
        row = draft * batch + request
        ids = tl.load(candidates.ids + row * count + c, mask=is_candidate, other=0).to(tl.int64)
        state = tl.load(candidates.states + row * rank + r, mask=in_rank, other=0.0)
        known = tl.load(books.predecessors + token * rank + r, mask=in_rank, other=0.0)
        context = known.to(tl.float32) * state.to(tl.float32)
        following = tl.load(
            books.successors + ids[:, None] * rank + r[None, :],
            mask=is_candidate[:, None] & in_rank[None, :],
            other=0.0,
        )
        unary = tl.load(
            candidates.unary + row * count + c, mask=is_candidate, other=float("-inf")
        ).to(tl.float32)
        scores = unary + tl.sum(following.to(tl.float32) * context[None, :], axis=1)
        scores = tl.where(scores == scores, scores, float("-inf"))
        best = tl.argmax(scores, axis=0)  # the first among equals; a candidate in any case
        token = tl.sum(tl.where(c == best, ids, 0), axis=0)
        tl.store(taken_ptr + row, token.to(tl.int32))
