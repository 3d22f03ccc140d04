"""Suffix lookup equals a search in lists: own text, the ring of earlier texts, the vote."""

from __future__ import annotations

import itertools
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from suffix_search import Found, Pool, search_text, votes_in_lists

from trtspec.ops.tokens import ring as ring_ops
from trtspec.ops.tokens.ring import (
    OWNER_WORDS,
    PAGE,
    SIZES,
    Ring,
    add_to_ring,
    matches_in_ring,
    ring_pages,
)
from trtspec.ops.tokens.suffix import Matches, Search, matches_in_text, suffixes, vote

SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=24)
OWNERS = {"a": 7, "b": -7}


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    history = torch.full((len(rows), max(map(len, rows)) + 2), 1, dtype=torch.int32)
    for i, row in enumerate(rows):  # junk past the length
        history[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return history, torch.tensor([len(row) for row in rows])


def as_lists(matches: Matches) -> list[list[Found]]:
    return [
        [
            Found(n, [t for t in tokens if t >= 0])
            for n, tokens in zip(lens, rows, strict=True)
            if n > 0
        ]
        for lens, rows in zip(matches.lens.tolist(), matches.tokens.tolist(), strict=True)
    ]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(SMALL, min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5),
    st.integers(1, 5), st.integers(1, 8),
)  # fmt: skip
def test_matches_in_text_equal_a_search_in_lists(
    rows: list[list[int]], k: int, a: int, b: int, count: int
) -> None:
    search = Search(max(a, b), min(a, b), count, k)
    assert as_lists(matches_in_text(*padded(rows), search)) == [
        search_text(row, search) for row in rows
    ]


def empty_ring(size: int) -> Ring:
    return Ring(
        tokens=torch.zeros(size, dtype=torch.int32),
        owners=torch.zeros(size // PAGE, OWNER_WORDS, dtype=torch.int64),
        newest=torch.zeros(len(SIZES), 2**18 + 1, dtype=torch.int32),
        before=torch.zeros(len(SIZES), size, dtype=torch.int32),
        end=torch.zeros(1, dtype=torch.int64),
    )


def exact_hashes(grams: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """No two n-grams of tokens 0 … 2 share a hash."""
    digits = (grams + 1) * 4 ** torch.arange(grams.shape[-1])
    return digits.sum(-1) * 2 + (owner[..., 0] > 0)


def owner_words(name: str) -> torch.Tensor:
    return torch.tensor([OWNERS[name], 1])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_matches_in_the_ring_equal_a_search_in_lists(data: st.DataObject) -> None:
    """Texts of two owners overwrite each other many times; no owner sees the other's."""
    with patch.object(ring_ops, "_hashes", exact_hashes):
        compare_rings(data)


def compare_rings(data: st.DataObject) -> None:
    size = PAGE * data.draw(st.integers(2, 6))
    ring, pool, start = empty_ring(size), Pool(size), 0
    search = Search(16, data.draw(st.integers(1, 5)), 3, 4)
    for _ in range(data.draw(st.integers(1, 8))):
        rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        length = data.draw(st.integers(SIZES[0] + 1, size - 1))
        text = torch.randint(0, 3, (length,), generator=rng)
        if data.draw(st.booleans()):  # a text with long repeats
            text = text[: SIZES[-1] + 1].repeat(size)[:length]
        owner = data.draw(st.sampled_from(sorted(OWNERS)))
        add_to_ring(ring, text, owner_words(owner), start)
        pool.add(text.tolist(), owner)
        start = (start + ring_pages(length) * PAGE) % size
        asked = [text[: int(data.draw(st.integers(1, length)))].tolist(), [1, 2, 0, 1]]
        history, lens = padded(asked)
        for name in OWNERS:
            owners = owner_words(name).expand(len(asked), -1)
            last = suffixes(history, lens, search.longest)
            got = as_lists(matches_in_ring(ring, last, owners, search))
            assert got == [pool.search(row, name, search) for row in asked]


def test_a_text_being_written_is_nobodys() -> None:
    """An interrupt before the last line leaves pages that no request finds."""
    ring = empty_ring(4 * PAGE)
    text = torch.arange(40) % 5
    add_to_ring(ring, text, owner_words("a"), 0)
    search = Search(16, 3, 3, 4)
    last = suffixes(text[None, :20].to(torch.int32), torch.tensor([20]), 16)
    owners = owner_words("a")[None]
    assert matches_in_ring(ring, last, owners, search).lens.max() == 16
    ring.owners[:2] = 0  # as while it is written
    assert matches_in_ring(ring, last, owners, search).lens.max() == 0


FOUND = st.lists(
    st.builds(Found, st.integers(1, 4), st.lists(st.integers(0, 1), min_size=0, max_size=4)),
    max_size=6,
).map(lambda found: sorted(found, key=lambda f: -f.length))


def to_matches(found: list[Found], count: int, k: int) -> Matches:
    lens = [f.length for f in found] + [0] * (count - len(found))
    rows = [f.tokens + [-1] * (k - len(f.tokens)) for f in found] + [[-1] * k] * count
    return Matches(torch.tensor([lens]), torch.tensor([rows[:count]], dtype=torch.int32))


@pytest.mark.slow
@example([Found(1, [0] * 3)], [Found(1, [0]), *[Found(1, [0] * 4)] * 2], 0, 0.0)  # 3 or 1 + 3 * 2/3
@settings(max_examples=500, deadline=None)
@given(FOUND, FOUND, st.sampled_from([0, 1, 2]), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_vote_equals_one_in_fractions(
    own: list[Found], others: list[Found], decay: int, least: float
) -> None:
    sources = to_matches(own, 6, 4), to_matches(others, 7, 4)
    (got,) = vote(sources, float(decay), least).tokens.tolist()
    assert got in votes_in_lists([own, others], 4, Fraction(decay), Fraction(least))


@pytest.mark.parametrize(
    ("texts", "drafts"),
    [
        ([(4, [5, 6]), (4, [5, 7]), (4, [5, 7])], [5, 7]),  # two against one
        ([(4, [5, 6]), (4, [5, 7])], [5, 6]),  # at a tie the first given, which is the later one
        ([(9, [1, 2]), (2, [3, 4]), (2, [3, 4])], [1, 2]),  # the longer match is alone and right
        ([(2, [1, 2]), (2, [3, 4]), (2, [5, 6]), (2, [7, 8])], [-1, -1]),  # none is worth it
        ([], [-1, -1]),
    ],
)
def test_what_a_vote_prefers(texts: list[tuple[int, list[int]]], drafts: list[int]) -> None:
    found = [Found(*text) for text in texts]
    assert vote((to_matches(found, 4, 2),), decay=0.5, least=0.3).tokens.tolist() == [drafts]


def test_texts_of_other_owners_and_hashes_that_collide_are_not_found() -> None:
    """All n-grams in two buckets: what is found is right all the same."""
    ring = empty_ring(8 * PAGE)._replace(newest=torch.zeros(len(SIZES), 3, dtype=torch.int32))
    texts = [(torch.arange(60) * i % 7, "ab"[i % 2]) for i in range(1, 7)]
    for i, (text, owner) in enumerate(texts):
        add_to_ring(ring, text, owner_words(owner), i * 2 * PAGE % (8 * PAGE))
    found = 0
    for text, owner in itertools.product([text for text, _ in texts], OWNERS):
        history, lens = padded([text[:30].tolist()])
        last = suffixes(history, lens, 16)
        matches = matches_in_ring(ring, last, owner_words(owner)[None], Search(16, 2, 8, 4))
        own = [other.tolist() for other, name in texts if name == owner]
        for n, tokens in as_lists(matches)[0]:
            seen = [*text[30 - n : 30].tolist(), *tokens]
            assert any(seen == other[i : i + len(seen)] for other in own for i in range(len(other)))
            found += 1
    assert found > 0
