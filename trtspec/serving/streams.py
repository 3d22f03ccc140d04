"""Answers to clients that may go away: work ends when they do. Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..frontend.engine_thread import Bell

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
BODY = "http.response.body"
CONNECTION = "trtspec.connection"
"""Key of an ASGI scope, where the server has a `Connection`."""


class Connection(Protocol):
    """What a server's own connection can do beside ASGI's `send`."""

    is_full: bool
    """The client does not read what was sent."""
    on_room: Callable[[], None] | None
    """Called when the client has read it."""

    def send_chunk(self, data: bytes) -> None:
        """Sends a part of a chunked body, at the end of this turn of the event loop."""
        ...


class EventSource(Protocol):
    """Server-sent events that come as an engine works."""

    is_done: bool

    def take(self) -> bytes:
        """Returns the events that are due, b"" if none is. The last sets `is_done`."""
        ...

    @property
    def bell(self) -> Bell:
        """Rings when there may be some."""
        ...

    def close(self) -> None:
        """Ends what is left."""
        ...


class ClientGone(Exception):
    """The client closed its connection. No one reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what the work returns. It is cancelled if the client goes away first.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, watch):
            if not other.done():
                other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come. A client that goes away closes their source.

    What is due is sent in one piece: a client that is read slowly, or a loop that is late, gets the
    text of several steps at once.
    """

    def __init__(self, source: EventSource):
        super().__init__()
        self.source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send, scope.get(CONNECTION)))
        except ClientGone:
            return

    async def _write(self, send: Send, connection: Connection | None) -> None:
        source = self.source
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEAD})
            if connection is None:
                while not source.is_done:
                    if events := source.take():
                        await send({"type": BODY, "body": events, "more_body": True})
                    else:
                        await source.bell.wait()
            else:
                await self._push_to(connection)
            await send({"type": BODY, "body": b"", "more_body": False})
        finally:
            source.close()

    async def _push_to(self, connection: Connection) -> None:
        """Sends in the very calls that bring news: a task's turn for each costs as much again."""
        source = self.source
        ended = asyncio.get_running_loop().create_future()

        def push() -> None:
            if ended.done() or connection.is_full:
                return
            try:
                if events := source.take():
                    connection.send_chunk(events)
                if source.is_done:
                    ended.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is this stream's
                ended.set_exception(error)

        source.bell.on_ring = connection.on_room = push
        try:
            push()  # what `EventSource.take` has by now
            push()  # and what came before this was called: it rang for no one
            await ended
        finally:
            source.bell.on_ring = connection.on_room = None
