"""`PyExecutor`: schedule -> run -> read, one step late where the mode allows it.

    step():  batch    = scheduler.schedule(…)           host: upper bounds only; trims
             launched = runner.run(plan)                device: one function, or its graph
             results  = reader.read(the *previous* one) host: stop rules, frees

Under overlap the host launches step n+1 before it reads step n. If a request stopped in step n, its
part of step n+1 is discarded. Modes whose drafter runs on the host cannot overlap.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..api.embeds_prompt import EmbedsPrompt
from ..api.outputs import EngineStats
from ..api.sampling_params import SamplingParams
from ..config import ExecutorConfig, UserProvidedDecodingConfig
from ..errors import RequestError
from .admission import Admission
from .book import RequestBook
from .draft_lens.choose_draft_len import draft_len_of
from .guide import Guide
from .guided_batch import GuidedBatch
from .host_drafts import draft_on_host
from .observer import StepObserver, Watch
from .request import Request, RequestState, ScheduledBatch, StepPlan, StopCheck
from .results import Applied, LaunchedStep, RequestResult, StepReader
from .runner import StepRunner
from .saving import HiddenStatesSaver
from .scheduler import Scheduler
from .stats import Statistics

logger = logging.getLogger(__name__)


class PyExecutor:
    """Continuous batching over one runner and its paged cache.

    Built by `build.build_executor`; usable without `LLM`:

        request = executor.enqueue(token_ids, SamplingParams(max_tokens=16))
        executor.run_until_done()
        request.output_token_ids

    One thread at a time may call it. `AsyncLLM` has a thread that calls `step`.
    """

    target = property(attrgetter("runner.step.target"))
    worker = property(attrgetter("runner.step.worker"))
    draft_model = property(attrgetter("runner.step.draft_model"))
    state = property(attrgetter("runner.step.state"))
    graphs = property(attrgetter("runner.graphs"))
    forced_acceptance = property(attrgetter("runner.forced_acceptance"))
    dead_drafter_watch = property(attrgetter("statistics.dead_drafter_watch"))

    def __init__(
        self, runner: StepRunner, config: ExecutorConfig, saver: HiddenStatesSaver | None = None
    ):
        self.runner, self.config, self.saver = runner, config, saver
        self.kv_cache, self.mode, self.device = runner.kv_cache, runner.mode, runner.device
        self.max_draft_len = runner.max_draft_len
        self.overlap = config.overlap and self.mode.support_overlap_scheduler()
        if config.overlap and not self.overlap:
            logger.warning(
                "Mode %s drafts on the host and needs the accepted tokens: steps do not overlap.",
                self.mode.name,
            )
        target, worker = runner.step.target, runner.step.worker
        self.scheduler = Scheduler(config, self.kv_cache, self.max_draft_len, worker)
        self._admission = Admission(
            target=target, config=config, mode=self.mode, max_draft_len=self.max_draft_len
        )
        self.book = RequestBook(self.scheduler, saver)
        self.reader = StepReader(self.device)
        self.guide = Guide(target.config, self.forced_acceptance is not None)
        head = getattr(runner.step.draft_model, "config", None)
        trained = getattr(head, "trained_acceptance", None)
        self.statistics = Statistics(self.mode, self.max_draft_len, trained)
        self._looked_up_before = 0
        self._draft_len = draft_len_of(runner)
        self.stop_check: StopCheck | None = None  # asked of every request
        self.stop_string_check: StopCheck | None = None  # asked of those with stop strings
        self.record_steps = False
        """Requests queued from now on keep a `StepRecord` of every generation step."""
        self.observer = None
        self._pending: deque[LaunchedStep] = deque()
        self._cancel_later: deque[tuple[int, bool]] = deque()  # (request, whether to return it)
        self._drafts_on_host = self.mode.drafts_on_host()
        self._is_half_done = False  # an exception left a step half done
        self._is_in_step = False
        self._is_shut_down = False

    # -- requests ------------------------------------------------------------------------------
    def enqueue(
        self,
        prompt: Sequence[int] | EmbedsPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Request:
        """Queues a request. Its prompt is token ids, or an EmbedsPrompt.

        Args:
            cache_salt: only requests of the same salt share blocks of the prefix cache.

        Raises:
            RequestError: the prompt is empty, too long, or holds an id outside the vocabulary;
                requests already queued are unaffected.
        """
        request = self.make_request(prompt, sampling_params, cache_salt=cache_salt)
        self.add(request)
        return request

    def make_request(
        self,
        prompt: Sequence[int] | EmbedsPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Request:
        """Checks a request and makes it, for `add`. A thread that does not step may call it."""
        params, admission = sampling_params or SamplingParams(), self.admission
        if params.stop_strings and not self._stop_checks:
            raise RequestError(
                f"stop={params.stop!r} needs text: set executor.stop_string_check, use LLM, or "
                "give stop_token_ids."
            )
        request = admission.make_request(prompt, params, cache_salt)
        request.steps = [] if self.record_steps else None
        self.guide.check(params)
        return request

    def add(self, request: Request) -> None:
        """Queues a request that `make_request` made."""
        self._cancel_marked()
        self._watch.queued(request)
        if request.sampling_params.guided_decoding is None:
            self.book.add(request)
        else:
            self.guide.start(request)
            self.book.hold(request)

    @property
    def admission(self) -> Admission:
        """Returns what can be served. Raises RequestError once the engine is shut down."""
        if self._is_shut_down:
            raise RequestError("The engine is shut down, its models are gone: make a new one.")
        return self._admission

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError where the model or the executor cannot do what is asked."""
        self.admission.check_params(params)
        self.guide.check(params)

    def check_prompt(self, prompt: Sequence[int] | EmbedsPrompt, max_tokens: int = 1) -> list[int]:
        """Returns the prompt's tokens as ints. Raises RequestError as `enqueue` does."""
        return self.admission.check_prompt(prompt, max_tokens)

    def cancel(self, request_id: int, *, report: bool = True) -> bool:
        """Ends a request with finish_reason "cancelled"; False if it is unknown or finished.

        Args:
            report: the next `step` returns it with the requests that finished. False is for a
                caller that holds the request already.
        """
        if self._is_half_done:
            self._start_over()
        request = self.book.live.get(request_id)
        if request is None or request.is_finished:
            return False
        try:
            self.book.finish(request, "cancelled")
            self.book.flush_when_idle()
        except BaseException:
            self._is_half_done = True
            raise
        if not report:
            self.book.finished.remove(request)
        self._watch.report_finished()
        return True

    def cancel_at_next_step(self, request_id: int, *, report: bool = True) -> None:
        """Cancels at the next step or new request. Other threads and stop checks may call it."""
        self._cancel_later.append((request_id, report))

    def _cancel_marked(self) -> None:
        while self._cancel_later:
            request_id, report = self._cancel_later[0]
            self.cancel(request_id, report=report)
            self._cancel_later.popleft()

    def is_running(self, request_id: int) -> bool:
        """Returns whether it is queued or running, and not about to be cancelled."""
        marked = {marked for marked, _ in list(self._cancel_later)}
        return request_id in self.book.live and request_id not in marked

    def fail(self, request: Request, error: str) -> None:
        """Ends one request with finish_reason "error"; the others go on."""
        self.book.fail(request, error)
        self._watch.report_finished()

    def report_lost(self, request: Request) -> None:
        """Counts a request that no step ends: the engine failed, or it was refused."""
        self.book.live.pop(request.request_id, None)  # the shutdown does not cancel it
        if self.book.on_finish is not None:
            self.book.on_finish(request)
        self._watch.drop_step()

    def shutdown(self) -> None:
        """Cancels all requests and frees models, cache and graphs at once.

        New requests raise RequestError. A second call does nothing more.

        Raises:
            OSError: finished samples of hidden states cannot be written. The next call tries again.
        """
        self._check_not_in_step()
        try:
            if not self._is_shut_down:
                for request_id in list(self.book.live):
                    self.cancel(request_id)
            if not self._is_half_done:
                self.book.flush_when_idle()  # what could not be written before
        finally:  # also where samples cannot be written
            self._is_shut_down = True
            vars(self).pop("_admission", None)  # it holds the target
            self.stop_check = self.stop_string_check = None
            self.guide.close()
            self.runner.release_memory()
            self._draft_len.close()
            self._pending.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _check_not_in_step(self) -> None:
        """Raises RequestError where a step's callback calls the engine again."""
        if self._is_in_step and not self._is_half_done:
            raise RequestError(
                "Drafters, stop checks and observers run within a step of their engine, which "
                "cannot step or shut down meanwhile. Let them use another LLM."
            )

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is not read yet."""
        waiting = self.book.held or self.scheduler.waiting
        return bool(waiting or self.scheduler.running or self._pending)

    def run_until_done(self) -> list[Request]:
        """Steps until no request is left. Returns the requests that finished."""
        finished = []
        while self.has_work:
            finished += self.step()
        return finished + self.book.take_finished()

    def reset_prefix_cache(self) -> None:
        """Forgets the blocks of earlier prompts, as after a change of the weights.

        Running requests go on with their blocks, which no later request finds.
        """
        if self._is_half_done:
            self._start_over()
        try:
            self.kv_cache.reset_prefixes()
        except BaseException:
            self._is_half_done = True
            raise

    # -- the loop ------------------------------------------------------------------------------
    def step(self) -> list[Request]:
        """Launches the next step and reads what is due. Returns the requests that finished.

        After any exception, an interrupt too, the executor can go on. No request is lost: each ends
        with "error" or as it would have ended.
        """
        self._check_not_in_step()
        if self._is_shut_down:
            return self.book.take_finished()
        if self._is_half_done:
            self._start_over()
        try:
            self._is_in_step = True
            return self._launch_and_read()
        except BaseException:
            self._is_half_done = True  # should a second interrupt come here
            self._start_over()
            raise

    def _launch_and_read(self) -> list[Request]:
        started = time.perf_counter()
        self._watch.begin_step(is_in_flight=bool(self._pending))
        self._cancel_marked()
        self._take_compiled()
        batch = self._schedule()
        if batch.contexts:  # whose slots the step before may write to
            self._finish_launches()
        batch = self.book.admit_new(batch, self.runner)
        self.statistics.add_prefixes(batch)
        self._watch.started(batch)
        has_work = bool(batch or self._pending)  # else it has waited for a grammar
        is_in_flight = bool(self._pending)
        launched = self._launch_all(batch)
        launched_at = time.perf_counter()
        read = self._read_until(num_in_flight=len(launched) if self.overlap else 0)
        self.book.flush_when_idle()
        if self.worker.remembers_texts and (texts := self.book.ended_texts()):
            self.runner.remember(texts)
        if has_work:
            self._draft_len.end_step(launched, read, started, is_in_flight=is_in_flight)
            # Under overlap what is waited for is the step before, not the one launched here.
            self.statistics.add_seconds(launched_at - started, launched or read)
            self.statistics.add_seconds(time.perf_counter() - launched_at, read or launched)
        self._watch.end_step()
        self._is_in_step = False
        return self.book.take_finished()

    def _start_over(self) -> None:
        """Makes every request start over after an exception.

        What is in flight is forgotten. Each request computes its prompt and the output that was
        read again. Its tokens are the same, for noise is keyed by seed and position.
        """
        for launched in self._pending:  # also with requests that have ended since
            for request in launched.batch.requests:
                request.num_in_flight = 0
        self._pending.clear()
        self.book.start_over()
        self.runner.start_over()
        self._watch.drop_step()
        self._is_half_done = self._is_in_step = False

    # -- schedule ------------------------------------------------------------------------------
    def _schedule(self) -> ScheduledBatch:
        scheduler = self.scheduler
        while True:
            batch, victims = scheduler.schedule(self._draft_len)
            if not victims:
                self._draft_len.limit = scheduler.most_drafts
                return batch
            if self._pending:  # read first: that may free blocks, and adds the victims' tokens
                self._read_until(num_in_flight=0)
                continue
            for victim in victims:
                self.statistics.num_preemptions += 1
                scheduler.preempt(victim)

    @property
    def runtime_draft_len(self) -> int:
        """Drafts to propose per step from now on, 0 … K; K at first.

        0 decodes plainly. The drafter's KV is written all the same, at once or before drafting
        resumes, which it can at any step.
        """
        return self._draft_len.runtime

    @runtime_draft_len.setter
    def runtime_draft_len(self, value: int) -> None:
        self._draft_len.runtime = value

    def draft_len_held_at(self, value: int) -> AbstractContextManager[None]:
        """Sets `runtime_draft_len` inside. Then lengths are as before, also if they choose
        themselves, which a `runtime_draft_len` of one's own may end."""
        return self._draft_len.held_at(value)

    @property
    def last_draft_len(self) -> int:
        """Drafts that the last step of generations proposed; K before the first."""
        return self._draft_len.last

    # -- run -----------------------------------------------------------------------------------
    def _launch_all(self, batch: ScheduledBatch) -> list[LaunchedStep]:
        """Launches a batch, in several steps where graphs ask for that."""
        apart = [self._plan(batch, part) for part in self.runner.split_for_graphs(batch)]
        plans, launched = self.runner.join_for_graphs(apart), []
        if batch.contexts and batch.generations:
            self.scheduler.note_pass(is_joined=len(plans) < len(apart))
        for plan in plans:
            if plan.batch.generations:
                self._draft_len.last = plan.draft_len
            self._pending.append(self._launch(plan))
            launched.append(self._pending[-1])
        return launched

    def _plan(self, batch: ScheduledBatch, part: ScheduledBatch) -> StepPlan:
        """Returns the plan of a part of a step's batch, or of all of it."""
        draft_len = self._draft_len.of(batch, part)
        exactly = draft_len if self._draft_len.is_exact else None
        num_drafts = self.runner.num_drafts_to_verify(part.generations, exactly)
        return StepPlan(part, num_drafts, draft_len, share=self._draft_len.share)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches one step, and starts to copy its results."""
        batch = plan.batch
        guided = self._guided(batch, plan.num_drafts) if batch.is_guided else None
        plan = plan._replace(
            host_part=None if guided is None else guided.host_part,
            finish_before=self._finish_launches,
        )
        plan = self.runner.with_missed(plan)
        if batch.records_steps:
            self._finish_launches()  # the step before writes the drafts that are counted
        num_proposed = self.runner.count_proposed(batch, plan.num_drafts)
        launch = self.runner.run(plan)
        most_asked = plan.draft_len if self._draft_len.is_exact else self.max_draft_len
        drafts_of = None if guided is None else partial(self.runner.drafts_of, batch)
        launched = self.reader.copy(
            plan, launch, num_proposed, guided, drafts_of, most_asked=most_asked
        )
        if guided is None or batch.contexts or self.worker.remembers_texts:
            launched.finish_launch()
        self._watch.add_launched(launched)
        plan.count_as_launched()
        for chunk in batch.contexts:
            self.scheduler.prefixes.keep_state(chunk)
            self.scheduler.prefixes.publish(chunk.request)
        return launched

    def _finish_launches(self) -> None:
        """Launches what is left of the steps in flight, before anything else is launched.

        What is left waits for the drafts' masks, and so for the device. Meanwhile the host reads
        the step before and schedules the next one.
        """
        for launched in self._pending:
            launched.finish_launch()

    # -- grammars ------------------------------------------------------------------------------
    def set_tokenizer(self, tokenizer: Any) -> None:
        """Sets the tokenizer of transformers that grammars are compiled for, or None."""
        self.guide.set_tokenizer(tokenizer)

    def _take_compiled(self) -> None:
        """Schedules requests whose grammar is compiled, and ends those whose is wrong."""
        is_idle = not (self.scheduler.waiting or self.scheduler.running or self._pending)
        for request, error in self.guide.compiled(waits=is_idle):
            if error is not None:
                self.book.fail(request, error)
            else:
                self.book.release(request)

    def _guided(self, batch: ScheduledBatch, num_drafts: int) -> GuidedBatch:
        """Returns the host's part of a step, which is about to be launched."""
        members = {request.request_id for request in batch.requests}

        # A step in flight must not hold the executor, which holds it.
        this = weakref.ref(self)

        def read_before() -> None:
            executor = this()
            assert executor is not None
            for launched in executor._pending:
                if any(request.request_id in members for request in launched.batch.requests):
                    with executor.runner.waiting():
                        executor.reader.follow(launched)

        return GuidedBatch(
            batch=batch,
            num_drafts=num_drafts,
            masks=self.runner.masks,
            read_before=read_before,
            waiting=self.runner.waiting,
        )

    # -- read ----------------------------------------------------------------------------------
    def _read_until(self, num_in_flight: int) -> list[LaunchedStep]:
        """Reads steps, the oldest first, until that many are in flight. Returns them."""
        read = []
        while len(self._pending) > num_in_flight:
            read.append(self._pending[0])
            self._read(read[-1])
            self._pending.popleft()  # last: until then `_start_over` knows of it
        return read

    def _read(self, launched: LaunchedStep) -> None:
        with self.runner.waiting():
            results = self.reader.read(launched)
            self.reader.follow(launched)
        self._watch.add_read(launched)
        for result in results:
            request = result.request
            request.num_in_flight -= 1
            if result.is_bad:
                request.is_poisoned = True
            if request.state is RequestState.FINISHED and request.num_in_flight == 0:
                self.scheduler.release_blocks(request)
        applied: list[Applied] = []
        try:
            self._apply_all(results, launched, applied)
        finally:
            is_forced = self.forced_acceptance is not None
            outcomes = self.statistics.add_results(applied, is_forced=is_forced)
            self._draft_len.add_outcomes(outcomes, launched.batch, launched.share)
            self._watch.add_results(applied)
        if self.saver is not None:
            self.saver.write_full_shard()
        if self._drafts_on_host:
            self._draft_on_host([r for r in launched.batch.requests if r.is_generation])

    def _apply_all(
        self, results: list[RequestResult], launched: LaunchedStep, applied: list[Applied]
    ) -> None:
        """Applies a step's results to their requests. Adds those that bring tokens to `applied`."""
        guided, num_rows = launched.guided, launched.num_drafts + 1
        add_tokens, check = self.book.add_tokens, self.stop_check
        checks = () if check is None else (check,)
        for result in results:
            request, is_end = result.request, False
            if request.state is RequestState.FINISHED:  # it stopped while this step ran
                continue
            if request.is_poisoned:
                self.book.fail_poisoned(request)
                continue
            if guided is not None:
                if (error := guided.error.get(request.request_id)) is not None:
                    self.book.fail(request, error)
                    continue
                is_end = guided.is_complete.get(request.request_id, False)
                if (count := guided.num_taken.get(request.request_id)) is not None:
                    result = result.first(count)  # its grammar ends there
            if result.prompt_logprobs is not None:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.add(*result.prompt_logprobs)
            if result.yields_token:
                has_strings = request.sampling_params.stop_strings
                asked = self._stop_checks if has_strings else checks
                applied.append((result, add_tokens(result, num_rows, asked, is_end)))
            elif result.hidden is not None:
                self.book.save_rows(request, result.hidden)

    @property
    def _stop_checks(self) -> list[StopCheck]:
        """What is asked after each token of a request with stop strings."""
        return [check for check in (self.stop_check, self.stop_string_check) if check is not None]

    def _draft_on_host(self, requests: list[Request]) -> None:
        config = self.worker.config
        assert isinstance(config, UserProvidedDecodingConfig)
        vocab_size = self.target.config.vocab_size
        drafts = draft_on_host(config.drafter, requests, vocab_size, self.book)
        self.runner.set_drafts(drafts)
        for request in requests:
            if request.grammar is not None and request.slot in drafts:
                request.next_drafts = drafts[request.slot]

    # -- statistics ----------------------------------------------------------------------------
    @property
    def observer(self) -> StepObserver | None:
        """What sees every request and step, or None. Set it while no request runs."""
        return self._watch.observer

    @observer.setter
    def observer(self, observer: StepObserver | None) -> None:
        self._watch = Watch(observer, runs_at_launch=self.device.type == "cpu")
        self.book.on_finish = None if observer is None else self._watch.add_finished

    def stats(self) -> EngineStats:
        """Returns totals since the engine started or `reset_stats`."""
        stats = self.statistics.summary(self.forced_acceptance, self.kv_cache)
        looked_up = self._num_looked_up() - self._looked_up_before
        return replace(stats, num_looked_up_drafts=max(0, looked_up))

    def reset_stats(self) -> None:
        """Begins the totals of `stats` anew."""
        self._looked_up_before = self._num_looked_up()
        self.statistics.reset(self.kv_cache.num_evicted_blocks)

    def forget_requests(self) -> None:
        """Begins anew: without statistics, earlier prompts, or what was seen of drafts.

        No request may be left.
        """
        self.reset_prefix_cache()
        self.reset_stats()
        self.statistics.watch_anew()
        before, self._draft_len = self._draft_len, draft_len_of(self.runner)
        self._draft_len.take_runtime(before)

    def _num_looked_up(self) -> int:
        """Returns the drafts that were looked up beside a network's, 0 after the shutdown."""
        return 0 if self._is_shut_down else self.worker.num_looked_up_drafts(self.state.worker)
