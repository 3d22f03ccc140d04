"""Offers of another protocol, like `Upgrade: h2c` of Java's client, are ignored (RFC 9110, 7.8)."""

from __future__ import annotations

from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.auto import AutoHTTPProtocol


class NoUpgrades(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, which reads a request with such an offer as one without."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser = Parser(self)

    def on_headers_complete(self) -> None:
        if not self.parser.has_offer():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.has_offer():
            super().on_message_complete()


class Parser:
    """httptools' parser. It ends a request after an offer, without the body.

    So the head is parsed again without the offer, by a new one: it may have closed the first.
    """

    def __init__(self, protocol: NoUpgrades):
        self._protocol = protocol
        self._parser = self._new()

    def _new(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return parser

    def has_offer(self) -> bool:
        """Whether the head offers another protocol. CONNECT offers none: it is refused."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except HttpParserUpgrade as end:
                rest = rest[end.args[0] :]
                head = self._head_without_offer() if self.has_offer() else b""
            self._parser = self._new()
            self._parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        url, version = self._protocol.url, self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), url, version)]
        headers = self._protocol.headers
        lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)
