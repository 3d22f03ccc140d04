"""`AsyncFront`: prompts in, streams of outputs out, for asyncio. Where the engine runs is open."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..api.outputs import EngineStats
from ..api.sampling_params import SamplingParams
from ..checks import is_int
from ..errors import ConfigError, EngineError, QueueFullError, RequestError, shown
from ..executor.request import Request
from ..other_names import NamesAttributes, names_arguments
from .engine_thread import SHUT_DOWN, Bell, Feed
from .inputs import NOTHING, Inputs, Messages, Prompt, TokenizedPrompt, checked_id, plain
from .output_stream import Asked, OutputStream
from .outputs import Acceptance
from .time_limit import TimeLimit

T = TypeVar("T")
TEMPLATE_SECONDS = 5.0
"""A chat template that takes longer ends its request with an error."""
ENGINE_CALLS = frozenset({"reset_prefix_cache", "stats"})
"""Methods of a `PyExecutor` that a front may call between two steps."""
STOP_SECONDS = 30.0  # a step in flight ends within them, or the memory is not freed
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class EngineFacts:
    """What a front knows of its engine."""

    model_dir: Path
    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    acceptance: Acceptance


def check_queue(max_num_requests_in_queue: object) -> None:
    """Raises ConfigError unless it is a number of requests."""
    if not is_int(max_num_requests_in_queue, 0):
        raise ConfigError(
            f"max_num_requests_in_queue={shown(max_num_requests_in_queue)}: it must be an int >= 0."
        )


class AsyncFront(NamesAttributes, ABC):
    """Takes requests for an engine, which a subclass reaches. For the tasks of one event loop.

    Args:
        facts: of the engine.
        inputs: tokenises for its model.
        max_num_requests_in_queue: requests that may wait while `max_batch_size` run.

    Raises:
        ConfigError: that is no number of requests.
    """

    OTHER_ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "generate_async": "generate()",
        "get_tokenizer": "tokenizer",
    }

    def __init__(self, facts: EngineFacts, inputs: Inputs, max_num_requests_in_queue: int):
        check_queue(max_num_requests_in_queue)
        self.facts, self.inputs = facts, inputs
        self.max_live = facts.max_batch_size + max_num_requests_in_queue
        self._num_preparing = 0  # requests whose prompts are being tokenised
        self._live: set[Feed] = set()
        self._templates = TimeLimit("The chat template", TEMPLATE_SECONDS)
        # One thread: a tokenizer of `tokenizers` is not to be called by several at first.
        self._preparer = ThreadPoolExecutor(1, "trtspec-tokenize")
        longest = max(map(len, self.tokenizer.get_vocab())) if self.tokenizer else 1
        # Twice: a normalizer may drop characters.
        self._max_chars = 2 * longest * facts.max_seq_len
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = self._is_closed = False
        self._idle = asyncio.Event()

    # -- the engine, as a subclass reaches it ----------------------------------------------------
    @abstractmethod
    async def connect(self) -> None:
        """Reaches the engine, where that needs the event loop. A server calls it first."""

    @abstractmethod
    async def open_requests(self, asked: Asked, bell: Bell) -> list[Feed]:
        """Checks and queues requests.

        Args:
            bell: rings when there is news of them.

        Raises:
            RequestError: one is not allowed. EngineError: the engine failed.
        """

    @abstractmethod
    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests, without waiting. Any thread may call it."""

    @abstractmethod
    def abort_all(self) -> None:
        """Cancels every request."""

    @abstractmethod
    async def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the result of one of `ENGINE_CALLS`. Raises EngineError if the engine failed."""

    @abstractmethod
    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the event loop that news goes to."""

    @abstractmethod
    def _close(self) -> None:
        """Ends the engine, or leaves it. May take long; a thread of its own calls it."""

    @property
    @abstractmethod
    def _engine_failure(self) -> str | None:
        """Why the engine is dead; None while it works."""

    # -- what is known of it ---------------------------------------------------------------------
    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer of transformers, or None."""
        return self.inputs.tokenizer

    @property
    def num_live(self) -> int:
        """Requests that are queued, running, or about to be queued."""
        return self._num_preparing + len(self._live)

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; None while the engine works."""
        return self._engine_failure or (SHUT_DOWN if self._is_closing else None)

    # -- requests --------------------------------------------------------------------------------
    @names_arguments
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        keep_sources: bool = False,
    ) -> OutputStream:
        """Returns an async iterator of snapshots, the last finished.

        Args:
            prompt: text, token ids or an `EmbedsPrompt`.
            sampling_params: with n > 1 a snapshot has all n completions.
            cache_salt: only requests of the same salt share the prefix cache.
            keep_sources: `OutputStream.pieces` says where each token came from.

        The first `anext()` raises:
            RequestError: the prompt or a parameter is not allowed.
            QueueFullError: too many requests wait.
            EngineError: the engine failed or is shut down.
        """
        return self.open(lambda: self.tokenize(prompt), sampling_params, cache_salt, keep_sources)

    @names_arguments
    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template_variables: Mapping[str, Any] = NOTHING,
        cache_salt: str | None = None,
        keep_sources: bool = False,
    ) -> OutputStream:
        """`generate` on a conversation: `[{"role": "user", "content": "…"}]`.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            template_variables: what else the chat template reads, as `enable_thinking`.
        """
        return self.open(
            lambda: self.tokenize_chat(messages, tools, template_variables),
            sampling_params,
            cache_salt,
            keep_sources,
        )

    def open(
        self,
        tokens: Callable[[], Awaitable[TokenizedPrompt]],
        sampling_params: SamplingParams | None,
        cache_salt: str | None,
        keep_sources: bool,
    ) -> OutputStream:
        """Returns a stream whose prompt is made when it is first read."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={shown(params)}: give SamplingParams, or None.")
        return OutputStream(self, tokens, params, cache_salt, keep_sources)

    async def abort(self, request_id: int) -> bool:
        """Cancels a request (finish_reason "cancelled"), of n > 1 all that are left of its
        completions; False if there is none.

        Args:
            request_id: of a `RequestOutput`.

        Raises:
            RequestError: the id is not an int.
        """
        number = checked_id(request_id)
        found = [
            feed.request
            for feed in self._live
            if number in (feed.first_id, feed.request.request_id)
        ]
        self.cancel(found)
        return bool(found)

    # -- tokens and text -------------------------------------------------------------------------
    async def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Returns a prompt's text, if it is text, and its tokens.

        Raises:
            RequestError: also for a text that must have more tokens than `max_seq_len`.
        """
        prompt = plain(prompt)
        self._check_length(prompt)
        return await self.in_thread(lambda: self.inputs.tokenize(prompt))

    async def render_chat(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Returns the text that the chat template makes, within `TEMPLATE_SECONDS`."""
        return await self._templates.run(
            lambda: self.inputs.render_chat(messages, tools, variables)
        )

    async def tokenize_chat(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = NOTHING,
    ) -> TokenizedPrompt:
        """Returns a conversation's text and its tokens."""
        text = await self.render_chat(messages, tools, variables)
        self._check_length(text)
        return TokenizedPrompt(
            text, await self.in_thread(lambda: self.inputs.encode_rendered(text))
        )

    def _check_length(self, prompt: Prompt) -> None:
        """Refuses what is far too long, before it holds the thread that tokenises for seconds."""
        if isinstance(prompt, str) and len(prompt) > self._max_chars:
            raise RequestError(
                f"The prompt has {len(prompt)} characters; "
                f"max_seq_len={self.facts.max_seq_len} tokens hold at most "
                f"{self._max_chars}. Shorten it."
            )

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Runs what takes long beside the event loop and the engine, one at a time."""
        if self._is_closing:
            raise EngineError(SHUT_DOWN)
        future = self._preparer.submit(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and not (task is not None and task.cancelling()):
                raise EngineError(SHUT_DOWN) from None  # by `shutdown`
            raise

    # -- the engine ------------------------------------------------------------------------------
    async def stats(self) -> EngineStats:
        stats: EngineStats = await self.ask("stats")
        return stats

    async def reset_prefix_cache(self) -> None:
        """Forgets the keys and values of earlier prompts, as after a change of the weights."""
        await self.ask("reset_prefix_cache")

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Refuses new requests, waits for those that run, and frees the memory.

        A second call returns with the first one.

        Args:
            timeout: seconds after which those that still run are aborted.
        """
        is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            while not self._is_closed:  # in no thread: the first call needs one
                await asyncio.sleep(POLL_SECONDS)
            return
        try:
            await self._shut_down(timeout)
        finally:
            self._is_closed = True

    async def _shut_down(self, timeout: float) -> None:
        if timeout and not await self._is_idle_within(timeout):
            self.abort_all()
            await self._is_idle_within(STOP_SECONDS)
        self.abort_all()

        def close() -> None:
            self._preparer.shutdown(wait=True, cancel_futures=True)
            self._close()

        await asyncio.get_running_loop().run_in_executor(None, close)

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.num_live:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # -- for OutputStream ------------------------------------------------------------------------
    def reserve(self, count: int) -> asyncio.AbstractEventLoop:
        """Takes places in the queue. Returns the running event loop, which they belong to.

        Raises:
            RequestError: there are fewer places. QueueFullError, EngineError: see `generate`.
        """
        self.check_count(count)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self.num_live and self._loop is not None and not self._loop.is_closed():
                raise EngineError("Another event loop has requests here: use one loop.")
            self._num_preparing, self._loop = 0, loop
            self.cancel([feed.request for feed in self._live])  # of a closed loop: none reads them
            self._live.clear()
            self._bind(loop)
        if self.failure is not None:
            raise EngineError(self.failure)
        if self.num_live + count > self.max_live:
            raise QueueFullError(
                f"{self.num_live} requests run or wait; at most {self.max_live} may. Try again "
                "later."
            )
        self._num_preparing += count
        return loop

    def check_count(self, count: int) -> None:
        """Raises RequestError for more completions at a time than the queue has places."""
        if count > self.max_live:
            raise RequestError(
                f"{count} completions are asked for at once; at most {self.max_live} may run or "
                "wait. Ask for fewer, or raise max_num_requests_in_queue."
            )

    def release(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        """Gives back places of requests that are not started; none of an earlier loop's is left."""
        if loop is self._loop:
            self._num_preparing -= count
            self._idle.set()

    def follow(self, feeds: Sequence[Feed]) -> None:
        """Counts requests that are queued, in place of their reserved places."""
        for feed in feeds:
            feed.first_id = feeds[0].request.request_id
        self._live.update(feed for feed in feeds if not feed.is_done)
        self.release(len(feeds), asyncio.get_running_loop())

    def forget(self, feed: Feed) -> None:
        """Called when a request is done."""
        self._live.discard(feed)
        self._idle.set()
