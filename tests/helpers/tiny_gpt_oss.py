"""Tiny random gpt-oss targets, with float experts and with MXFP4 ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_gemma import edit_config

FIELDS: dict[str, Any] = {
    "intermediate_size": 40, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
    "sliding_window": 7, "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": False,
    },
}  # fmt: skip
"""The limit is so low that it clamps."""
BY_GROUPS = {"hidden_size": 64, "intermediate_size": 192}


def gpt_oss_dir(tmp_path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Experts are floats, as bf16 copies of the public checkpoints have them."""
    return tiny_model_dir(tmp_path, "gpt_oss", seed, **{**FIELDS, **overrides})


def mxfp4_dir(tmp_path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Experts are MXFP4, as of the public checkpoints; every code occurs, and many scales."""
    path = gpt_oss_dir(tmp_path, seed, **{**BY_GROUPS, **overrides})
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # [E, in, out]
        groups = experts, rows, columns // 32
        blocks = torch.randint(256, (*groups, 16), generator=generator)
        scales = 127 - torch.randint(3, 6, groups, generator=generator)
        tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    edit_config(path, quantization_config=quantization)
    return path
