"""Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...checks import MAX_SIZE, checked_int
from ...errors import CheckpointError, shown
from ...models.rope import NOT_ROTATED
from .moe import qwen_moe
from .partial_rotary import without_factor

FULL, SLIDING = "full_attention", "sliding_attention"


def llama(hf: Any, where: Path) -> dict[str, Any]:
    bias = bool(hf.attention_bias)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(hf.mlp_bias)}


def phi3(hf: Any, where: Path) -> dict[str, Any]:
    """Phi-3 and Phi-4. (Its checkpoints stack q, k and v, and gate and up.)"""
    return {
        **without_factor(hf, where),
        "layer_windows": (_window(hf, where),) * hf.num_hidden_layers,
    }


def seed_oss(hf: Any, where: Path) -> dict[str, Any]:
    return {**llama(hf, where), "o_bias": bool(hf.attention_out_bias)}


def smollm3(hf: Any, where: Path) -> dict[str, Any]:
    """Layers whose `no_rope_layers` is 0 do not rotate."""
    count = hf.num_hidden_layers
    flags = hf.no_rope_layers[:count]  # transformers takes the first ones, too
    if len(flags) != count or not set(flags) <= {0, 1}:
        raise CheckpointError(
            f"{where}: no_rope_layers={shown(flags)}; it must be 0 or 1 for each of {count} "
            "layers. Copy the file again from the model's source."
        )
    return {
        **llama(hf, where),
        "layer_windows": windows_by_type(hf, where),
        **rotating(bool(flag) for flag in flags),
    }


def rotating(which: Iterable[bool]) -> dict[str, Any]:
    """Returns the fields of a model of which these layers alone are rotated."""
    types = tuple("rotated" if is_rotated else "not_rotated" for is_rotated in which)
    fields = {"rotated": {}, "not_rotated": {"rope_parameters": NOT_ROTATED}}
    return {"layer_types": types, "type_fields": fields}


def mistral(hf: Any, where: Path) -> dict[str, Any]:
    """Its window is every layer's, but where `layer_types` say otherwise: transformers reads such a
    file as a `ministral` config."""
    if getattr(hf, "layer_types", None):
        return {"layer_windows": windows_by_type(hf, where)}
    return {"layer_windows": (_window(hf, where),) * hf.num_hidden_layers}


def qwen2(hf: Any, where: Path) -> dict[str, Any]:
    return {"qkv_bias": True, "layer_windows": windows_by_type(hf, where)}


def qwen3(hf: Any, where: Path) -> dict[str, Any]:
    bias = bool(hf.attention_bias)
    windows = windows_by_type(hf, where)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "layer_windows": windows}


def qwen3_moe(hf: Any, where: Path) -> dict[str, Any]:
    """Qwen3 with a mixture of experts in every layer."""
    bias, window = bool(hf.attention_bias), _window(hf, where)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "layer_windows": (window if hf.use_sliding_window else None,) * hf.num_hidden_layers,
        "moe": qwen_moe(hf, where),
    }


def windows_by_type(hf: Any, where: Path) -> tuple[int | None, ...]:
    """Returns each layer's sliding window or None, by `layer_types`.

    Where that is absent, transformers derives it from older fields.

    Raises:
        CheckpointError: a type is unknown, or has no window.
    """
    window, types, count = _window(hf, where), hf.layer_types, hf.num_hidden_layers
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown or len(types) != count:
        raise CheckpointError(
            f"{where}: layer_types has {len(types)} entries for {count} layers, unknown ones: "
            f"{unknown}. Give {FULL!r} or {SLIDING!r} for every layer."
        )
    if window is None and SLIDING in types:
        use = getattr(hf, "use_sliding_window", None)
        also = f" and use_sliding_window={use!r}" if use is not None else ""
        to_do = " and use_sliding_window to true" if use is False else ""
        raise CheckpointError(
            f"{where}: layer_types names 'sliding_attention', but no window is in force "
            f"(sliding_window=None{also}). Set sliding_window to a number{to_do}, or make those "
            "layers 'full_attention'."
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _window(hf: Any, where: Path) -> int | None:
    return None if hf.sliding_window is None else checked_window(hf.sliding_window, where)


def checked_window(window: Any, where: Path) -> int:
    """Raises CheckpointError for what is no window."""
    also = ", or null where no layer slides"
    return checked_int(where, "sliding_window", window, range(1, MAX_SIZE + 1), also)
