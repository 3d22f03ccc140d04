"""What the process of HTTP sends, and when."""

from __future__ import annotations

import asyncio

from trtspec.serving import run


class Wire:
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent.append(data)

    def close(self) -> None:
        self.is_closed = True


def test_what_a_turn_of_the_loop_writes_is_sent_at_its_end() -> None:
    """In one piece for each connection; at once where a connection is closed."""

    async def main() -> None:
        outbox, wires = run.Outbox(), [Wire(), Wire(), Wire()]
        first, second, closed = (run.Outgoing(wire, outbox) for wire in wires)
        for text in (b"a", b"b"):
            first.write(text)
            second.write(text)
        second.send_chunk(b"x" * 17)
        closed.write(b"end")
        closed.close()
        assert [wire.sent for wire in wires] == [[], [], [b"end"]] and closed.is_closing()
        await asyncio.sleep(0)
        assert [wire.sent for wire in wires] == [
            [b"ab"],
            [b"ab11\r\n" + b"x" * 17 + b"\r\n"],
            [b"end"],
        ]
        first.write(b"c")
        await asyncio.sleep(0)
        assert wires[0].sent == [b"ab", b"c"]

    asyncio.run(main())
