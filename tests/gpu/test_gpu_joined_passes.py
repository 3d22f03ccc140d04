"""Prompts and generations in one captured pass, from the first time that both are there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from joined import join_always, joined_sizes
from matrix import BLOCKS, Drafters, config_of, covering, make_drafters
from oracle import Oracle, random_prompts
from perfect_schedules import NAMES, Schedule, make_case
from sampled import requests, texts
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig, SamplingParams
from trtspec.executor.cuda_graphs.graphs import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAPTURED = [
    "none",
    "ngram",
    "sa",
    "draft_target",
    "eagle3",
    "mtp_eagle",
    "p_eagle",
    "pard",
    *BLOCKS,
]
"""Modes whose prompts have graphs."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


def engine(target: Path, mode: str, drafters: Drafters, **options: object) -> LLM:
    given = {"max_batch_size": 4, "max_seq_len": 96, "prefill_batch_size": 1} | options
    return LLM(target, config_of(mode, 3, drafters), device="cuda", dtype="float32", **given)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    join_always(monkeypatch)


@covering(mode=CAPTURED, overlap=[False, True], pool=[None, 144], chunk=[None, 40])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, joined: None,
    mode: str, overlap: bool, pool: int | None, chunk: int | None,
) -> None:  # fmt: skip
    oracle, prompts = Oracle(target_dir), random_prompts(9)
    llm = engine(
        target_dir, mode, drafters, max_num_tokens=chunk or 160,
        enable_chunked_prefill=chunk is not None, disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=pool or 1024, tokens_per_block=8),
    )  # fmt: skip
    params = [SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate(prompts, params)
    for prompt, output, wanted in zip(prompts, outputs, params, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, wanted.max_tokens)
    llm.executor.kv_cache.check_integrity()
    assert joined_sizes(llm)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("none", "auto"), ("eagle3", "auto"), ("eagle3", "fp8"), ("draft_target", "fp8"),
     ("dspark", "auto")],
)  # fmt: skip
def test_sampled_texts_are_those_of_two_passes(
    target_dir: Path, drafters: Drafters, mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Greedy and filtered requests are among them, and such with penalties and a bias."""
    prompts, params = requests(12)
    params[3:6] = [replace(one, repetition_penalty=1.3, presence_penalty=0.6, logit_bias={4: 3.0})
                   for one in params[3:6]]  # fmt: skip
    make = partial(
        engine, target_dir, mode, drafters,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=16, dtype=dtype),
    )  # fmt: skip
    monkeypatch.setattr(CudaGraphs, "_add_cost", lambda *_: False)
    apart = make()
    expected = texts(apart, prompts, params)
    assert not joined_sizes(apart)
    join_always(monkeypatch)
    together = make()
    assert texts(together, prompts, params) == expected
    assert joined_sizes(together)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("eagle3_two_engine", "mtp_vanilla")]
)
def test_every_draft_is_accepted(tmp_path: Path, joined: None, name: str) -> None:
    """Drafters that are always right, through random schedules and draft lengths."""
    case, drafts = make_case(tmp_path, name, "float32"), 0
    for seed in range(10, 13):
        schedule = Schedule(case, "cuda", seed)
        schedule.run(num_requests=12)
        drafts += schedule.check()
    assert drafts > 50


def test_a_pass_is_captured_once_two_passes_have_cost_as_much(
    target_dir: Path, drafters: Drafters
) -> None:
    llm = engine(target_dir, "eagle3", drafters, max_num_tokens=400)
    graphs = llm.executor.runner.graphs
    assert graphs is not None
    oracle, prompt = Oracle(target_dir), random_prompts(1)[0]
    num_steps, graphs.joined.seconds_of_pass = 0, 0.02  # as of a large model
    while not joined_sizes(llm) and num_steps < 400:
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        llm.executor.step()
        num_steps += 1
    costs = [cost for key, cost in graphs._costs.items() if key.num_beside]
    assert joined_sizes(llm) and num_steps > 2 and max(costs) > 0.02
    for request in llm.executor.run_until_done():
        assert request.output_token_ids == oracle.extend(prompt, 6)
