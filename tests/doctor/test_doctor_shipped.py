"""The doctor and the heads in the package: good ones are left in peace, mistakes are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matrix import full, thinned

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from doctor_sabotage import SABOTAGES, Clinic, Sabotage, is_named, is_silent

pytestmark = pytest.mark.model
TRIED = (
    "halves of eh_proj swapped", "layer ids in reverse order", "norm_output true", "d2t holds ids",
)  # fmt: skip


@pytest.fixture(scope="module")
def clinic() -> Clinic:
    return Clinic(num_prompts=6, max_tokens=40, longest=float("inf") if full() else 120)


@pytest.mark.slow
@pytest.mark.parametrize("head", thinned(["eagle3", "mtp"], 2))
def test_a_good_head_is_left_in_peace(clinic: Clinic, head: str) -> None:
    diagnosis = clinic.examine(head)
    assert is_silent(diagnosis), diagnosis.verdict
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.conditional[0] > 0.5


@pytest.mark.skipif(not full(), reason="test_doctor.py names them of a tiny head: make test-all")
@pytest.mark.parametrize(
    "sabotage",
    [s for s in SABOTAGES if s.name in TRIED and s.head != "dspark"],
    ids=lambda s: s.name,
)
def test_a_mistake_is_named(clinic: Clinic, sabotage: Sabotage) -> None:
    diagnosis = clinic.examine(sabotage.head, sabotage)
    assert is_named(diagnosis, sabotage), diagnosis.verdict
