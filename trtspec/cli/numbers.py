"""Reads lists of numbers like `0,0.7,1`, and checks a number."""

from __future__ import annotations

from typing import TypeVar

from .errors import CliError

MAX_TEMPERATURE = 100.0
N = TypeVar("N", int, float)


def parse_numbers(option: str, text: str, kind: type[N], low: float, high: float) -> list[N]:
    """Returns the numbers of `0,0.7,1`, each once. Raises CliError for anything else."""
    numbers: list[N] = []
    for part in text.split(","):
        try:
            number = kind(part)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            what = "whole numbers" if kind is int else "numbers"
            raise CliError(
                f"{option} {text!r}: {part.strip()!r} is not allowed. Give {what} in {low:.9g} … "
                f"{high:.9g}, separated by commas."
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def parse_contexts(text: str | None) -> list[int]:
    """Returns the lengths of `--contexts`, none where it is not given."""
    return [] if text is None else parse_numbers("--contexts", text, int, 1, 2**20)


def check_max_tokens(max_tokens: int) -> None:
    """Raises CliError where no answer would have a step to measure."""
    if max_tokens == 1:
        raise CliError(
            "--max-tokens 1: an answer's first token comes with its prompt, and no step would "
            "follow to be measured. Give 2 or more."
        )
