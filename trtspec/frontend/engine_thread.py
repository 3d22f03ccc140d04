"""`EngineThread`: the one thread that steps an executor, for an event loop in another thread.

    event loop     post(add r)                     feed r: 3 tokens          feed r: done
    engine thread     step ─ step ─ … ── counts of all requests ──▶ step ── counts ──▶ idle

After a step it hands over how many tokens each request has now, and whether it is done: one call
into the loop for all requests. A reader takes the tokens from the request itself. So a slow reader
holds nothing back, and the next count it sees stands for all before it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

import torch

from ..api.sampling_params import MAX_TOKENS
from ..errors import EngineError, RankError, described
from ..executor.py_executor import PyExecutor
from ..executor.request import Request
from .heap import HeapAside

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FAILED_STEPS = 2
"""After a step that raises, all requests start over. If another one raises before all that ran have
a new token, the engine is dead."""
SHUT_DOWN = "The engine is shut down."


class Bell:
    """Wakes the one task that waits for news, at half the cost of an `asyncio.Event`."""

    __slots__ = ("_waiter", "on_ring")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self.on_ring: Callable[[], None] | None = None
        """Called at each ring, in place of waking a task. It raises nothing."""

    def ring(self) -> None:
        if self.on_ring is not None:
            self.on_ring()
        elif self._waiter is not None and not self._waiter.done():
            with suppress(RuntimeError):  # the reader's event loop is closed
                self._waiter.set_result(None)

    async def wait(self) -> None:
        """Waits for the next ring.

        Raises:
            RuntimeError: another task waits.
        """
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("Another task reads this stream: one at a time can.")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class Followed:
    """A request whose news is handed over.

    Args:
        is_whole: the end is the only news.
    """

    __slots__ = ("announced", "is_whole", "request")

    def __init__(self, request: Request, is_whole: bool = False):
        self.request, self.is_whole = request, is_whole
        self.announced = MAX_TOKENS if is_whole else 0  # tokens handed over; the engine thread's


class Feed(Followed):
    """What the event loop knows of one request.

    Args:
        bell: rings when there is news. Several feeds of one reader share it.
        on_done: called once, in the event loop.
    """

    __slots__ = ("_on_done", "bell", "first_id", "is_done", "num_tokens")

    def __init__(
        self, request: Request, bell: Bell, on_done: Callable[[Feed], None], is_whole: bool = False
    ):
        super().__init__(request, is_whole)
        self.bell, self._on_done = bell, on_done
        self.first_id = request.request_id  # set to the first one's of n completions
        self.num_tokens, self.is_done = 0, False

    def update(self, num_tokens: int, is_done: bool) -> None:
        """Takes over a count, in the event loop."""
        self.num_tokens = num_tokens
        if is_done and not self.is_done:
            self.is_done = True
            self._on_done(self)
        self.bell.ring()


class News(NamedTuple):
    """What a step did for one request."""

    feed: Any  # a `Followed`, of the kind that the port takes
    num_tokens: int
    is_done: bool


class NewsPort:
    """Where news goes. The engine's thread calls it. This one has no reader."""

    def is_free(self) -> bool:
        """Returns whether to hand news over now. Else the next step's news has this one's, too."""
        return True

    def post(self, news: Sequence[News]) -> bool:
        """Hands news over, without waiting. False: no reader is left."""
        return False

    def rest(self) -> None:
        """Called before the thread sleeps."""

    def fail(self, reason: str) -> None:
        """Called when the engine is dead, before the news of it."""


class Pace:
    """How long the event loop worked on the last news. It then rests as long.

    Both threads need Python's lock, so a loop that always works slows each step down. With rests it
    gets the news of several steps at once, which costs it hardly more than that of one.
    """

    def __init__(self) -> None:
        self.is_busy = False  # with news, or about to be
        self._until = 0.0

    def has_rested(self) -> bool:
        return not self.is_busy and time.perf_counter() >= self._until

    def end(self, began: float) -> None:
        now = time.perf_counter()
        self.is_busy, self._until = False, 2 * now - began


class LoopPort(NewsPort):
    """Hands news to the event loop of another thread, whose feeds it updates."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._pace = loop, Pace()

    def is_free(self) -> bool:
        return self._pace.has_rested()

    def post(self, news: Sequence[News]) -> bool:
        try:
            self._pace.is_busy = True
            self._loop.call_soon_threadsafe(_deliver, news, self._pace)
        except RuntimeError:  # the loop is closed
            return False
        return True


Command = Callable[[], None]


class EngineThread:
    """Steps an executor while there is work, and does what is posted between steps.

    Args:
        executor: nothing else may step it.
        lock: held for each step.
    """

    def __init__(self, executor: PyExecutor, lock: AbstractContextManager[Any]):
        self._executor, self._lock = executor, lock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._feeds: dict[int, Followed] = {}  # by request, of this thread alone
        self._port = NewsPort()
        self._num_failed = 0
        self._behind: dict[Request, int] = {}
        """Requests that ran when a step failed, with the tokens that they had, until they have
        more."""
        self._aside = HeapAside()
        self._gate, self._is_closed = threading.RLock(), False
        self.failure: str | None = None
        """Why the engine is dead; None while it works."""
        self._gpu = _index_of_gpu(executor.device)
        self._thread = threading.Thread(target=self._run, name="trtspec-engine", daemon=True)
        self._thread.start()

    # -- called by other threads -----------------------------------------------------------------
    def bind(self, port: NewsPort) -> None:
        """Sets where news goes."""
        self._port = port

    def add(self, feeds: Sequence[Followed]) -> None:
        """Queues requests that `PyExecutor.make_request` made."""
        self._post_command(lambda: self._add(feeds))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests before the next step. May be called by the garbage collector."""
        with suppress(EngineError):
            self._post_command(lambda: self._cancel(requests))

    def cancel_all(self) -> None:
        with suppress(EngineError):
            self._post_command(lambda: self._cancel([f.request for f in self._feeds.values()]))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function between two steps. Returns its result.

        Raises:
            EngineError: the engine is dead.
        """
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """As `call`, for callers without an event loop."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.failure is not None:
                    raise EngineError(self.failure)
                result = function()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            self._post_command(command)
        except EngineError as error:
            future.set_exception(error)
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after what is posted, and waits for it. False: it still runs."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post_command(self, command: Command) -> None:
        with self._gate:
            if self._is_closed:
                raise EngineError(SHUT_DOWN)
            self._commands.put(command)

    # -- the thread ------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
        except Exception as error:
            logger.exception("The engine's thread cannot use its GPU.")
            self._die(f"the engine's thread cannot use its GPU ({error})")
        while True:
            try:
                if not self._obey():
                    break
                with self._lock:
                    finished = self._step()
            except BaseException as error:  # a cancellation raises too, where the device is gone
                logger.exception("A step of the engine failed.")
                self._num_failed += 1
                live = self._executor.book.live.values()
                self._behind = {r: r.num_read for r in live if r.cached_tokens is not None}
                if self._num_failed >= MAX_FAILED_STEPS or isinstance(error, RankError):
                    self._die(f"the engine failed ({described(error)})")
                continue
            if self._num_failed and not self._are_behind():
                self._num_failed = 0
            self._hand_over(finished)
        self._aside.end()
        self._die(self.failure or SHUT_DOWN)
        with self._gate:  # nothing is posted from here on
            self._is_closed = True
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    command()

    def _are_behind(self) -> bool:
        """Whether a request is no further than when a step failed. That step may come again."""
        for request in list(self._behind):
            if request.is_finished or request.num_read > self._behind[request]:
                del self._behind[request]
        return bool(self._behind)

    def _step(self) -> list[Request]:
        if self._executor.has_work:
            self._aside.begin()
            return self._executor.step()
        return self._executor.book.take_finished()  # by a command

    def _obey(self) -> bool:
        """Runs the commands that are there. Waits for one if there is no work. False: it is the
        last one."""
        is_idle = self.failure is not None or not self._executor.has_work
        while True:
            if is_idle and self._commands.empty():
                self._aside.end()
                self._port.rest()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            with self._lock:
                command()
            if self.failure is None:
                is_idle = False

    def _add(self, feeds: Sequence[Followed]) -> None:
        for feed in feeds:
            request = feed.request
            self._feeds[request.request_id] = feed
            try:
                if self.failure is not None:
                    raise EngineError(self.failure)
                self._executor.add(request)
            except Exception as error:  # noqa: BLE001 - it is this request's
                request.finish_reason, request.error = "error", str(error)
                self._executor.report_lost(request)
                self._post([News(self._feeds.pop(request.request_id), 0, True)])

    def _cancel(self, requests: Sequence[Request]) -> None:
        if self.failure is None:
            for request in requests:
                self._executor.cancel(request.request_id)

    def _hand_over(self, finished: Sequence[Request]) -> None:
        if not finished and not self._port.is_free():
            return  # the next step tells this one's news, too
        news, feeds, scheduler = [], self._feeds, self._executor.scheduler
        # Those that lost their blocks wait before requests without output.
        preempted = takewhile(lambda request: request.output_token_ids, scheduler.waiting)
        for request in chain(scheduler.running, preempted):
            feed = feeds.get(request.request_id)
            if feed is not None and request.num_read > feed.announced:
                feed.announced = request.num_read
                news.append(News(feed, request.num_read, False))
        for request in finished:
            feed = feeds.pop(request.request_id, None)
            if feed is not None:
                news.append(News(feed, len(request.output_token_ids), True))
        if news:
            self._post(news)

    def _post(self, news: Sequence[News]) -> None:
        if not self._port.post(news):  # no reader is left
            with self._lock:
                self._cancel([feed.request for feed in self._feeds.values()])

    def _die(self, reason: str) -> None:
        self.failure = reason
        self._port.fail(reason)
        news = []
        for feed in self._feeds.values():
            request = feed.request
            if request.finish_reason is None:
                request.finish_reason, request.error = "error", reason
                self._executor.report_lost(request)
            news.append(News(feed, request.num_read, True))
        self._feeds.clear()
        if news:
            self._post(news)


def _deliver(news: Sequence[News], pace: Pace) -> None:
    """Runs in the event loop."""
    began = time.perf_counter()
    try:
        for feed, num_tokens, is_done in news:
            feed.update(num_tokens, is_done)
    finally:  # after what the news starts: readers' turns, and sending
        asyncio.get_running_loop().call_soon(pace.end, began)


def _index_of_gpu(device: torch.device) -> int | None:
    """Returns the GPU's number. A device without one is the GPU that this thread uses."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
