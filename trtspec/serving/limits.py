"""What keeps strangers and mistakes out: the key, the origin, the size of a body, its time."""

from __future__ import annotations

import asyncio
import hmac
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .config import ServerConfig
from .errors import ApiError

OPEN_PATHS = frozenset({"/", "/health"})
"""These ask for no key: a probe's, and a page that holds nothing but its own code."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """ASGI middleware: refuses requests without the key, and those of other web pages.

    A browser lets any page send requests to a server on loopback. Such a request names the page's
    origin, or, after its name was bound to a loopback address, the page's host.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app, self._is_loopback = app, config.is_loopback
        self._host = config.host
        self._key = None if config.api_key is None else config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _split(f"//{host}").hostname if host.isprintable() else None
        if self._is_loopback and name not in LOOPBACK_NAMES | {self._host}:
            raise ApiError(
                403,
                f"Host {host[:100]!r} is not served: connect to localhost, or start the server "
                "with the --host that others reach, and an API key.",
            )
        origin = headers.get("origin")
        if origin is not None and _split(origin).netloc != host:
            raise ApiError(
                403,
                f"Requests of other web pages, as of {origin[:100]!r}, are not served: send them "
                "from a program, or through a proxy that serves the page, too.",
            )
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, whatever the scheme is.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if not is_right or scheme.lower() != "bearer":
            message = "The API key is wrong or missing: send 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")


def _split(url: str) -> SplitResult:
    """Returns a URL's parts, all empty if it is none."""
    try:
        return urlsplit(url)
    except ValueError:  # as of "//["
        return urlsplit("")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Returns a JSON request's body, also of one without a length.

    Raises:
        ApiError: it is too long, too slow, or not called JSON. ClientDisconnect: it ended early.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a form of another web page could not send
        raise ApiError(415, f"Content-Type is {kind[:100]!r}: it must be application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding[:100]!r}: send the body as it is.")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > config.max_body_bytes:
        raise _too_large(config)
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > config.max_body_bytes:
                    raise _too_large(config)
    except TimeoutError:
        raise ApiError(408, f"The body took more than {config.body_timeout:g} s.") from None
    return bytes(body)


def _too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413,
        f"The body is longer than {config.max_body_bytes} bytes: send less, or start the server "
        "with a larger --max-body-bytes.",
    )
