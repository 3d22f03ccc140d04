"""Four GPUs: the same tokens as transformers, and KV heads that two ranks keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import tiny_dflash
import tiny_heads
import torch
from matrix import Drafters, config_of, make_drafters
from oracle import Oracle, random_prompts
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig, SamplingParams
from trtspec.executor.ranks import CHECK_ENV_VAR

RANKS, HEADS, HEAD_DIM = 4, 4, 8
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs four CUDA devices"),
]


@pytest.fixture(scope="module")
def sizes() -> Iterator[None]:
    """Four attention heads in all models: six cannot be cut in four."""
    with pytest.MonkeyPatch.context() as patch:
        for helper in (tiny_heads, tiny_dflash):
            patch.setattr(helper, "HEADS", HEADS)
            patch.setattr(helper, "HEAD_DIM", HEAD_DIM)
        patch.setitem(tiny.DEFAULTS, "num_attention_heads", HEADS)
        patch.setitem(tiny.DEFAULTS, "head_dim", HEAD_DIM)
        yield


@pytest.fixture(scope="module")
def target_dir(sizes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.mark.parametrize(
    "mode", ["none", "ngram", "eagle3", "mtp_eagle", "draft_target", "dflash", "dspark"]
)
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compare their tokens at every step; the pool is small."""
    monkeypatch.setenv(CHECK_ENV_VAR, "1")
    prompts = random_prompts(12)
    with LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32",
        tensor_parallel_size=RANKS, max_batch_size=4, max_seq_len=96,
        kv_cache_config=KvCacheConfig(max_tokens=224, tokens_per_block=8),
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
        llm.executor.kv_cache.check_integrity()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 32)
