"""Answers to clients that may go away: work ends when they do. Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from .limits import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


RAW_SEND = "trtspec.send"
"""Key of an ASGI scope: `send` without what each layer of the application adds to a call."""


class EventSource(Protocol):
    """Server-sent events that come as an engine works."""

    is_done: bool

    def take(self) -> bytes:
        """Returns the events that are due, b"" if none is. The last sets `is_done`."""
        ...

    async def news(self) -> None:
        """Waits until there may be some."""
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
            await while_connected(receive, self._write(send, scope.get(RAW_SEND, send)))
        except ClientGone:
            return

    async def _write(self, send: Send, send_body: Send) -> None:
        source = self.source
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEAD})
            while True:
                events, is_last = source.take(), source.is_done
                if events:
                    message = {"type": "http.response.body", "body": events}
                    await send_body(message | {"more_body": True} if not is_last else message)
                if is_last:
                    break
                await source.news()
        finally:
            source.close()
