"""Requests that share beginnings, and what an engine says and drafts for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trtspec import LLM, EmbedsPrompt, SamplingParams
from trtspec.executor.request import Request

VOCAB = 97
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.5, seed=5)


@dataclass
class Seen:
    """What came of requests, in the order in which they were queued."""

    outputs: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)  # by generation step
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by text so far
    cached: list[int] = field(default_factory=list)


class Watched:
    """Runs requests and notes every draft. Without overlap a slot's drafts follow the text read."""

    def __init__(self, llm: LLM):
        self.llm, self.executor, self.seen = llm, llm.executor, Seen()
        self.executor.record_steps = True

    def step(self) -> None:
        executor = self.executor
        executor.step()
        executor.kv_cache.check_integrity()
        if not executor.overlap:
            for request in executor.scheduler.running:
                if request.is_generation:
                    drafts = executor.state.next_tokens[request.slot, 1:].tolist()
                    text = (request.sampling_params.seed or 0, *request.token_ids)
                    assert self.seen.drafts.setdefault(text, drafts) == drafts

    def run(self, prompts: Sequence[Any], params: SamplingParams, **options: Any) -> list[Request]:
        requests = [self.executor.enqueue(prompt, params, **options) for prompt in prompts]
        while self.executor.has_work:
            self.step()
        for request in requests:
            assert request.error is None
            self.seen.outputs.append(request.output_token_ids)
            self.seen.accepted.append([step.accepted for step in request.steps or []])
            self.seen.cached.append(request.cached_tokens or 0)
        return requests


def random_tokens(rng: random.Random, count: int, vocab: int = VOCAB) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def sharing_prompts(rng: random.Random, length: int = 29, vocab: int = VOCAB) -> list[list[int]]:
    """A prompt, itself again, one that goes on, and three that part from it: in the middle of a
    block of 8, at a block's end, and where only the token after a block differs."""
    base = random_tokens(rng, length, vocab)
    other = (base[16] + 1) % vocab
    return [
        base, base, [*base, *random_tokens(rng, 7, vocab)],
        [*base[:13], *random_tokens(rng, 9, vocab)],
        [*base[:16], *random_tokens(rng, 6, vocab)],
        [*base[:16], other, *base[17:]],
    ]  # fmt: skip


def converse(llm: LLM, params: SamplingParams, seed: int = 0, vocab: int = VOCAB) -> Seen:
    """Prompts one after another, then all at once with what was said and more: second turns."""
    rng, watched, params = random.Random(seed), Watched(llm), replace(params, max_tokens=6)
    prompts, texts = sharing_prompts(rng, vocab=vocab), []
    for prompt in prompts:
        (request,) = watched.run([prompt], params)
        texts.append(request.token_ids)
    watched.run([[*text, *random_tokens(rng, 5, vocab)] for text in texts], params)
    return watched.seen


def assert_same(cached: Seen, plain: Seen) -> None:
    assert cached.outputs == plain.outputs
    assert cached.accepted == plain.accepted
    assert cached.drafts == plain.drafts
    assert not any(plain.cached)


def is_text(prompt: object) -> bool:
    return not isinstance(prompt, EmbedsPrompt)
