"""Messages between the engine's process and that of HTTP: none is lost, and none is waited for."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import PROMPTS, Served, greedy, make_llm, served_model_dir

from trtspec import EngineError, RequestError, SamplingParams
from trtspec.api.outputs import Logprob
from trtspec.api.sampling_params import MAX_TOKENS
from trtspec.executor.logprobs import PromptLogprobs
from trtspec.executor.request import Request
from trtspec.frontend.engine_thread import Bell, News
from trtspec.serving import processes
from trtspec.serving.channel import Ask, Settings, Stop, Tokens, Unpacker, packed, receive
from trtspec.serving.config import ServerConfig
from trtspec.serving.engine_host import EngineHost, Sent, SocketPort
from trtspec.serving.processes import HttpProcess
from trtspec.serving.remote_llm import RemoteLLM


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def make_request(number: int, **params: Any) -> Request:
    return Request(number, [1], SamplingParams(**params), seed=0, max_total_tokens=100)


def read_all(connection: socket.socket, unpacker: Unpacker) -> list[Any]:
    """Returns the messages that are there. Of another a part may be."""
    messages: list[Any] = []
    connection.setblocking(False)
    while True:
        try:
            messages += unpacker.feed(connection.recv(1000))
        except BlockingIOError:
            return messages


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_come_as_they_were_sent(size: int) -> None:
    messages = [Ask(1, "live", (3,)), Tokens([(7, [1, 2], None)]), Ask(2, "x" * 300, ())]
    data = b"".join(map(packed, messages))
    unpacker, found = Unpacker(), []
    for start in range(0, len(data), size):
        found += unpacker.feed(data[start : start + size])
    assert found == messages


def test_the_first_message_is_read_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(packed(Ask(1, "a", ())) + packed(Ask(2, "b", ())))
    assert receive(theirs) == Ask(1, "a", ()) and receive(theirs) == Ask(2, "b", ())
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


def test_what_is_sent_of_a_request() -> None:
    """Tokens once each. What else there is at the beginning and at the end."""
    request = make_request(1)
    sent = Sent(request, 5, is_whole=False)
    request.output_token_ids, request.cached_tokens = [7, 8, 9], 4
    key, tokens, details = sent.entry(2, False)
    assert (key, tokens) == (5, [7, 8])
    assert details is not None and details.cached_tokens == 4 and details.end is None
    assert sent.entry(3, False) == (5, [9], None)
    request.finish_reason, request.accepted_lens[2], request.num_draft_tokens = "stop", 1, 3
    _, tokens, details = sent.entry(3, True)
    assert tokens == [] and details is not None and details.end is not None
    assert details.end == ("stop", None, False) and details.counts == ({2: 1}, 3)
    assert details.logprobs is None
    asked = make_request(2, logprobs=1)
    asked.output_token_ids = [1, 2]
    asked.logprobs = [{n: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)} for n in (1, 2)]
    asked.prompt_logprobs = PromptLogprobs()
    sent = Sent(asked, 6, is_whole=True)
    assert sent.announced == 0  # a long answer's would be a message of megabytes
    for i in range(2):
        _, _, details = sent.entry(i + 1, False)
        assert details is not None and details.counts is None
        assert details.logprobs == [[(i + 1, -0.5, 2), (9, -0.25, 1)]]
        assert details.prompt_logprobs is (None if i else asked.prompt_logprobs)
    assert Sent(request, 7, is_whole=True).announced == MAX_TOKENS
    sent = Sent(request, 8, is_whole=False, keep_counts=True)
    for i in range(2):
        _, _, details = sent.entry(i + 1, False)
        assert details is not None and details.counts == ({2: 1}, 3)


def test_a_process_that_does_not_read_holds_up_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The steps go on. It later finds the tokens of all of them, in few messages."""
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    done: list[Sent] = []
    port, request = SocketPort(ours, done.append), make_request(1)
    sent, num_posted = Sent(request, 1, is_whole=False), 0
    for count in range(1, 50_001):
        request.output_token_ids.append(count)
        if port.is_free():
            assert port.post([News(sent, count, False)])
            num_posted += 1
    assert num_posted < 1000 and not done
    assert port.post([News(sent, 50_000, True)]) and done == [sent]
    resting = threading.Thread(target=port.rest)
    resting.start()
    messages, unpacker = [], Unpacker()
    while resting.is_alive():
        messages += read_all(theirs, unpacker)
    messages += read_all(theirs, unpacker)
    resting.join()
    assert [t for m in messages for _, new, _ in m.entries for t in new] == [*range(1, 50_001)]
    assert len(messages) == num_posted + 1
    theirs.close()
    assert not port.post([News(Sent(request, 2, is_whole=False), 3, False)])
    port.rest()


def test_a_stop_is_sent_where_nothing_else_is(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also if the socket does not take it at once: no step and no reply may come after it."""
    ours, theirs = pair
    port = SocketPort(ours, lambda sent: None)
    while port.is_free():
        port.send(Ask(1, "x" * 10_000, ()))
    host: Any = SimpleNamespace(_port=port)
    stopping = threading.Thread(target=EngineHost.stop, args=(host,))
    stopping.start()
    stopping.join(0.2)  # it has sent what the socket takes
    messages, unpacker = list[Any](), Unpacker()
    end = time.monotonic() + 5
    while Stop() not in messages and time.monotonic() < end:
        messages += read_all(theirs, unpacker)
    assert messages[-1] == Stop()
    stopping.join()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


def in_loop(served: Served, work: Any) -> Any:
    """Runs a coroutine in the event loop of HTTP."""
    loop = served.server.loop
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(work, loop).result(30)


def test_a_remote_engine_is_used_as_one_of_this_process(model_dir: Path) -> None:
    served = Served(make_llm(model_dir), queue=0)
    engine = served.engine
    params = [
        greedy(40, stop=["12"]),
        greedy(30, logprobs=2),
        greedy(20, bad_words=["b"]),
        SamplingParams(max_tokens=20, temperature=1.0, seed=6, n=3),
    ]
    with make_llm(model_dir) as llm:
        wanted = [llm.generate(PROMPTS[i], one) for i, one in enumerate(params)]

    async def work() -> None:
        for i, want in enumerate(wanted):
            output = [output async for output in engine.generate(PROMPTS[i], params[i])][-1]
            for found, known in zip(output.outputs, want.outputs, strict=True):
                assert found.text == known.text and found.token_ids == known.token_ids
                assert found.finish_reason == known.finish_reason
                assert list(map(set, found.logprobs or [])) == list(map(set, known.logprobs or []))
            assert output.spec_stats == want.spec_stats
        assert (await engine.stats()).generated_tokens > 100
        for one in (SamplingParams(logit_bias={500: 1.0}), greedy(bad_words=["abcdefghijklmn"])):
            with pytest.raises(RequestError):
                await anext(engine.generate("a", one))
        stream = engine.generate("a", greedy(200))
        first = await anext(stream)
        assert await engine.abort(first.request_id)
        assert [output async for output in stream][-1].outputs[0].finish_reason == "cancelled"
        assert not await engine.abort(first.request_id)

    try:
        in_loop(served, work())
        served.wait_for_rest()
    finally:
        served.close()


async def ask_and_leave(engine: RemoteLLM, params: SamplingParams) -> None:
    """Cancels a task while the engine's process makes its request."""
    task = asyncio.ensure_future(engine.generate("a", params).start())
    while not engine._replies:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_request_that_nobody_waits_for_is_cancelled(model_dir: Path) -> None:
    served = Served(make_llm(model_dir))

    async def work() -> None:
        with served.llm.lock:  # no step before the engine's process has read it all
            await ask_and_leave(served.engine, greedy(200))
            await served.engine.metrics()

    try:
        in_loop(served, work())
        served.wait_for_rest()
        assert served.llm.stats().generated_tokens < 200
    finally:
        served.close()


def test_a_refused_request_that_nobody_waits_for_is_forgotten(model_dir: Path) -> None:
    served = Served(make_llm(model_dir))
    engine = served.engine

    async def work() -> None:
        await ask_and_leave(engine, SamplingParams(logit_bias={500: 1.0}))
        async with asyncio.timeout(10):
            while engine._replies or engine._feeds:
                await asyncio.sleep(0.01)
        assert [output async for output in engine.generate("a", greedy(4))][-1].finished
        assert engine.failure is None

    try:
        in_loop(served, work())
        served.wait_for_rest()
    finally:
        served.close()


def test_one_piece_of_news_is_read_of_all_messages_that_are_there(model_dir: Path) -> None:
    """A loop that is late is woken once for each stream, not once for each step."""
    served = Served(make_llm(model_dir))
    rings = []

    class Counted(Bell):
        def ring(self) -> None:
            rings.append(1)
            super().ring()

    async def late() -> int:
        stream = served.engine.generate("abc", greedy(100))
        stream.bell = Counted()
        await stream.start()
        while served.llm.stats().generated_tokens < 100:
            time.sleep(0.01)  # the event loop does nothing
        while not stream.is_read:
            stream.take()
            await asyncio.sleep(0)
        return len(rings)

    try:
        assert in_loop(served, late()) <= 10  # of 100 steps; messages may come in several reads
    finally:
        served.close()


def test_errors_of_the_engines_process(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(make_llm(model_dir))
    try:
        with pytest.raises(EngineError, match="AssertionError"):
            in_loop(served, served.engine.ask("shutdown"))  # no call that a front may make

        def fails(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a bug")

        served.llm.executor.make_request = fails  # type: ignore[method-assign]
        reply = served.post("/v1/completions", {"model": "tiny", "prompt": "a"})
        assert reply.status_code == 503 and "ZeroDivisionError: a bug" in reply.text
        assert "failed at a message" in caplog.text and served.engine.num_live == 0
    finally:
        served.close()


class FakeHttp:
    """A process of HTTP that ends at once."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.kills = 0

    def wait(self) -> int:
        return 3

    def kill(self) -> None:
        self.kills += 1


def test_the_engines_process_while_it_serves(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads take turns quickly, and all is as before afterwards."""
    seen: list[Any] = []
    http: Any = FakeHttp()

    def run(host: Any) -> None:
        seen.append((sys.getswitchinterval(), signal.getsignal(signal.SIGTERM)))
        seen.append(receive(http.theirs))

    monkeypatch.setattr(processes.EngineHost, "run", run)
    before = sys.getswitchinterval(), signal.getsignal(signal.SIGTERM)
    config = ServerConfig(served_model_name="tiny")
    with pytest.raises(EngineError, match="HTTP ended by itself, with exit code 3"):
        processes.serve(make_llm(model_dir), config, http, 5, lambda: None)
    assert (sys.getswitchinterval(), signal.getsignal(signal.SIGTERM)) == before
    assert seen[0][0] == pytest.approx(processes.SWITCH_SECONDS)
    assert isinstance(seen[1], Settings) and seen[1].config == config
    assert seen[1].max_num_requests_in_queue == 5 and seen[1].facts.max_batch_size == 4
    assert pickle.loads(pickle.dumps(seen[1].facts)) == seen[1].facts


def test_a_signal_before_the_first_message(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP's process reads what is served first, and then that it is to end."""
    http: Any = FakeHttp()
    messages: list[Any] = []

    def collect() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # its thread sends

    monkeypatch.setattr(processes.gc, "collect", collect)
    monkeypatch.setattr(
        processes.EngineHost,
        "run",
        lambda host: messages.extend(receive(http.theirs) for _ in range(2)),
    )
    processes.serve(make_llm(model_dir), ServerConfig(), http, 5, lambda: None)
    assert isinstance(messages[0], Settings) and messages[1] == Stop()


@pytest.mark.slow
def test_files_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be called as modules are, or be another version of this package."""
    (tmp_path / "queue.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, HttpProcess(listener) as http:
        http.connection.shutdown(socket.SHUT_RDWR)
        assert http.wait() == 0


def test_signals_and_a_process_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, ended = threading.Event(), []
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", ended.append)
    host: Any = SimpleNamespace(stop=stopped.set)
    http: Any = FakeHttp()
    ending = processes.Ending(host, http, timeout=0.1)
    ending.on_signal(signal.SIGTERM, None)
    assert stopped.wait(5) and ending.is_asked and not http.kills
    for _ in range(100):
        if http.kills:
            break
        time.sleep(0.02)
    assert http.kills == 1 and not ended
    ending.on_signal(signal.SIGINT, None)
    assert ended == [128 + signal.SIGINT] and http.kills == 2
