"""The figures that the page at `/` shows, as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..llm import LLM
from .exposition import EngineNow
from .metrics import StepMetrics, accepted_per_position


def live_state(llm: LLM, metrics: StepMetrics, since: int) -> dict[str, Any]:
    """Returns what an engine does now, and what was counted.

    Args:
        since: seconds of the history before this one (their `at`) are left out.
    """
    now = EngineNow.of(llm.executor)
    return {
        "mode": llm.mode.name,
        "max_draft_len": llm.max_draft_len,
        "acceptance": llm.acceptance,
        "now": int(time.perf_counter()),
        "running": now.num_running,
        "waiting": now.num_waiting,
        "max_running": llm.executor.config.max_batch_size,
        "kv_usage": round(now.kv_usage, 4),
        "kv_tokens": now.num_kv_blocks * now.block_size,
        "preemptions": now.num_preemptions,
        "drafter_is_dead": now.is_drafter_dead,
        "forced_acceptance": now.forced_acceptance,
        "prefix_queries": metrics.prefix_queries,
        "prefix_hits": metrics.prefix_hits,
        "prompt_tokens": metrics.prompt_tokens,
        "generated_tokens": metrics.generated_tokens,
        "accepted_lens": list(metrics.accepted_lens),
        "finished": dict(metrics.finished),
        "history": [asdict(s) for s in list(metrics.history) if s.at >= since],
    }


def speed_of(metrics: StepMetrics, known: Mapping[int, float]) -> dict[str, Any] | None:
    """Returns the measured times behind a speed-up over plain decoding; None without steps.

    `speed_up` is tokens a step times the plain step's time over the speculative step's, of one
    batch size. It is None if no batch size has both. Of several the one nearest to the last step
    counts.

    Args:
        known: plain steps' seconds that were measured elsewhere, by batch size.
    """
    times = metrics.step_times
    if not times.last_batch or not metrics.max_draft_len:
        return None
    measured, speculative = times.typical(times.plain), times.typical(times.speculative)
    plain = {**known, **measured}
    timed = speculative.keys() & plain.keys()
    batch = min(timed, key=lambda size: _distance(size, times.last_batch), default=times.last_batch)
    length = _recent_length(metrics)
    speed_up = None
    if batch in timed and length is not None:
        speed_up = length * plain[batch] / speculative[batch]
    return {
        "batch": batch,
        "acceptance_length": length,
        "plain_seconds": plain.get(batch),
        "plain_is_given": batch in known and batch not in measured,
        "speculative_seconds": speculative.get(batch),
        "speed_up": speed_up,
    }


def _distance(size: int, other: int) -> int:
    """Returns by how many doublings two batch sizes differ."""
    return abs(size.bit_length() - other.bit_length())


def _recent_length(metrics: StepMetrics) -> float | None:
    """Returns the acceptance length of the last minute with drafts, else of all; None without."""
    recent = [s.accepted_lens for s in list(metrics.history)[-60:]]
    lens = [sum(column) for column in zip(*recent, strict=True)]
    if not sum(lens):
        lens = list(metrics.accepted_lens)
    steps = sum(lens)
    return 1 + sum(accepted_per_position(lens)) / steps if steps else None
