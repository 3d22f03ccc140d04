"""Qwen3-Next and Qwen3.5: linear attention in most layers, gates behind attention in the others.

Source: transformers' models `qwen3_next`, `qwen3_5` and `qwen3_5_moe`. Of Qwen3.5's checkpoints,
which also read images, the text model is used alone: all its positions are of text, so that its
M-RoPE is RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checks import MAX_SIZE, checked_int, is_int
from ...errors import CheckpointError, shown
from ...models.config import LinearAttentionConfig, MoEConfig
from .family import refuse_other
from .llama import FULL
from .moe import qwen_moe
from .partial_rotary import without_factor

LINEAR = "linear_attention"
MAX_TAPS = 16
_NUM_MTP_LAYERS = 64
"""Of which the types are told, whatever number the checkpoint has: all have full attention."""


def text_alone(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """The file without what M-RoPE adds to RoPE. Where all layers have experts it says no
    intermediate_size."""
    raw = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(name), dict):
            fields = raw[name].items()
            raw[name] = {key: value for key, value in fields if not key.startswith("mrope")}
    if raw.get("intermediate_size") is None and "shared_expert_intermediate_size" in raw:
        raw["intermediate_size"] = _active_width(raw)
    return raw


def _active_width(raw: dict[str, Any]) -> Any:
    """Returns the width of what a row goes through, which a new head takes over."""
    count, inner = raw.get("num_experts_per_tok"), raw.get("moe_intermediate_size")
    shared = raw["shared_expert_intermediate_size"]
    if not (is_int(count, 1, MAX_SIZE) and is_int(inner, 1, MAX_SIZE) and is_int(shared, 1, None)):
        return shared  # refused later, by the field's own name
    return count * inner + shared


def qwen3_5(hf: Any, where: Path) -> dict[str, Any]:
    refuse_other(
        hf,
        where,
        attn_output_gate=True,
        mtp_use_dedicated_embeddings=False,
        use_sliding_window=False,
    )
    if getattr(hf, "output_gate_type", None) not in (None, "swish", "silu"):
        raise CheckpointError(
            f"{where}: output_gate_type={hf.output_gate_type!r} is not supported; allowed is "
            "'swish'. Use another model."
        )
    bias = bool(hf.attention_bias)
    return {
        **without_factor(hf, where),
        **_layers(hf, _linear_attention(hf, where), where),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm_offset": 1.0,
        "output_gate": True,
    }


def qwen3_5_moe(hf: Any, where: Path) -> dict[str, Any]:
    refuse_other(hf, where, norm_topk_prob=True)  # null is the same
    return {**qwen3_5(hf, where), "moe": replace(_moe(hf, where), norm_topk_prob=True)}


def qwen3_next(hf: Any, where: Path) -> dict[str, Any]:
    sizes = replace(_linear_attention(hf, where), is_grouped=True)
    return {**qwen3_5(hf, where), "moe": _moe(hf, where), **_layers(hf, sizes, where)}


def _moe(hf: Any, where: Path) -> MoEConfig:
    refuse_other(hf, where, scoring_func="softmax")
    moe = qwen_moe(hf, where)
    inner = checked_int(
        where, "shared_expert_intermediate_size", hf.shared_expert_intermediate_size, _SIZES
    )
    names = replace(moe.names, shared="mlp.shared_expert")
    return replace(moe, shared_intermediate_size=inner, gates_shared=True, names=names)


_SIZES = range(1, MAX_SIZE + 1)


def _linear_attention(hf: Any, where: Path) -> LinearAttentionConfig:
    keys, values, key_dim, value_dim, taps = (
        checked_int(where, name, getattr(hf, name), allowed)
        for name, allowed in (
            ("linear_num_key_heads", _SIZES),
            ("linear_num_value_heads", _SIZES),
            ("linear_key_head_dim", _SIZES),
            ("linear_value_head_dim", _SIZES),
            ("linear_conv_kernel_dim", range(2, MAX_TAPS + 1)),
        )
    )
    if values % keys:
        raise CheckpointError(
            f"{where}: linear_num_value_heads={values} is no multiple of linear_num_key_heads="
            f"{keys}: value heads share key heads evenly. Correct the two fields."
        )
    return LinearAttentionConfig(keys, values, key_dim, value_dim, taps)


def _layers(hf: Any, sizes: LinearAttentionConfig, where: Path) -> dict[str, Any]:
    """Returns the layers' types, with those of MTP layers behind them."""
    types, count = list(hf.layer_types), hf.num_hidden_layers
    unknown = sorted({str(kind) for kind in types} - {FULL, LINEAR})
    if unknown or len(types) != count or FULL not in types:
        raise CheckpointError(
            f"{where}: layer_types={shown(types)}; it must be {LINEAR!r} or {FULL!r} for each of "
            f"{count} layers, {FULL!r} for one at least. Copy the file again from the model's "
            "source."
        )
    return {
        "layer_types": (*types, *[FULL] * _NUM_MTP_LAYERS),
        "type_fields": {LINEAR: {"linear_attention": sizes}},
    }
