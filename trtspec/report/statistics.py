"""From step records to acceptance with confidence intervals.

Intervals are 95 % percentile bootstraps over prompts, not steps: the steps of one answer resemble
each other. With fewer than two prompts there is no interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..executor.request import StepRecord

RESAMPLES = 1000
CONFIDENCE = 0.95
FIRST_BUCKET = 256

Cluster = tuple[str, Sequence[StepRecord]]
"""A prompt's id and steps of one of its answers."""


@dataclass(frozen=True)
class Estimate:
    """A ratio of counts; all None where nothing was counted."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of steps. Tuples have an entry per draft position.

    acceptance_length: mean tokens of a step, bonus included.
    conditional: share of a position's drafts accepted where all before were: accepted / reached.
    unconditional: share of all steps in which the position was accepted: accepted / num_steps.
        acceptance_length = 1 + sum(unconditional).
    proposed: steps that verified a draft there. reached: of those, all drafts before accepted.
    """

    num_prompts: int
    num_steps: int
    num_tokens: int
    proposed: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    acceptance_length: Estimate
    conditional: tuple[Estimate, ...]
    unconditional: tuple[Estimate, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """Acceptance of the steps that share a name (a category, a context bucket) and temperature."""

    name: str
    temperature: float
    acceptance: Acceptance

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "temperature": self.temperature, **self.acceptance.to_json()}


def acceptance_of(clusters: Iterable[Cluster], max_draft_len: int) -> Acceptance:
    """Pools the steps; answers with the same prompt id are resampled together."""
    k = max_draft_len
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2 + 3 * k, dtype=np.int64))
    for prompt_id, records in clusters:
        if records:
            counts[prompt_id] += _count(records, k)
    table = np.array(list(counts.values()), dtype=np.int64).reshape(len(counts), 2 + 3 * k)
    total = table.sum(0)
    draws = _resample(table)
    steps, tokens, *by_position = range(2 + 3 * k)
    proposed, reached, accepted = (by_position[i * k : (i + 1) * k] for i in range(3))

    def ratio(top: int, bottom: int) -> Estimate:
        return _estimate(total, draws, top, bottom)

    return Acceptance(
        num_prompts=len(counts),
        num_steps=int(total[steps]),
        num_tokens=int(total[tokens]),
        proposed=tuple(total[proposed].tolist()),
        reached=tuple(total[reached].tolist()),
        accepted=tuple(total[accepted].tolist()),
        acceptance_length=ratio(tokens, steps),
        conditional=tuple(map(ratio, accepted, reached)),
        unconditional=tuple(ratio(column, steps) for column in accepted),
    )


def _count(steps: Sequence[StepRecord], k: int) -> np.ndarray:
    """[2 + 3k]: steps, tokens, then per position proposed, reached and accepted."""
    made = np.array([step.proposed for step in steps])[:, None]
    accepted = np.array([step.accepted for step in steps])[:, None]
    before = np.arange(k)[None]  # drafts before a position
    proposed = made > before
    reached = proposed & (accepted >= before)
    ends = [np.array([len(steps), int(accepted.sum()) + len(steps)])]
    return np.concatenate([*ends, proposed.sum(0), reached.sum(0), (accepted > before).sum(0)])


def _resample(table: np.ndarray) -> np.ndarray | None:
    """[resamples, columns]: sums over prompts drawn with replacement."""
    prompts = len(table)
    if prompts < 2:
        return None
    times = np.random.default_rng(0).multinomial(prompts, [1 / prompts] * prompts, RESAMPLES)
    return times @ table


def _estimate(total: np.ndarray, draws: np.ndarray | None, top: int, bottom: int) -> Estimate:
    if total[bottom] == 0:
        return Estimate(None, None, None)
    value = float(total[top] / total[bottom])
    if draws is None:
        return Estimate(value, None, None)
    usable = draws[draws[:, bottom] > 0]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(usable[:, top] / usable[:, bottom], [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


# -- context length ----------------------------------------------------------------------------
def bucket_of(kv_len: int) -> tuple[int, int]:
    """[low, high) that holds a context length: 0-256, 256-512, 512-1k, 1k-2k, doubling on."""
    low, high = 0, FIRST_BUCKET
    while kv_len >= high:
        low, high = high, 2 * high
    return low, high


def bucket_name(bucket: tuple[int, int]) -> str:
    """`512-1k`."""
    return "-".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in bucket)


def by_bucket(clusters: Iterable[Cluster]) -> dict[tuple[int, int], list[Cluster]]:
    """The steps of each context bucket, shortest first."""
    found: dict[tuple[int, int], list[Cluster]] = defaultdict(list)
    for prompt_id, steps in clusters:
        parts: dict[tuple[int, int], list[StepRecord]] = defaultdict(list)
        for step in steps:
            parts[bucket_of(step.kv_len)].append(step)
        for bucket, part in parts.items():
            found[bucket].append((prompt_id, part))
    return dict(sorted(found.items()))
