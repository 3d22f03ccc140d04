"""Weights of 4 bits that stay so: products of exact values, also over ranks.

Engines keep them on Hopper in bf16. Here they are kept on the CPU in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from four_bits import Form, four_bits
from kept_four_bits import KEPT, has_kernels, load, logits_of
from quantized import write
from safetensors.torch import load_file
from thread_ranks import ThreadRanks
from tiny import tiny_model_dir
from torch import Tensor

from trtspec.checkpoints.place import WeightForm
from trtspec.distributed.comm import Communicator
from trtspec.distributed.parallel import Parallel
from trtspec.layers.linear import Linear
from trtspec.models.decoder import Decoder

FORMS = [
    Form("pack-quantized"), Form("pack-quantized", group=64, symmetric=False, dtype=torch.bfloat16),
    Form("pack-quantized", group=-1), Form("awq", group=128, symmetric=False), Form("gptq"),
    Form("gptq", group=128, version="gptq_v2"), Form("nvfp4-pack-quantized"), Form("modelopt"),
]  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
    "num_hidden_layers": 2, "moe_intermediate_size": 128,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "phi3": {}, "qwen3_moe": {"head_dim": 64},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64,
    },
}  # fmt: skip


def _of_family(name: str, path: Path) -> Path:
    return tiny_model_dir(path, name, **SIZES, **MORE[name])


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernels(monkeypatch, True)


def _kept_products(model: Decoder) -> set[str]:
    named = model.named_modules()
    return {n.rpartition(".")[2] for n, m in named if isinstance(m, Linear) and m.four_bits}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_are_those_of_floats(tmp_path: Path, form: Form) -> None:
    path = _of_family("llama", tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(form, twin, random=form.method != "modelopt")
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)
    model = load(path, KEPT)
    assert _kept_products(model) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3], FORMS[6]], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_families_over_ranks(tmp_path: Path, name: str, form: Form, size: int) -> None:
    """A rank's part that kernels do not read is FP8 or floats."""
    path = _of_family(name, tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(form, twin)
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)

    def of_rank(comm: Communicator) -> tuple[Tensor, set[str]]:
        model = load(path, KEPT, Parallel(comm))
        return logits_of(model), _kept_products(model)

    for logits, kept in ThreadRanks(size).run(of_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert len(kept) >= 2 and (name == "deepseek_v3" or "qkv_proj" in kept)


@pytest.mark.parametrize("form", [FORMS[2], FORMS[4]], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_activations_stay_floats_without_kernels(
    tmp_path: Path, form: Form, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row has one scale, or a rank's part of it: weights are FP8 with groups then."""
    has_kernels(monkeypatch, False)
    path = _of_family("llama", tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(form, twin)
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)

    def of_rank(comm: Communicator) -> tuple[Tensor, int]:
        model = load(path, KEPT, Parallel(comm))
        return logits_of(model), sum(isinstance(m, Linear) and bool(m.fp8) for m in model.modules())

    for logits, count in ThreadRanks(size).run(of_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert count >= 6


def test_groups_that_do_not_divide_a_row(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, **{**SIZES, "intermediate_size": 640})
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(
        Form("gptq", group=256), twin, lambda name: "down_proj" in name, random=True
    )
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)
    model = load(path, KEPT)
    assert _kept_products(model) == {"down_proj"}
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


def test_what_kernels_do_not_read_is_no_longer_four_bits(tmp_path: Path) -> None:
    """Rows of 192 numbers, and scales with more digits than an entry has."""
    path = tiny_model_dir(tmp_path, **{**SIZES, "hidden_size": 192})
    twin = load_file(path / "model.safetensors")
    write(path, *four_bits(Form("pack-quantized"), twin))
    assert _kept_products(load(path, KEPT)) == {"down_proj"}
    path = _of_family("llama", tmp_path / "digits")
    twin = load_file(path / "model.safetensors")
    write(path, *four_bits(Form("pack-quantized", dtype=torch.float32), twin))
    model = load(path, KEPT)
    assert not _kept_products(model)
    assert all(m.fp8 for m in model.layers[1].modules() if isinstance(m, Linear))
