"""Passes of fixed shapes, as captured graphs run them, here run eagerly on CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from trtspec.attention.base import CachedLayer
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.executor.cuda_graphs.context_inputs import ContextInputs
from trtspec.executor.cuda_graphs.generation_inputs import GenerationInputs
from trtspec.executor.device_step import PartialLaunch
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.py_executor import PyExecutor
from trtspec.executor.request import ContextChunk, StepPlan
from trtspec.metadata.attention import AttentionMetadata


class Uncaptured:
    """Stands for `CudaGraphs`: the same inputs, the step run as it is."""

    def __init__(self, executor: PyExecutor, tokens: Sequence[int], joins: bool = False):
        self.executor, self.passes, self.most_worth = executor, 0, 1000
        self.num_sent_again, self.joins, self.num_joined = 0, joins, 0
        self.num_missed, self._rng = 0, random.Random(0)
        self.asked: tuple[int, int] | None = None  # drafts verified and proposed
        config = executor.config
        self.generations = GenerationInputs(
            config.max_batch_size, config.max_batch_size, config.max_seq_len, executor.kv_cache,
            executor.device,
        )  # fmt: skip
        self.shapes = [
            ContextInputs(
                n, config.max_batch_size, config.max_seq_len, executor.kv_cache, executor.device
            )
            for n in tokens
        ]

    def bucket(self, batch_size: int) -> int:
        return batch_size

    def run(self, *_: object) -> None:
        return None  # generations by themselves, eagerly

    def send_again(self) -> None:
        """Everything is sent every time: it counts that it was asked."""
        self.num_sent_again += 1
        self.generations.forget()

    def shape_for(self, chunks: Sequence[ContextChunk]) -> ContextInputs | None:
        return next((shape for shape in self.shapes if shape.holds(chunks)), None)

    def pays_to_join(self, plan: StepPlan) -> bool:
        self.asked = plan.num_drafts, plan.draft_len
        shape, most = self.shape_for(plan.batch.contexts), self.executor.config.max_num_tokens
        rows = self.generations.size * (self.executor.max_draft_len + 1)
        return self.joins and shape is not None and shape.num_tokens + rows <= most

    def run_contexts(self, shape: ContextInputs, plan: StepPlan) -> PartialLaunch:
        chunks = plan.batch.contexts
        outputs = self._run(shape, plan, num_beside=0)
        return PartialLaunch(outputs.first_rows(len(chunks), 1), is_replay=True)

    def run_both(self, plan: StepPlan) -> PartialLaunch | None:
        """With any number of rows of no request behind those of generations."""
        chunks, requests = plan.batch.contexts, plan.batch.generations
        shape = self.shape_for(chunks)
        if shape is None:
            return None
        plan.finish_before()
        self.num_joined += 1
        assert (plan.num_drafts, plan.draft_len) == self.asked, "another pass than was asked for"
        count = self._rng.randint(len(requests), self.generations.size)
        assert (
            count * (plan.num_drafts + 1) + shape.num_tokens <= self.executor.config.max_num_tokens
        )
        rows = self.generations.rows_to_send(requests, count)
        if rows is not None:
            self.generations.send(rows)
        if plan.reads_missed:
            self.num_missed += 1
            slots, tables = self.generations.slots(count), self.generations.tables(count)
            self.executor.runner.step.read_missed(slots, tables)
        outputs, first = self._run(shape, plan, count), shape.num_contexts
        rows_of_requests = [*range(len(chunks)), *range(first, first + len(requests))]
        return PartialLaunch(outputs, is_replay=True, rows=rows_of_requests)

    def _run(self, shape: ContextInputs, plan: StepPlan, num_beside: int) -> StepOutputs:
        batch = plan.batch
        shape.fill(batch.contexts)
        kind = plan.num_drafts, batch.all_greedy, batch.has_filters
        inputs = shape.step_inputs(*kind)
        if num_beside:
            inputs = inputs.followed_by(self.generations.step_inputs(num_beside, *kind))
        self.passes += 1
        inputs = replace(inputs, num_logprobs=batch.num_logprobs, shapes_logits=batch.shapes_logits)
        step = self.executor.runner.step
        outputs = step.run(inputs, plan.draft_len)
        assert step.state.past_lens[-1] == 0, "rows that fill graphs up would attend to more"
        return outputs


class PaddedTorch(TorchAttention):
    """Attention in torch, of padded passes over prompts too: a fraction of the interpreter's time.

    The host looks where each prompt ends. Rows of no prompt are zeros.
    """

    contexts_on_device = True

    def _attend(
        self, q: torch.Tensor, meta: AttentionMetadata, cached: CachedLayer
    ) -> torch.Tensor:
        if meta.last_context_rows is None:
            return super()._attend(q, meta, cached)
        ends = [0, *(meta.last_context_rows + 1).tolist()]
        lens = tuple(b - a for a, b in pairwise(ends))
        prompts = replace(
            meta.contexts_only(), context_lens=lens, last_context_rows=None, derived={}
        )
        out = q.new_zeros(*q.shape[:2], cached.v_slots.shape[2])
        for i, rows in enumerate(lens):
            if rows:
                some = slice(ends[i], ends[i + 1])
                out[some] = self._context(q[some], prompts, i, cached)
        if meta.num_generations:
            rows = meta.num_context_tokens
            out[rows:] = self._generation(q[rows:], meta, cached)
        return out
