"""OLMo-2, OLMo-3 and EXAONE-4: the outputs of attention and MLP are normed, not their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checks import is_int
from ...errors import CheckpointError
from .family import refuse_truncate
from .llama import FULL, SLIDING, rotating, windows_by_type


def olmo2(hf: Any, where: Path) -> dict[str, Any]:
    """Norms over all heads of queries, and of keys."""
    bias = bool(hf.attention_bias)
    norms = {"qk_norm": True, "norms_all_heads": True, "post_norms": True}
    return {"qkv_bias": bias, "o_bias": bias, **norms}


def olmo3(hf: Any, where: Path) -> dict[str, Any]:
    """OLMo-2 with windows, and RoPE parameters by layer type."""
    fields = {kind: {"rope_parameters": dict(hf.rope_parameters[kind])} for kind in (SLIDING, FULL)}
    for kind in fields:
        refuse_truncate(fields[kind]["rope_parameters"], kind, where)
    return {
        **olmo2(hf, where),
        "layer_windows": windows_by_type(hf, where),
        "layer_types": tuple(hf.layer_types),
        "type_fields": fields,
        **fields[FULL],
    }


def exaone4_as_hf(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """Without a window and `layer_types` transformers divides by zero."""
    window, pattern = raw.get("sliding_window", 0), raw.get("sliding_window_pattern", 4)
    if raw.get("layer_types") is not None:
        return raw
    if window is None and is_int(raw.get("num_hidden_layers")):
        return {**raw, "layer_types": [FULL] * raw["num_hidden_layers"]}
    if not is_int(pattern) or pattern < 1:
        raise CheckpointError(
            f"{where}: sliding_window_pattern={pattern!r} without layer_types: it must be 1 or "
            "more. Give layer_types, 'sliding_attention' or 'full_attention' for every layer."
        )
    return raw


def exaone4(hf: Any, where: Path) -> dict[str, Any]:
    """Where some layers have a window, the others do not rotate."""
    windows = windows_by_type(hf, where)
    fields = {"qk_norm": True, "post_norms": True, "layer_windows": windows}
    if hf.sliding_window is None:
        return fields
    return {**fields, **rotating(window is not None for window in windows)}
