"""Checks of a config's fields. A message names the field, what was given and what is allowed."""

from __future__ import annotations

import os

from ..checks import are_ints, int_range, is_int
from ..errors import ConfigError, shown


def check_int(label: str, value: object, low: int, high: int | None) -> None:
    """Raises ConfigError unless it is an int in low … high; None is no upper bound."""
    if not is_int(value, low, high):
        raise ConfigError(f"{label}={shown(value)}: it must be {int_range(low, high)}.")


def check_bool(label: str, value: object, allowed: str = "True or False") -> None:
    """Raises ConfigError unless it is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{label}={shown(value)}: it must be {allowed}.")


def require_int(config: object, name: str, low: int, high: int | None) -> None:
    """`check_int` of a config's field."""
    check_int(_label(config, name), getattr(config, name), low, high)


def require_bool(config: object, name: str) -> None:
    """`check_bool` of a config's field."""
    check_bool(_label(config, name), getattr(config, name))


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


def require_path(config: object, name: str) -> None:
    """Raises ConfigError unless it is a path that is not empty."""
    value = getattr(config, name)
    if value is None or not str(value).strip():
        raise ConfigError(f"{_label(config, name)} is required: give a directory.")
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{_label(config, name)}={value!r} is not a path.")


def _label(config: object, name: str) -> str:
    return f"{type(config).__name__}.{name}"
