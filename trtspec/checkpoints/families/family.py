"""What `hf_config.py` has to know of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError


@dataclass(frozen=True)
class Family:
    hf_type: str
    """The transformers config class whose decoder it is, by `model_type`."""

    fields: Callable[[Any, Path], dict[str, Any]]
    """(transformers' config, where it was read) -> the fields of `DecoderConfig` that are the
    family's own, or differ from what every config says by the same name. Raises CheckpointError for
    what the decoder does not compute."""

    as_hf: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None
    """config.json as that class can read it, where it cannot as it is written."""

    activations: tuple[str, ...] = ("silu",)  # `hidden_act` may be one of these
    has_partial_rotary: bool = False
    has_rope_by_type: bool = False  # rope_parameters: layer type -> parameters
    has_mrope: bool = False  # positions of three axes, by `mrope_section`
    has_linear_attention: bool = False  # layers may be so
    is_text_alone: bool = False  # M-RoPE's settings are passed over: no prompt has images
    fields_of_layers: tuple[str, ...] = ()  # that layers may have of their own: `per_layer_config`


def refuse_other(hf: Any, where: Path, **computed: Any) -> None:
    """Raises CheckpointError for a field that is set to anything but the value that is computed."""
    for name, value in computed.items():
        setting = getattr(hf, name, None)
        if setting is not None and setting != value:
            raise CheckpointError(
                f"{where}: {name}={setting!r} is not supported; allowed is {value!r}. Use another "
                "model."
            )


def refuse_truncate(rope: Mapping[str, Any], layer_type: str, where: Path) -> None:
    """Raises CheckpointError for YaRN's `truncate` in the RoPE parameters of a layer type."""
    if rope.get("truncate", True) is not True:
        raise CheckpointError(
            f"{where}: truncate={rope['truncate']!r} in rope_parameters of {layer_type!r}: "
            "transformers ignores it there, so what the model was made with is not known. "
            "Remove it."
        )
