"""Tensors of a checkpoint that look as if they were made and never filled.

Exporters that miss a name write what the module was made with: zeros, ones, or random numbers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from ..checkpoints.heads.records import Sources

_JUDGED = re.compile(
    r"^(?!.*experts\.\d).*(fc|eh_proj|q_proj|k_proj|gate_proj|up_proj|down_proj)\.weight$"
)
"""v_proj and o_proj are left out: some trained ones, SmolLM2's among them, are spread as noise is.
So are experts, which are many. A wrong embedding or lm_head is found by trial."""
_MANY_ZEROS, _FEWEST_LINES = 1 / 8, 32
"""The share of a matrix's rows or columns. Fewer may stand for tokens that no text has, or for
attention heads that were added to make their number even."""
_MOST_TOLD = 3
_FEWEST_ROWS, _MOST_ROWS = 128, 1024
"""Fewer rows tell too little; more take time and tell no more."""
_TOLERANCES = (5, 15, 30)
"""Over the number of rows: how far the second, third and fourth moments of noise may be off. Of
the trained matrices seen here the nearest is three times as far off."""


class Unfilled(NamedTuple):
    """What is said of tensors that look as if they were not filled, None where nothing is."""

    untrained: str | None = None  # as before training
    partly_filled: str | None = None  # filled in part


def unfilled_tensors(sources: Sources) -> Unfilled:
    """Says which tensors look as if they were not filled.

    These are matrices that are zero everywhere, norms of one value, and matrices of random
    numbers. Norms of queries and keys are left to `lost_norms`. Filled in part are matrices with
    many rows or columns of zeros, as where the parts of one rank are missing.
    """
    zeros, norms, random, parts = list[str](), list[str](), list[str](), list[str]()
    for source in sources.values():
        if len(source.shape) > 1:
            matrix = source.read()
            if not bool(matrix.any()):
                zeros.append(source.name)
            elif len(source.shape) == 2:
                parts += _empty_parts(source.name, matrix)
                if _JUDGED.search(source.name):
                    random += _random_parts(source.name, matrix)
        elif source.name.endswith("norm.weight") and "q_norm" not in source.name:
            weight = source.read()
            if "k_norm" not in source.name and bool((weight == weight[0]).all()):
                norms.append(source.name)
    again = "copy the head again from its source"
    untrained = (
        _told(zeros, "is", "are", f"zero everywhere, which trained ones are not: {again}."),
        _told(
            random,
            "holds",
            "hold",
            f"random numbers, as before training: {again}, and compare the tensors' names there.",
        ),
        _told(
            norms,
            "has",
            "have",
            f"one value everywhere, as before training. If it should not, {again}.",
        ),
    )
    partly_filled = (
        f"{_some(parts)}. Trained tensors have few of those: {again}." if parts else None
    )
    return Unfilled(" ".join(part for part in untrained if part) or None, partly_filled)


def _empty_parts(name: str, matrix: Tensor) -> list[str]:
    """Returns what to say of a matrix with many rows or columns of zeros."""
    filled = matrix != 0
    found = list[str]()
    for along, what in ((1, "rows"), (0, "columns")):
        lines = filled.any(along)
        missing, count = int((~lines).sum()), len(lines)
        if count >= _FEWEST_LINES and missing > _MANY_ZEROS * count:
            found.append(f"{missing} of the {count} {what} of {name} are zero")
    return found


def _some(texts: list[str]) -> str:
    """The first texts, and how many more there are."""
    more = f", and {len(texts) - _MOST_TOLD} more" if len(texts) > _MOST_TOLD else ""
    return ", ".join(texts[:_MOST_TOLD]) + more


def _told(names: list[str], verb: str, plural: str, what: str) -> str:
    if not names:
        return ""
    return f"{' and '.join(names)} {plural if len(names) > 1 else verb} {what}"


def _random_parts(name: str, weight: Tensor) -> list[str]:
    """Returns the name if a matrix is noise, or what to call those of its inputs that are."""
    if is_random(weight):
        return [name]
    rows, columns = weight.shape
    if columns % rows or columns == rows:
        return []
    parts = weight.split(rows, dim=1)  # of the captured layers, or of embedding and hidden state
    return [
        f"{name} (columns {i * rows} … {(i + 1) * rows - 1})"
        for i, part in enumerate(parts)
        if is_random(part)
    ]


def is_random(weight: Tensor) -> bool:
    """Whether the singular values of a matrix [m, n] are spread as those of random numbers.

    Of independent numbers around 0 with one variance, of whatever distribution, the squared
    singular values have known moments (Marchenko & Pastur, 1967). Training leaves some values that
    stand out. A small matrix is never called random.
    """
    if min(weight.shape) < _FEWEST_ROWS:
        return False
    weight = (weight if weight.shape[0] <= weight.shape[1] else weight.T)[:_MOST_ROWS].float()
    rows, columns = weight.shape
    c = rows / columns
    gram = weight @ weight.T / (weight.square().mean() * columns)
    squared = gram @ gram
    moments = (squared.trace(), (squared * gram).sum(), squared.square().sum())
    of_noise = (1 + c, 1 + 3 * c + c**2, 1 + 6 * c + 6 * c**2 + c**3)
    return all(
        abs(float(moment) / rows / expected - 1) * rows <= tolerance
        for moment, expected, tolerance in zip(moments, of_noise, _TOLERANCES, strict=True)
    )
