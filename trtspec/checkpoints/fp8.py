"""FP8 checkpoints with block scales, as DeepSeek-V3 publishes its weights, read as float32.

`X.weight` is F8_E4M3 [out, in], `X.weight_scale_inv` F32 [ceil(out / bo), ceil(in / bi)]; a weight
is its FP8 number times its block's scale. Both may be stacks of experts, [E, …] (Step-3.5). Tensors
of another dtype are what they say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..checks import is_int
from ..errors import CheckpointError

if TYPE_CHECKING:
    from .tensors import TensorSource

FP8 = "F8_E4M3"
_SCALE = "_scale_inv"


def block_size(raw: dict[str, Any], where: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale, by config.json's `quantization_config`; None without it.

    Raises:
        CheckpointError: a quantisation that is not read.
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    fields = config if isinstance(config, dict) else {}
    method, size = fields.get("quant_method", config), fields.get("weight_block_size")
    if method == "fp8" and fields.get("fmt", "e4m3") == "e4m3" and isinstance(size, list):
        sizes = [n for n in size if is_int(n, 1)]
        if len(sizes) == len(size) == 2:
            return sizes[0], sizes[1]
    shown = {k: fields[k] for k in ("fmt", "weight_block_size") if k in fields} or ""
    raise CheckpointError(
        f"{where}: quantization_config ({method!r}{shown and f', {shown}'}) is set, but only "
        "float32, float16, bfloat16 and FP8 weights with block scales (quant_method 'fp8', fmt "
        "'e4m3', weight_block_size [rows, columns]) are supported. Use the unquantised checkpoint."
    )


def dequantized(
    sources: dict[str, TensorSource], raw: dict[str, Any], where: Path
) -> dict[str, TensorSource]:
    """The tensors of a checkpoint with its FP8 weights as float32 ones, and without their scales.

    Args:
        raw: config.json, as in `block_size`. where: its path, for messages.

    Raises:
        CheckpointError: a scale is missing, of another shape or dtype, or of no weight.
    """
    size = block_size(raw, where)
    if size is None:
        return sources
    found = dict(sources)
    for name, source in sources.items():
        if source.dtype == FP8:
            scale = found.pop(f"{name}{_SCALE}", None)
            found[name] = _dequantized(source, scale, size)
    left = [name for name in found if name.endswith(f".weight{_SCALE}")]
    if left:
        name = left[0].removesuffix(_SCALE)
        kind = f"has dtype {sources[name].dtype}" if name in sources else "is not there"
        raise CheckpointError(
            f"{where.parent} holds {left[0]}, but {name} {kind}; it must be {FP8}. Copy the "
            "checkpoint again from its source."
        )
    return found


def _dequantized(
    source: TensorSource, scale: TensorSource | None, size: tuple[int, int]
) -> TensorSource:
    if scale is None:
        raise CheckpointError(
            f"{source.name} in {source.path} is {FP8}, but there is no {source.name}{_SCALE}. "
            "Copy the checkpoint again from its source, all shards of it."
        )
    *stack, rows, columns = source.shape if len(source.shape) in (2, 3) else (0, 0)
    blocks = (*stack, -(-rows // size[0]), -(-columns // size[1]))
    if len(source.shape) not in (2, 3) or scale.shape != blocks or scale.dtype != "F32":
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)} and dtype {scale.dtype}; "
            f"for a matrix of {list(source.shape)} in blocks of {list(size)} it must be "
            f"{list(blocks)} of F32. Check weight_block_size in config.json, or copy the "
            "checkpoint again."
        )
    return replace(source, dtype="F32", load=partial(_multiply, source, scale, size), load_cut=None)


def _multiply(source: TensorSource, scale: TensorSource, size: tuple[int, int]) -> Tensor:
    rows, columns = source.shape[-2:]
    scales = scale.read().repeat_interleave(size[0], -2)[..., :rows, :]
    return source.read().float().mul_(scales.repeat_interleave(size[1], -1)[..., :columns])
