"""What a checkpoint's config says of quantised weights: how they are stored, and with what scales.

| quant_method | weights `X.weight` | scales |
|---|---|---|
| `fp8` | F8_E4M3 | `X.weight_scale_inv` or `_scale` of blocks (`weight_block_size`) or the tensor |
| `fbgemm_fp8` | F8_E4M3 | `X.weight_scale` of rows |
| `compressed-tensors` | F8_E4M3 or I8 | `X.weight_scale` of the tensor, of rows or of blocks |
| `modelopt` | F8_E4M3 | `X.weight_scale` of the tensor, of rows or of blocks of 128 × 128 |
| `mxfp4` | U8 | as `mxfp4.py` says |

Of numbers that lie packed the tensors have other names:

| quant_method | format |
|---|---|
| `awq`, `gptq`, `auto-round`, `compressed-tensors` with `pack-quantized` | `packed_ints.py` |
| `modelopt` with `NVFP4`, `compressed-tensors` with `nvfp4-pack-quantized` | `packed_floats.py` |
| `compressed-tensors` with `mxfp4-pack-quantized` | the same |

ModelOpt may write its part into `hf_quant_config.json` beside config.json. Weights that a config
leaves out (`ignore`, `modules_to_not_convert`, `exclude_modules`) have another dtype: that decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import is_int
from ..errors import CheckpointError
from .files import read_json_object

FP8, INT8, MXFP4 = "F8_E4M3", "I8", "U8"
MODELOPT_FILE = "hf_quant_config.json"
Fields = dict[str, Any]


@dataclass(frozen=True)
class Quantization:
    """How weights are stored."""

    dtype: str  # of quantised weights, as safetensors names it
    suffixes: tuple[str, ...] = ("_scale",)  # a weight's scales have its name and one of these
    block: tuple[int, int] | None = None  # that shares a scale; None: a row does, or the tensor


@dataclass(frozen=True)
class Packing:
    """How numbers of 4 bits (or 8) lie in bytes or words."""

    form: str  # "compressed", "gptq" or "awq" (integers), "modelopt" or "nvfp4", "mxfp4"
    bits: int = 4
    group: int = -1  # columns that share a scale; -1: all
    has_zeros: bool = False
    adds_to_zeros: int = 0
    has_groups: bool = False  # a tensor says which columns share one
    may_differ: bool = False  # modules have bits and groups of their own: their shapes say it


@dataclass(frozen=True)
class Forms:
    """How the quantised weights of a checkpoint are stored: in up to two ways, which tensors' dtype
    tells apart."""

    codes: Quantization | None = None
    packing: Packing | None = None


def quantization_fields(raw: Fields, where: Path) -> tuple[Fields, str]:
    """Returns what the config says of quantisation, nothing if all is float; and where it does.

    Args:
        raw: config.json's content. where: its path.

    Raises:
        CheckpointError: it is no object.
    """
    config, source = raw.get("quantization_config"), f"{where}: quantization_config"
    beside = where.parent / MODELOPT_FILE
    if not config and beside.is_file():
        config = read_json_object(beside, "Copy it again from the checkpoint's source.")
        source, inner = f"{beside}: quantization", config.get("quantization") or {}
        if not isinstance(inner, dict):
            raise _unsupported(source, repr(inner))
        config = {"quant_method": "modelopt", **inner}
    if config and not isinstance(config, dict):
        raise _unsupported(source, repr(config))
    if config and isinstance(inner := config.get("quantization"), dict):  # as in that file
        config = {**config, **inner}
    return config or {}, source


def _unsupported(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source} ({what}) is set, but only these are supported: float weights; FP8 (e4m3) and "
        "INT8 weights with scales of the tensor, of rows or of blocks; INT4 weights by AWQ, GPTQ "
        "or pack-quantized, the last two with 8 bits, too; NVFP4 and mxfp4-pack-quantized; MXFP4 "
        "experts (quant_method "
        f"{', '.join(map(repr, _READERS))}). Use the unquantised checkpoint, or one of these."
    )


def quantization_of(raw: Fields, where: Path) -> Forms:
    """Returns how the weights beside a config are quantised, of those that are.

    Args:
        raw, where: as of `quantization_fields`.

    Raises:
        CheckpointError: a quantisation that is not read.
    """
    fields, source = quantization_fields(raw, where)
    if not fields or _is_of_cache_alone(fields):
        return Forms()
    method = fields.get("quant_method")
    if method is None and isinstance(fields.get("quant_algo"), str):
        method = "modelopt"
    read = _READERS.get(method) if isinstance(method, str) else None
    try:
        found = read(fields) if read is not None else ""
    except (AttributeError, TypeError) as error:  # of a list where an object was expected
        found = f"a field of another kind than the format has: {error}"
    if isinstance(found, Packing):
        return Forms(packing=found)
    if isinstance(found, Quantization):
        return Forms(found)
    if isinstance(found, Forms):
        return found
    raise _unsupported(source, f"{method or fields!r}{found and f', {found}'}")


def _is_of_cache_alone(fields: Fields) -> bool:
    """Whether the weights are floats, and the KV cache alone is quantised."""
    if not fields.get("kv_cache_scheme") and not fields.get("kv_cache_quant_algo"):
        return False
    method = fields.get("quant_method", "modelopt")
    if method == "compressed-tensors":
        return not _groups_of_weights(fields)
    return method == "modelopt" and fields.get("quant_algo") is None


def _groups_of_weights(fields: Fields) -> list[Any]:
    """The groups in config_groups but for those of activations alone, as attention's are."""
    groups = fields.get("config_groups") or {}
    if not isinstance(groups, dict):
        return [groups]
    return [
        group
        for group in groups.values()
        if not isinstance(group, dict) or group.get("weights") is not None
    ]


# Each returns what is read, or a text that names what is not.
def _fp8(fields: Fields) -> Quantization | str:
    if fields.get("fmt", "e4m3") != "e4m3":
        return f"'fmt': {fields['fmt']!r}"
    size = fields.get("weight_block_size")
    if size is None:
        return Quantization(FP8, ("_scale", "_scale_inv"))
    block = _block(size)
    if block is None:
        return f"'weight_block_size': {size!r}"
    return Quantization(FP8, ("_scale_inv", "_scale"), block)


def _compressed(fields: Fields) -> Forms | str:
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        return f"sparsity_config of format {sparsity['format']!r}"
    if (fields.get("transform_config") or {}).get("config_groups"):
        return "transform_config: activations are rotated while it runs"
    found: set[Quantization | Packing] = set()
    for group in _groups_of_weights(fields):
        form = group.get("format") or fields.get("format")
        if isinstance(form, str) and form.endswith("pack-quantized") and group.get("weights"):
            packing = _packed(form, group["weights"])
            if isinstance(packing, str):
                return packing
            found.add(packing)
            continue
        if form not in ("float-quantized", "int-quantized", "naive-quantized"):
            return f"format {form!r}"
        weights = group["weights"]
        kind = weights.get("type"), weights.get("num_bits")
        strategy, size = weights.get("strategy"), weights.get("block_structure")
        if kind not in (("float", 8), ("int", 8)) or not weights.get("symmetric", True):
            return f"weights of {weights.get('num_bits')!r} bits, type {weights.get('type')!r}"
        if strategy not in ("tensor", "channel", "block"):
            return f"weights' strategy {strategy!r}"
        block = _block(size) if strategy == "block" else None
        if strategy == "block" and block is None:
            return f"block_structure {size!r}"
        found.add(Quantization(FP8 if kind[0] == "float" else INT8, block=block))
    return _forms(found, "config_groups")


def _forms(found: set[Quantization | Packing], field: str) -> Forms | str:
    """Returns one form of codes and one of packed numbers at most."""
    codes = [how for how in found if isinstance(how, Quantization)]
    packings = [how for how in found if isinstance(how, Packing)]
    if not found or len(codes) > 1 or len(packings) > 1:
        kinds = "; ".join(sorted(map(str, found)))
        return (
            f"{len(found)} kinds of weights in {field}, where one of 8 bits and one that is packed "
            f"are allowed: {kinds}"
        )
    return Forms(next(iter(codes), None), next(iter(packings), None))


def _packed(form: str, weights: Fields) -> Packing | str:
    """compressed-tensors' formats of packed numbers."""
    kind = weights.get("type"), weights.get("num_bits")
    said = f"weights of {kind[1]!r} bits, type {kind[0]!r}, in {form}"
    if form == "pack-quantized":
        is_of_rows = weights.get("strategy") in ("group", "channel")
        if kind not in (("int", 4), ("int", 8)) or not is_of_rows:
            return f"{said}, strategy {weights.get('strategy')!r}"
        group = weights.get("group_size") if weights["strategy"] == "group" else -1
        if not is_int(group, 1) and group != -1:
            return f"{said}, group_size {group!r}"
        has_zeros = not weights.get("symmetric", True)
        return Packing("compressed", int(weights["num_bits"]), int(group), has_zeros)
    known = {"nvfp4-pack-quantized": ("nvfp4", 16), "mxfp4-pack-quantized": ("mxfp4", 32)}
    if form not in known or kind != ("float", 4):
        return said
    name, group = known[form]
    if weights.get("group_size") not in (None, group):
        return f"{said}, group_size {weights['group_size']!r}"
    return Packing(name, group=group)


def _of_words(fields: Fields, form: str, **more: Any) -> Packing | str:
    """AWQ's and GPTQ's fields."""
    bits = fields.get("bits", fields.get("w_bit"))
    group = fields.get("group_size", fields.get("q_group_size", 128))
    allowed = (4,) if form == "awq" else (4, 8)
    if not is_int(bits) or bits not in allowed:
        return f"'bits': {bits!r}"
    if not is_int(group) or (group < 1 and group != -1):
        return f"'group_size': {group!r}"
    return Packing(form, bits, group, has_zeros=True, **more)


def _awq(fields: Fields) -> Packing | str:
    for field in ("version", "checkpoint_format"):
        if str(fields.get(field, "gemm")).lower() != "gemm":
            return f"{field!r}: {fields[field]!r}"
    if not fields.get("zero_point", True) and "autoround_version" not in fields:  # which has zeros
        return f"'zero_point': {fields['zero_point']!r}"
    return _of_words(fields, "awq")


def _gptq(fields: Fields) -> Packing | str:
    form = fields.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or fields.get("is_marlin_format"):
        return f"'checkpoint_format': {form!r}"
    dynamic = fields.get("dynamic") or {}
    others = {name: own for name, own in dynamic.items() if not name.startswith("-:")}
    if odd := _odd(others, "dynamic"):
        return odd
    more = {"has_groups": bool(fields.get("desc_act")), "may_differ": bool(others)}
    return _of_words(fields, "gptq", adds_to_zeros=int(form == "gptq"), **more)


def _odd(modules: Fields, field: str) -> str:
    """Names what of modules' own fields is not read, "" if all is."""
    allowed = {"bits": (4, 8), "data_type": ("int",), "act_bits": (16, 32, None)}
    for module, own in modules.items():
        for name, values in allowed.items():
            if own.get(name, values[0]) not in values:
                return f"{field!r}: {module!r} has {name!r}: {own[name]!r}"
    return ""


_OF_AUTO_ROUND = {
    **dict.fromkeys(("auto_gptq", "gptq"), "gptq"),
    **dict.fromkeys(("auto_round", "gptqmodel"), "gptq_v2"),
    **dict.fromkeys(("auto_awq", "awq"), "awq"),
}
"""What AutoRound packs its integers like, by `packing_format` without its first part."""


def _auto_round(fields: Fields) -> Packing | str:
    packing = str(fields.get("packing_format"))
    form = _OF_AUTO_ROUND.get(packing.removeprefix("auto_round:"))
    if form is None:
        return f"'packing_format': {packing!r}"
    allowed = {"data_type": ("int",), "act_bits": (16, 32, None), "super_bits": (None,)}
    for name, values in allowed.items():
        if fields.get(name, values[0]) not in values:
            return f"{name!r}: {fields[name]!r}"
    modules = fields.get("extra_config") or {}  # of 16 bits are floats, as their tensors say
    others = {module: own for module, own in modules.items() if own.get("bits", 4) < 16}
    if odd := _odd(others, "extra_config"):
        return odd
    if form != "awq":
        more = {"adds_to_zeros": int(form == "gptq"), "may_differ": bool(others)}
        return _of_words(fields, "gptq", **more)
    for module, own in others.items():
        for name in ("bits", "group_size"):
            if own.get(name, fields.get(name)) != fields.get(name):
                return f"'extra_config': {module!r} has {name!r}: {own[name]!r}, packed as AWQ does"
    return _of_words(fields, form)


def _modelopt(fields: Fields) -> Quantization | Packing | Forms | str:
    algorithm = fields.get("quant_algo")
    if algorithm == "MIXED_PRECISION" and fields.get("quantized_layers"):
        found: set[Quantization | Packing] = set()
        for module, own in fields["quantized_layers"].items():
            how = _modelopt(own)
            if isinstance(how, str | Forms):
                return f"quantized_layers: {module!r}: {own!r}"
            found.add(how)
        return _forms(found, "quantized_layers")
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Quantization(FP8)
    if algorithm == "FP8_PB_WO":
        return Quantization(FP8, block=(128, 128))
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        if fields.get("group_size") not in (None, 16):
            return f"quant_algo {algorithm!r} with 'group_size': {fields['group_size']!r}"
        return Packing("modelopt", group=16)
    return f"quant_algo {algorithm!r}"


_READERS: dict[str, Callable[[Fields], Quantization | Packing | Forms | str]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda fields: Quantization(FP8),
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": lambda fields: Quantization(MXFP4),
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}


def _block(size: Any) -> tuple[int, int] | None:
    """[rows, columns] or "rowsxcolumns"."""
    if isinstance(size, str):
        size = [int(n) if n.isdecimal() else 0 for n in size.split("x")]
    if isinstance(size, list | tuple) and len(size) == 2 and all(is_int(n, 1) for n in size):
        return size[0], size[1]
    return None
