"""From a Hugging Face `config.json` to a `DecoderConfig`.

transformers' config classes supply each family's defaults and bring old RoPE fields into the
current form. Whatever trtspec's decoder would compute differently is refused here, by name.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import MAX_SIZE, are_ints, checked_int, checked_positive, is_int, is_number
from ..errors import CheckpointError, described
from ..models.config import DecoderConfig
from ..models.rope import ROPE_TYPES, RopeTables
from .families import FAMILIES, Family
from .families.long_rope import LONG_ROPE, within_original_length
from .files import is_there, read_json_object
from .quantization import quantization_of
from .text_part import TEXT_TYPES, text_config

MAX_HEAD_DIM = 4096
MAX_LABELS = 10_000
MAX_LAYERS = 1000  # each costs time before the weights are looked at


def load_config(model_dir: Path) -> DecoderConfig:
    """Reads `config.json`, and `generation_config.json` for its end tokens, offline.

    A config without a dtype counts as float32.

    Raises:
        CheckpointError: a file is missing or unreadable, or asks for something the decoder does
            not compute: another architecture, RoPE type or activation, quantised weights.
    """
    model_dir = Path(model_dir)
    where = model_dir / "config.json"
    raw = read_json_object(where, "Point to a Hugging Face model directory.")
    _refuse_both_ways(raw, where)
    config = parse_config(raw, where)
    _refuse_other_windows(config, where)
    return replace(config, eos_token_ids=_eos_token_ids(config.eos_token_ids, model_dir))


def parse_config(raw: dict[str, Any], where: Path) -> DecoderConfig:
    """Returns the decoder of a config as written in `where` (or in a draft head's config there).

    Raises:
        CheckpointError: as `load_config`.
    """
    _check_labels(raw, where)
    raw = text_config(raw, where)
    _refuse_unsupported(raw, where)
    hf = _hf_config(raw, where)
    merged = hf.to_dict()
    rope = dict(hf.rope_parameters or {})
    _check_rope(rope, where, FAMILIES[raw["model_type"]])
    # Of a config whose layers differ transformers names the sizes by layer alone.
    first = hf.per_layer_config[0] if getattr(hf, "is_heterogeneous", False) else hf
    _check_numbers(first, rope, where)
    heads, kv_heads = first.num_attention_heads, first.num_key_value_heads
    head_dim = getattr(first, "head_dim", None) or hf.hidden_size // heads
    _check_heads(heads, kv_heads, head_dim, where)
    _check_sections(rope.get("mrope_section"), head_dim, where)
    config = DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        layer_windows=(None,) * hf.num_hidden_layers,
        eos_token_ids=tuple(_token_ids(hf.eos_token_id, where)),
        dtype=str(merged.get("dtype") or "float32").removeprefix("torch."),
        has_four_bits=_has_four_bits(raw, where),
        raw=merged,
    )
    config = replace(config, **_fields_of_family(raw["model_type"], hf, where))
    config = within_original_length(config, where)
    for layer in map(config.of_layer, range(config.num_layers)):
        _check_heads(layer.num_heads, layer.num_kv_heads, layer.head_dim, where)
    _check_rotation(config, where)
    return config


def _fields_of_family(model_type: str, hf: Any, where: Path) -> dict[str, Any]:
    try:
        return FAMILIES[model_type].fields(hf, where)
    except CheckpointError:
        raise
    except Exception as err:  # of a list where a number was expected, and the like
        raise CheckpointError(
            f"{where} has a field of another kind than {model_type!r} models have "
            f"({type(err).__name__}: {err}). Copy it again from the model's source."
        ) from err


def _hf_config(raw: dict[str, Any], where: Path) -> Any:
    from transformers import CONFIG_MAPPING

    family = FAMILIES[raw["model_type"]]
    if family.as_hf is not None:
        raw = family.as_hf(raw, where)
    try:
        values = {**copy.deepcopy(raw), "model_type": family.hf_type}
        config = CONFIG_MAPPING[family.hf_type].from_dict(values | _even_hidden_size(raw))
        config.hidden_size = values.get("hidden_size", config.hidden_size)
        if config.rope_parameters:  # as transformers' models do: fields beside them count
            config.standardize_rope_params()
        return config
    except Exception as err:  # its validators raise many types; each means a bad config.json
        raise CheckpointError(
            f"transformers cannot read {where} ({err}). Copy it again from the model's source."
        ) from err


def _even_hidden_size(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a hidden_size that all heads divide, where heads have a size of their own.

    Some classes of transformers ask for one even then; their models do not need it.
    """
    hidden_size, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if not (is_int(hidden_size, 1, MAX_SIZE) and is_int(heads, 1, MAX_SIZE)):
        return {}
    if not is_int(head_dim, 1, MAX_SIZE) or hidden_size % heads == 0:
        return {}
    return {"hidden_size": heads * head_dim}


def _has_four_bits(raw: dict[str, Any], where: Path) -> bool:
    """Whether weights are of a form that kernels for 4 bits read."""
    packing = quantization_of(raw, where).packing
    if packing is None or packing.has_groups:  # such groups seldom lie together
        return False
    return packing.bits == 4 and packing.form != "mxfp4"


def _refuse_unsupported(raw: dict[str, Any], where: Path) -> None:
    """Checks the file as written: transformers would fill in, warn of or pass over such fields."""
    model_type = raw.get("model_type")
    _refuse_linear_attention(raw, where)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type={model_type!r} is not supported; allowed are "
            f"{', '.join([*FAMILIES, *TEXT_TYPES])}. Use a model of one of these families."
        )
    quantization_of(raw, where)  # one that is not read is refused
    _check_num_layers(raw.get("num_hidden_layers"), where)
    family = FAMILIES[model_type]
    act = raw.get("hidden_act", family.activations[0])
    if act not in family.activations:
        allowed = " or ".join(repr(name) for name in family.activations)
        raise CheckpointError(
            f"{where}: hidden_act={act!r} is not supported; allowed is {allowed}. Use another "
            "model."
        )
    _check_fields_of_layers(raw, where, family)
    _check_partial_rotary(raw, where, family)
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key):
            _check_rope(raw[key], where, family)


def _refuse_other_windows(config: DecoderConfig, where: Path) -> None:
    """Refuses sliding layers of a family that has none: transformers' cache would forget by them,
    though its masks do not."""
    types = config.raw.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types and not any(config.layer_windows):
        raise CheckpointError(
            f"{where}: layer_types names 'sliding_attention', but no layer of this model has a "
            f"window (model_type={config.raw.get('model_type')!r}). Make those layers "
            "'full_attention', or use a model of a family with windows, such as Mistral's."
        )


def _check_fields_of_layers(raw: dict[str, Any], where: Path, family: Family) -> None:
    """Refuses fields that a file gives to single layers, but for those that the family reads."""
    given = raw.get("per_layer_config")
    layers = given.values() if isinstance(given, dict) else ()
    names = {str(name) for fields in layers if isinstance(fields, dict) for name in fields}
    found = sorted(names - set(family.fields_of_layers))
    if found:
        allowed = " and ".join(family.fields_of_layers) or "none"
        raise CheckpointError(
            f"{where}: per_layer_config gives layers {', '.join(found)} of their own, which is not "
            f"supported; allowed for model_type={raw['model_type']!r} is {allowed}. Use another "
            "model."
        )


def _refuse_both_ways(raw: dict[str, Any], where: Path) -> None:
    """Refuses a model whose tokens see later ones, such as one that makes embeddings."""
    for part in _with_text_part(raw):
        if part.get("is_causal") is False:
            raise CheckpointError(
                f"{where}: is_causal=False is not supported: such a model's tokens see later ones, "
                "so it generates no text. Use a causal language model."
            )


def _refuse_linear_attention(raw: dict[str, Any], where: Path) -> None:
    for part in _with_text_part(raw):
        family = FAMILIES.get(str(part.get("model_type")))
        if family is not None and family.has_linear_attention:
            continue
        types = part.get("layer_types")
        types = types if isinstance(types, list) else []
        found = f"{types.count('linear_attention')} of {len(types)} layer_types are"
        if "linear_attention" not in types:
            interval = part.get("full_attention_interval")
            if types or interval in (None, 1):
                continue
            found = f"full_attention_interval={interval!r}: the layers between are"
        raise CheckpointError(
            f"{where}: {found} 'linear_attention', which model_type={part.get('model_type')!r} "
            "does not have here; allowed are 'full_attention' and 'sliding_attention'. Of such "
            "models Qwen3-Next and Qwen3.5 are supported: use one of them."
        )


def _with_text_part(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the config, and its text model's where that is nested."""
    inner = raw.get("text_config")
    return [raw, inner] if isinstance(inner, dict) else [raw]


def _check_labels(raw: dict[str, Any], where: Path) -> None:
    """Refuses a large `num_labels` in any part: transformers makes a name for every label."""
    parts = [raw]
    while parts:
        part = parts.pop()
        count = part.get("num_labels", 0)
        if isinstance(count, int) and count > MAX_LABELS:
            raise CheckpointError(
                f"{where}: num_labels={count}; it must be an int in 0 … {MAX_LABELS}. A language "
                "model needs none: remove it."
            )
        parts += [inner for inner in part.values() if isinstance(inner, dict)]


def _check_num_layers(count: Any, where: Path) -> None:
    """Refuses a large number before transformers makes lists of that length."""
    if isinstance(count, int) and count > MAX_LAYERS:
        raise CheckpointError(
            f"{where}: num_hidden_layers={count}; it must be an int in 1 … {MAX_LAYERS}. Copy the "
            "file again from the model's source."
        )


def _check_numbers(hf: Any, rope: dict[str, Any], where: Path) -> None:
    """Sizes are ints >= 1; RoPE's numbers are positive and finite."""
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        checked_int(where, name, getattr(hf, name), range(1, MAX_SIZE + 1))
    _check_rope_numbers(rope, where)
    eps = hf.rms_norm_eps
    if not is_number(eps) or not 0 <= eps < 1:
        raise CheckpointError(
            f"{where}: rms_norm_eps={eps!r}; it must be a number in [0, 1). Copy the file again "
            "from the model's source."
        )
    mtp = getattr(hf, "num_nextn_predict_layers", None)
    if mtp is not None:
        checked_int(where, "num_nextn_predict_layers", mtp, range(100))


def _check_rotation(config: DecoderConfig, where: Path) -> None:
    """Computes every layer's first rotations: transformers' formulas raise errors of many types."""
    try:
        for table in RopeTables(config, 2).buffers(recurse=False):
            if not bool(table.isfinite().all()):
                raise OverflowError("cos and sin are not finite")
    except Exception as error:
        shown = {repr(config.of_layer(i).rope_parameters) for i in range(config.num_layers)}
        raise CheckpointError(
            f"{where}: the RoPE parameters {' and '.join(sorted(shown))} make no rotation "
            f"({described(error)}). Copy the file again from the model's source."
        ) from error


def _check_rope_numbers(rope: dict[str, Any], where: Path) -> None:
    by_type = [nested for nested in rope.values() if isinstance(nested, dict)]
    for nested in by_type:
        _check_rope_numbers(nested, where)
    for name in ("rope_theta", "factor", "attention_factor"):
        value = rope.get(name)
        if value is not None or (name == "rope_theta" and not by_type):
            checked_positive(f"{where}, RoPE parameters", name, value)
    for name, value in rope.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(
                f"{where}: {name}={value!r} in the RoPE parameters; it must be finite. Copy the "
                "file again from the model's source."
            )


def _check_rope(rope: Any, where: Path, family: Family) -> None:
    if family.has_rope_by_type and isinstance(rope, dict):
        nested = [value for value in rope.values() if isinstance(value, dict)]
        if len(nested) == len(rope):
            for parameters in nested:
                _check_rope(parameters, where, replace(family, has_rope_by_type=False))
                if LONG_ROPE in (parameters.get("rope_type"), parameters.get("type")):
                    raise CheckpointError(
                        f"{where}: rope_type={LONG_ROPE!r} of some layers is not supported; it is "
                        "where all layers have the same. Use another model."
                    )
            return
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        form = "one flat object for all layers"
        if family.has_rope_by_type:
            form = "an object for each layer type, such as full_attention,"
        raise CheckpointError(
            f"{where}: RoPE parameters {rope!r}: {form} is supported, with rope_type one of "
            f"{', '.join(ROPE_TYPES)}. Use another model."
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if family.has_mrope and rope_type == "mrope":  # what it was called before "default"
        rope_type = "default"
    if (
        rope.get("mrope_section")
        and not family.is_text_alone
        and (not family.has_mrope or rope.get("mrope_interleaved"))
    ):
        raise CheckpointError(
            f"{where}: mrope_section={rope['mrope_section']!r} with mrope_interleaved="
            f"{rope.get('mrope_interleaved')!r} is not supported; allowed are sections one after "
            f"the other, in {', '.join(n for n, f in FAMILIES.items() if f.has_mrope)}. Use "
            "another model."
        )
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"{where}: rope_type={rope_type!r} is not supported; allowed are "
            f"{', '.join(ROPE_TYPES)}. Remove the scaling if it is 'dynamic', to use the model "
            "within its original length, or use another model."
        )
    _check_partial_rotary(rope, where, family)


def _check_partial_rotary(fields: dict[str, Any], where: Path, family: Family) -> None:
    factor = fields.get("partial_rotary_factor")
    if factor not in (None, 1) and not family.has_partial_rotary:
        raise CheckpointError(
            f"{where}: partial_rotary_factor={factor!r} is not supported; allowed is 1 (RoPE on "
            "the whole head). Use another model."
        )


def _check_sections(sections: Any, head_dim: int, where: Path) -> None:
    if sections is None:
        return
    good = isinstance(sections, list) and len(sections) == 3 and are_ints(sections, 0)
    if not good or 2 * sum(sections) != head_dim:
        raise CheckpointError(
            f"{where}: mrope_section={sections!r}; it must be three ints that sum to head_dim / 2 "
            f"= {head_dim // 2}. Copy the file again from the model's source."
        )


def _check_heads(heads: int, kv_heads: int, head_dim: int, where: Path) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads="
            f"{kv_heads}: query heads share KV heads evenly. Correct the two fields."
        )
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise CheckpointError(
            f"{where}: head_dim={head_dim} must be even and in 2 … {MAX_HEAD_DIM}: RoPE rotates "
            "pairs. Correct head_dim, or hidden_size and num_attention_heads."
        )


def _eos_token_ids(from_config: tuple[int, ...], model_dir: Path) -> tuple[int, ...]:
    """Returns the end tokens of config.json, then those of generation_config.json."""
    found = list(from_config)
    path = model_dir / "generation_config.json"
    if is_there(path):
        cure = "Copy it again from the model's source, or remove it."
        found += _token_ids(read_json_object(path, cure).get("eos_token_id"), path)
    return tuple(dict.fromkeys(found))


def _token_ids(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_int(token, -1, MAX_SIZE - 1) for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id={value!r} must be a token id, a list of them, or null. Fix it."
        )
    return [token for token in ids if token >= 0]  # -1 is how some files say none
