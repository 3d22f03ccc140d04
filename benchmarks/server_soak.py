r"""Many requests of all kinds at a server, with a cache so small that some are preempted.

    python benchmarks/server_soak.py --requests 10000

Answers must be those of `LLM`, or a clear error. Afterwards no block, slot or place in the queue
may be held, and memory must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

KINDS = {
    "whole": 30,
    "streamed": 30,
    "sampled, n = 2": 8,
    "grammar": 8,
    "leaves while streaming": 10,
    "leaves at once": 6,
    "bad input": 8,
}
BAD: list[tuple[Any, int]] = [
    (b"{", 400),
    (b"\xff\xfe", 400),
    ({"max_tokens": -1}, 400),
    ({"nonsense": 1}, 400),
    ({"prompt": "ab" * 400}, 400),
    ({"model": "other"}, 404),
    ({"guided_regex": "(("}, 400),
    ({"temperature": "x"}, 400),
    ({"prompt": [1, 2, 5000]}, 400),
]
PATTERN = "(ab|zz){2,5}"


def main() -> None:
    args = _arguments()
    from served import PROMPTS, Served, greedy, make_llm, served_model_dir

    from trtspec import KvCacheConfig, SamplingParams

    prompts = [text + "ab" * i for text in PROMPTS for i in range(5)]
    lengths = [5, 20, 60, 100]
    with tempfile.TemporaryDirectory() as folder:
        path = served_model_dir(Path(folder))
        with make_llm(path) as llm:
            texts = {
                (prompt, length): output.outputs[0].text
                for length in lengths
                for prompt, output in zip(
                    prompts, llm.generate(prompts, greedy(length)), strict=True
                )
            }
            params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2, ignore_eos=True)
            sampled = {
                prompt: [c.text for c in output.outputs]
                for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True)
            }
        cache = KvCacheConfig(max_tokens=256, tokens_per_block=8)
        served = Served(make_llm(path, kv_cache_config=cache), queue=16)
        soak = Soak(args, served, texts, sampled)
        started = time.perf_counter()
        asyncio.run(soak.run())
        seconds = time.perf_counter() - started
        served.wait_for_rest()
        stats = served.llm.stats()
        served.llm.executor.kv_cache.check_integrity()
        threads = threading.active_count()
        served.close()
    print(f"{args.requests} requests in {seconds:.0f} s: {dict(soak.outcomes)}")
    print(f"{stats.generated_tokens} tokens, {stats.num_preemptions} preemptions")
    print(f"{threads} threads at the end")
    print("resident MiB at 20, 40, … 100 %:", *soak.memory)
    for problem in soak.problems[:10]:
        print("WRONG", problem)
    if soak.problems or not stats.num_preemptions:
        sys.exit("failed")


class Soak:
    """The clients, and what went wrong."""

    def __init__(
        self,
        args: argparse.Namespace,
        served: Any,
        texts: dict[tuple[str, int], str],
        sampled: dict[str, list[str]],
    ):
        self.args, self.served, self.texts, self.sampled = args, served, texts, sampled
        self.random = random.Random(args.seed)
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.memory: list[int] = []
        self.num_done = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.served.url, timeout=120, limits=limits
        ) as self.client:
            numbers = iter(range(self.args.requests))
            await asyncio.gather(*(self._worker(numbers) for _ in range(self.args.clients)))

    async def _worker(self, numbers: Any) -> None:
        for _ in numbers:
            kinds = self.args.kinds.split("; ")
            kind = self.random.choices(kinds, [KINDS[kind] for kind in kinds])[0]
            try:
                while not await self._one(kind):
                    self.outcomes["status 429, sent again"] += 1
                    await asyncio.sleep(0.1)
            except Exception as error:  # noqa: BLE001 - it is a finding
                self.problems.append(f"{kind}: {type(error).__name__}: {error}")
            self.num_done += 1
            if self.num_done % max(1, self.args.requests // 5) == 0:
                self.memory.append(resident_mib())

    async def _one(self, kind: str) -> bool:
        """Sends a request. Returns False if the queue was full."""
        prompt, length = self.random.choice(list(self.texts))
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
        }
        want: Any = self.texts[prompt, length]
        if kind == "bad input":
            await self._bad(body)
            return True
        if kind == "leaves at once":
            _, writer = await asyncio.open_connection("127.0.0.1", self.served.port)
            data = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data[: self.random.choice([5, len(data)])])
            await writer.drain()
            await asyncio.sleep(self.random.choice([0, 0.01, 0.05]))
            writer.transport.abort()
            self.outcomes[kind] += 1
            return True
        if kind == "sampled, n = 2":
            body |= {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 20}
            want = self.sampled[prompt]
        if kind == "grammar":
            body |= {"guided_regex": PATTERN, "ignore_eos": False, "max_tokens": 60}
        if kind in ("streamed", "leaves while streaming"):
            return await self._stream(kind, body, want)
        reply = await self.client.post("/v1/completions", json=body)
        if reply.status_code == 429:
            return False
        assert reply.status_code == 200, reply.text
        texts = [choice["text"] for choice in reply.json()["choices"]]
        if kind == "grammar":
            assert re.fullmatch(PATTERN, texts[0]), texts
        else:
            assert texts == (want if isinstance(want, list) else [want]), (texts, want)
        self.outcomes[kind] += 1
        return True

    async def _bad(self, body: dict[str, Any]) -> None:
        fields, status = self.random.choice(BAD)
        data = fields if isinstance(fields, bytes) else json.dumps(body | fields).encode()
        headers = {"content-type": "application/json"}
        reply = await self.client.post("/v1/completions", content=data, headers=headers)
        assert reply.status_code in (status, 429) and reply.json()["error"]["message"], reply.text
        self.outcomes["bad input"] += 1

    async def _stream(self, kind: str, body: dict[str, Any], want: str) -> bool:
        text, count, leaves_at = "", 0, self.random.randrange(1, 6)
        async with self.client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as reply:
            if reply.status_code == 429:
                return False
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["text"]
                count += 1
                if kind != "streamed" and count >= leaves_at:
                    self.outcomes[kind] += 1
                    return True
        assert text == want, (text, want)
        self.outcomes[kind] += 1
        return True


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 2**20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kinds", default="; ".join(KINDS), help="only these")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
