"""The table of acceptance rules, and what a worker may put in a rule's place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trtspec.workers as workers
from trtspec import MTPDecodingConfig, NGramDecodingConfig, SpecMetadata
from trtspec.acceptance.relaxed import Relaxed
from trtspec.acceptance.rule import Accepted, Candidates, Judged, Rule
from trtspec.acceptance.rules import RULES, rule_of
from trtspec.config import ACCEPTANCE_RULES
from trtspec.workers import NGramWorker


def test_every_name_that_a_config_takes_is_in_the_table() -> None:
    assert tuple(RULES) == ACCEPTANCE_RULES
    for name, rule in RULES.items():
        assert rule_of(NGramDecodingConfig(max_draft_len=1, acceptance=name)) is rule


def test_a_relaxed_rule_draws_as_the_one_it_relaxes() -> None:
    for name, rule in RULES.items():
        config = MTPDecodingConfig(
            use_relaxed_acceptance_for_thinking=True,
            relaxed_topk=2,
            relaxed_delta=0.5,
            acceptance=name,
        )
        relaxed = rule_of(config)
        assert isinstance(relaxed, Relaxed) and relaxed.drawn is rule.drawn
        assert rule_of(MTPDecodingConfig(acceptance=name)) is rule


class Recording(Rule):
    """Strict acceptance that writes down what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def judge(self, given: Candidates) -> Judged:
        self.calls.append("judge")
        return RULES["strict"].judge(given)

    def accept(self, given: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("accept")
        return RULES["strict"].accept(given, tokens)

    def by_kernel(self, given: Candidates, forced_len: int = 0) -> Accepted | None:
        self.calls.append(f"kernel {forced_len}")
        return None


def _step(worker: NGramWorker, rule: Recording) -> tuple[list[list[int]], list[str]]:
    worker.rule = rule
    logits = torch.zeros(3, 9)
    logits[[0, 1, 2], [4, 5, 6]] = 1.0
    spec = SpecMetadata(max_num_requests=1, max_draft_len=2, max_total_draft_tokens=2)
    tokens, _ = worker.sample_and_accept_draft_tokens(logits, torch.tensor([[4, 7]]), 0, 1, spec)
    return tokens.tolist(), rule.calls


def _worker(cls: type[NGramWorker]) -> NGramWorker:
    return cls(NGramDecodingConfig(max_draft_len=2))


def test_a_rule_is_asked_for_its_kernel_first() -> None:
    worker = _worker(NGramWorker)
    assert _step(worker, Recording()) == ([[4, 5, -1]], ["kernel 0", "judge"])
    worker.force_num_accepted_tokens = 1
    assert _step(worker, Recording()) == ([[4, 5, -1]], ["kernel 2", "judge"])
    worker.force_num_accepted_tokens = 1.5  # no kernel for a fraction
    assert _step(worker, Recording())[1] == ["judge"]


def test_what_a_worker_overrides_is_called_and_no_kernel_stands_for_it() -> None:
    class OwnTokens(NGramWorker):
        def sample_target_tokens(self, logits, spec_metadata):  # type: ignore[no-untyped-def]
            tokens, bad = super().sample_target_tokens(logits, spec_metadata)
            return tokens + 1, bad

    class OwnAccept(NGramWorker):
        def accept(self, logits, tokens, drafts, num_contexts, spec_metadata):  # type: ignore[no-untyped-def]
            rows, lens = super().accept(logits, tokens, drafts, num_contexts, spec_metadata)
            return rows, torch.full_like(lens, 3)

    class OwnForce(NGramWorker):
        def apply_forced_acceptance(self, lens, num_contexts, num_drafts, spec_metadata):  # type: ignore[no-untyped-def]
            return torch.ones_like(lens)

    class Child(OwnAccept):
        pass

    assert _step(_worker(OwnTokens), Recording()) == ([[5, -1, -1]], ["accept"])
    assert _step(_worker(OwnAccept), Recording()) == ([[4, 5, 6]], ["accept"])
    assert _step(_worker(Child), Recording()) == ([[4, 5, 6]], ["accept"])
    assert _step(_worker(OwnForce), Recording()) == ([[4, -1, -1]], ["judge"])
    worker = _worker(OwnTokens)
    worker.force_num_accepted_tokens = 1
    assert _step(worker, Recording()) == ([[5, 6, -1]], ["accept"])
    assert not NGramWorker.judges_itself and not NGramWorker.forces_itself


def test_after_acceptance_is_called_whatever_served() -> None:
    class Following(NGramWorker):
        seen: list[list[int]]

        def after_acceptance(self, accepted, lens, num_contexts, spec_metadata):  # type: ignore[no-untyped-def]
            self.seen = accepted.tolist()

    worker = _worker(Following)
    _, calls = _step(worker, Recording())
    assert worker.seen == [[4, 5, -1]] and calls[0] == "kernel 0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ParallelWorker", "MaskedWorker"),
        ("ParallelEagle3Worker", "MaskedEagle3Worker"),
        ("ParallelDraftTargetWorker", "MaskedDraftTargetWorker"),
        ("ParallelDraftModel", "MaskedDraftModel"),
        ("PARALLEL_WORKER_OF_MODE", "MASKED_WORKER_OF_MODE"),
    ],
)
def test_names_of_before_still_work(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(workers, old) is getattr(workers, new)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchWorker'"):
        workers.NoSuchWorker  # noqa: B018
