"""A ring of earlier texts with an index of their n-grams, all in device memory.

Texts lie one after another, each from a page's start to a page's end. The oldest are overwritten.
A page has the owner of its text: matches are found among texts of the same owner alone. Tokens are
stored plus 1; 0 ends a text, so that no match reaches over its ends.

For each size of n-grams the index has the newest position of a hash, and for each position the one
before it of the same hash. A position may have been overwritten since: what it leads to is compared
with the ring's tokens, and positions that do not grow older end a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.dispatch import twin
from .suffix import Matches, Search

PAGE = 32
"""Tokens of a page."""
SIZES = (2, 4, 8)
"""Tokens of the n-grams that are indexed, each twice the one before."""
BUCKETS_PER_TOKEN = 4
"""Of the index, so that few n-grams share one: what shares it hides the older positions."""
OWNER_WORDS = 2
"""int64 words that name an owner. All zero is no owner."""
HEADER_WORDS = 1 + OWNER_WORDS
"""int64 words before a text's tokens, where several texts are one tensor."""
HASH_FACTOR, HASH_SHIFT, HASH_MASK = 0x5851F42D4C957F2D, 29, 2**62 - 1


class Ring(NamedTuple):
    """R tokens, a multiple of PAGE. Positions in the index are stored plus 1; 0 is none."""

    tokens: Tensor  # [R] int32
    owners: Tensor  # [R / PAGE, OWNER_WORDS] int64
    newest: Tensor  # [len(SIZES), buckets + 1] int32, by hash; the last is scratch
    before: Tensor  # [len(SIZES), R] int32
    end: Tensor  # [1] int64, where the next text goes


def ring_pages(num_tokens: int) -> int:
    """Returns how many pages a text takes, with a 0 after it."""
    return num_tokens // PAGE + 1


@twin("tokens.triton_ring")
def add_texts(ring: Ring, words: Tensor, counts: Sequence[int], start: int) -> None:
    """Writes texts over the oldest ones, one after another: a later one may overwrite an earlier.

    Args:
        words: int64. Of each text: the number of its tokens, its owner's words, and the tokens.
        counts: these numbers on the host. Each text's pages fit into the ring.
        start: where the first goes, the end of the text before; a multiple of PAGE.
    """
    for count in counts:
        text = words[: HEADER_WORDS + count]
        add_to_ring(ring, text[HEADER_WORDS:], text[1:HEADER_WORDS], start)
        start = (start + ring_pages(count) * PAGE) % ring.tokens.shape[0]
        words = words[HEADER_WORDS + count :]


def add_to_ring(ring: Ring, text: Tensor, owner: Tensor, start: int) -> None:
    """Writes one text over the oldest ones, in torch.

    Its pages have no owner while they are written, so that a write that was interrupted is never
    found. (Triton's kernel writes all at once.)

    Args:
        text: [n] int64, token ids; its pages fit into the ring.
        owner: [OWNER_WORDS] int64.
        start: where it goes, the end of the text before; a multiple of PAGE.
    """
    size, pages = ring.tokens.shape[0], ring_pages(text.shape[0])
    device = text.device
    rows = (start // PAGE + torch.arange(pages, device=device)) % (size // PAGE)
    ring.owners[rows] = 0
    padded = torch.zeros(pages * PAGE, dtype=torch.int32, device=device)
    padded[: text.shape[0]] = text + 1
    positions = (start + torch.arange(pages * PAGE, device=device)) % size
    ring.tokens[positions] = padded
    for i, n in enumerate(SIZES):
        # The last token has no token after it that a match could draft.
        if text.shape[0] > n:
            hashes = _hashes(text[:-1].unfold(0, n, 1), owner)
            _add_to_index(ring, i, hashes, positions[n - 1 : text.shape[0] - 1])
    ring.end.fill_((start + pages * PAGE) % size)
    ring.owners[rows] = owner


def _add_to_index(ring: Ring, i: int, hashes: Tensor, positions: Tensor) -> None:
    newest, before = ring.newest[i], ring.before[i]
    scratch = newest.shape[0] - 1
    buckets, order = torch.sort(hashes % scratch, stable=True)
    positions = positions[order]
    is_same = buckets[1:] == buckets[:-1]  # as the entry before
    previous = newest[buckets].clone()
    previous[1:] = torch.where(is_same, (positions[:-1] + 1).to(torch.int32), previous[1:])
    before[positions] = previous
    buckets[:-1] = buckets[:-1].masked_fill(is_same, scratch)  # the newest of each hash stays
    newest[buckets] = (positions + 1).to(torch.int32)


def _hashes(grams: Tensor, owner: Tensor) -> Tensor:
    """Hashes n-grams [..., n] of an owner [..., OWNER_WORDS] -> [...] int64, >= 0."""
    hashed = owner[..., 0]
    for j in range(grams.shape[-1]):
        hashed = (hashed ^ grams[..., j]) * HASH_FACTOR
        hashed = hashed ^ (hashed >> HASH_SHIFT)
    return hashed & HASH_MASK


def matches_in_ring(ring: Ring, last: Tensor, owners: Tensor, search: Search) -> Matches:
    """Finds the newest matches of each n-gram size in texts of the same owner.

    Args:
        last: [B, search.longest] int32, `suffixes` of the texts.
        owners: [B, OWNER_WORDS] int64.
        search: `num_matches` is for each size of n-grams.
    """
    size, last = ring.tokens.shape[0], last.to(torch.int64)
    ends = torch.stack(_candidates(ring, last, owners, search), dim=-1)  # [B, sizes, count]
    is_known = ends >= 0
    ends = ends.clamp_min(0)
    back = torch.arange(search.longest, device=last.device)
    stored = ring.tokens[(ends[..., None] - back) % size] - 1  # [B, sizes, count, longest]
    agrees = (stored == last[:, None, None]) & (stored >= 0)
    lens = agrees.to(torch.uint8).cummin(-1).values.sum(-1, dtype=torch.int64)
    is_known &= (ring.owners[ends // PAGE] == owners[:, None, None]).all(-1)
    # A longer match is found by its own size of n-grams too.
    least, most = _bounds(search.shortest, last.device)
    lens = torch.where(is_known & (lens >= least) & (lens < most), lens, 0).flatten(1)
    step = torch.arange(1, search.max_draft_len + 1, device=last.device)
    tokens = ring.tokens[(ends.flatten(1)[..., None] + step) % size] - 1
    ended = (tokens < 0).to(torch.uint8).cummax(-1).values > 0
    lens = lens.masked_fill(ended[..., 0], 0)  # an older text was longer, of which links remain
    return Matches(lens, tokens.masked_fill(ended | (lens == 0)[..., None], -1))


def _candidates(ring: Ring, last: Tensor, owners: Tensor, search: Search) -> list[Tensor]:
    """Returns `count` times [B, sizes] positions with the hash of the last tokens, -1 for none."""
    size, device = ring.tokens.shape[0], last.device
    buckets = torch.stack([_hashes(last[:, :n].flip(1), owners) for n in SIZES], dim=1)
    row = torch.arange(len(SIZES), device=device)
    links = ring.newest[row, buckets % (ring.newest.shape[1] - 1)].to(torch.int64)
    age, found = torch.full_like(links, -1), []
    for _ in range(search.num_matches):
        older = (ring.end - links) % size  # the last token of the last text has 0
        links = torch.where((links > 0) & (older > age), links, 0)
        age = older
        found.append(links - 1)
        links = ring.before[row, (links - 1).clamp_min(0)].masked_fill(links == 0, 0)
        links = links.to(torch.int64)
    return found


def _bounds(shortest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns [sizes, 1]: the lengths of matches that each size of n-grams is asked for."""
    i = torch.arange(len(SIZES), device=device)[:, None]
    least = SIZES[0] << i
    most = (2 * least).masked_fill(i == len(SIZES) - 1, 2**30)
    return least.clamp_min(shortest), most
