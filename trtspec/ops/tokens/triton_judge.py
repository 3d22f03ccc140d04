"""Judges the drafts of sampled requests in Triton: how many of a step are accepted.

    left    drafts x chunks   (block verification) sums of max(w p - q, 0) after each draft
    judge   requests          how many drafts are accepted

Twins: `acceptance/rejection.py`, `acceptance/strict.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.draft_memory import DraftMemory
from ...metadata.sampling import SamplingMetadata
from ..launch.triton import after_previous, dependent_launch
from . import triton_stats
from .greedy import Accepted
from .noise import NoiseStream
from .triton_draw import (
    Memory,
    Outcome,
    Sizes,
    Step,
    draft_weight,
    draw_and_finish,
    first_row,
    memory_of,
)
from .triton_filter import analyse
from .triton_noise import uniform
from .triton_stats import (
    LOW_BITS,
    Rows,
    clean,
    divisor_of,
    filtered,
    probabilities,
    row_choice,
    row_total,
)

_ACCEPTANCE = tl.constexpr(int(NoiseStream.ACCEPTANCE))


def accept_sampled(
    logits: Tensor,
    drafts: Tensor,
    num_contexts: int,
    max_draft_len: int,
    sampling: SamplingMetadata,
    *,
    slots: Tensor,
    memory: DraftMemory | None = None,
    forced_len: int = 0,
    is_block: bool = False,
) -> Accepted:
    """Chooses tokens and accepts drafts in a batch with sampled requests.

    Greedy requests in the same batch use strict acceptance.

    Args:
        logits: [C + G*(K'+1), V]. drafts: [G, K'] int32, -1 is none.
        max_draft_len: K >= K'. sampling: one row per row of logits.
        slots: [B] int64, in the memory.
        memory: what the drafts were drawn from. None: drafts are accepted while they are the
            target's sample.
        forced_len: accept this many tokens in every generation, at most K'+1; 0 is off.
        is_block: judge the drafts of a step together.
    """
    (generations, num_drafts), device = drafts.shape, logits.device
    if generations == 0 or num_drafts == 0:
        num_drafts, memory = 0, None
    batch = num_contexts + generations
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    launch = dependent_launch(logits)
    rows = analyse(logits, sampling.contiguous(), launch)
    accepted = Accepted.empty(batch, max_draft_len + 1, device)
    out = Outcome(
        tokens=accepted.tokens,
        columns=max_draft_len + 1,
        lens=accepted.lens,
        accepted=accepted.num_accepted_drafts,
        bad=accepted.bad_requests,
        forced_len=forced_len,
    )
    step = Step(
        drafts=drafts.to(torch.int32).contiguous(),
        num_contexts=num_contexts,
        counts=torch.empty(batch, dtype=torch.int32, device=device),
        scales=None,
    )
    sizes = Sizes(
        CHUNK=triton_stats.CHUNK,
        CHUNKS=triton.next_power_of_2(rows.chunks),
        ROWS=num_drafts + 1,
        COLUMNS=triton.next_power_of_2(max_draft_len + 1),
        LOW_BITS=LOW_BITS[logits.dtype],
    )
    remembered = None
    if memory is not None:
        remembered = memory_of(memory, slots)
        step = step._replace(scales=torch.empty(batch, dtype=torch.float32, device=device))
        _judge(rows, step, remembered, out, sizes, is_block, launch)
    draw_and_finish(rows, step, remembered, out, sizes, launch)
    return accepted


def _judge(
    rows: Rows,
    step: Step,
    memory: Memory,
    out: Outcome,
    sizes: Sizes,
    is_block: bool,
    launch: dict[str, bool],
) -> None:
    """Writes counts and scales of the step, the outcome's tokens up to the counts, and `bad`."""
    generations, num_drafts = step.drafts.shape
    left = None
    if is_block and num_drafts > 1:
        shape = generations, num_drafts - 1, rows.chunks
        left = torch.empty(shape, dtype=torch.float32, device=rows.logits.device)
        _left_kernel[shape](rows, step, memory, left, SIZES=sizes, num_warps=4, **launch)
    _judge_kernel[(step.counts.shape[0],)](
        rows, step, memory, out, left, IS_BLOCK=is_block, SIZES=sizes, num_warps=1, **launch
    )


@triton.jit
def _log_ratio(rows, row, draft, divisor, memory, slot, depth, SIZES: tl.constexpr):
    """Returns log(p / q) of the draft that this row judges; for a draft of -1 it means nothing."""
    base, total = row_total(rows, row, divisor, SIZES.CHUNKS)
    v = tl.maximum(draft, 0)
    x = clean(tl.load(rows.logits + row * rows.stride + v))
    if rows.kept is not None:
        total = tl.load(rows.kept + row)
        x = filtered(rows, row, x, v, SIZES.LOW_BITS)
    log_q = tl.load(memory.log_q + slot * memory.depths + depth)
    log_q = tl.where(tl.load(memory.are_certain + slot), 0.0, log_q)
    return (x - base) / divisor - tl.log(total) - log_q


@triton.jit
def _next_weight(weight, draft, ratio):
    """Returns block verification's w after one more draft."""
    grows = (draft >= 0) & (weight > 0) & (ratio == ratio)
    return tl.where(grows, tl.minimum(weight * tl.exp(ratio), 1.0), 0.0)


@triton.jit
def _left_kernel(rows, step, memory, left_ptr, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Sums max(w p - q, 0) over a chunk, after the first drafts of a request."""
    after_previous(PDL)
    ROWS: tl.constexpr = SIZES.ROWS
    generation, after, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1, tl.program_id(2)
    request = generation + step.num_contexts
    row = first_row(request, step.num_contexts, ROWS)
    temperature, slot = tl.load(rows.temperatures + row), tl.load(memory.slots + request)
    left = 0.0
    if temperature > 0:
        weight = 1.0
        for i in range(0, after):
            draft = tl.load(step.drafts + generation * (ROWS - 1) + i)
            ratio = _log_ratio(rows, row + i, draft, temperature, memory, slot, i, SIZES)
            weight = _next_weight(weight, draft, ratio)
        row += after
        v = chunk * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
        p = probabilities(rows, row, v, temperature, SIZES)
        judged = tl.load(step.drafts + generation * (ROWS - 1) + after)
        q = draft_weight(memory, slot, after, judged, v, rows.vocab, temperature)
        rest = weight * p - q
        left = tl.sum(tl.where(rest > 0, rest, 0.0), 0)
    entry = (generation * (ROWS - 2) + after - 1) * rows.chunks + chunk
    tl.store(left_ptr + entry, left)


@triton.jit
def _judge_kernel(
    rows,
    step,
    memory,
    out,
    left_ptr,
    IS_BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Judges one request. Writes accepted drafts, then the target's best token."""
    after_previous(PDL)
    ROWS: tl.constexpr = SIZES.ROWS
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    request = tl.program_id(0).to(tl.int64)
    is_generation = request >= step.num_contexts
    first = first_row(request, step.num_contexts, ROWS)
    temperature, slot = tl.load(rows.temperatures + first), tl.load(memory.slots + request)
    is_sampled = temperature > 0
    divisor = divisor_of(temperature)
    drafts_ptr = step.drafts + (request - step.num_contexts) * (ROWS - 1)
    column = tl.arange(0, COLUMNS)
    drafts = tl.full([COLUMNS], -1, tl.int32)
    choices = tl.full([COLUMNS], -1, tl.int32)
    count, is_alive, weight, scale, bad = 0, is_generation, 1.0, 1.0, request < 0
    for i in tl.static_range(ROWS):
        row = tl.where(is_generation, first + i, first)
        choice, is_bad = row_choice(rows, row, SIZES.CHUNKS)
        bad = bad | is_bad
        choices = tl.where((column == i) & (is_generation | (i == 0)), choice, choices)
        if i < ROWS - 1:
            draft = tl.load(drafts_ptr + i, mask=is_generation, other=-1)
            drafts = tl.where(column == i, draft, drafts)
            ratio = _log_ratio(rows, row, draft, divisor, memory, slot, i, SIZES)
            seed, position = tl.load(rows.seeds + row), tl.load(rows.positions + row)
            stream, depth = tl.full([], _ACCEPTANCE, tl.int32), tl.full([], i, tl.int32)
            coin = uniform(seed, position, stream, depth)
            is_match = is_alive & (draft >= 0) & (draft == choice)
            if IS_BLOCK:
                weight = _next_weight(weight, draft, ratio)
                keep = weight
                if i + 1 < ROWS - 1:
                    c = tl.arange(0, SIZES.CHUNKS)
                    entry = ((request - step.num_contexts) * (ROWS - 2) + i) * rows.chunks
                    inside = is_generation & (c < rows.chunks)
                    left = tl.sum(tl.load(left_ptr + entry + c, mask=inside, other=0.0), 0)
                    inner = left / tl.maximum(left + 1.0 - weight, 1e-30)
                    after = tl.load(drafts_ptr + i + 1, mask=is_generation, other=-1)
                    keep = tl.where(after >= 0, inner, weight)
                is_accepted = is_sampled & (draft >= 0) & (coin <= keep)
                is_alive = is_match
                is_accepted = is_accepted | (is_match & (temperature <= 0))
                count = tl.where(is_accepted, i + 1, count)
                scale = tl.where(is_accepted, weight, scale)
            else:
                is_chance = (coin < tl.exp(tl.minimum(ratio, 0.0))) & (ratio == ratio)
                is_accepted = is_alive & (draft >= 0) & is_chance
                is_alive = tl.where(is_sampled, is_accepted, is_match)
                count += is_alive.to(tl.int32)
    tl.store(step.counts + request, count)
    tl.store(step.scales + request, scale)
    tl.store(out.bad + request, bad)
    tokens = tl.where(column < count, drafts, choices)
    tl.store(out.tokens + request * out.columns + column, tokens, mask=column < out.columns)
