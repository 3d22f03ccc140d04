"""Texts, and what followed their earlier ends. Twins: `history.py`, `ngram.py`, `lookup.py`.

One kernel compares a text's end with all its positions, and keeps the best of each block. Another
one copies what followed the best of all, or votes on what followed the best few.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .history import BEGUN_WORDS
from .lookup import Earlier, Lookup
from .ring import HASH_FACTOR, HASH_MASK, HASH_SHIFT, OWNER_WORDS, PAGE, SIZES
from .suffix import Continuation

BLOCK = 512  # positions
MOST_BLOCKS = 256  # of a text: longer texts have larger ones
assert OWNER_WORDS == 2 and all(b == 2 * a for a, b in pairwise(SIZES)), "the kernels count on it"
NUM_SIZES, FIRST_SIZE, LAST_SIZE = (tl.constexpr(n) for n in (len(SIZES), SIZES[0], SIZES[-1]))
LANES = tl.constexpr(triton.next_power_of_2(len(SIZES)))
FACTOR, SHIFT, MASK = (tl.constexpr(n) for n in (HASH_FACTOR, HASH_SHIFT, HASH_MASK))
PAGE_SIZE = tl.constexpr(PAGE)


def begin_texts(
    history: Tensor,
    history_lens: Tensor,
    owners: Tensor | None,
    words: Tensor,
    begun: Sequence[tuple[int, int]],
) -> None:
    """As its twin, in one kernel."""
    longest = max(count for _, count in begun)
    _begin_kernel[(len(begun), max(1, triton.cdiv(longest, BLOCK)))](
        history,
        history_lens,
        owners,
        words,
        words.view(torch.int32),
        history.shape[1],
        WORDS=BEGUN_WORDS,
        BLOCK=BLOCK,
    )


def append_tokens(
    history: Tensor, history_lens: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor
) -> Tensor:
    """As its twin."""
    rows, most = tokens.shape
    tokens = tokens.contiguous()
    lens = torch.empty(rows, dtype=torch.int64, device=history.device)
    _append_kernel[(rows,)](
        history,
        history_lens,
        slots,
        tokens,
        counts,
        lens,
        history.shape[0] - 1,
        history.shape[1],
        most,
        MOST=triton.next_power_of_2(most),
        **dependent_launch(history),
    )
    return lens


def propose_ngrams(
    history: Tensor,
    lens: Tensor,
    max_draft_len: int,
    max_ngram: int,
    min_ngram: int,
    prefer_oldest: bool,
) -> Tensor:
    """As its twin. L * max_ngram is below 2^31."""
    scores = _scores(history, lens, max_ngram, min_ngram, 1, prefer_oldest)
    drafts = torch.empty(
        (history.shape[0], max_draft_len), dtype=torch.int32, device=history.device
    )
    _copy_kernel[(history.shape[0],)](
        history,
        lens,
        scores,
        drafts,
        history.stride(0),
        history.shape[1],
        scores.shape[1],
        max_draft_len,
        OLDEST=prefer_oldest,
        SCORES=triton.next_power_of_2(scores.shape[1]),
        DRAFTS=triton.next_power_of_2(max_draft_len),
        **dependent_launch(history),
    )
    return drafts


def look_up(history: Tensor, lens: Tensor, earlier: Earlier | None, lookup: Lookup) -> Continuation:
    """As its twin. L * lookup.longest is below 2^31."""
    rows, size = history.shape
    device, num_drafts = history.device, lookup.max_draft_len
    ring_size = buckets = 0
    if earlier is not None:
        ring_size, buckets = earlier.ring.tokens.shape[0], earlier.ring.newest.shape[1] - 1
        earlier = earlier._replace(owners=earlier.owners.contiguous())
    in_text, in_ring = (triton.next_power_of_2(n) for n in (lookup.num_in_text, lookup.num_in_ring))
    scores = _scores(history, lens, lookup.longest, lookup.shortest, in_text, False)
    found = Continuation(
        tokens=torch.empty((rows, num_drafts), dtype=torch.int32, device=device),
        match_lens=torch.empty(rows, dtype=torch.int64, device=device),
        worth=torch.empty(rows, dtype=torch.float32, device=device),
    )
    _vote_kernel[(rows,)](
        history,
        lens,
        scores,
        earlier,
        lookup,
        found,
        history.stride(0),
        size,
        scores.shape[1],
        ring_size,
        buckets,
        SCORES=triton.next_power_of_2(scores.shape[1]),
        IN_TEXT=in_text,
        IN_RING=in_ring,
        LONGEST=triton.next_power_of_2(lookup.longest),
        DRAFTS=triton.next_power_of_2(num_drafts),
        **dependent_launch(history),
    )
    return found


def _scores(
    history: Tensor, lens: Tensor, longest: int, shortest: int, count: int, prefer_oldest: bool
) -> Tensor:
    """Returns the best `count` ends of each block of positions, [B, blocks * count] int32.

    An end is n * L + its place in the order of preference, where n tokens agree; -1 is none.
    """
    rows, size = history.shape
    assert history.stride(1) == 1
    block = max(BLOCK, triton.next_power_of_2(triton.cdiv(size, MOST_BLOCKS)))
    blocks = triton.cdiv(size, block)
    scores = torch.empty((rows, blocks * count), dtype=torch.int32, device=history.device)
    _ends_kernel[(blocks, rows)](
        history,
        lens,
        scores,
        history.stride(0),
        size,
        longest,
        shortest,
        OLDEST=prefer_oldest,
        COUNT=count,
        BLOCK=block,
        **dependent_launch(history),
    )
    return scores


@triton.jit
def _begin_kernel(
    history_ptr,
    history_lens_ptr,
    owners_ptr,
    words_ptr,
    tokens_ptr,
    size,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one text's tokens. The first block writes the length and the owner, too."""
    head = words_ptr + tl.program_id(0) * WORDS
    slot, first, count = tl.load(head), tl.load(head + 1), tl.load(head + 2)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(tokens_ptr + first + i, mask=i < count, other=0)
    tl.store(history_ptr + slot * size + i, tokens, mask=i < count)
    if tl.program_id(1) == 0:
        tl.store(history_lens_ptr + slot, count)
        if owners_ptr is not None:
            tl.store(owners_ptr + slot * 2, tl.load(head + 3))
            tl.store(owners_ptr + slot * 2 + 1, tl.load(head + 4))


@triton.jit
def _append_kernel(
    history_ptr,
    history_lens_ptr,
    slots_ptr,
    tokens_ptr,
    counts_ptr,
    lens_ptr,
    scratch_slot,
    size,
    most,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tokens of one request."""
    after_previous(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    slot = tl.load(slots_ptr + row)
    is_scratch = slot == scratch_slot  # of which several rows may write the length, all of them 0
    count = tl.where(is_scratch, 0, tl.load(counts_ptr + row))
    length = tl.where(is_scratch, 0, tl.load(history_lens_ptr + slot))
    inside = (i < count) & (i < most) & (length + i < size - 1)
    tokens = tl.load(tokens_ptr + row * most + i, mask=inside, other=0)
    tl.store(history_ptr + slot * size + length + i, tokens, mask=inside)
    length = tl.minimum(length + count, size - 1)
    tl.store(history_lens_ptr + slot, length)
    tl.store(lens_ptr + row, length)


@triton.jit
def _ends_kernel(
    history_ptr,
    lens_ptr,
    scores_ptr,
    stride,
    size,
    longest,
    shortest,
    OLDEST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best ends in a block of positions. It stops where no position agrees any more."""
    after_previous(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    text = history_ptr + row * stride
    length = tl.load(lens_ptr + row).to(tl.int32)
    position = block * BLOCK + tl.arange(0, BLOCK)
    agrees = (position < length - 1) & (position < size)
    found = tl.zeros((BLOCK,), tl.int32)
    j, most, is_any = 0, tl.minimum(longest, length), tl.max(agrees.to(tl.int32), 0)
    while is_any * (most - j) > 0:
        token = tl.load(text + length - 1 - j)
        agrees = agrees & (position >= j)
        earlier = tl.load(text + position - j, mask=agrees, other=-1)
        agrees = agrees & (earlier == token)
        found += agrees.to(tl.int32)
        j += 1
        is_any = tl.max(agrees.to(tl.int32), 0)
    order = position
    if OLDEST:
        order = size - 1 - position
    score = tl.where(found >= shortest, found * size + order, -1)
    best = _take_best(score, COUNT)
    at = (row * tl.num_programs(0) + block) * COUNT + tl.arange(0, COUNT)
    tl.store(scores_ptr + at, best)


@triton.jit
def _take_best(scores, COUNT: tl.constexpr):
    """Returns the largest of different scores in their order, -1 where there are fewer."""
    place = tl.arange(0, COUNT)
    kept = tl.full((COUNT,), -1, tl.int32)
    i, best = 0, tl.max(scores, 0)
    is_there = (best >= 0).to(tl.int32)
    while is_there * (COUNT - i) > 0:
        kept = tl.where(place == i, best, kept)
        scores = tl.where(scores == best, -1, scores)
        i += 1
        best = tl.max(scores, 0)
        is_there = (best >= 0).to(tl.int32)
    return kept


@triton.jit
def _following(text, ends, length, size, k):
    """Returns where the tokens after `ends` are, copied on into themselves: text + positions."""
    period = tl.maximum(length - 1 - ends, 1)
    return text + tl.minimum(ends + 1 + k % period, size - 1)


@triton.jit
def _copy_kernel(
    history_ptr,
    lens_ptr,
    scores_ptr,
    drafts_ptr,
    stride,
    size,
    num_scores,
    num_drafts,
    OLDEST: tl.constexpr,
    SCORES: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What followed the best end of one text."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i, k = tl.arange(0, SCORES), tl.arange(0, DRAFTS)
    scores = tl.load(scores_ptr + row * num_scores + i, mask=i < num_scores, other=-1)
    best, text = tl.max(scores, 0), history_ptr + row * stride
    end = tl.maximum(best, 0) % size
    if OLDEST:
        end = size - 1 - end
    length = tl.load(lens_ptr + row).to(tl.int32)
    tokens = tl.load(_following(text, end, length, size, k))
    tokens = tl.where(best >= 0, tokens, -1)
    tl.store(drafts_ptr + row * num_drafts + k, tokens, mask=k < num_drafts)


@triton.jit
def _vote_kernel(
    history_ptr,
    lens_ptr,
    scores_ptr,
    earlier,  # None: there are no earlier texts
    lookup,
    found,
    stride,
    size,
    num_scores,
    ring_size,
    buckets,
    SCORES: tl.constexpr,
    IN_TEXT: tl.constexpr,
    IN_RING: tl.constexpr,
    LONGEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The continuation of one text."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    text = history_ptr + row * stride
    length = tl.load(lens_ptr + row).to(tl.int32)
    i, c, k = tl.arange(0, SCORES), tl.arange(0, IN_TEXT), tl.arange(0, DRAFTS)
    num_drafts = lookup.max_draft_len
    is_draft = k < num_drafts

    scores = tl.load(scores_ptr + row * num_scores + i, mask=i < num_scores, other=-1)
    best = _take_best(scores, IN_TEXT)
    is_match = (best >= 0) & (c < lookup.num_in_text)
    ends = tl.maximum(best, 0) % size
    lens = tl.where(is_match, best // size, 0)
    inside = is_match[:, None] & is_draft[None, :]
    places = _following(text, ends[:, None], length, size, k[None, :])
    tokens = tl.load(places, mask=inside, other=-1)
    worth, drafts, match_len = _best_of(lens, tokens, lookup, IN_TEXT, DRAFTS)
    if earlier is not None:
        ring, owner = earlier.ring, earlier.owners + row * 2
        owner_0, owner_1 = tl.load(owner), tl.load(owner + 1)
        ends = _ends_in_ring(ring, text, length, owner_0, ring_size, buckets, lookup, IN_RING)
        lens = _lens_in_ring(
            ring, ends, text, length, (owner_0, owner_1), ring_size, lookup, IN_RING, LONGEST
        )
        at = (tl.maximum(ends, 0)[:, None] + 1 + k[None, :]) % ring_size
        inside = (lens > 0)[:, None] & is_draft[None, :]
        tokens = tl.load(ring.tokens + at, mask=inside, other=0) - 1
        first_end = tl.min(tl.where(tokens < 0, k[None, :], DRAFTS), 1)
        # Where nothing follows an older text was longer, of which links remain.
        lens = tl.where(first_end == 0, 0, lens)
        tokens = tl.where(k[None, :] < first_end[:, None], tokens, -1)
        of_ring, of_ring_drafts, of_ring_len = _best_of(
            lens, tokens, lookup, LANES * IN_RING, DRAFTS
        )
        if of_ring > worth:
            worth, drafts, match_len = of_ring, of_ring_drafts, of_ring_len
    tl.store(found.tokens + row * num_drafts + k, drafts, mask=is_draft)
    tl.store(found.match_lens + row, match_len.to(tl.int64))
    tl.store(found.worth + row, worth)


@triton.jit
def _best_of(lens, tokens, lookup, COUNT: tl.constexpr, DRAFTS: tl.constexpr):
    """Returns what the best match [COUNT] is worth, its drafts [DRAFTS] and its length: `vote`."""
    c, k = tl.arange(0, COUNT), tl.arange(0, DRAFTS)
    votes = tl.zeros((COUNT, DRAFTS), tl.float32)
    voters = tl.zeros((COUNT,), tl.float32)
    for j in range(COUNT):
        length = tl.sum(tl.where(c == j, lens, 0), 0)
        if length > 0:
            other = tl.sum(tl.where((c == j)[:, None], tokens, 0), 0)
            differs = tokens != other[None, :]
            agreed = tl.min(tl.where(differs, k[None, :], DRAFTS), 1)
            counts = length >= lens
            votes += (counts[:, None] & (k[None, :] < agreed[:, None])).to(tl.float32)
            voters += counts.to(tl.float32)
    is_draft = (tokens >= 0) & (k < lookup.max_draft_len)[None, :]
    known = tl.min(tl.where(is_draft, DRAFTS, k[None, :]), 1)  # before the first that is none
    length = tl.maximum(lens, 1).to(tl.float32)
    depth = (k + 1).to(tl.float32)
    chances = votes / tl.maximum(voters, 1.0)[:, None]
    chances *= length[:, None] / (length[:, None] + lookup.decay * depth[None, :])
    is_taken = (k[None, :] < known[:, None]) & (lens > 0)[:, None] & (chances >= lookup.least)
    chances = tl.where(is_taken, chances, 0.0)
    worths = tl.sum(chances, 1)
    worth, best = tl.max(worths, 0), tl.argmax(worths, 0)
    is_best = (c == best)[:, None]
    chosen = tl.sum(tl.where(is_best & (chances > 0), tokens + 1, 0), 0) - 1
    match_len = tl.where(worth > 0, tl.sum(tl.where(c == best, lens, 0), 0), 0)
    return worth, chosen, match_len


@triton.jit
def size_of(number):
    """Returns the tokens of n-grams of the size of this number."""
    return (number * 0 + FIRST_SIZE) << number


@triton.jit
def hashed_with(hashed, token):
    """Returns the hash of n-grams with one more token, int64: `_hashes` in `ring.py`."""
    mixed = (hashed ^ token) * FACTOR
    return mixed ^ (mixed >> SHIFT)


@triton.jit
def bucket_of(hashed, buckets):
    return (hashed & MASK) % buckets


@triton.jit
def _ends_in_ring(ring, text, length, owner, ring_size, buckets, lookup, IN_RING: tl.constexpr):
    """Returns positions with the hash of the text's last n-grams, by size, then by age; -1: none.

    A lane has the n-grams of one size.
    """
    lane, place = tl.arange(0, LANES), tl.arange(0, IN_RING)
    size, is_lane = size_of(lane), lane < NUM_SIZES
    hashed = owner + tl.zeros((LANES,), tl.int64)
    for i in tl.static_range(LAST_SIZE):
        back = size - 1 - i  # tokens before the last
        is_token = is_lane & (back >= 0)
        at = length - 1 - back
        token = tl.load(text + at, mask=is_token & (at >= 0), other=-1).to(tl.int64)
        hashed = tl.where(is_token, hashed_with(hashed, token), hashed)
    bucket = bucket_of(hashed, buckets)
    first = ring.newest + lane.to(tl.int64) * (buckets + 1) + bucket
    links = tl.load(first, mask=is_lane, other=0).to(tl.int64)
    end, age = tl.load(ring.end), tl.full((LANES,), -1, tl.int64)
    ends = tl.full((LANES, IN_RING), -1, tl.int64)
    for i in range(lookup.num_in_ring):
        older = (end - links + ring_size) % ring_size  # the last token of the last text has 0
        links = tl.where((links > 0) & (older > age), links, 0)
        age = older
        ends = tl.where((place == i)[None, :], (links - 1)[:, None], ends)
        before = ring.before + lane.to(tl.int64) * ring_size + tl.maximum(links - 1, 0)
        links = tl.load(before, mask=links > 0, other=0).to(tl.int64)
    return tl.reshape(ends, (LANES * IN_RING,))


@triton.jit
def _lens_in_ring(
    ring, ends, text, length, owner, ring_size, lookup, IN_RING: tl.constexpr, LONGEST: tl.constexpr
):
    """Returns how many of the text's last tokens agree with those at `ends`.

    It is 0 where that is no match of this size of n-grams, or another owner's text.
    """
    back, lane = tl.arange(0, LONGEST), tl.arange(0, LANES * IN_RING) // IN_RING
    is_known, ends = ends >= 0, tl.maximum(ends, 0)
    at = (ends[:, None] - back[None, :] + ring_size) % ring_size
    stored = tl.load(ring.tokens + at, mask=is_known[:, None], other=0) - 1
    is_token = (back < lookup.longest) & (back < length)
    last = tl.load(text + length - 1 - back, mask=is_token, other=-1)
    agrees = (stored == last[None, :]) & (stored >= 0) & is_token[None, :]
    lens = tl.min(tl.where(agrees, LONGEST, back[None, :]), 1)
    page = ring.owners + ends // PAGE_SIZE * 2
    is_own = tl.load(page) == owner[0]
    is_own &= tl.load(page + 1) == owner[1]
    # A longer match is found by its own size of n-grams too.
    least = tl.maximum(size_of(lane), lookup.shortest)
    is_longer = (lane < NUM_SIZES - 1) & (lens >= 2 * size_of(lane))
    return tl.where(is_known & is_own & (lens >= least) & (is_longer == 0), lens, 0)
