"""`draft_len_of`: what chooses an engine's draft lengths, with the step times known so far."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch

from ..utils import cache_dir
from .auto_draft_len import AutoDraftLen
from .draft_len import DraftLen
from .runner import StepRunner
from .step_costs import StepCosts, StepShape

logger = logging.getLogger(__name__)


def draft_len_of(runner: StepRunner) -> DraftLen:
    """Returns the config's choice of lengths: fixed, by a schedule, or by what is measured."""
    config, most = runner.step.worker.config, runner.max_draft_len
    if config is None or config.draft_len_schedule != "auto" or most == 0:
        return DraftLen(most, config)
    costs = StepCosts(_path(runner))
    auto = AutoDraftLen(most, config, costs, lambda count: _bucket(runner, count))
    if not costs.is_empty:
        logger.info("Step times are taken from %s.", costs.path)
    elif runner.graphs is not None and runner.graphs.captures_at_start:
        _measure(runner, auto)
    return auto


def _bucket(runner: StepRunner, count: int) -> int:
    size = None if runner.graphs is None else runner.graphs.bucket(count)
    return 1 << (count - 1).bit_length() if size is None else size


def _measure(runner: StepRunner, auto: AutoDraftLen) -> None:
    """Times the graphs of every length, for sizes 1, 2, 4, … and the largest."""
    assert runner.graphs is not None
    if runner.step.target.config.parallel.size > 1:  # the other ranks would not replay
        return
    sizes = [size for size in runner.graphs.batch_sizes if size & (size - 1) == 0]
    for size in sorted({*sizes, runner.graphs.batch_sizes[-1]}, reverse=True):
        for draft_len in auto.lengths:
            seconds = runner.graphs.replay_seconds(size, draft_len)
            auto.costs.add(StepShape(size, all_greedy=True), draft_len, seconds)
    auto.costs.save()


def _path(runner: StepRunner) -> Path:
    """Returns the file of this device, model, drafter and mode."""
    device, step = runner.device, runner.step
    where = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    weight = step.target.norm.weight.dtype
    what = (where, torch.__version__, weight, step.target.config, runner.mode.name)
    drafter = getattr(step.draft_model, "config", None), runner.max_draft_len
    name = hashlib.sha256(repr((what, drafter, runner.graphs is None)).encode()).hexdigest()[:16]
    return cache_dir() / "step_times" / f"{name}.json"
