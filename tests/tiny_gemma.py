"""Tiny random Gemma models, and Gemma-4 assistants in their public format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir

S, F = "sliding_attention", "full_attention"
ROPES = {
    S: {"rope_type": "default", "rope_theta": 300.0},
    F: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 9,
        "num_hidden_layers": 4, "layer_types": [S, S, F, S], "rope_parameters": ROPES,
        "final_logit_softcapping": 4.0,
    },
    "gemma4_text": {
        "sliding_window": 7, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
        "num_global_key_value_heads": 3, "attention_k_eq_v": True, "layer_types": [S, F, S, F],
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": 4.0,
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 300.0},
            F: {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
        },
    },
}  # fmt: skip


def gemma_dir(tmp_path: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A tiny model with tied embeddings; of Gemma-4 the layers' scalars are random too."""
    fields = {"tie_word_embeddings": True, **GEMMA[family], **overrides}
    path = tiny_model_dir(tmp_path, family, seed=seed, **fields)
    if family == "gemma4_text":
        _randomize_scalars(path, seed)
    return path


def _randomize_scalars(path: Path, seed: int) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for name in tensors:
        if name.endswith("layer_scalar"):
            tensors[name] = 0.5 + torch.rand(1, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(path: Path, **fields: Any) -> Path:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    return path
