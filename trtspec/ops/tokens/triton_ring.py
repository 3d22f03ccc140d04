"""Adding texts to the ring of earlier texts, in Triton. Twin: `ring.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .ring import HEADER_WORDS, PAGE, SIZES, Ring
from .triton_lookup import bucket_of, hashed_with, size_of

CHUNK = 64  # n-grams that are compared with each other
NUM_SIZES, PAGE_SIZE, HEADER = (tl.constexpr(n) for n in (len(SIZES), PAGE, HEADER_WORDS))


def add_texts(ring: Ring, words: Tensor, counts: Sequence[int], start: int) -> None:
    """As its twin, in one kernel."""
    _add_kernel[(len(SIZES) + 1,)](
        ring,
        words,
        len(counts),
        start,
        ring.tokens.shape[0],
        ring.newest.shape[1] - 1,
        CHUNK=CHUNK,
        LONGEST=SIZES[-1],
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_texts", "start"])
def _add_kernel(
    ring,
    words_ptr,
    num_texts,
    start,
    ring_size,
    buckets,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """The index of one size of n-grams; or the tokens and their owners. One text after another."""
    part = tl.program_id(0)
    for _ in range(num_texts):
        count = tl.load(words_ptr).to(tl.int32)
        text_ptr = words_ptr + HEADER
        taken = (count // PAGE_SIZE + 1) * PAGE_SIZE  # tokens of its pages
        if part == NUM_SIZES:
            _write_text(ring, words_ptr + 1, text_ptr, count, taken, start, ring_size, CHUNK)
        else:
            _write_index(
                ring, tl.load(words_ptr + 1), text_ptr, count, start, ring_size, buckets, part,
                CHUNK, LONGEST,
            )  # fmt: skip
        start = (start + taken) % ring_size
        words_ptr = text_ptr + count
    if part == NUM_SIZES:
        tl.store(ring.end, start.to(tl.int64))


@triton.jit
def _write_text(ring, owner_ptr, text_ptr, count, taken, start, ring_size, CHUNK: tl.constexpr):
    """The tokens, a 0 behind them and to the page's end, and the owner of the pages."""
    owner_0, owner_1 = tl.load(owner_ptr), tl.load(owner_ptr + 1)
    for first in range(0, taken, CHUNK):
        i = first + tl.arange(0, CHUNK)
        place = (start + i) % ring_size
        token = tl.load(text_ptr + i, mask=i < count, other=-1)
        tl.store(ring.tokens + place, (token + 1).to(tl.int32), mask=i < taken)
        is_page = (i < taken) & (i % PAGE_SIZE == 0)
        page = ring.owners + place // PAGE_SIZE * 2
        tl.store(page, owner_0, mask=is_page)
        tl.store(page + 1, owner_1, mask=is_page)
    tl.debug_barrier()  # the next text may overwrite this one


@triton.jit
def _write_index(
    ring, owner, text_ptr, count, start, ring_size, buckets, part, CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Links each n-gram's end with the one before it of the same hash, a chunk after the other."""
    size, i = size_of(part), tl.arange(0, CHUNK)
    newest_ptr = ring.newest + part.to(tl.int64) * (buckets + 1)
    before_ptr = ring.before + part.to(tl.int64) * ring_size
    # The last token has no token after it that a match could draft.
    for first in range(0, count - size, CHUNK):
        inside = first + i < count - size
        hashed = owner + tl.zeros((CHUNK,), tl.int64)
        for j in tl.static_range(LONGEST):
            is_token = inside & (j < size)
            token = tl.load(text_ptr + first + i + j, mask=is_token, other=0)
            hashed = tl.where(is_token, hashed_with(hashed, token), hashed)
        # What is no n-gram has a bucket of its own.
        bucket = tl.where(inside, bucket_of(hashed, buckets), -1 - i)
        place = (start + size - 1 + first + i) % ring_size
        is_same = bucket[:, None] == bucket[None, :]
        earlier = tl.max(tl.where(is_same & (i[None, :] < i[:, None]), i[None, :], -1), 1)
        is_newest = tl.max((is_same & (i[None, :] > i[:, None])).to(tl.int32), 1) == 0
        link = tl.load(newest_ptr + bucket, mask=inside, other=0)
        of_chunk = (start + size - 1 + first + earlier) % ring_size + 1
        link = tl.where(earlier >= 0, of_chunk, link)
        tl.store(before_ptr + place, link, mask=inside)
        tl.debug_barrier()  # all have read what the next line overwrites
        tl.store(newest_ptr + bucket, place + 1, mask=inside & is_newest)
        tl.debug_barrier()
