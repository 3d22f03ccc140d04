"""Tiny checkpoints made for an FP8 KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from torch import Tensor

COMPRESSED = {
    "quant_method": "compressed-tensors", "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}  # fmt: skip


def scaled_dir(
    folder: Path, form: str, config: dict[str, Any], k: Tensor, v: Tensor
) -> Path:  # fmt: skip
    """A tiny model (3 layers of 2 KV heads) with scales for its KV cache.

    Args:
        form: names of the tensors of k and v, below self_attn.
        config: quantization_config, or with "quantization" hf_quant_config.json.
        k, v: [3, …] by layer.
    """
    path = tiny_model_dir(folder)
    tensors = load_file(path / "model.safetensors")
    for name, scales in zip(form.split(), (k, v), strict=True):
        for layer, scale in enumerate(scales):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scale.clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if "quantization" in config:
        (path / "hf_quant_config.json").write_text(json.dumps(config))
    elif config:
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return path
