"""Gemma-4's experts beside its MLPs (the public 26B-A4B), against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from oracle import Oracle, logit_error, prompt_tensors
from safetensors.torch import load_file, save_file
from tiny_gemma import edit_config, gemma_dir
from tiny_gemma_moe import MOE, gemma_moe_config, moe_dir

from trtspec import LLM, KvCacheConfig, SamplingParams
from trtspec.attention.dense import DensePass
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError
from trtspec.models.moe import MoEBesideMLP

VARIANTS: list[dict[str, Any]] = [
    {},
    {"top_k_experts": 6, "attention_k_eq_v": False, "num_key_value_heads": 3},
    {"top_k_experts": 1, "num_experts": 5, "moe_intermediate_size": 136},
]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    error, spread = logit_error(moe_dir(tmp_path, **overrides), prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


def test_whole_texts_at_once(tmp_path: Path) -> None:
    """What the doctor runs."""
    path, ids = moe_dir(tmp_path), prompt_tensors(97, [30])[0]
    model = load_decoder(path, ON_CPU)
    assert all(isinstance(layer.mlp, MoEBesideMLP) for layer in model.layers)
    with torch.no_grad():
        hidden = model(ids, torch.arange(30), DensePass(torch.zeros(1, 30, dtype=torch.int64)))
        expected = Oracle(path).model(ids[None]).logits[0]
        torch.testing.assert_close(model.compute_logits(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = moe_dir(
        tmp_path_factory.mktemp("gemma"), seed=5, layers_weigh=4, final_logit_softcapping=30.0
    )
    return path, Oracle(path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "ngram", "assistant"])
@pytest.mark.parametrize("chunked", [False, True])
def test_greedy_equals_transformers(target: Any, tmp_path: Path, mode: str, chunked: bool) -> None:
    """In chunks also with preemption."""
    path, oracle = target
    llm = LLM(
        path, gemma_moe_config(mode, tmp_path), device="cpu", dtype="float32", max_batch_size=3,
        max_seq_len=64, max_num_tokens=14 if chunked else 128, enable_chunked_prefill=chunked,
        kv_cache_config=KvCacheConfig(max_tokens=88 if chunked else 512, tokens_per_block=4),
    )  # fmt: skip
    prompts = [prompt.tolist() for prompt in prompt_tensors(97, [15, 24, 11])]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    expected = oracle.extend_all(prompts, 24)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output in outputs:
        assert len(set(output.outputs[0].token_ids)) > 4  # a text that the layers make
    llm.executor.kv_cache.check_integrity()


# -- reading the checkpoint --------------------------------------------------------------------
def test_the_public_names(tmp_path: Path) -> None:
    """The checkpoint also reads images, and nests its text model."""
    path = moe_dir(tmp_path)
    plain = load_decoder(path, ON_CPU)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": raw}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    layer = "model.language_model.layers.1."
    for name in ("router.proj.weight", "router.scale", "router.per_expert_scale",
                 "experts.gate_up_proj", "experts.down_proj"):  # fmt: skip
        assert f"{layer}{name}" in tensors
    save_file(tensors, path / "model.safetensors")
    ours = load_decoder(path, ON_CPU)
    for (name, one), two in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": None}, ["num_experts=None", "1 … 4096", "Copy"]),
        ({"top_k_experts": 7}, ["top_k_experts=7", "1 … 6"]),
        ({"top_k_experts": None}, ["top_k_experts=None"]),
        ({"moe_intermediate_size": 0}, ["moe_intermediate_size=0"]),
        ({"num_experts": 5}, ["[6, 48]", "config.json makes it [5, 48]", "num_experts"]),
        ({"moe_intermediate_size": 25}, ["[6, 48, 48]", "[6, 50, 48]", "moe_intermediate_size"]),
        ({"enable_moe_block": False}, ["no place for", "enable_moe_block"]),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    path = edit_config(moe_dir(tmp_path), **change)
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
        load_decoder(path, ON_CPU)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_missing_experts_are_named(tmp_path: Path) -> None:
    path = edit_config(gemma_dir(tmp_path, "gemma4_text"), **MOE)
    with pytest.raises(CheckpointError, match=r"lacks 32 of .*experts"):
        load_decoder(path, ON_CPU)
