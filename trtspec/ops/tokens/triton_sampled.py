"""Sampled speculation in a few kernels, none of which writes a softmax.

    stats   rows x chunks       largest logit of each chunk, and the sum of exponentials
    filter  rows                (top-k, top-p) which logits are kept, and their sum
    left    drafts x chunks     (block verification) what p leaves of q after each draft
    judge   requests            how many drafts are kept
    draw    requests x chunks   the best of each chunk in a race of p, or of what p leaves of q
    finish  requests            the tokens

Twins: `acceptance/rejection.py`, `acceptance/strict.py`, `ops/tokens/sample.py`,
`sampling/draft.py`.
A token is drawn as argmax of p / E with E standard exponential, which is the Gumbel trick without
one of its logarithms. Sums are taken chunk by chunk in a fixed order: what a request gets does not
depend on its company.
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
from .greedy import Accepted
from .noise import NoiseStream, of_depth

_CHUNK, _PART = 2048, 128  # logits of a program; of a part of it whose largest the filters look at
_GROUP = 64  # parts that the filters read at a time
FILTER_WARPS = 8
CAPACITY = 8192
"""Candidates of a row that the filters can put aside; with more they search the whole row."""
_TARGET, _ACCEPTANCE = (
    tl.constexpr(int(NoiseStream.TARGET)),
    tl.constexpr(int(NoiseStream.ACCEPTANCE)),
)
_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # zero once in float32
_NO_MEMORY = (None, None, None, None, None, None, 0, 0)  # in place of what is remembered


def accept_sampled(
    logits: Tensor,
    drafts: Tensor,
    num_contexts: int,
    max_draft_len: int,
    sampling: SamplingMetadata,
    *,
    forced_len: int = 0,
    memory: DraftMemory | None = None,
    slots: Tensor | None = None,
    is_block: bool = False,
) -> Accepted:
    """Acceptance where a request is sampled. Greedy ones beside it are judged as ever.

    Args:
        logits: [C + G*(K'+1), V]. drafts: [G, K'] int32, -1 is none.
        max_draft_len: K >= K'. sampling: one row per row of logits.
        forced_len: accept this many tokens in every generation, at most K'+1; 0 is off.
        memory, slots: what the drafts were drawn from, and where [B]; None: drafts are kept while
            they are the target's sample.
        is_block: judge the drafts of a step together.
    """
    rows, vocab = logits.shape
    (generations, num_drafts), device = drafts.shape, logits.device
    if generations == 0 or num_drafts == 0:
        num_drafts, memory = 0, None
    batch, chunks = num_contexts + generations, triton.cdiv(vocab, _CHUNK)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drafts = drafts.to(torch.int32).contiguous()
    launch = dependent_launch(logits)
    sampling = sampling.contiguous()
    best, total, index, parts = _stats(
        logits, sampling.temperatures, chunks, sampling.has_filters, launch
    )
    kept = (best, best, best)  # never read
    if sampling.has_filters:
        kept = _filter(logits, sampling, best, total, parts, launch)
    where = (
        logits, logits.stride(0), sampling.temperatures, sampling.seeds, sampling.positions,
        best, total, index, *kept, vocab, chunks,
    )  # fmt: skip
    flags = {
        "FILTERS": sampling.has_filters, "LOW_BITS": _LOW_BITS[logits.dtype],
        "CHUNKS": triton.next_power_of_2(chunks), "ROWS": num_drafts + 1, **launch,
    }  # fmt: skip
    tokens = torch.empty((batch, max_draft_len + 1), dtype=torch.int32, device=device)
    lens, accepted, counts = torch.empty((3, batch), dtype=torch.int32, device=device)
    bad = torch.empty(batch, dtype=torch.bool, device=device)
    out = (tokens, lens, accepted, bad, counts, forced_len, max_draft_len + 1, num_contexts)
    columns = triton.next_power_of_2(max_draft_len + 1)
    if memory is None:
        scores = torch.empty((rows, 1, chunks), dtype=torch.float32, device=device)
        ids = torch.empty((rows, 1, chunks), dtype=torch.int32, device=device)
        _draw_kernel[(rows, chunks)](
            *where, drafts, counts, scores, scores, ids, num_contexts, *_NO_MEMORY,
            JUDGED=False, TABLE=False, CHUNK=_CHUNK, num_warps=4, **flags,
        )  # fmt: skip
        _finish_kernel[(batch,)](
            *where, drafts, scores, ids, *out, JUDGED=False, COLUMNS=columns, num_warps=1, **flags
        )
        return Accepted(tokens, lens, accepted, bad)
    assert slots is not None
    remembered = (
        slots, memory.logits, memory.best, memory.log_sum, memory.log_q, memory.draft_ids,
        memory.logits.shape[1], memory.logits.shape[2],
    )  # fmt: skip
    flags["TABLE"] = memory.draft_ids is not None
    left = best
    if is_block and num_drafts > 1:
        shape = generations, num_drafts - 1, chunks
        left = torch.empty(shape, dtype=torch.float32, device=device)
        _left_kernel[shape](
            *where, drafts, left, num_contexts, *remembered, CHUNK=_CHUNK, num_warps=4, **flags
        )
    scales = torch.empty(batch, dtype=torch.float32, device=device)
    _judge_kernel[(batch,)](
        *where, drafts, left, scales, *out, *remembered, IS_BLOCK=is_block, COLUMNS=columns,
        num_warps=1, **flags,
    )  # fmt: skip
    scores = torch.empty((batch, 2, chunks), dtype=torch.float32, device=device)
    ids = torch.empty((batch, 2, chunks), dtype=torch.int32, device=device)
    _draw_kernel[(batch, chunks)](
        *where, drafts, counts, scales, scores, ids, num_contexts, *remembered,
        JUDGED=True, CHUNK=_CHUNK, num_warps=4, **flags,
    )  # fmt: skip
    del flags["TABLE"]
    _finish_kernel[(batch,)](
        *where, drafts, scores, ids, *out, JUDGED=True, COLUMNS=columns, num_warps=1, **flags
    )
    return Accepted(tokens, lens, accepted, bad)


def draw_drafts(
    logits: Tensor,
    d2t: Tensor | None,
    temperatures: Tensor,
    seeds: Tensor,
    last_positions: Tensor,
    depth: int,
    slots: Tensor | None,
    memory: DraftMemory | None,
) -> Tensor:
    """`DraftSampler.draw`: draft logits [B, Vd] -> target ids [B] int32."""
    (batch, vocab), device = logits.shape, logits.device
    chunks = triton.cdiv(vocab, _CHUNK)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    best, total, score = torch.empty((3, batch, chunks), dtype=torch.float32, device=device)
    index, drawn = torch.empty((2, batch, chunks), dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int32, device=device)
    launch, table, remembers = dependent_launch(logits), d2t is not None, memory is not None
    stream = of_depth(NoiseStream.DRAFT, depth) if remembers else int(NoiseStream.TARGET)
    requests = temperatures, temperatures.stride(0), d2t
    partial = best, total, score, index, drawn
    kept: tuple[object, ...] = (slots, None, None, None, None, 0)
    if memory is not None:
        kept = (slots, memory.logits, memory.best, memory.log_sum, memory.log_q,
                memory.logits.shape[1])  # fmt: skip
    _draft_kernel[(batch, chunks)](
        logits, logits.stride(0), *requests, seeds, seeds.stride(0), last_positions,
        last_positions.stride(0), depth, stream, *kept, *partial, vocab, chunks,
        TABLE=table, REMEMBERS=remembers, CHUNK=_CHUNK, num_warps=4, **launch,
    )  # fmt: skip
    _draft_finish_kernel[(batch,)](
        logits, logits.stride(0), *requests, depth, *kept, *partial, chunks, tokens,
        TABLE=table, REMEMBERS=remembers, CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
        **launch,
    )  # fmt: skip
    return tokens


# -- noise, bit for bit that of `noise.py` ---------------------------------------------------------
@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, position, stream, index):
    """seed, position, stream: scalars. index: which entries, any shape."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first = _mix(_mix(low + (place + 1) * 0x9E3779B1) ^ high)
    offset = (stream + 1).to(tl.uint32) * 0x85EBCA6B
    second = _mix(first + offset) ^ _mix(high ^ place)
    first = _mix(first ^ _mix(second))
    x = index.to(tl.uint32) * 0x9E3779B1 + first
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _exponential(uniform):
    """-log(uniform). Near 1, where the fast logarithm is coarse and the race is won, a series."""
    rest = 1.0 - uniform
    series = 0.2 + rest * (1.0 / 6.0)
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * (0.25 + rest * series))))
    return tl.where(rest < 0.0625, series, -tl.log(uniform))


# -- rows of logits --------------------------------------------------------------------------------
@triton.jit
def _clean(x):
    """NaN is never chosen; an infinite logit counts as the largest number."""
    x = tl.where(x != x, float("-inf"), x.to(tl.float32))
    return tl.minimum(x, 3.4028234663852886e38) + 0.0  # no -0


@triton.jit
def _key(x, LOW_BITS: tl.constexpr):
    """Integers in the order of the floats, without bits that are zero in the logits' own type."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def _divisor(temperature):
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _row_total(best_ptr, total_ptr, row, chunks, divisor, CHUNKS: tl.constexpr):
    """(largest logit, 0 if there is none; sum of exp((logit - largest) / divisor))."""
    c = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    total = tl.load(total_ptr + row * chunks + c, mask=c < chunks, other=0.0)
    largest = tl.max(best, 0)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    return largest, tl.sum(total * tl.exp((best - largest) / divisor), 0)


@triton.jit
def _row_choice(best_ptr, index_ptr, row, chunks, CHUNKS: tl.constexpr):
    """(the largest logit's token, the first of equals; whether the row is bad)."""
    c = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    index = tl.load(index_ptr + row * chunks + c, mask=c < chunks, other=0)
    is_bad = (tl.min(index, 0) < 0) | (tl.max(best, 0) == float("-inf"))
    index = tl.where(index < 0, -1 - index, index)
    return tl.sum(tl.where(c == tl.argmax(best, 0), index, 0), 0), is_bad


@triton.jit
def _first_row(request, num_contexts, ROWS: tl.constexpr):
    after = num_contexts + (request - num_contexts) * ROWS
    return tl.where(request < num_contexts, request, after)


def _stats(
    logits: Tensor, temperatures: Tensor, chunks: int, has_parts: bool, launch: dict[str, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every row and chunk: largest logit, sum of exponentials, and which it is (-1 - which if
    there is a NaN); the largest of every part of it where asked for."""
    (rows, vocab), device = logits.shape, logits.device
    best, total = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    index = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    parts = best
    if has_parts:
        parts = torch.empty((rows, chunks * (_CHUNK // _PART)), dtype=torch.float32, device=device)
    _stats_kernel[(rows, chunks)](
        logits, logits.stride(0), temperatures, best, total, index, parts, vocab, chunks,
        HAS_PARTS=has_parts, PART=_PART, CHUNK=_CHUNK, num_warps=4, **launch,
    )  # fmt: skip
    return best, total, index, parts


@triton.jit
def _stats_kernel(
    logits_ptr, logits_row, temperature_ptr, best_ptr, total_ptr, index_ptr, part_ptr, vocab,
    chunks, HAS_PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * logits_row + v, mask=v < vocab, other=float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    x = _clean(x)
    best = tl.max(x, 0)
    base = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp((x - base) / _divisor(tl.load(temperature_ptr + row))), 0)
    index = chunk * CHUNK + tl.argmax(x, 0).to(tl.int32)
    place = row * chunks + chunk
    tl.store(best_ptr + place, best)
    tl.store(total_ptr + place, total)
    tl.store(index_ptr + place, tl.where(has_nan, -1 - index, index))
    if HAS_PARTS:
        parts = tl.max(tl.reshape(x, [CHUNK // PART, PART]), 1)
        tl.store(part_ptr + place * (CHUNK // PART) + tl.arange(0, CHUNK // PART), parts)


# -- top-k and top-p -------------------------------------------------------------------------------
def _filter(
    logits: Tensor, sampling: SamplingMetadata, best: Tensor, total: Tensor, parts: Tensor,
    launch: dict[str, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Per row: the smallest key that is kept, the last index at which it is, the sum of
    exponentials of what is kept."""
    (rows, vocab), device = logits.shape, logits.device
    threshold, last = torch.empty((2, rows), dtype=torch.int32, device=device)
    kept = torch.empty(rows, dtype=torch.float32, device=device)
    capacity = min(CAPACITY, vocab)
    values = torch.empty((rows, capacity), dtype=torch.float32, device=device)
    places = torch.empty((rows, capacity), dtype=torch.int32, device=device)
    live = torch.empty(parts.shape, dtype=torch.int32, device=device)
    _filter_kernel[(rows,)](
        logits, logits.stride(0), sampling.temperatures, sampling.top_ks, sampling.top_ps, best,
        total, parts, live, values, places, threshold, last, kept, vocab, best.shape[1],
        parts.shape[1], CAPACITY=capacity, PART=_PART, PARTS=triton.next_power_of_2(parts.shape[1]),
        GROUP=_GROUP, CHUNKS=triton.next_power_of_2(best.shape[1]),
        LOW_BITS=_LOW_BITS[logits.dtype], num_warps=FILTER_WARPS, **launch,
    )  # fmt: skip
    return threshold, last, kept


@triton.jit
def _filter_kernel(
    logits_ptr, logits_row, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, total_ptr, part_ptr,
    live_ptr, value_ptr, place_ptr, threshold_ptr, last_ptr, kept_ptr, vocab, chunks, num_parts,
    CAPACITY: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    CHUNKS: tl.constexpr, LOW_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A bound first, from the largest logit of every part: what is kept is not below the largest
    key that k of these reach; or that some of these reach which together weigh top_p; or so far
    down that all its like weigh less than 1 - top_p. What is not below the bound is put aside, from
    those parts that have any, and the search goes on there."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    base, total = _row_total(best_ptr, total_ptr, row, chunks, _divisor(temperature), CHUNKS)
    lowest = _key(tl.full([], float("-inf"), tl.float32), LOW_BITS)
    threshold, last, kept = lowest, 0x7FFFFFFF, total
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        highest = _key(base, LOW_BITS)
        bound = lowest
        if top_k > 0:
            if top_k <= num_parts:
                bound, _ = _between(
                    part_ptr + row * num_parts, num_parts, lowest, highest + 1,
                    top_k.to(tl.float32), temperature, base, True, LOW_BITS, PARTS,
                )  # fmt: skip
        else:
            below, _ = _between(
                part_ptr + row * num_parts, num_parts, lowest - 1, highest, top_p * total,
                temperature, base, False, LOW_BITS, PARTS,
            )  # fmt: skip
            far = base + temperature * tl.log(0.5 * (1.0 - top_p) * total / vocab)
            bound = tl.maximum(below + 1, _key(far, LOW_BITS))
        i = tl.arange(0, PARTS)
        parts = tl.load(part_ptr + row * num_parts + i, mask=i < num_parts, other=float("-inf"))
        is_live = (_key(parts, LOW_BITS) >= bound) & (i < num_parts)
        order = tl.cumsum(is_live.to(tl.int32), 0) - 1
        tl.store(live_ptr + row * num_parts + order, i, mask=is_live)
        num_live = tl.sum(is_live.to(tl.int32), 0)
        tl.debug_barrier()  # before what other threads stored is read
        count = 0
        for start in range(0, num_live, GROUP):
            j = start + tl.arange(0, GROUP)
            part = tl.load(live_ptr + row * num_parts + j, mask=j < num_live, other=num_parts)
            v = tl.reshape(part[:, None] * PART + tl.arange(0, PART)[None, :], [GROUP * PART])
            x = _clean(
                tl.load(logits_ptr + row * logits_row + v, mask=v < vocab, other=float("-inf"))
            )
            is_candidate = (_key(x, LOW_BITS) >= bound) & (v < vocab)
            place = count + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            fits = is_candidate & (place < CAPACITY)
            tl.store(value_ptr + row * CAPACITY + place, x, mask=fits)
            tl.store(place_ptr + row * CAPACITY + place, v, mask=fits)
            count += tl.sum(is_candidate.to(tl.int32), 0)
        tl.debug_barrier()
        if count <= CAPACITY:
            threshold, last, kept = _search(
                value_ptr + row * CAPACITY, place_ptr + row * CAPACITY, count, top_k, top_p,
                temperature, base, total, bound, True, LOW_BITS,
            )  # fmt: skip
        else:
            threshold, last, kept = _search(
                logits_ptr + row * logits_row, place_ptr, vocab, top_k, top_p,
                temperature, base, total, bound, False, LOW_BITS,
            )  # fmt: skip
    tl.store(threshold_ptr + row, threshold)
    tl.store(last_ptr + row, last)
    tl.store(kept_ptr + row, kept)


@triton.jit
def _between(
    x_ptr, count, low, high, wanted, temperature, base, COUNTS: tl.constexpr,
    LOW_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Neighbouring keys between low and high: COUNTS: `wanted` values reach the first and not the
    second. Otherwise: what is above the first weighs `wanted`, what is above the second does not.
    Seven keys are tried at a time."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    i = tl.arange(0, 8)
    while low + 1 < high:
        tried = low + ((high - low) * i >> 3)  # the first is low itself, which is known
        sums = tl.zeros([8], tl.float32)
        for start in range(0, count, BLOCK):
            x = _values_at(x_ptr, start, count, BLOCK)
            keys = _key(x, LOW_BITS).to(tl.int64)[:, None]
            if COUNTS:
                weights = tl.where(keys >= tried[None, :], 1.0, 0.0)
            else:
                weight = tl.exp((x - base) / temperature)[:, None]
                weights = tl.where(keys > tried[None, :], weight, 0.0)
            sums += tl.sum(weights, 0)
        reached = tl.sum(((sums >= wanted) | (i == 0)).to(tl.int64), 0)
        width = high - low
        high = low + (width * reached >> 3)
        low += width * (reached - 1) >> 3
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _search(
    x_ptr, place_ptr, count, top_k, top_p, temperature, base, total, bound,
    HAS_PLACES: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """(smallest key kept, last place at which it is, sum of what is kept). What is kept is not
    below the bound; nor, without top-k, is `total` the sum of x alone."""
    BLOCK: tl.constexpr = 1024
    highest = _key(base, LOW_BITS)
    threshold, equals, room, kept = bound, 0, 0x7FFFFFFF, total
    if top_k > 0:
        threshold, _ = _between(
            x_ptr, count, bound, highest + 1, top_k.to(tl.float32), temperature, base, True,
            LOW_BITS, BLOCK,
        )  # fmt: skip
        number, equals, weight, kept = _around(
            x_ptr, count, threshold, temperature, base, LOW_BITS, BLOCK
        )
        room = top_k - number
        kept += room * weight
    if top_p < 1.0:
        wanted, first, first_room = top_p * kept, threshold, room
        _, threshold = _between(
            x_ptr, count, first - 1, highest, wanted, temperature, base, False, LOW_BITS, BLOCK
        )
        threshold = tl.maximum(threshold, first)  # top_p * all may round to more than all
        number, equals, weight, kept = _around(
            x_ptr, count, threshold, temperature, base, LOW_BITS, BLOCK
        )
        room = tl.where(threshold == first, first_room, equals)
        needed = tl.ceil((wanted - kept) / weight)
        room = tl.maximum(tl.minimum(needed, room.to(tl.float32)), 1.0).to(tl.int32)
        kept += room * weight
    last = 0x7FFFFFFF
    if room < equals:  # of logits that are the same, the first
        seen = 0
        for start in range(0, count, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = _values_at(x_ptr, start, count, BLOCK)
            is_equal = (_key(x, LOW_BITS) == threshold) & (v < count)
            order = seen + tl.cumsum(is_equal.to(tl.int32), 0)
            place = v
            if HAS_PLACES:
                place = tl.load(place_ptr + v, mask=v < count, other=0)
            place = tl.where(is_equal & (order == room), place, 0x7FFFFFFF)
            last = tl.minimum(last, tl.min(place, 0))
            seen += tl.sum(is_equal.to(tl.int32), 0)
    return threshold, last, kept


@triton.jit
def _values_at(x_ptr, start, count, BLOCK: tl.constexpr):
    v = start + tl.arange(0, BLOCK)
    return _clean(tl.load(x_ptr + v, mask=v < count, other=float("-inf")))


@triton.jit
def _around(x_ptr, count, key, temperature, base, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """(logits above the key, logits with it, the weight of one of these, the sum of the weights of
    those above)."""
    above, equals = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    value = float("-inf")
    for start in range(0, count, BLOCK):
        x = _values_at(x_ptr, start, count, BLOCK)
        keys = _key(x, LOW_BITS)
        inside = start + tl.arange(0, BLOCK) < count
        above += (keys > key).to(tl.int32)
        equals += ((keys == key) & inside).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((x - base) / temperature), 0.0)
        value = tl.maximum(value, tl.max(tl.where(keys == key, x, float("-inf")), 0))
    weight = tl.exp((value - base) / temperature)
    return tl.sum(above, 0), tl.sum(equals, 0), weight, tl.sum(mass, 0)


@triton.jit
def _is_kept(x, v, threshold, last, LOW_BITS: tl.constexpr):
    key = _key(x, LOW_BITS)
    return (key > threshold) | ((key == threshold) & (v <= last))


# -- judging drafts --------------------------------------------------------------------------------
@triton.jit
def _log_ratio(
    logits_ptr, logits_row, temperature, best_ptr, total_ptr, threshold_ptr, last_ptr, kept_ptr,
    log_q_ptr, row, draft, chunks, FILTERS: tl.constexpr, LOW_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """log(p / q) of the draft that this row judges; a draft of -1 means nothing."""
    base, total = _row_total(best_ptr, total_ptr, row, chunks, temperature, CHUNKS)
    v = tl.maximum(draft, 0)
    x = _clean(tl.load(logits_ptr + row * logits_row + v))
    if FILTERS:
        total = tl.load(kept_ptr + row)
        is_kept = _is_kept(x, v, tl.load(threshold_ptr + row), tl.load(last_ptr + row), LOW_BITS)
        x = tl.where(is_kept, x, float("-inf"))
    return (x - base) / temperature - tl.log(total) - tl.load(log_q_ptr)


@triton.jit
def _next_weight(weight, draft, ratio):
    """Block verification's w after one draft more."""
    grows = (draft >= 0) & (weight > 0) & (ratio == ratio)
    return tl.where(grows, tl.minimum(weight * tl.exp(ratio), 1.0), 0.0)


@triton.jit
def _draft_weight(
    memory_ptr, memory_best_ptr, memory_sum_ptr, draft_id_ptr, place, v, vocab, draft_vocab,
    temperature, TABLE: tl.constexpr,
):  # fmt: skip
    """q of the target's tokens v. place: slot * K + depth."""
    if TABLE:
        j = tl.load(draft_id_ptr + v, mask=v < vocab, other=-1)
        has = j >= 0
    else:
        j = v
        has = v < draft_vocab
    y = tl.load(memory_ptr + place * draft_vocab + j, mask=has, other=float("-inf"))
    y = (_clean(y) - tl.load(memory_best_ptr + place)) / temperature
    return tl.exp(y - tl.load(memory_sum_ptr + place))


@triton.jit
def _left_kernel(
    logits_ptr, logits_row, temperature_ptr, seed_ptr, position_ptr, best_ptr, total_ptr, index_ptr,
    threshold_ptr, last_ptr, kept_ptr, vocab, chunks, draft_ptr, left_ptr, num_contexts,
    slot_ptr, memory_ptr, memory_best_ptr, memory_sum_ptr, log_q_ptr, draft_id_ptr, num_memories,
    draft_vocab, FILTERS: tl.constexpr, LOW_BITS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum over a chunk of max(w p - q, 0) after the first drafts of a request."""
    after_previous(PDL)
    generation, after, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1, tl.program_id(2)
    request = generation + num_contexts
    row = _first_row(request, num_contexts, ROWS)
    temperature, slot = tl.load(temperature_ptr + row), tl.load(slot_ptr + request)
    left = 0.0
    if temperature > 0:
        weight = 1.0
        for i in range(0, after):
            draft = tl.load(draft_ptr + generation * (ROWS - 1) + i)
            ratio = _log_ratio(
                logits_ptr, logits_row, temperature, best_ptr, total_ptr, threshold_ptr, last_ptr,
                kept_ptr, log_q_ptr + slot * num_memories + i, row + i, draft, chunks,
                FILTERS, LOW_BITS, CHUNKS,
            )  # fmt: skip
            weight = _next_weight(weight, draft, ratio)
        row += after
        base, total = _row_total(best_ptr, total_ptr, row, chunks, temperature, CHUNKS)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _clean(tl.load(logits_ptr + row * logits_row + v, mask=v < vocab, other=float("-inf")))
        if FILTERS:
            total = tl.load(kept_ptr + row)
            threshold, last = tl.load(threshold_ptr + row), tl.load(last_ptr + row)
            x = tl.where(_is_kept(x, v, threshold, last, LOW_BITS), x, float("-inf"))
        p = tl.exp((x - base) / temperature) / total
        q = _draft_weight(
            memory_ptr, memory_best_ptr, memory_sum_ptr, draft_id_ptr,
            slot * num_memories + after, v, vocab, draft_vocab, temperature, TABLE,
        )  # fmt: skip
        rest = weight * p - q
        left = tl.sum(tl.where(rest > 0, rest, 0.0), 0)
    place = (generation * (ROWS - 2) + after - 1) * chunks + chunk
    tl.store(left_ptr + place, left)


@triton.jit
def _judge_kernel(
    logits_ptr, logits_row, temperature_ptr, seed_ptr, position_ptr, best_ptr, total_ptr, index_ptr,
    threshold_ptr, last_ptr, kept_ptr, vocab, chunks, draft_ptr, left_ptr, scale_ptr,
    token_ptr, len_ptr, accepted_ptr, bad_ptr, count_ptr, forced_len, num_columns, num_contexts,
    slot_ptr, memory_ptr, memory_best_ptr, memory_sum_ptr, log_q_ptr, draft_id_ptr, num_memories,
    draft_vocab, FILTERS: tl.constexpr, LOW_BITS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, TABLE: tl.constexpr, IS_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One request: how many drafts are kept; the drafts, then the target's best, as its tokens."""
    after_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    is_generation = request >= num_contexts
    first = _first_row(request, num_contexts, ROWS)
    temperature, slot = tl.load(temperature_ptr + first), tl.load(slot_ptr + request)
    is_sampled = temperature > 0
    divisor = _divisor(temperature)
    drafts_ptr = draft_ptr + (request - num_contexts) * (ROWS - 1)
    column = tl.arange(0, COLUMNS)
    drafts = tl.full([COLUMNS], -1, tl.int32)
    choices = tl.full([COLUMNS], -1, tl.int32)
    count, is_alive, weight, scale, bad = 0, is_generation, 1.0, 1.0, request < 0
    for i in tl.static_range(ROWS):
        row = tl.where(is_generation, first + i, first)
        choice, is_bad = _row_choice(best_ptr, index_ptr, row, chunks, CHUNKS)
        bad = bad | is_bad
        choices = tl.where((column == i) & (is_generation | (i == 0)), choice, choices)
        if i < ROWS - 1:
            draft = tl.load(drafts_ptr + i, mask=is_generation, other=-1)
            drafts = tl.where(column == i, draft, drafts)
            ratio = _log_ratio(
                logits_ptr, logits_row, divisor, best_ptr, total_ptr, threshold_ptr, last_ptr,
                kept_ptr, log_q_ptr + slot * num_memories + i, row, draft, chunks,
                FILTERS, LOW_BITS, CHUNKS,
            )  # fmt: skip
            coin = _uniform(
                tl.load(seed_ptr + row), tl.load(position_ptr + row),
                tl.full([], _ACCEPTANCE, tl.int32), tl.full([], i, tl.int32),
            )  # fmt: skip
            is_match = is_alive & (draft >= 0) & (draft == choice)
            if IS_BLOCK:
                weight = _next_weight(weight, draft, ratio)
                keep = weight
                if i + 1 < ROWS - 1:
                    c = tl.arange(0, CHUNKS)
                    place = ((request - num_contexts) * (ROWS - 2) + i) * chunks
                    left = tl.load(
                        left_ptr + place + c, mask=is_generation & (c < chunks), other=0.0
                    )
                    left = tl.sum(left, 0)
                    inner = left / tl.maximum(left + 1.0 - weight, 1e-30)
                    after = tl.load(drafts_ptr + i + 1, mask=is_generation, other=-1)
                    keep = tl.where(after >= 0, inner, weight)
                is_kept = is_sampled & (draft >= 0) & (coin <= keep)
                is_alive = is_match
                is_kept = is_kept | (is_match & (temperature <= 0))
                count = tl.where(is_kept, i + 1, count)
                scale = tl.where(is_kept, weight, scale)
            else:
                is_chance = (coin < tl.exp(tl.minimum(ratio, 0.0))) & (ratio == ratio)
                is_kept = is_alive & (draft >= 0) & is_chance
                is_alive = tl.where(is_sampled, is_kept, is_match)
                count += is_alive.to(tl.int32)
    tl.store(count_ptr + request, count)
    tl.store(scale_ptr + request, scale)
    tl.store(bad_ptr + request, bad)
    tokens = tl.where(column < count, drafts, choices)
    tl.store(token_ptr + request * num_columns + column, tokens, mask=column < num_columns)


# -- drawing ---------------------------------------------------------------------------------------
@triton.jit
def _best_of(score_ptr, id_ptr, place, chunks, CHUNKS: tl.constexpr):
    """(the id with the largest score, the first of equals; that score)."""
    c = tl.arange(0, CHUNKS)
    score = tl.load(score_ptr + place * chunks + c, mask=c < chunks, other=-2.0)
    index = tl.load(id_ptr + place * chunks + c, mask=c < chunks, other=0)
    return tl.sum(tl.where(c == tl.argmax(score, 0), index, 0), 0), tl.max(score, 0)


@triton.jit
def _draw_kernel(
    logits_ptr, logits_row, temperature_ptr, seed_ptr, position_ptr, best_ptr, total_ptr, index_ptr,
    threshold_ptr, last_ptr, kept_ptr, vocab, chunks, draft_ptr, count_ptr, scale_ptr, score_ptr,
    id_ptr, num_contexts, slot_ptr, memory_ptr, memory_best_ptr, memory_sum_ptr, log_q_ptr,
    draft_id_ptr, num_memories, draft_vocab, JUDGED: tl.constexpr, FILTERS: tl.constexpr,
    LOW_BITS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """JUDGED: the token after the drafts that were kept, from what p leaves of q if one was turned
    down (and from p, if nothing is left). Otherwise the token of a row, from p."""
    after_previous(PDL)
    item, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count = item, 0
    if JUDGED:
        count = tl.load(count_ptr + item)
        row = _first_row(item, num_contexts, ROWS) + count
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        base, total = _row_total(best_ptr, total_ptr, row, chunks, temperature, CHUNKS)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _clean(tl.load(logits_ptr + row * logits_row + v, mask=v < vocab, other=float("-inf")))
        if FILTERS:
            total = tl.load(kept_ptr + row)
            threshold, last = tl.load(threshold_ptr + row), tl.load(last_ptr + row)
            x = tl.where(_is_kept(x, v, threshold, last, LOW_BITS), x, float("-inf"))
        p = tl.exp((x - base) / temperature) / total
        noise = _exponential(
            _uniform(
                tl.load(seed_ptr + row), tl.load(position_ptr + row),
                tl.full([], _TARGET, tl.int32), v,
            )
        )  # fmt: skip
        score = tl.where(p > 0, p / noise, -1.0)
        place = item * chunks + chunk
        if JUDGED:
            place = item * 2 * chunks + chunk
            is_turned_down = (item >= num_contexts) & (count < ROWS - 1)
            draft = tl.load(
                draft_ptr + (item - num_contexts) * (ROWS - 1) + count, mask=is_turned_down,
                other=-1,
            )  # fmt: skip
            left = tl.full([CHUNK], -1.0, tl.float32)
            if draft >= 0:
                q = _draft_weight(
                    memory_ptr, memory_best_ptr, memory_sum_ptr, draft_id_ptr,
                    tl.load(slot_ptr + item) * num_memories + count, v, vocab, draft_vocab,
                    temperature, TABLE,
                )  # fmt: skip
                rest = tl.load(scale_ptr + item) * p - q
                left = tl.where(rest > 0, rest / noise, -1.0)
            tl.store(score_ptr + place + chunks, tl.max(left, 0))
            tl.store(id_ptr + place + chunks, chunk * CHUNK + tl.argmax(left, 0).to(tl.int32))
        tl.store(score_ptr + place, tl.max(score, 0))
        tl.store(id_ptr + place, chunk * CHUNK + tl.argmax(score, 0).to(tl.int32))


@triton.jit
def _finish_kernel(
    logits_ptr, logits_row, temperature_ptr, seed_ptr, position_ptr, best_ptr, total_ptr, index_ptr,
    threshold_ptr, last_ptr, kept_ptr, vocab, chunks, draft_ptr, score_ptr, id_ptr,
    token_ptr, len_ptr, accepted_ptr, bad_ptr, count_ptr, forced_len, num_columns, num_contexts,
    JUDGED: tl.constexpr, FILTERS: tl.constexpr, LOW_BITS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One request: its tokens, their number, -1 after them."""
    after_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    is_generation = request >= num_contexts
    first = _first_row(request, num_contexts, ROWS)
    temperature = tl.load(temperature_ptr + first)
    column = tl.arange(0, COLUMNS)
    places = token_ptr + request * num_columns + column
    if JUDGED:
        count = tl.load(count_ptr + request)
        tokens = tl.load(places, mask=column < num_columns, other=-1)
        if temperature > 0:
            token, _ = _best_of(score_ptr, id_ptr, request * 2, chunks, CHUNKS)
            other, score = _best_of(score_ptr, id_ptr, request * 2 + 1, chunks, CHUNKS)
            tokens = tl.where(column == count, tl.where(score > 0, other, token), tokens)
    else:
        count, is_alive, bad = 0, is_generation, request < 0
        tokens = tl.full([COLUMNS], -1, tl.int32)
        for i in tl.static_range(ROWS):
            row = tl.where(is_generation, first + i, first)
            token, is_bad = _row_choice(best_ptr, index_ptr, row, chunks, CHUNKS)
            bad = bad | is_bad
            if temperature > 0:
                token, _ = _best_of(score_ptr, id_ptr, row, chunks, CHUNKS)
            tokens = tl.where((column == i) & (is_generation | (i == 0)), token, tokens)
            if i < ROWS - 1:
                place = draft_ptr + (request - num_contexts) * (ROWS - 1) + i
                is_alive = is_alive & (tl.load(place, mask=is_generation, other=-1) == token)
                count += is_alive.to(tl.int32)
        tl.store(bad_ptr + request, bad)
    length = count + 1
    if forced_len > 0:
        length = tl.where(is_generation, forced_len, length)
    tl.store(places, tl.where(column < length, tokens, -1), mask=column < num_columns)
    tl.store(len_ptr + request, length)
    tl.store(accepted_ptr + request, length - 1)


# -- drafts ----------------------------------------------------------------------------------------
@triton.jit
def _draft_kernel(
    logits_ptr, logits_row, temperature_ptr, temperature_stride, d2t_ptr, seed_ptr, seed_stride,
    position_ptr, position_stride, depth, stream, slot_ptr, memory_ptr, memory_best_ptr,
    memory_sum_ptr, log_q_ptr, num_memories, best_ptr, total_ptr, score_ptr, index_ptr, drawn_ptr,
    vocab, chunks, TABLE: tl.constexpr, REMEMBERS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a request's draft logits: to memory; its best, its sum, and whom it draws."""
    after_previous(PDL)
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + request * logits_row + v, mask=v < vocab, other=float("-inf"))
    if REMEMBERS:
        place = tl.load(slot_ptr + request) * num_memories + depth
        tl.store(memory_ptr + place * vocab + v, x.to(memory_ptr.dtype.element_ty), mask=v < vocab)
    x = _clean(x)
    best = tl.max(x, 0)
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    base = tl.where(best > float("-inf"), best, 0.0)
    weight = tl.exp((x - base) / _divisor(temperature))
    place = request * chunks + chunk
    tl.store(best_ptr + place, best)
    tl.store(total_ptr + place, tl.sum(weight, 0))
    tl.store(index_ptr + place, chunk * CHUNK + tl.argmax(x, 0).to(tl.int32))
    if temperature > 0:
        entry = v
        if TABLE and not REMEMBERS:
            entry = v + tl.load(d2t_ptr + v, mask=v < vocab, other=0).to(tl.int32)
        position = tl.load(position_ptr + request * position_stride) + 1 + depth
        seed = tl.load(seed_ptr + request * seed_stride)
        noise = _exponential(_uniform(seed, position, tl.full([], stream, tl.int32), entry))
        score = tl.where(weight > 0, weight / noise, -1.0)
        tl.store(score_ptr + place, tl.max(score, 0))
        tl.store(drawn_ptr + place, chunk * CHUNK + tl.argmax(score, 0).to(tl.int32))


@triton.jit
def _draft_finish_kernel(
    logits_ptr, logits_row, temperature_ptr, temperature_stride, d2t_ptr, depth, slot_ptr,
    memory_ptr, memory_best_ptr, memory_sum_ptr, log_q_ptr, num_memories, best_ptr, total_ptr,
    score_ptr, index_ptr, drawn_ptr, chunks, token_ptr, TABLE: tl.constexpr,
    REMEMBERS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One request: its draft, and what it was drawn from."""
    after_previous(PDL)
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    divisor = _divisor(temperature)
    base, total = _row_total(best_ptr, total_ptr, request, chunks, divisor, CHUNKS)
    token, _ = _row_choice(best_ptr, index_ptr, request, chunks, CHUNKS)
    if temperature > 0:
        c = tl.arange(0, CHUNKS)
        inside = c < chunks
        best = tl.load(best_ptr + request * chunks + c, mask=inside, other=float("-inf"))
        score = tl.load(score_ptr + request * chunks + c, mask=inside, other=-1.0)
        score = score * tl.exp((best - base) / divisor)  # each chunk's are relative to its best
        drawn = tl.load(drawn_ptr + request * chunks + c, mask=inside, other=0)
        token = tl.sum(tl.where(c == tl.argmax(score, 0), drawn, 0), 0)
    if REMEMBERS:
        place = tl.load(slot_ptr + request) * num_memories + depth
        log_sum = tl.log(total)
        x = _clean(tl.load(logits_ptr + request * logits_row + token))
        tl.store(memory_best_ptr + place, base)
        tl.store(memory_sum_ptr + place, log_sum)
        tl.store(log_q_ptr + place, (x - base) / divisor - log_sum)
    if TABLE:
        token += tl.load(d2t_ptr + token).to(tl.int32)
    tl.store(token_ptr + request, token)
