"""OLMo-2, OLMo-3 and EXAONE-4: the outputs of attention and MLP are normed, not their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .llama import FULL, SLIDING, rotating, windows_by_type


def olmo2(hf: Any, where: Path) -> dict[str, Any]:
    """Norms over all heads of queries, and of keys."""
    bias = bool(hf.attention_bias)
    norms = {"qk_norm": True, "norms_all_heads": True, "post_norms": True}
    return {"qkv_bias": bias, "o_bias": bias, **norms}


def olmo3(hf: Any, where: Path) -> dict[str, Any]:
    """OLMo-2 with windows, and RoPE parameters by layer type."""
    fields = {kind: {"rope_parameters": dict(hf.rope_parameters[kind])} for kind in (SLIDING, FULL)}
    return {
        **olmo2(hf, where),
        "layer_windows": windows_by_type(hf, where),
        "layer_types": tuple(hf.layer_types),
        "type_fields": fields,
        **fields[FULL],
    }


def exaone4(hf: Any, where: Path) -> dict[str, Any]:
    """Where some layers have a window, the others do not rotate."""
    windows = windows_by_type(hf, where)
    fields = {"qk_norm": True, "post_norms": True, "layer_windows": windows}
    if hf.sliding_window is None:
        return fields
    return {**fields, **rotating(window is not None for window in windows)}
