"""Checks of a config's fields. A message names the field, what was given and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from ..checks import are_ints, int_range, is_int
from ..errors import ConfigError, shown
from ..other_names import advices

Config = TypeVar("Config")

QUANTS = ("fp8",)
"""How weights can be quantised as they are loaded."""


def check_int(label: str, value: object, low: int, high: int | None, or_none: bool = False) -> None:
    """Raises ConfigError unless it is an int in low … high; high=None is no upper bound.

    Args:
        or_none: None is allowed too.
    """
    if not is_int(value, low, high) and not (or_none and value is None):
        also = " or None" if or_none else ""
        raise ConfigError(f"{label}={shown(value)}: it must be {int_range(low, high)}{also}.")


def check_bool(label: str, value: object, or_none: bool = False) -> None:
    """Raises ConfigError unless it is a bool; with `or_none` None is allowed too."""
    if not isinstance(value, bool) and not (or_none and value is None):
        allowed = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{label}={shown(value)}: it must be {allowed}.")


def check_choice(label: str, value: object, choices: Sequence[str], or_none: bool = False) -> None:
    """Raises ConfigError unless it is one of the texts; with `or_none` None is allowed too."""
    allowed = (*choices, None) if or_none else choices
    if value not in allowed:
        *others, last = map(repr, allowed)
        raise ConfigError(f"{label}={shown(value)}: use {', '.join(others)} or {last}.")


def require_int(
    config: object, name: str, low: int, high: int | None, or_none: bool = False
) -> None:
    """`check_int` of a config's field."""
    check_int(_label(config, name), getattr(config, name), low, high, or_none)


def require_quant(config: object) -> None:
    """Raises ConfigError unless the field `quant` is one of `QUANTS`, or None."""
    name = "quant"
    try:
        check_choice(_label(config, name), getattr(config, name), QUANTS, or_none=True)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Checkpoints that are quantised already (AWQ, GPTQ, NVFP4, FP8) need none: "
            "they are read as they are."
        ) from None


def require_bool(config: object, name: str, or_none: bool = False) -> None:
    """`check_bool` of a config's field."""
    check_bool(_label(config, name), getattr(config, name), or_none)


def require_layers(config: object, name: str) -> None:
    """Makes the layer numbers a tuple; None stays. Raises ConfigError for anything else."""
    value = getattr(config, name)
    if value is None:
        return
    if not are_ints(value, 0) or len(value) == 0:
        raise ConfigError(
            f"{_label(config, name)}={shown(value)}: give a list of layer numbers from 0, or None "
            "for the default."
        )
    object.__setattr__(config, name, tuple(value))


def require_path(config: object, name: str, what: str = "a directory") -> None:
    """Raises ConfigError unless it is a path that is not empty.

    Args:
        what: what the message asks for.
    """
    value = getattr(config, name)
    if value is None or not str(value).strip():
        raise ConfigError(f"{_label(config, name)} is required: give {what}.")
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{_label(config, name)}={shown(value)} is not a path: give {what}.")


def made_of_dict(
    cls: type[Config], values: Mapping[Any, Any], label: str, beside: Sequence[str] = ()
) -> Config:
    """Returns a config of these fields. Raises ConfigError for keys that are none of them.

    Args:
        label: what the message says has no such field.
        beside: keys that a dict may have beside the fields.
    """
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    unknown = sorted(map(str, set(values) - known))
    if unknown:
        allowed = sorted(known | set(beside))
        raise ConfigError(
            f"{label} has no field {', '.join(unknown)}.{advices(unknown, allowed)} "
            f"Known: {', '.join(allowed)}."
        )
    return cls(**values)


def _label(config: object, name: str) -> str:
    return f"{type(config).__name__}.{name}"
