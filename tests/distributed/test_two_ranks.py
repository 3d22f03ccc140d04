"""Engines over two ranks: the same tokens as one process, whatever drafts, judges and shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import MODES, NETWORKS, Drafters, config_of, cpu_engine, full, make_drafters, spread
from oracle import Oracle, random_prompts
from sampled import requests, texts
from tiny_heads import mtp_model_dir

from trtspec import SamplingParams

# Each engine costs seconds: the rest of the modes runs in make test-all.
SOME = MODES if full() else ["ngram", "eagle3", "mtp"]
FEW = MODES if full() else ["draft_target", "mtp_eagle"]
RULES = ["rejection", "exact_match", "block"] + (["strict"] if full() else [])
SAMPLED = [*NETWORKS, "ngram"] if full() else ["eagle3", "mtp_eagle", "pard", "dflash2"]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.fixture(autouse=True)
def every_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks compare their tokens."""
    monkeypatch.setenv("TRTSPEC_CHECK_RANKS", "1")


def two_ranks(target: Path, config: Any, **options: Any) -> Any:
    return cpu_engine(target, config, tensor_parallel_size=2, **options)


@pytest.mark.slow
@spread(mode=SOME, chunk=[None, 24], overlap=[False, True], pool=[None, 112])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle,
    mode: str, chunk: int | None, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    config = config_of(mode, 3, drafters)
    prompts, count = (random_prompts(5), 16) if pool is None else (random_prompts(5, 12), 28)
    with two_ranks(target_dir, config, chunk=chunk, overlap=overlap, pool=pool) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        stats = llm.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, count)
    assert (stats.num_preemptions > 0) == (pool is not None)


@pytest.mark.slow
@spread(mode=SAMPLED, rule=RULES)
def test_sampled_texts_equal_one_rank(
    target_dir: Path, drafters: Drafters, mode: str, rule: str
) -> None:
    config = config_of(mode, 3, drafters, acceptance=rule)
    prompts, params = requests(8, 16)
    expected = texts(cpu_engine(target_dir, config), prompts, params)
    with two_ranks(target_dir, config) as llm:
        assert texts(llm, prompts, params) == expected


@pytest.mark.slow
@spread(mode=FEW, chunk=[None, 24], overlap=[False, True], pool=[None, 64])
def test_attention_data_parallel(
    target_dir: Path, drafters: Drafters, oracle: Oracle,
    mode: str, chunk: int | None, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    """A rank keeps only the keys and values of its own requests; the pool is each rank's."""
    config = config_of(mode, 3, drafters)
    prompts, count = (random_prompts(5), 16) if pool is None else (random_prompts(5, 12), 28)
    with two_ranks(
        target_dir, config, chunk=chunk, overlap=overlap, pool=pool, enable_attention_dp=True
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        llm.executor.kv_cache.check_integrity()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, count)


@pytest.mark.slow
@pytest.mark.parametrize("mode", NETWORKS if full() else ["dflash", "dflash2"])
def test_as_many_drafts_are_accepted_as_on_one_rank(
    target_dir: Path, drafters: Drafters, mode: str
) -> None:
    """Tokens are right whatever is drafted. Exact-match drafts make acceptance a fingerprint."""
    config = config_of(mode, 3, drafters, acceptance="exact_match")
    prompts, params = requests(6, 24)
    one = cpu_engine(target_dir, config).generate(prompts, params)
    with two_ranks(target_dir, config) as llm:
        two = llm.generate(prompts, params)
    steps = [[output.spec_stats.num_steps for output in outputs] for outputs in (one, two)]
    assert steps[0] == steps[1]
    assert any(output.spec_stats.acceptance_length > 1 for output in one)
