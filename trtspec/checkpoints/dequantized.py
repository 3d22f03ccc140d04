"""Quantised weights: a weight is its number times its scale.

    scales of        shape                                     for a weight [out, in]
    the tensor       [] or [1]
    its rows         [out] or [out, 1]
    its blocks       [ceil(out / bo), ceil(in / bi)], perhaps with a 1 after each

(Packed numbers have scales of groups: `packed_ints.py`, `packed_floats.py`, `mxfp4.py`.)
Stacks of experts [E, out, in] have one more dimension in front (Step-3.5). Tensors of another dtype
are what they say. Scales and zero points of activations are left out: here these stay in the
model's dtype. Scales of the KV cache are read in `kv_scales.py`.

To most readers such a tensor is a float32 one. A product may keep the numbers: they are in
`TensorSource.scaled`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import mxfp4, packed_floats, packed_ints
from .quantization import MXFP4, Packing, Quantization, quantization_fields, quantization_of
from .scaled import ScaledTensor, as_floats
from .tensors import FLOATS, TensorSource

_OF_SERVING = re.compile(
    r"\.(q|k|v|kv)_scale$|\.(input|activation|output)_(scale|zero_point|global_scale)$"
    r"|_proj_(input|activation)_scale$"  # of a stack of experts
)
"""Scales and zero points of what is no weight."""


def dequantized(
    sources: dict[str, TensorSource], raw: dict[str, Any], where: Path
) -> dict[str, TensorSource]:
    """The tensors of a checkpoint with its quantised weights as float32 ones, without scales.

    Args:
        raw: config.json, as in `quantization_of`. where: its path, for messages.

    Raises:
        CheckpointError: a scale is missing, of another shape or dtype, or of no weight.
    """
    how = quantization_of(raw, where)
    if not quantization_fields(raw, where)[0]:
        packed = next((n for n in sources if n.endswith((".qweight", ".weight_packed"))), None)
        if packed is not None:
            raise CheckpointError(
                f"{where.parent} holds {packed}, but {where} has no quantization_config. Put the "
                "content of quantize_config.json or quant_config.json there under that name, with "
                'its quant_method ("gptq" or "awq").'
            )
        one = next((name for name in sources if _is_coded(name, sources)), None)
        if one is not None:
            raise CheckpointError(
                f"{one} in {where.parent} has dtype {sources[one].dtype} and a scale, but "
                f"{where} has no quantization_config at its top. Copy it from the checkpoint's "
                "source, or use the unquantised checkpoint."
            )
        return sources
    found = {name: s for name, s in sources.items() if not _OF_SERVING.search(name)}
    if how.packing is None:
        return found if how.codes is None else _with_scales(found, how.codes, where)
    if how.codes is None:
        return _unpacked(found, how.packing, where)
    coded = _coded(found, how.codes)
    others = {name: s for name, s in found.items() if name not in coded}
    return _unpacked(others, how.packing, where) | _with_scales(coded, how.codes, where)


def _is_coded(name: str, sources: dict[str, TensorSource]) -> bool:
    """Whether a tensor has numbers of 8 bits and a scale beside it."""
    is_short = sources[name].dtype in ("F8_E4M3", "F8_E5M2", "I8")
    stem = name.removesuffix(".weight")
    scales = *(f"{name}{suffix}" for suffix in ("_scale", "_scale_inv")), f"{stem}.SCB"
    return is_short and any(scale in sources for scale in scales)


def _coded(sources: dict[str, TensorSource], how: Quantization) -> dict[str, TensorSource]:
    """The weights that have codes, and their scales, of a checkpoint that has packed ones, too."""
    weights = [
        name
        for name, source in sources.items()
        if source.dtype == how.dtype and not name.endswith(how.suffixes)
    ]
    names = [name + suffix for name in weights for suffix in ("", *how.suffixes)]
    return {name: sources[name] for name in names if name in sources}


def _unpacked(
    sources: dict[str, TensorSource], how: Packing, where: Path
) -> dict[str, TensorSource]:
    of_ints = how.form in ("compressed", "gptq", "awq")
    return (packed_ints if of_ints else packed_floats).unpacked(sources, how, where)


def _with_scales(
    found: dict[str, TensorSource], how: Quantization, where: Path
) -> dict[str, TensorSource]:
    if how.dtype == MXFP4:
        return mxfp4.unpacked(found, where)
    dtypes = {name: source.dtype for name, source in found.items()}
    for name, source in list(found.items()):
        if source.dtype == how.dtype:
            names = [f"{name}{suffix}" for suffix in how.suffixes]
            scales = [found.pop(scale) for scale in names if scale in found]
            if len(scales) > 1:
                raise CheckpointError(
                    f"{where.parent} holds {names[0]} and {names[1]}; a weight has one of them. "
                    "Remove the one that is not its scale, or copy the checkpoint again from its "
                    "source."
                )
            found[name] = _dequantized(source, scales[0] if scales else None, how)
    of_weights = tuple(f".weight{suffix}" for suffix in how.suffixes)
    left = [name for name in found if name.endswith(of_weights)]
    if left:
        name = left[0].removesuffix("_inv").removesuffix("_scale")
        kind = f"has dtype {dtypes[name]}" if name in dtypes else "is not there"
        raise CheckpointError(
            f"{where.parent} holds {left[0]}, but {name} {kind}; it must be {how.dtype}. Copy the "
            "checkpoint again from its source."
        )
    return found


def _dequantized(
    source: TensorSource, scale: TensorSource | None, how: Quantization
) -> TensorSource:
    if scale is None:
        raise CheckpointError(
            f"{source.name} in {source.path} is {how.dtype}, but there is no "
            f"{source.name}{how.suffixes[0]}. Copy the checkpoint again from its source, all "
            "shards of it."
        )
    if len(source.shape) not in (2, 3):
        raise CheckpointError(
            f"{source.name} in {source.path} is {how.dtype} of shape {list(source.shape)}; only "
            "matrices and stacks of them may be. Copy the checkpoint again from its source."
        )
    shape = _shape_of_scales(source.shape, scale.shape, how)
    if shape is None or scale.dtype not in FLOATS:
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)} and dtype {scale.dtype}; "
            f"for a weight of {list(source.shape)} it must be {_allowed(source.shape, how)} of "
            f"{', '.join(FLOATS)}. Check quantization_config in config.json, or copy the "
            "checkpoint again."
        )
    block = how.block
    if block is not None:  # one that is larger than the weight
        block = min(block[0], source.shape[-2]), min(block[1], source.shape[-1])
    return as_floats(source, ScaledTensor(source, scale, shape, block))


def _shape_of_scales(
    weight: tuple[int, ...], scale: tuple[int, ...], how: Quantization
) -> tuple[int, ...] | None:
    """Returns the scales' shape with as many dimensions as the weight's; None if none fits."""
    *stack, rows, columns = weight
    if how.block is not None:
        of_blocks = (*stack, -(-rows // how.block[0]), -(-columns // how.block[1]))
        spread = (*stack, of_blocks[-2], 1, of_blocks[-1], 1)
        return of_blocks if scale in (of_blocks, spread) else None
    if math.prod(scale) == math.prod(stack) and len(scale) <= len(weight):
        return (*stack, 1, 1)
    if scale in ((*stack, rows), (*stack, rows, 1)):
        return (*stack, rows, 1)
    return None


def _allowed(weight: tuple[int, ...], how: Quantization) -> str:
    *stack, rows, columns = weight
    if how.block is not None:
        return str([*stack, -(-rows // how.block[0]), -(-columns // how.block[1])])
    return " or ".join(str([*stack, *shape]) for shape in ((), (1,), (rows,), (rows, 1)))
