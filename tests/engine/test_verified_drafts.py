"""`max_verified_drafts`: a step verifies the likeliest drafts of all its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import MODES, NETWORKS, Drafters, config_of, cpu_engine, make_drafters
from oracle import Oracle, random_prompts
from tiny_heads import mtp_model_dir
from torch import Tensor

from trtspec import (
    AutoDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.config import resolve_speculative_config
from trtspec.distributed.logits import whole
from trtspec.errors import ConfigError
from trtspec.metadata.attention import AttentionMetadata
from trtspec.workers.base import SpecWorkerBase

K = 3


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


def packed_rows(llm: Any) -> list[list[int]]:
    """Collects how many drafts each request verifies, by step in which not all are."""
    steps: list[list[int]] = []
    target = llm.executor.runner.step.target
    forward = target.forward

    def watched(ids: Tensor, positions: Tensor, meta: AttentionMetadata, **rest: Any) -> Tensor:
        if meta.packed is not None:
            steps.append((meta.packed.starts.diff() - 1).tolist())
            assert len(ids) == len(positions) == meta.num_tokens == sum(steps[-1]) + len(steps[-1])
        return forward(ids, positions, meta, **rest)

    target.forward = watched
    return steps


@pytest.mark.parametrize("pool", [None, 112])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, pool: int | None
) -> None:
    """With room for all, and where requests are preempted."""
    config = config_of(mode, K, drafters, max_verified_drafts=5)
    llm = cpu_engine(target_dir, config, pool=pool, overlap=pool is None)
    steps, prompts = packed_rows(llm), random_prompts(6, 12)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 20)
    assert steps and all(sum(lens) == 5 for lens in steps)
    assert (llm.stats().num_preemptions > 0) == (pool is not None)
    llm.executor.kv_cache.check_integrity()


@pytest.mark.parametrize("mode", NETWORKS)
def test_chances_are_those_of_the_drafters_logits(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's chance is its drafter's largest probability, times those of the drafts before."""
    llm = cpu_engine(target_dir, config_of(mode, K, drafters, max_verified_drafts=2), overlap=False)
    state, seen = llm.executor.state, list[Tensor]()
    choose = SpecWorkerBase._choose

    def watched(self: SpecWorkerBase, logits: Any, *rest: Any) -> Tensor:
        seen.append(whole(logits).double().softmax(-1).amax(-1))
        return choose(self, logits, *rest)

    monkeypatch.setattr(SpecWorkerBase, "_choose", watched)
    if mode == "dflash2":
        monkeypatch.setattr(
            "trtspec.workers.dflash.best_probabilities",
            lambda logits: seen.append(logits.double().softmax(-1).amax(-1)) or seen[-1].float(),
        )
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        for prompt in random_prompts(3, 12)
    ]
    llm.executor.step()
    while llm.executor.has_work:
        slots = [request.slot for request in requests]
        seen.clear()
        llm.executor.step()
        if any(request.is_finished for request in requests):
            break
        expected = torch.cat(seen).view(K, 3).cumprod(0).T.float()
        torch.testing.assert_close(state.chances[slots], expected, atol=1e-6, rtol=1e-5)
    assert sum(len(request.output_token_ids) for request in requests) > 12


def test_what_is_found_in_texts_is_verified_first(target_dir: Path, tmp_path: Path) -> None:
    """A draft of the network's own has its chance, one in its place is certain."""
    lookup = SAEnhancerConfig(threshold=1, min_token_prob=0.0)
    config = config_of("eagle3", K, make_drafters(tmp_path), max_verified_drafts=4)
    llm = cpu_engine(target_dir, replace(config, sa_config=lookup), overlap=False)
    worker, state, own = llm.executor.worker, llm.executor.state, list[Tensor]()
    draft = worker.draft
    worker.draft = lambda inputs: own.append(draft(inputs)) or own[-1]
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        for prompt in random_prompts(3, 12)
    ]
    found = 0
    while not any(request.is_finished for request in requests):
        llm.executor.step()
        slots = [request.slot for request in requests]
        if None in slots or len(own[-1]) < 3:
            continue
        is_other = state.next_tokens[slots, 1:] != own[-1]
        is_certain = state.chances[slots] == 1
        assert (is_certain[:, 0] == is_other[:, 0]).all()
        found += int(is_other[:, 0].sum())
    assert found > 3


def test_a_step_of_few_drafts_verifies_all(target_dir: Path, drafters: Drafters) -> None:
    llm = cpu_engine(target_dir, config_of("eagle3", K, drafters, max_verified_drafts=2 * K))
    steps = packed_rows(llm)
    llm.generate(random_prompts(2), SamplingParams(max_tokens=12, ignore_eos=True))
    assert not steps


def test_forced_acceptance_verifies_equally_many(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests have room for two drafts each, which are accepted."""
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "3")
    llm = cpu_engine(target_dir, config_of("eagle3", K, drafters, max_verified_drafts=9))
    steps = packed_rows(llm)
    outputs = llm.generate(
        random_prompts(4, 12), SamplingParams(max_tokens=1 + 3 * 5, ignore_eos=True)
    )
    assert not steps
    assert [output.spec_stats.acceptance_length for output in outputs] == [3.0] * 4


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_the_number_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"NGramDecodingConfig.max_verified_drafts="):
        NGramDecodingConfig(max_verified_drafts=value)


def test_lengths_that_choose_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_verified_drafts=8 with draft_len_schedule"):
        EagleDecodingConfig(
            max_draft_len="auto",
            speculative_model="d",
            max_verified_drafts=8,  # type: ignore[arg-type]
        )


def test_auto_keeps_it() -> None:
    config = resolve_speculative_config(AutoDecodingConfig(max_verified_drafts=8))
    assert config is not None and config.max_verified_drafts == 8
