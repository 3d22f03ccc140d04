"""The model families by the `model_type` of their config.json: what a family's config means.

A new family is a row of `FAMILIES` and a function that reads its config. Nothing else in trtspec
asks for a model's name.
"""

from __future__ import annotations

from .family import Family
from .llama import llama, mistral, qwen2, qwen3
from .step import step3p5, step3p5_as_qwen3

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", llama),
    "mistral": Family("mistral", mistral),
    "qwen2": Family("qwen2", qwen2),
    "qwen3": Family("qwen3", qwen3),
    "mimo": Family("qwen2", qwen2),  # Qwen2 with MTP layers beside it, under its own name
    "step3p5": Family("qwen3", step3p5, as_hf=step3p5_as_qwen3),
}

__all__ = ["FAMILIES", "Family"]
