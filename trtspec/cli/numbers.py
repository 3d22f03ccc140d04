"""Reads lists of numbers like `0,0.7,1`."""

from __future__ import annotations

import math

from .errors import CliError

MAX_TEMPERATURE = 100.0


def parse_numbers(
    option: str, text: str | None, low: float, high: float, whole: bool = False
) -> list[float]:
    """Returns the numbers of `0,0.7,1`, each once. Raises CliError for anything else."""
    numbers = []
    for part in (text or "").split(",") if text is not None else []:
        try:
            number = int(part) if whole else float(part)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            kind = "whole numbers" if whole else "numbers"
            raise CliError(
                f"{option} {text!r}: {part.strip()!r} is not allowed. Give {kind} in {low:.9g} … "
                f"{high:.9g}, separated by commas."
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))
