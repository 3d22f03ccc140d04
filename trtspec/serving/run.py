"""Runs HTTP: uvicorn, with limits of its own for connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ..errors import ConfigError
from ..frontend.async_front import AsyncFront
from .app import build_app
from .config import ServerConfig
from .observe import Observation
from .streams import CONNECTION
from .unchunked import leave_out_chunks
from .upgrades import NoUpgrades

MAX_HEAD_BYTES = 64 * 1024


class Outbox:
    """Connections with something to send. At the end of a turn of the event loop all are sent to.

    A step brings text for all of its streams. To send it in a row costs a sixth of what it costs to
    send each text once it is decoded: a client's process is woken once, not for each.
    """

    def __init__(self) -> None:
        self._full: list[Outgoing] = []

    def add(self, connection: Outgoing) -> None:
        if not self._full:
            asyncio.get_running_loop().call_soon(self._send)
        self._full.append(connection)

    def _send(self) -> None:
        full, self._full = self._full, []
        for connection in full:
            connection.flush()


class Outgoing:
    """A transport that sends when its outbox says so. All else is the transport's."""

    def __init__(self, transport: Any, outbox: Outbox):
        self._transport, self._outbox = transport, outbox
        self._pieces: list[bytes] = []
        self.is_closing = transport.is_closing
        self.is_full = False
        self.on_room: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._outbox.add(self)
        self._pieces.append(data)

    def send_chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Guarded(NoUpgrades):
    """uvicorn's protocol of one connection, with limits.

    A head that is slow or endless ends its connection, and so does a client that does not read.
    """

    def __init__(self, limits: ServerConfig, outbox: Outbox, **arguments: Any):
        super().__init__(**arguments)
        self._limits, self._outbox = limits, outbox
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Outgoing(transport, self._outbox))
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self.transport

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and not self.parser.has_offer():
            leave_out_chunks(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_busy = self._has_request
        super().data_received(data)
        if self._has_request:
            self._stop(self._head_timer)
            self._head_timer, self._num_head_bytes = None, 0
            return
        self._num_head_bytes += 0 if was_busy else len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        elif self._head_timer is None:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.is_full = True
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop(self._write_timer)
        super().resume_writing()
        self.transport.is_full = False
        if self.transport.on_room is not None:
            self.transport.on_room()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # close() would wait for the reader
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout, self._end_slow_head)

    def _end_slow_head(self) -> None:
        if not self._has_request:
            self.transport.abort()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class Server(uvicorn.Server):
    """Serves clients until `should_exit` is set. It then finishes what runs.

    Args:
        on_start: called once clients are taken.
        observation: as for `build_app`.
    """

    def __init__(
        self,
        llm: AsyncFront,
        config: ServerConfig,
        on_start: Callable[[], None] = lambda: None,
        observation: Observation | None = None,
    ):
        settings = uvicorn.Config(
            build_app(llm, config, observation),
            # uvicorn calls it as it would the class, which is what its annotation asks for.
            http=partial(Guarded, config, Outbox()),  # type: ignore[arg-type]
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            # Requests are cancelled before; this is for what does not end then.
            timeout_graceful_shutdown=int(config.shutdown_timeout) + 5,
        )
        super().__init__(settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._llm, self._timeout, self._on_start = llm, config.shutdown_timeout, on_start

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True  # not captured: the process ends with code 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timeout, self._llm.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_start()


def listen(config: ServerConfig) -> socket.socket:
    """Returns the socket that a server listens on.

    Raises:
        ConfigError: another process has the address, or it is not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {config.host} port {config.port} ({error.strerror}): choose "
            "another --port or --host."
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
