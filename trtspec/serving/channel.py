"""Messages between the engine's process and that of HTTP: pickles, each behind its length.

Both processes are ours, and the socket has no name: no other process can send.

    engine    ─ Settings ─▶             HTTP       the first
    HTTP      ─ Ready ─▶                engine
    HTTP      ─ Open, Cancel, Ask ─▶    engine     for a request, or a few with one prompt
    engine    ─ Reply ─▶                HTTP       for each Open and Ask
    engine    ─ Tokens ─▶               HTTP       for each step: of all requests with news
    engine    ─ Failed, Stop ─▶         HTTP       it is dead; all is to end
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..executor.logprobs import PromptLogprobs
from ..frontend.async_front import EngineFacts
from ..frontend.output_stream import Asked
from .config import ServerConfig

_LENGTH = struct.Struct("<Q")


class Open(NamedTuple):
    """Make requests and queue them. The reply is None, or the error of one that is refused."""

    number: int  # of the reply
    keys: list[int]  # by which messages name the requests
    asked: Asked


class Cancel(NamedTuple):
    """End requests."""

    keys: list[int] | None  # None: all


class Ask(NamedTuple):
    """Call a function by its name."""

    number: int  # of the reply
    name: str
    arguments: tuple[Any, ...]


class Settings(NamedTuple):
    """The first message: what is served, and how."""

    config: ServerConfig
    facts: EngineFacts
    max_num_requests_in_queue: int


class Ready(NamedTuple):
    """Clients are served from now on."""


class Reply(NamedTuple):
    number: int
    result: Any
    error: Exception | None


class Counts(NamedTuple):
    """What a request's drafts were worth so far."""

    accepted_lens: dict[int, int]  # generation steps by accepted drafts
    num_draft_tokens: int


class End(NamedTuple):
    """How a request ended."""

    finish_reason: str | None
    error: str | None
    has_wrong_grammar: bool


Logprobs = Sequence[Sequence[tuple[int, float, int]]]
"""Token, log probability and rank, by position: to pickle a `Logprob` takes four times as long."""


class Details(NamedTuple):
    """What a request's first and last news have, and all news of one that asks for more."""

    cached_tokens: int | None
    logprobs: Logprobs | None  # of the new tokens
    sources: list[int] | None
    counts: Counts | None  # at the end; before, if asked for
    end: End | None
    prompt_logprobs: PromptLogprobs | None = None  # in the first news


Entry = tuple[int, list[int], Details | None]
"""A request's key, its new tokens, and what else is new."""


class Tokens(NamedTuple):
    """What is new since the last such message."""

    entries: list[Entry]


class Failed(NamedTuple):
    """The engine is dead."""

    reason: str


class Stop(NamedTuple):
    """Finish what runs, and end."""


def packed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """Waits for one message and reads no further. Raises EOFError if the other side closed."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class Unpacker:
    """Makes messages of bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that are complete."""
        buffer, at = self._bytes, 0
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            start = at + _LENGTH.size
            end = start + _LENGTH.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                message = pickle.loads(view[start:end])
            at = end
            yield message
        del buffer[:at]
