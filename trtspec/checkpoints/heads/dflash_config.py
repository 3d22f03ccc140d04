"""From the `config.json` of a DFlash, DFlash2 or DSpark head to a `HeadConfig`.

z-lab's config.json has Qwen3's fields, `block_size` and `dflash_config`; layers to capture are
0-based outputs. ModelOpt exports heads so, DSpark's with `projector_type: "dspark"` in place of a
name of their own. The speculators format (`speculators_model_type: "dflash"`) counts them as
inputs. DFlash2 is DFlash with more fields. `context_embeddings` is a field of ours.

Attention's own fields are those of MiMo-V2.5's heads and of ModelOpt's, as vLLM serves them:
`attention_sink_bias` (a tensor of that name in every layer), `attention_value_scale`, and `use_swa`
with `swa_window_size`. `use_swa` gives every layer that window, if `layer_types` has no sliding
layer, and leaves sight as it is. Its windows are counted from each row of a block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checks import MAX_SIZE, checked_int, checked_positive, is_number
from ...config import MAX_DRAFT_LEN
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import HeadConfig
from ...models.drafters.markov import MARKOV_TYPES
from ..families.llama import SLIDING
from .fields import (
    check_captures,
    flag_field,
    head_layers,
    layer_ids,
    refuse_other_layers,
    size_field,
    speculative_tokens,
)
from .masked import mask_token
from .records import HeadFiles, HeadRequest, Sources

logger = logging.getLogger(__name__)
ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlashSpeculator",
    "DFlash2DraftModel",
    "DFlash2Speculator",
    "DSparkDraftModel",
    "DSparkSpeculator",
    "Qwen3DSparkModel",
)
MAX_CANDIDATES = 128
WINDOWS_SEE = "sliding_window_non_causal"
_SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_RELATIVES = {
    "lilicorr_layers": "LiLiCorr's transformer over candidates",
    "xpress_rank": "XPress's refinement",
    "backbone_rotary_base": "a RoPE base of the context's own",
    "lilicorr_enabled": "LiLiCorr's transformer over candidates",
}
"""Fields by which a head computes more than DFlash does."""
_HAS_CONFIDENCE = "enable_confidence_head", "use_confidence_head"  # the latter: ModelOpt's
_CONFIDENCE = "confidence_head.confidence_proj."  # as the loader calls it
_CAUSAL = "is_causal", "causal", "causal_head"
_OWN = (
    "block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids",
    "num_target_layers", "target_hidden_size", "sample_from_anchor", "shift_label", "use_swa",
    "swa_window_size", *_SINKS, "attention_value_scale", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "context_embeddings", WINDOWS_SEE,
    "markov_rank", "markov_head_type", *_HAS_CONFIDENCE, "confidence_head_with_markov", *_CAUSAL,
    *_DFLASH2,
)  # fmt: skip
"""Fields that a head has more than its layers: at the top of config.json or in `dflash_config`."""
_AT_TOP = "draft_vocab_size", "draft_window", "layer_types", "sliding_window"
_RELATIVE_NAMES = {
    "lilicorr": "LiLiCorr's transformer over candidates",
    "domino": "Domino's recurrent correction of logits",
    "xpress": "XPress's refinement",
}
"""What such heads compute more, by what their names contain."""


def default_target_layers(num_draft_layers: int, num_layers: int) -> tuple[int, ...]:
    """DFlash's own choice, 0-based outputs: evenly from layer 1 to the fourth from the end."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _architectures(raw: dict[str, Any]) -> list[str]:
    """Returns the names of `architectures`; none where it is no list."""
    names = raw.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def is_dflash(raw: dict[str, Any]) -> bool:
    """Whether it is the config of a DFlash head or a relative of it."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return str(kind) in ("dflash", "dflash2", "dspark", *_RELATIVE_NAMES)
    kinds = "dflash", "dspark", *_RELATIVE_NAMES
    named = any(kind in name.lower() for name in _architectures(raw) for kind in kinds)
    return named or "dflash_config" in raw


def is_dspark(raw: dict[str, Any]) -> bool:
    """Whether it is the config of a DSpark head."""
    if raw.get("speculators_model_type") is not None:
        return raw["speculators_model_type"] == "dspark"
    named = any("DSpark" in name for name in _architectures(raw)) or _projector(raw) == "dspark"
    return is_dflash(raw) and named


def _variant(raw: dict[str, Any], nested: dict[str, Any]) -> str:
    if is_dspark(raw):
        return "DSpark"
    named = raw.get("speculators_model_type") == "dflash2"
    named = named or any("DFlash2" in name for name in _architectures(raw))
    is_dflash2 = named or any(raw.get(name) or nested.get(name) for name in _DFLASH2)
    return "DFlash2" if is_dflash2 else "DFlash"


def _projector(raw: dict[str, Any]) -> Any:
    """Returns what ModelOpt calls a head's kind, None of other formats."""
    nested = raw.get("dflash_config")
    inside = nested.get("projector_type") if isinstance(nested, dict) else None
    return raw.get("projector_type") or inside


def parse_dflash(
    files: HeadFiles, tensors: Sources, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    """Returns the config of a DFlash, DFlash2 or DSpark head.

    Args:
        tensors: those of `files`, under canonical names.
        request: its `layers_to_capture` win over the checkpoint's.
        target: gives the number of layers that the default capture needs.

    Raises:
        CheckpointError: a field is missing, or is not what it can be; another kind of head.
    """
    raw, where, asked = files.raw, files.config_path, request.layers_to_capture
    if str(raw.get("speculators_model_type")) in _RELATIVE_NAMES:
        _refuse_relatives(raw, {}, "DFlash", where)
    inner, nested = _objects(raw, where)
    variant, speculators = _variant(raw, nested), raw.get("speculators_model_type")
    _refuse_relatives(raw, nested, variant, where)
    fields = _fields(raw, inner, nested, where)
    block, anchor = _block(fields, variant, where)
    trained = block if anchor else block - 1
    inner = _with_window(inner, fields, where)
    decoder = _layers(inner, fields, tensors, where)
    sees_ahead = _sees_ahead(fields, speculators == "dflash2", decoder, where)
    windows_by_row = flag_field(fields, "use_swa", where)
    if windows_by_row:
        decoder = _with_one_window(decoder, inner, block, where)
    else:
        decoder = widened(decoder, sees_ahead, block)
    mask = _required(fields, "mask_token_id", where)
    layers, origin = _target_layers(fields, where, decoder.num_layers, target, asked)
    vocab = size_field(raw, "draft_vocab_size", decoder.vocab_size, where)
    # If the head's vocabulary is a smaller one, that is the problem, and it is reported.
    known_tokens = max(decoder.vocab_size, target.vocab_size if target else 0)
    extra: dict[str, Any] = {}
    source = "speculators" if speculators else "z-lab's"
    if variant == "DSpark":
        extra = _dspark_fields(fields, decoder.hidden_size, tensors, where)
    elif variant == "DFlash2":
        extra = _dflash2_fields(fields, decoder, block, vocab, where)
    return HeadConfig(
        kind="dspark" if variant == "DSpark" else "dflash",
        format=f"{variant}, {source} format",
        decoder=decoder,
        target_hidden_size=size_field(fields, "target_hidden_size", decoder.hidden_size, where),
        draft_vocab_size=vocab,
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        layers_to_capture=layers,
        captured_by=origin,
        fc_bias="fc.bias" in tensors,
        suggested_draft_len=min(speculative_tokens(raw, where) or trained, trained),
        mask_token_id=mask_token("mask_token_id", mask, where, known_tokens),
        trained_draft_len=trained,
        sees_ahead=sees_ahead,
        windows_by_row=windows_by_row,
        value_scale=_factor(fields, "attention_value_scale", where, zero_is_none=False) or 1.0,
        samples_from_anchor=anchor,
        logit_scale=_factor(fields, "output_multiplier", where) or 1.0,
        logit_softcap=_factor(fields, "final_logit_softcapping", where),
        embedding_scale=_factor(fields, "input_embedding_scale", where),
        context_embeddings=flag_field(fields, "context_embeddings", where),
        **extra,
    )


def _objects(raw: dict[str, Any], where: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what has the layers' fields, and `dflash_config`."""
    names = raw.get("architectures")
    if names is not None and (not isinstance(names, list) or not names):
        raise CheckpointError(
            f"{where}: architectures={names!r}; it must be a list of names, "
            f'["{ARCHITECTURES[0]}"] for one. Correct it.'
        )
    inner = raw.get("transformer_layer_config") if raw.get("speculators_model_type") else raw
    nested = {} if raw.get("dflash_config") is None else raw["dflash_config"]
    if not isinstance(nested, dict) or not isinstance(inner, dict):
        raise CheckpointError(
            f"{where}: dflash_config and transformer_layer_config must be objects. Copy the file "
            "again from the head's source."
        )
    return inner, nested


def _fields(
    raw: dict[str, Any], inner: dict[str, Any], nested: dict[str, Any], where: Path
) -> dict[str, Any]:
    """Returns the head's own fields, wherever config.json has them.

    Raises:
        CheckpointError: a field has two values, or stands where nothing reads it.
    """
    for name in _OWN:
        values = [value for value in (raw.get(name), nested.get(name)) if value is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise CheckpointError(
                f"{where}: {name}={values[0]!r}, and {values[1]!r} in dflash_config. Remove the "
                "one that the head was not trained with."
            )
    for place, names, of, read in (
        ("transformer_layer_config", _OWN, {} if inner is raw else inner, nested | raw),
        ("dflash_config", _AT_TOP, nested, raw),
    ):
        for name in names:
            value = of.get(name)
            if value is not None and value != read.get(name):
                raise CheckpointError(
                    f"{where}: {name}={value!r} stands in {place}, where it is not read. Move it "
                    "to the top of the file, or remove it."
                )
    return {**nested, **{name: value for name, value in raw.items() if value is not None}}


def _block(fields: dict[str, Any], variant: str, where: Path) -> tuple[int, bool]:
    """Returns the rows of a block, and whether the last token's proposes too."""
    rows, allowed = _required(fields, "block_size", where), range(2, MAX_DRAFT_LEN + 1)
    rows = checked_int(where, "block_size", rows, allowed, cure="Correct it.")
    anchor = _agreed(fields, ("sample_from_anchor", "shift_label"), where)  # the latter: ModelOpt's
    return rows, variant == "DSpark" if anchor is None else anchor


def _agreed(fields: dict[str, Any], names: Sequence[str], where: Path) -> bool | None:
    """Returns the flag that several names stand for; None where none is given."""
    given = {
        name: flag_field(fields, name, where) for name in names if fields.get(name) is not None
    }
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in given.items())
        raise CheckpointError(
            f"{where}: {both} contradict each other. Remove the one that the head was not trained "
            "with."
        )
    return next(iter(given.values()), None)


def _with_window(inner: dict[str, Any], fields: dict[str, Any], where: Path) -> dict[str, Any]:
    """Returns the layers' fields, with the window of `swa_window_size` where that is given."""
    if fields.get("swa_window_size") is None:
        return inner
    window, types = size_field(fields, "swa_window_size", 1, where), inner.get("layer_types")
    slides = SLIDING in types if isinstance(types, list) else inner.get("use_sliding_window")
    if fields.get("use_swa") is None and not slides:
        raise CheckpointError(
            f"{where}: swa_window_size={window}, but nothing says that layers slide. Write "
            '"use_swa": true beside it, or false, as the head was trained.'
        )
    # It counts before sliding_window, as in vLLM.
    inner = {**inner, "sliding_window": window}
    if types:  # these say what slides
        inner["use_sliding_window"] = True
    return inner


def _layers(
    inner: dict[str, Any], fields: dict[str, Any], sources: Sources, where: Path
) -> DecoderConfig:
    """Returns the head's layers, with the windows that the file says."""
    decoder = head_layers({"model_type": "qwen3", **inner}, sources, where)
    refuse_other_layers(decoder, f"{where}: DFlash heads")
    sinks = any([flag_field(fields, name, where) for name in _SINKS])
    return replace(decoder, attention_sinks=sinks)


def _dspark_fields(
    fields: dict[str, Any], hidden_size: int, tensors: Sources, where: Path
) -> dict[str, Any]:
    """Returns the fields of `HeadConfig` that DSpark has more than DFlash."""
    kind = fields.get("markov_head_type", "vanilla")
    if kind not in MARKOV_TYPES:
        raise CheckpointError(
            f"{where}: markov_head_type={kind!r}; allowed are {', '.join(MARKOV_TYPES)}. Use a "
            "head of one of these."
        )
    rank = size_field(fields, "markov_rank", 256, where, least=0)  # 0: without the bias
    found = {"markov_rank": rank, "markov_kind": kind}
    weight, asked = tensors.get(f"{_CONFIDENCE}weight"), _agreed(fields, _HAS_CONFIDENCE, where)
    if asked and weight is None:
        logger.warning(
            "%s says %s, but the head has no confidence_head.proj.weight: its drafts are judged by "
            "their own probabilities.", where, " or ".join(_HAS_CONFIDENCE),
        )  # fmt: skip
    if weight is not None and asked is not False:
        reads_markov = _agreed(fields, ("confidence_head_with_markov",), where)
        if reads_markov is None:  # sources differ in what that means
            reads_markov = weight.shape[-1] != hidden_size
        found["confidence_size"] = hidden_size + (rank if reads_markov else 0)
        found["confidence_bias"] = f"{_CONFIDENCE}bias" in tensors
    return found


def _refuse_relatives(
    raw: dict[str, Any], nested: dict[str, Any], variant: str, where: Path
) -> None:
    """Refuses heads that look like DFlash's and compute more."""
    kind = raw.get("speculators_model_type") or "dflash"
    names = _architectures(raw) or [ARCHITECTURES[0]]
    relatives = dict(_RELATIVES)
    if variant != "DSpark":
        relatives["markov_rank"] = "a bias like DSpark's"
    else:
        relatives |= dict.fromkeys(_DFLASH2, "DFlash2's parts")
    found = [what for name, what in relatives.items() if raw.get(name) or nested.get(name)]
    if False in (raw.get("is_neox_style"), nested.get("is_neox_style")):
        found.append("RoPE that rotates neighbours, is_neox_style false")
    projector = _projector(raw)
    if projector not in (None, variant.lower()):
        found.append(f"projector_type {projector!r}")
    said = " ".join([str(kind), str(projector), *names]).lower()
    found += [what for name, what in _RELATIVE_NAMES.items() if name in said]
    is_other = kind not in ("dflash", "dflash2", "dspark") or names[0] not in ARCHITECTURES
    if is_other and not found and kind in ("dflash", "dflash2", "dspark"):
        raise CheckpointError(
            f"{where}: architectures={names!r} is no head's; allowed are "
            f"{', '.join(ARCHITECTURES)}. Correct it if the file is a head's."
        )
    if found or is_other:
        what = ", ".join(dict.fromkeys(found)) or kind
        raise CheckpointError(
            f"{where} is a head of {names[0]} ({what}). Of its relatives DFlash, DFlash2 and "
            "DSpark are supported: use a head of one of these."
        )


def _dflash2_fields(
    fields: dict[str, Any], decoder: DecoderConfig, block: int, draft_vocab: int, where: Path
) -> dict[str, Any]:
    """Returns the fields of `HeadConfig` that DFlash2 has more than DFlash."""
    largest = {"conv_kernel_size": block, "selector_top_k": min(MAX_CANDIDATES, decoder.vocab_size)}
    taps, group, rank, count = (
        checked_int(
            where,
            name,
            _required(fields, name, where, "DFlash2"),
            range(1, largest.get(name, MAX_SIZE) + 1),
            cure="Correct it.",
        )
        for name in _DFLASH2
    )
    if decoder.hidden_size % group:
        raise CheckpointError(
            f"{where}: conv_group_size={group} does not divide hidden_size={decoder.hidden_size}. "
            "Correct it."
        )
    if any(decoder.moe_of_layer(i) is not None for i in range(decoder.num_layers)):
        raise CheckpointError(
            f"{where}: DFlash2 layers with experts are not supported. Use a dense head."
        )
    if draft_vocab != decoder.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size={draft_vocab}, vocab_size={decoder.vocab_size}: a DFlash2 "
            "head drafts the target's whole vocabulary. Use a head that does, or correct the field."
        )
    return {
        "block_convolution": (taps, group),
        "selector_rank": rank,
        "selector_candidates": count,
    }


def _factor(
    fields: dict[str, Any], name: str, where: Path, zero_is_none: bool = True
) -> float | None:
    """Returns a number above 0; None where there is none, or 0 stands for none."""
    value = fields.get(name)
    if value is None or (zero_is_none and is_number(value) and value == 0):
        return None
    return checked_positive(where, name, value, " or null", "Correct it.")


def _required(fields: dict[str, Any], name: str, where: Path, kind: str = "DFlash") -> Any:
    value = fields.get(name)
    if value is None:
        raise CheckpointError(
            f"{where} does not say {name}, which a {kind} head cannot do without. Copy the file "
            "again from the head's source."
        )
    return value


def _sees_ahead(
    fields: dict[str, Any], windows_see_by_default: bool, decoder: DecoderConfig, where: Path
) -> tuple[bool, ...]:
    """Returns of each layer whether the rows of a block see later ones.

    `is_causal`, `causal` and `causal_head` are about all layers. Without them full layers see
    ahead. Sliding ones do not in z-lab's format. In that of speculators a field says so, or its
    absence: DFlash2's do.
    """
    first, *others = _CAUSAL  # ModelOpt writes the others always
    for names in ([first], others):
        is_causal = _agreed(fields, names, where)
        if is_causal is not None:
            return (not is_causal,) * decoder.num_layers
    windows_see = flag_field(fields, WINDOWS_SEE, where)
    if fields.get(WINDOWS_SEE) is None:
        windows_see = windows_see_by_default
    slides = [decoder.window(i) is not None for i in range(decoder.num_layers)]
    return tuple(windows_see or not slide for slide in slides)


def _with_one_window(
    decoder: DecoderConfig, inner: dict[str, Any], block: int, where: Path
) -> DecoderConfig:
    """Returns the layers with the window of `use_swa`.

    Every layer has it, unless `layer_types` says which ones slide.
    """
    window = size_field(inner, "sliding_window", 0, where)
    if window < block:  # rows of a block see each other, whatever their windows
        raise CheckpointError(
            f"{where} says use_swa, with swa_window_size={window or None}: it must be an int from "
            f"block_size={block} on. Correct it, or remove use_swa."
        )
    if any(decoder.layer_windows):
        return decoder
    return replace(decoder, layer_windows=(window,) * decoder.num_layers)


def widened(decoder: DecoderConfig, sees_ahead: tuple[bool, ...], block: int) -> DecoderConfig:
    """Returns the layers with wider windows where rows see ahead.

    They reach as far back from a block's end as the checkpoint's do from its start.
    """
    windows = [decoder.window(i) for i in range(decoder.num_layers)]
    wider = tuple(
        window + block if window is not None and ahead else window
        for window, ahead in zip(windows, sees_ahead, strict=True)
    )
    return replace(decoder, layer_windows=wider) if any(wider) else decoder


def _target_layers(
    fields: dict[str, Any],
    where: Path,
    num_draft_layers: int,
    target: DecoderConfig | None,
    asked: Sequence[int] | None,
) -> tuple[tuple[int, ...], str]:
    """Returns 0-based layers whose output is captured, and where that comes from."""
    inputs, outputs = fields.get("aux_hidden_state_layer_ids"), fields.get("target_layer_ids")
    made_for = size_field(fields, "num_target_layers", 0, where)
    if target is not None and made_for not in (0, target.num_layers):
        raise CheckpointError(
            f"{where}: num_target_layers={made_for}, but the target has {target.num_layers} "
            "layers. Use a head that was trained for this target, or correct the field."
        )
    if asked is not None:
        layers, origin = layer_ids(asked, "target_layer_ids", where), "target_layer_ids"
    elif inputs is not None:
        ids = layer_ids(inputs, "aux_hidden_state_layer_ids", where)
        layers = tuple(i - 1 for i in ids)
        if outputs is not None and layer_ids(outputs, "target_layer_ids", where) != layers:
            raise CheckpointError(
                f"{where}: aux_hidden_state_layer_ids={list(ids)}, inputs of layers, and "
                f"target_layer_ids={list(outputs)}, outputs, are not the same states. Remove the "
                "one that the head was not trained with."
            )
        origin = f"aux_hidden_state_layer_ids {list(ids)} (inputs)"
    elif outputs is not None:
        layers = layer_ids(outputs, "target_layer_ids", where)
        origin = "config.json's target_layer_ids (outputs)"
    else:
        total = made_for or (target.num_layers if target else None)
        if total is None:
            raise CheckpointError(f"{where} does not say target_layer_ids. Give target_layer_ids.")
        layers, origin = default_target_layers(num_draft_layers, total), "default"
    check_captures(layers, origin, target, "target_layer_ids", where)
    if origin != "default" and len(set(layers)) < len(layers):
        raise CheckpointError(
            f"{where}: layers to capture {list(layers)} (0-based outputs, from {origin}): one is "
            "there twice. Correct them, or give target_layer_ids."
        )
    return layers, origin
