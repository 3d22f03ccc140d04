"""The model families by the `model_type` of their config.json: what a family's config means.

A new family is a row of `FAMILIES` and a function that reads its config. Nothing else in trtspec
asks for a model's name.
"""

from __future__ import annotations

from .family import Family
from .gemma import gemma2, gemma3, gemma4
from .llama import llama, mistral, qwen2, qwen3

_GELU = ("gelu_pytorch_tanh",)
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", llama),
    "mistral": Family("mistral", mistral),
    "qwen2": Family("qwen2", qwen2),
    "qwen3": Family("qwen3", qwen3),
    "mimo": Family("qwen2", qwen2),  # Qwen2 with MTP layers beside it, under its own name
    "gemma2": Family("gemma2", gemma2, _GELU),
    "gemma3_text": Family("gemma3_text", gemma3, _GELU, has_rope_by_type=True),
    "gemma4_unified_text": Family(
        "gemma4_unified_text", gemma4, _GELU, has_partial_rotary=True, has_rope_by_type=True
    ),
    "gemma4_text": Family(
        "gemma4_text", gemma4, _GELU, has_partial_rotary=True, has_rope_by_type=True
    ),
}

__all__ = ["FAMILIES", "Family"]
