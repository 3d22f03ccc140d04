"""Random schedules with draft lengths that change at any step: tokens stay those of plain decoding.

Requests come and go, some are cancelled, prompts come in chunks and share blocks, small caches
preempt, the head rests for one step or for thirty. Right and wrong drafts are planted, so that
every number of them is accepted. `--full` runs 3,300 schedules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import full, spread
from oracle import VOCAB
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle3_dir
from uncaptured import PaddedTorch, Uncaptured

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.executor import build
from trtspec.executor.draft_lens.auto_draft_len import AutoDraftLen
from trtspec.executor.draft_lens.auto_verified import AutoVerified
from trtspec.executor.request import Request, ScheduledBatch
from trtspec.metadata.attention import AttentionMetadata

K, LENGTH, LAYERS = 4, 96, 6
SCHEDULES = 150 if full() else 3  # of each engine
AUTO: dict[str, Any] = {"draft_len_schedule": "auto", "acceptance": "exact_match"}


Made = tuple[Path, DecodingBaseConfig]  # a target, and what drafts for it


def _eagle3(folder: Path, **fields: Any) -> Made:
    target = one_layer_target(folder)
    head = perfect_eagle3(folder, target)
    return target, EagleDecodingConfig(max_draft_len=K, speculative_model=head, **fields, **AUTO)


def _mtp(folder: Path, **fields: Any) -> Made:
    target = one_layer_target(folder)
    add_perfect_mtp(target, K)
    return target, MTPDecodingConfig(num_nextn_predict_layers=K, **fields, **AUTO)


def _full_attention(folder: Path) -> Made:
    target = tiny_model_dir(folder, seed=1, num_hidden_layers=LAYERS)
    config = EagleDecodingConfig(max_draft_len=K, speculative_model=eagle3_dir(folder), **AUTO)
    return target, config


def _block(
    folder: Path, config: type[DFlashDecodingConfig] = DFlashDecodingConfig, **head: Any
) -> Made:
    target = tiny_model_dir(folder, seed=1, num_hidden_layers=LAYERS)
    path = dflash_dir(folder, **head)
    layers = [1, 3, 4]
    return target, config(max_draft_len=K, speculative_model=path, target_layer_ids=layers, **AUTO)


def _draft_model(folder: Path) -> Made:
    config = DraftTargetDecodingConfig(
        max_draft_len=K, speculative_model=tiny_model_dir(folder, seed=5), **AUTO
    )
    return one_layer_target(folder), config


def _lookup(folder: Path, config: type[NGramDecodingConfig | SADecodingConfig]) -> Made:
    made = config(max_draft_len=K, **AUTO)
    if isinstance(made, NGramDecodingConfig):
        made = replace(made, min_matching_ngram_size=1)
    return one_layer_target(folder), made


DRAFTERS: dict[str, Callable[[Path], Made]] = {
    "eagle3": _eagle3,
    "eagle3_two_engine": lambda folder: _eagle3(folder, eagle3_one_model=False),
    "mtp_eagle": _mtp,
    "mtp_vanilla": lambda folder: _mtp(folder, use_mtp_vanilla=True),
    "full_attention": _full_attention,
    "dflash": _block,
    "dflash2": lambda folder: _block(folder, path={}),
    "dspark": lambda folder: _block(folder, DSparkDecodingConfig, markov="vanilla"),
    "draft_model": _draft_model,
    "ngram": lambda folder: _lookup(folder, NGramDecodingConfig),
    "sa": lambda folder: _lookup(folder, SADecodingConfig),
}
NETWORKS = [n for n in DRAFTERS if n not in ("ngram", "sa", "eagle3_two_engine")]
SHAPES: list[dict[str, Any]] = [
    {}, {}, {}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.6, "repetition_penalty": 1.3},
    {"logit_bias": {3: 4.0, 7: -100.0}}, {"bad_words": [[5], [3, 7]]}, {"min_p": 0.05},
]  # fmt: skip
"""What a request asks of its logits."""
PRESSED: dict[str, Any] = {
    "max_num_tokens": 3 * (K + 1) + 6,
    "enable_chunked_prefill": True,
    "kv_cache_config": KvCacheConfig(max_tokens=100, tokens_per_block=4),
}


class Fuzz:
    """An engine whose lengths are drawn at random, beside a plain one."""

    def __init__(self, target: Path, config: DecodingBaseConfig, **options: Any):
        engine: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": LENGTH}
        self.plain = LLM(target, max_batch_size=8, **engine)
        self.llm = LLM(target, config, max_batch_size=3, **engine, **options)
        self.executor, self.rng = self.llm.executor, random.Random(0)
        self.expected: dict[int, list[int]] = {}  # by request, what plain decoding says
        self.lengths, self.until, self.chosen = Counter[int](), 0, K
        self.run = self.executor.runner.run
        self.executor.runner.run = self._run_and_plant  # type: ignore[method-assign]

    def choose(self, batch: ScheduledBatch, most: int) -> int:
        self.until -= 1
        if self.until < 0:
            self.chosen = self.rng.choice([0, 0, *range(K + 1)])
            self.until = self.rng.choice([0, 0, 1, 3, 8, 30])
        self.lengths[self.chosen] += 1
        self.executor._draft_len.chosen = self.chosen  # type: ignore[attr-defined]
        self.executor._draft_len._until = self.until + 1_000_000  # type: ignore[attr-defined]
        return min(self.chosen, most)

    def _run_and_plant(self, plan: Any) -> Any:
        """Some of the first drafts become what plain decoding says, the next one something else."""
        outputs = self.run(plan)
        state = self.executor.state
        if state.chances is not None:
            generator = torch.Generator().manual_seed(self.rng.randrange(1000))
            state.chances.copy_(torch.rand(state.chances.shape, generator=generator).cumprod(1))
        for request in plan.batch.requests:
            tokens, known = state.next_tokens[request.slot], state.past_lens[request.slot] + 1
            said = self.expected[request.request_id][int(known) - len(request.prompt_token_ids) :]
            good = self.rng.choice([*range(K), K, K])
            for place, token in enumerate(said[: good + 1], start=1):
                if place <= K and tokens[place] >= 0:
                    tokens[place] = token if place <= good else (token + 1) % VOCAB
        return outputs

    def schedule(self, seed: int) -> None:
        """Runs one, and compares."""
        rng = self.rng = random.Random(seed)
        shared = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        waiting = []
        for number in range(rng.randint(2, 7)):
            prompt = shared[: rng.randint(1, len(shared))] * rng.randint(0, 1)
            prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            heat, shape = rng.choice([0.0, 0.0, 0.8]), rng.choice(SHAPES)
            params = SamplingParams(
                max_tokens=rng.randint(1, 40),
                ignore_eos=True,
                temperature=heat,
                seed=number,
                **shape,
            )
            waiting.append((prompt, params))
        expected = [
            o.outputs[0].token_ids
            for o in self.plain.generate(*map(list, zip(*waiting, strict=True)))
        ]
        requests: list[Request] = []
        eagerness, executor = rng.choice([0.05, 0.3, 1.0]), self.executor
        while len(requests) < len(waiting) or executor.has_work:
            if len(requests) < len(waiting) and rng.random() < eagerness:
                request = executor.make_request(*waiting[len(requests)])
                self.expected[request.request_id] = expected[len(requests)]
                requests.append(request)
                executor.add(request)
            executor.step()
            if requests and rng.random() < 0.01:
                executor.cancel(rng.choice(requests).request_id)
        for request, tokens in zip(requests, expected, strict=True):
            ours = request.output_token_ids
            assert ours == tokens[: len(ours)], (seed, request.request_id)
            assert len(ours) == len(tokens) or request.finish_reason == "cancelled", seed
        executor.kv_cache.check_integrity()
        assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2, seed


@pytest.mark.slow
@spread(name=list(DRAFTERS), is_pressed=[False, True])
def test_verification_that_is_shared_out(tmp_path: Path, name: str, is_pressed: bool) -> None:
    """A step verifies 5 of up to 12 drafts, by chances that are drawn at random."""
    target, config = DRAFTERS[name](tmp_path)
    config = replace(config, draft_len_schedule=None, max_verified_drafts=5)
    options = PRESSED if is_pressed else {"disable_overlap_scheduler": False}
    fuzz, verified = Fuzz(target, config, **options), Counter[int]()
    forward = fuzz.executor.runner.step.target.forward

    def count_rows(ids: Any, positions: Any, meta: AttentionMetadata, **rest: Any) -> Any:
        if meta.packed is not None:
            verified.update((meta.packed.starts.diff() - 1).tolist())
            assert len(ids) == meta.num_tokens == meta.num_generations + 5
        return forward(ids, positions, meta, **rest)

    fuzz.executor.runner.step.target.forward = count_rows  # type: ignore[method-assign]
    for seed in range(SCHEDULES):
        fuzz.schedule(seed + 30_000 + 10_000 * is_pressed)
    assert len(verified) > 2, "requests verify different numbers of drafts"
    if full():
        assert set(verified) == set(fuzz.executor.statistics.accepted_lens) == set(range(K + 1))


@pytest.mark.slow
@spread(name=NETWORKS, is_pressed=[False, True])
def test_how_many_are_verified_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_pressed: bool
) -> None:
    """Of the three drafts of each request a step verifies 0, 1, 2 or 3 on average."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    target, config = DRAFTERS[name](tmp_path)
    config = replace(config, draft_len_schedule=None, max_verified_drafts="auto")
    options = PRESSED if is_pressed else {"disable_overlap_scheduler": False}
    fuzz = Fuzz(target, config, **options)

    def choose(auto: AutoVerified, batch: ScheduledBatch, most: int) -> int:
        auto._most = most
        return fuzz.choose(batch, most)

    monkeypatch.setattr(AutoVerified, "_choose", choose)
    for seed in range(SCHEDULES):
        fuzz.schedule(seed + 70_000 + 10_000 * is_pressed)
    assert len(fuzz.lengths) > 2


@pytest.mark.slow
@spread(name=list(DRAFTERS), is_pressed=[True, False])
def test_random_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_pressed: bool
) -> None:
    """With overlap where blocks suffice; without it, and in chunks, where they do not."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    target, config = DRAFTERS[name](tmp_path)
    options = PRESSED if is_pressed else {"disable_overlap_scheduler": False}
    fuzz = Fuzz(target, config, **options)
    monkeypatch.setattr(AutoDraftLen, "_choose", lambda self, *given: fuzz.choose(*given))
    for seed in range(SCHEDULES):
        fuzz.schedule(seed + 10_000 * is_pressed)
    assert len(fuzz.lengths) > 2
    if full():
        assert set(fuzz.lengths) == set(range(K + 1))
        accepted = set(fuzz.executor.statistics.accepted_lens)
        assert accepted == set(range(K + 1)), "every number was accepted"
        is_windowed = name != "full_attention"  # its requests hold few blocks
        assert is_windowed or not is_pressed or fuzz.executor.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "mtp_eagle", "full_attention", "dflash", "ngram"])
def test_generations_in_passes_over_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In shapes as graphs have them, with rows that a head has missed before."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    monkeypatch.setattr(build, "attention_backend", lambda *_: PaddedTorch())
    target, config = DRAFTERS[name](tmp_path)
    fuzz = Fuzz(target, config, disable_overlap_scheduler=False)
    graphs = Uncaptured(fuzz.executor, [7, 24, 60], joins=True)
    fuzz.executor.runner.graphs = graphs  # type: ignore[assignment]
    monkeypatch.setattr(AutoDraftLen, "_choose", lambda self, *given: fuzz.choose(*given))
    count = 4 * SCHEDULES if full() else 6
    for seed in range(count):
        fuzz.schedule(seed + 50_000)
    assert graphs.num_joined > count / 2
    assert graphs.num_missed > 0 or name == "ngram"
