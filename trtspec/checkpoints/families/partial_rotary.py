"""Heads of which only the first dimensions are rotated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checks import is_number
from ...errors import CheckpointError


def without_factor(hf: Any, where: Path) -> dict[str, Any]:
    """Returns `rope_parameters` and `rotary_dim` for `partial_rotary_factor`.

    Raises:
        CheckpointError: the factor makes no even number of dimensions.
    """
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rope = dict(hf.rope_parameters)
    factor = 1.0
    if rope.get("rope_type") != "proportional":  # that formula reads the factor itself
        factor = rope.pop("partial_rotary_factor", 1.0)  # rotary_dim says it from here on
    return {"rope_parameters": rope, "rotary_dim": _rotary_dim(head_dim, factor, where)}


def _rotary_dim(head_dim: int, factor: Any, where: Path) -> int:
    good = is_number(factor) and 0 < factor <= 1
    rotary_dim = int(head_dim * factor) if good else 0
    if rotary_dim < 2 or rotary_dim % 2 or (head_dim - rotary_dim) % 2:
        raise CheckpointError(
            f"{where}: partial_rotary_factor={factor!r} of head_dim={head_dim}: it must be in "
            "(0, 1] and rotate an even number of dimensions. Correct it, or head_dim."
        )
    return rotary_dim
