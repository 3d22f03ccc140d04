"""Whole steps of families whose targets and MTP layers differ in norms, biases, windows, experts
and order of inputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from joined import join_always, joined_sizes
from tiny import tiny_model_dir
from tiny_gemma_moe import gemma_moe_config, moe_dir
from tiny_gpt_oss import gpt_oss_dir, mxfp4_dir
from tiny_heads import eagle3_dir, mtp_model_dir
from tiny_step import MOE, VOCAB, step_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.ops.experts.fp4 import Fp4Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = 6
LINEAR, FULL = "linear_attention", "full_attention"
CASES = [
    ("mistral", "ngram"), ("mistral", "eagle3"), ("qwen3", "eagle3"), ("qwen3_moe", "ngram"),
    ("mimo", "mtp"), ("mimo", "vanilla"), ("qwen3_next", "mtp"), ("qwen3_next", "vanilla"),
    ("step_moe", "plain"), ("step_moe", "vanilla"), ("step_moe", "ngram"),
    ("gemma4_moe", "plain"), ("gemma4_moe", "ngram"), ("gemma4_moe", "assistant"),
    ("mixtral", "ngram"), ("minimax_m2", "ngram"), ("minimax_m2", "eagle3"),
    ("qwen3_5", "eagle3"), ("qwen3_5", "mtp"), ("qwen3_5", "vanilla"), ("qwen3_next_moe", "mtp"),
    ("olmo3", "eagle3"), ("exaone4", "ngram"), ("smollm3", "ngram"),
    ("gpt_oss", "ngram"), ("gpt_oss", "eagle3"), ("mxfp4", "plain"), ("mxfp4", "ngram"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    shape = {"num_hidden_layers": LAYERS, "seed": 2}
    tiny_model_dir(path, "mistral", sliding_window=12, **shape).rename(path / "mistral")
    tiny_model_dir(path, "qwen3", **shape).rename(path / "qwen3")
    for family in ("qwen3_moe", "smollm3"):
        tiny_model_dir(path, family, **shape).rename(path / family)
    # Seeds without near-ties in a router: in these texts the nearest experts are 9e-5 apart.
    for family, seed in (("mixtral", 8), ("minimax_m2", 6)):
        tiny_model_dir(path, family, **{**shape, "seed": seed}).rename(path / family)
    for family in ("olmo3", "exaone4"):
        tiny_model_dir(path, family, sliding_window=12, **shape).rename(path / family)
    latent = {"moe_intermediate_size": 32, "v_head_dim": 16, "num_mtp_layers": 1}
    mtp_model_dir(path, layout="deepseek_v3", **latent).rename(path / "deepseek_v3")
    for layout in ("mimo", "qwen3_next"):
        mtp_model_dir(path, layout=layout, **shape).rename(path / layout)
    linear = {**shape, "layout": "qwen3_next", "layer_types": [LINEAR, LINEAR, FULL] * 2}
    for name, family in (("qwen3_5", "qwen3_5_text"), ("qwen3_next_moe", "qwen3_next")):
        mtp_model_dir(path, family=family, **linear).rename(path / name)
    step_dir(path, **MOE).rename(path / "step_moe")
    moe_dir(path, seed=5, layers_weigh=4, final_logit_softcapping=30.0).rename(path / "gemma4_moe")
    gpt_oss_dir(path, **shape).rename(path / "gpt_oss")
    mxfp4_dir(path, **shape).rename(path / "mxfp4")
    eagle3_dir(path).rename(path / "head")
    return path


def _llm(
    folder: Path, tmp_path: Path, family: str, mode: str, device: str, **options: Any
) -> LLM:  # fmt: skip
    spec = gemma_moe_config(mode, tmp_path)
    if mode == "eagle3":
        spec = EagleDecodingConfig(max_draft_len=3, speculative_model=folder / "head")
    elif mode in ("mtp", "vanilla"):
        count = 1 if family == "deepseek_v3" else 3
        spec = MTPDecodingConfig(num_nextn_predict_layers=count, use_mtp_vanilla=mode == "vanilla")
    defaults = {
        "dtype": "float32", "max_batch_size": 3, "max_seq_len": 96,
        "kv_cache_config": KvCacheConfig(max_tokens=1024, tokens_per_block=8),
    }  # fmt: skip
    return LLM(folder / family, spec, device=device, **{**defaults, **options})


def test_mxfp4_stays(folder: Path, tmp_path: Path) -> None:
    target = _llm(folder, tmp_path, "mxfp4", "plain", "cuda").executor.target
    assert all(layer.mlp.experts.kind is Fp4Weight for layer in target.layers)


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_tokens_are_those_of_the_cpu(folder: Path, tmp_path: Path, family: str, mode: str) -> None:
    """Prompts in chunks; eagerly and as graphs."""
    rng, texts = random.Random(0), []
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (45, 9, 14, 7)]
    for device, graphs in (("cpu", None), ("cuda", None), ("cuda", CudaGraphConfig())):
        llm = _llm(
            folder, tmp_path, family, mode, device, cuda_graph_config=graphs, max_num_tokens=16,
            enable_chunked_prefill=True,
        )  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
        llm.executor.kv_cache.check_integrity()
    assert texts[1:] == texts[:1] * 2
    assert sum(len(set(text)) for text in texts[0]) > 12  # not each of a single token


@pytest.mark.parametrize(
    ("family", "mode"),
    [case for case in CASES if case[1] != "vanilla"] + [("deepseek_v3", "mtp")],
)
def test_generations_in_passes_over_prompts(
    folder: Path, tmp_path: Path, family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, mixtures and latent attention."""
    join_always(monkeypatch)
    rng, texts = random.Random(3), []
    prompts = [[rng.randrange(VOCAB) for _ in range(5 + 7 * i % 40)] for i in range(9)]
    params = [SamplingParams(max_tokens=12 + 5 * i % 23, ignore_eos=True) for i in range(9)]
    for device in ("cpu", "cuda"):
        llm = _llm(folder, tmp_path, family, mode, device, max_num_tokens=96, prefill_batch_size=1)
        outputs = llm.generate(prompts, params)
        texts.append([output.outputs[0].token_ids for output in outputs])
        llm.executor.kv_cache.check_integrity()
    assert texts[0] == texts[1]
    assert len(joined_sizes(llm)) > 1


@pytest.mark.parametrize(("family", "mode"), CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_is_one_graph_that_waits_for_nothing(
    folder: Path, tmp_path: Path, family: str, mode: str, dtype: str
) -> None:
    llm = _llm(
        folder, tmp_path, family, mode, "cuda", dtype=dtype, max_batch_size=2, max_seq_len=200,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=128),
    )  # fmt: skip
    steady.start(llm.executor)
    steady.launch(llm.executor)
    steady.finish(llm.executor)
