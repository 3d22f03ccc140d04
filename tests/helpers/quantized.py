"""Quantised twins of checkpoints, in each format that is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from oracle import random_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtspec import LLM, SamplingParams

FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]
LEFT_OUT = "model.layers.0.self_attn.o_proj.weight"  # stays as it is


def is_quantised(name: str) -> bool:
    return "proj.weight" in name and name != LEFT_OUT


def _scale_shape(strategy: str, weight: Tensor, block: tuple[int, int]) -> tuple[int, ...]:
    rows, columns = weight.shape
    return {
        "tensor": (1,),
        "channel": (rows, 1),
        "block": (-(-rows // block[0]), -(-columns // block[1])),
    }[strategy]


def compressed(strategy: str, kind: str, twin: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors as the package compresses them, and its config; `twin` gets what they are."""
    structure = [16, 32] if strategy == "block" else None
    args = QuantizationArgs(
        num_bits=8, type=kind, strategy=strategy, symmetric=True, block_structure=structure
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in list(twin.items()):
        if not is_quantised(name):
            tensors[name] = weight
            continue
        shape = _scale_shape(strategy, weight, (16, 32))
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


def other(form: str, twin: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same in the other formats, by float64."""
    strategy, config, suffix = {
        "fp8": ("tensor", {"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
        "fp8 inverse": ("tensor", {"quant_method": "fp8"}, "_scale_inv"),
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
        if not is_quantised(name):
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
        beside = "input", "activation", "k", "v"
        tensors |= {f"{module}{key}_scale": torch.tensor(0.5) for key in beside}
    return tensors, config


def write(path: Path, tensors: Tensors, config: dict[str, Any] | None) -> None:
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


def to_blocks(path: Path, block: tuple[int, int]) -> Path:
    """Makes the layers' matrices and stacks of them FP8 with scales of blocks, as HF's `fp8`.

    Returns:
        A directory with the floats that they then are.
    """
    twin = load_file(path / "model.safetensors")
    tensors, generator = {}, torch.Generator().manual_seed(2)
    for name, weight in list(twin.items()):
        if not re.search(r"layers\.\d+\..*(proj.*|\.w[123])\.weight$", name):
            tensors[name] = weight
            continue
        *stack, rows, columns = weight.shape
        grid = (*stack, -(-rows // block[0]), -(-columns // block[1]))
        scale = (0.5 + torch.rand(grid, generator=generator)) * weight.abs().max() / 400
        wide = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        wide = wide.repeat_interleave(block[1], -1)[..., :columns]
        tensors[name] = (weight / wide).clamp(-448, 448).to(FP8)
        twin[name] = (tensors[name].double() * wide.double()).float()
        tensors[f"{name}_scale_inv"] = scale
    floats = path.parent / f"{path.name}-floats"
    floats.mkdir()
    (floats / "config.json").write_text((path / "config.json").read_text())
    write(floats, twin, None)
    write(path, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
    return floats


def texts_of(path: Path) -> list[list[int]]:
    """Greedy texts of a model on the CPU."""
    llm = LLM(path, device="cpu", dtype="float32", max_seq_len=64)
    outputs = llm.generate(random_prompts(2), SamplingParams(max_tokens=10, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]
