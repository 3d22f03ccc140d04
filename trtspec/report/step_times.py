"""What a generation step takes for each draft length, interleaved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING

import torch

from ..api.sampling_params import SamplingParams
from ..errors import ConfigError, RequestError

if TYPE_CHECKING:
    from ..executor.py_executor import PyExecutor
    from ..llm import LLM
    from .collect import Progress

WARM_STEPS = 3


def measure_step_ms(
    plain: LLM,
    speculative: LLM,
    draft_lens: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
    steps: int = 32,
    repeat: int = 3,
    temperature: float = 0.0,
    progress: Progress | None = None,
) -> dict[int, float]:
    """Milliseconds of a step of the whole batch, by draft length.

    After one turn that warms up, all lengths take turns `repeat` times, `steps` steps each, so
    that a machine that slows down does so for all; the median of the turns counts. The same
    engine drafts for every length but 0 (`draft_len_held_at`); vanilla MTP computes all its
    layers then, so its shorter lengths cost more here than in an engine made for them.

    Args:
        plain: an engine without a drafter, for length 0.
        prompts: token ids; the first `batch_size` (again from the start if fewer) run together.
        temperature: of all requests. To draw and judge sampled tokens takes time, too.

    Raises:
        ConfigError: a draft length or count cannot be, or the sequences do not fit the engine.
    """
    longest = speculative.max_draft_len
    if not prompts or not draft_lens or min(batch_size, steps, repeat) < 1:
        raise ConfigError("Give prompts, draft lengths and counts of at least 1 to time steps.")
    if not all(0 <= k <= longest for k in draft_lens):
        raise ConfigError(f"draft_lens={list(draft_lens)}: they must be in 0 … {longest}.")
    batch = [list(ids) for ids in islice(cycle(prompts), batch_size)]
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    turns: dict[int, list[float]] = {k: [] for k in draft_lens}
    for turn in range(repeat + 1):
        for number, k in enumerate(turns):
            if progress is not None:
                done = turn * len(turns) + number
                progress("timing steps", done, (repeat + 1) * len(turns))
            executor = speculative.executor if k else plain.executor
            with executor.draft_len_held_at(k):
                ms = _time_steps(executor, batch, params, steps, k)
            if turn:
                turns[k].append(ms)
    return {k: median(times) for k, times in turns.items()}


def step_seconds_without_drafts(llm: LLM) -> float | None:
    """Returns the seconds of a step of one request for which nothing was drafted.

    The drafter writes its KV all the same, so a plain engine's step is somewhat shorter. None if
    the engine has no drafter, or no room for the sequence. Call it before the first request:
    statistics and the prefix cache are reset.
    """
    executor = llm.executor
    if not executor.max_draft_len:
        return None
    try:
        with executor.draft_len_held_at(0):
            return _time_steps(executor, [[0] * 8], SamplingParams(ignore_eos=True), 12, 0) / 1000
    except ConfigError:
        return None
    finally:
        llm.reset_stats()
        llm.reset_prefix_cache()


def _time_steps(
    executor: PyExecutor,
    batch: Sequence[list[int]],
    params: SamplingParams,
    steps: int,
    draft_len: int,
) -> float:
    # Requests that got a place first have taken some steps when the last one begins.
    most = (2 * len(batch) + WARM_STEPS + steps + 2) * (draft_len + 1)
    limit = executor.config.max_seq_len
    longest = max(map(len, batch))
    if len(batch) > executor.config.max_batch_size or longest + most > limit:
        raise ConfigError(
            f"{len(batch)} prompts of up to {longest} tokens and {most} new ones do not fit the "
            f"engine (max_batch_size={executor.config.max_batch_size}, max_seq_len={limit})."
        )
    params = replace(params, max_tokens=most)
    requests = [executor.enqueue(ids, params) for ids in batch]
    try:
        while not all(r.num_steps >= WARM_STEPS or r.is_finished for r in requests):
            executor.step()
        _wait(executor)
        started = time.perf_counter()
        for _ in range(steps):
            executor.step()
        _wait(executor)
        seconds = time.perf_counter() - started
        failed = next((r for r in requests if r.error is not None), None)
        if failed is not None:
            raise RequestError(f"A request failed while steps were timed: {failed.error}")
        if not all(r.is_generation for r in requests):
            raise ConfigError(
                f"{len(batch)} requests do not stay in the KV cache together: enlarge it, or time "
                "a smaller batch."
            )
    finally:
        for request in requests:
            executor.cancel(request.request_id)
        executor.run_until_done()
    return 1000 * seconds / steps


def _wait(executor: PyExecutor) -> None:
    if executor.device.type == "cuda":
        torch.cuda.synchronize(executor.device)
