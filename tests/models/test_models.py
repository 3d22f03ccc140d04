"""Configs, RoPE tables and target logits against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from oracle import logit_error, prompt_tensors
from safetensors.torch import load_file, save_file
from tiny import LONG, LONG_PHI, prefill_metadata, tiny_model_dir
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.config import DecoderConfig
from trtspec.models.rope import build_cos_sin

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

TYPES = ["full_attention", "sliding_attention", "full_attention"]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    ("llama", {"rope_parameters": YARN, "attention_bias": True}),
    ("llama", {"rope_parameters": LINEAR, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    ("mistral", {"sliding_window": None, "head_dim": 16}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": 7, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    ("phi3", LONG_PHI),
    (
        "llama",
        {
            "rope_parameters": LONG | {"partial_rotary_factor": 1.0, "attention_factor": 1.4},
            "head_dim": 12,
        },
    ),
    ("seed_oss", {"head_dim": 16}),
    ("seed_oss", {"head_dim": 8, "attention_bias": False, "attention_out_bias": True}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 7}),
    ("olmo2", {"attention_bias": True}),
    ("olmo2", {"rope_parameters": YARN, "num_key_value_heads": 6}),
    ("olmo3", {"sliding_window": 7, "layer_types": TYPES}),
    (
        "olmo3",
        {
            "sliding_window": 7,
            "layer_types": TYPES,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    ("exaone4", {"sliding_window": 7, "layer_types": TYPES}),
    (
        "exaone4",
        {
            "sliding_window": None,
            "rope_parameters": LLAMA3,
            "layer_types": ["full_attention"] * 3,
        },
    ),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, family, **overrides)
    error, spread = logit_error(path, prompt_tensors(97))
    assert spread > 0.5  # flat logits would agree whatever the model does
    assert error < 1e-4


SCALED = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
SCALED3 = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("family", "options", "fields"),
    [
        # transformers makes a `ministral` model of it.
        ("mistral", {"sliding_window": 4}, {"layer_types": TYPES}),
        ("mistral", {"sliding_window": 4}, {"layer_types": TYPES, "model_type": "ministral"}),
        # Beside the RoPE parameters it counts as well.
        ("llama", {}, {"rope_parameters": SCALED, "original_max_position_embeddings": 64}),
        ("qwen3", {}, {"rope_parameters": SCALED3, "original_max_position_embeddings": 64}),
        (
            "llama",
            {},
            {
                "rope_parameters": None,
                "rope_theta": 500.0,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_fields_as_files_have_them(
    tmp_path: Path, family: str, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The file is written by hand: transformers' config classes would move these fields."""
    path = tiny_model_dir(tmp_path, family, **options)
    raw = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    error, spread = logit_error(path, prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


def test_shared_weights_under_the_head_s_name_alone(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    error, _ = logit_error(path, prompt_tensors(97))
    assert error < 1e-4


def test_a_config_that_does_not_say_whether_weights_are_shared(tmp_path: Path) -> None:
    """transformers' class for the text part of Qwen2.5-VL has no such field: they are not."""
    raw = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 97,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not load_config(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    ("model_type", "inner", "outer", "tied"),
    [
        ("qwen2_5_vl", True, False, True), ("qwen2_vl", True, False, True),
        ("qwen2_5_vl", False, True, True), ("qwen2_5_vl", False, False, False),
        ("gemma3", True, False, False), ("gemma3", False, True, True),
    ],
)  # fmt: skip
def test_which_config_of_two_says_that_weights_are_shared(
    tmp_path: Path, model_type: str, inner: bool, outer: bool, tied: bool
) -> None:
    """Both of a model with images have the field. transformers' own class is asked, too."""
    text = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
        "tie_word_embeddings": inner,
    }  # fmt: skip
    raw = {"model_type": model_type, "text_config": text, "tie_word_embeddings": outer}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).tie_word_embeddings == tied
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings == tied


@pytest.mark.parametrize("change", ["sliding_window", "rope", "eps"])
def test_the_comparison_notices_config(tmp_path: Path, change: str) -> None:
    """What one config field does to the logits is far above the tolerance used above."""
    path = tiny_model_dir(tmp_path, "mistral", sliding_window=7)
    prompts = torch.cat(prompt_tensors(97, [37]))
    logits = []
    for changed in (False, True):
        if changed:
            raw = json.loads((path / "config.json").read_text())
            raw |= {
                "sliding_window": {"sliding_window": None},
                "rope": {"rope_parameters": LINEAR},
                "eps": {"rms_norm_eps": 1e-2},
            }[change]
            (path / "config.json").write_text(json.dumps(raw))
        model = load_decoder(path, ON_CPU)
        meta, positions = prefill_metadata(model.config, [37])
        with torch.no_grad():
            logits.append(model.compute_logits(model(prompts, positions, meta)))
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_out_of_vocabulary_rows_are_harmless(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    model = load_decoder(path, ON_CPU)
    meta, positions = prefill_metadata(model.config, [3])
    assert model(torch.tensor([1, -1, 97]), positions, meta).isfinite().all()


# -- RoPE ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        LLAMA3,
        LINEAR,
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "attention_factor": 1.5, "truncate": False},
    ],
)
def test_rope_table_is_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, rope_parameters=rope, head_dim=32)
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])  # [1, 256, 32], halves repeated
    table = build_cos_sin(load_config(path))
    assert table.shape == (256, 32) and table.dtype == torch.float32
    assert torch.equal(table[:, :16], cos[0, :, :16])
    assert torch.equal(table[:, 16:], sin[0, :, :16])


def test_rope_table_ignores_the_default_device(tmp_path: Path) -> None:
    config = load_config(tiny_model_dir(tmp_path, rope_parameters=LLAMA3))
    with torch.device("meta"):
        assert build_cos_sin(config).device.type == "cpu"


def test_rope_refuses_an_unknown_type() -> None:
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"), 8
    )
    config = DecoderConfig(
        **sizes,
        num_kv_heads=8,
        head_dim=8,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    with pytest.raises(ConfigError, match=r"'dynamic'.*allowed are default, linear"):
        build_cos_sin(config)


# -- load_config --------------------------------------------------------------------------------
def _write(path: Path, **fields: Any) -> Path:
    """A config.json as old checkpoints have it, with `fields` on top."""
    raw = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **fields,
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_old_rope_fields(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    config = load_config(_write(tmp_path, rope_theta=5e5, rope_scaling=scaling))
    assert config.rope_parameters["rope_type"] == "linear"
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rope_parameters["factor"] == 2.0
    assert load_config(_write(tmp_path)).rope_parameters["rope_theta"] == 1e4
    llama3 = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    config = load_config(_write(tmp_path, rope_theta=5e5, rope_scaling=llama3))
    assert config.rope_parameters == {**LLAMA3, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, (False, False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False, False, False)),
        ({"model_type": "qwen2"}, (True, False, False, False)),
        ({"model_type": "qwen3"}, (False, False, False, True)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False, True)),
    ],
)
def test_flags(tmp_path: Path, fields: dict[str, Any], flags: tuple[bool, ...]) -> None:
    config = load_config(_write(tmp_path, **fields))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == flags
    assert config.raw["hidden_size"] == 48


@pytest.mark.parametrize(
    ("fields", "head_dim"),
    [
        ({}, 8),
        ({"head_dim": None}, 8),
        ({"head_dim": 32}, 32),
        ({"model_type": "qwen2"}, 8),
        ({"model_type": "qwen3"}, 128),
        ({"model_type": "mistral"}, 8),
    ],
)
def test_head_dim(tmp_path: Path, fields: dict[str, Any], head_dim: int) -> None:
    assert load_config(_write(tmp_path, **fields)).head_dim == head_dim


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 5}, (None,) * 4),  # llama has none
        ({"model_type": "mistral", "sliding_window": 5}, (5,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),  # the family's default
        ({"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 1}, (None,) * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 5),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (5, None, 5, None),
        ),
    ],
)
def test_windows(tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert load_config(_write(tmp_path, **fields)).layer_windows == windows


def test_eos_is_the_union_of_both_files(tmp_path: Path) -> None:
    _write(tmp_path, eos_token_id=7)
    assert load_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_config(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    _write(tmp_path, eos_token_id=[5, 6])
    assert load_config(tmp_path).eos_token_ids == (5, 6, 4)
    (tmp_path / "generation_config.json").write_text("{}")
    _write(tmp_path, eos_token_id=None)
    assert load_config(tmp_path).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"eos_token_id='</s>'"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({}, "float32")],
)
def test_dtype(tmp_path: Path, fields: dict[str, Any], dtype: str) -> None:
    assert load_config(_write(tmp_path, **fields)).dtype == dtype


QWEN_SLIDING = {"model_type": "qwen3", "sliding_window": 5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2'.*llama, .*mistral, .*qwen3, .*, gemma3, "),
        ({"is_causal": False}, r"is_causal=False .* generates no text"),
        ({"model_type": None}, r"model_type=None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic'.*default, linear"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            r"short_factor",
        ),
        (
            {"rope_parameters": LONG | {"partial_rotary_factor": 1}},
            r"short_factor has 6 values; it",
        ),
        (
            {"rope_parameters": LONG | {"partial_rotary_factor": 1, "short_factor": [1.0, 0] * 4}},
            r"short_factor has 8 values; it must be a list of \d+ positive numbers",
        ),
        ({"rope_parameters": {"rope_type": "new", "rope_theta": 1e4}}, r"rope_type='new'"),
        ({"rope_scaling": {"type": "linear"}}, r"cannot read.*factor"),
        (
            {**QWEN_SLIDING, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"one flat object",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, r"'gptq'.*unquantised"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*'silu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            r"partial_rotary_factor=0.25",
        ),
        (
            {"per_layer_config": {"1": {"hidden_act": "gelu", "rms_norm_eps": 0.1}}},
            r"gives layers hidden_act, rms_norm_eps of their own.*'llama' is none",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 6},
            r"no layer of this model has a window \(model_type='llama'\)",
        ),
        ({"num_key_value_heads": 4}, r"num_attention_heads=6 .* num_key_value_heads=4"),
        ({"head_dim": 3}, r"head_dim=3 must be even"),
        ({"hidden_size": "48"}, r"cannot read.*hidden_size"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window=0"),
        ({**QWEN_SLIDING, "layer_types": ["sliding_attention"] * 4}, r"use_sliding_window=False"),
        ({**QWEN_SLIDING, "layer_types": ["full_attention"] * 3}, r"layer_types|num_hidden_layers"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(_write(tmp_path, **fields))
    assert "config.json" in str(caught.value)


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json"):
        load_config(tmp_path)
    for text, message in (("{", "cannot be read as JSON"), ("[1]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_config(tmp_path)
