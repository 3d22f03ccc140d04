"""`draft_len_of`: what chooses an engine's draft lengths, with the step times known so far."""

from __future__ import annotations

import hashlib
import time
from itertools import product
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from ...utils import cache_dir
from ..cuda_graphs.graphs import CudaGraphs
from ..request import ScheduledBatch
from ..runner import StepRunner
from .auto_draft_len import AutoDraftLen, Launches
from .auto_verified import AutoVerified, ChanceReader
from .draft_len import DraftLen
from .step_costs import StepCosts, StepSeconds, StepShape

VERSION = 11  # of the steps: another one makes times of earlier releases unknown
LONG, SHARE = 1024, 8  # a step is timed behind LONG tokens of context, and behind LONG / SHARE
SECONDS_AT_START = 10.0  # of captures; what is left then waits, but for times that are needed


def draft_len_of(runner: StepRunner) -> DraftLen:
    """Returns the config's choice of lengths: fixed, by a schedule, or by what is measured."""
    config, most = runner.step.worker.config, runner.max_draft_len
    is_auto = config is not None and "auto" in (
        config.draft_len_schedule, config.max_verified_drafts,
    )  # fmt: skip
    if config is None or not is_auto or most == 0:
        return DraftLen(most, config)
    path, graphs = _path(runner), runner.graphs
    launches = Launches() if graphs is None else _GraphLaunches(runner)
    on_cpu = runner.device.type == "cpu"
    auto: AutoDraftLen
    if config.draft_len_schedule == "auto":
        auto = AutoDraftLen(
            most,
            config,
            StepCosts(path),
            launches,
            runs_at_launch=on_cpu,
            rates_path=path.with_suffix(".rates"),
            is_default=runner.chooses_by_default,
        )
    elif runner.forced_acceptance is None:
        chances = runner.step.state.chances
        assert chances is not None
        reader = ChanceReader(chances)
        auto = AutoVerified(most, config, StepCosts(path), launches, reader, runs_at_launch=on_cpu)
        if graphs is not None:
            graphs.shared_of = most
    else:
        return DraftLen(most, config)
    if graphs is not None:
        graphs.may_lose_graphs = True
    # Over several ranks a replay of one rank alone would hang.
    if graphs is not None and runner.step.target.config.parallel.size == 1:
        _capture(graphs, auto)
        graphs.may_stand_in = True
    return auto


class _GraphLaunches(Launches):
    """Launches of a runner's graphs, as long as it has them."""

    tries_unknown = False

    def __init__(self, runner: StepRunner):
        self._runner = runner

    def size_of(self, count: int) -> int:
        graphs = self._runner.graphs
        size = None if graphs is None else graphs.bucket(count)
        return super().size_of(count) if size is None else size

    def is_lost(self, shape: StepShape, draft_len: int) -> bool:
        graphs = self._runner.graphs
        return graphs is not None and graphs.is_lost(shape, draft_len)

    def ready(self, batch: ScheduledBatch, lengths: list[int]) -> list[int]:
        graphs = self._runner.graphs
        return lengths if graphs is None else graphs.ready(batch, lengths)

    @property
    def capture_cost(self) -> float:
        graphs = self._runner.graphs
        return 0.0 if graphs is None else graphs.capture_cost


def _capture(graphs: CudaGraphs, auto: AutoDraftLen) -> None:
    """Captures every length, so that none has to earn its graph first, and times what is unknown.

    A few passes over prompts come first, each half as large as the one before: they run all others
    until these have graphs. Then come sizes 1, 2, 4, … and the largest. Their times are needed, for
    those of others can be derived from them. Next are the other passes over prompts, for lengths
    vary, so other prompts come together in every run. Whatever is left after `SECONDS_AT_START`,
    and whose times are known or not needed, waits until it is used, unless all graphs are to be
    captured at start.
    """
    sizes = graphs.batch_sizes[::-1]
    needed = [size for size in sizes if size & (size - 1) == 0 or size == sizes[0]]
    late = inf if graphs.captures_at_start else time.perf_counter() + SECONDS_AT_START
    graphs.prepare_contexts(auto.max_draft_len, least_ratio=2)
    for size in needed:
        _capture_lengths(graphs, auto, size, until=late, is_needed=True)
    graphs.prepare_contexts(auto.max_draft_len, until=late)
    for size in sizes:
        if size not in needed:
            _capture_lengths(graphs, auto, size, until=late)
    auto.costs.save()


def _capture_lengths(
    graphs: CudaGraphs, auto: AutoDraftLen, size: int, *, until: float, is_needed: bool = False
) -> None:
    """Captures every length of one size, and times what is unknown. After `until` only if a time is
    missing that is needed."""
    shapes = StepShape(size, all_greedy=True), StepShape(size, all_greedy=False)
    unknown = {
        (shape, draft_len)
        for shape, draft_len in product(shapes, auto.lengths)
        if not auto.costs.is_known(shape, draft_len)
    }
    if time.perf_counter() > until and not (is_needed and unknown):
        return
    graphs.prepare_missed(size)
    for shape, draft_len in product(shapes, auto.lengths):
        is_there = graphs.prepare(shape, draft_len)
        if is_there and (shape, draft_len) in unknown:
            auto.costs.set(shape, draft_len, _seconds(graphs, shape, draft_len))


def _seconds(graphs: CudaGraphs, shape: StepShape, draft_len: int) -> StepSeconds:
    """Times a step of a graph that is there, behind few tokens and behind more."""
    long = min(LONG, graphs.max_seq_len // 2)
    times = []
    for context in (long // SHARE, long):
        seconds = graphs.replay_seconds(shape, draft_len, context)
        assert seconds is not None
        times.append((context, seconds))
    return StepSeconds.through(*times)


def _kind_of_weight(parameter: Tensor) -> str:
    """Returns its dtype; of packed bytes also how many lie together, which says their format."""
    is_packed = parameter.dtype == torch.uint8
    return f"{parameter.dtype} {parameter.shape[-1]}" if is_packed else str(parameter.dtype)


def _path(runner: StepRunner) -> Path:
    """Returns the file of this device, model, drafter and mode."""
    device, step = runner.device, runner.step
    where = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    weights = sorted(set(map(_kind_of_weight, step.target.parameters())))
    keys = sorted({str(group.k_cache.dtype) for group in runner.kv_cache.groups})
    config = step.worker.config
    what = (
        (where, torch.__version__, VERSION, runner.graphs is None),
        (weights, keys, step.target.config, step.target.config.parallel.size),
        (runner.mode.name, getattr(step.draft_model, "config", None), runner.max_draft_len),
        None if config is None else config.acceptance,
        getattr(config, "sa_config", None) is not None,
        getattr(config, "quant", None),
        config is not None and config.max_verified_drafts == "auto",  # times by another number
    )
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return cache_dir() / "step_times" / f"{name}.json"
