"""`EngineCollector`: an engine's numbers as Prometheus metrics.

Names that begin with `vllm:` mean what they mean in vLLM, so that its dashboards work. What vLLM
has no name for begins with `trtspec:`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..executor.py_executor import PyExecutor
from ..metadata.attention import NUM_RESERVED_BLOCKS
from .metrics import FINISHED_REASONS, Histogram, StepMetrics

Labels = Mapping[str, str]


class EngineNow(NamedTuple):
    """What the executor holds now. Read from any thread, so each number stands alone."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of blocks in use, 0 … 1, of the fullest KV group
    num_kv_blocks: int
    block_size: int
    num_preemptions: int
    forced_acceptance: float | None
    is_drafter_dead: bool
    num_graphs: int

    @classmethod
    def of(cls, executor: PyExecutor) -> EngineNow:
        scheduler, cache = executor.scheduler, executor.kv_cache
        watch = executor.dead_drafter_watch
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(executor.book.held),
            kv_usage=cache.usage,
            num_kv_blocks=cache.num_blocks - NUM_RESERVED_BLOCKS,
            block_size=cache.page_size,
            num_preemptions=executor.statistics.num_preemptions,
            forced_acceptance=executor.forced_acceptance,
            is_drafter_dead=watch is not None and watch.is_dead,
            num_graphs=0 if executor.graphs is None else executor.graphs.num_graphs,
        )


class EngineCollector(Collector):
    """Makes metrics of one engine when they are scraped.

    Args:
        model_name: value of the label of that name, as in vLLM.
    """

    def __init__(self, executor: PyExecutor, metrics: StepMetrics, model_name: str):
        self.executor, self.metrics = executor, metrics
        self.labels: Labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        metrics, now = self.metrics, EngineNow.of(self.executor)
        yield self._gauge("vllm:num_requests_running", "Requests that run.", now.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", now.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", now.kv_usage
        )
        yield self._gauge(
            "vllm:cache_config_info",
            "Sizes of the KV cache, as labels.",
            1,
            {"block_size": str(now.block_size), "num_gpu_blocks": str(now.num_kv_blocks)},
        )
        yield from self._tokens(metrics)
        yield self._counter(
            "vllm:num_preemptions", "Requests that gave up their blocks.", now.num_preemptions
        )
        yield self._finished(metrics)
        yield from self._speculation(metrics)
        yield from self._histograms(metrics)
        yield from self._own(metrics, now)

    # -- groups --------------------------------------------------------------------------------
    def _tokens(self, metrics: StepMetrics) -> Iterator[Metric]:
        yield self._counter(
            "vllm:prompt_tokens",
            "Tokens of prompts, with those found in the prefix cache.",
            metrics.prompt_tokens,
        )
        yield self._counter("vllm:generation_tokens", "Output tokens.", metrics.generated_tokens)
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Tokens that were looked for in the prefix cache.",
            metrics.prefix_queries,
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Tokens that were found in the prefix cache.",
            metrics.prefix_hits,
        )

    def _finished(self, metrics: StepMetrics) -> Metric:
        return self._counter_by(
            "vllm:request_success",
            "Requests that ended, by how.",
            "finished_reason",
            {reason: metrics.finished[reason] for reason in FINISHED_REASONS.values()},
        )

    def _speculation(self, metrics: StepMetrics) -> Iterator[Metric]:
        if not metrics.max_draft_len:
            return
        per_position = metrics.accepted_per_position
        yield self._counter(
            "vllm:spec_decode_num_drafts",
            "Times that a request's drafts were verified.",
            metrics.num_drafts,
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens",
            "Draft tokens that were asked for and verified.",
            metrics.num_draft_tokens,
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Draft tokens that were accepted.",
            sum(per_position),
        )
        yield self._counter_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position; 0 is the first.",
            "position",
            {str(position): count for position, count in enumerate(per_position)},
        )

    def _histograms(self, metrics: StepMetrics) -> Iterator[Metric]:
        for name, documentation, histogram in (
            (
                "vllm:time_to_first_token_seconds",
                "From a request's arrival to its first token.",
                metrics.first_token_seconds,
            ),
            (
                "vllm:inter_token_latency_seconds",
                "From a step that gave a request tokens to its next such step.",
                metrics.inter_token_seconds,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "A request's mean time for a token after its first.",
                metrics.token_seconds,
            ),
            (
                "vllm:e2e_request_latency_seconds",
                "From a request's arrival to its end.",
                metrics.e2e_seconds,
            ),
            (
                "vllm:request_queue_time_seconds",
                "From a request's arrival to its first step.",
                metrics.queue_seconds,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "From a request's first step to its first token.",
                metrics.prefill_seconds,
            ),
            (
                "vllm:request_decode_time_seconds",
                "From a request's first token to its last.",
                metrics.decode_seconds,
            ),
            (
                "vllm:request_inference_time_seconds",
                "From a request's first step to its last token.",
                metrics.inference_seconds,
            ),
            (
                "vllm:request_prompt_tokens",
                "Tokens of a prompt.",
                metrics.request_prompt_tokens,
            ),
            (
                "vllm:request_generation_tokens",
                "Tokens of an output.",
                metrics.request_generated_tokens,
            ),
            (
                "vllm:iteration_tokens_total",
                "Tokens of a step: of prompts that were finished, and of outputs.",
                metrics.step_tokens,
            ),
        ):
            family = HistogramMetricFamily(name, documentation, labels=list(self.labels))
            self._add_histogram(family, histogram)
            yield family

    def _own(self, metrics: StepMetrics, now: EngineNow) -> Iterator[Metric]:
        steps = HistogramMetricFamily(
            "trtspec:step_seconds",
            "Time of a step, by what it held (context, generation, mixed) and how it ran.",
            labels=[*self.labels, "kind", "run"],
        )
        for (kind, is_graph), histogram in list(metrics.step_seconds.items()):
            run = "graph" if is_graph else "eager"
            self._add_histogram(steps, histogram, {"kind": kind, "run": run})
        yield steps
        drafted = metrics.drafted_output_tokens
        yield self._counter_by(
            "trtspec:output_tokens",
            "Output tokens by source: accepted drafts, or the target's own.",
            "source",
            {"draft": drafted, "target": metrics.generated_tokens - drafted},
        )
        yield self._gauge("trtspec:cuda_graphs", "Graphs that were captured.", now.num_graphs)
        yield self._gauge("trtspec:max_draft_len", "K of the engine.", metrics.max_draft_len)
        yield self._gauge(
            "trtspec:runtime_draft_len",
            "Drafts that a step may propose now, at most.",
            self.executor.runtime_draft_len,
        )
        yield self._gauge(
            "trtspec:draft_len",
            "Drafts that the last step of generations proposed.",
            self.executor.last_draft_len,
        )
        yield self._gauge(
            "trtspec:drafter_is_dead",
            "1 once so few drafts were accepted that the drafter looks broken.",
            now.is_drafter_dead,
        )
        yield self._gauge(
            "trtspec:forced_acceptance",
            "Drafts accepted by force in each step; 0 is off. Outputs are not the model's.",
            now.forced_acceptance or 0,
        )

    # -- one metric ----------------------------------------------------------------------------
    def _gauge(
        self, name: str, documentation: str, value: float, labels: Labels | None = None
    ) -> Metric:
        all_labels = {**self.labels, **(labels or {})}
        family = GaugeMetricFamily(name, documentation, labels=list(all_labels))
        family.add_metric(list(all_labels.values()), float(value))
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def _counter_by(
        self, name: str, documentation: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """Returns a counter for each value of a label."""
        family = CounterMetricFamily(name, documentation, labels=[*self.labels, label])
        for value, count in values.items():
            family.add_metric([*self.labels.values(), value], count)
        return family

    def _add_histogram(
        self, family: Any, histogram: Histogram, labels: Labels | None = None
    ) -> None:
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        family.add_metric(
            [*self.labels.values(), *(labels or {}).values()],
            list(zip(bounds, histogram.cumulative(), strict=True)),
            sum_value=histogram.total,
        )
