"""`OutputStream`: one request as its reader sees it, from its prompt to the end of its output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from ..api.embeds_prompt import EmbedsPrompt
from ..api.outputs import RequestOutput
from ..api.sampling_params import SamplingParams
from ..errors import EngineError, RequestError
from ..executor.request import Request
from .engine_thread import Bell, Feed
from .inputs import TokenizedPrompt
from .marked_tokenizer import keep_markers
from .outputs import NOTHING_NEW, OutputReader, Piece, join

if TYPE_CHECKING:
    from .async_front import AsyncFront


class Asked(NamedTuple):
    """What an engine is asked to do: n requests with one prompt."""

    ids: list[int] | EmbedsPrompt
    params: list[SamplingParams]  # of each request, n = 1
    cache_salt: str | None
    keep_sources: bool
    is_whole: bool  # nothing is new before the end
    keep_counts: bool  # how many drafts were accepted is known before the end
    arrived: float  # of time.perf_counter()
    markers: tuple[str, ...]  # see `OutputStream.markers`


class OutputStream(AsyncIterator[RequestOutput]):
    """Snapshots of one request while it runs. Made by `AsyncFront.generate` and `chat`."""

    def __init__(
        self,
        llm: AsyncFront,
        tokens: Callable[[], Awaitable[TokenizedPrompt]],
        params: SamplingParams,
        cache_salt: str | None,
        keep_sources: bool,
    ):
        self._llm, self._tokens, self._params = llm, tokens, params
        self._cache_salt, self._keep_sources = cache_salt, keep_sources
        self._feeds: list[Feed] = []
        self._readers: list[OutputReader] = []
        self._is_started = self._is_starting = self._is_closed = False
        self.markers: tuple[str, ...] = ()
        """Set before the stream is started: the text has these, also as special tokens."""
        self.arrived = 0.0
        """When the request came, of time.perf_counter(); 0.0: when the stream is started."""
        self.bell = Bell()
        """Rings when there is news. Another may be set before, which several streams share."""
        self.is_whole = False
        """Set before: nothing is new before a completion ends, which is cheaper."""
        self.keep_counts = False
        """Set before: `requests` say before their end how many drafts were accepted."""

    @property
    def requests(self) -> list[Request]:
        """The n requests, once it is started. Those that run may be read, not changed."""
        return [feed.request for feed in self._feeds]

    @property
    def request_id(self) -> int:
        """Of the first completion.

        Raises:
            RequestError: the stream is not started.
        """
        if not self._feeds:
            raise RequestError("The stream has no request yet: await start() first.")
        return self._feeds[0].request.request_id

    async def start(self) -> None:
        """Checks and queues the request, which the first `anext()` does otherwise.

        After an error it may be called again.

        Raises:
            RuntimeError: another task starts it. Other errors as `AsyncFront.generate`.
        """
        if self._is_starting:
            raise RuntimeError("Another task starts this stream: one task reads it.")
        if self._is_started:
            return
        self._is_starting = True
        try:
            await self._start()
        finally:
            self._is_starting = False
        self._is_started = True

    async def _start(self) -> None:
        arrived, params = self.arrived or time.perf_counter(), self._params
        loop = self._llm.reserve(params.n)
        try:
            text, ids = await self._tokens()
            if params.bad_words or params.stop_strings:
                inputs = self._llm.inputs
                params = await self._llm.in_thread(lambda: inputs.with_token_ids(self._params))
            asked = Asked(
                ids,
                list(params.each()),
                self._cache_salt,
                self._keep_sources,
                is_whole=self.is_whole,
                keep_counts=self.keep_counts,
                arrived=arrived,
                markers=self.markers,
            )
            tokenizer = keep_markers(self._llm.tokenizer, self.markers)
            self._feeds = await self._llm.open_requests(asked, self.bell)
        except BaseException:
            self._llm.release(params.n, loop)
            raise
        self._llm.follow(self._feeds)
        self._readers = [OutputReader(feed.request, text, tokenizer) for feed in self._feeds]
        if self._is_closed:
            self.cancel()

    async def pieces(self) -> list[tuple[int, Piece]]:
        """Waits for news. Returns what is new, by the completion's index; [] once all is read.

        Raises:
            EngineError: the engine failed. Other errors as `AsyncFront.generate`.
        """
        await self.start()
        while not (pieces := self.take()) and not self.is_read:
            try:
                await self.bell.wait()
            except (asyncio.CancelledError, GeneratorExit):  # not: another task reads it
                self.cancel()
                raise
        return pieces

    def take(self) -> list[tuple[int, Piece]]:
        """Returns what is new by now, as `pieces` does; [] if nothing is. It is started before."""
        pieces = []
        for index, feed in enumerate(self._feeds):
            reader = self._readers[index]
            is_last = feed.is_done
            if not reader.is_done and (is_last or feed.num_tokens > reader.num_seen):
                error = feed.request.error
                if is_last and error is not None and error == self._llm.failure:
                    raise EngineError(error)
                pieces.append((index, reader.take(feed.num_tokens, is_finished=is_last)))
        return pieces

    @property
    def is_read(self) -> bool:
        """Whether the end of every completion was taken."""
        return all(reader.is_done for reader in self._readers)

    async def __anext__(self) -> RequestOutput:
        pieces = dict(await self.pieces())
        if not pieces:
            raise StopAsyncIteration
        acceptance = self._llm.facts.acceptance
        outputs = [
            reader.snapshot(pieces.get(index, NOTHING_NEW), acceptance)
            for index, reader in enumerate(self._readers)
        ]
        return join(outputs, self.requests, acceptance)

    def end(self, index: int) -> None:
        """Ends one completion without waiting; nothing more is read of it, the others go on."""
        self._readers[index].is_done = True
        feed = self._feeds[index]
        if not feed.is_done:
            self._llm.cancel([feed.request])

    def cancel(self) -> None:
        """Cancels what has not finished, without waiting."""
        running = [feed.request for feed in self._feeds if not feed.is_done]
        if running:
            self._llm.cancel(running)

    async def aclose(self) -> None:
        """Cancels what has not finished. A reader still gets the last output, which says so."""
        self._is_started = self._is_closed = True
        self.cancel()

    def __del__(self) -> None:
        if getattr(self, "_feeds", None):
            self.cancel()
