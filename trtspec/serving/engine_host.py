"""`EngineHost`: an engine whose requests come from another process, by a socket.

thread that calls run()    reads messages: makes requests, queues them, answers questions
engine's thread            steps; after each it sends the new tokens of all requests at once
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..api.outputs import Logprob
from ..async_llm import call_engine, make_requests
from ..errors import EngineError, TrtspecError
from ..executor.request import Request
from ..frontend.engine_thread import EngineThread, Followed, News, NewsPort
from ..llm import LLM
from .channel import (
    Ask,
    Cancel,
    Counts,
    Details,
    End,
    Entry,
    Failed,
    Logprobs,
    Open,
    Ready,
    Reply,
    Stop,
    Tokens,
    Unpacker,
    packed,
)
from .observe import EngineObservation

logger = logging.getLogger(__name__)
READ_BYTES = 1 << 18


class Sent(Followed):
    """A request whose tokens are sent.

    Args:
        key: its name in messages.
        is_whole: the end is the only news, unless there are log probabilities. They are sent as
            they come: all of a long answer's at once would take the engine's thread 300 ms.
        keep_counts: its news says how many drafts were accepted.
    """

    __slots__ = ("has_begun", "has_details", "keep_counts", "key", "num_sent")

    def __init__(self, request: Request, key: int, is_whole: bool, keep_counts: bool = False):
        has_logprobs = request.sampling_params.logprobs is not None
        super().__init__(request, is_whole and not has_logprobs)
        self.key, self.num_sent, self.has_begun = key, 0, False
        self.keep_counts = keep_counts
        self.has_details = has_logprobs or keep_counts or request.sources is not None

    def entry(self, num_tokens: int, is_done: bool) -> Entry:
        """Returns what is new, up to a number of tokens."""
        request, first = self.request, self.num_sent
        details = end = None
        if is_done:
            end = End(request.finish_reason, request.error, request.has_wrong_grammar)
        if is_done or self.has_details or not self.has_begun:
            logprobs, sources, counts = request.logprobs, request.sources, None
            if is_done or self.keep_counts:
                counts = Counts(dict(request.accepted_lens), request.num_draft_tokens)
            details = Details(
                cached_tokens=request.cached_tokens,
                logprobs=None if logprobs is None else plain(logprobs[first:num_tokens]),
                sources=None if sources is None else sources[first:num_tokens],
                counts=counts,
                end=end,
                prompt_logprobs=None if self.has_begun else request.prompt_logprobs,
            )
        self.num_sent, self.has_begun = num_tokens, True
        return self.key, request.output_token_ids[first:num_tokens], details


def plain(logprobs: Sequence[dict[int, Logprob]]) -> Logprobs:
    """Returns log probabilities as they are sent."""
    return [[(token, p.logprob, p.rank) for token, p in each.items()] for each in logprobs]


class SocketPort(NewsPort):
    """Sends news to the other process. The engine never waits for it.

    While the other process has not read what was sent, nothing more is made: its next news is that
    of all steps since.

    Args:
        on_done: called with each request that ended.
    """

    def __init__(self, connection: socket.socket, on_done: Callable[[Sent], Any]):
        self._socket, self._on_done = connection, on_done
        self._lock, self._left, self.is_broken = threading.Lock(), bytearray(), False

    def is_free(self) -> bool:
        return not self._left or self._push()

    def post(self, news: Sequence[News]) -> bool:
        self.send(Tokens([feed.entry(count, is_done) for feed, count, is_done in news]))
        for feed, _, is_done in news:
            if is_done:
                self._on_done(feed)
        return not self.is_broken

    def fail(self, reason: str) -> None:
        self.send(Failed(reason))

    def send(self, message: Any) -> None:
        """Sends a message, or keeps what the socket does not take."""
        data = packed(message)
        with self._lock:
            self._left += data
        self._push()

    def rest(self) -> None:
        """Waits until all is sent."""
        while not self._push():
            select.select([], [self._socket], [], 1.0)

    def _push(self) -> bool:
        """Sends what the socket takes now. Returns whether that is all."""
        with self._lock:
            try:
                while self._left and not self.is_broken:
                    del self._left[: self._socket.send(self._left, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return False
            except OSError:  # the other process is gone
                self.is_broken = True
            if self.is_broken:
                self._left.clear()
            return True


class EngineHost:
    """Serves the process at the other end of a socket.

    Args:
        llm: nothing else may use it.
        on_ready: called when that process takes clients.
    """

    def __init__(
        self,
        llm: LLM,
        observation: EngineObservation,
        connection: socket.socket,
        on_ready: Callable[[], None],
    ):
        self._llm, self._observation, self._socket = llm, observation, connection
        self._on_ready = on_ready
        self._sent: dict[int, Sent] = {}  # by key
        self._port = SocketPort(connection, lambda sent: self._sent.pop(sent.key, None))
        self._thread = EngineThread(llm.executor, llm.lock)
        self._thread.bind(self._port)

    def run(self) -> None:
        """Does what messages ask for, until the other side closes."""
        unpacker = Unpacker()
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                break
            if not data:
                break
            for message in unpacker.feed(data):
                self._do(message)
            self._port.rest()
        self._thread.cancel_all()

    def send(self, message: Any) -> None:
        """Sends a message, or keeps it until the socket takes it."""
        self._port.send(message)

    def stop(self) -> None:
        """Asks the other process to finish what runs, and to end. Waits until that is sent."""
        self._port.send(Stop())
        self._port.rest()  # no other thread may have reason to send

    def close(self, timeout: float | None = None) -> bool:
        """Ends the engine's thread and frees the memory. False: a step does not end."""
        if not self._thread.stop(timeout):
            return False
        self._llm.shutdown()
        return True

    def _do(self, message: Any) -> None:
        if isinstance(message, Open):
            self._reply(message.number, lambda: self._open(message))
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, Ready):
            self._on_ready()

    def _open(self, message: Open) -> None:
        asked, requests = message.asked, make_requests(self._llm, message.asked)
        pairs = zip(requests, message.keys, strict=True)
        sent = [Sent(r, key, asked.is_whole, asked.keep_counts) for r, key in pairs]
        self._sent.update((one.key, one) for one in sent)
        self._thread.add(sent)

    def _cancel(self, message: Cancel) -> None:
        if message.keys is None:
            self._thread.cancel_all()
        else:  # those that ended meanwhile are left out
            sent = [self._sent.get(key) for key in message.keys]
            self._thread.cancel([one.request for one in sent if one is not None])

    def _ask(self, message: Ask) -> None:
        number, name, arguments = message
        if name in ("metrics", "live"):  # also of an engine that failed
            self._reply(number, lambda: getattr(self._observation, name)(*arguments))
        else:
            future = self._thread.submit(lambda: call_engine(self._llm, name, arguments))
            future.add_done_callback(lambda done: self._reply(number, done.result))

    def _reply(self, number: int, function: Callable[[], Any]) -> None:
        """Replies with what a function returns or raises."""
        result, error = None, None
        try:
            result = function()
        except TrtspecError as raised:
            error = raised
        except Exception as raised:  # any other may not be sent
            logger.error("The engine's process failed at a message.", exc_info=raised)
            error = EngineError(f"{type(raised).__name__}: {raised}")
        self._port.send(Reply(number, result, error))
