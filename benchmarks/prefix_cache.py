r"""What the prefix cache saves, and what it costs.

    python benchmarks/prefix_cache.py                      # all three, on CPU
    python benchmarks/prefix_cache.py --parts again,conversations --preset llama-3.1-8b \
        --device cuda --dtype bfloat16      # on a GPU; with --conversations 64 in a third of it

again           a prompt of 4,000 tokens, then the same one: time to first token
cost            the host's work alone: keys of a prompt, a lookup, publishing in a decode step of
                `--batch` requests with `--context` tokens each
conversations   `--conversations` of `--turns` turns that share a system prompt, `--users` at a
                time, with the cache and without: hit rate, tokens per second, time to first token
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_models import PRESETS, Model, in_memory

from trtspec import LLM, KvCacheConfig, SamplingParams
from trtspec.executor.request import Request, RequestState
from trtspec.executor.scheduler import Scheduler
from trtspec.state.kv_cache import KVCacheManager, KVGroupSpec, PrefixReuse
from trtspec.state.prefix_search import PrefixQuery

PARTS = ("again", "cost", "conversations")
SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def main() -> None:
    args = _arguments()
    _print({"threads": torch.get_num_threads(), "device": args.device})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "target")
        config = SMALL if args.preset == "small" else PRESETS[args.preset]
        target = Model(config, num_positions=max(args.prompt, 2048) + 64).target()
        with in_memory({model: target}, torch.device(args.device)):
            if "again" in args.parts:
                _print({"again": again(args, model)})
            if "conversations" in args.parts:
                for reuse in (False, True):
                    _print({"conversations": conversations(args, model, reuse=reuse)})
    if "cost" in args.parts:
        _print({"cost": cost(args)})


def _print(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=1), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument(
        "--preset", default="small", choices=["small", *PRESETS],
        help="shape of the model with random weights; small has 6 layers, 256 wide",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the repeated prompt")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--users", type=int, default=16, help="conversations at the same time")
    parser.add_argument("--system", type=int, default=512, help="tokens of the system prompt")
    parser.add_argument("--asked", type=int, default=48, help="tokens of a question")
    parser.add_argument("--said", type=int, default=32, help="tokens of an answer")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {','.join(unknown)}: a comma list of {', '.join(PARTS)}")
    return args


def _engine(args: argparse.Namespace, model: Any, *, reuse: bool, **options: Any) -> LLM:
    return LLM(
        model, device=args.device, dtype=args.dtype,
        kv_cache_config=KvCacheConfig(
            max_tokens=options.pop("max_tokens"), enable_block_reuse=reuse
        ),
        **options,
    )  # fmt: skip


# -- the same prompt again ---------------------------------------------------------------------
def again(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Returns ms to the first token of new prompts, and of the same ones once more."""
    length = args.prompt + 32
    llm = _engine(
        args, model, reuse=True, max_batch_size=1, max_seq_len=length, max_tokens=16 * length
    )
    first, second = [], []
    for number in range(args.repeat + 1):  # the first one warms up
        prompt = _tokens(random.Random(number), args.prompt, llm)
        times = [_first_token_ms(llm, prompt) for _ in range(2)]
        if number:
            first.append(times[0])
            second.append(times[1])
    return {
        "prompt_tokens": args.prompt,
        "first_ms": statistics.median(first),
        "second_ms": statistics.median(second),
        "share": statistics.median(second) / statistics.median(first),
    }


def _first_token_ms(llm: LLM, prompt: list[int]) -> float:
    started = time.perf_counter()
    llm.executor.enqueue(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    llm.executor.run_until_done()
    return (time.perf_counter() - started) * 1e3


def _tokens(rng: random.Random, count: int, llm: LLM) -> list[int]:
    vocab = llm.executor.target.config.vocab_size
    return [rng.randrange(3, vocab) for _ in range(count)]


# -- the host's work ---------------------------------------------------------------------------
@dataclass
class Text:
    """What the manager is asked about a request."""

    tokens: list[int]

    def between(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


def cost(args: argparse.Namespace) -> dict[str, float]:
    """Returns microseconds of the cache's work: for a prompt, and for a decode step of a batch."""
    page, batch, context = 32, args.batch, args.context
    spec = KVGroupSpec(1, 1, 1, torch.float32)
    blocks = batch * (context // page + 2) + 2
    cache = KVCacheManager(
        [spec, spec], blocks, page, torch.device("cpu"), PrefixReuse(True, True, tokens_ahead=1)
    )
    rng = random.Random(0)
    texts = [Text([rng.randrange(128_000) for _ in range(context)]) for _ in range(batch)]
    chains = []
    keys_us, adopt_us = [], []
    for i, text in enumerate(texts):
        chain = cache.chain()
        keys_us.append(_us(lambda c=chain, t=text: c.extend(t.between, context)))
        hit = cache.find(PrefixQuery(chain, text.between, context - 1))
        adopt_us.append(_us(lambda i=i, c=chain, h=hit: cache.adopt(i, c, h, context)))
        cache.publish(i, chain, context)
        chains.append(chain)
    miss = cache.chain("another tenant")
    miss.extend(texts[0].between, context)
    per_step = _publish_us(cache, texts, chains, context)
    return {
        "batch": batch,
        "context": context,
        "keys_of_a_prompt_us": statistics.median(keys_us),
        "lookup_hit_us": statistics.median(
            _us(lambda c=c, t=t: cache.find(PrefixQuery(c, t.between, context - 1)))
            for c, t in zip(chains, texts, strict=True)
        ),
        "lookup_miss_us": statistics.median(
            _us(lambda: cache.find(PrefixQuery(miss, texts[0].between, context - 1)))
            for _ in range(50)
        ),
        "decode_step_us": statistics.mean(per_step),
        "decode_step_max_us": max(per_step),
    }


def _publish_us(
    cache: KVCacheManager, texts: list[Text], chains: list[Any], context: int
) -> list[float]:
    """Returns the time of each of 16 decode steps, in which every request gets two tokens."""
    scheduler = object.__new__(Scheduler)  # `publish` alone is run
    scheduler.kv_cache = cache
    requests = []
    for i, (text, chain) in enumerate(zip(texts, chains, strict=True)):
        request = Request(i, text.tokens, SamplingParams(), 0, context + 200)
        request.state, request.prefix, request.num_computed = (
            RequestState.GENERATION, chain, context,
        )  # fmt: skip
        cache.reserve(i, context + 32)
        requests.append(request)
    times = []
    for _ in range(16):
        for request in requests:
            request.output_token_ids += [7, 8]
        started = time.perf_counter()
        for request in requests:
            scheduler.prefixes.publish(request)
        times.append((time.perf_counter() - started) * 1e6)
    return times


def _us(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


# -- conversations -----------------------------------------------------------------------------
@dataclass
class Conversation:
    """Turns of one user; the next one follows when the answer is there."""

    text: list[int]
    turns_left: int
    turns_taken: int = 0
    request: Request | None = None
    asked_at: float = 0.0
    waits: list[float] = field(default_factory=list)  # seconds to the first token, by turn


def conversations(args: argparse.Namespace, model: Any, *, reuse: bool) -> dict[str, Any]:
    """Returns what a run with the cache, or without it, measured."""
    longest = args.system + args.turns * (args.asked + args.said) + 8
    llm = _engine(
        args, model, reuse=reuse, max_batch_size=args.users, max_seq_len=longest,
        max_num_tokens=2048, enable_chunked_prefill=True, max_tokens=3 * args.users * longest,
    )  # fmt: skip
    rng = random.Random(1)
    system = _tokens(rng, args.system, llm)
    _talk(
        llm, [Conversation(list(system), 2) for _ in range(2 * args.users)], rng, args
    )  # warms up
    llm.reset_prefix_cache()
    llm.reset_stats()
    talks = [Conversation(list(system), args.turns) for _ in range(args.conversations)]
    started = time.perf_counter()
    _talk(llm, talks, rng, args)
    seconds = time.perf_counter() - started
    stats = llm.stats()
    first = [talk.waits[0] for talk in talks]
    later = [wait for talk in talks for wait in talk.waits[1:]]
    return {
        "reuse": reuse,
        "seconds": seconds,
        "answers_per_second": args.conversations * args.turns / seconds,
        "generated_tokens_per_second": stats.generated_tokens / seconds,
        "hit_rate": stats.prefix_cache.hit_rate,
        "evicted_blocks": stats.prefix_cache.evicted_blocks,
        "first_turn_ms": statistics.median(first) * 1e3,
        "later_turns_ms": statistics.median(later) * 1e3,
        "later_turns_p95_ms": statistics.quantiles(later, n=20)[-1] * 1e3,
    }


def _talk(
    llm: LLM, talks: list[Conversation], rng: random.Random, args: argparse.Namespace
) -> None:
    """Runs conversations to their ends, `--users` at a time."""
    waiting, running = deque(talks), list[Conversation]()
    while waiting or running:
        while waiting and len(running) < args.users:
            running.append(waiting.popleft())
        for talk in running:
            _take_turn(llm, talk, rng, args)
        running = [talk for talk in running if talk.turns_left or talk.request is not None]
        llm.executor.step()
        for talk in running:
            is_first = len(talk.waits) < talk.turns_taken
            if is_first and talk.request is not None and talk.request.output_token_ids:
                talk.waits.append(time.perf_counter() - talk.asked_at)


def _take_turn(llm: LLM, talk: Conversation, rng: random.Random, args: argparse.Namespace) -> None:
    """Reads a finished answer, and asks the next question."""
    if talk.request is not None:
        if not talk.request.is_finished:
            return
        talk.text += talk.request.output_token_ids
        talk.request = None
    if talk.turns_left:
        talk.turns_left, talk.turns_taken = talk.turns_left - 1, talk.turns_taken + 1
        talk.text += _tokens(rng, args.asked, llm)
        talk.asked_at = time.perf_counter()
        params = SamplingParams(max_tokens=args.said, ignore_eos=True)
        talk.request = llm.executor.enqueue(talk.text, params)


if __name__ == "__main__":
    main()
