"""Chooses and accepts tokens from logits in one kernel of `csrc/`, where it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import native
from ...distributed.logits import ShardedLogits
from ..launch.machine import MULTIPROCESSORS
from ..launch.tickets import tickets
from ..step.rows import to_target_ids
from .sample import greedy_tokens

MAX_CHUNKS, MAX_ROWS_PER_REQUEST = 64, 64
MAX_IN_ONE_CHUNK = 16 << 10
"""So few logits a single thread block reads faster than several that join what they found."""
MAX_ROWS = 65_535  # of a CUDA grid in its second dimension
MAX_ROWS_OVER_RANKS = 512
_PARTIAL_INTS = 5  # of `ChunkBest` in csrc/include/trtspec/choose.cuh
_BLOCKS = 2 * MULTIPROCESSORS


@dataclass(frozen=True)
class Accepted:
    """A step's accepted tokens, of B requests."""

    tokens: Tensor  # [B, K+1] int32, accepted drafts then bonus, -1 past the length
    lens: Tensor  # [B] int32, 1 … K'+1
    num_accepted_drafts: Tensor  # [B] int32, lens - 1
    bad_requests: Tensor  # [B] bool, a row held NaN or nothing above -inf

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device) -> Accepted:
        """Allocates room for K+1 = `width` tokens, in one piece: one copy takes all to the host."""
        whole = torch.empty(batch * (width + 3), dtype=torch.int32, device=device)
        tokens, lens, accepted, bad = whole.split([batch * width, batch, batch, batch])
        return cls(tokens.view(batch, width), lens, accepted, bad.view(torch.bool)[:batch])


@dataclass(frozen=True)
class RelaxedRule:
    """Relaxed acceptance (`acceptance/relaxed.py`); `deltas` is updated."""

    deltas: Tensor  # [S] float32
    slots: Tensor  # [B] int64
    top_k: int
    end_token: int


def accept_greedy(
    logits: Tensor | ShardedLogits,
    drafts: Tensor,
    num_contexts: int,
    max_draft_len: int,
    forced_len: int = 0,
    relaxed: RelaxedRule | None = None,
) -> Accepted | None:
    """Chooses the best token at every row and accepts the drafts that match.

    Returns None if no kernel serves; then the rule's torch code runs (`Rule.apply`).

    Args:
        logits: [C + G*(K'+1), V]; ranks that each have a part compare their best entries in the
            kernel. drafts: [G, K'] int32, -1 never matches.
        max_draft_len: K >= K'.
        forced_len: accept this many tokens in every generation, at most K'+1; 0 is off.
    """
    logits, ranks = _over_ranks(logits)
    kernels = _kernels(logits, ranks)
    if kernels is None or drafts.shape[1] >= MAX_ROWS_PER_REQUEST or not drafts.is_cuda:
        return None
    if relaxed is not None and ranks is not _ONE_RANK:
        return None
    batch = num_contexts + drafts.shape[0]
    accepted = Accepted.empty(batch, max_draft_len + 1, logits.device)
    rule: tuple[Any, ...] = (None, None, 0, 0)
    if relaxed is not None:
        rule = (relaxed.deltas, relaxed.slots, relaxed.top_k, relaxed.end_token)
    out = (accepted.tokens, accepted.lens, accepted.num_accepted_drafts, accepted.bad_requests)
    drafts = drafts.to(torch.int32)
    if drafts.stride(1) != 1:
        drafts = drafts.contiguous()
    inputs = (logits, drafts, num_contexts, forced_len)
    kernels.accept_greedy(
        *inputs, *rule, ranks.handle, ranks.first_index, *_scratch(logits, batch), *out
    )
    return accepted


def choose_drafts(logits: Tensor | ShardedLogits, d2t: Tensor | None) -> Tensor:
    """Takes each row's best token: draft logits [R, Vd] -> target token ids [R] int32.

    A NaN is never chosen. Ranks that each have a part of the logits compare their best tokens in
    the draft vocabulary, and map the winner.

    Args:
        d2t: [Vd] int64 offsets, target_id = draft_id + d2t[draft_id] (EAGLE-3's table).
    """
    own, ranks = _over_ranks(logits)
    kernels = _kernels(own, ranks)
    if d2t is not None and (d2t.dtype != torch.int64 or not d2t.is_contiguous()):
        kernels = None
    if kernels is not None:
        tokens = torch.empty(own.shape[0], dtype=torch.int32, device=own.device)
        most = 1 if own.shape[1] <= MAX_IN_ONE_CHUNK else MAX_CHUNKS
        scratch = _scratch(own, own.shape[0], most)
        kernels.choose_drafts(own, d2t, ranks.handle, ranks.first_index, *scratch, tokens)
        return tokens
    if isinstance(logits, ShardedLogits):
        tokens, _ = logits.best()
    else:
        tokens = greedy_tokens(logits.masked_fill(logits.isnan(), float("-inf")))
    return tokens if d2t is None else to_target_ids(tokens, d2t)


@dataclass(frozen=True)
class _Ranks:
    """Over which ranks logits are, as kernels take it."""

    handle: Tensor | None = None  # of `Exchange`
    first_index: int = 0
    max_rows: int = MAX_ROWS


_ONE_RANK = _Ranks()


def _over_ranks(logits: Tensor | ShardedLogits) -> tuple[Tensor, _Ranks]:
    """Returns the logits that this rank has, and what kernels must know of the others."""
    if not isinstance(logits, ShardedLogits):
        return logits, _ONE_RANK
    exchange = logits.comm.exchange
    if exchange is None:
        return logits.own, _Ranks(max_rows=0)
    return logits.own, _Ranks(exchange.handle, logits.first_index, MAX_ROWS_OVER_RANKS)


def _kernels(logits: Tensor, ranks: _Ranks) -> Any:
    """Returns the module with the kernels if they serve these logits, else None."""
    fits = logits.dim() == 2 and 0 < logits.shape[0] <= ranks.max_rows and logits.stride(1) == 1
    floats = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return native.kernels(logits) if fits and floats else None


def _scratch(logits: Tensor, batch: int, most: int = MAX_CHUNKS) -> tuple[Tensor, Tensor]:
    """Returns memory for partial results of `most` chunks of a row at most, and tickets."""
    rows = logits.shape[0]
    chunks = max(1, min(most, _BLOCKS // rows))
    partial = torch.empty((rows, chunks, _PARTIAL_INTS), dtype=torch.int32, device=logits.device)
    return partial, tickets(logits.device, batch)
