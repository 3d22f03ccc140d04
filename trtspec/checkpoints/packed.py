"""Finds what belongs to each packed weight of a checkpoint: its numbers, scales, zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .tensors import TensorSource

Parts = dict[str, TensorSource]


@dataclass(frozen=True)
class Names:
    """What a module's tensors are called."""

    numbers: str
    dtype: str  # of the numbers; others of that name are what they say
    needed: Sequence[str]  # beside the numbers
    beside: Sequence[str] = ()  # as well, if they are there


def joined(
    sources: Parts,
    names: Names,
    where: Path,
    weight_of: Callable[[str, TensorSource, Parts], TensorSource],
) -> Parts:
    """Returns the tensors of a checkpoint with one, `X.weight`, for each packed weight of X.

    Args:
        where: its config.json, for messages.
        weight_of: makes that tensor of its name, the numbers, and the parts by their names.

    Raises:
        CheckpointError: a part is missing, or of no weight, or a weight is there as floats too.
    """
    found = dict(sources)
    for name, numbers in sources.items():
        stem, _, last = name.rpartition(".")
        if last != names.numbers or (last == "weight" and numbers.dtype != names.dtype):
            continue
        del found[name]
        parts = {part: found.pop(f"{stem}.{part}", None) for part in (*names.needed, *names.beside)}
        lacking = [part for part in names.needed if parts[part] is None]
        if lacking:
            raise CheckpointError(
                f"{where.parent} holds {name}, but not {stem}.{lacking[0]}. Copy the checkpoint "
                "again from its source, all shards of it."
            )
        weight = f"{stem}.weight"
        if weight in found:
            raise CheckpointError(
                f"{where.parent} holds {weight} and {name}, which are one weight. Remove one of "
                "them, or copy the checkpoint again from its source."
            )
        there = {part: source for part, source in parts.items() if source is not None}
        found[weight] = weight_of(weight, numbers, there)
    for name in found:
        stem, _, last = name.rpartition(".")
        if last in (*names.needed, *names.beside):
            raise CheckpointError(
                f"{where.parent} holds {name}, but {stem}.{names.numbers} is not there in "
                f"{names.dtype}. Copy the checkpoint again from its source, all shards of it."
            )
    return found


def unfit(tensor: TensorSource, what: str) -> CheckpointError:
    """Returns the error of a tensor that does not fit; `what` it must be."""
    return CheckpointError(
        f"{tensor.name} in {tensor.path} has shape {list(tensor.shape)} and dtype {tensor.dtype}; "
        f"it {what}. Check quantization_config in config.json (bits, group_size), or copy the "
        "checkpoint again."
    )
