"""`PyExecutor`: schedule -> launch -> read, one step late where the mode allows it.

    step():  batch   = scheduler.schedule()             host: upper bounds only
             pending = forward_step(batch)              device: one function
             read the *previous* step's tokens          host: stop rules, trims, frees

Under overlap the host launches step n+1 before it reads step n; a request that turns out to have
stopped in n has its n+1 discarded. Modes whose drafter runs on the host cannot overlap.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ..api.embeds_prompt import EmbedsPrompt
from ..api.outputs import EngineStats, Logprob, acceptance_stats
from ..api.sampling_params import SamplingParams
from ..config import ExecutorConfig, UserProvidedDecodingConfig
from ..errors import ConfigError, DrafterError, RequestError
from ..metadata.logits import LogitsState
from ..metadata.mode import SpeculativeDecodingMode
from ..metadata.sampling import RequestSampling
from ..metadata.spec import CapturedHiddenStates
from ..models.decoder import Decoder
from ..ops.tokens.logprobs import TokenLogprobs
from ..state.kv_cache import KVCacheManager
from ..state.slots import SlotState
from ..workers.base import SpecWorkerBase
from ..workers.protocols import DraftModel, LanguageModel
from .admission import check_params, check_prompt, end_ids
from .context_inputs import ContextInputs, most_worth_capturing
from .dead_drafter import DeadDrafterWatch
from .draft_passes import ask_drafter, draft_in_passes
from .embeds import kept_embeds
from .forward_step import StepOutputs, forward_step
from .graphs import CudaGraphs
from .inputs import EngineShape, StepInputs, assemble, build_inputs
from .request import ContextChunk, Request, RequestState, ScheduledBatch, StepRecord
from .saving import NOT_WHOLE, HiddenStatesSaver
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

StopCheck = Callable[[Request], bool]
"""Asked after every appended token; True ends the request with finish_reason "stop"."""


@dataclass
class _Pending:
    """A launched step whose results the host has not read."""

    batch: ScheduledBatch
    yields_token: list[bool]  # per request: False for a chunk inside the prompt
    num_rows: int  # K'+1
    asked: list[int]  # per generation: drafts its step before this one was asked for
    proposed: Tensor | None  # [generations] drafts that it then had, if recorded
    new_tokens: Tensor
    lens: Tensor
    bad: Tensor
    hidden_states: Tensor | None  # [T, (n+1) * D], to be saved
    logprobs: TokenLogprobs | None
    ready: torch.cuda.Event | None


class PyExecutor:
    """Continuous batching over one target, one worker and one paged cache.

    Built by `build.build_executor`; usable without `LLM`:

        request = executor.enqueue(token_ids, SamplingParams(max_tokens=16))
        executor.run_until_done()
        request.output_token_ids
    """

    def __init__(
        self,
        target: Decoder,
        worker: SpecWorkerBase,
        draft_model: DraftModel | LanguageModel | None,
        kv_cache: KVCacheManager,
        config: ExecutorConfig,
        mode: SpeculativeDecodingMode,
        device: torch.device,
        layers_to_capture: tuple[int, ...] = (),
        saver: HiddenStatesSaver | None = None,
    ):
        self.target, self.worker, self.draft_model = target, worker, draft_model
        self.kv_cache, self.config, self.mode, self.device = kv_cache, config, mode, device
        self.overlap = config.overlap and mode.support_overlap_scheduler()
        if config.overlap and not self.overlap:
            logger.warning(
                "Mode %s drafts on the host and needs the accepted tokens: steps do not overlap.",
                mode.name,
            )
        self.max_draft_len = worker.max_draft_len
        self._shape = EngineShape(
            mode, self.max_draft_len, config.max_seq_len, target.config.num_layers,
            worker.num_extra_kv_tokens,
        )  # fmt: skip
        self.scheduler = Scheduler(
            config, kv_cache, self.max_draft_len, worker.num_extra_kv_tokens,
            worker.num_rewritten_tokens,
        )  # fmt: skip
        self.state = SlotState.allocate(
            config.max_batch_size, self.max_draft_len, device, target.rope_tables.has_axes
        )
        size, dtype = target.config.hidden_size, target.norm.weight.dtype
        self.state.worker = worker.allocate_state(
            config.max_batch_size, config.max_seq_len, device, hidden_size=size, dtype=dtype
        )
        vocab = target.config.vocab_size
        drafter = getattr(draft_model, "config", target.config)
        sizes = (getattr(drafter, name, None) for name in ("draft_vocab_size", "vocab_size"))
        own = min(next(filter(None, sizes), vocab), vocab)
        d2t = getattr(draft_model, "d2t", None)
        worker.remember_drafts(config.max_batch_size, own, vocab, d2t, device, dtype)
        if layers_to_capture:
            shape = config.max_num_tokens, len(layers_to_capture) * size
            buffer = torch.zeros(shape, dtype=dtype, device=device)
            self.state.captured = CapturedHiddenStates(layers_to_capture, buffer)
        self.saver = saver
        self.graphs: CudaGraphs | None = None
        if device.type == "cuda" and config.cuda_graph is not None:
            context_sizes = config.cuda_graph.context_sizes(
                config.max_num_tokens, most_worth_capturing(target)
            )
            self.graphs = CudaGraphs(
                config.cuda_graph, context_sizes, config.max_batch_size, config.max_seq_len,
                kv_cache, self.state, device, self._step, self._draft_passes,
            )  # fmt: skip
            if config.cuda_graph.capture_at_start:
                self.graphs.capture_all(self.max_draft_len)
        self._runtime_draft_len = self.max_draft_len
        self.stop_check: StopCheck | None = None
        self.record_steps = False
        """Requests queued from now on keep a `StepRecord` of every generation step."""
        self.dead_drafter_watch = DeadDrafterWatch.for_mode(mode)
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._pending: deque[_Pending] = deque()
        self._finished: list[Request] = []
        self._cancel_later: deque[tuple[int, bool]] = deque()  # and whether a step returns it
        self._is_half_done = False  # an exception left a step half done
        self._is_shut_down = False
        self.reset_stats()

    # -- requests ------------------------------------------------------------------------------
    def enqueue(
        self, prompt: Sequence[int] | EmbedsPrompt, sampling_params: SamplingParams | None = None
    ) -> Request:
        """Queues a request; its prompt is token ids, or such with embeddings.

        Raises:
            RequestError: the prompt is empty, too long, or holds an id outside the vocabulary;
                requests already queued are unaffected.
        """
        self._cancel_marked()
        params = sampling_params or SamplingParams()
        token_ids = self.check_prompt(prompt, params.max_tokens)
        self.check_params(params)
        if params.stop_strings and self.stop_check is None:
            raise RequestError(
                f"stop={params.stop!r} needs text: set executor.stop_check, use LLM, or give "
                "stop_token_ids."
            )
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        max_total_tokens = min(len(token_ids) + params.max_tokens, self.config.max_seq_len)
        embeds = kept_embeds(prompt, self.target) if isinstance(prompt, EmbedsPrompt) else None
        request = Request(
            request_id=next(self._ids),
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=seed,
            max_total_tokens=max_total_tokens,
            embeds=embeds,
            images=embeds.images if embeds and self.target.config.reads_images_whole else (),
            steps=[] if self.record_steps else None,
        )
        # In this order: one that only waits, for an interrupt came between, runs for nobody.
        self.scheduler.waiting.append(request)
        self._requests[request.request_id] = request
        return request

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError where the model or the executor cannot do what is asked."""
        self._require_memory()
        check_params(params, self.target.config)

    def check_prompt(self, given: Sequence[int] | EmbedsPrompt, max_tokens: int = 1) -> list[int]:
        """The prompt's tokens as ints. Raises RequestError as `enqueue` does."""
        self._require_memory()
        return check_prompt(
            given, max_tokens, self.target, self.config, self.mode, self.max_draft_len
        )

    def cancel(self, request_id: int, *, report: bool = True) -> bool:
        """Ends a request with finish_reason "cancelled"; False if it is unknown or finished.

        Args:
            report: the next `step` returns it with the requests that finished. Until then it is
                held, so whoever holds it already says False.
        """
        if self._is_half_done:
            self._start_over()
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        try:
            self._finish(request, "cancelled")
            self._flush_when_idle()
        except BaseException:
            self._is_half_done = True
            raise
        if not report:
            self._finished.remove(request)
        return True

    def cancel_at_next_step(self, request_id: int, *, report: bool = True) -> None:
        """`cancel`, from another thread or from inside a step. A new request does it as well."""
        self._cancel_later.append((request_id, report))

    def _cancel_marked(self) -> None:
        while self._cancel_later:
            request_id, report = self._cancel_later[0]
            self.cancel(request_id, report=report)
            self._cancel_later.popleft()

    def is_running(self, request_id: int) -> bool:
        """Queued or running, and not asked to be cancelled."""
        marked = {marked for marked, _ in list(self._cancel_later)}
        return request_id in self._requests and request_id not in marked

    def fail(self, request: Request, error: str) -> None:
        """Ends one request with finish_reason "error"; the others go on."""
        if request.is_finished:
            return
        logger.error("Request %d failed: %s", request.request_id, error)
        request.error = error
        self._finish(request, "error")

    def shutdown(self) -> None:
        """Cancels all requests and gives models, cache and graphs back at once. Anything new raises
        RequestError; a second call does nothing."""
        try:
            for request_id in [] if self._is_shut_down else list(self._requests):
                self.cancel(request_id)
        finally:  # also where samples cannot be written
            self._is_shut_down = True
            self._release_memory()

    def _release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pending.clear()
        self.kv_cache.release_memory()
        self.worker.draft_memory = None
        for name in ("target", "draft_model", "state", "graphs"):
            vars(self).pop(name, None)
        self.stop_check = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require_memory(self) -> None:
        if self._is_shut_down:
            raise RequestError("The engine is shut down, its models are gone: make a new one.")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._pending)

    def run_until_done(self) -> list[Request]:
        """Steps until nothing is left; returns the requests that finished meanwhile."""
        finished = []
        while self.has_work:
            finished += self.step()
        return finished + self._take_finished()

    # -- the loop ------------------------------------------------------------------------------
    def step(self) -> list[Request]:
        """Launches the next step and reads what is due. Returns the requests that finished.

        Whatever is raised meanwhile, an interrupt too, the executor can go on: no request is lost,
        and each says "error" or ends as it would have.
        """
        if self._is_shut_down:
            return self._take_finished()
        if self._is_half_done:
            self._start_over()
        try:
            return self._launch_and_read()
        except BaseException:
            self._is_half_done = True  # should a second interrupt come here
            self._start_over()
            raise

    def _launch_and_read(self) -> list[Request]:
        started = time.perf_counter()
        self._cancel_marked()
        batch = self._admit_new(self._schedule())
        parts, draft_len = self._parts(batch), self._draft_len_of(batch)
        for part in parts:
            self._pending.append(self._launch(part, draft_len))
        keep_in_flight = len(parts) if self.overlap else 0
        while len(self._pending) > keep_in_flight:
            self._read(self._pending.popleft())
        self._flush_when_idle()
        if not batch or batch.generations:
            self._decode_seconds += time.perf_counter() - started
        else:
            self._prefill_seconds += time.perf_counter() - started
        return self._take_finished()

    def _start_over(self) -> None:
        """After an exception in the middle of a step: what is in flight is forgotten, and every
        request computes its text again, prompt and output as far as they were read. Its tokens are
        the same, for noise is keyed by seed and position.

        Where hidden states are saved, those whose samples are begun end with an error.
        """
        self._is_half_done = True
        self._pending.clear()
        live = sorted(self._requests.values(), key=lambda request: request.request_id)
        if self.saver is not None:
            dropped = self.saver.start_over()
            for request in live:
                if request.request_id in dropped:
                    request.finish_reason = "error"
                    request.error = "interrupted: its sample is not whole and is dropped"
        self.scheduler.start_over([r for r in live if r.finish_reason is None])
        for request in live:
            if request.finish_reason is not None:
                request.end()
                if request not in self._finished:
                    self._finished.append(request)
                del self._requests[request.request_id]
        if self.state.logits is not None:
            self.state.logits.shaped_slots.update(range(self.config.max_batch_size))
        if self.graphs is not None:
            self.graphs.send_again()
        self._is_half_done = False

    def _schedule(self) -> ScheduledBatch:
        while True:
            batch, victims = self.scheduler.schedule()
            if not victims:
                return batch
            if self._pending:  # read first: it may free blocks, and the victim's tokens count
                while self._pending:
                    self._read(self._pending.popleft())
                continue
            for victim in victims:
                self._num_preemptions += 1
                self.scheduler.preempt(victim)

    def _parts(self, batch: ScheduledBatch) -> list[ScheduledBatch]:
        """The batch as it is; or, where prompts have a graph, generations and prompts apart."""
        if not batch:
            return []
        if batch.contexts and batch.generations and self._context_shape(batch.contexts):
            assert self.graphs is not None
            if self.graphs.bucket(len(batch.generations)) is not None:
                return [replace(batch, contexts=[]), replace(batch, generations=[])]
        return [batch]

    def _context_shape(self, chunks: list[ContextChunk]) -> ContextInputs | None:
        """The graphs' inputs for these parts of prompts, if graphs serve them."""
        if self.graphs is None or self.worker.guided_decoder is not None:
            return None
        if any(chunk.request.embeds is not None for chunk in chunks):
            return None
        return self.graphs.shape_for(chunks)

    def _admit_new(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch without the requests that could not be admitted, which fail alone."""
        for chunk in batch.contexts:
            if chunk.start == 0:
                try:
                    self._admit(chunk.request)
                except Exception as error:  # whatever its parameters or the drafter's state raise
                    logger.exception("Request %d could not be admitted.", chunk.request.request_id)
                    self.fail(chunk.request, f"its admission raised {_said(error)}")
        left = [chunk for chunk in batch.contexts if not chunk.request.is_finished]
        return batch if len(left) == len(batch.contexts) else replace(batch, contexts=left)

    def _launch(self, batch: ScheduledBatch, draft_len: int | None = None) -> _Pending:
        num_drafts = self._num_drafts_to_verify(batch)
        if draft_len is None:
            draft_len = self._draft_len_of(batch)
        asked = [min(request.num_drafts, num_drafts) for request in batch.generations]
        proposed = self._count_proposed(batch.generations, num_drafts)
        outputs = None
        # A guided decoder is host code, which a replay would not run again.
        can_replay = self.worker.guided_decoder is None
        if self.graphs is not None and can_replay and not batch.contexts:
            outputs = self.graphs.run(batch.generations, num_drafts, draft_len, batch.num_logprobs)
        elif self.graphs is not None and not batch.generations:
            shape = self._context_shape(batch.contexts)
            if shape is not None:
                outputs = self.graphs.run_contexts(
                    shape, batch.contexts, num_drafts, draft_len, batch.num_logprobs
                )
        if outputs is None:
            inputs = build_inputs(
                batch, self.kv_cache, num_drafts, self.device, self.worker.num_rewritten_tokens
            )
            outputs = self._step(inputs, draft_len)
            for _ in self._draft_passes(outputs):
                pass
        for request in batch.requests:
            request.num_drafts = draft_len
        for chunk in batch.contexts:
            request = chunk.request
            request.num_computed = request.past_upper = chunk.end
            if chunk.is_last:  # also of a preempted text, whose last token is known
                request.state = RequestState.GENERATION
        for request in batch.generations:
            request.past_upper += num_drafts + 1
        for request in batch.requests:
            request.num_in_flight += 1
        return self._copy_to_host(batch, outputs, num_drafts + 1, asked, proposed)

    def _count_proposed(self, generations: list[Request], num_drafts: int) -> Tensor | None:
        """Drafts that the slots hold, counted on the device; None where no request records it."""
        if all(request.steps is None for request in generations):
            return None
        slots = torch.tensor([request.slot for request in generations], device=self.device)
        return (self.state.next_tokens[slots, 1 : num_drafts + 1] >= 0).sum(1)

    @torch.inference_mode()
    def _step(self, inputs: StepInputs, draft_len: int) -> StepOutputs:
        """The device's share of a step; also what a graph captures."""
        tensors = assemble(inputs, self.state, self.kv_cache, self._shape, draft_len)
        return forward_step(
            self.target, self.worker, self.draft_model, tensors, self.state, self.mode,
            inputs.num_logprobs,
        )  # fmt: skip

    @torch.inference_mode()
    def _draft_passes(self, outputs: StepOutputs) -> Iterator[None]:
        if outputs.draft_inputs is not None:
            yield from draft_in_passes(self.worker, outputs.draft_inputs, self.state)

    def _admit(self, request: Request) -> None:
        params = request.sampling_params
        delta = 0 if request.embeds is None else request.embeds.rope_delta
        self.state.admit(request.slot, RequestSampling.of(params, request.seed), delta)
        if self.state.logits is None and params.shapes_logits:
            self.state.logits = LogitsState.allocate(
                self.config.max_batch_size, self.target.config.vocab_size, self.device
            )
        if self.state.logits is not None:
            self.state.logits.admit(
                request.slot, params, request.prompt_token_ids, request.output_token_ids,
                sorted(end_ids(params, self.target.config)),
            )  # fmt: skip
        self.worker.admit(
            self.state.worker, request.slot, request.token_ids, len(request.prompt_token_ids)
        )

    @property
    def runtime_draft_len(self) -> int:
        """Drafts to propose per step from now on, 0 … K; K at first. 0 decodes plainly, with the
        drafter's KV kept whole, so that drafting can resume at any step."""
        return self._runtime_draft_len

    @runtime_draft_len.setter
    def runtime_draft_len(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"runtime_draft_len={value!r}: it must be an int.")
        if not 0 <= value <= self.max_draft_len:
            raise ConfigError(
                f"runtime_draft_len={value}: it must be in 0 … max_draft_len={self.max_draft_len}."
            )
        self._runtime_draft_len = value

    def _draft_len_of(self, batch: ScheduledBatch) -> int:
        """Drafts this step proposes for the next one."""
        config = self.worker.config
        limit = config.max_concurrency if config is not None else None
        crowded = limit is not None and len(batch.requests) > limit
        return 0 if crowded else self._runtime_draft_len

    def _num_drafts_to_verify(self, batch: ScheduledBatch) -> int:
        """K' <= K, the drafts that the requests' last steps were asked for. On CPU, where reading
        a tensor waits for nothing, rows that hold no draft in any request are left out too."""
        if self.max_draft_len == 0 or not batch.generations:
            return self.max_draft_len
        asked = max(request.num_drafts for request in batch.generations)
        if self.device.type != "cpu" or self.worker.force_num_accepted_tokens > 0:
            return asked
        slots = torch.tensor([request.slot for request in batch.generations])
        return min(asked, int((self.state.next_tokens[slots, 1:] >= 0).sum(1).max()))

    def _copy_to_host(
        self, batch: ScheduledBatch, outputs: StepOutputs, rows: int, asked: list[int],
        proposed: Tensor | None,
    ) -> _Pending:  # fmt: skip
        tensors = (outputs.new_tokens, outputs.new_tokens_lens, outputs.bad_requests)
        ready, saved, logprobs = None, outputs.hidden_states, outputs.logprobs
        if self.device.type == "cuda":
            saved = None if saved is None else saved.to("cpu", non_blocking=True)
            logprobs = None if logprobs is None else logprobs.to_host()
            proposed = None if proposed is None else proposed.to("cpu", non_blocking=True)
            tensors = tuple(t.to("cpu", non_blocking=True) for t in tensors)  # type: ignore[assignment]
            ready = torch.cuda.Event()
            ready.record()
        yields = [chunk.next_prompt_token < 0 for chunk in batch.contexts]
        yields += [True] * len(batch.generations)
        return _Pending(batch, yields, rows, asked, proposed, *tensors, saved, logprobs, ready)

    # -- reading -------------------------------------------------------------------------------
    def _read(self, pending: _Pending) -> None:
        if pending.ready is not None:
            pending.ready.synchronize()
        tokens, lens, bad = pending.new_tokens.tolist(), pending.lens.tolist(), pending.bad.tolist()
        requests, num_contexts = pending.batch.requests, len(pending.batch.contexts)
        for request, is_bad in zip(requests, bad, strict=True):
            request.num_in_flight -= 1
            request.is_poisoned |= is_bad
            if request.is_finished and request.num_in_flight == 0:
                self.scheduler.release_blocks(request)
        for i, request in enumerate(requests):
            if not request.is_finished:  # else it stopped while this step ran
                self._read_request(pending, i, i >= num_contexts, tokens[i][: lens[i]])
        if self.saver is not None:
            self.saver.write_full_shard()
        if self.mode.drafts_on_host():
            ready = [r for r in requests if r.is_generation]
            self._draft_on_host([r for r in ready if not r.is_finished])

    def _read_request(
        self, pending: _Pending, row: int, is_generation: bool, tokens: list[int]
    ) -> None:
        """One request's share of a step. A stop check that raises fails its request alone."""
        request = pending.batch.requests[row]
        if request.is_poisoned:
            self.fail(
                request,
                "the model's logits are NaN, or nothing is above -inf, for this request. Its KV "
                "blocks are cleared; other requests go on. Check the weights and dtype, or what "
                "bans tokens (bad_token_ids, logit_bias, min_tokens, a guided decoder).",
            )
            return
        before, reason = request.num_tokens, None
        if not pending.yields_token[row]:
            self._save_rows(pending, row, before)
            return
        if is_generation:
            request.past_upper -= pending.num_rows - len(tokens)
        try:
            reason = self._append(request, tokens)
        except Exception as error:  # the stop check is the caller's code
            logger.exception("The stop check of request %d raised.", request.request_id)
            self.fail(request, f"the stop check raised {_said(error)}")
        appended = request.num_tokens - before
        self._keep_logprobs(pending, row, request.output_token_ids[-appended:] if appended else [])
        self._save_rows(pending, row, before)
        if reason is not None:
            self._finish(request, reason)
        request.num_read = len(request.output_token_ids)  # what came before can come again
        if is_generation:
            self._record_step(pending, row, before - 1, len(tokens))
        self._generated_tokens += appended
        self._decoded_tokens += appended if is_generation else 0
        if not request.is_finished:
            held = request.past_upper + self.worker.num_extra_kv_tokens
            self.kv_cache.trim(request.request_id, held)

    def _record_step(
        self, pending: _Pending, row: int, kv_len: int, num_accepted_tokens: int
    ) -> None:
        request, accepted = pending.batch.requests[row], num_accepted_tokens - 1
        generation = row - len(pending.batch.contexts)
        request.record_step(num_accepted_tokens)
        self._accepted_lens[accepted] += 1
        if request.steps is not None and pending.proposed is not None:
            # Forced acceptance takes drafts that were never made.
            proposed = max(int(pending.proposed[generation]), accepted)
            request.steps.append(StepRecord(kv_len, proposed, accepted))
        is_forced = self.forced_acceptance is not None
        if self.dead_drafter_watch is not None and not is_forced and pending.asked[generation]:
            self.dead_drafter_watch.see(accepted > 0, request.sampling_params.temperature)

    def _append(self, request: Request, tokens: list[int]) -> str | None:
        """Adds tokens one by one, so that a stop inside an accepted run cuts it where it would
        have ended without speculation. Returns why the request ends, if it does."""
        ends = end_ids(request.sampling_params, self.target.config)
        for token in tokens:
            request.output_token_ids.append(token)
            if token in ends or (self.stop_check is not None and self.stop_check(request)):
                return "stop"
            if request.num_tokens >= request.max_total_tokens:
                return "length"
            if request.is_finished:  # cancelled by its stop check
                break
        return None

    def _keep_logprobs(self, pending: _Pending, row: int, tokens: list[int]) -> None:
        """What is known of the tokens that one request of the step got."""
        request, contexts = pending.batch.requests[row], len(pending.batch.contexts)
        count, known = request.sampling_params.logprobs, pending.logprobs
        if count is None or known is None:
            return
        first = row if row < contexts else contexts + (row - contexts) * pending.num_rows
        if request.logprobs is None:
            request.logprobs = []
        for i, token in enumerate(tokens, start=first):
            entry = {token: Logprob(float(known.own[i]), int(known.ranks[i]))}
            pairs = zip(known.top_ids[i].tolist(), known.top[i].tolist(), strict=True)
            for rank, (other, logprob) in enumerate(islice(pairs, count), start=1):
                entry.setdefault(other, Logprob(logprob, rank))
            request.logprobs.append(entry)

    def _draft_on_host(self, requests: list[Request]) -> None:
        assert isinstance(self.worker.config, UserProvidedDecodingConfig)
        slots: list[int] = []
        drafts: list[list[int]] = []
        for request in requests:
            if request.is_finished or request.num_drafts == 0:  # or cancelled by a drafter
                continue
            try:
                proposal = ask_drafter(
                    self.worker.config.drafter, request, request.num_drafts,
                    self.target.config.vocab_size,
                )  # fmt: skip
                proposal += [-1] * (self.max_draft_len - len(proposal))
            except DrafterError as error:
                self.fail(request, str(error))
                continue
            if not request.is_finished:
                slots.append(request.slot)
                drafts.append(proposal)
        if slots:
            self.state.set_drafts(slots, drafts)

    def _save_rows(self, pending: _Pending, row: int, num_tokens_before: int) -> None:
        """Hands one request's rows to the saver, now that the token after them is known."""
        request = pending.batch.requests[row]
        if self.saver is None or pending.hidden_states is None:
            return
        if request.finish_reason in NOT_WHOLE:  # by its stop check: its sample is dropped
            return
        chunks = pending.batch.contexts
        first = sum(chunk.end - chunk.start for chunk in chunks[:row])
        if row < len(chunks):
            start, count = chunks[row].start, chunks[row].end - chunks[row].start
        else:
            first, start, count = first + row - len(chunks), num_tokens_before - 1, 1
        states = pending.hidden_states[first : first + count]
        self.saver.add(request, start, states)

    def _flush_when_idle(self) -> None:
        """Samples are on disk when the last request is done, also if nobody steps again. What is
        in flight then belongs to requests that have ended."""
        if self.saver is not None and not (self.scheduler.waiting or self.scheduler.running):
            self.saver.flush()

    def _finish(self, request: Request, reason: str) -> None:
        if request.is_finished:
            return
        request.finish_reason = reason
        if self.saver is not None:
            self.saver.finish(request)
        self.scheduler.finish(request)
        request.embeds = None
        self._finished.append(request)
        self._requests.pop(request.request_id, None)

    def _take_finished(self) -> list[Request]:
        finished, self._finished = self._finished, []
        return finished

    # -- statistics ----------------------------------------------------------------------------
    def reset_stats(self) -> None:
        self._generated_tokens, self._decoded_tokens, self._num_preemptions = 0, 0, 0
        self._decode_seconds, self._prefill_seconds = 0.0, 0.0
        self._accepted_lens: Counter[int] = Counter()

    @property
    def forced_acceptance(self) -> float | None:
        """Draft tokens accepted by force in every step (bonus not counted), fewer where fewer are
        verified; None if none are."""
        forced = min(self.worker.force_num_accepted_tokens, self.max_draft_len)
        return forced if forced > 0 else None

    def stats(self) -> EngineStats:
        acceptance = acceptance_stats(self._accepted_lens, self.max_draft_len)
        seconds = self._decode_seconds
        return EngineStats(
            generated_tokens=self._generated_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=seconds,
            tokens_per_second=self._decoded_tokens / seconds if seconds > 0 else 0.0,
            acceptance_length=acceptance.acceptance_length,
            acceptance_per_position=acceptance.acceptance_per_position,
            num_steps=acceptance.num_steps,
            num_preemptions=self._num_preemptions,
            forced_acceptance=self.forced_acceptance,
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
