"""Quantised checkpoints are their dequantised twins.

What weights are is said by the `compressed-tensors` package for its format, by float64 for others.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantized import FP8, Tensors, compressed, other, texts_of, write
from safetensors.torch import load_file
from tiny import tiny_model_dir
from tiny_gemma_moe import moe_dir
from torch import Tensor

from trtspec import LLM, CheckpointError
from trtspec.checkpoints.dequantized import dequantized
from trtspec.checkpoints.tensors import open_checkpoint


def _check(path: Path, twin: Tensors, tensors: Tensors, config: dict[str, Any] | None) -> None:
    """Every weight is its twin's to rounding, and so is the text."""
    write(path, twin, None)
    plain = texts_of(path)
    write(path, tensors, config)
    with ExitStack() as stack:
        sources = open_checkpoint(path, stack)
        raw = json.loads((path / "config.json").read_text())
        read = {n: s.read() for n, s in dequantized(sources, raw, path / "config.json").items()}
    assert read.keys() == twin.keys()
    for name, weight in twin.items():
        torch.testing.assert_close(read[name], weight, atol=0, rtol=1e-6)
    assert texts_of(path) == plain


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors(tmp_path: Path, strategy: str, kind: str) -> None:
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = compressed(strategy, kind, twin)
    assert any(t.dtype == (FP8 if kind == "float" else torch.int8) for t in tensors.values())
    _check(path, twin, tensors, config)


@pytest.mark.parametrize(
    "form",
    [
        "fp8",
        "fp8 inverse",
        "fp8 blocks",
        "fbgemm_fp8",
        "modelopt",
        "modelopt rows",
        "modelopt blocks",
    ],
)
def test_other_formats(tmp_path: Path, form: str) -> None:
    path = tiny_model_dir(tmp_path, hidden_size=144, num_attention_heads=6, num_key_value_heads=2)
    twin = load_file(path / "model.safetensors")
    tensors, config = other(form, twin)
    _check(path, twin, tensors, config)


@pytest.mark.parametrize("size", [1000, 10**13, 10**30])
def test_a_block_larger_than_every_weight(tmp_path: Path, size: int) -> None:
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = other("fp8 inverse", twin)
    for name, scale in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = scale.view(1, 1)
    _check(path, twin, tensors, {**config, "weight_block_size": [size, size]})


@pytest.mark.parametrize("kind", ["float", "int"])
def test_what_is_said_of_activations_is_left_out(tmp_path: Path, kind: str) -> None:
    """Zero points of asymmetric ones, too, and the scales of a stack of experts."""
    path = moe_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = compressed("channel", kind, twin)
    zero = torch.ones(1).to(FP8 if kind == "float" else torch.int8)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj"
        tensors |= {f"{name}.{what}_zero_point": zero.clone() for what in ("input", "output")}
        experts = f"model.layers.{layer}.experts"
        for stack in ("gate_up_proj", "down_proj"):
            tensors[f"{experts}.{stack}_activation_scale"] = torch.full((6,), 0.5)
            tensors[f"{experts}.{stack}_input_scale"] = torch.full((6,), 0.5)
    _check(path, twin, tensors, config)


def test_groups_of_activations_alone_are_left_out(tmp_path: Path) -> None:
    """As the `compressed-tensors` package describes quantised attention."""
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
    scheme = QuantizationScheme(targets=["LlamaAttention"], input_activations=args)
    of_attention = json.loads(scheme.model_dump_json())
    assert of_attention["weights"] is None
    scales = {
        f"model.layers.{layer}.self_attn.{what}_scale": torch.tensor([0.05])
        for layer in range(3)
        for what in "qkv"
    }
    tensors, config = compressed("channel", "float", twin)
    config["config_groups"]["group_1"] = of_attention
    _check(path, twin, tensors | scales, config)
    alone = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"group_0": of_attention},
        "kv_cache_scheme": args.model_dump(),
    }
    write(path, twin, alone | {"kv_cache_scheme": None})
    with pytest.raises(CheckpointError, match="0 kinds of weights"):
        texts_of(path)
    write(path, twin | scales, alone)
    llm = LLM(path, device="cpu", dtype="float32", max_seq_len=64)
    (group,) = llm.executor.kv_cache.groups
    assert group.k_cache.dtype == FP8 and (group.k_scales == 0.05).all()


def test_a_config_beside_config_json(tmp_path: Path) -> None:
    """ModelOpt's hf_quant_config.json."""
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, _ = other("modelopt", twin)
    write(path, twin, None)
    plain = texts_of(path)
    write(path, tensors, None)
    beside = path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": []}}))
    assert texts_of(path) == plain
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization .*'NVFP4_AWQ'"):
        texts_of(path)


def _group(**weights: Any) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**usual, **weights}}},
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**_group(), "format": "pack-quantized"}, "type 'float', in pack-quantized"),
        ({**_group(), "format": "nvfp4-pack-quantized"}, "8 bits, type 'float', in nvfp4-pack"),
        (_group(num_bits=4, type="int"), "weights of 4 bits, type 'int'"),
        (_group(symmetric=False, type="int"), "weights of 8 bits"),
        (_group(strategy="group"), "strategy 'group'"),
        (_group(strategy="block", block_structure="16by16"), "block_structure '16by16'"),
        (_group(strategy="block", block_structure="16x\u00b2"), "block_structure '16x"),
        ({**_group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"quant_method": "compressed-tensors"}, "0 kinds of weights"),
        ({**_group(), "transform_config": {"config_groups": {"R4": {}}}}, "are rotated while"),
        ({**_group(), "config_groups": {"FP8": ["Linear"]}}, "a field of another kind"),
        ({**_group(), "sparsity_config": "dense"}, "a field of another kind"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "gptq", "bits": 2}, "'gptq', 'bits': 2"),
        ({"quant_method": ["fp8"]}, "is set, but only"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = tiny_model_dir(tmp_path)
    write(path, load_file(path / "model.safetensors"), config)
    with pytest.raises(CheckpointError, match=said):
        texts_of(path)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.ones(7), r"has shape \[7\] .* must be \[\] or \[1\] or \[80\] or \[80, 1\] of F64"),
        (torch.ones(1).int(), "dtype I32; for a weight"),
        (None, "but there is no model.layers.0.mlp.up_proj.weight_scale"),
    ],
)
def test_scales_that_do_not_fit(tmp_path: Path, scale: Tensor | None, said: str) -> None:
    path = tiny_model_dir(tmp_path)
    tensors, config = other("modelopt", load_file(path / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors.pop(name)
    if scale is not None:
        tensors[name] = scale
    write(path, tensors, config)
    with pytest.raises(CheckpointError, match=said):
        texts_of(path)


@pytest.mark.parametrize("form", ["fp8", "fp8 inverse", "fp8 blocks"])
def test_two_scales_of_one_weight_are_refused(tmp_path: Path, form: str) -> None:
    path = tiny_model_dir(tmp_path)
    tensors, config = other(form, load_file(path / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    scale = tensors.get(name, tensors.get(f"{name}_inv"))
    assert scale is not None
    write(path, {**tensors, name: scale, f"{name}_inv": 1 / scale}, config)
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale.* and .*; a weight has one"):
        texts_of(path)
