"""The parameter sets that `make test` runs in place of whole products."""

from __future__ import annotations

import itertools

import pytest
from matrix import covering, pairwise, spread, thinned

AXES = {"mode": list("abcdefgh"), "chunk": [None, 24], "overlap": [False, True], "k": [1, 2, 4]}


def test_every_pair_of_values_occurs_in_few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTSPEC_FULL_TESTS", raising=False)
    sets = pairwise(**AXES)
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(row[i], row[j]) for row in sets} == set(itertools.product(first, second))
    assert len(sets) == len(set(sets)) <= 26 and sets == pairwise(**AXES)
    assert len(pairwise(mode=AXES["mode"])) == 8


def test_full_gives_whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_FULL_TESTS", "1")
    assert pairwise(**AXES) == list(itertools.product(*AXES.values()))
    assert spread(**AXES).args[1] == pairwise(**AXES)
    assert thinned([1, 2, 3], 2) == [1, 2, 3]


def test_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTSPEC_FULL_TESTS", raising=False)
    mark = spread(**{"a,b": [(1, 2), (3, 4), (5, 6)], "c": [True, False]})
    assert mark.args == ("a,b,c", [(1, 2, True), (3, 4, False), (5, 6, True)])
    assert covering(a=[1, 2]).args == ("a", [1, 2])
    assert thinned([1, 2, 3], 2) == [1, 3]
