"""Which draft length pays: expected tokens of a step over what the step takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class AdviceRow:
    """One draft length; 0 is plain decoding. Times are None where they were not measured."""

    draft_len: int
    expected_tokens: float  # of one request's step, bonus included
    step_ms: float | None
    tokens_per_second: float | None  # of the whole batch
    speedup: float | None  # over plain, where that was measured


@dataclass(frozen=True)
class Advice:
    batch_size: int
    rows: tuple[AdviceRow, ...]  # K = 0, 1, … as far as acceptance was measured
    best_draft_len: int  # of those with a time; 0: plain decoding is fastest

    @property
    def best(self) -> AdviceRow:
        return self.rows[self.best_draft_len]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def expected_tokens(conditional: Sequence[float | None], draft_len: int) -> float:
    """1 + c1 + c1·c2 + …: the bonus, and each draft if all before it were accepted."""
    total, product = 1.0, 1.0
    for rate in conditional[:draft_len]:
        product *= rate or 0.0  # None: a position never reached
        total += product
    return total


def check_measured(conditional: Sequence[float | None]) -> None:
    """Raises ConfigError for rates of no step."""
    if conditional and conditional[0] is None:
        raise ConfigError(
            "No step was measured, so no draft length can be advised: every answer ended with its "
            "first token. Give prompts with longer answers."
        )


def advise(
    step_ms: dict[int, float], conditional: Sequence[float | None], batch_size: int = 1
) -> Advice:
    """The draft length with the most tokens per second.

    Args:
        step_ms: milliseconds of a generation step of the whole batch by draft length; 0 is plain.
        conditional: entry i is the share of draft i+1 accepted where all before it were, measured
            at the largest draft length (`AcceptanceReport.rates_to_advise`). None where that
            never happened counts as 0; of the first draft it means that nothing was measured.
        batch_size: requests in the step that was timed.

    Raises:
        ConfigError: a number is out of range, a draft length has no acceptance, or nothing was
            measured.
    """
    if not step_ms:
        raise ConfigError("step_ms is empty: give the time of at least one draft length.")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: it must be at least 1.")
    for draft_len, time in step_ms.items():
        if not 0 <= draft_len <= len(conditional):
            raise ConfigError(
                f"step_ms has draft length {draft_len}; acceptance is known for 0 … "
                f"{len(conditional)}."
            )
        if not (math.isfinite(time) and time > 0):
            raise ConfigError(f"step_ms[{draft_len}]={time!r}: it must be a time above 0.")
    for position, rate in enumerate(conditional, start=1):
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError(f"conditional rate of draft {position} is {rate!r}: not in 0 … 1.")
    if max(step_ms) > 0:
        check_measured(conditional)
    plain = 1000 * batch_size / step_ms[0] if 0 in step_ms else None
    rows = []
    for draft_len in range(len(conditional) + 1):
        tokens, ms = expected_tokens(conditional, draft_len), step_ms.get(draft_len)
        speed = None if ms is None else 1000 * batch_size * tokens / ms
        speedup = None if speed is None or plain is None else speed / plain
        rows.append(AdviceRow(draft_len, tokens, ms, speed, speedup))
    best = max(step_ms, key=lambda k: (rows[k].tokens_per_second or 0.0, -k))
    return Advice(batch_size, tuple(rows), best)
