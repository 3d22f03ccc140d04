"""Tiny Gemma-4 models with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_gemma import assistant_dir, gemma_dir

from trtspec import MTPDecodingConfig, NGramDecodingConfig

MOE: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def moe_dir(tmp_path: Path, seed: int = 0, layers_weigh: float = 1, **overrides: Any) -> Path:
    """As `gemma_dir`, with scales that make routers choose clearly and weigh experts apart."""
    path = gemma_dir(tmp_path, "gemma4_text", seed=seed, layers_weigh=layers_weigh,
                     **{**MOE, **overrides})  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("router.scale"):
            tensors[name] = 4 + tensor
        elif name.endswith("router.per_expert_scale"):
            tensors[name] = 1 + tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def gemma_moe_config(mode: str, folder: Path) -> Any:
    if mode == "ngram":
        return NGramDecodingConfig(max_draft_len=3, min_matching_ngram_size=1)
    if mode == "assistant":
        head = assistant_dir(folder, "gemma4_text")
        return MTPDecodingConfig(num_nextn_predict_layers=3, speculative_model=head)
    return None
