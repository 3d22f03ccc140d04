"""CUDA graphs: a generation step is one launch.

A graph is captured for what a `GraphKey` names: a batch size (a bucket), the numbers of drafts
verified and proposed, greedy or sampled, and more. It holds everything between the host's two
copies: gathering inputs from the slots, the target, acceptance, all draft passes, and writing the
next step's inputs to the slots.
The host sends slot ids and block tables, unless none has changed. A step with grammars is
several graphs, for the host writes masks in between (`metadata/guided.py`).

Rows that fill a bucket are inert. They use the scratch slot, which has no blocks: their keys go to
the scratch block, and their tokens are never read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import NamedTuple

import torch

from ...config import CudaGraphConfig, ExecutorConfig
from ...errors import ConfigError
from ...ops.launch.captures import capture_stream, no_garbage_collection
from ...ops.layer import cublaslt
from ..device_step import DeviceStep, PartialLaunch
from ..draft_lens.step_costs import StepShape
from ..forward_step import StepOutputs
from ..guided_masks import GuidedMasks
from ..inputs import StepInputs
from ..request import ContextChunk, ScheduledBatch, StepPlan
from .context_inputs import ContextInputs, most_worth_capturing
from .generation_inputs import GenerationInputs
from .graph_key import GraphKey
from .graph_recorder import GraphPart, GraphRecorder, HostPart, launch_parts
from .joined_passes import JoinedPasses, JoinedShape

logger = logging.getLogger(__name__)

SECONDS_OF_CAPTURE = 0.05  # before any was timed
TIMINGS = 2  # of a step, of which the least counts
SPARE_BYTES = 1 << 30  # of free memory, for graphs that a step cannot do without
IN_A_ROW = 4  # steps that are timed together: so the host's launches are hidden, as in use


class GraphMemoryError(ConfigError):
    """GPU memory ran out while a graph was captured."""


class _Captured(NamedTuple):
    parts: list[GraphPart]  # of the step; in two-engine modes also of each draft pass
    outputs: StepOutputs | None  # None: of no step
    rows: dict[int, StepOutputs]  # views of the outputs of fewer requests, by how many


class CudaGraphs:
    """Captures on first use, replays after that. One memory pool for all graphs."""

    def __init__(
        self,
        step: DeviceStep,
        config: ExecutorConfig,
        graph_config: CudaGraphConfig,
        device: torch.device,
    ):
        self.step, self.kv_cache, self.device = step, step.kv_cache, device
        self.enable_padding = graph_config.enable_padding
        self.captures_at_start = graph_config.capture_at_start
        self.enable_autotuner = graph_config.enable_autotuner
        self.max_seq_len, self.max_num_tokens = config.max_seq_len, config.max_num_tokens
        self.batch_sizes = graph_config.buckets(config.max_batch_size)
        self.inputs = GenerationInputs(
            self.batch_sizes[-1], config.max_batch_size, config.max_seq_len, self.kv_cache, device
        )
        self.most_worth = most_worth_capturing(step.target)
        self.contexts = [
            ContextInputs(n, config.max_batch_size, config.max_seq_len, self.kv_cache, device)
            for n in graph_config.context_sizes(config.max_num_tokens, self.most_worth)
        ]
        self._graphs: dict[GraphKey, _Captured] = {}
        self.may_lose_graphs = False
        """Whether a step runs eagerly where there is no memory for its graph, and not again."""
        self._lost: set[GraphKey] = set()
        self.shared_of: int | None = None
        """K, where it is chosen while serving how many of these drafts are verified."""
        self.may_stand_in = False
        """Whether a larger captured pass over prompts stands in for a missing one at first. Where
        lengths choose themselves passes differ from run to run, and a capture takes as long as
        dozens of steps."""
        self._costs: dict[GraphKey, float] = {}  # seconds that it has cost to be without a graph
        self._seconds: dict[GraphKey, float] = {}  # of passes that have stood in
        self.joined = JoinedPasses(
            step.target,
            self.batch_sizes,
            [inputs.num_tokens for inputs in self.contexts],
            rows=step.shape.max_draft_len + 1,
        )
        # Where memory ends on one of several ranks, the others would not know.
        self._may_join = self.enable_padding and step.target.config.parallel.size == 1
        self.masks: GuidedMasks | None = None  # set once a request has a grammar
        self._host_part: HostPart | None = None
        """Cuts the graph, while a step with grammars is captured."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(device)
        self.memory_bytes = 0  # taken by captures so far
        self.capture_seconds: list[float] = []  # of each capture

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    # -- generations -------------------------------------------------------------------------------
    def bucket(self, batch_size: int) -> int | None:
        """Returns the smallest captured size that holds the batch; None if there is none."""
        size = next((size for size in self.batch_sizes if size >= batch_size), None)
        return size if self.enable_padding or size == batch_size else None

    def run(self, plan: StepPlan) -> PartialLaunch | None:
        """Runs one step of generations alone, up to where the host would wait for its tokens.

        Returns None if no graph holds them. The host first prepares its rows. It launches nothing
        until the launch before is complete.
        """
        requests = plan.batch.generations
        bucket = self.bucket(len(requests))
        if bucket is None:
            return None
        keys = [GraphKey.of(plan, batch_size=bucket)]
        if plan.reads_missed:
            keys.append(GraphKey.of_missed(bucket))
        if any(key not in self._graphs for key in keys):
            plan.finish_before()
            if not all(self._is_there(key) for key in keys):
                return None
        rows = self.inputs.rows_to_send(requests, bucket)
        plan.finish_before()
        if rows is not None:
            self.inputs.send(rows)
        for key in keys[1:]:
            self._replay_whole(key)
        return self._replay(keys[0], len(requests), plan.host_part)

    # -- prompts -----------------------------------------------------------------------------------
    def shape_for(self, chunks: Sequence[ContextChunk]) -> ContextInputs | None:
        """Returns the smallest captured shape that holds these parts of prompts, if any does."""
        tokens, count = sum(chunk.num_tokens for chunk in chunks), len(chunks)
        return next((inputs for inputs in self.contexts if inputs.fits(tokens, count)), None)

    def run_contexts(self, inputs: ContextInputs, plan: StepPlan) -> PartialLaunch | None:
        """Runs one pass over parts of prompts alone. The launch before is finished.

        Returns None if it cannot be captured. Then the shape is dropped, and such passes run
        eagerly.
        """
        chunks = plan.batch.contexts
        key = GraphKey.of_contexts(plan, inputs)
        if key not in self._graphs:
            larger = self._stand_in(inputs, plan)
            if larger is not None:
                inputs, key = larger, GraphKey.of_contexts(plan, larger)
            elif not self._capture_contexts(inputs, key):
                return None
        inputs.fill(chunks)
        return self._replay(key, len(chunks), plan.host_part)

    def _stand_in(self, inputs: ContextInputs, plan: StepPlan) -> ContextInputs | None:
        """Returns the smallest larger shape that has a graph, to run this pass.

        None: there is none, or padding would by now have cost as much as a capture.
        """
        larger = self.contexts[self.contexts.index(inputs) + 1 :] if self.may_stand_in else []
        key_of = partial(GraphKey.of_contexts, plan)
        found = next((one for one in larger if key_of(one) in self._graphs), None)
        if found is None:
            return None
        key, seconds = key_of(inputs), self._seconds_of_pass(found, plan)
        padding = seconds * (1 - inputs.num_tokens / found.num_tokens)
        return None if self._add_cost(key, padding) else found

    def _add_cost(self, key: GraphKey, seconds: float) -> bool:
        """Books what it costs to be without a graph. Returns whether that is a capture by now."""
        self._costs[key] = self._costs.get(key, 0.0) + seconds
        return self._costs[key] >= self.capture_cost

    def _seconds_of_pass(self, inputs: ContextInputs, plan: StepPlan) -> float:
        """Returns what a captured pass takes, all of it padding. It is timed once, and the host
        waits: by its products alone a pass of a small model would seem a fraction of it."""
        key = GraphKey.of_contexts(plan, inputs)
        if key not in self._seconds:
            inputs.fill([])
            self._replay_whole(key)
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            self._replay_whole(key)
            torch.cuda.synchronize(self.device)
            self._seconds[key] = time.perf_counter() - began
        return self._seconds[key]

    # -- prompts and generations -------------------------------------------------------------------
    def _joined_shape(self, plan: StepPlan) -> JoinedShape | None:
        """Returns what a pass over parts of prompts and generations has room for.

        It has few sizes where there is room for their rows, else those of two passes. None: no pass
        holds them.
        """
        count, rows = len(plan.batch.generations), self.step.shape.max_draft_len + 1
        apart, bucket = self.shape_for(plan.batch.contexts), self.bucket(count)
        if apart is None or bucket is None:
            return None
        few = (one for one in self.contexts if one.num_tokens in self.joined.context_tokens)
        larger = next((one for one in few if one.num_tokens >= apart.num_tokens), apart)
        size = self.joined.size_for(count)
        for inputs, beside in ((larger, size), (apart, size), (apart, bucket)):
            if inputs.num_tokens + beside * rows <= self.max_num_tokens:  # for captured states, too
                unused = inputs.num_tokens - apart.num_tokens, beside - bucket
                return JoinedShape(inputs, beside, *unused)
        return None

    def pays_to_join(self, plan: StepPlan) -> bool:
        """Whether parts of prompts and generations had better be one pass, which reads the weights
        once, and launches a layer's kernels once.

        So it is where the pass has a graph, or once two passes have cost as much as its capture;
        never where its padding costs more than it saves.
        """
        shape = self._joined_shape(plan) if self._may_join else None
        if shape is None:
            return False
        key, saved = _joined_key(plan, shape), self.joined.seconds_saved(shape, plan.num_drafts + 1)
        if saved <= 0 or key in self._graphs:
            return saved > 0
        return self._add_cost(key, saved) and self._has_spare_memory()

    def _has_spare_memory(self) -> bool:
        """Whether a graph that could be done without leaves enough for those that could not."""
        return torch.cuda.mem_get_info(self.device)[0] > SPARE_BYTES

    def run_both(self, plan: StepPlan) -> PartialLaunch | None:
        """Runs one pass over parts of prompts and generations, once the launch before is finished.

        Returns None if no shape holds them, or if there is no memory to capture it. After that no
        further pass is joined.
        """
        chunks, requests = plan.batch.contexts, plan.batch.generations
        shape = self._joined_shape(plan)
        if shape is None:
            return None
        plan.finish_before()
        key, inputs = _joined_key(plan, shape), shape.prompts
        keys = [key, GraphKey.of_missed(key.num_beside)] if plan.reads_missed else [key]
        try:
            for missing in [one for one in keys if one not in self._graphs]:
                inputs.fill([])
                self._graphs[missing] = self._capture(missing)
        except GraphMemoryError as error:
            logger.warning("Prompts and generations stay two passes where memory ends: %s", error)
            self._may_join = False
            return None
        rows = self.inputs.rows_to_send(requests, key.num_beside)
        if rows is not None:
            self.inputs.send(rows)
        inputs.fill(chunks)
        for missed in keys[1:]:
            self._replay_whole(missed)
        first = inputs.num_contexts
        launch = self._replay(key, None, plan.host_part)
        launch.rows = [*range(len(chunks)), *range(first, first + len(requests))]
        return launch

    # -- replay ------------------------------------------------------------------------------------
    def _replay(
        self, key: GraphKey, num_requests: int | None, host_part: HostPart | None
    ) -> PartialLaunch:
        """Launches a step's graphs, up to the first `DraftPoint`.

        Args:
            num_requests: whose outputs come first; None returns all, with those of padding.
        """
        captured = self._graphs[key]
        assert captured.outputs is not None
        outputs = captured.outputs if num_requests is None else captured.rows.get(num_requests)
        if outputs is None:
            assert num_requests is not None
            num_rows = 1 if key.context_tokens else key.num_drafts + 1
            outputs = captured.outputs.first_rows(num_requests, num_rows)
            captured.rows[num_requests] = outputs
        rest = launch_parts(captured.parts, host_part)
        next(rest, None)
        return PartialLaunch(outputs, is_replay=True, rest=rest)

    def _replay_whole(self, key: GraphKey) -> None:
        """Replays a graph that has no part of the host's."""
        for graph, _ in self._graphs[key].parts:
            graph.replay()

    def replay_seconds(self, shape: StepShape, draft_len: int, context: int) -> float | None:
        """Returns the seconds of a step of a length (`GraphKey.with_length`), behind `context`
        tokens.

        All rows are inert, and each reads blocks of its own, as far as there are enough: keys of
        one block would all be in the L2 cache. So no request may have blocks, and none is cached.

        It waits for the device, and captures the graph first if need be. None: it is lost.
        """
        key = self._key_of(shape, draft_len)
        if not self._is_there(key):
            return None
        page = self.kv_cache.page_size
        num_tokens = min(context + 2 * (key.draft_len + 1) + page, self.max_seq_len)
        tables = self.inputs.spread(shape.size, num_tokens)
        past_lens = self.step.state.past_lens[-1:]  # the scratch slot's; a step clears it
        times = []
        for _ in range(TIMINGS):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                past_lens.fill_(context)
                self._replay_whole(key)
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began) / IN_A_ROW)
        first = max(0, context - page) // page  # of each row's blocks that were written to
        for group, table in enumerate(tables):
            self.kv_cache.zero(group, table[:, first:].flatten().tolist())
        self.inputs.clear()
        return min(times)

    def send_again(self) -> None:
        """Makes the next step send everything, after an exception."""
        self.inputs.forget()

    # -- what is captured, and when ----------------------------------------------------------------
    def capture_all(self, num_drafts: int) -> None:
        """Captures every size, the largest first, for greedy and for sampled batches."""
        for size in reversed(self.batch_sizes):
            for key in GraphKey.at_start(num_drafts, batch_size=size):
                if key not in self._graphs:
                    self._graphs[key] = self._capture(key)
        self.prepare_contexts(num_drafts)

    def prepare(self, shape: StepShape, draft_len: int) -> bool:
        """Captures a step of a length (`GraphKey.with_length`), without grammars.

        False: there is no memory for it.
        """
        return self._is_there(self._key_of(shape, draft_len))

    def _key_of(self, shape: StepShape, length: int) -> GraphKey:
        return GraphKey.of_shape(shape).with_length(length, self.shared_of)

    def prepare_contexts(self, num_drafts: int, until: float = inf, least_ratio: float = 1) -> None:
        """Captures passes over prompts, the largest first, for greedy and for sampled batches.

        Args:
            until: when to stop, by `time.perf_counter`.
            least_ratio: each pass that is captured has at least this many times the rows of the
                next smaller one.
        """
        least = inf  # of those that are captured
        for inputs in self.contexts[::-1]:
            if time.perf_counter() > until:
                return
            if least_ratio * inputs.num_tokens > least:
                continue
            least = inputs.num_tokens
            for key in GraphKey.at_start(num_drafts, inputs.num_contexts, inputs.num_tokens):
                if key not in self._graphs and not self._capture_contexts(inputs, key):
                    break

    def prepare_missed(self, size: int) -> None:
        """Captures the pass over rows that the head has missed, where there may be some."""
        if self.step.state.missed is not None:
            self._is_there(GraphKey.of_missed(size))

    def ready(self, batch: ScheduledBatch, lengths: list[int]) -> list[int]:
        """Returns those lengths K for which a step of these generations needs no capture."""
        bucket = self.bucket(len(batch.generations))
        if bucket is None:
            return lengths
        key = GraphKey.of(StepPlan(batch=batch, num_drafts=0, draft_len=0), batch_size=bucket)
        keys = {k: key.with_length(k, self.shared_of) for k in lengths}
        return [k for k in lengths if keys[k] in self._graphs or keys[k] in self._lost]

    def is_lost(self, shape: StepShape, draft_len: int) -> bool:
        """Whether a graph of this shape and draft length found no memory."""
        if not self._lost:
            return False
        sought = *shape, draft_len
        return any(
            sought == (key.batch_size, key.all_greedy, key.is_guided, key.length)
            for key in self._lost
            if not key.reads_missed
        )

    @property
    def capture_cost(self) -> float:
        """The seconds that a capture takes, going by the latest ones."""
        return median(self.capture_seconds[-9:]) if self.capture_seconds else SECONDS_OF_CAPTURE

    # -- capture -----------------------------------------------------------------------------------
    def _is_there(self, key: GraphKey) -> bool:
        """Captures a graph if need be. False: there is no memory for it, and none may be needed."""
        if key in self._graphs or key in self._lost:
            return key in self._graphs
        try:
            self._graphs[key] = self._capture(key)
        except GraphMemoryError as error:
            # The other ranks would not know.
            if not self.may_lose_graphs or self.step.target.config.parallel.size > 1:
                raise
            if not self._lost:
                logger.warning("No more draft lengths are captured where memory ends: %s", error)
            self._lost.add(key)
            return False
        return True

    def _capture_contexts(self, inputs: ContextInputs, key: GraphKey) -> bool:
        """Captures a shape. False: there is no room or no kernel for it, and it was dropped."""
        inputs.fill([])
        try:
            self._graphs[key] = self._capture(key)
        except ConfigError as error:
            if self.step.target.config.parallel.size > 1:  # the other ranks would not know
                raise
            logger.warning("Prompts of up to %d tokens run eagerly: %s", key.context_tokens, error)
            self.contexts.remove(inputs)
            return False
        return True

    def _capture(self, key: GraphKey) -> _Captured:
        """Captures one graph. All its rows are inert, so that warming up changes no request."""
        free, began = torch.cuda.mem_get_info(self.device)[0], time.perf_counter()
        try:
            with cublaslt.tuning(self.enable_autotuner):
                captured = self._capture_inert(key)
        except torch.OutOfMemoryError as error:
            raise GraphMemoryError(
                f"GPU memory ran out while the graph for batch size {key.batch_size} was captured: "
                "lower KvCacheConfig.free_gpu_memory_fraction or max_batch_size, or name fewer "
                "CudaGraphConfig.batch_sizes or context_tokens."
            ) from error
        taken = max(0, free - torch.cuda.mem_get_info(self.device)[0])
        self.memory_bytes += taken
        self.capture_seconds.append(time.perf_counter() - began)
        logger.info("Captured %s: %.1f MiB.", key, taken / 2**20)
        return captured

    def _capture_inert(self, key: GraphKey) -> _Captured:
        self.inputs.clear()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Once: it compiles and loads what is missing, and measures algorithms.
            num_passes = sum(1 for _ in self._draft_passes(self._run_step(key)))
        torch.cuda.current_stream().wait_stream(self._stream)
        recorder = GraphRecorder(self._pool, self._stream)
        self._host_part = recorder.cut
        try:
            with no_garbage_collection():
                with recorder.recording():
                    outputs = self._run_step(key)
                    passes = self._draft_passes(outputs)
                    if key.is_guided:  # it is cut at its points alone: one may end a pass
                        num_passes -= len(list(passes))
                for _ in range(num_passes):
                    with recorder.recording():
                        next(passes)
        finally:
            self._host_part = None
        return _Captured(parts=recorder.parts, outputs=outputs, rows={})

    def _draft_passes(self, outputs: StepOutputs | None) -> Iterator[None]:
        return iter(()) if outputs is None else self.step.draft_passes(outputs)

    def _run_step(self, key: GraphKey) -> StepOutputs | None:
        inputs = replace(
            self._step_inputs(key), is_cuda_graph=True, mean_verified=key.mean_verified
        )
        if key.reads_missed:
            self.step.read_missed(inputs.slot_ids, inputs.block_tables)
            return None
        if key.is_guided:
            assert self.masks is not None
            inputs = replace(inputs, guided=self.masks.step(self._host_part, key.draft_len))
        return self.step.run(inputs, key.draft_len)

    def _step_inputs(self, key: GraphKey) -> StepInputs:
        kind = key.num_drafts, key.all_greedy, key.has_filters
        if not key.context_tokens:
            inputs = self.inputs.step_inputs(key.batch_size, *kind)
        else:
            shape = next(c for c in self.contexts if c.num_tokens == key.context_tokens)
            inputs = shape.step_inputs(*kind)
            if key.num_beside:
                inputs = inputs.followed_by(self.inputs.step_inputs(key.num_beside, *kind))
        return replace(inputs, num_logprobs=key.num_logprobs, shapes_logits=key.shapes_logits)


def _joined_key(plan: StepPlan, shape: JoinedShape) -> GraphKey:
    """Returns the key of a pass over parts of prompts and generations."""
    return GraphKey.of_contexts(plan, shape.prompts)._replace(num_beside=shape.num_beside)
