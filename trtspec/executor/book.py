"""`RequestBook`: the live requests, the tokens that steps add to them, and how each ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import RankError, described, errors_of_callers
from ..workers.protocols import EndedText
from .request import Request, RequestState, ScheduledBatch, StopCheck
from .results import HiddenRows, RequestResult
from .runner import StepRunner
from .saving import NOT_WHOLE, HiddenStatesSaver
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
FAILED = "Request %d failed: %s"
"""What is logged of a request that fails."""


class RequestBook:
    """Holds live requests by id, and finished ones until a step returns them.

    Args:
        saver: set where hidden states are saved. A request that ends is one sample, or none.
    """

    def __init__(self, scheduler: Scheduler, saver: HiddenStatesSaver | None):
        self.scheduler, self.saver = scheduler, saver
        self.live: dict[int, Request] = {}
        self.held: dict[int, Request] = {}  # live, not scheduled: their grammar is not compiled yet
        self.finished: list[Request] = []
        self.on_finish: Callable[[Request], None] | None = None
        """Called once with every request that ends."""

    def add(self, request: Request) -> None:
        # In this order: after an interrupt between the lines `start_over` drops the request.
        self.scheduler.waiting.append(request)
        self.live[request.request_id] = request

    def hold(self, request: Request) -> None:
        """Adds a request that is not scheduled before `release`."""
        self.live[request.request_id] = self.held[request.request_id] = request

    def release(self, request: Request) -> None:
        """Schedules a request that was held."""
        if request.request_id in self.held:
            self.scheduler.waiting.append(request)
            self.held.pop(request.request_id)

    def admit_new(self, batch: ScheduledBatch, runner: StepRunner) -> ScheduledBatch:
        """Gives new requests their slots. Returns the batch without those that failed admission."""
        for chunk in batch.contexts:
            if chunk.is_first:
                try:
                    if chunk.request.grammar is not None:
                        chunk.request.grammar.restart(chunk.request.output_token_ids)
                    runner.admit(chunk.request)
                except RankError:  # the engine's end, not the request's
                    raise
                except Exception as error:  # from its parameters or the drafter's state
                    logger.exception("Request %d could not be admitted.", chunk.request.request_id)
                    self.fail(chunk.request, f"its admission raised {described(error)}")
        left = [chunk for chunk in batch.contexts if not chunk.request.is_finished]
        return batch if len(left) == len(batch.contexts) else replace(batch, contexts=left)

    def add_tokens(
        self,
        result: RequestResult,
        num_rows: int,
        stop_checks: Sequence[StopCheck],
        ends_grammar: bool = False,
    ) -> int:
        """Adds one step's tokens to a request, and ends it where they end it.

        A stop check that raises fails its request alone.

        Args:
            num_rows: K'+1, of each generation in the step.
            ends_grammar: the request's grammar ends with the last of these tokens.

        Returns:
            how many tokens were added.
        """
        request, reason = result.request, None
        output = request.output_token_ids
        before = len(output)
        if result.is_generation:
            request.past_upper -= num_rows - len(result.tokens)
        try:
            reason = request.append(result.tokens, stop_checks)
        except errors_of_callers() as error:  # the stop check is the caller's code
            logger.exception("The stop check of request %d raised.", request.request_id)
            self.fail(request, f"the stop check raised {described(error)}")
        num_appended = len(output) - before
        if ends_grammar and num_appended == len(result.tokens):  # at the token limit too
            reason = "stop"
        if request.logprobs is not None and result.logprobs is not None:
            request.logprobs += result.logprobs[:num_appended]
        if request.sources is not None:
            request.sources += result.sources[:num_appended]
        if result.hidden is not None:
            self.save_rows(request, result.hidden)
        chain = request.prefix  # as `publish` asks first: mostly there is nothing to do
        if chain is not None and len(request.prompt_token_ids) + len(output) >= chain.next_at:
            self.scheduler.prefixes.publish(request)
        if reason is not None:
            self.finish(request, reason)
        request.num_read = len(output)  # later tokens may be computed again
        return num_appended

    def save_rows(self, request: Request, rows: HiddenRows) -> None:
        """Hands rows to the saver, now that the token after them is known.

        A request that its stop check cancelled has no sample any more.
        """
        assert self.saver is not None
        if request.finish_reason not in NOT_WHOLE:
            self.saver.add(request, rows.start, rows.states)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a live request: takes back its slot, and its blocks once no step in flight writes
        to them."""
        if request.is_finished:
            return
        request.finish_reason = reason
        if self.saver is not None:
            self.saver.finish(request)
        if self.held.pop(request.request_id, None) is not None:
            request.state = RequestState.FINISHED
        else:
            self.scheduler.finish(request)
        request.embeds = request.grammar = request.prefix = None
        self.finished.append(request)
        if self.on_finish is not None:
            self.on_finish(request)
        self.live.pop(request.request_id, None)  # last: an interrupt before it ends it again

    def fail(self, request: Request, error: str) -> None:
        """Ends one request with finish_reason "error"; the others go on."""
        if request.is_finished:
            return
        level = logging.INFO if request.has_wrong_grammar else logging.ERROR
        logger.log(level, FAILED, request.request_id, error)
        request.error = error
        self.finish(request, "error")

    def fail_poisoned(self, request: Request) -> None:
        self.fail(
            request,
            "the model's logits are NaN, or nothing is above -inf, for this request. Its KV "
            "blocks are cleared; other requests go on. Check the weights and dtype, or what "
            "bans tokens (bad_token_ids, logit_bias, min_tokens, a guided decoder).",
        )

    def ended_texts(self) -> list[EndedText]:
        """Returns the texts of finished requests that no error and no cancelling cut short."""
        return [
            EndedText(request.token_ids, len(request.prompt_token_ids), request.cache_salt)
            for request in self.finished
            if request.finish_reason in ("stop", "length")
        ]

    def take_finished(self) -> list[Request]:
        finished, self.finished = self.finished, []
        return finished

    def flush_when_idle(self) -> None:
        """Writes samples to disk when the last request is done, for there may be no next step.

        Steps in flight then belong to requests that have ended.
        """
        if self.saver is not None and not (self.scheduler.waiting or self.scheduler.running):
            self.saver.flush()

    def start_over(self) -> None:
        """Makes every request wait again with the output that was read, after an exception.

        A request whose sample was begun ends with an error, for a sample must be complete.
        """
        live = sorted(self.live.values(), key=lambda request: request.request_id)
        if self.saver is not None:
            dropped = self.saver.start_over()
            for request in live:
                if request.request_id in dropped:
                    request.finish_reason = "error"
                    request.error = "interrupted: its sample is not whole and is dropped"
        waiting = [r for r in live if r.finish_reason is None and r.request_id not in self.held]
        self.scheduler.start_over(waiting)
        for request in live:
            if request.finish_reason is not None:
                request.end()
                self.held.pop(request.request_id, None)
                if request not in self.finished:
                    self.finished.append(request)
                del self.live[request.request_id]
                if self.on_finish is not None:
                    self.on_finish(request)
