"""Mixed requests through an executor for as long as one likes: the driver of the soak tests.

Every request has a reference, computed once per prompt: greedy text by transformers on CPU, sampled
text by a plain engine, one request at a time and without graphs. What the engine under test says is
compared with a prefix of that, whatever was cancelled, preempted or accepted meanwhile.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matrix import EAGLE3, MTP, Drafters, config_of
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    KvCacheConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.executor.py_executor import PyExecutor
from trtspec.executor.request import Request
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS

VOCAB, EOS = 97, 2
MAX_SEQ_LEN, MAX_OUTPUT, LONGEST_PROMPT = 96, 40, 70
MAX_BATCH, MAX_K, MOST_LAPS = 8, 5, 5
CLEAR_GAP = 2e-3
"""Greedy references with a closer call than this between the best two tokens are not used: which
one wins would depend on the order of a sum."""
MODES = ["none", "ngram", "draft_target", *EAGLE3, *MTP]
POOLS = [(112, 8), (320, 16), (96, 4)]  # tokens, tokens in a block
GRAPHS = [
    CudaGraphConfig(batch_sizes=(3, 8)),  # nearly every batch is padded
    CudaGraphConfig(),
    CudaGraphConfig(batch_sizes=(2, 5)),  # larger batches run eagerly
    CudaGraphConfig(batch_sizes=(1, 2, 4, 8), enable_padding=False),
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
]


# -- models ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Models:
    """A target with drafters that are wrong nearly always, or right nearly always."""

    target: Path
    draft: Path
    head: Path
    layers: list[int]


def build_models(tmp_path: Path) -> dict[str, Models]:
    deep = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=MAX_K)
    draft = tiny_model_dir(tmp_path, seed=2)
    shallow = one_layer_target(tmp_path)
    torch.manual_seed(0)
    perfect = perfect_eagle3(tmp_path, shallow)
    add_perfect_mtp(shallow, MAX_K)
    return {
        "random": Models(deep, draft, eagle3_dir(tmp_path), [0, 1, 2]),
        "perfect": Models(shallow, shallow, perfect, [0]),
    }


# -- configurations ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Setup:
    mode: str
    k: int
    models: str  # key of `build_models`
    overlap: bool
    chunked: bool
    pool: int
    page: int
    graphs: CudaGraphConfig | None

    def __str__(self) -> str:
        sizes = "-" if self.graphs is None else self.graphs.batch_sizes or "default"
        padding = "" if self.graphs is None or self.graphs.enable_padding else " unpadded"
        return (
            f"{self.mode} K={self.k} {self.models} overlap={self.overlap} chunked={self.chunked} "
            f"pool={self.pool}/{self.page} graphs={sizes}{padding}"
        )


def all_setups(modes: list[str] | None = None) -> list[Setup]:
    """Every mode with every K from 1 to 5 (plain: K = 0), each with overlap and chunking on and
    off; the other choices rotate."""
    setups = []
    for m, mode in enumerate(MODES):
        for k in range(4) if mode == "none" else range(1, MAX_K + 1):
            overlap, chunked = divmod((k + m) % 4, 2)
            pool, page = POOLS[(k + 2 * m) % len(POOLS)]
            drafter = "perfect" if mode not in ("none", "ngram") and k % 2 else "random"
            graphs = GRAPHS[(k + m // 2) % len(GRAPHS)]
            setups.append(
                Setup(
                    mode, 0 if mode == "none" else k, drafter, bool(overlap), bool(chunked),
                    pool, page, graphs,
                )
            )  # fmt: skip
    return [setup for setup in setups if modes is None or setup.mode in modes]


def build_engine(setup: Setup, models: dict[str, Models], device: str) -> LLM:
    files = models[setup.models]
    rows = MAX_BATCH * (setup.k + 1)
    return LLM(
        files.target, _decoding_config(setup, files), device=device, dtype="float32",
        max_batch_size=MAX_BATCH, max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=max(rows, 20) if setup.chunked else MAX_SEQ_LEN,
        enable_chunked_prefill=setup.chunked, disable_overlap_scheduler=not setup.overlap,
        kv_cache_config=KvCacheConfig(max_tokens=setup.pool, tokens_per_block=setup.page),
        cuda_graph_config=setup.graphs,
    )  # fmt: skip


def _decoding_config(setup: Setup, files: Models) -> DecodingBaseConfig | None:
    if setup.mode == "none":
        return None
    drafters = Drafters(draft=files.draft, head=files.head, layers=files.layers)
    # By the rule whose seeded texts are the target's own.
    return config_of(setup.mode, setup.k, drafters, acceptance="exact_match")


# -- references --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Text:
    """A prompt, how it is continued, and with what."""

    prompt: list[int]
    sampling: dict[str, Any]  # empty is greedy
    tokens: list[int]  # MAX_OUTPUT of them, or as many as fit


@dataclass(frozen=True)
class References:
    greedy: list[Text]
    sampled: list[Text]
    cores: list[list[int]]  # prompts for unseeded requests


def build_references(
    target: Path, device: str, num_greedy: int, num_sampled: int, seed: int = 0
) -> References:
    rng = random.Random(seed)
    greedy: list[Text] = []
    model = _transformers_model(target)
    while len(greedy) < num_greedy:
        prompt = _prompt(rng, len(greedy))
        tokens, gap = _greedy(model, prompt, min(MAX_OUTPUT, MAX_SEQ_LEN - len(prompt)))
        if gap > CLEAR_GAP:
            greedy.append(Text(prompt, {}, tokens))
    prompts = [_prompt(rng, i) for i in range(num_sampled)]
    samplings = [{**SAMPLINGS[i % len(SAMPLINGS)], "seed": 1000 + i} for i in range(num_sampled)]
    plain = LLM(
        target, device=device, dtype="float32", max_batch_size=1, max_seq_len=MAX_SEQ_LEN,
        disable_overlap_scheduler=True, cuda_graph_config=None,
        kv_cache_config=KvCacheConfig(max_tokens=MAX_SEQ_LEN, tokens_per_block=32),
    )  # fmt: skip
    params = [SamplingParams(max_tokens=MAX_OUTPUT, ignore_eos=True, **s) for s in samplings]
    outputs = plain.generate(prompts, params)
    sampled = [
        Text(prompt, sampling, output.outputs[0].token_ids)
        for prompt, sampling, output in zip(prompts, samplings, outputs, strict=True)
    ]
    return References(greedy, sampled, prompts)


def _prompt(rng: random.Random, number: int) -> list[int]:
    length = rng.choice([1, 2, rng.randint(3, 20), rng.randint(10, LONGEST_PROMPT)])
    if number % 3 == 0:  # something for the n-gram lookup
        piece = [rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 5))]
        return (piece * length)[:length]
    return [rng.randrange(VOCAB) for _ in range(length)]


def _transformers_model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The continuation token by token from scratch, and its closest call."""
    tokens, gap = list(prompt), float("inf")
    for _ in range(count):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], gap


# -- requests ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    prompt: list[int]
    params: SamplingParams
    reference: list[int] | None  # None: unseeded, so that nobody knows
    cancel_after: int | None  # turns of the driver; 0 is before it is scheduled
    cancel_later: bool  # by `cancel_at_next_step`

    @property
    def limit(self) -> int:
        return min(self.params.max_tokens, MAX_SEQ_LEN - len(self.prompt))

    @property
    def ends(self) -> set[int]:
        return {*(self.params.stop_token_ids or ()), *([] if self.params.ignore_eos else [EOS])}

    def expected(self) -> tuple[list[int], str]:
        """The whole output and why it ends, from the reference."""
        assert self.reference is not None
        return _cut(self.reference, self.limit, self.ends)


def _cut(tokens: list[int], limit: int, ends: set[int]) -> tuple[list[int], str]:
    for i, token in enumerate(tokens[:limit]):
        if token in ends:
            return tokens[: i + 1], "stop"
    return tokens[:limit], "length"


def make_plan(rng: random.Random, references: References) -> Plan:
    kind = rng.choices(["greedy", "seeded", "unseeded"], [6, 3, 1])[0]
    if kind == "unseeded":
        text = Text(rng.choice(references.cores), {"temperature": 1.5}, [])
    else:
        text = rng.choice(references.greedy if kind == "greedy" else references.sampled)
    count = rng.choice([1, 2, *(rng.randint(3, MAX_OUTPUT) for _ in range(6))])
    if MAX_SEQ_LEN - len(text.prompt) <= MAX_OUTPUT and rng.random() < 0.5:
        count = 500  # up to the maximum length
    stops: list[int] = []
    if rng.random() < 0.3:
        stops = [rng.randrange(VOCAB)]
        if text.tokens:
            stops.append(rng.choice(text.tokens))
    params = SamplingParams(
        max_tokens=count, stop_token_ids=stops, ignore_eos=rng.random() < 0.5, **text.sampling
    )
    cancel = None
    if rng.random() < 0.15:
        cancel = rng.choice([0, 1, 2, rng.randint(3, 30)])
    reference = None if kind == "unseeded" else text.tokens
    return Plan(text.prompt, params, reference, cancel, rng.random() < 0.5)


@dataclass
class Tally:
    """What a soak saw."""

    reasons: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    accepted_drafts: int = 0
    graphs: int = 0
    seconds: float = 0.0
    laps_compared: int = 0  # of GPU memory, with no graph captured in between

    @property
    def requests(self) -> int:
        return sum(self.reasons.values())

    def add(self, other: Tally) -> None:
        self.reasons += other.reasons
        self.kinds += other.kinds
        for name in ("tokens", "steps", "preemptions", "accepted_drafts", "graphs", "seconds",
                     "laps_compared"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.requests} requests {dict(self.reasons)} {dict(self.kinds)}, {self.tokens} "
            f"tokens, {self.steps} steps, {self.preemptions} preemptions, {self.accepted_drafts} "
            f"drafts accepted, {self.graphs} graphs, {self.seconds:.1f} s, {rate:.0f} tokens/s"
        )


# -- the driver --------------------------------------------------------------------------------
def run_lap(llm: LLM, references: References, count: int, seed: int) -> Tally:
    """`count` requests that come, are cancelled and end as they like; all of them are checked."""
    executor, rng, tally = llm.executor, random.Random(seed), Tally()
    plans = [make_plan(rng, references) for _ in range(count)]
    preempted, started = executor.stats().num_preemptions, time.perf_counter()
    live: dict[int, tuple[Plan, Request, int]] = {}  # request -> plan and the turn it came in
    asked: set[int] = set()
    done: list[Request] = []
    everything: list[tuple[Plan, Request]] = []
    turn, most_live, drafts = 0, 1, llm.max_draft_len
    # The same in every lap of a seed: another length would be another graph to capture.
    draft_lens = [0, random.Random(seed).randint(0, drafts), drafts, drafts]
    while len(everything) < count or executor.has_work:
        if turn % 20 == 0:
            most_live = rng.choice([1, 3, 8, 12, 16, 16])
        for _ in range(rng.choice([0, 0, 1, 2, 4])):
            if len(everything) < count and len(live) < most_live:
                plan = plans[len(everything)]
                request = executor.enqueue(plan.prompt, plan.params)
                live[request.request_id] = plan, request, turn
                everything.append((plan, request))
        for request_id, (plan, request, since) in live.items():
            due = plan.cancel_after is not None and turn - since >= plan.cancel_after
            if not due or request_id in asked or request.is_finished:
                continue
            asked.add(request_id)
            if plan.cancel_later:
                executor.cancel_at_next_step(request_id)
            else:
                assert executor.cancel(request_id)
        if drafts and turn % 25 == 24:  # speculation pauses, shortens and goes on
            executor.runtime_draft_len = rng.choice(draft_lens)
        for request in executor.step():
            done.append(request)
            del live[request.request_id]
        if turn % 16 == 0:
            executor.kv_cache.check_integrity()
            assert len(executor.scheduler.running) <= MAX_BATCH
        turn += 1
        assert turn < 200 * count + 1000, "the engine makes no progress"
    done += executor.run_until_done()
    executor.runtime_draft_len = drafts
    tally.seconds, tally.steps = time.perf_counter() - started, turn
    tally.preemptions = executor.stats().num_preemptions - preempted
    ids = [request.request_id for request in done]
    assert len(ids) == len(set(ids)) and set(ids) == {r.request_id for _, r in everything}
    for plan, request in everything:
        check_output(plan, request, request.request_id in asked)
        kind = "greedy" if request.sampling_params.is_greedy else "seeded"
        tally.kinds["unseeded" if plan.reference is None else kind] += 1
        tally.reasons[str(request.finish_reason)] += 1
        tally.tokens += len(request.output_token_ids)
        tally.accepted_drafts += sum(n * c for n, c in request.accepted_lens.items())
    check_nothing_left(executor)
    return tally


def check_output(plan: Plan, request: Request, asked_to_cancel: bool) -> None:
    """Raises AssertionError unless the request said and did what it had to."""
    got, reason = request.output_token_ids, request.finish_reason
    where = f"request {request.request_id}, {plan}, got {got} ({reason}, {request.error})"
    assert request.is_finished and request.error is None, where
    assert request.num_in_flight == 0, where
    assert request.prompt_token_ids == plan.prompt, where
    assert (reason == "cancelled") == asked_to_cancel, where
    assert all(0 <= token < VOCAB for token in got), where
    ended = bool(got) and got[-1] in plan.ends
    assert not plan.ends & set(got[:-1]), f"went on after a stop token: {where}"
    if reason == "cancelled":
        assert len(got) < plan.limit and not ended, where
    else:
        assert reason == ("stop" if ended else "length"), where
        assert ended or len(got) == plan.limit, where
    assert len(got) <= plan.limit, where
    if plan.reference is None:
        return
    expected, expected_reason = plan.expected()
    if reason == "cancelled":
        assert got == expected[: len(got)], f"expected a prefix of {expected}: {where}"
    else:
        assert (got, reason) == (expected, expected_reason), f"expected {expected}: {where}"


def check_nothing_left(executor: PyExecutor) -> None:
    cache, scheduler = executor.kv_cache, executor.scheduler
    cache.check_integrity()
    free = cache.num_blocks - NUM_RESERVED_BLOCKS
    assert [pool.num_free for pool in cache._pools] == [free] * len(cache._pools)
    assert not cache._tables and not cache._versions
    assert sorted(scheduler._free_slots) == list(range(MAX_BATCH))
    assert not scheduler.waiting and not scheduler.running
    assert not executor.book.live and not executor.book.finished and not executor._pending
    assert not executor._cancel_later and not executor.has_work


def soak(
    setup: Setup, models: dict[str, Models], references: dict[str, References], count: int,
    device: str, seed: int = 0,
) -> Tally:  # fmt: skip
    """Builds an engine and sends it `count` requests or somewhat more. The last quarter comes again
    and again until, not for the first time, no graph was captured: then it must leave the GPU's
    memory as it was."""
    llm = build_engine(setup, models, device)
    again = max(1, count // 4)
    tally, known = Tally(), references[setup.models]
    tally.add(run_lap(llm, known, count - again, seed))
    graphs = llm.executor.graphs
    for lap in range(MOST_LAPS):
        captured, used = 0 if graphs is None else graphs.num_graphs, allocated(device)
        tally.add(run_lap(llm, known, again, seed + 1))
        tally.graphs = 0 if graphs is None else graphs.num_graphs
        if tally.graphs == captured and lap > 0:  # the first makes room for what is new in it
            grown = allocated(device) - used
            assert grown <= 64 * 1024, f"{setup}: {grown} bytes more after {again} requests"
            tally.laps_compared = 1
            break
    return tally


def allocated(device: str, clear_workspaces: bool = False) -> int:
    """Bytes of GPU memory in tensors. cuBLAS keeps a workspace for every stream it ever saw;
    only while no graph is alive may those be thrown away."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    if clear_workspaces:
        torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def report(line: str) -> None:
    """To stdout; pytest shows it with -s."""
    sys.stdout.write(f"\n{line}\n")


def share(total: int, parts: int) -> list[int]:
    """`total` divided as evenly as it goes."""
    return [total // parts + (i < total % parts) for i in range(parts)]
