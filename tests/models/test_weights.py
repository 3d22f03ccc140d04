"""Strict loading: every way a checkpoint can be wrong is an error that names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint import edit_tensors, set_config
from guided import save_tokenizer
from loading import ON_CPU
from safetensors.torch import load_file, save_file
from tiny import prefill_metadata, tiny_model_dir
from torch import Tensor

from trtspec import LLM
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.tokenizer import load_tokenizer
from trtspec.checkpoints.weights import load_decoder, load_weights
from trtspec.errors import CheckpointError
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.models.decoder import Decoder

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def _load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(path, replace(ON_CPU, dtype=dtype))


def _shard(path: Path, parts: int = 3) -> dict[str, str]:
    """Splits model.safetensors into shards with an index; returns its weight_map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        chosen = {name: tensors[name] for name in names[part::parts]}
        save_file(chosen, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def _logits(model: Decoder) -> Tensor:
    meta, positions = prefill_metadata(model.config, [9], dtype=model.norm.weight.dtype)
    with torch.no_grad():
        return model.compute_logits(model(torch.arange(3, 12), positions, meta))


def test_rows_of_the_packed_matrices(tmp_path: Path) -> None:
    """Without packing for oneDNN: q, k, v and gate, up are stacked in that order."""
    path = tiny_model_dir(tmp_path, attention_bias=True, mlp_bias=True)
    raw = load_file(path / "model.safetensors")
    Linear.pack, pack = lambda self: None, Linear.pack  # type: ignore[method-assign]
    try:
        model = _load(path)
    finally:
        Linear.pack = pack  # type: ignore[method-assign]
    for i, layer in enumerate(model.layers):
        for leaf in ("weight", "bias"):
            base = f"model.layers.{i}."
            qkv = [raw[f"{base}self_attn.{x}_proj.{leaf}"] for x in "qkv"]
            assert torch.equal(getattr(layer.self_attn.qkv_proj, leaf), torch.cat(qkv))
            gate_up = [raw[f"{base}mlp.{x}_proj.{leaf}"] for x in ("gate", "up")]
            assert torch.equal(getattr(layer.mlp.gate_up_proj, leaf), torch.cat(gate_up))
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_equals_single(tmp_path: Path, tied: bool) -> None:
    path = tiny_model_dir(tmp_path, tie_word_embeddings=tied)
    expected = _logits(_load(path))
    _shard(path)
    assert torch.equal(_logits(_load(path)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_packing(tmp_path: Path, dtype: torch.dtype) -> None:
    model = _load(tiny_model_dir(tmp_path, tie_word_embeddings=True), dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.embed_tokens.weight.shape == (97, 48)  # the embedding outlives lm_head's packing
    assert next(model.rope_tables.buffers()).dtype == torch.float32
    probe = Linear(8, 8, bias=False).to(dtype)
    probe.pack()
    if probe.weight is None:  # this CPU packs this dtype: then everything is packed
        linears = [m for m in model.modules() if isinstance(m, Linear)]
        assert len(linears) == 4 * 3 + 1 and all(m.weight is None for m in linears)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 2 * 3 + 1
    assert all((norm.twice is None) == (dtype == torch.float32) for norm in norms)
    assert _logits(model).dtype == dtype


def test_a_model_with_storage_is_refilled(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    expected = _load(path)
    model = Decoder(expected.config, TorchAttention()).eval()  # uninitialised, not meta
    load_weights(model, path, ON_CPU)
    assert torch.equal(_logits(model), _logits(expected))


def test_allowed_surplus(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, tie_word_embeddings=True)
    expected = _logits(_load(path))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(path, add)
    assert torch.equal(_logits(_load(path)), expected)
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"][5, 5].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs .*tie_word_embeddings"):
        _load(path)


def test_nan_weights_are_not_the_loader_s_business(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    assert _logits(_load(path)).isnan().all()


def test_missing_tensors(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 of 30 .*layers.1.self_attn.k_proj.weight"):
        _load(path)
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if "layers.2.mlp" in name])
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if "layers.2.self" in name])
    with pytest.raises(CheckpointError, match=r"lacks 8 of 30 tensors: .* and 3 more"):
        _load(path)


def test_missing_head_hints_at_tying(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*tie_word_embeddings: true"):
        _load(path)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"]
)
def test_surplus_tensors(tmp_path: Path, name: str) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=rf"holds 1 tensors .*{name}"):
        _load(path)


@pytest.mark.parametrize(
    ("name", "shape", "fields"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (40, 48), "num_attention_heads, head_dim"),
        ("model.layers.0.self_attn.v_proj.weight", (48, 48), "num_key_value_heads, head_dim"),
        ("model.layers.2.mlp.down_proj.weight", (80, 48), "intermediate_size"),
        ("model.embed_tokens.weight", (96, 48), "vocab_size"),
        ("lm_head.weight", (97, 40), "vocab_size"),
        ("model.norm.weight", (47,), "hidden_size"),
        ("model.layers.0.input_layernorm.weight", (1, 48), "hidden_size"),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...], fields: str) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError, match=rf"{name} .*Check {fields}") as caught:
        _load(path)
    assert str(list(shape)) in str(caught.value)


def test_config_of_another_model(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    set_config(path, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match=r"\[16, 48\].*\[24, 48\].*num_key_value_heads"):
        _load(path)


def test_quantised_tensors(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight .*dtype I8.*F32"):
        _load(path)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    path = tiny_model_dir(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else int(keep)])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a complete"):
        _load(path)


def test_junk_file(tmp_path: Path) -> None:
    """A pointer of Git LFS would come again with the next clone."""
    path = tiny_model_dir(tmp_path)
    for junk, said in (
        (b"what is this" * 50, "is not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "of Git LFS.*: run git lfs pull in its"),
    ):
        (path / "model.safetensors").write_bytes(junk)
        with pytest.raises(CheckpointError, match=said):
            _load(path)


def test_no_weights(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights in .*model.safetensors.index.json"):
        _load(path)
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        _load(path)


def test_index_with_a_missing_shard(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    _shard(path)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards .*model-00002-of-00003"):
        _load(path)


def test_index_that_does_not_match(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    weight_map = _shard(path)
    moved = {**weight_map, "lm_head.weight": "model-00003-of-00003.safetensors"}
    assert moved != weight_map
    (path / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"00003.safetensors lacks lm_head.weight"):
        _load(path)
    first = path / "model-00001-of-00003.safetensors"
    save_file({**load_file(first), "model.norm.weight": torch.ones(48)}, first)
    second = path / weight_map["model.norm.weight"]
    assert second != first
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"repeats model.norm.weight"):
        _load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"a into '../b.safetensors'"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    path = tiny_model_dir(tmp_path)
    (path / "model.safetensors").unlink()
    (path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        _load(path)


@pytest.mark.parametrize(
    "edit",
    [
        {"num_attention_heads": 0}, {"vocab_size": -5}, {"max_position_embeddings": 10**11},
        {"num_hidden_layers": -1}, {"rms_norm_eps": None}, {"eos_token_id": "x"},
        {"dtype": "foo"}, {"model_type": ["llama"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}},
    ],
)  # fmt: skip
def test_nonsense_in_config_json_is_a_checkpoint_error(
    tmp_path: Path, edit: dict[str, object]
) -> None:
    """Whatever a broken config.json makes transformers raise, the user hears which file it is."""
    path = tiny_model_dir(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | edit))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(path, device="cpu")


def test_a_damaged_tokenizer_names_the_tokenizer(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    (path / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer in"):
        LLM(path, device="cpu")


def test_a_tokenizer_whose_limit_is_no_number_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "x"}))
    with pytest.raises(CheckpointError, match="model_max_length='x'; it must be a number"):
        load_tokenizer(tmp_path)
