"""Gemma 2, 3 and 4: text models of full and sliding-window layers with four norms each.

    x = x + norm(attention(norm(x)));   x = x + norm(mlp(norm(x)))

Gemma 2 caps attention's scores and the logits; Gemma 3 norms queries and keys instead and gives
each kind of layer its own RoPE. Gemma 4 norms values too, lets full attention have other heads
(whose values may be the keys' projection), does not scale scores, scales each layer's output, and
may have experts beside its MLPs. In its small models the last layers read an earlier layer's keys
and values (`reads_kv_of`), and their MLP may be twice as wide. All layers of those receive an
embedding of the token (`per_layer.py`).

Within an image attention goes both ways: in Gemma 3 in all layers, in the larger Gemma 4 in those
with windows, in the others in none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checks import checked_int, checked_positive, is_int
from ...errors import CheckpointError
from .family import refuse_other, refuse_truncate
from .llama import FULL, SLIDING, windows_by_type
from .moe import gemma_moe


def gemma2(hf: Any, where: Path) -> dict[str, Any]:
    return {
        **_common(hf, where),
        "norm_offset": 1.0,
        "attention_scale": _scale(hf, where),
        "attention_softcap": _cap(hf, "attn_logit_softcapping", where),
    }


def gemma3(hf: Any, where: Path) -> dict[str, Any]:
    refuse_other(hf, where, attn_logit_softcapping=None)
    return {
        **_common(hf, where),
        **_by_type(hf, where, {name: {} for name in (FULL, SLIDING)}),
        "norm_offset": 1.0,
        "qk_norm": True,
        "attention_scale": _scale(hf, where),
        "images_attend_both_ways": getattr(hf, "is_text_part", False),
    }


def gemma4(hf: Any, where: Path) -> dict[str, Any]:
    """The text model."""
    both_ways = getattr(hf, "use_bidirectional_attention", None) == "vision"
    kinds = {
        name: {
            **_heads_of_type(hf, name),
            "images_attend_both_ways": both_ways and name == SLIDING,
        }
        for name in (FULL, SLIDING)
    }
    return {
        **_common(hf, where),
        **_sharing(hf, where, _by_type(hf, where, kinds)),
        **_per_layer(hf, where),
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "attention_scale": 1.0,
        "moe": gemma_moe(hf, where),
    }


def _common(hf: Any, where: Path) -> dict[str, Any]:
    """Returns the fields that all Gemmas have."""
    activation = hf.hidden_activation
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"{where}: hidden_activation={activation!r} is not supported; allowed is "
            "'gelu_pytorch_tanh'. Use another model."
        )
    bidirectional = getattr(hf, "use_bidirectional_attention", None)
    if bidirectional not in (None, False, "vision"):  # that one concerns images alone
        raise CheckpointError(
            f"{where}: use_bidirectional_attention={bidirectional!r}: such a model does not "
            "generate text from left to right. Use another model."
        )
    bias = bool(hf.attention_bias)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "embedding_scale": float(hf.hidden_size) ** 0.5,
        "layer_windows": windows_by_type(hf, where),
        "logits_softcap": _cap(hf, "final_logit_softcapping", where),
    }


def _by_type(hf: Any, where: Path, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns `fields` of each type with its RoPE; the model's own are the last layer's."""
    for name in set(hf.layer_types):
        rope = fields[name]["rope_parameters"] = dict(hf.rope_parameters.get(name) or {})
        kind, part = rope.get("rope_type"), rope.get("partial_rotary_factor")
        if not rope or (kind != "proportional" and part not in (None, 1, 1.0)):
            raise CheckpointError(
                f"{where}: rope_parameters of {name!r} are {rope!r}. Give a rope_type, and a "
                "partial_rotary_factor only with rope_type 'proportional'."
            )
        refuse_truncate(rope, name, where)
    types = tuple(hf.layer_types)
    return {"layer_types": types, "type_fields": fields, **fields[types[-1]]}


def _sharing(hf: Any, where: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns `fields` with types for the last layers, if these keep no keys and values."""
    shared, types = getattr(hf, "num_kv_shared_layers", None) or 0, fields["layer_types"]
    first = len(types) - shared if is_int(shared) else -1
    if not 0 < first <= len(types) or not set(types[first:]) <= set(types[:first]):
        raise CheckpointError(
            f"{where}: num_kv_shared_layers={shared!r} of {len(types)} layers; those read the keys "
            f"and values of the layers before, where each of their types must be: {list(types)}. "
            "Copy the file again from the model's source."
        )
    wide = 2 if getattr(hf, "use_double_wide_mlp", False) else 1
    widths = {"intermediate_size": hf.intermediate_size * wide}
    readers = {
        f"{name} over shared KV": {**fields["type_fields"][name], "reads_kv_of": name, **widths}
        for name in dict.fromkeys(types[first:])
    }
    return fields | {
        "layer_types": (*types[:first], *(f"{name} over shared KV" for name in types[first:])),
        "type_fields": fields["type_fields"] | readers,
    }


def _per_layer(hf: Any, where: Path) -> dict[str, Any]:
    size = getattr(hf, "hidden_size_per_layer_input", None) or 0
    if not size:
        return {}
    checked_int(where, "hidden_size_per_layer_input", size, range(2**16))
    if hf.vocab_size_per_layer_input != hf.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size_per_layer_input={hf.vocab_size_per_layer_input!r} is not "
            f"supported; allowed is vocab_size={hf.vocab_size}. Use another model of the family."
        )
    pad = hf.pad_token_id
    if not is_int(pad, 0, hf.vocab_size - 1):
        raise CheckpointError(
            f"{where}: pad_token_id={pad!r}; with hidden_size_per_layer_input it must be a token "
            f"id, 0 … {hf.vocab_size - 1}: whose layer inputs an image's positions have. The "
            "family's is 0."
        )
    return {"per_layer_input_size": size, "per_layer_pad_id": pad}


def _heads_of_type(hf: Any, name: str) -> dict[str, Any]:
    if name not in hf.layer_types:
        return {}
    shares = bool(hf.attention_k_eq_v) and name == FULL
    if hasattr(hf, "per_layer_config"):
        of_layer = hf.per_layer_config[hf.layer_types.index(name)]
        head_dim, kv_heads = of_layer.head_dim, of_layer.num_key_value_heads
    else:  # older transformers have full attention's in fields of their own
        head_dim = (name == FULL and hf.global_head_dim) or hf.head_dim
        kv_heads = (shares and hf.num_global_key_value_heads) or hf.num_key_value_heads
    return {"head_dim": head_dim, "num_kv_heads": kv_heads, "values_are_keys": shares}


def _scale(hf: Any, where: Path) -> float:
    return checked_positive(where, "query_pre_attn_scalar", hf.query_pre_attn_scalar) ** -0.5


def _cap(hf: Any, name: str, where: Path) -> float | None:
    cap = getattr(hf, name)
    return None if cap is None else checked_positive(where, name, cap, " or null", "Correct it.")
