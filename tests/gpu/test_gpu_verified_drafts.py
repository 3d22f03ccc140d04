"""`max_verified_drafts` in a graph: rows of different requests are packed on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from matrix import NETWORKS, Drafters, config_of, make_drafters
from oracle import Oracle, random_prompts
from tiny_dflash import dflash_dir
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, DSparkDecodingConfig, KvCacheConfig, SamplingParams
from trtspec.config import DecodingBaseConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K = 3
MODES = ["ngram", "dspark_vanilla", *NETWORKS]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def vanilla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DSpark head whose drafts are walked through in one kernel."""
    return dflash_dir(tmp_path_factory.mktemp("vanilla"), markov="vanilla", rank=64)


def _config(mode: str, drafters: Drafters, vanilla: Path, **fields: Any) -> DecodingBaseConfig:
    if mode == "dspark_vanilla":
        return DSparkDecodingConfig(
            max_draft_len=K, speculative_model=vanilla, target_layer_ids=[0, 1, 2], **fields
        )
    config = config_of(mode, K, drafters, **fields)
    assert config is not None
    return config


@pytest.mark.parametrize("graphs", [CudaGraphConfig(batch_sizes=[8]), None], ids=["graph", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, vanilla: Path, mode: str, graphs: CudaGraphConfig | None
) -> None:
    """Five requests verify 6 of 15 drafts; in a graph for eight, 6 of 24."""
    config = _config(mode, drafters, vanilla, max_verified_drafts=6)
    llm = LLM(
        target_dir, config, device="cuda", dtype="float32", max_batch_size=8, max_seq_len=96,
        cuda_graph_config=graphs,
        kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
    )  # fmt: skip
    prompts = random_prompts(5)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    expected = Oracle(target_dir).extend_all(prompts, 24)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_step_is_one_graph_launch(
    target_dir: Path, drafters: Drafters, vanilla: Path, mode: str, temperature: float
) -> None:
    config = _config(mode, drafters, vanilla, max_verified_drafts=4)
    executor = steady.engine(target_dir, config, temperature).executor
    steady.launch(executor, 4 if mode.endswith("two_engine") else 1)
    steady.finish(executor)


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
@pytest.mark.parametrize("mode", ["eagle3", "mtp", "dspark"])
def test_sampled_texts_are_the_cpus(
    target_dir: Path, drafters: Drafters, vanilla: Path, mode: str, rule: str
) -> None:
    """Prompts and drafts are in different steps on the CPU too, and both overlap: then a request
    that has ended is in one step more, and its drafts are verified in others' place."""
    config = replace(_config(mode, drafters, vanilla, max_verified_drafts=5), acceptance=rule)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, temperature=3.0) for i in range(4)
    ]
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            target_dir, config, device=device, dtype="float32", max_batch_size=4, max_seq_len=96,
            prefill_batch_size=4, kv_cache_config=KvCacheConfig(max_tokens=1024),
            disable_overlap_scheduler=False,
        )  # fmt: skip
        outputs = llm.generate(random_prompts(4), params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
