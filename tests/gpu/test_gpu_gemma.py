"""Gemma targets and assistants on CUDA: the CPU's tokens, one graph launch, nothing waited for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from tiny_gemma import assistant_dir, gemma_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    EmbedsPrompt,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ["gemma2", "gemma3_text", "gemma4_text", "gemma4_small"]
CASES = [
    ("gemma2", "ngram"), ("gemma3_text", "ngram"), ("gemma4_text", "ngram"),
    ("gemma3_text", "assistant"), ("gemma4_text", "assistant"),
    ("gemma4_text", "assistant_two_engine"),
    ("gemma4_small", "ngram"), ("gemma4_small", "assistant"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    of_small: dict[str, Any] = {"vocab_size": 96, "vocab_size_per_layer_input": 96}
    for family in FAMILIES:
        is_small = family == "gemma4_small"
        gemma_dir(  # a low cap makes the best logits nearly equal, where devices may differ
            path, family, seed=1, layers_weigh=4, final_logit_softcapping=30.0,
            **(of_small if is_small else {}),
        ).rename(path / family)  # fmt: skip
        if family != "gemma2":  # the small one's has logits of a few clusters of tokens
            clusters: dict[str, Any] = {"clusters": (12, 3), "vocab_size": 96} if is_small else {}
            assistant_dir(path, family, **clusters).rename(path / f"{family}-assistant")
    return path


def _config(folder: Path, family: str, mode: str) -> DecodingBaseConfig:
    if mode == "ngram":
        return NGramDecodingConfig(max_draft_len=3, min_matching_ngram_size=1)
    return MTPDecodingConfig(
        num_nextn_predict_layers=3, speculative_model=folder / f"{family}-assistant",
        mtp_eagle_one_model=mode == "assistant",
    )  # fmt: skip


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(96) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize(("family", "mode"), CASES)
@pytest.mark.parametrize("pool", [1024, 112])
def test_tokens_are_those_of_the_cpu(folder: Path, family: str, mode: str, pool: int) -> None:
    """Eagerly, as graphs, and with graphs of prompts; chunks, and preemption in a small cache."""
    texts, stats = [], []
    graphs = CudaGraphConfig(batch_sizes=[4], context_tokens=())
    for device, config in (
        ("cpu", None), ("cuda", None), ("cuda", graphs),
        ("cuda", replace(graphs, context_tokens=(16, 32))),
    ):  # fmt: skip
        llm = LLM(
            folder / family, _config(folder, family, mode), device=device, dtype="float32",
            max_batch_size=4, max_seq_len=96, max_num_tokens=32, enable_chunked_prefill=True,
            cuda_graph_config=config,
            kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=8),
        )  # fmt: skip
        outputs = llm.generate(_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
        stats.append([output.spec_stats.acceptance_length for output in outputs])
        llm.executor.kv_cache.check_integrity()
        captured = llm.executor.graphs
        assert (captured is not None) == (config is not None)
        assert captured is None or captured.num_graphs > 0
    assert texts[1:] == texts[:1] * 3
    assert sum(len(set(text)) for text in texts[0]) > 12  # not each of a single token
    assert pool == 112 or stats[1] == stats[2]


@pytest.mark.parametrize("mode", ["ngram", "assistant"])
def test_prompts_with_vectors_over_per_layer_inputs(folder: Path, mode: str) -> None:
    """Their layers are told of the padding token at the vectors' places."""
    vectors = 2 * torch.randn(12, 48, generator=torch.Generator().manual_seed(3))
    ids, mask = list(range(20)), torch.tensor([4 <= i < 16 for i in range(20)])
    prompts = [EmbedsPrompt(ids, vectors, mask), [5, 6, 7]]
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            folder / "gemma4_small", _config(folder, "gemma4_small", mode), device=device,
            dtype="float32", max_batch_size=2, max_seq_len=96, max_num_tokens=10,
            enable_chunked_prefill=True, kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
def test_sampled_tokens_are_those_of_the_cpu(folder: Path, rule: str) -> None:
    config = replace(_config(folder, "gemma3_text", "assistant"), acceptance=rule)
    params = [
        SamplingParams(max_tokens=20, temperature=1.5, seed=i, ignore_eos=True) for i in range(4)
    ]
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            folder / "gemma3_text", config, device=device, dtype="float32", max_batch_size=4,
            max_seq_len=96, kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        outputs = llm.generate(_prompts(4), params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


def _steady_engine(folder: Path, family: str, mode: str, temperature: float) -> LLM:
    """Two requests in the middle of their texts, between two page boundaries."""
    llm = LLM(
        folder / family, _config(folder, family, mode), device="cuda", dtype="bfloat16",
        max_batch_size=2, max_seq_len=200,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=128),
    )  # fmt: skip
    steady.start(llm.executor, temperature)
    return llm


@pytest.mark.parametrize(("family", "mode"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_step_is_one_graph_launch(
    folder: Path, family: str, mode: str, temperature: float
) -> None:
    """No kernel is launched by itself; in two engines one graph for each draft pass comes after."""
    executor = _steady_engine(folder, family, mode, temperature).executor
    steady.launch(executor, 4 if mode.endswith("two_engine") else 1)
    steady.finish(executor)


@pytest.mark.parametrize(("family", "mode"), CASES)
@pytest.mark.parametrize("graphs", [CudaGraphConfig(), None])
def test_launching_a_generation_step_waits_for_nothing(
    folder: Path, family: str, mode: str, graphs: CudaGraphConfig | None
) -> None:
    llm = LLM(
        folder / family, _config(folder, family, mode), device="cuda", dtype="bfloat16",
        max_batch_size=2, max_seq_len=96, cuda_graph_config=graphs,
        kv_cache_config=KvCacheConfig(max_tokens=512),
    )  # fmt: skip
    executor = llm.executor
    for prompt in _prompts(2):
        executor.enqueue(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        executor.step()
    batch = executor._schedule()
    assert len(batch.generations) == 2
    with steady.no_waiting():
        executor._pending.append(executor._launch(executor._plan(batch, batch)))
    for request in executor.run_until_done():
        assert len(request.output_token_ids) == 30
