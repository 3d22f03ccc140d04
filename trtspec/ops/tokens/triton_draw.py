"""Draws tokens in Triton: the target's after the accepted drafts, and drafts.

    draw     requests x chunks   the winner of each chunk under p, or under max(p - q, 0)
    finish   requests            the tokens

A token is drawn as argmax of p / E with E standard exponential, which is the Gumbel trick without
one of its logarithms. Twins: `acceptance/rejection.py`, `sample.py`, `acceptance/draw.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.draft_memory import DraftMemory
from ..launch.triton import after_previous, dependent_launch
from . import triton_stats
from .noise import NoiseStream, of_depth
from .triton_noise import exponential, uniform
from .triton_stats import Rows, clean, divisor_of, probabilities, row_choice, row_total

_TARGET = tl.constexpr(int(NoiseStream.TARGET))


class Sizes(NamedTuple):
    """What the kernels of a step are compiled for."""

    CHUNK: int  # logits of a program
    CHUNKS: int  # >= chunks of a row, a power of 2
    ROWS: int  # K'+1, rows of a generation
    COLUMNS: int  # >= K+1, a power of 2
    LOW_BITS: int


class Memory(NamedTuple):
    """What drafts were drawn from, by slot and depth."""

    slots: Tensor  # [B] int64
    logits: Tensor  # [S, K, Vd]
    best: Tensor  # [S, K] float32
    log_sum: Tensor  # [S, K] float32
    log_q: Tensor  # [S, K] float32
    draft_ids: Tensor | None  # [V] int, the drafter's id of a target token; None: the same
    are_certain: Tensor  # [S] bool, whether the drafts were not drawn: q is 1 on each
    depths: int  # K
    vocab: int  # Vd


class Step(NamedTuple):
    """The drafts of a step, and how many are accepted."""

    drafts: Tensor  # [G, K'] int32, -1 is none
    num_contexts: int
    counts: Tensor  # [B] int32, accepted drafts
    scales: Tensor | None  # [B] float32, block verification's w after them; None without a memory


class Outcome(NamedTuple):
    """A step's outputs."""

    tokens: Tensor  # [B, K+1] int32
    columns: int  # K+1
    lens: Tensor  # [B] int32
    accepted: Tensor  # [B] int32
    bad: Tensor  # [B] bool
    forced_len: int  # 0 is off


class Race(NamedTuple):
    """The winner of each chunk under p and, with a memory, under max(p - q, 0)."""

    scores: Tensor  # [items, 1 or 2, chunks] float32
    ids: Tensor  # [items, 1 or 2, chunks] int32


class _DraftRows(NamedTuple):
    """A row of draft logits for each request, and its statistics."""

    logits: Tensor  # [B, Vd]
    stride: int
    vocab: int
    chunks: int
    temperatures: Tensor  # [B] float32
    temperature_stride: int
    seeds: Tensor  # [B] int64
    seed_stride: int
    positions: Tensor  # [B] int64, of the last accepted tokens
    position_stride: int
    d2t: Tensor | None  # [Vd] offsets from draft to target ids
    best: Tensor  # [B, chunks] float32
    totals: Tensor  # [B, chunks] float32
    indices: Tensor  # [B, chunks] int32
    scores: Tensor  # [B, chunks] float32, of the chunk's winner
    drawn: Tensor  # [B, chunks] int32, the winner


def memory_of(memory: DraftMemory, slots: Tensor) -> Memory:
    """Gives the kernels the draft memory of these slots [B]."""
    return Memory(
        slots=slots,
        logits=memory.logits,
        best=memory.best,
        log_sum=memory.log_sum,
        log_q=memory.log_q,
        draft_ids=memory.draft_ids,
        are_certain=memory.are_certain,
        depths=memory.logits.shape[1],
        vocab=memory.logits.shape[2],
    )


def draw_and_finish(
    rows: Rows,
    step: Step,
    memory: Memory | None,
    out: Outcome,
    sizes: Sizes,
    launch: dict[str, bool],
) -> None:
    """Draws the tokens of sampled requests and completes every request's outcome.

    With a memory `step.counts` and the tokens up to there are known. Without one a token is drawn
    at every row, and drafts are accepted while they are these tokens.
    """
    items, races = (rows.best.shape[0], 1) if memory is None else (step.counts.shape[0], 2)
    shape, device = (items, races, rows.chunks), rows.logits.device
    race = Race(
        scores=torch.empty(shape, dtype=torch.float32, device=device),
        ids=torch.empty(shape, dtype=torch.int32, device=device),
    )
    judged = memory is not None
    _draw_kernel[(items, rows.chunks)](
        rows, step, memory, race, JUDGED=judged, SIZES=sizes, num_warps=4, **launch
    )
    _finish_kernel[(step.counts.shape[0],)](
        rows, step, out, race, JUDGED=judged, SIZES=sizes, num_warps=1, **launch
    )


def draw_drafts(
    logits: Tensor,
    d2t: Tensor | None,
    temperatures: Tensor,
    seeds: Tensor,
    last_positions: Tensor,
    depth: int,
    slots: Tensor,
    memory: DraftMemory | None,
) -> Tensor:
    """Does what `DraftSampler.draw` does: draft logits [B, Vd] -> target ids [B] int32."""
    (batch, vocab), device, chunk = logits.shape, logits.device, triton_stats.CHUNK
    chunks = triton.cdiv(vocab, chunk)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    best, totals, scores = torch.empty((3, batch, chunks), dtype=torch.float32, device=device)
    indices, drawn = torch.empty((2, batch, chunks), dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int32, device=device)
    launch, remembered, stream = dependent_launch(logits), None, int(NoiseStream.TARGET)
    if memory is not None:
        remembered, stream = memory_of(memory, slots), of_depth(NoiseStream.DRAFT, depth)
    rows = _DraftRows(
        logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        chunks=chunks,
        temperatures=temperatures,
        temperature_stride=temperatures.stride(0),
        seeds=seeds,
        seed_stride=seeds.stride(0),
        positions=last_positions,
        position_stride=last_positions.stride(0),
        d2t=d2t,
        best=best,
        totals=totals,
        indices=indices,
        scores=scores,
        drawn=drawn,
    )
    remembers = memory is not None
    _draft_kernel[(batch, chunks)](
        rows, remembered, depth, stream, REMEMBERS=remembers, CHUNK=chunk, num_warps=4, **launch
    )
    width = triton.next_power_of_2(chunks)
    _draft_finish_kernel[(batch,)](
        rows, remembered, depth, tokens, REMEMBERS=remembers, CHUNKS=width, num_warps=1, **launch
    )
    return tokens


# -- the target's tokens ---------------------------------------------------------------------------
@triton.jit
def first_row(request, num_contexts, ROWS: tl.constexpr):
    """The first row of logits of a request."""
    after = num_contexts + (request - num_contexts) * ROWS
    return tl.where(request < num_contexts, request, after)


@triton.jit
def draft_weight(memory, slot, depth, draft, v, vocab, temperature):
    """q of the target's tokens v. draft: the one that was proposed at this depth."""
    at = slot * memory.depths + depth
    if memory.draft_ids is not None:
        j = tl.load(memory.draft_ids + v, mask=v < vocab, other=-1)
        has = j >= 0
    else:
        j = v
        has = v < memory.vocab
    y = tl.load(memory.logits + at * memory.vocab + j, mask=has, other=float("-inf"))
    y = (clean(y) - tl.load(memory.best + at)) / temperature
    drawn = tl.exp(y - tl.load(memory.log_sum + at))
    is_certain = tl.load(memory.are_certain + slot)
    return tl.where(is_certain, tl.where(v == draft, 1.0, 0.0), drawn)


@triton.jit
def _best_of(race, at, chunks, CHUNKS: tl.constexpr):
    """(the id with the largest score, the first of equals; that score)."""
    c = tl.arange(0, CHUNKS)
    score = tl.load(race.scores + at * chunks + c, mask=c < chunks, other=-2.0)
    index = tl.load(race.ids + at * chunks + c, mask=c < chunks, other=0)
    return tl.sum(tl.where(c == tl.argmax(score, 0), index, 0), 0), tl.max(score, 0)


@triton.jit
def _draw_kernel(
    rows, step, memory, race, JUDGED: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """JUDGED: the token after the accepted drafts, from what p leaves of q if one was rejected
    (and from p, if nothing is left). Otherwise the token of a row, from p."""
    after_previous(PDL)
    CHUNK: tl.constexpr = SIZES.CHUNK
    ROWS: tl.constexpr = SIZES.ROWS
    item, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count = item, 0
    if JUDGED:
        count = tl.load(step.counts + item)
        row = first_row(item, step.num_contexts, ROWS) + count
    temperature = tl.load(rows.temperatures + row)
    if temperature > 0:
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        p = probabilities(rows, row, v, temperature, SIZES)
        seed, position = tl.load(rows.seeds + row), tl.load(rows.positions + row)
        noise = exponential(uniform(seed, position, tl.full([], _TARGET, tl.int32), v))
        score = tl.where(p > 0, p / noise, -1.0)
        at = item * rows.chunks + chunk
        if JUDGED:
            at = item * 2 * rows.chunks + chunk
            is_rejected = (item >= step.num_contexts) & (count < ROWS - 1)
            judged = step.drafts + (item - step.num_contexts) * (ROWS - 1) + count
            draft = tl.load(judged, mask=is_rejected, other=-1)
            left = tl.full([CHUNK], -1.0, tl.float32)
            if draft >= 0:
                slot = tl.load(memory.slots + item)
                q = draft_weight(memory, slot, count, draft, v, rows.vocab, temperature)
                rest = tl.load(step.scales + item) * p - q
                left = tl.where(rest > 0, rest / noise, -1.0)
            other = at + rows.chunks
            tl.store(race.scores + other, tl.max(left, 0))
            tl.store(race.ids + other, chunk * CHUNK + tl.argmax(left, 0).to(tl.int32))
        tl.store(race.scores + at, tl.max(score, 0))
        tl.store(race.ids + at, chunk * CHUNK + tl.argmax(score, 0).to(tl.int32))


@triton.jit
def _finish_kernel(
    rows, step, out, race, JUDGED: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """One request: its tokens, their number, -1 after them."""
    after_previous(PDL)
    CHUNKS: tl.constexpr = SIZES.CHUNKS
    ROWS: tl.constexpr = SIZES.ROWS
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    request = tl.program_id(0).to(tl.int64)
    is_generation = request >= step.num_contexts
    first = first_row(request, step.num_contexts, ROWS)
    temperature = tl.load(rows.temperatures + first)
    column = tl.arange(0, COLUMNS)
    token_ptrs = out.tokens + request * out.columns + column
    if JUDGED:
        count = tl.load(step.counts + request)
        tokens = tl.load(token_ptrs, mask=column < out.columns, other=-1)
        if temperature > 0:
            token, _ = _best_of(race, request * 2, rows.chunks, CHUNKS)
            other, score = _best_of(race, request * 2 + 1, rows.chunks, CHUNKS)
            tokens = tl.where(column == count, tl.where(score > 0, other, token), tokens)
    else:
        count, is_alive, bad = 0, is_generation, request < 0
        tokens = tl.full([COLUMNS], -1, tl.int32)
        for i in tl.static_range(ROWS):
            row = tl.where(is_generation, first + i, first)
            token, is_bad = row_choice(rows, row, CHUNKS)
            bad = bad | is_bad
            if temperature > 0:
                token, _ = _best_of(race, row, rows.chunks, CHUNKS)
            tokens = tl.where((column == i) & (is_generation | (i == 0)), token, tokens)
            if i < ROWS - 1:
                at = step.drafts + (request - step.num_contexts) * (ROWS - 1) + i
                is_alive = is_alive & (tl.load(at, mask=is_generation, other=-1) == token)
                count += is_alive.to(tl.int32)
        tl.store(out.bad + request, bad)
    length = count + 1
    if out.forced_len > 0:
        length = tl.where(is_generation, out.forced_len, length)
    tl.store(token_ptrs, tl.where(column < length, tokens, -1), mask=column < out.columns)
    tl.store(out.lens + request, length)
    tl.store(out.accepted + request, length - 1)


# -- drafts ----------------------------------------------------------------------------------------
@triton.jit
def _draft_kernel(
    rows,
    memory,
    depth,
    stream,
    REMEMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of a request's draft logits: to memory; its best, its sum, and whom it draws."""
    after_previous(PDL)
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = v < rows.vocab
    x = tl.load(rows.logits + request * rows.stride + v, mask=inside, other=float("-inf"))
    if REMEMBERS:
        at = tl.load(memory.slots + request) * memory.depths + depth
        written = x.to(memory.logits.dtype.element_ty)
        tl.store(memory.logits + at * rows.vocab + v, written, mask=inside)
    x = clean(x)
    best = tl.max(x, 0)
    temperature = tl.load(rows.temperatures + request * rows.temperature_stride)
    base = tl.where(best > float("-inf"), best, 0.0)
    weight = tl.exp((x - base) / divisor_of(temperature))
    at = request * rows.chunks + chunk
    tl.store(rows.best + at, best)
    tl.store(rows.totals + at, tl.sum(weight, 0))
    tl.store(rows.indices + at, chunk * CHUNK + tl.argmax(x, 0).to(tl.int32))
    if temperature > 0:
        entry = v
        if (rows.d2t is not None) and not REMEMBERS:
            entry = v + tl.load(rows.d2t + v, mask=inside, other=0).to(tl.int32)
        position = tl.load(rows.positions + request * rows.position_stride) + 1 + depth
        seed = tl.load(rows.seeds + request * rows.seed_stride)
        noise = exponential(uniform(seed, position, tl.full([], stream, tl.int32), entry))
        score = tl.where(weight > 0, weight / noise, -1.0)
        tl.store(rows.scores + at, tl.max(score, 0))
        tl.store(rows.drawn + at, chunk * CHUNK + tl.argmax(score, 0).to(tl.int32))


@triton.jit
def _draft_finish_kernel(
    rows, memory, depth, token_ptr, REMEMBERS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    """One request: its draft, and what it was drawn from."""
    after_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(rows.temperatures + request * rows.temperature_stride)
    divisor = divisor_of(temperature)
    base, total = row_total(rows, request, divisor, CHUNKS)
    token, _ = row_choice(rows, request, CHUNKS)
    if temperature > 0:
        c = tl.arange(0, CHUNKS)
        inside = c < rows.chunks
        at = request * rows.chunks + c
        best = tl.load(rows.best + at, mask=inside, other=float("-inf"))
        score = tl.load(rows.scores + at, mask=inside, other=-1.0)
        score = score * tl.exp((best - base) / divisor)  # each chunk's are relative to its best
        drawn = tl.load(rows.drawn + at, mask=inside, other=0)
        token = tl.sum(tl.where(c == tl.argmax(score, 0), drawn, 0), 0)
    if REMEMBERS:
        at = tl.load(memory.slots + request) * memory.depths + depth
        log_sum = tl.log(total)
        x = clean(tl.load(rows.logits + request * rows.stride + token))
        tl.store(memory.best + at, base)
        tl.store(memory.log_sum + at, log_sum)
        tl.store(memory.log_q + at, (x - base) / divisor - log_sum)
    if rows.d2t is not None:
        token += tl.load(rows.d2t + token).to(tl.int32)
    tl.store(token_ptr + request, token)
