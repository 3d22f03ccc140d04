"""Suffix lookup and its vote in Python lists."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from trtspec.ops.tokens.ring import PAGE, SIZES
from trtspec.ops.tokens.suffix import Search


class Found(NamedTuple):
    length: int
    tokens: list[int]  # that follow, at most K


def common_suffix(left: list[int], right: list[int], longest: int) -> int:
    n = 0
    while n < min(len(left), len(right), longest) and left[-1 - n] == right[-1 - n]:
        n += 1
    return n


def search_text(text: list[int], search: Search) -> list[Found]:
    """The `num_matches` longest matches, of equal length the latest first."""
    found = []
    for end in range(len(text) - 1):
        n = common_suffix(text[: end + 1], text, search.longest)
        if n >= search.shortest:
            following = list(text)
            for i in range(search.max_draft_len):
                following.append(following[end + 1 + i])
            found.append((n, end, following[len(text) :]))
    found.sort(reverse=True)
    return [Found(n, tokens) for n, _, tokens in found[: search.num_matches]]


class Pool:
    """Texts in the order they ended, cut where a ring of `size` tokens has overwritten them."""

    def __init__(self, size: int):
        self.size, self.end = size, 0
        self.cells: list[tuple[int, str] | None] = [None] * size

    def add(self, text: list[int], owner: str) -> None:
        for i in range((len(text) // PAGE + 1) * PAGE):
            cell = (text[i], owner) if i < len(text) else None
            self.cells[(self.end + i) % self.size] = cell
        self.end = (self.end + (len(text) // PAGE + 1) * PAGE) % self.size

    def newest_first(self) -> list[int]:
        return [(self.end - 1 - age) % self.size for age in range(self.size)]

    def before(self, position: int, owner: str, most: int) -> list[int]:
        """The tokens of the owner's text that end at a position, `most` at most."""
        tokens: list[int] = []
        for back in range(most):
            cell = self.cells[(position - back) % self.size]
            if cell is None or cell[1] != owner:
                break
            tokens.insert(0, cell[0])
        return tokens

    def after(self, position: int, most: int) -> list[int]:
        tokens: list[int] = []
        for step in range(1, most + 1):
            cell = self.cells[(position + step) % self.size]
            if cell is None:
                break
            tokens.append(cell[0])
        return tokens

    def search(self, text: list[int], owner: str, search: Search) -> list[Found]:
        """Of each size of n-grams the newest `num_matches`, shortest n-grams first."""
        found = []
        for i, size in enumerate(SIZES):
            last = i == len(SIZES) - 1
            places = [
                place
                for place in self.newest_first()
                if len(text) >= size
                and self.before(place, owner, size) == text[-size:]
                and self.after(place, 1)
            ]
            for place in places[: search.num_matches]:
                n = common_suffix(self.before(place, owner, search.longest), text, search.longest)
                if n >= search.shortest and (last or n < SIZES[i + 1]):
                    found.append(Found(n, self.after(place, search.max_draft_len)))
        return found


def vote_in_lists(
    sources: list[list[Found]], k: int, decay: Fraction, least: Fraction
) -> list[int]:
    return best_in_lists(sources, k, decay, least).tokens


def votes_in_lists(
    sources: list[list[Found]], k: int, decay: Fraction, least: Fraction
) -> list[list[int]]:
    """All drafts that no others beat; floats may take any of them."""
    voted = _voted(sources, decay, least)
    most = max((worth for worth, _ in voted), default=Fraction(0))
    best = [found for worth, found in voted if worth == most and worth > 0] or [Found(0, [])]
    return [found.tokens + [-1] * (k - len(found.tokens)) for found in best]


def best_in_lists(sources: list[list[Found]], k: int, decay: Fraction, least: Fraction) -> Found:
    """The drafts, -1 where there is none, and the length of the match that they follow."""
    worth, best = Fraction(0), Found(0, [])
    for other, found in _voted(sources, decay, least):
        if other > worth:
            worth, best = other, found
    return best._replace(tokens=best.tokens + [-1] * (k - len(best.tokens)))


def _voted(
    sources: list[list[Found]], decay: Fraction, least: Fraction
) -> list[tuple[Fraction, Found]]:
    """What each match's drafts are worth, and those of them that are worth a draft."""
    voted = []
    for matches in sources:
        for match in matches:
            peers = [other for other in matches if other.length >= match.length]
            chances = []
            for depth in range(1, len(match.tokens) + 1):
                agree = sum(p.tokens[:depth] == match.tokens[:depth] for p in peers)
                share = Fraction(agree, len(peers))
                chances.append(share * match.length / (match.length + decay * depth))
            taken = [c for c in chances if c >= least]
            found = Found(match.length, match.tokens[: len(taken)])
            voted.append((sum(taken, Fraction(0)), found))
    return voted
