"""`StepRunner`: launches a scheduled step on one device, eagerly or as CUDA graphs.

It owns the models, the slots and the graphs. Each rank of several GPUs has one. It knows no queue
and finishes no request, and it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..config import ExecutorConfig
from ..metadata.logits import LogitsState
from ..metadata.missed import CAPACITY, MissedRows
from ..metadata.mode import SpeculativeDecodingMode
from ..metadata.sampling import RequestSampling
from ..metadata.spec import CapturedHiddenStates
from ..models.decoder import Decoder
from ..models.gated_delta import allocate_memory
from ..state.kv_cache import KVCacheManager
from ..state.recurrent import RecurrentStates
from ..state.slots import SlotState
from ..utils import rows_to_tensor
from ..workers.base import SpecWorkerBase
from ..workers.protocols import DraftModel, EndedText, LanguageModel
from .admission import held_back
from .cuda_graphs.context_inputs import deal_out
from .cuda_graphs.graphs import CudaGraphs
from .device_step import DeviceStep, PartialLaunch
from .guided_masks import GuidedMasks
from .inputs import EngineShape, build_inputs
from .request import ContextChunk, Request, ScheduledBatch, StepPlan


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The loaded parts that a runner is built from."""

    target: Decoder
    worker: SpecWorkerBase
    draft_model: DraftModel | LanguageModel | None
    draft_vocab_size: int  # of the drafter's logits; without a network that drafts, the target's
    d2t: Tensor | None  # as of `LoadedDrafter`
    kv_cache: KVCacheManager
    mode: SpeculativeDecodingMode
    device: torch.device
    layers_to_capture: tuple[int, ...] = ()  # target layers that a head reads, or that are saved
    chooses_by_default: bool = False  # lengths choose themselves, though K was left open


class StepRunner:
    """Admits requests to slots and launches steps of them."""

    def __init__(self, parts: EngineParts, config: ExecutorConfig):
        self.device, self.mode, self.kv_cache = parts.device, parts.mode, parts.kv_cache
        spec = parts.worker.config
        most = None if spec is None else spec.max_verified_drafts
        if most == "auto":
            most = None
        self._max_verified = most
        self.max_batch_size = config.max_batch_size
        self.chooses_by_default = parts.chooses_by_default
        self.max_draft_len = parts.worker.max_draft_len
        self._masked_drafts = config.guided_masked_drafts
        target, worker = parts.target, parts.worker
        self.step = DeviceStep(
            target=target,
            worker=worker,
            draft_model=parts.draft_model,
            kv_cache=parts.kv_cache,
            state=_allocate_slots(parts, config),
            shape=EngineShape(
                mode=parts.mode,
                max_draft_len=self.max_draft_len,
                max_seq_len=config.max_seq_len,
                num_layers=target.config.num_layers,
                num_extra_kv_tokens=worker.num_extra_kv_tokens,
                max_verified_drafts=None if worker.force_num_accepted_tokens > 0 else most,
                attention_dp_size=(
                    target.config.parallel.size if parts.kv_cache.has_foreign_requests else 1
                ),
            ),
        )
        worker.remember_drafts(
            config.max_batch_size,
            vocab_size=parts.draft_vocab_size,
            target_vocab_size=target.config.vocab_size,
            d2t=parts.d2t,
            device=parts.device,
            dtype=target.norm.weight.dtype,
        )
        if worker.slot_texts is not None:
            worker.slot_texts.wait(self.step.state.worker)
        self.graphs: CudaGraphs | None = None
        if parts.device.type == "cuda" and config.cuda_graph is not None:
            self.graphs = CudaGraphs(self.step, config, config.cuda_graph, parts.device)
            if config.cuda_graph.capture_at_start:
                self.graphs.capture_all(self.max_draft_len)

    @property
    def forced_acceptance(self) -> float | None:
        """Draft tokens accepted by force in every step, bonus not counted; None if it is off.

        Where fewer are verified, fewer are accepted.
        """
        forced = min(self.step.worker.force_num_accepted_tokens, self.max_draft_len)
        return forced if forced > 0 else None

    # -- slots ---------------------------------------------------------------------------------
    def admit(self, request: Request) -> None:
        """Writes what steps read of the request to its slot, its text when the next step runs."""
        step, params = self.step, request.sampling_params
        delta = 0 if request.embeds is None else request.embeds.rope_delta
        step.state.admit(request.slot, RequestSampling.of(params, request.seed), delta)
        if step.state.logits is None and params.shapes_logits:
            step.state.logits = LogitsState.allocate(
                self.max_batch_size, step.target.config.vocab_size, self.device
            )
        if step.state.logits is not None:
            step.state.logits.admit(
                request.slot, params, request.prompt_token_ids, request.output_token_ids,
                sorted(held_back(params, step.target.config)),
            )  # fmt: skip
        step.worker.admit(
            step.state.worker, request.slot, request.token_ids, len(request.prompt_token_ids)
        )
        step.worker.set_salt(step.state.worker, request.slot, request.cache_salt)

    def remember(self, texts: list[EndedText]) -> None:
        """Lets the drafter keep texts of requests that ended."""
        self.step.worker.remember_texts(self.step.state.worker, texts)

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        """Overwrites the drafts of some slots, each list filled up with -1 to K."""
        k = self.max_draft_len
        rows = [proposal + [-1] * (k - len(proposal)) for proposal in drafts.values()]
        if rows:
            self.step.state.set_drafts(list(drafts), rows)

    def num_drafts_to_verify(
        self, generations: Sequence[Request], exactly: int | None = None
    ) -> int:
        """Returns K' <= K, the drafts that the requests' last steps were asked for.

        On CPU, where reading a tensor waits for nothing, columns that hold no draft in any request
        are left out too. Under forced acceptance all requests verify as many, within
        `max_verified_drafts`.

        Args:
            exactly: verify this number; on CPU at most this number. Further drafts are dropped;
                missing ones are -1, which no rule accepts.
        """
        if self.max_draft_len == 0 or not generations:
            return self.max_draft_len
        is_forced = self.step.worker.force_num_accepted_tokens > 0
        if exactly is not None and self.device.type != "cpu" and not is_forced:
            return exactly
        asked = max([request.num_drafts for request in generations])
        if exactly is not None:
            asked = min(asked, exactly)
        if is_forced and self._max_verified is not None:
            asked = min(asked, self._max_verified // len(generations))
        if self.device.type != "cpu" or is_forced:
            return asked
        slots = torch.tensor([request.slot for request in generations])
        return min(asked, int((self.step.state.next_tokens[slots, 1:] >= 0).sum(1).max()))

    def count_proposed(self, batch: ScheduledBatch, num_drafts: int) -> Tensor | None:
        """Returns how many drafts the slots of generations hold, [G] int64; None if no request of
        the batch records it."""
        if not (batch.generations and batch.records_steps):
            return None
        slots = rows_to_tensor([r.slot for r in batch.generations], torch.int64, self.device)
        return (self.step.state.next_tokens[slots, 1 : num_drafts + 1] >= 0).sum(1)

    def drafts_of(self, batch: ScheduledBatch) -> Tensor:
        """Returns the drafts in the slots of a batch, [B, K] int32."""
        slots = rows_to_tensor([r.slot for r in batch.requests], torch.int64, self.device)
        return self.step.state.next_tokens[slots, 1:]

    @cached_property
    def masks(self) -> GuidedMasks:
        """Allocates the masks of grammars, once a request has one."""
        masks = GuidedMasks.allocate(
            self.max_batch_size,
            self.max_draft_len,
            self.step.target.config.vocab_size,
            self.device,
        )
        if self._masked_drafts is not None:
            masks.num_masked_drafts = self._masked_drafts
        return masks

    # -- steps ---------------------------------------------------------------------------------
    def split_for_graphs(self, batch: ScheduledBatch) -> list[ScheduledBatch]:
        """Splits a batch into generations and passes over prompts, if all have graphs, else returns
        it alone."""
        if not batch:
            return []
        graphs, passes = self._graphs_for(batch.contexts), []
        if graphs is not None and batch.contexts:
            passes = deal_out(batch.contexts, graphs.shape_for, graphs.most_worth)
        if graphs is None or not passes:
            return [batch]
        parts = [ScheduledBatch(chunks, []) for chunks in passes]
        if not batch.generations:
            return parts
        if graphs.bucket(len(batch.generations)) is None:
            return [batch]
        return [replace(batch, contexts=[]), *parts]

    def join_for_graphs(self, plans: list[StepPlan]) -> list[StepPlan]:
        """Joins generations and the first pass over prompts to one, where that pays.

        Args:
            plans: of one step, as `split_for_graphs` cut it.
        """
        if self.graphs is None or len(plans) < 2 or not plans[0].batch.generations:
            return plans
        generations, prompts, *rest = plans
        batch = ScheduledBatch(prompts.batch.contexts, generations.batch.generations)
        is_plain = not batch.is_guided and batch.num_logprobs is None
        is_packed = self.step.shape.max_verified_drafts is not None
        is_packed |= generations.mean_verified is not None
        if not is_plain or is_packed or self.mode.is_save_hidden_states():
            return plans
        both = generations._replace(batch=batch)
        return [both, *rest] if self.graphs.pays_to_join(both) else plans

    def run(self, plan: StepPlan) -> PartialLaunch:
        """Launches one step, by a graph if one holds it, else eagerly."""
        texts = self.step.worker.slot_texts
        if texts is not None:
            texts.write(self.step.state.worker)
        if plan.batch.is_guided:
            plan = self._with_masks(plan)
        launch = self._replay(plan)
        if launch is not None:
            return launch
        plan.finish_before()
        worker = self.step.worker
        inputs = build_inputs(
            plan.batch, self.kv_cache, plan.num_drafts, self.device, worker.num_rewritten_tokens
        )
        if plan.reads_missed:
            first = len(plan.batch.contexts)
            tables = [table[first:] for table in inputs.block_tables]
            self.step.read_missed(inputs.slot_ids[first:], tables)
        if plan.mean_verified is not None:
            inputs = replace(inputs, mean_verified=plan.mean_verified)
        if plan.batch.is_guided:
            inputs = replace(inputs, guided=self.masks.step(plan.host_part, plan.draft_len))
        outputs = self.step.run(inputs, plan.draft_len)
        for _ in self.step.draft_passes(outputs):
            pass
        return PartialLaunch(outputs)

    def _with_masks(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of a step with grammars, whose masks come while it runs."""
        masks, finish_before = self.masks, plan.finish_before
        if self.graphs is not None:
            self.graphs.masks = masks

        def begin() -> None:
            finish_before()
            masks.verify.begin()

        return plan._replace(finish_before=begin)

    def _replay(self, plan: StepPlan) -> PartialLaunch | None:
        """Replays the step. Returns None if no graph holds it."""
        chunks = plan.batch.contexts
        graphs = self._graphs_for(chunks)
        if graphs is None:
            return None
        if not chunks:
            return graphs.run(plan)
        if plan.batch.generations:
            return graphs.run_both(plan)
        shape = graphs.shape_for(chunks)
        if shape is None:
            return None
        plan.finish_before()
        return graphs.run_contexts(shape, plan)

    def _graphs_for(self, chunks: list[ContextChunk]) -> CudaGraphs | None:
        """Returns the graphs, unless none may serve a step with these parts of prompts.

        A guided decoder is host code, which no replay would run.
        """
        is_plain = all(c.request.embeds is None and not c.num_prompt_logprobs for c in chunks)
        return self.graphs if is_plain and self.step.worker.guided_decoder is None else None

    def with_missed(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with what the head does beside it: nothing, or what it missed before.

        A step that drafts nothing leaves the head its row for later, while there is room. Any other
        step is preceded by a pass over the rows that its requests have left.
        """
        if self.step.state.missed is None:
            return plan
        batch = plan.batch
        most = max((request.num_missed for request in batch.generations), default=0)
        leaves = not (batch.contexts or plan.num_drafts or plan.draft_len)
        reads = most > 0 and (not leaves or most >= CAPACITY)
        return plan._replace(reads_missed=reads, leaves_head=leaves)

    def waiting(self) -> AbstractContextManager[None]:
        """Returns the context in which the host waits for results of `run`."""
        return nullcontext()

    def drop_graphs(self) -> None:
        """Frees captured graphs, for good."""
        self.graphs = None

    # -- the end -------------------------------------------------------------------------------
    def start_over(self) -> None:
        """Makes the next step send everything again, after an exception."""
        logits = self.step.state.logits
        if logits is not None:
            logits.shaped_slots.update(range(self.max_batch_size))
        if self.graphs is not None:
            self.graphs.send_again()
        if "masks" in vars(self):
            self.masks.draft.forget()

    def release_memory(self) -> None:
        """Gives models, cache, slots and graphs back at once, for good."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.drop_memory()

    def drop_memory(self) -> None:
        """Does so without waiting for what is in flight."""
        self.step.release_memory()
        vars(self).pop("graphs", None)
        vars(self).pop("masks", None)


def _allocate_slots(parts: EngineParts, config: ExecutorConfig) -> SlotState:
    target, worker = parts.target, parts.worker
    size, dtype = target.config.hidden_size, target.norm.weight.dtype
    state = SlotState.allocate(
        config.max_batch_size,
        worker.max_draft_len,
        parts.device,
        has_rope_deltas=target.rope_tables.has_axes,
    )
    state.worker = worker.allocate_state(
        config.max_batch_size, config.max_seq_len, parts.device, hidden_size=size, dtype=dtype
    )
    if worker.config is not None and worker.config.max_verified_drafts is not None:
        shape = config.max_batch_size + 1, worker.max_draft_len
        state.chances = torch.ones(shape, dtype=torch.float32, device=parts.device)
    if _may_read_late(parts):
        width = max(1, len(parts.layers_to_capture)) * size
        state.missed = MissedRows.allocate(config.max_batch_size + 1, width, dtype, parts.device)
    if target.config.linear_layers:
        rows = config.max_batch_size + len(parts.kv_cache.reuse.state_rows or ())
        layers = allocate_memory(target.config, rows, worker.max_draft_len, target.norm.weight)
        state.recurrent = parts.kv_cache.states = RecurrentStates.of(layers)
    if parts.layers_to_capture:
        shape = config.max_num_tokens, len(parts.layers_to_capture) * size
        buffer = torch.zeros(shape, dtype=dtype, device=parts.device)
        state.captured = CapturedHiddenStates(parts.layers_to_capture, buffer)
    return state


def _may_read_late(parts: EngineParts) -> bool:
    """Whether steps draft nothing at times, with a head that may read their rows later."""
    config = parts.worker.config
    if config is None:
        return False
    settings = config.max_concurrency, config.draft_len_schedule
    if settings == (None, None) and config.max_verified_drafts != "auto":
        return False
    is_alone = getattr(parts.draft_model, "writes_kv_alone", False)
    return parts.worker.max_draft_len > 0 and parts.worker.can_read_late and is_alone
