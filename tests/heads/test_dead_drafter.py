"""The live warning of a draft head or model whose drafts are never accepted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tiny import constant_target_dir, tiny_model_dir
from tiny_heads import eagle3_dir

from trtspec import LLM, EagleDecodingConfig, NGramDecodingConfig, SamplingParams
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.config import DecodingBaseConfig
from trtspec.executor.dead_drafter import DeadDrafterWatch, complaint, is_dead
from trtspec.metadata.mode import SpeculativeDecodingMode

DEAD = "trtspec doctor --target"


def test_it_warns_once_and_only_for_a_full_window(caplog: pytest.LogCaptureFixture) -> None:
    watch = DeadDrafterWatch(window=100)
    for _ in range(33):
        watch.see([False] * 3)
    assert not caplog.records
    watch.see([True])  # 1 of 100
    (record,) = caplog.records
    assert "Of the last 100 first drafts 1 were accepted (1.0 %)" in record.getMessage()
    assert DEAD in record.getMessage() and record.levelno == logging.WARNING
    watch.see([False] * 500)
    assert len(caplog.records) == 1


def test_a_drafter_that_lives_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch = DeadDrafterWatch(window=100)
    for i in range(1000):
        watch.see([i % 50 == 0])  # 2 of every 100
    assert not caplog.records
    for _ in range(25):  # a drafter that dies later is told of all the same
        watch.see([False] * 4)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("proposed", "accepted", "expected"),
    [(256, 5, True), (256, 6, False), (100, 2, False), (100, 1, True), (0, 0, False)],
)
def test_the_threshold_is_two_percent(proposed: int, accepted: int, expected: bool) -> None:
    assert is_dead(proposed, accepted) is expected


@pytest.mark.parametrize(
    ("accepted", "trained", "expected"),
    [(25, 0.78, "78%"), (26, 0.78, None), (25, None, None), (1, 0.78, "dead"), (3, 0.06, None)],
)
def test_a_third_of_what_training_ended_with_is_the_least(
    accepted: int, trained: float | None, expected: str | None
) -> None:
    found = complaint(100, accepted, trained)
    assert (found is None) is (expected is None)
    assert expected is None or expected in (found or "")


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ({"held_out_conditional": [0.9, 0.8]}, 0.9),
        ({"held_out_conditional": None}, None),
        ({"held_out_conditional": ["0.9"]}, None),
        ({"held_out_conditional": [7.0]}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_training_ended_with_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, notes: object, expected: float | None
) -> None:
    """A fifth of the drafts is accepted, too few of a head that had 90 % of them."""
    head = eagle3_dir(tmp_path, seed=3)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "training": notes}))
    llm = LLM(
        tiny_model_dir(tmp_path, seed=4),
        EagleDecodingConfig(
            max_draft_len=2, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
        ),
        device="cpu",
        dtype="float32",
    )
    watch = llm.executor.statistics.dead_drafter_watch
    assert watch is not None and watch.trained == expected
    llm.executor.forget_requests()
    watch = llm.executor.statistics.dead_drafter_watch
    assert watch is not None and watch.trained == expected
    with caplog.at_level(logging.WARNING, logger="trtspec.executor.dead_drafter"):
        watch.see([i % 5 == 0 for i in range(300)])
        assert not caplog.messages  # it may be one text of another kind
        watch.see([i % 2 == 0 for i in range(300)])
        for _ in range(4):
            watch.see([i % 5 == 0 for i in range(300)])
    told = [text for text in caplog.messages if "at the end of the head's training" in text]
    assert len(told) == len(caplog.messages) == (expected is not None)
    assert not watch.is_dead
    watch.see([False] * 300)
    assert watch.is_dead and "looks dead" in caplog.text


def test_only_heads_and_draft_models_are_watched() -> None:
    modes = SpeculativeDecodingMode
    watched = {mode for mode in modes if DeadDrafterWatch.for_mode(mode) is not None}
    assert watched == {
        modes.MTP, modes.MTP_EAGLE, modes.MTP_EAGLE_ONE_MODEL, modes.EAGLE3,
        modes.EAGLE3_ONE_MODEL, modes.DRAFT_TARGET, modes.DFLASH, modes.DSPARK,
    }  # fmt: skip


def _decode(target: Path, config: DecodingBaseConfig, overlap: bool) -> LLM:
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=16,
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    prompts = [[5 + i, 6, 7] for i in range(16)]
    llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_the_executor_tells_of_a_dead_head_and_of_nothing_else(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    """The target says token 0 for ever; a head with its own vocabulary of others never does."""
    target = constant_target_dir(tmp_path)
    dead = eagle3_dir(tmp_path, seed=3)
    layers = [0, 1, 2]
    head = EagleDecodingConfig(
        max_draft_len=2, speculative_model=dead, eagle3_layers_to_capture=layers
    )
    with caplog.at_level(logging.WARNING, logger="trtspec.executor.dead_drafter"):
        llm = _decode(target, head, overlap)
        rate = llm.stats().acceptance_per_position[0]
        assert rate < 0.02, "the head is not dead"
        assert [DEAD in text for text in caplog.messages] == [True]
        caplog.clear()

        perfect = eagle3_dir(tmp_path, draft_vocab=None)  # shares the target's lm_head
        config = EagleDecodingConfig(
            max_draft_len=1, speculative_model=perfect, eagle3_layers_to_capture=layers
        )
        _decode(target, config, overlap)
        _decode(tiny_model_dir(tmp_path, seed=4), NGramDecodingConfig(max_draft_len=2), overlap)
        monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "1")
        _decode(target, head, overlap)
        monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "0.001")  # forced to be as rare
        _decode(target, head, overlap)
        assert not any(DEAD in text for text in caplog.messages)


@pytest.mark.slow
def test_steps_without_drafts_or_with_another_will_do_not_count(tmp_path: Path) -> None:
    target = constant_target_dir(tmp_path)
    config = EagleDecodingConfig(
        max_draft_len=2, speculative_model=eagle3_dir(tmp_path, seed=3),
        eagle3_layers_to_capture=[0, 1, 2],
    )  # fmt: skip
    llm = LLM(target, config, device="cpu", dtype="float32")
    watch = llm.executor.statistics.dead_drafter_watch
    assert watch is not None
    llm.executor.runtime_draft_len = 0
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert watch._proposed == 0
    llm.executor.runtime_draft_len = 2
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5))
    assert watch._proposed == 0, "a hot target's choice is close to uniform"
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={9: 100}))
    assert watch._proposed == 0, "the bias chooses, and no drafter knows of it"
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0))
    assert watch._proposed > 0
