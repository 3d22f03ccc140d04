"""`RemoteLLM`: the front of an engine in another process, which `EngineHost` runs there."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..api.outputs import Logprob
from ..errors import EngineError
from ..executor.request import Request
from ..frontend.async_front import AsyncFront, EngineFacts
from ..frontend.engine_thread import Bell, Feed
from ..frontend.inputs import Inputs
from ..frontend.output_stream import Asked
from .channel import (
    Ask,
    Cancel,
    Details,
    Entry,
    Failed,
    Open,
    Ready,
    Reply,
    Stop,
    Tokens,
    Unpacker,
    packed,
)

GONE = "The engine's process is gone."


class RemoteLLM(AsyncFront, asyncio.Protocol):
    """Takes requests for an engine at the other end of a socket, whose protocol it is.

    Its requests are copies, which grow as messages come: tokens, log probabilities and sources. How
    many drafts were accepted is known at a request's end; before, if its stream keeps counts.

    Args:
        on_stop: called when that process asks to end, or is gone.
    """

    def __init__(
        self,
        facts: EngineFacts,
        inputs: Inputs,
        max_num_requests_in_queue: int,
        connection: socket.socket,
    ):
        super().__init__(facts, inputs, max_num_requests_in_queue)
        self.on_stop: Callable[[], None] = lambda: None
        self._socket, self._unpacker = connection, Unpacker()
        self._failure: str | None = None
        self._transport: asyncio.Transport | None = None
        self._numbers = itertools.count()
        self._feeds: dict[int, Feed] = {}  # by key
        self._replies: dict[int, tuple[asyncio.Future[Any], Sequence[int]]] = {}

    async def connect(self) -> None:
        """Connects the event loop that runs. Comes before the first request."""
        self._loop = asyncio.get_running_loop()
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)

    def say_ready(self) -> None:
        """Says that clients are served from now on."""
        self._send(Ready())

    # -- an Observation --------------------------------------------------------------------------
    async def metrics(self) -> bytes:
        text: bytes = await self.ask("metrics")
        return text

    async def live(self, since: int) -> dict[str, Any]:
        figures: dict[str, Any] = await self.ask("live", since)
        return figures

    # -- of AsyncFront ---------------------------------------------------------------------------
    async def open_requests(self, asked: Asked, bell: Bell) -> list[Feed]:
        feeds = []
        for params in asked.params:
            request = Request(
                request_id=next(self._numbers),
                prompt_token_ids=list(asked.ids),  # type: ignore[arg-type]
                sampling_params=params,
                seed=0,  # the engine's process has the one that counts
                max_total_tokens=0,
                logprobs=None if params.logprobs is None else [],
                sources=[] if asked.keep_sources else None,
            )
            feeds.append(Feed(request, bell, self.forget, asked.is_whole))
        keys = [feed.request.request_id for feed in feeds]
        reply = self._ask(lambda number: Open(number, keys, asked), keys)
        self._feeds.update(zip(keys, feeds, strict=True))
        try:
            await reply
        except asyncio.CancelledError:
            self._send(Cancel(keys))
            raise
        return feeds

    def cancel(self, requests: Sequence[Request]) -> None:
        keys = [request.request_id for request in requests]
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._send, Cancel(keys))

    def abort_all(self) -> None:
        self._send(Cancel(None))

    async def ask(self, name: str, *arguments: Any) -> Any:
        return await self._ask(lambda number: Ask(number, name, arguments))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        pass  # it is that of `connect`

    @property
    def _engine_failure(self) -> str | None:
        return self._failure

    def _close(self) -> None:
        if self._transport is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._transport.close)

    # -- messages --------------------------------------------------------------------------------
    def _send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    def _ask(self, message: Callable[[int], Any], keys: Sequence[int] = ()) -> asyncio.Future[Any]:
        """Sends a message. Returns what its reply will be.

        Args:
            keys: of requests that an error ends.
        """
        if self._transport is None or self._transport.is_closing():
            raise EngineError(self.failure or GONE)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._send(message(number))
        self._replies[number] = future, keys
        return future

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Takes all messages that are there. Each reader with news is woken once."""
        fresh: dict[Feed, bool] = {}  # whether it is done
        for message in self._unpacker.feed(data):
            if isinstance(message, Tokens):
                for entry in message.entries:
                    self._take_entry(entry, fresh)
            elif isinstance(message, Reply):
                self._settle(message)
            elif isinstance(message, Failed):
                self._failure = message.reason
            elif isinstance(message, Stop):
                self.on_stop()
        for feed, is_done in fresh.items():
            if is_done or not feed.is_whole:
                feed.update(len(feed.request.output_token_ids), is_done)

    def _take_entry(self, entry: Entry, fresh: dict[Feed, bool]) -> None:
        key, tokens, details = entry
        feed = self._feeds.get(key)
        if feed is None:
            return
        feed.request.output_token_ids += tokens
        fresh[feed] = details is not None and self._take_details(feed.request, details)
        if fresh[feed]:
            del self._feeds[key]

    def _take_details(self, request: Request, details: Details) -> bool:
        """Returns whether the request ended."""
        request.cached_tokens = details.cached_tokens
        if details.prompt_logprobs is not None:
            request.prompt_logprobs = details.prompt_logprobs
        if request.logprobs is not None:
            request.logprobs += [
                {token: Logprob(value, rank) for token, value, rank in each}
                for each in details.logprobs or ()
            ]
        if request.sources is not None:
            request.sources += details.sources or ()
        if (counts := details.counts) is not None:
            request.accepted_lens = Counter(counts.accepted_lens)
            request.num_draft_tokens = counts.num_draft_tokens
        if (end := details.end) is None:
            return False
        request.finish_reason, request.error = end.finish_reason, end.error
        request.has_wrong_grammar = end.has_wrong_grammar
        return True

    def _settle(self, message: Reply) -> None:
        future, keys = self._replies.pop(message.number)
        if message.error is not None:  # there are no such requests
            for key in keys:
                self._feeds.pop(key, None)
        if future.done():  # its waiter was cancelled
            return
        if message.error is None:
            future.set_result(message.result)
        else:
            future.set_exception(message.error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all that waits."""
        self._failure = self._failure or GONE
        feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            feed.request.finish_reason, feed.request.error = "error", self._failure
            feed.update(feed.num_tokens, True)
        for future, _ in self._replies.values():
            if not future.done():
                future.set_exception(EngineError(self._failure))
        self.on_stop()
