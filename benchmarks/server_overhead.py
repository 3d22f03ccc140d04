r"""What the server costs: the same requests through `LLM`, `AsyncLLM` and servers.

    python benchmarks/server_overhead.py --model smollm2-135m --max-tokens 64
    python benchmarks/server_overhead.py --model smollm2-135m --batch 32 --max-tokens 512 \
        --step-ms 1.6 --ngram --interval 0.0005

`--batch` requests run at a time, and each way decodes all of them `--repeat` times, in turns. The
clients' process is one of its own. `two` is what `trtspec serve` is: HTTP has a process, too. `one`
has the event loop in a thread of the engine's process. The best run of each way counts: its wall
time, and the CPU time of the engine's process, of the loop's thread in it, and of the process of
HTTP, which other processes disturb less. `--step-ms` waits so long in place of each step of the
model, as for a GPU, and takes tokens of a text at random: 1, or with `--ngram` 1 to 4. The host's
work is then all there is. `tiny` is a model that costs little. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

PROMPT = "abc {} the sky is"
TEXT = "A text of some words, and of 12 numbers: it is what a step takes its tokens from. " * 4
KINDS = {"whole": (), "streamed": ("--stream",), "chat, streamed": ("--stream", "--chat")}
WAYS = ("LLM", "AsyncLLM", *(f"{kind}, {n}" for kind in KINDS for n in ("one", "two")))


def main() -> None:
    args = _arguments()
    if args.client:
        print(json.dumps(asyncio.run(client(args))))
        return
    import psutil

    from trtspec import LLM, AsyncLLM, EagleDecodingConfig, NGramDecodingConfig
    from trtspec.async_llm import facts_of
    from trtspec.serving.channel import Settings
    from trtspec.serving.config import ServerConfig
    from trtspec.serving.engine_host import EngineHost
    from trtspec.serving.observe import EngineObservation
    from trtspec.serving.processes import HttpProcess
    from trtspec.serving.run import Server, listen

    sys.setswitchinterval(args.interval)
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny(Path(folder)) if args.model == "tiny" else args.model
        drafter: Any = NGramDecodingConfig(max_draft_len=3) if args.ngram else None
        if args.head:
            drafter = EagleDecodingConfig(max_draft_len=3, speculative_model=args.head)
        llm = LLM(model, drafter, device=args.device, max_batch_size=args.batch, max_seq_len=1024)
        if args.step_ms is not None:
            replace_steps(llm, args.step_ms / 1000, args.waits)
        engine, config = AsyncLLM(llm), ServerConfig(port=0, served_model_name="model")
        listener, started = listen(config), threading.Event()
        server = Server(engine, config, started.set)
        # Its event loop runs in this thread's stead.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        started.wait()
        loop, other = server.loop, listen(config)
        http, is_ready = HttpProcess(other), threading.Event()
        host = EngineHost(llm, EngineObservation(llm, "model", {}), http.connection, is_ready.set)
        host.send(Settings(config, facts_of(llm), 1024))
        threading.Thread(target=host.run, daemon=True).start()
        is_ready.wait()
        ports = {"one": listener.getsockname()[1], "two": other.getsockname()[1]}
        ways: dict[str, Callable[[], float]] = {
            "LLM": lambda: of_llm(llm, args),
            "AsyncLLM": lambda: asyncio.run_coroutine_threadsafe(
                of_async(engine, args), loop
            ).result(),
        }
        for kind, words in KINDS.items():
            for number, port in ports.items():
                ways[f"{kind}, {number}"] = partial(of_server, args, port, *words)
        http_process = psutil.Process(http.pid)
        clocks = {
            "wall": time.perf_counter,
            "engine": time.process_time,
            "loop": partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident)),
            "HTTP": lambda: sum(http_process.cpu_times()[:2]),
        }
        seconds: dict[str, dict[str, list[float]]] = {
            name: {way: [] for way in WAYS} for name in clocks
        }
        for way in WAYS:
            ways[way]()  # once to warm up
        for _ in range(args.repeat):
            for way in WAYS:
                before = {name: clock() for name, clock in clocks.items()}
                wall = ways[way]()
                for name, clock in clocks.items():
                    seconds[name][way].append(clock() - before[name])
                seconds["wall"][way][-1] = wall  # a client starts before it
        with http:
            server.should_exit = True
            thread.join()
    print(f"{args.requests} requests of {args.max_tokens} tokens, {args.batch} at a time")
    print(f"{args.requests * args.max_tokens / args.num_events:.2f} tokens an event, at the end")
    for name in clocks:
        report(args, name, {way: min(seconds[name][way]) for way in WAYS})


def report(args: argparse.Namespace, name: str, seconds: dict[str, float]) -> None:
    """Prints what each way takes, and what it takes more than `LLM`."""
    plain, num_tokens = seconds["LLM"], args.requests * args.max_tokens
    for way, value in seconds.items():
        more = value - plain
        print(
            f"{name:6} {way:19} {value:8.3f} s {1e6 * value / num_tokens:8.1f} us a token, "
            f"{1e6 * more / num_tokens:+8.1f} more: {1e3 * more / args.requests:+7.2f} ms a request"
        )


def replace_steps(llm: Any, seconds: float, waits: int) -> None:
    """Waits in place of the model's steps, and takes tokens of a text."""
    import torch

    from trtspec.executor.device_step import PartialLaunch
    from trtspec.executor.forward_step import StepOutputs

    runner, most = llm.executor.runner, llm.executor.max_draft_len
    known = torch.tensor(llm.tokenizer.encode(TEXT), dtype=torch.int32)

    def run(plan: Any) -> PartialLaunch:
        for _ in range(waits):
            time.sleep(seconds / waits)
        contexts, generations = len(plan.batch.contexts), len(plan.batch.generations)
        lens = torch.ones(contexts + generations, dtype=torch.int32)
        lens[contexts:] = torch.randint(1, plan.num_drafts + 2, [generations])
        outputs = StepOutputs(
            new_tokens=known[torch.randint(len(known), [len(lens), most + 1])],
            new_tokens_lens=lens,
            bad_requests=torch.zeros(len(lens), dtype=torch.bool),
        )
        return PartialLaunch(outputs)

    runner.run, runner.is_replay = run, False
    runner.num_drafts_to_verify = lambda *_: most


def _prompts(args: argparse.Namespace) -> list[str]:
    return [PROMPT.format(i) for i in range(args.requests)]


def of_llm(llm: Any, args: argparse.Namespace) -> float:
    from trtspec import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    started = time.perf_counter()
    llm.generate(_prompts(args), params)
    return time.perf_counter() - started


async def of_async(engine: Any, args: argparse.Namespace) -> float:
    from trtspec import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    await engine.reset_prefix_cache()

    async def one(prompt: str) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    started = time.perf_counter()
    await asyncio.gather(*map(one, _prompts(args)))
    return time.perf_counter() - started


def of_server(args: argparse.Namespace, port: int, *more: str) -> float:
    words = [sys.executable, __file__, "--client", str(port), "--requests", str(args.requests)]
    words += ["--max-tokens", str(args.max_tokens), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    args.num_events = found["events"]
    return float(found["seconds"])


async def client(args: argparse.Namespace) -> dict[str, Any]:
    """Sends all requests at once, over plain sockets; returns when the last answer is complete."""
    host = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close"

    async def post(path: str, body: Any) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", args.client)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{host}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        reply = await reader.read()
        writer.close()
        assert reply.startswith(b"HTTP/1.1 200"), reply[:500]
        return reply

    body = {
        "model": "model",
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": args.stream,
    }

    def ask(prompt: str) -> Awaitable[bytes]:
        if not args.chat:
            return post("/v1/completions", body | {"prompt": prompt})
        messages = [{"role": "user", "content": prompt}]
        return post("/v1/chat/completions", body | {"messages": messages})

    await post("/reset_prefix_cache", {})
    started = time.perf_counter()
    replies = await asyncio.gather(*map(ask, _prompts(args)))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "events": sum(reply.count(b"data: ") for reply in replies)}


def _tiny(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from guided import save_tokenizer
    from tiny import tiny_model_dir

    path = tiny_model_dir(folder, max_position_embeddings=1024)
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ngram", action="store_true", help="draft by n-grams, K = 3")
    parser.add_argument("--head", help="draft with this EAGLE-3 head, K = 3")
    parser.add_argument("--step-ms", type=float, default=None, help="wait in place of each step")
    parser.add_argument("--waits", type=int, default=1, help="in so many parts")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=None, help="as many as --batch")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--interval", type=float, default=0.005, help="of Python's thread switches")
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--chat", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.requests = args.batch if args.requests is None else args.requests
    return args


if __name__ == "__main__":
    main()
