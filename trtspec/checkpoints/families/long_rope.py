"""LongRoPE (arXiv:2402.13753), as Phi-3 and Phi-4-mini have it, within the original length.

A model has two lists of factors on its frequencies: the short one for texts of the original length,
the long one for longer texts. Keys that were made with one do not fit queries made with the other,
so a text that grows past that length had to be computed anew. Here a text ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checks import MAX_SIZE, checked_int, is_number
from ...errors import CheckpointError
from ...models.config import DecoderConfig

LONG_ROPE = "longrope"


def within_original_length(config: DecoderConfig, where: Path) -> DecoderConfig:
    """Returns the config with the original length as its longest; others as they are.

    Raises:
        CheckpointError: a list of factors or the original length is missing or cannot be.
    """
    rope = config.rope_parameters
    if rope.get("rope_type") != LONG_ROPE:
        return config
    name, longest = "original_max_position_embeddings", config.max_position_embeddings
    original = checked_int(where, name, rope.get(name), range(1, MAX_SIZE + 1))
    for factors in ("short_factor", "long_factor"):
        _check_factors(factors, rope.get(factors), config, where)
    # The scaling of cos and sin is by how many times longer the longest text is.
    factor = rope.get("factor") or longest / original
    return replace(
        config,
        rope_parameters={**rope, "factor": factor},
        max_position_embeddings=min(original, longest),
    )


def rope_of_other_layers(rope: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
    """Returns a model's RoPE for layers that rotate `rotary_dim` dimensions of a head.

    LongRoPE's factors are for as many as the model rotates. Other layers go without it.
    """
    if rope.get("rope_type") == LONG_ROPE and 2 * len(rope["short_factor"]) != rotary_dim:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return dict(rope)


def _check_factors(name: str, value: Any, config: DecoderConfig, where: Path) -> None:
    count = (config.rotary_dim or config.head_dim) // 2
    good = isinstance(value, list) and all(is_number(factor) and factor > 0 for factor in value)
    if not good or len(value) != count:
        given = f"{len(value)} values" if isinstance(value, list) else repr(value)
        raise CheckpointError(
            f"{where}: {name} has {given}; it must be a list of {count} positive numbers, one for "
            "each rotated pair of dimensions. Copy the file again from the model's source."
        )
