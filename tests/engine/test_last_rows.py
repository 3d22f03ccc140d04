"""Passes over prompts whose last layer is computed for the rows with logits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from last_rows import watch_last_rows
from matrix import MODES, Drafters, config_of, cpu_engine, make_drafters, spread
from oracle import VOCAB, Oracle, random_prompts
from tiny_gemma import gemma_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import (
    LLM,
    EagleDecodingConfig,
    KvCacheConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.executor import forward_step

WHOLE = {"mtp", "mtp_eagle", "mtp_eagle_two_engine", "draft_target", "pard"}
"""Modes that read final hidden states of prompts, or draft with a model of their own."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return mtp_model_dir(folder, seed=1, num_mtp_layers=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.fixture
def ended_early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each such pass, which any number of rows may be."""
    return watch_last_rows(monkeypatch)


@pytest.mark.slow
@spread(mode=MODES, chunk=[None, 17], overlap=[False, True], pool=[None, 112])
def test_texts_are_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, ended_early: list[int],
    mode: str, chunk: int | None, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    """Prompts together, in chunks, beside others, after a preemption, and found in the cache."""
    prompts, length = (random_prompts(6), 8) if pool is None else (random_prompts(6, 12), 32)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    with cpu_engine(
        target_dir, config_of(mode, 3, drafters), chunk=chunk, overlap=overlap, pool=pool
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            texts = [output.outputs[0].token_ids for output in outputs]
            assert texts == oracle.extend_all(prompts, length)
    assert bool(ended_early) == (mode not in WHOLE)


def test_log_probabilities_are_those_of_a_whole_pass(
    target_dir: Path, ended_early: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(4), SamplingParams(max_tokens=1, logprobs=5)

    def entries(llm: LLM) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [sorted((i, e.logprob) for i, e in o.logprobs[0].items()) for o in outputs]

    with cpu_engine(target_dir, None) as llm:
        early = entries(llm)
    assert ended_early
    monkeypatch.setattr(forward_step, "FEWEST_ROWS", 10**6)
    ended_early.clear()
    with cpu_engine(target_dir, None) as llm:
        whole = entries(llm)
    assert not ended_early
    for one, other in zip(early, whole, strict=True):
        assert [i for i, _ in one] == [i for i, _ in other]
        torch.testing.assert_close(
            torch.tensor([p for _, p in one]), torch.tensor([p for _, p in other])
        )


def test_few_rows_are_computed_whole(target_dir: Path, ended_early: list[int]) -> None:
    """A pass of few rows reads weights all the time, and keeps the bits it had."""
    forward_step.FEWEST_ROWS = 20  # undone with the fixture
    with cpu_engine(target_dir, None) as llm:
        for count in (19, 20, 21):
            llm.generate(
                [[(i + count) % VOCAB for i in range(count)]], SamplingParams(max_tokens=2)
            )
    assert ended_early == [20, 21]


def test_whoever_reads_all_rows_gets_them(
    target_dir: Path, tmp_path: Path, ended_early: list[int]
) -> None:
    """Log probabilities of prompts, and states that are saved."""
    with cpu_engine(target_dir, None) as llm:
        llm.generate(random_prompts(2), SamplingParams(max_tokens=2, prompt_logprobs=0))
    saving = SaveHiddenStatesDecodingConfig(
        output_directory=str(tmp_path), eagle3_layers_to_capture=[1]
    )
    with cpu_engine(target_dir, saving) as llm:
        llm.generate(random_prompts(2), SamplingParams(max_tokens=1))
    assert ended_early == []


def test_families_with_other_layers_compute_them_whole(
    tmp_path: Path, ended_early: list[int]
) -> None:
    with cpu_engine(gemma_dir(tmp_path, "gemma3_text"), None) as llm:
        llm.generate(random_prompts(2), SamplingParams(max_tokens=2))
    assert ended_early == []


@pytest.mark.parametrize(("layer", "is_early"), [(2, True), (3, False)])
def test_a_captured_last_layer_is_computed_whole(
    target_dir: Path, oracle: Oracle, ended_early: list[int], tmp_path: Path, layer: int,
    is_early: bool,
) -> None:  # fmt: skip
    head = eagle3_dir(tmp_path, config={"eagle_config": {}})
    config = EagleDecodingConfig(
        max_draft_len=2, speculative_model=head, eagle3_layers_to_capture=[0, 1, layer]
    )
    prompts = random_prompts(3)
    with cpu_engine(target_dir, config) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    texts = [output.outputs[0].token_ids for output in outputs]
    assert texts == oracle.extend_all(prompts, 6)
    assert bool(ended_early) == is_early


def test_codes_in_the_cache_keep_the_attention_that_finds_nan(
    target_dir: Path, ended_early: list[int]
) -> None:
    cache = KvCacheConfig(dtype="fp8")
    with cpu_engine(target_dir, None, kv_cache_config=cache) as llm:
        llm.generate(random_prompts(2), SamplingParams(max_tokens=2))
    assert ended_early == []
