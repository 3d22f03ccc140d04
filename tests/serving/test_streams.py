"""Server-sent events: what is due goes in one piece, and waits for a client that does not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, greedy, make_llm, raw_post, read_all, served_model_dir

from trtspec import LLM, AsyncLLM
from trtspec.frontend.engine_thread import Bell
from trtspec.serving import answers
from trtspec.serving.app import build_app
from trtspec.serving.config import ServerConfig
from trtspec.serving.streams import CONNECTION, EventStream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {
    TEXT: {"prompt": "abc 12", "logprobs": 20},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20},
}


class Source:
    """Events that a test makes due."""

    def __init__(self) -> None:
        self.bell, self.is_done, self.is_closed = Bell(), False, False
        self._due: list[Any] = []

    def add(self, event: Any, *, is_last: bool = False) -> None:
        self._due.append(event)
        self._is_last = is_last
        self.bell.ring()

    def take(self) -> bytes:
        due, self._due = self._due, []
        if None in due:
            raise ValueError("a bug")
        if due:
            self.is_done = self._is_last
        return b"".join(due)

    def close(self) -> None:
        self.is_closed = True


class Connection:
    def __init__(self) -> None:
        self.is_full, self.chunks = False, []  # type: bool, list[bytes]
        self.on_room: Any = None

    def send_chunk(self, data: bytes) -> None:
        self.chunks.append(data)


async def begin(source: Source, connection: Connection | None) -> tuple[asyncio.Task[None], list]:
    """Returns the response as it runs, and what it sends by ASGI."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    scope: Any = {"type": "http"} | ({} if connection is None else {CONNECTION: connection})
    task = asyncio.ensure_future(EventStream(source)(scope, receive, send))
    for _ in range(5):
        await asyncio.sleep(0)
    return task, sent


def test_an_event_is_one_line() -> None:
    """Also to clients that read lines of text, as httpx's `iter_lines` does."""
    text = "é" + "".join(map(chr, [*range(32), 0x85, 0x2028, 0x2029]))
    said = answers.text_of(text)
    assert said.splitlines() == [said] and json.loads(said) == text
    line, end = answers.event_of({"text": text}).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text} and not end


def test_events_are_sent_in_the_call_that_brings_them() -> None:
    async def main() -> None:
        source, connection = Source(), Connection()
        task, sent = await begin(source, connection)
        source.add(b"1")
        assert connection.chunks == [b"1"]
        connection.is_full = True
        source.add(b"2")
        source.add(b"3")
        assert connection.chunks == [b"1"]
        connection.is_full = False
        connection.on_room()
        assert connection.chunks == [b"1", b"23"] and not task.done()
        source.add(b"4", is_last=True)
        await task
        assert connection.chunks[2:] == [b"4"] and source.is_closed
        assert connection.on_room is source.bell.on_ring is None
        assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
        assert sent[1]["body"] == b"" and not sent[1]["more_body"]

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_end_before_the_response_begins_is_sent(
    model_dir: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bell rings after it: the first piece is read before, and all others came meanwhile."""
    begin_response = EventStream.__call__

    async def late(self: EventStream, scope: Any, receive: Any, send: Any) -> None:
        while served.engine.num_live:
            await asyncio.sleep(0.01)
        await begin_response(self, scope, receive, send)

    monkeypatch.setattr(EventStream, "__call__", late)
    served = Served(make_llm(model_dir))
    try:
        body = {"model": "tiny", "stream": True, "max_tokens": 60, "ignore_eos": True}
        reply = served.post(path, body | ASKED[path])
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in reply.text
    finally:
        served.close()


@pytest.mark.parametrize("has_connection", [False, True])
def test_an_error_ends_its_stream_alone(has_connection: bool) -> None:
    """The call that brings news of all streams goes on."""

    async def main() -> None:
        source = Source()
        task, _ = await begin(source, Connection() if has_connection else None)
        source.add(None)
        with pytest.raises(ValueError, match="a bug"):
            await task
        source.add(b"late")
        assert source.is_closed

    asyncio.run(main())


def test_under_another_server() -> None:
    async def main() -> None:
        source = Source()
        task, sent = await begin(source, None)
        for text in (b"1", b"2"):
            source.add(text)
        await asyncio.sleep(0)
        source.add(b"3", is_last=True)
        await task
        assert b"".join(m["body"] for m in sent[1:]) == b"123" and source.is_closed
        assert [m["more_body"] for m in sent[1:]] == [*[True] * (len(sent) - 2), False]

    asyncio.run(main())


def test_one_task_at_a_time_waits_for_a_bell() -> None:
    async def main() -> None:
        bell = Bell()
        first = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Another task"):
            await bell.wait()
        bell.ring()
        bell.ring()
        await first
        second = asyncio.ensure_future(bell.wait())
        await asyncio.sleep(0)
        assert not second.done()
        second.cancel()

    asyncio.run(main())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


def events_of(reply: bytes) -> list[Any]:
    assert b"data: [DONE]" in reply
    return [json.loads(line[6:]) for line in reply.splitlines() if line.startswith(b"data: {")]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(map(text_of_choice, choices))


def text_of_choice(choice: Any) -> str:
    """Of a chunk or of a whole answer."""
    if "text" in choice:
        return choice["text"]
    return choice.get("delta", choice.get("message", {})).get("content", "")


@pytest.mark.slow
def test_a_client_that_reads_late_misses_nothing(model_dir: Path) -> None:
    """The engine is done by then. What it made meanwhile comes in few events."""
    served = Served(make_llm(model_dir))
    served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    try:
        for path, fields in ASKED.items():
            body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 230}
            whole = served.post(path, body | fields).json()["choices"][0]
            before = served.llm.stats().generated_tokens
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(15)
                connection.connect(("127.0.0.1", served.port))
                data = json.dumps(body | fields | {"stream": True}).encode()
                request = raw_post(path, data)
                connection.sendall(request.replace(b"Content-T", b"Connection: close\r\nContent-T"))
                while served.llm.stats().generated_tokens < before + 230:
                    time.sleep(0.01)
                served.wait_for_rest()
                events = events_of(read_all(connection))
            assert text_of(events) == text_of_choice(whole)
            longest = max(len(str(event)) for event in events)
            assert longest > 20_000  # of some 2,000 for each token
    finally:
        served.close()


def test_streams_without_the_servers_own_connection(model_dir: Path) -> None:
    """As an application of another ASGI server."""

    async def main() -> None:
        llm = make_llm(model_dir)
        async with AsyncLLM(llm) as engine:
            app = build_app(engine, ServerConfig(served_model_name="tiny"))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                for path, fields in ASKED.items():
                    body = {"model": "tiny", "temperature": 0, "max_tokens": 20} | fields
                    whole = (await http.post(path, json=body)).json()["choices"][0]
                    reply = await http.post(path, json=body | {"stream": True})
                    assert text_of(events_of(reply.content)) == text_of_choice(whole)

    asyncio.run(main())


def test_a_whole_answer_is_read_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader is woken at the end alone. With several completions, at each one's end."""
    rings: list[Bell] = []
    ring = Bell.ring
    monkeypatch.setattr(Bell, "ring", lambda bell: (rings.append(bell), ring(bell))[1])
    served = Served(make_llm(model_dir))
    try:
        body = {"model": "tiny", "max_tokens": 50, "ignore_eos": True, "temperature": 1, "n": 3}
        for path, fields in ASKED.items():
            rings.clear()
            reply = served.post(path, body | fields).json()
            assert reply["usage"]["completion_tokens"] == 150 and len(rings) == 3
    finally:
        served.close()


def test_a_whole_stream_has_all_in_one_piece(model_dir: Path) -> None:
    async def main(llm: LLM) -> None:
        async with AsyncLLM(llm) as engine:
            stream = engine.generate("abc", greedy(60))
            stream.is_whole = True
            outputs = [output async for output in stream]
            assert len(outputs) == 1 and len(outputs[0].outputs[0].token_ids) == 60

    asyncio.run(main(make_llm(model_dir)))
