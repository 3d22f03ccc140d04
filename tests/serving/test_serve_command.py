"""`trtspec serve` as a process: how it starts, how it ends, and what it refuses."""

from __future__ import annotations

import builtins
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from served import Served, make_llm, served_model_dir

from trtspec.cli import main
from trtspec.cli.options import EngineOptions
from trtspec.cli.serve import default_batch_size
from trtspec.errors import ConfigError
from trtspec.serving.config import ServerConfig

LONG = {"model": "tiny", "prompt": "abc", "max_tokens": 250, "ignore_eos": True, "temperature": 0}
# So many choices that they take seconds.
SECONDS_LONG = LONG | {"prompt": ["abc"] * 20, "stream": True, "n": 16, "temperature": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


@contextmanager
def served(model_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and its URL."""
    command = [sys.executable, "-m", "trtspec", "serve", str(model_dir), "--port", "0"]
    command += ["--device", "cpu", "--dtype", "float32", "--served-model-name", "tiny"]
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"Serving tiny at (http://\S+)", line):
                    break
            else:
                raise AssertionError("it did not start")
            yield process, found[1]
        finally:
            process.kill()


def test_more_requests_at_a_time_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_batch_size("cpu") == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_batch_size("auto") == 64


@pytest.mark.parametrize(("given", "expected"), [([], "1"), (["--prefill-batch-size", "4"], "4")])
def test_prompts_start_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: str
) -> None:
    seen: list[EngineOptions] = []

    def refuse(options: EngineOptions, *_: Any, **__: Any) -> None:
        seen.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr("trtspec.cli.serve.load_llm", refuse)
    assert main(["serve", str(model_dir), "--port", "0", *given]) == 2
    assert [options.prefill_batch_size for options in seen] == [expected]


@contextmanager
def running_lines(url: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Yields the lines of a stream that has begun: the request runs, or has run."""
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.slow
def test_signals(model_dir: Path) -> None:
    """The first lets requests finish; with none left it ends with code 0. The second ends all."""
    with (
        served(model_dir, "--speculative", "ngram", "--max-batch-size", "3") as (process, url),
        served(model_dir) as (other, other_url),
    ):
        sizes = [httpx.get(one + "/live").json()["max_running"] for one in (url, other_url)]
        assert sizes == [3, 8]
        assert httpx.get(url + "/live").json()["speed"] is None  # nothing ran yet
        httpx.post(url + "/v1/completions", json=LONG | {"max_tokens": 60}, timeout=30)
        speed = httpx.get(url + "/live").json()["speed"]
        assert speed["plain_seconds"] > 0 and speed["speed_up"] > 0
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        with running_lines(url, LONG | counted) as lines:
            process.send_signal(signal.SIGINT)
            *_, usage, end = lines
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 250
        assert end == "data: [DONE]"
        assert process.wait(30) == 0
        assert process.stdout is not None and process.stdout.read() == ""
        with (
            running_lines(other_url, SECONDS_LONG) as lines,
            pytest.raises(httpx.TransportError),
        ):
            for _ in range(100):  # two that come together count as one
                other.send_signal(signal.SIGTERM)
                time.sleep(0.05)
                if other.poll() is not None:
                    break
            list(lines)
        assert other.wait(30) == 128 + signal.SIGTERM


def wait_until_gone(process: psutil.Process) -> None:
    end = time.monotonic() + 10
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the process is left"
        time.sleep(0.05)


@pytest.mark.slow
def test_each_process_ends_with_the_other(model_dir: Path) -> None:
    """And says why: to the terminal, or to its clients."""
    with served(model_dir) as (process, url), served(model_dir) as (other, other_url):
        (http,) = psutil.Process(process.pid).children()
        assert "trtspec.serving.http_process" in http.cmdline()
        figures = httpx.get(url + "/metrics").text
        assert re.search(r"^trtspec_http_process_resident_memory_bytes \d", figures, re.M)
        http.kill()
        assert process.wait(15) == 1
        assert process.stderr is not None
        assert "HTTP ended by itself, with exit code -9" in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        (http,) = psutil.Process(other.pid).children()
        with running_lines(other_url, SECONDS_LONG) as lines:
            other.kill()
            rest = list(lines)
        assert "The engine's process is gone." in rest[-2] and rest[-1] == "data: [DONE]"
        wait_until_gone(http)
        with pytest.raises(httpx.ConnectError):
            httpx.get(other_url)


@pytest.mark.slow
def test_a_process_without_a_model_leaves_none(tmp_path: Path) -> None:
    """It ended while that of HTTP was starting."""
    command = [sys.executable, "-m", "trtspec", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(60) == 2 and process.stderr is not None
        process.stderr.read()  # to its end: no other process has it open


def test_a_request_that_outlasts_the_timeout_is_told(model_dir: Path) -> None:
    server = Served(make_llm(model_dir, max_batch_size=1), shutdown_timeout=0.01)
    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(4)]
        while server.engine.num_live < 4:
            time.sleep(0.01)
        server.close()
        last = [reply.result(30) for reply in replies]
    assert 503 in [reply.status_code for reply in last]
    assert all("the server ends" in r.text for r in last if r.status_code == 503)


def test_the_name_in_requests_is_the_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str | None] = []

    def refuse(config: ServerConfig) -> None:
        names.append(config.served_model_name)
        raise ConfigError("enough")

    monkeypatch.setattr("trtspec.serving.run.listen", refuse)
    monkeypatch.chdir(tmp_path)
    for model in (".", "a/b/", "smollm2-135m"):
        assert main(["serve", model]) == 2
    assert names == [tmp_path.name, "b", "smollm2-135m"]


def test_what_is_refused_before_a_model_is_loaded(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model_dir), "--port", port]) == 2
        assert "choose another --port" in capsys.readouterr().err
    for options, message in (
        (["--port", "70000"], "ServerConfig.port=70000"),
        (["--api-key", " "], "The API key must be"),
        (["--api-key", ""], "The API key is empty. Give one, or leave it out"),
        (["--host", "300.1.1.1"], "choose another"),
        (["--host", ""], "ServerConfig.host='': it must be an address of this machine"),
        (["--host", " "], "ServerConfig.host=' '"),
        (["--served-model-name", ""], "--served-model-name is empty: give the name"),
    ):
        assert main(["serve", str(model_dir / "none"), *options]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    none = ["serve", str(model_dir / "none"), "--port", "0"]
    monkeypatch.setenv("TRTSPEC_API_KEY", "")
    for options, is_refused in (([], True), (["--api-key", "secret"], False)):
        assert main([*none, *options]) == 2
        said = "TRTSPEC_API_KEY is empty: set it" in " ".join(capsys.readouterr().err.split())
        assert said == is_refused
    monkeypatch.delenv("TRTSPEC_API_KEY")
    original = builtins.__import__

    def without_fastapi(name: str, *arguments: Any) -> Any:
        if name == "fastapi":
            raise ImportError("No module named 'fastapi'", name="fastapi")
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_fastapi)
    assert main(["serve", str(model_dir)]) == 2
    assert "trtspec serve needs fastapi: pip install 'trtspec[serve]'" in capsys.readouterr().err
