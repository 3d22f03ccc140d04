"""gpt-oss (arXiv:2508.10925): windows in every second layer, attention sinks, and in every layer a
mixture of experts with biases and a clamped activation of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .llama import windows_by_type
from .moe import gpt_oss_moe


def gpt_oss(hf: Any, where: Path) -> dict[str, Any]:
    bias = bool(hf.attention_bias)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "attention_sinks": True,
        "sinks_name": "sinks",
        "layer_windows": windows_by_type(hf, where),
        "moe": gpt_oss_moe(hf, where),
    }
