"""What several kinds of heads have alike: names of tensors, layers, and fields of configs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...checks import MAX_SIZE, are_ints, checked_int
from ...config import MAX_DRAFT_LEN
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ..families.llama import SLIDING, windows_by_type
from ..hf_config import parse_config
from .records import HeadFiles, Sources


def head_tensors(files: HeadFiles, kind: str) -> Sources:
    """Returns the tensors of a head: no `model.` before their names, `layers.0.` for `midlayer.`.

    Args:
        kind: "EAGLE" or "DFlash", for messages.

    Raises:
        CheckpointError: two would have the same name, or there is no fc.weight.
    """
    renamed: Sources = {}
    for name, source in files.sources.items():
        new = re.sub(r"^midlayer\.", "layers.0.", re.sub(r"^model\.", "", name))
        if new in renamed:
            raise CheckpointError(
                f"{files.head_dir} holds both {renamed[new].name} and {name}, two names of one "
                "tensor: the tensors of two heads are mixed. Copy one head again, into an empty "
                "directory."
            )
        renamed[new] = source
    if "fc.weight" not in renamed:
        other = next((name for name in renamed if name.endswith(".fc.weight")), None)
        hint = "" if other is None else f" There is a {other}: its prefix is not known."
        raise CheckpointError(
            f"{files.head_dir} has no fc.weight, which every {kind} head has: these are not a "
            f"head's tensors, or not all of them.{hint} Copy the head again from its source."
        )
    return renamed


def head_layers(inner: dict[str, Any], sources: Sources, where: Path) -> DecoderConfig:
    """The head's layers. Biases and q/k norms are those that the tensors have."""
    values = {"model_type": "llama", **{k: v for k, v in inner.items() if v is not None}}
    parameters = values.get("rope_parameters")
    has_theta = isinstance(parameters, dict) and parameters.get("rope_theta") is not None
    if "rope_theta" not in values and not has_theta:
        # Plain RoPE with EAGLE's own base: never the target's, nor a family's newer default.
        values["rope_theta"] = 10000.0
    decoder = _with_windows(parse_config(values, where), values, where)
    found = with_found_parameters(decoder, sources)
    for name, tensor, there in (
        ("attention_bias", "q_proj.bias", found.qkv_bias),
        ("mlp_bias", "down_proj.bias", found.mlp_bias),
    ):
        given = inner.get(name)
        if isinstance(given, bool) and given != there:
            raise CheckpointError(
                f"{where}: {name}={given}, but the checkpoint {'holds' if there else 'has no'} "
                f"{tensor}. Set it to {str(there).lower()}, or use the weights that belong to this "
                "config."
            )
    return found


def _with_windows(decoder: DecoderConfig, values: dict[str, Any], where: Path) -> DecoderConfig:
    """The config with the sliding windows of `layer_types`, which a Llama model has not."""
    types = values.get("layer_types")
    has_window = values.get("sliding_window") is not None  # else a family's default
    if (
        (has_window and any(decoder.layer_windows))
        or not isinstance(types, list)
        or SLIDING not in types
    ):
        return decoder
    count, window = decoder.num_layers, values.get("sliding_window")
    fields = SimpleNamespace(layer_types=types, num_hidden_layers=count, sliding_window=window)
    return replace(decoder, layer_windows=windows_by_type(fields, where))


def with_found_parameters(decoder: DecoderConfig, names: Sources) -> DecoderConfig:
    """The config with the optional parameters that the first layer has."""
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    return replace(
        decoder,
        qkv_bias=f"{attention}q_proj.bias" in names,
        o_bias=f"{attention}o_proj.bias" in names,
        qk_norm=f"{attention}q_norm.weight" in names,
        mlp_bias=f"{mlp}down_proj.bias" in names,
    )


def refuse_other_layers(decoder: DecoderConfig, drafter: str) -> None:
    """What the layers of heads do not compute, though their config's family does."""
    found = [
        name
        for name in (
            "sandwich_norms", "value_norm", "layer_scalar", "embedding_scale", "post_norms",
            "norms_all_heads",
        )
        if getattr(decoder, name)
    ]  # fmt: skip
    if found:
        raise CheckpointError(
            f"{drafter} would have layers with {', '.join(found)}, which are supported in targets "
            "alone, and Gemma's in assistants. Use a Gemma-4 assistant, or draft otherwise."
        )


def size_field(raw: dict[str, Any], name: str, default: int, where: Path, least: int = 1) -> int:
    value = raw.get(name)
    if value is None:
        return default
    return checked_int(where, name, value, range(least, MAX_SIZE + 1), " or null", "Correct it.")


def flag_field(raw: dict[str, Any], name: str, where: Path) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name}={value!r}; it must be true or false. Correct it.")
    return bool(value)


def layer_ids(value: Any, name: str, where: Path) -> tuple[int, ...]:
    if not are_ints(value) or not value:
        raise CheckpointError(
            f"{where}: {name}={value!r}; it must be a non-empty list of layer numbers. Correct it."
        )
    return tuple(value)


def check_captures(
    layers: tuple[int, ...], origin: str, target: DecoderConfig | None, argument: str, where: Path
) -> None:
    """Raises CheckpointError for a layer to capture that the target has not.

    Args:
        layers: 0-based. origin: where they come from.
        argument: the config's field in which a user gives others.
    """
    wrong = [i for i in layers if i < 0 or (target is not None and i >= target.num_layers)]
    if wrong:
        known = "" if target is None else f" of the target's, 0 … {target.num_layers - 1}"
        raise CheckpointError(
            f"{where}: layers to capture {list(layers)} (0-based outputs, from {origin}): "
            f"{wrong[0]} is no layer{known}. Use the head's own target, or give {argument}."
        )


def speculative_tokens(raw: dict[str, Any], where: Path) -> int | None:
    """K as the speculators format proposes it, None if it does not."""
    spec = raw.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    tokens = methods[0].get("speculative_tokens")
    if tokens is None:
        return None
    allowed = range(1, MAX_DRAFT_LEN + 1)
    return checked_int(where, "speculative_tokens", tokens, allowed, cure="Correct it.")
