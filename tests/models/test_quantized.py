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
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from oracle import random_prompts
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from torch import Tensor

from trtspec import LLM, CheckpointError, SamplingParams
from trtspec.checkpoints.dequantized import dequantized
from trtspec.checkpoints.tensors import open_checkpoint

FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]
LEFT_OUT = "model.layers.0.self_attn.o_proj.weight"  # stays as it is


def _is_quantised(name: str) -> bool:
    return "proj.weight" in name and name != LEFT_OUT


def _scale_shape(strategy: str, weight: Tensor, block: int) -> tuple[int, ...]:
    rows, columns = weight.shape
    return {
        "tensor": (1,),
        "channel": (rows, 1),
        "block": (-(-rows // block), -(-columns // block)),
    }[strategy]


def _compressed(strategy: str, kind: str, twin: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors as the package compresses them, and its config; `twin` gets what they are."""
    structure = [16, 16] if strategy == "block" else None
    args = QuantizationArgs(
        num_bits=8, type=kind, strategy=strategy, symmetric=True, block_structure=structure
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in list(twin.items()):
        if not _is_quantised(name):
            tensors[name] = weight
            continue
        shape = _scale_shape(strategy, weight, 16)
        noise = 1 + torch.rand(shape, generator=generator)
        scale = noise * weight.abs().max() / (448 if kind == "float" else 127)
        packed = NaiveQuantizationCompressor.compress(
            {"weight": weight, "weight_scale": scale.bfloat16()}, scheme
        )
        module = name.removesuffix("weight")
        tensors |= {f"{module}{key}": value for key, value in packed.items() if value is not None}
        wide = {**packed, "weight_scale": packed["weight_scale"].float()}
        twin[name] = NaiveQuantizationCompressor.decompress(wide, scheme)["weight"].float()
        tensors[f"{module}input_scale"] = torch.tensor([0.5])
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "float" else "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": [LEFT_OUT.removesuffix(".weight")],
        "quantization_status": "compressed",
    }
    return tensors, config


def _other(form: str, twin: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same in the other formats, by float64."""
    strategy, config, suffix = {
        "fp8": ("tensor", {"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
        "fp8 blocks": (
            "block", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "_scale_inv",
        ),
        "fbgemm_fp8": ("channel", {"quant_method": "fbgemm_fp8"}, "_scale"),
        "modelopt": ("tensor", {"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale"),
        "modelopt rows": ("rows", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "_scale"),
        "modelopt blocks": ("spread", {"quant_algo": "FP8_PB_WO"}, "_scale"),
    }[form]  # fmt: skip
    tensors: Tensors = {}
    for name, weight in list(twin.items()):
        if not _is_quantised(name):
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        if strategy in ("block", "spread"):
            blocks = -(-rows // 128), -(-columns // 128)
            scale = 0.01 * (1 + torch.arange(blocks[0] * blocks[1])).view(blocks)
            wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        else:
            scale = wide = weight.abs().amax(1, keepdim=True) / 448
            if strategy == "tensor":
                scale = wide = weight.abs().max() / 448
        number = (weight / wide).clamp(-448, 448).to(FP8)
        twin[name] = (number.double() * wide.double()).float()
        tensors[name] = number
        scale = scale.view(rows) if strategy == "rows" else scale
        scale = scale[:, None, :, None] if strategy == "spread" else scale
        tensors[f"{name}{suffix}"] = scale
        module = name.removesuffix("weight")
        tensors |= {f"{module}{key}_scale": torch.tensor(0.5) for key in ("input", "k", "v")}
    return tensors, config


def _write(path: Path, tensors: Tensors, config: dict[str, Any] | None) -> None:
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    raw = json.loads((path / "config.json").read_text())
    raw.pop("quantization_config", None)
    if config is not None:
        raw["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(raw))


def _texts(path: Path) -> list[list[int]]:
    llm = LLM(path, device="cpu", dtype="float32", max_seq_len=64)
    outputs = llm.generate(random_prompts(2), SamplingParams(max_tokens=10, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def _check(path: Path, twin: Tensors, tensors: Tensors, config: dict[str, Any] | None) -> None:
    """Every weight is its twin's to rounding, and so is the text."""
    _write(path, twin, None)
    plain = _texts(path)
    _write(path, tensors, config)
    with ExitStack() as stack:
        sources = open_checkpoint(path, stack)
        raw = json.loads((path / "config.json").read_text())
        read = {n: s.read() for n, s in dequantized(sources, raw, path / "config.json").items()}
    assert read.keys() == twin.keys()
    for name, weight in twin.items():
        torch.testing.assert_close(read[name], weight, atol=0, rtol=1e-6)
    assert _texts(path) == plain


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors(tmp_path: Path, strategy: str, kind: str) -> None:
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, config = _compressed(strategy, kind, twin)
    assert any(t.dtype == (FP8 if kind == "float" else torch.int8) for t in tensors.values())
    _check(path, twin, tensors, config)


@pytest.mark.parametrize(
    "form", ["fp8", "fp8 blocks", "fbgemm_fp8", "modelopt", "modelopt rows", "modelopt blocks"]
)
def test_other_formats(tmp_path: Path, form: str) -> None:
    path = tiny_model_dir(tmp_path, hidden_size=144, num_attention_heads=6, num_key_value_heads=2)
    twin = load_file(path / "model.safetensors")
    tensors, config = _other(form, twin)
    _check(path, twin, tensors, config)


def test_a_config_beside_config_json(tmp_path: Path) -> None:
    """ModelOpt's hf_quant_config.json."""
    path = tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    tensors, _ = _other("modelopt", twin)
    _write(path, twin, None)
    plain = _texts(path)
    _write(path, tensors, None)
    beside = path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": []}}))
    assert _texts(path) == plain
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization .*'NVFP4'"):
        _texts(path)


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
        ({**_group(), "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({**_group(), "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (_group(num_bits=4, type="int"), "weights of 4 bits, type 'int'"),
        (_group(symmetric=False, type="int"), "weights of 8 bits"),
        (_group(strategy="group"), "strategy 'group'"),
        (_group(strategy="block", block_structure="16by16"), "block_structure '16by16'"),
        ({**_group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"quant_method": "compressed-tensors"}, "0 kinds of weights"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": ["fp8"]}, "is set, but only"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = tiny_model_dir(tmp_path)
    _write(path, load_file(path / "model.safetensors"), config)
    with pytest.raises(CheckpointError, match=said):
        _texts(path)


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
    tensors, config = _other("modelopt", load_file(path / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors.pop(name)
    if scale is not None:
        tensors[name] = scale
    _write(path, tensors, config)
    with pytest.raises(CheckpointError, match=said):
        _texts(path)
