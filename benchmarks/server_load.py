r"""Load at `trtspec serve`: tokens/s, time to first token and time between tokens, by concurrency.

    python benchmarks/server_load.py --concurrency 1,8,32,64 \
        --server "none" --server "eagle3 --max-draft-len 3"

Each `--server` is the value of `--speculative`, with more options of `trtspec serve`. Servers run
one after another, each with processes of its own. Chat prompts of the package are answered greedily
and streamed, so many at a time; the next is sent when one is done. Clients are processes too, which
begin together and read plain sockets. The last columns say how much of a core the engine's process,
that of HTTP and the busiest client took. Near 100 % that one is the limit; if it is a client, the
figures are its own. Graphs and kernels are those that were captured or compiled meanwhile: requests
waited for them. A first round that is not counted warms the server. Prompts are few and come again,
so the prefix cache is off. With `--cold` the first round counts: what was not compiled before the
server was ready then shows in the 99th percentile to the first token. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

EVENT = b"data: "
MOST_CLIENTS = 8
TRITON_CACHE = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
"""Has a directory for each kernel that was compiled."""


@dataclass
class Times:
    """Of one client's requests, in seconds."""

    first: list[float] = field(default_factory=list)  # from sending to the first text
    gaps: list[float] = field(default_factory=list)  # between pieces of text
    per_token: list[float] = field(default_factory=list)  # of a request, after its first text
    num_tokens: int = 0

    def add(self, other: dict[str, Any]) -> None:
        for name in ("first", "gaps", "per_token"):
            getattr(self, name).extend(other[name])
        self.num_tokens += other["num_tokens"]


def main() -> None:
    args = _arguments()
    if args.client:
        print(json.dumps(asyncio.run(client(args)).__dict__))
        return
    counts = [int(n) for n in args.concurrency.split(",")]
    head = (
        "| drafting | at a time | tokens/s | TTFT p50 / p99 | per token p50 | gap p50 / p99 | AL "
        "| graphs, kernels | engine | HTTP | client |"
    )
    print(head + "\n|" + "---|" * 11, flush=True)
    for options in args.server:
        with served(args, options, max(counts)) as server:
            if not args.cold:
                load(args, server, max(counts), max(counts))
            for count in counts:
                before = counts_of(server.port)
                found = load(args, server, count, max(count * args.rounds, 16))
                after = counts_of(server.port)
                print(_row(options, count, found, before, after), flush=True)


class Server(NamedTuple):
    port: int
    processes: dict[str, Any]  # of psutil, by what they do

    def cpu_seconds(self) -> dict[str, float]:
        return {name: sum(p.cpu_times()[:2]) for name, p in self.processes.items()}


@contextmanager
def served(args: argparse.Namespace, options: str, batch: int) -> Iterator[Server]:
    """A server, which ends with the block."""
    import psutil

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "trtspec", "serve", args.model, "--port", str(port)]
    words += ["--served-model-name", "model", "--device", args.device, "--no-block-reuse"]
    words += ["--max-batch-size", str(batch), "--speculative"]
    started, process = time.perf_counter(), subprocess.Popen(words + shlex.split(options))
    try:
        while True:
            try:
                get(port, "/health")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
        print(f"ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        processes = {"engine": psutil.Process(process.pid)}
        for child in processes["engine"].children():
            if any(word.endswith(".http_process") for word in child.cmdline()):
                processes["HTTP"] = child
        yield Server(port, processes)
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return str(answer.read().decode())


class Counts(NamedTuple):
    """Since the server's start."""

    steps: float  # that verified drafts
    accepted: float
    graphs: float  # that were captured
    kernels: float  # that Triton compiled, on this machine


def counts_of(port: int) -> Counts:
    found = {
        "vllm:spec_decode_num_drafts_total": 0.0,
        "vllm:spec_decode_num_accepted_tokens_total": 0.0,
        "trtspec:cuda_graphs": 0.0,
    }
    for line in get(port, "/metrics").splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in found:
            found[name] += float(line.rsplit(" ", 1)[1])
    return Counts(*found.values(), sum(1 for _ in TRITON_CACHE.glob("*")))


class Found(NamedTuple):
    """What a load found."""

    seconds: float
    times: Times
    shares: dict[str, float]  # of a core, by process


def load(args: argparse.Namespace, server: Server, concurrency: int, requests: int) -> Found:
    """Sends the requests from several processes, which begin together."""
    clients = min(MOST_CLIENTS, concurrency)
    words = [sys.executable, __file__, "--client", str(server.port)]
    words += ["--max-tokens", str(args.max_tokens)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = []
    for number in range(clients):
        share = [(n + number) // clients for n in (concurrency, requests)]
        of_client = ["--concurrency", str(share[0]), "--requests", str(share[1])]
        of_client += ["--seed", str(number)]
        running.append(subprocess.Popen(words + of_client, **pipes))
    for process in running:
        process.stdout.readline()  # it is ready
    before = server.cpu_seconds()
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    times, spans, busiest = Times(), [], 0.0
    for process in running:
        out = json.loads(process.communicate()[0])
        spans.append(out.pop("span"))
        busiest = max(busiest, out.pop("cpu_seconds"))
        times.add(out)
    after = server.cpu_seconds()
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    shares = {name: (after[name] - before[name]) / seconds for name in after}
    return Found(seconds, times, shares | {"client": busiest / seconds})


@dataclass
class ClientTimes(Times):
    span: tuple[float, float] = (0.0, 0.0)  # wall clock: first request, last answer
    cpu_seconds: float = 0.0


async def client(args: argparse.Namespace) -> ClientTimes:
    from trtspec.data.prompts import OPEN, REPEATS

    prompts = [str(prompt) for prompt in (*OPEN, *REPEATS)]
    times, left = ClientTimes(), list(range(args.requests))
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu = time.time(), time.process_time()

    async def send_in_turn() -> None:
        while left:
            text = prompts[(7 * left.pop() + args.seed) % len(prompts)]
            await _one(args, text, times)

    await asyncio.gather(*(send_in_turn() for _ in range(int(args.concurrency))))
    times.span, times.cpu_seconds = (started, time.time()), time.process_time() - cpu
    return times


async def _one(args: argparse.Namespace, text: str, times: Times) -> None:
    body = json.dumps(
        {
            "model": "model",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", args.client)
    sent = time.perf_counter()
    writer.write(head.encode() + body)
    arrivals, num_tokens = [], 0
    async for line in reader:
        if not line.startswith(EVENT) or line.startswith(b"data: [DONE]"):
            continue
        if b'"content":"' in line and b'"content":""' not in line:
            arrivals.append(time.perf_counter())
        elif b'"completion_tokens"' in line:
            num_tokens = json.loads(line[len(EVENT) :])["usage"]["completion_tokens"]
    writer.close()
    assert arrivals and num_tokens, line
    times.first.append(arrivals[0] - sent)
    times.gaps += [after - before for before, after in pairwise(arrivals)]
    times.per_token.append((arrivals[-1] - arrivals[0]) / max(1, num_tokens - 1))
    times.num_tokens += num_tokens


def _row(
    options: str,
    count: int,
    found: Found,
    before: Counts,
    after: Counts,
) -> str:
    times = found.times
    steps, accepted, graphs, kernels = (b - a for a, b in zip(before, after, strict=True))
    length = f"{1 + accepted / steps:.2f}" if steps else "-"
    first, gaps, each = ([1000 * t for t in v] for v in (times.first, times.gaps, times.per_token))
    return (
        f"| {options} | {count} | {times.num_tokens / found.seconds:,.0f} "
        f"| {_at(first, 50):.1f} / {_at(first, 99):.1f} ms | {statistics.median(each):.2f} ms "
        f"| {_at(gaps, 50):.2f} / {_at(gaps, 99):.2f} ms | {length} "
        f"| {graphs:.0f}, {kernels:.0f} | "
        + " | ".join(_percent(found.shares.get(name)) for name in ("engine", "HTTP", "client"))
        + " |"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _at(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--server", action="append", default=None, help="may be repeated")
    parser.add_argument("--cold", action="store_true", help="count the first round, too")
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--requests", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.server = args.server or ["none", "eagle3"]
    return args


if __name__ == "__main__":
    main()
