"""Step-3.5 (stepfun-ai/Step-3.5-Flash): sliding-window and full layers that differ in heads and
rotation, a gate on every head, norms whose weights are written as differences from one.

Layers with experts and clamped SwiGLU are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim",
)  # fmt: skip
_COPIED = (
    "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype",
    "torch_dtype", "num_nextn_predict_layers",
)  # fmt: skip


def step3p5_as_qwen3(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """What Qwen3 has by the same or another name, and the file as it is written beside it."""
    values = {"rms_norm_eps": 1e-5}
    values |= {name: raw[name] for name in _COPIED if raw.get(name) is not None}
    for name, theirs in (
        ("num_key_value_heads", "num_attention_groups"),
        ("max_position_embeddings", "max_seq_len"),
        *((name, name) for name in _REQUIRED),
    ):
        value = raw.get(theirs) if raw.get(name) is None else raw[name]
        if value is None:
            raise CheckpointError(
                f"{where} does not say {theirs}. Copy it again from the model's source."
            )
        values[name] = value
    return {**values, "written": raw}


def step3p5(hf: Any, where: Path) -> dict[str, Any]:
    raw, num_mtp = hf.written, getattr(hf, "num_nextn_predict_layers", None) or 0
    types = _layer_types(raw, hf.num_hidden_layers, num_mtp, where)
    _refuse(raw, where)
    window = raw.get("sliding_window")
    if SLIDING in types and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise CheckpointError(
            f"{where}: sliding_window={window!r}; layer_types names {SLIDING!r}, whose window must "
            "be an int >= 1. Correct one of them."
        )
    fields = {kind: _fields_of(kind, raw, hf, types, where) for kind in set(types)}
    return {
        **fields[types[0]],
        "qk_norm": True,
        "norm_offset": 1.0,
        "head_gate": bool(raw.get("use_head_wise_attn_gate")),
        "layer_windows": tuple(window if kind == SLIDING else None for kind in types),
        "layer_types": types,
        "type_fields": fields,
        "raw": dict(raw),
    }


def _layer_types(raw: dict[str, Any], count: int, num_mtp: int, where: Path) -> tuple[str, ...]:
    """Of the layers, and where the file goes on after them, of the MTP layers."""
    types = raw.get("layer_types") or [FULL] * (count + num_mtp)
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown or len(types) not in (count, count + num_mtp):
        raise CheckpointError(
            f"{where}: layer_types has {len(types)} entries for {count} layers and {num_mtp} MTP "
            f"layers, unknown ones: {unknown}. Give {FULL!r} or {SLIDING!r} for every layer."
        )
    return tuple(types)


def _refuse(raw: dict[str, Any], where: Path) -> None:
    """What these layers are not computed with."""
    moe = raw.get("moe_layers_enum")
    numbers = moe.split(",") if isinstance(moe, str) else moe
    if numbers is None or any(str(number).strip() for number in numbers):
        raise CheckpointError(
            f"{where}: moe_layers_enum={moe!r}; Step-3.5 is supported without experts only, which "
            "an empty moe_layers_enum says. Use a dense model."
        )
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        if any(raw.get(name) or ()):
            raise CheckpointError(
                f"{where}: {name}={raw[name]!r}; only layers that clamp nothing (null or 0) are "
                "supported. Use another model."
            )
    for name, needed in (("use_qk_norm", True), ("zero_centered", True), ("sink", False),
                         ("use_mfa", False), ("attention_bias", False)):  # fmt: skip
        if bool(raw.get(name, needed)) is not needed:
            raise CheckpointError(
                f"{where}: {name}={raw[name]!r}; allowed is {needed}. Use another model."
            )
    if not all(raw.get("use_rope_layers") or ()):
        raise CheckpointError(
            f"{where}: use_rope_layers={raw['use_rope_layers']!r}; layers without RoPE are not "
            "supported. Use another model."
        )


def _fields_of(
    kind: str, raw: dict[str, Any], hf: Any, types: tuple[str, ...], where: Path
) -> dict[str, Any]:
    other = raw.get("attention_other_setting") or {}
    if kind != other.get("attention_type", SLIDING):
        other = {}
    heads = other.get("num_attention_heads", hf.num_attention_heads)
    kv_heads = other.get("num_attention_groups", hf.num_key_value_heads)
    head_dim = other.get("head_dim", hf.head_dim)
    theta = _of_kind("rope_theta", raw.get("rope_theta", 10000.0), kind, types, where)
    factor = _of_kind("partial_rotary_factors", raw.get("partial_rotary_factors") or 1.0, kind,
                      types, where)  # fmt: skip
    sizes = heads, kv_heads, head_dim
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise CheckpointError(
            f"{where}: heads, groups and head_dim of {kind} are {sizes!r}; they must be ints >= 1. "
            "Correct attention_other_setting."
        )
    rotary_dim = int(head_dim * factor)
    if heads % kv_heads or head_dim % 2 or not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{where}: {heads} heads on {kv_heads} groups of size {head_dim}, {rotary_dim} of it "
            f"rotated, for {kind}: heads must be a multiple of groups, sizes even. Correct them."
        )
    rope = {"rope_type": "default", "rope_theta": float(theta)}
    scaling, scaled = raw.get("rope_scaling"), raw.get("yarn_only_types") or [FULL]
    if scaling and kind in scaled:
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        rope = {"rope_theta": float(theta), **scaling, "rope_type": rope_type}
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "rope_parameters": rope,
    }


def _of_kind(name: str, value: Any, kind: str, types: tuple[str, ...], where: Path) -> float:
    """A number for all layers, or a list of which the layers of one kind have the same."""
    per_layer = value if isinstance(value, list) else [value] * len(types)
    found = {number for number, own in zip(per_layer, types, strict=False) if own == kind}
    number = found.pop() if len(found) == 1 else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e30:
        raise CheckpointError(
            f"{where}: {name}={value!r}; the layers of kind {kind!r} must have one number > 0. Use "
            "another model."
        )
    return number
