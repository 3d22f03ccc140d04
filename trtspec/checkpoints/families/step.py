"""Step-3.5 (stepfun-ai/Step-3.5-Flash): sliding-window and full layers that differ in heads and
rotation, a gate on every head, norms whose weights are written as differences from one, and in some
layers experts or a clamped SwiGLU.

Source: modeling_step3p5.py beside the public checkpoint. There `swiglu_limits_shared` is also for
layers without experts, and the lists count on over the MTP layers, which are dense.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checks import MAX_SIZE, is_int, is_number
from ...errors import CheckpointError
from .llama import FULL, SLIDING, checked_window
from .moe import step_moe

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
)
_COPIED = (
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "num_nextn_predict_layers",
)


def step3p5_as_qwen3(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """What Qwen3 has by the same or another name, and the file as it is written beside it."""
    values = {"rms_norm_eps": 1e-5}
    values |= {name: raw[name] for name in _COPIED if raw.get(name) is not None}
    for name, checkpoint_name in (
        ("num_key_value_heads", "num_attention_groups"),
        ("max_position_embeddings", "max_seq_len"),
        *((name, name) for name in _REQUIRED),
    ):
        value = raw.get(checkpoint_name) if raw.get(name) is None else raw[name]
        if value is None:
            raise CheckpointError(
                f"{where} does not say {checkpoint_name}. Copy it again from the model's source."
            )
        values[name] = value
    return {**values, "written": raw}


def step3p5(hf: Any, where: Path) -> dict[str, Any]:
    raw, num_mtp = hf.written, getattr(hf, "num_nextn_predict_layers", None) or 0
    types = _layer_types(raw, hf.num_hidden_layers, num_mtp, where)
    _refuse(raw, where)
    window = checked_window(raw.get("sliding_window"), where) if SLIDING in types else None
    attention = {kind: _fields_of(kind, raw, hf, types, where) for kind in set(types)}
    behind = _feed_forwards(raw, hf.num_hidden_layers, num_mtp, where)
    names, fields = [], {}
    for kind, (suffix, of_mlp) in zip(types, behind, strict=False):
        names.append(kind + suffix)
        fields[names[-1]] = {**attention[kind], **of_mlp}
    return {
        **fields[names[0]],
        "qk_norm": True,
        "norm_offset": 1.0,
        "head_gate": bool(raw.get("use_head_wise_attn_gate")),
        "layer_windows": tuple(window if kind == SLIDING else None for kind in types),
        "layer_types": tuple(names),
        "type_fields": fields,
        "raw": dict(raw),
    }


def _layer_types(raw: dict[str, Any], count: int, num_mtp: int, where: Path) -> tuple[str, ...]:
    """Returns the types of the layers, then of the MTP layers where the file goes on to them."""
    types = raw.get("layer_types") or [FULL] * (count + num_mtp)
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    total = count + num_mtp
    if unknown or (len(types) < total and len(types) != count):
        raise CheckpointError(
            f"{where}: layer_types has {len(types)} entries for {count} layers and {num_mtp} MTP "
            f"layers, unknown ones: {unknown}. Give {FULL!r} or {SLIDING!r} for every layer."
        )
    if len(types) == count and len(set(types)) == 1:  # no other kind that MTP layers could be
        types = types[:1] * total
    return tuple(types[:total])  # more of them where fewer MTP layers are used than there were


def _feed_forwards(
    raw: dict[str, Any], count: int, num_mtp: int, where: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Returns of every layer, MTP layers last, a suffix for its type's name, and fields."""
    total = count + num_mtp
    routed, shared = (
        _limits(name, raw, count, total, where)
        for name in ("swiglu_limits", "swiglu_limits_shared")
    )
    with_experts = _expert_layers(raw, total, where)
    moe = step_moe(raw, where) if with_experts else None
    found: list[tuple[str, dict[str, Any]]] = []
    for layer, limits in enumerate(zip(routed, shared, strict=True)):
        if moe is not None and layer in with_experts:
            suffix = "" if limits == (None, None) else f" clamped at {limits[0]}, {limits[1]}"
            clamped = replace(moe, swiglu_limit=limits[0], shared_swiglu_limit=limits[1])
            found.append((f" with experts{suffix}", {"moe": clamped, "swiglu_limit": None}))
        else:
            suffix = "" if limits[1] is None else f" clamped at {limits[1]}"
            found.append((suffix, {"moe": None, "swiglu_limit": limits[1]}))
    return found


def _expert_layers(raw: dict[str, Any], total: int, where: Path) -> set[int]:
    setting = raw.get("moe_layers_enum")
    numbers = setting.split(",") if isinstance(setting, str) else setting
    texts = [str(number).strip() for number in numbers] if isinstance(numbers, list) else None
    texts = None if texts is None else [text for text in texts if text]
    if texts is None or any(
        not re.fullmatch(r"\d{1,6}", text) or int(text) >= total for text in texts
    ):
        raise CheckpointError(
            f"{where}: moe_layers_enum={setting!r}; it must name the layers with experts, each in "
            f'0 … {total - 1}, as in "3,4,5", or be "" where all are dense. Copy the file again '
            "from the model's source."
        )
    return {int(text) for text in texts}


def _limits(
    name: str, raw: dict[str, Any], count: int, total: int, where: Path
) -> list[float | None]:
    """Returns every layer's limit; None clamps nothing. MTP layers may be left out of the list."""
    setting = raw.get(name)
    limits = [None] * count if setting is None else setting
    if (
        not isinstance(limits, list)
        or len(limits) < count
        or any(n is not None and not (is_number(n) and 0 <= n < 1e30) for n in limits)
    ):
        raise CheckpointError(
            f"{where}: {name}={setting!r}; it must be null or a list of at least {count} numbers, "
            "one a layer: what it clamps at, 0 or null for nothing. Copy the file again from the "
            "model's source."
        )
    return ([float(n) if n else None for n in limits] + [None] * (total - len(limits)))[:total]


def _refuse(raw: dict[str, Any], where: Path) -> None:
    """Refuses settings with which these layers are not computed."""
    for name, needed in (
        ("use_qk_norm", True),
        ("zero_centered", True),
        ("sink", False),
        ("use_mfa", False),
        ("attention_bias", False),
    ):
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
    factor = _of_kind(
        "partial_rotary_factors", raw.get("partial_rotary_factors") or 1.0, kind, types, where
    )
    sizes = heads, kv_heads, head_dim
    if not all(is_int(n, 1, MAX_SIZE) for n in sizes):
        raise CheckpointError(
            f"{where}: heads, groups and head_dim of {kind} are {sizes!r}; they must be ints in "
            f"1 … {MAX_SIZE}. Correct attention_other_setting."
        )
    rotary_dim = int(head_dim * factor)
    if heads % kv_heads or head_dim % 2 or not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{where}: {heads} heads on {kv_heads} groups of size {head_dim}, {rotary_dim} of it "
            f"rotated, for {kind}: heads must be a multiple of groups, sizes even. Correct them."
        )
    rope = {"rope_type": "default", "rope_theta": float(theta)}
    scaling, scaled = raw.get("rope_scaling"), raw.get("yarn_only_types")
    if scaling and kind in ([FULL] if scaled is None else scaled):
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
    found = {number for number, of_type in zip(per_layer, types, strict=False) if of_type == kind}
    number = found.pop() if len(found) == 1 else None
    if not is_number(number) or not 0 < number < 1e30:
        raise CheckpointError(
            f"{where}: {name}={value!r}; the layers of kind {kind!r} must have one number > 0. Use "
            "another model."
        )
    return number
