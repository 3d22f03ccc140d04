"""Quantised weights, read as float32: a weight is its number times its scale.

    scales of        shape                                     for a weight [out, in]
    the tensor       [] or [1]
    its rows         [out] or [out, 1]
    its blocks       [ceil(out / bo), ceil(in / bi)], perhaps with a 1 after each

Stacks of experts [E, out, in] have one more dimension in front (Step-3.5). Tensors of another dtype
are what they say. Scales of activations are left out: here these stay in the model's dtype. Those
of the KV cache are read in `kv_scales.py`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import CheckpointError
from .quantization import Quantization, quantization_fields, quantization_of
from .tensors import FLOATS

if TYPE_CHECKING:
    from .tensors import TensorSource

logger = logging.getLogger(__name__)

_OF_SERVING = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
"""Scales of what is no weight."""


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
        return sources
    found = {name: s for name, s in sources.items() if not name.endswith(_OF_SERVING)}
    if how is None:
        return found
    for name, source in sources.items():
        if source.dtype == how.dtype:
            scale = found.pop(f"{name}{how.suffix}", None)
            found[name] = _dequantized(source, scale, how)
    left = [name for name in found if name.endswith(f".weight{how.suffix}")]
    if left:
        name = left[0].removesuffix(how.suffix)
        kind = f"has dtype {sources[name].dtype}" if name in sources else "is not there"
        raise CheckpointError(
            f"{where.parent} holds {left[0]}, but {name} {kind}; it must be {how.dtype}. Copy the "
            "checkpoint again from its source."
        )
    logger.info("%s: %s weights are read as floats.", where.parent, how.dtype)
    return found


def _dequantized(
    source: TensorSource, scale: TensorSource | None, how: Quantization
) -> TensorSource:
    if scale is None:
        raise CheckpointError(
            f"{source.name} in {source.path} is {how.dtype}, but there is no "
            f"{source.name}{how.suffix}. Copy the checkpoint again from its source, all shards "
            "of it."
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
    load = partial(_multiply, source, scale, shape, how.block)
    return replace(source, dtype="F32", load=load, load_cut=None)


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


def _multiply(
    source: TensorSource,
    scale: TensorSource,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
) -> Tensor:
    rows, columns = source.shape[-2:]
    scales = scale.read().float().reshape(shape)
    if block is not None:
        scales = scales.repeat_interleave(block[0], -2)[..., :rows, :]
        scales = scales.repeat_interleave(block[1], -1)[..., :columns]
    return source.read().float().mul_(scales)
