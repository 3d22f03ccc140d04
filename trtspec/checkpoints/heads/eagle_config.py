"""From the `config.json` of an EAGLE-3, P-EAGLE or EAGLE-1 head to a `HeadConfig`.

Public heads differ in where the architecture is written, and in how captured layers are numbered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import HeadConfig
from .fields import (
    check_captures,
    flag_field,
    head_layers,
    layer_ids,
    refuse_other_layers,
    size_field,
    speculative_tokens,
)
from .masked import parse_masked
from .records import HeadFiles, HeadRequest, Sources

MIN_LAYERS_FOR_DEFAULT = 6
logger = logging.getLogger(__name__)

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_IDS = "eagle_aux_hidden_state_layer_ids"


def default_layers_to_capture(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's own choice: low, middle, high (after 0-based layers 1, L/2 - 1, L - 4)."""
    return 1, num_layers // 2 - 1, num_layers - 4


def parse_eagle(
    files: HeadFiles, tensors: Sources, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    """Returns the config of an EAGLE-3 or EAGLE-1 head.

    Args:
        tensors: those of `files`, under canonical names.
        request: its `layers_to_capture` win over the checkpoint's.
        target: gives the number of layers that the default capture needs.

    Raises:
        CheckpointError: a field is missing or is not what it can be.
    """
    raw, where, asked = files.raw, files.config_path, request.layers_to_capture
    speculators = raw.get("speculators_model_type")
    decoder = _architecture(raw, tensors, where)
    common = HeadConfig(
        kind="eagle3",
        format="EAGLE-3, speculators format" if speculators else "EAGLE-3, raw",
        decoder=decoder,
        target_hidden_size=size_field(raw, "target_hidden_size", decoder.hidden_size, where),
        draft_vocab_size=size_field(raw, "draft_vocab_size", decoder.vocab_size, where),
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        suggested_draft_len=speculative_tokens(raw, where),
    )
    nested = _eagle_config(raw, where)
    mask, trained = parse_masked(raw, nested, tensors, where, decoder.vocab_size)
    if "layers.0.hidden_norm.weight" not in tensors and "norm.weight" not in tensors:
        _check_eagle1(common, mask, asked, where)
        return replace(common, kind="eagle", format="EAGLE-1")
    flags = _flags(raw, nested, where)
    _refuse_unknown_eagle_config(nested, where)
    layers, origin = _layers_to_capture(raw, nested, where, target, asked)
    common = replace(common, layers_to_capture=layers, captured_by=origin, **flags)
    if mask is None:
        return common
    return _with_masks(common, mask, trained, is_speculators=bool(speculators))


def _architecture(raw: dict[str, Any], sources: Sources, where: Path) -> DecoderConfig:
    """Returns the head's layers, wherever its format keeps them."""
    speculators = raw.get("speculators_model_type")
    if speculators not in (None, "eagle3", "peagle"):
        raise CheckpointError(
            f"{where}: speculators_model_type={speculators!r}; allowed are 'eagle3', 'peagle', "
            "'dflash', 'dflash2' and 'dspark'. Correct it, or use a head of one of these."
        )
    inner = raw.get("transformer_layer_config") if speculators else raw
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{where}: transformer_layer_config={inner!r}; the speculators format keeps the head's "
            "architecture there, as an object. Copy the file again from the head's source."
        )
    absent = [name for name in _REQUIRED if inner.get(name) is None]
    if absent and not speculators:
        raise CheckpointError(
            f"{where} does not say {', '.join(absent)}. Copy the file again from the head's source."
        )
    decoder = head_layers(inner, sources, where)
    if decoder.mla is not None:
        raise CheckpointError(
            f"{where}: model_type={inner.get('model_type')!r} is a head of latent attention, which "
            "EAGLE heads have not here. Use a head of the usual attention (model_type 'llama'), or "
            "the target's MTP layers."
        )
    refuse_other_layers(decoder, f"{where}: EAGLE heads")
    return decoder


def _check_eagle1(
    config: HeadConfig, mask: int | None, layers_to_capture: Sequence[int] | None, where: Path
) -> None:
    """Refuses what belongs to EAGLE-3 heads alone."""
    if mask is not None:
        raise CheckpointError(
            f"{where.parent} is an EAGLE-1 head with a mask token ({mask}); of heads that "
            "draft in parallel only EAGLE-3's kind (P-EAGLE) is supported. Use one of those."
        )
    if layers_to_capture is not None:
        raise CheckpointError(
            f"{where.parent} is an EAGLE-1 head, which reads the target's last hidden states: "
            f"eagle3_layers_to_capture={list(layers_to_capture)} does not apply. Leave it out."
        )
    if config.target_hidden_size != config.decoder.hidden_size:
        raise CheckpointError(
            f"{where}: target_hidden_size={config.target_hidden_size}, hidden_size="
            f"{config.decoder.hidden_size}: an EAGLE-1 head is as wide as its target. Use an "
            "EAGLE-3 head, or correct the field."
        )


def _flags(raw: dict[str, Any], nested: dict[str, Any], where: Path) -> dict[str, Any]:
    """Returns the flags that EAGLE-3 heads differ in, at the top or in `eagle_config`."""
    flags = {name: flag_field(raw, name, where) for name in _FLAGS}
    for name in _FLAGS:
        flags[name] |= flag_field(nested, name, where)
    flags["norm_output"] |= flag_field(nested, "return_hidden_post_norm", where)  # TensorRT-LLM's
    if raw.get("speculators_model_type") and raw.get("norm_before_residual") is None:
        flags["norm_before_residual"] = True
        logger.warning(
            "%s: norm_before_residual is not given; heads in the speculators format have it true. "
            "`trtspec doctor` says whether this one drafts better without.",
            where,
        )
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(
            f"{where}: norm_before_fc and fc_norm are both true; a head has one or the other. Set "
            "the one whose tensors it lacks (input_norm, fc_norm.0 …) to false."
        )
    return flags


def _with_masks(
    config: HeadConfig, mask: int, trained: int | None, is_speculators: bool
) -> HeadConfig:
    """Returns the config of a P-EAGLE head."""
    if is_speculators and trained is None:  # its trainer writes the number of trained depths there
        trained = config.suggested_draft_len
    lengths = [n for n in (config.suggested_draft_len, trained) if n is not None]
    return replace(
        config,
        format=config.format.replace("EAGLE-3", "P-EAGLE"),
        suggested_draft_len=min(lengths, default=None),
        mask_token_id=mask,
        trained_draft_len=trained,
    )


def _eagle_config(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(
            f"{where}: eagle_config={nested!r}; it must be an object. Correct it."
        )
    return nested


def _refuse_unknown_eagle_config(nested: dict[str, Any], where: Path) -> None:
    """Refuses variants that share EAGLE-3's names but compute something else."""
    for name, needed in (("use_aux_hidden_state", True), ("use_mtp_layernorm", False)):
        if nested.get(name, needed) is not needed:
            raise CheckpointError(
                f"{where}: eagle_config.{name}={nested[name]!r}; allowed is {needed}. This variant "
                "of EAGLE-3 is not supported: use another head."
            )


def _layers_to_capture(
    raw: dict[str, Any],
    nested: dict[str, Any],
    where: Path,
    target: DecoderConfig | None,
    asked: Sequence[int] | None,
) -> tuple[tuple[int, ...], str]:
    """Returns 0-based layers whose output is captured, and where that comes from."""
    count = size_field(raw, "num_aux_hidden_states", 0, where)
    if asked is not None:
        origin = "eagle3_layers_to_capture"
        layers = layer_ids(asked, origin, where)
    elif nested.get(_IDS) is not None:
        layers = layer_ids(nested[_IDS], f"eagle_config.{_IDS}", where)
        origin = "eagle_config (outputs)"
    elif raw.get(_IDS) is not None:
        # Written for engines that capture at the *input* of layer i, which is the output of i-1.
        layers = tuple(i - 1 for i in layer_ids(raw[_IDS], _IDS, where))
        origin = f"{_IDS} {list(raw[_IDS])} (inputs)"
    elif target is not None:
        layers, origin = default_layers_to_capture(target.num_layers), "default"
        if target.num_layers < MIN_LAYERS_FOR_DEFAULT:
            raise CheckpointError(
                f"{where} names no layers to capture, and the default (1, L/2-1, L-4) needs a "
                f"target of {MIN_LAYERS_FOR_DEFAULT} layers; it has {target.num_layers}. "
                f"Give eagle3_layers_to_capture, or write eagle_config.{_IDS} into the file."
            )
    else:
        layers, origin = (), "default (1, L/2-1, L-4 of the target)"
    if count and layers and count != len(layers):
        raise CheckpointError(
            f"{where}: num_aux_hidden_states={count}, but {len(layers)} layers are to be captured: "
            f"{list(layers)}. Give {count} with eagle3_layers_to_capture."
        )
    check_captures(layers, origin, target, "eagle3_layers_to_capture", where)
    return layers, origin
