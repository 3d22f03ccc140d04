"""HTTP/1.0 has no chunks: a body without a length ends where the connection does."""

from __future__ import annotations

from typing import Any

from starlette.types import Message

from .streams import CONNECTION


def leave_out_chunks(cycle: Any) -> None:
    """Lets uvicorn, which answers every client in HTTP/1.1, send such a body without chunks."""
    send, has_length = cycle.send, False

    async def send_as_it_is(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            has_length = b"content-length" in names
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_as_it_is
    del cycle.scope[CONNECTION]  # events would be chunks there
