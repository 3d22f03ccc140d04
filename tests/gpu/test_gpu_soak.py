"""A soak on CUDA: every mode, K from 0 to 5, graphs with padded batches, cancels, preemptions.

`TRTSPEC_SOAK_REQUESTS` says how many requests there are in all; 10000 is the long run. With
`TRTSPEC_SOAK_K=5` there is one engine a mode, for 5 drafts and at times fewer, instead of one for
each K: less time goes into capturing graphs. Figures go to stdout (pytest -s).
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
from soak import (
    MODES,
    Models,
    References,
    Tally,
    all_setups,
    allocated,
    build_models,
    build_references,
    report,
    share,
    soak,
)

from trtspec.executor.cuda_graphs.graphs import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = int(os.environ.get("TRTSPEC_SOAK_REQUESTS", "300"))
ONLY_K = int(os.environ.get("TRTSPEC_SOAK_K", "0"))
SETUPS = [setup for setup in all_setups() if ONLY_K == 0 or setup.k in (0, ONLY_K)]
COUNTS = dict(zip(SETUPS, share(REQUESTS, len(SETUPS)), strict=True))
MOST_GROWTH = 1 << 20
"""Bytes that may stay allocated after all of a mode's engines are gone; one of them is more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    return build_models(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def references(models: dict[str, Models]) -> dict[str, References]:
    return {name: build_references(m.target, "cuda", 60, 24) for name, m in models.items()}


def _engines() -> int:
    """How many engines with graphs are alive: none, unless a failed test's traceback holds one."""
    gc.collect()
    return sum(isinstance(o, CudaGraphs) for o in gc.get_objects())


@pytest.mark.parametrize("mode", MODES)
def test_a_soak_leaves_nothing_behind(
    models: dict[str, Models], references: dict[str, References], mode: str
) -> None:
    alive, total = _engines(), Tally()
    before = allocated("cuda", clear_workspaces=alive == 0)
    setups = [setup for setup in SETUPS if setup.mode == mode]
    for setup in setups:
        tally = soak(setup, models, references, COUNTS[setup], "cuda", seed=SETUPS.index(setup))
        assert tally.requests >= COUNTS[setup]
        report(f"{setup}: {tally}")
        total.add(tally)
    assert _engines() == alive, "an engine outlived its last user"
    grown = allocated("cuda", clear_workspaces=alive == 0) - before
    report(f"== {mode}: {total}; GPU memory left over: {grown} bytes")
    assert grown <= MOST_GROWTH or alive > 0
    assert total.graphs > 0
    if REQUESTS < 1000:
        return
    assert total.laps_compared > 0, "no engine's memory was compared"
    assert total.preemptions > 0
    assert all(total.reasons[reason] > 5 for reason in ("length", "stop", "cancelled"))
    if mode != "none":
        assert total.accepted_drafts > 20
