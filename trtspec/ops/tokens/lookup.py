"""Suffix lookup as one op: a text's own matches, those in earlier texts, and a vote on both."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch.dispatch import twin
from .ring import Ring, matches_in_ring
from .suffix import Continuation, Search, matches_in_text, suffixes, vote


class Lookup(NamedTuple):
    """What is looked for, and how it is judged."""

    longest: int  # tokens of a match that are counted
    shortest: int  # tokens of a match that may draft
    num_in_text: int  # matches in the text itself that are compared
    num_in_ring: int  # matches of each n-gram size in the ring that are
    max_draft_len: int  # K
    decay: float  # as of `vote`
    least: float


class Earlier(NamedTuple):
    """Texts of requests that have ended, and whose of them each of B texts may be drafted from."""

    ring: Ring
    owners: Tensor  # [B, OWNER_WORDS] int64


@twin("tokens.triton_lookup")
def look_up(history: Tensor, lens: Tensor, earlier: Earlier | None, lookup: Lookup) -> Continuation:
    """Finds what may follow each text.

    Args:
        history: [B, L] int32. lens: [B] int64, of the texts, at most L < 2^24.
        earlier: None: there are none.
    """
    search = Search(lookup.longest, lookup.shortest, lookup.num_in_text, lookup.max_draft_len)
    sources = [matches_in_text(history, lens, search)]
    if earlier is not None:
        last = suffixes(history, lens, lookup.longest)
        search = search._replace(num_matches=lookup.num_in_ring)
        sources.append(matches_in_ring(earlier.ring, last, earlier.owners, search))
    return vote(tuple(sources), lookup.decay, lookup.least)
