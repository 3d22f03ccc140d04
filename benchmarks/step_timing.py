"""What a generation step of a running executor takes: wall clock, its graph, its parts, kernels.

All of it is the executor's own step, on the inputs that `CudaGraphs` gives it; a part is that step
stopped early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trtspec import PyExecutor, SamplingParams
from trtspec.executor.cuda_graphs.graph_key import GraphKey
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.inputs import StepInputs, build_inputs
from trtspec.executor.request import Request, ScheduledBatch
from trtspec.ops.layer import cublaslt

WARM_UP_STEPS = 10
STEPS_PER_BLOCK = 10
CHUNK = 10  # replays before the requests are put back to where they stood
Run = Callable[[], object]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy: 2 GiB, on CPU 128 MiB; median of 20."""
    size = 2 * 1024**3 if device.type == "cuda" else 128 * 1024**2
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (ms,) = timed([lambda: target.copy_(source)], device, repeats=20, chunk=1)
    return 2 * size / (ms / 1e3)


def timed(
    runs: Sequence[Run],
    device: torch.device,
    repeats: int,
    chunk: int = CHUNK,
    restore: Run = lambda: None,
) -> list[float]:
    """ms of each, the median of chunks, taking turns: by events on CUDA, by the clock on CPU."""
    times: list[list[float]] = [[] for _ in runs]
    if device.type != "cuda":
        for _ in range(repeats + 1):
            for run, values in zip(runs, times, strict=True):
                restore()
                started = time.perf_counter()
                run()
                values.append((time.perf_counter() - started) * 1e3)
        return [median(values[1:]) for values in times]  # the first is a warm-up
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(-(-repeats // chunk) + 1):
        for run, pairs in zip(runs, events, strict=True):
            restore()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            start.record()
            for _ in range(chunk):
                run()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [median(s.elapsed_time(e) / chunk for s, e in pairs[1:]) for pairs in events]


def prompts_ms(executor: PyExecutor, batch: int, context: int, repeats: int) -> float:
    """ms until `batch` prompts of `context` tokens, given at once to an idle engine, have their
    first token, greedily: the median, after a warm-up that captures and compiles."""
    times = []
    for _ in range(repeats + 1):
        for i in range(batch):
            executor.enqueue(_prompt(executor, i, context), SamplingParams(max_tokens=1))
        started = time.perf_counter()
        executor.run_until_done()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])


def _prompt(executor: PyExecutor, number: int, context: int) -> list[int]:
    vocab = executor.target.config.vocab_size
    return [(7 * j + 11 * number) % vocab for j in range(context)]


@dataclass(frozen=True)
class WallClock:
    block_ms: list[float]  # ms a step, for each block
    acceptance_length: float
    kv_tokens: float  # mean length of the sequences meanwhile

    @property
    def ms(self) -> float:
        return median(self.block_ms)


@dataclass(frozen=True)
class Split:
    graph_ms: float | None  # None where there are no graphs
    target_ms: float  # gathering the inputs, target, logits
    accept_ms: float
    draft_ms: float  # with leaving the next step's inputs in the slots


class SteadyBatch:
    """`batch` requests of `context` tokens, in generation until `close()`; greedy unless `sampling`
    (of SamplingParams) says otherwise."""

    def __init__(
        self,
        executor: PyExecutor,
        batch: int,
        context: int,
        sampling: dict[str, Any] | None = None,
    ):
        self.executor, self.context, self.device = executor, context, executor.device
        for i in range(batch):
            params = SamplingParams(max_tokens=10**9, ignore_eos=True, seed=i, **(sampling or {}))
            executor.enqueue(_prompt(executor, i, context), params)
        while len(self.requests) < batch or not all(r.is_generation for r in self.requests):
            if len(self.requests) + len(executor.scheduler.waiting) < batch:
                raise RuntimeError(
                    "A request ended before all prompts were read: lower batch or context, or give "
                    "the engine a larger max_seq_len."
                )
            executor.step()
        for _ in range(2):  # captures the graph
            executor.step()
        self.drain()

    @property
    def requests(self) -> list[Request]:
        return list(self.executor.scheduler.running)

    def close(self) -> None:
        for request in self.requests:
            self.executor.cancel(request.request_id)
        self.executor.run_until_done()

    def drain(self) -> None:
        """Reads the steps in flight."""
        while self.executor._pending:
            self.executor._read(self.executor._pending.popleft())

    def rewind(self, length: int) -> None:
        """Cuts every text to that many tokens, as if it had been the prompt. Nothing is in flight.

        (Their last tokens and drafts stay: what they are does not matter.)"""
        state = self.executor.state
        for request in self.requests:
            request.output_token_ids.clear()
            del request.prompt_token_ids[length:]
            request.past_upper = length
            state.past_lens[request.slot] = length
            if "history_lens" in state.worker:  # NGRAM's, with the last token
                state.worker["history_lens"][request.slot] = length + 1

    # -- wall clock ------------------------------------------------------------------------------
    def wall_clock(self, num_blocks: int, expected_length: float) -> WallClock:
        """Steps as in use, never waited for; the sequences grow through `context`.

        Args:
            expected_length: accepted tokens a step; centres the sequences' growth.
        """
        executor = self.executor
        num_steps = num_blocks * STEPS_PER_BLOCK
        grown = (num_steps / 2 + WARM_UP_STEPS) * expected_length
        start = max(1, round(self.context - grown))
        self.rewind(start)
        for _ in range(WARM_UP_STEPS):
            executor.step()
        count = len(self.requests)
        executor.reset_stats()
        times = [time.perf_counter()]
        for _ in range(num_steps):
            executor.step()
            times.append(time.perf_counter())
        self.drain()
        if len(self.requests) < count:
            raise RuntimeError("A request ended while it was measured.")
        length = executor.stats().acceptance_length
        per_block = zip(
            times[::STEPS_PER_BLOCK], times[STEPS_PER_BLOCK::STEPS_PER_BLOCK], strict=False
        )
        return WallClock(
            [(end - begin) / STEPS_PER_BLOCK * 1e3 for begin, end in per_block],
            length,
            start + (num_steps / 2 + WARM_UP_STEPS) * length,
        )

    # -- parts -----------------------------------------------------------------------------------
    def split(self, replays: int) -> Split:
        """The step's parts at `context`, as differences: target, target and acceptance, all."""
        executor, rows = self.executor, self.executor.max_draft_len + 1
        self.rewind(self.context)
        last = self.context + (CHUNK + 2) * rows + executor.worker.num_extra_kv_tokens
        for request in self.requests:
            if not executor.kv_cache.reserve(request.request_id, last):
                raise RuntimeError("The KV cache is too small for the replays.")
        key = self._graph_key()
        parts = self._eager_parts() if key is None else self._captured_parts(key)
        restore = self._snapshot()
        target, accepted, whole = timed(parts, self.device, replays, restore=restore)
        restore()
        graph_ms = None if key is None else whole
        return Split(graph_ms, target, accepted - target, whole - accepted)

    def _graph_key(self) -> GraphKey | None:
        graphs, count = self.executor.graphs, len(self.requests)
        if graphs is None or graphs.bucket(count) is None:
            return None
        params = self.requests[0].sampling_params
        wanted = (
            graphs.bucket(count),
            self.executor.max_draft_len,
            0,
            params.is_greedy,
            params.has_filters,
        )
        return next(
            k
            for k in graphs._graphs
            if (k.batch_size, k.num_drafts, k.context_tokens, k.all_greedy, k.has_filters) == wanted
        )

    def _captured_parts(self, key: GraphKey) -> list[Run]:
        graphs = self.executor.graphs
        assert graphs is not None
        rows = graphs.inputs.rows_to_send(self.requests, key.batch_size)
        if rows is not None:
            graphs.inputs.send(rows)
        restore = self._snapshot()
        parts: list[Run] = []
        for accepts in (False, True):

            def run(accepts: bool = accepts) -> None:
                inputs = graphs._step_inputs(key)
                _first_parts(self.executor, inputs, key.draft_len, accepts)

            with cublaslt.tuning(graphs.enable_autotuner):
                parts.append(_capture(run))
        restore()

        def whole() -> None:
            for part in graphs._graphs[key].parts:
                part.graph.replay()

        return [*parts, whole]

    def _eager_parts(self) -> list[Run]:
        executor = self.executor
        batch = ScheduledBatch([], self.requests)
        num_drafts = executor.runner.num_drafts_to_verify(batch.generations)
        inputs = build_inputs(batch, executor.kv_cache, num_drafts, self.device)
        step, draft_len = executor.runner.step, executor.runtime_draft_len

        def whole() -> StepOutputs:
            outputs = step.run(inputs, draft_len)
            for _ in step.draft_passes(outputs):
                pass
            return outputs

        return [
            lambda: _first_parts(executor, inputs, draft_len, accepts=False),
            lambda: _first_parts(executor, inputs, draft_len, accepts=True),
            whole,
        ]

    def _snapshot(self) -> Run:
        """Puts the slots back to what they hold now."""
        state = self.executor.state
        tensors = [state.next_tokens, state.past_lens, *state.worker.values()]
        copies = [tensor.clone() for tensor in tensors]

        def restore() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

        return restore

    # -- kernels ---------------------------------------------------------------------------------
    def profile(self, step_ms: float, steps: int = 20, top: int = 40) -> dict[str, Any]:
        """Time by kernel (on CPU by operation) over steady steps.

        Args:
            step_ms: of the same step when it is not watched; what no kernel fills is the gap.
        """
        self.rewind(max(1, self.context - steps // 2 * (self.executor.max_draft_len + 1)))
        for _ in range(WARM_UP_STEPS):
            self.executor.step()
        report = kernel_times(self.executor, steps, top)
        self.drain()
        return {**report, "gap_ms": step_ms - report["kernel_ms"]}


def kernel_times(executor: PyExecutor, steps: int = 20, top: int = 40) -> dict[str, Any]:
    """Time by kernel (on CPU by operation) over `steps` steps of the requests at hand.

    A kernel may start while the one before it runs, and wait for it. So `us_per_step` is what it
    adds: from the end of all that ended before it, or its own start, to its end. `mean_us` is from
    start to end.
    """
    on_gpu = executor.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as p:
        for _ in range(steps):
            executor.step()
        if on_gpu:
            torch.cuda.synchronize(executor.device)
    added = added_us(p.events()) if on_gpu else {}
    kernels: list[dict[str, Any]] = []
    for event in p.key_averages():
        total = event.device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0 and (event.device_type == DeviceType.CUDA) == on_gpu:
            kernels.append(
                {
                    "name": event.key.replace("void trtspec::", "")[:80],
                    "per_step": event.count / steps,
                    "us_per_step": added.get(event.key, total) / steps,
                    "mean_us": total / event.count,
                }
            )
    kernels.sort(key=lambda kernel: -kernel["us_per_step"])
    return {
        "kernel_ms": sum(kernel["us_per_step"] for kernel in kernels) / 1e3,
        "num_names": len(kernels),
        "kernels_per_step": sum(kernel["per_step"] for kernel in kernels),
        "kernels": kernels[:top],
    }


def added_us(events: Iterable[Any]) -> dict[str, float]:
    """Returns what kernels of each name add, us."""
    added: dict[str, float] = {}
    kernels = (event for event in events if event.device_type == DeviceType.CUDA)
    last_end = -math.inf
    for event in sorted(kernels, key=lambda event: event.time_range.end):
        start, end = event.time_range.start, event.time_range.end
        added[event.key] = added.get(event.key, 0.0) + end - max(start, last_end)
        last_end = end
    return added


class _Stop(Exception):
    """Ends a step early."""


def _first_parts(executor: PyExecutor, inputs: StepInputs, draft_len: int, accepts: bool) -> None:
    """The executor's step up to the logits, or up to what drafting starts from."""
    verify = executor.worker.verify

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        if accepts:
            verify(*args, **kwargs)
        raise _Stop

    with patch.object(executor.worker, "verify", stop):
        try:
            executor.runner.step.run(inputs, draft_len)
        except _Stop:
            return
    raise RuntimeError("The step did not call worker.verify: it cannot be split there.")


def _capture(run: Run) -> Run:
    """`run` as a CUDA graph, warmed up on a side stream as capturing wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
