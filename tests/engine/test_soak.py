"""A short soak on CPU; `tests/gpu/test_gpu_soak.py` has the long one."""

from __future__ import annotations

import pytest
from matrix import full
from soak import (
    MODES,
    Models,
    References,
    Tally,
    all_setups,
    build_models,
    build_references,
    report,
    share,
    soak,
)

REQUESTS = 140 if full() else 72


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    return build_models(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def references(models: dict[str, Models]) -> dict[str, References]:
    return {name: build_references(m.target, "cpu", 5, 4) for name, m in models.items()}


def test_the_setups_cover_what_they_claim() -> None:
    setups = all_setups()
    assert {s.mode for s in setups} == set(MODES) and {s.k for s in setups} == set(range(6))
    for mode in MODES:
        ours = [s for s in setups if s.mode == mode]
        assert {(s.overlap, s.chunked) for s in ours} == {
            (a, b) for a in (False, True) for b in (False, True)
        }
        assert {s.k for s in ours} == ({0} if mode == "none" else {1, 2, 3, 4, 5})
        assert len({str(s.graphs) for s in ours}) == 4 and len({s.pool for s in ours}) == 3


@pytest.mark.slow
def test_mixed_requests_are_all_answered_and_nothing_is_left(
    models: dict[str, Models], references: dict[str, References]
) -> None:
    setups = all_setups()[::3]
    assert {s.mode for s in setups} == set(MODES)
    total = Tally()
    for i, (setup, count) in enumerate(zip(setups, share(REQUESTS, len(setups)), strict=True)):
        tally = soak(setup, models, references, count, "cpu", seed=i)
        assert tally.requests >= count
        total.add(tally)
    report(str(total))
    assert total.requests >= REQUESTS
    assert all(total.reasons[reason] > 5 for reason in ("length", "stop", "cancelled"))
    assert all(total.kinds[kind] > 5 for kind in ("greedy", "seeded", "unseeded"))
    assert total.preemptions > 0 and total.accepted_drafts > 100
