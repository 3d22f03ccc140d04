"""Checks of values that users and files give: their type, their range, and what to say.

A message says what was given, what is allowed, and the cure. `bool` is no number here, although
Python calls it an `int`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from .errors import CheckpointError

MAX_SIZE = 2**24
"""Of any size in a config: above it the file is wrong, not the model large."""
COPY_AGAIN = "Copy the file again from the model's source."


def is_int(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """Returns whether it is an int in low … high; None leaves that side open."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether it is an int or a float. NaN is one: compare it with a range."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Returns whether it is a sequence other than a string and bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def are_ints(value: object, low: int | None = None) -> TypeGuard[Sequence[int]]:
    """Returns whether it is a list of ints >= low, which may be empty."""
    return is_list(value) and all(is_int(item, low) for item in value)


def int_range(low: int, high: int | None) -> str:
    """Returns the words of a message for the ints that are allowed."""
    return f"an int >= {low}" if high is None else f"an int in {low} … {high}"


def checked_int(
    where: Path | str,
    name: str,
    value: object,
    allowed: range,
    also: str = "",
    cure: str = COPY_AGAIN,
) -> int:
    """Returns a file's value, an int of a range.

    Args:
        where: the file. also: what else the message allows.

    Raises:
        CheckpointError: it is something else.
    """
    low, high = allowed.start, allowed.stop - 1
    if is_int(value, low, high):
        return value
    raise CheckpointError(
        f"{where}: {name}={value!r}; it must be {int_range(low, high)}{also}. {cure}"
    )


def checked_positive(
    where: Path | str, name: str, value: object, also: str = "", cure: str = COPY_AGAIN
) -> float:
    """Returns a file's value, a number above 0 that float32 can hold.

    Args, Raises: as of `checked_int`.
    """
    if is_number(value) and 0 < value < 1e30:
        return float(value)
    raise CheckpointError(f"{where}: {name}={value!r}; it must be a number > 0{also}. {cure}")
