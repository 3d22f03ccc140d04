"""Gemma 2, 3 and 4 as targets: logits against transformers' own models, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from oracle import Oracle, logit_error, prompt_tensors
from safetensors.torch import load_file, save_file
from tiny_gemma import F, S, edit_config, gemma_dir
from tiny_heads import eagle3_dir

from trtspec import (
    LLM,
    EagleDecodingConfig,
    KvCacheConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.attention.dense import DensePass
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.kv_scales import load_kv_scales
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.layers.embedding import embed
from trtspec.train.new_head import check_target

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {}),
    ("gemma3_text", {"attention_bias": True, "final_logit_softcapping": None}),
    ("gemma4_text", {}),
    ("gemma4_unified_text", {}),
    ("gemma4_text", {"attention_k_eq_v": False, "num_key_value_heads": 3}),
    ("gemma4_small", {}),
    ("gemma4_small", {"attention_k_eq_v": True, "use_double_wide_mlp": False}),
    ("gemma4_small", {"num_kv_shared_layers": 0}),
    ("gemma4_small", {"rms_norm_eps": 1e-2}),  # what is scaled before a norm matters
    ("gemma4_unified_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Prompts are longer than the windows."""
    error, spread = logit_error(gemma_dir(tmp_path, family, **overrides), prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text", "gemma4_small"])
@pytest.mark.parametrize("speculative", [False, True])
def test_step_by_step(tmp_path: Path, family: str, speculative: bool) -> None:
    """Tokens and their log probabilities, over paged windows, chunks and preemption."""
    path = gemma_dir(tmp_path, family, seed=1, layers_weigh=4)
    oracle = Oracle(path)
    prompts = [prompt.tolist() for prompt in prompt_tensors(97, [3, 24, 11])]
    prompts[0] = prompts[0] * 5
    llm = LLM(
        path, NGramDecodingConfig(max_draft_len=3, min_matching_ngram_size=1) if speculative
        else None, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=64,
        max_num_tokens=14, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=88, tokens_per_block=4),
    )  # fmt: skip
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == oracle.extend(prompt, 24)
        with torch.inference_mode():
            logits = oracle.model(torch.tensor([prompt + completion.token_ids])).logits[0]
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        for token, entry, row in zip(
            completion.token_ids, completion.logprobs, wanted, strict=True
        ):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text", "gemma4_small"])
def test_whole_texts_at_once(tmp_path: Path, family: str) -> None:
    """What training and the doctor run."""
    path = gemma_dir(tmp_path, family)
    model = load_decoder(path, ON_CPU)
    ids = prompt_tensors(97, [30])[0]
    with torch.no_grad():
        hidden = model(ids, torch.arange(30), DensePass(torch.zeros(1, 30, dtype=torch.int64)))
        expected = Oracle(path).model(ids[None]).logits[0]
        torch.testing.assert_close(model.compute_logits(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_small"])
def test_bfloat16_is_as_near_as_transformers(tmp_path: Path, family: str) -> None:
    """The embedding's scale is rounded before it is applied, and norms are taken in fp32."""
    from transformers import AutoModelForCausalLM

    path = gemma_dir(tmp_path, family, seed=2)
    model = load_decoder(path, replace(ON_CPU, dtype=torch.bfloat16))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ids, text = prompt_tensors(97, [30])[0], DensePass(torch.zeros(1, 30, dtype=torch.int64))
    with torch.no_grad():
        embedded = embed(ids, model.embed_tokens, 97, model.config.embedding_scale)
        assert torch.equal(embedded, theirs.model.embed_tokens(ids))
        ours = model.compute_logits(model(ids, torch.arange(30), text))
        rounded, exact = theirs(ids[None]).logits[0], Oracle(path).model(ids[None]).logits[0]
    errors = [(logits - exact).abs().mean().item() for logits in (ours, rounded)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize(
    ("whole", "family", "prefix", "other"),
    [
        ("gemma3", "gemma3_text", "language_model.model.", "vision_tower.x.weight"),
        ("gemma4", "gemma4_text", "model.language_model.", "model.embed_audio.x.weight"),
    ],
)
def test_the_text_model_of_a_larger_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: str, family: str, prefix: str,
    other: str,
) -> None:  # fmt: skip
    path = gemma_dir(tmp_path, family)
    plain = load_decoder(path, ON_CPU)
    raw = json.loads((path / "config.json").read_text())
    dtype = raw.pop("dtype")
    raw = {"model_type": whole, "text_config": raw, "dtype": dtype, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors | {other: torch.zeros(2)}, path / "model.safetensors")
    ours = load_decoder(path, ON_CPU)
    load_kv_scales(ours.config, path)
    assert caplog.text.count("text model is used alone, 1 tensors are left out") == 1
    is_both = whole == "gemma3"  # test_gemma_images.py
    assert ours.config == replace(plain.config, images_attend_both_ways=is_both)
    for (name, one), two in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two), name
    save_file(tensors | {"model.unknown": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.unknown"):
        load_decoder(path, ON_CPU)
    edit_config(path, text_config=None)
    with pytest.raises(CheckpointError, match="text_config=None"):
        load_config(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text", "gemma4_small"])
def test_eagle_heads_draft_for_it_but_are_not_trained(tmp_path: Path, family: str) -> None:
    path = gemma_dir(tmp_path, family, seed=1)
    head = eagle3_dir(tmp_path)
    config = EagleDecodingConfig(
        max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
    )
    llm = LLM(path, config, device="cpu", dtype="float32", max_seq_len=64)
    output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == Oracle(path).extend([5, 6, 7], 20)
    with pytest.raises(ConfigError, match="sandwich_norms, activation"):
        check_target(load_config(path), "eagle3")


def test_gemma4_keys_are_values_only_where_said(tmp_path: Path) -> None:
    path = gemma_dir(tmp_path, "gemma4_text")
    config = load_config(path)
    assert [config.of_layer(i).values_are_keys for i in range(4)] == [False, True, False, True]
    assert [config.of_layer(i).num_kv_heads for i in range(4)] == [2, 3, 2, 3]
    edit_config(path, attention_k_eq_v=False)
    with pytest.raises(CheckpointError, match="lacks 2 of"):
        load_decoder(path, ON_CPU)
    other = gemma_dir(tmp_path, "gemma4_text", attention_k_eq_v=False)
    edit_config(other, attention_k_eq_v=True)
    with pytest.raises(CheckpointError, match="attention_k_eq_v"):
        load_decoder(other, ON_CPU)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*gelu_pytorch_tanh"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'.*gelu_pytorch_tanh"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "left to right"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window=0"),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"head_dim": 32, "rms_norm_eps": 0.1}}},
            "gives layers rms_norm_eps of their own.*allowed .* is head_dim and num_key_value",
        ),
        (
            "gemma4_text",
            {"rope_parameters": {
                S: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
                F: {"rope_type": "proportional", "rope_theta": 900.0},
            }},
            "only with rope_type 'proportional'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {
                S: {"rope_type": "default", "rope_theta": 300.0},
                F: {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0,
                    "original_max_position_embeddings": 64, "truncate": False},
            }},
            "truncate=False in rope_parameters of 'full_attention'.* Remove it",
        ),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    path = edit_config(gemma_dir(tmp_path, family), **change)
    with pytest.raises(CheckpointError, match=message):
        load_config(path)
