r"""What the server costs: the same requests through `LLM`, `AsyncLLM` and the server.

    python benchmarks/server_overhead.py --model smollm2-135m --max-tokens 64
    python benchmarks/server_overhead.py --model tiny --max-tokens 128 --interval 0.0005

`--batch` requests run at a time, and each way decodes all of them `--repeat` times, in turns. The
server's client is a process of its own; the server shares one with the engine. The best run of each
way counts, its wall time and this process's CPU time, which other processes disturb less. `tiny` is
a model that costs nearly nothing, so that the host's work is all there is.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "abc {} the sky is"
WAYS = ("LLM", "AsyncLLM", "server", "server, streamed")


def main() -> None:
    args = _arguments()
    if args.client:
        print(json.dumps(asyncio.run(client(args))))
        return
    from trtspec import LLM, AsyncLLM, NGramDecodingConfig
    from trtspec.serving.config import ServerConfig
    from trtspec.serving.run import Server, listen

    sys.setswitchinterval(args.interval)
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny(Path(folder)) if args.model == "tiny" else args.model
        drafter = NGramDecodingConfig(max_draft_len=3) if args.ngram else None
        llm = LLM(model, drafter, device=args.device, max_batch_size=args.batch, max_seq_len=1024)
        engine, config = AsyncLLM(llm), ServerConfig(port=0, served_model_name="model")
        listener, started = listen(config), threading.Event()
        server = Server(engine, config, started.set)
        # Its event loop runs in this thread's stead.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        started.wait()
        loop = server.loop
        ways: dict[str, Callable[[], float]] = {
            "LLM": lambda: of_llm(llm, args),
            "AsyncLLM": lambda: asyncio.run_coroutine_threadsafe(
                of_async(engine, args), loop
            ).result(),
            "server": lambda: of_server(args, config, listener.getsockname()[1], False),
            "server, streamed": lambda: of_server(args, config, listener.getsockname()[1], True),
        }
        walls: dict[str, list[float]] = {way: [] for way in WAYS}
        cpus: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            ways[way]()  # once to warm up
        for _ in range(args.repeat):
            for way in WAYS:
                before = time.process_time()
                walls[way].append(ways[way]())
                cpus[way].append(time.process_time() - before)
        server.should_exit = True
        thread.join()
    num_tokens = args.requests * args.max_tokens
    print(f"{args.requests} requests of {args.max_tokens} tokens, {args.batch} at a time")
    for name, values in (("wall", walls), ("CPU", cpus)):
        report(args, name, {way: min(values[way]) for way in WAYS}, num_tokens)


def report(args: argparse.Namespace, name: str, seconds: dict[str, float], num_tokens: int) -> None:
    plain = seconds["LLM"]
    for way, value in seconds.items():
        more = value - plain
        print(
            f"{name:4} {way:16} {value:8.3f} s {more / plain:+7.1%} "
            f"{1e6 * more / num_tokens:+8.1f} us a token {1e3 * more / args.requests:+7.2f} ms a "
            "request"
        )


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


def of_server(args: argparse.Namespace, config: Any, port: int, is_streamed: bool) -> float:
    words = [sys.executable, __file__, "--client", str(port), "--requests", str(args.requests)]
    words += ["--max-tokens", str(args.max_tokens), *(["--stream"] if is_streamed else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


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
    await post("/reset_prefix_cache", {})
    started = time.perf_counter()
    await asyncio.gather(
        *(post("/v1/completions", body | {"prompt": prompt}) for prompt in _prompts(args))
    )
    return {"seconds": time.perf_counter() - started}


def _tiny(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from guided import save_tokenizer
    from tiny import tiny_model_dir

    path = tiny_model_dir(folder, max_position_embeddings=1024)
    save_tokenizer(path)
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ngram", action="store_true", help="draft by n-grams, K = 3")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--interval", type=float, default=0.005, help="of Python's thread switches")
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
