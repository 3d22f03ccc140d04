"""`max_verified_drafts="auto"`: how many drafts a step verifies is chosen while serving."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matrix import NETWORKS, Drafters, config_of, cpu_engine, make_drafters
from oracle import Oracle, random_prompts
from test_verified_drafts import packed_rows
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.errors import ConfigError
from trtspec.executor.draft_lens import auto_draft_len, auto_verified
from trtspec.executor.draft_lens.auto_draft_len import Launches
from trtspec.executor.draft_lens.auto_verified import AutoVerified, ChanceReader
from trtspec.executor.draft_lens.draft_len import DraftLen
from trtspec.executor.draft_lens.step_costs import StepCosts
from trtspec.executor.results import Outcomes

K, N = 6, 8


class Simulated:
    """An engine of N requests whose drafts are as likely as `draw` says, times `factor`.

    With overlap a step is read after the next one is launched, as on a GPU.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: Callable[[int], float],
        draw: Callable[[random.Random, int], list[float]],
        factor: float = 1.0,
        overlap: bool = False,
        *,
        room: int = 1,
        is_guided: bool = False,
    ):
        self.seconds, self.draw, self.factor, self.overlap = seconds, draw, factor, overlap
        self.room = room  # graphs are for so many times the requests
        self.now, self.rng = 0.0, random.Random(0)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(auto_draft_len, "time", clock)
        self.chances = torch.ones(N + 1, K)
        config = EagleDecodingConfig(
            max_draft_len=K, speculative_model="d", max_verified_drafts="auto"
        )
        reader, launches = ChanceReader(self.chances), Launches()
        launches.size_of = lambda count: room * count  # type: ignore[method-assign]
        self.auto = AutoVerified(
            K, config, StepCosts(), launches, reader, runs_at_launch=not overlap
        )
        self.means, self.in_flight = Counter[int](), list[Any]()
        params = SamplingParams()
        self.requests = [
            SimpleNamespace(request_id=7 * i, slot=N - 1 - i, sampling_params=params, num_tokens=9)
            for i in range(N)
        ]
        self.batch: Any = SimpleNamespace(
            generations=self.requests, requests=self.requests, contexts=[], is_guided=is_guided,
            has_seeds=False, records_steps=False, num_sampled=0,
        )  # fmt: skip
        self.has_drafts = False

    def run(self, steps: int) -> float:
        """Returns tokens per second."""
        began_at, tokens = self.now, 0
        for _ in range(steps):
            tokens += self._step()
        return tokens / (self.now - began_at)

    def verify(self, mean: int) -> tuple[list[int], list[int]]:
        """Returns what each request verifies and accepts: of all the `mean * N` likeliest."""
        chances = {r.slot: self.chances[r.slot].tolist() for r in self.requests}
        order = sorted((-chances[r.slot][i], i, r.slot) for r in self.requests for i in range(K))
        most = mean * N * self.room if self.has_drafts else 0
        count = Counter(slot for _, _, slot in order[:most])
        asked = [count[r.slot] for r in self.requests]
        accepted = []
        for request, most in zip(self.requests, asked, strict=True):
            luck, row = self.rng.random(), chances[request.slot]
            accepted.append(sum(luck < self.factor * chance for chance in row[:most]))
        return asked, accepted

    def _step(self) -> int:
        began, is_in_flight = self.now, bool(self.in_flight)
        draft_len, share = self.auto.of(self.batch, self.batch), self.auto.share
        assert share is not None and draft_len == (K if share else 0)
        self.means[share] += 1
        asked, accepted = self.verify(share)
        self.has_drafts = draft_len > 0
        for request in self.requests:
            self.chances[request.slot] = torch.tensor(self.draw(self.rng, request.slot))
        step = SimpleNamespace(batch=self.batch, draft_len=draft_len, share=share, waited=None)
        self.in_flight.append((step, Outcomes(self.requests, asked, accepted)))
        self.now += self.seconds(share)
        read = []
        while len(self.in_flight) > self.overlap:
            one, outcomes = self.in_flight.pop(0)
            self.auto.add_outcomes(outcomes, self.batch, one.share)
            read.append(one)
        self.auto.end_step([step], read, began, is_in_flight=is_in_flight)  # type: ignore[list-item]
        return N + sum(accepted)

    def fixed(self, mean: int, steps: int = 2000) -> float:
        """Returns the tokens per second of steps that always verify so many."""
        tokens, self.has_drafts = 0, True
        for _ in range(steps):
            for request in self.requests:
                self.chances[request.slot] = torch.tensor(self.draw(self.rng, request.slot))
            tokens += N + sum(self.verify(mean)[1])
        return tokens / (steps * self.seconds(mean))


def two_kinds(rng: random.Random, slot: int) -> list[float]:
    """Requests with even slots have good drafts, the others bad ones; each step differs."""
    good = rng.uniform(0.85, 0.99) if slot % 2 == 0 else rng.uniform(0.05, 0.3)
    return [good**i for i in range(1, K + 1)]


def alike(rng: random.Random, slot: int) -> list[float]:
    return [0.7**i for i in range(1, K + 1)]


def dear(mean: int) -> float:
    return 1e-3 * (1 + 0.25 * mean + 0.2 * (mean > 0))


def cheap(mean: int) -> float:
    return 1e-3 * (1 + 0.01 * mean)


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draw", [two_kinds, alike])
@pytest.mark.parametrize("seconds", [dear, cheap])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_fastest_number_is_found(
    monkeypatch: pytest.MonkeyPatch,
    draw: Callable[[random.Random, int], list[float]],
    seconds: Callable[[int], float],
    factor: float,
    overlap: bool,
    room: int,
) -> None:
    """Also where drafts are accepted half as often as the drafter thinks, and in graphs for twice
    the requests."""
    engine = Simulated(monkeypatch, seconds, draw, factor, overlap, room=room)
    engine.run(300)
    speed = engine.run(2000)
    other = Simulated(monkeypatch, seconds, draw, factor, room=room)
    assert speed > 0.95 * max(other.fixed(mean) for mean in range(K + 1))


def test_bad_drafts_under_grammars_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their chances are not read, for such a step is launched in parts."""
    engine = Simulated(monkeypatch, dear, two_kinds, factor=0.02, is_guided=True)
    engine.run(300)
    assert engine.run(1000) > 0.95 * N / dear(0)


def test_no_choice_looks_at_its_own_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Simulated(monkeypatch, cheap, two_kinds)
    engine.run(1)  # its chances are copied
    auto, before = engine.auto, engine.auto._chances.copy()
    assert auto._slots is not None
    auto.add_outcomes(Outcomes([], [], []), engine.batch, None)
    auto.end_step([], [], 0.0, is_in_flight=False)
    assert np.array_equal(auto._chances, before), "the step that verifies them is not chosen yet"
    auto.of(engine.batch, engine.batch)
    auto.add_outcomes(Outcomes([], [], []), engine.batch, None)
    assert not np.array_equal(auto._chances, before)


def test_what_drafts_bring_equals_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Simulated(monkeypatch, cheap, two_kinds, factor=0.6)
    engine.run(2000)
    found = engine.auto._expected_tokens()
    other = Simulated(monkeypatch, lambda mean: 1.0, two_kinds, factor=0.6)
    counted = [other.fixed(mean) / N for mean in range(K + 1)]
    assert found == pytest.approx(counted, rel=0.08)
    assert counted[1] < 1.6, "with one draft each it would be 1.6 at most"


def test_chances_are_a_copy() -> None:
    chances = torch.rand(3, 4)
    reader = ChanceReader(chances)
    reader.begin()
    expected = chances.numpy().copy()
    chances.zero_()
    taken = reader.take()
    assert taken is not None and np.array_equal(taken, expected)
    reader.begin()
    assert np.array_equal(taken, expected)


# -- the engine ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in NETWORKS if "two_engine" not in mode])
@pytest.mark.parametrize("pool", [None, 112])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, pool: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While another number is drawn for every step."""
    rng, drawn = random.Random(0), Counter[int]()

    def at_random(self: AutoVerified, batch: Any, most: int) -> int:
        self.chosen, self._most = rng.randrange(4), most
        drawn[self.chosen] += 1
        return self.chosen

    monkeypatch.setattr(AutoVerified, "_choose", at_random)
    config = config_of(mode, 3, drafters, max_verified_drafts="auto")
    llm = cpu_engine(target_dir, config, pool=pool, overlap=pool is None)
    steps, prompts = packed_rows(llm), random_prompts(6, 12)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 20)
    assert len(drawn) == 4
    assert {sum(lens) / len(lens) for lens in steps} == {1, 2}
    assert any(len(set(lens)) > 1 for lens in steps)
    llm.executor.kv_cache.check_integrity()


def test_it_chooses_in_an_engine(
    target_dir: Path, drafters: Drafters, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random head's drafts are worth nothing: in the end none is verified or proposed."""
    seconds = {k: 1 + 0.3 * k for k in range(4)}
    monkeypatch.setattr(StepCosts, "of", lambda *_: seconds)
    config = config_of("eagle3", 3, drafters, max_verified_drafts="auto")
    llm = cpu_engine(target_dir, config)
    auto, prompts = llm.executor._draft_len, random_prompts(3, 12)
    assert llm.chooses_draft_len and isinstance(auto, AutoVerified)
    assert llm.executor.state.missed is not None, "the head may rest"
    outputs = llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 60)
    assert auto.chosen == 0 == llm.executor.last_draft_len
    assert auto._accepted < 0.9 * auto._predicted, "the head thinks too well of its drafts"


def test_a_lower_k_is_verified_whole(
    target_dir: Path, drafters: Drafters, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    booked = list[int]()
    monkeypatch.setattr(StepCosts, "add", lambda self, shape, length, *_: booked.append(length))
    config = config_of("eagle3", 3, drafters, max_verified_drafts="auto")
    llm = cpu_engine(target_dir, config)
    steps, prompts = packed_rows(llm), random_prompts(3, 12)
    for k in (2, 0):
        with llm.executor.draft_len_held_at(k):
            outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
            assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 20)
            assert llm.executor.last_draft_len == k and not steps
            assert set(booked) <= {0}, "times of other steps are no v's"


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_ended_say_nothing(
    target_dir: Path, drafters: Drafters, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of no slot has ones, as of certain drafts."""
    config = config_of("eagle3", 3, drafters, max_verified_drafts="auto")
    llm = cpu_engine(target_dir, config, overlap=overlap)
    auto, seen = llm.executor._draft_len, list[list[int]]()
    assert isinstance(auto, AutoVerified)
    monkeypatch.setattr(auto_verified, "TRIAL", 1)  # at every step
    monkeypatch.setattr(auto, "_choose", lambda batch, most: setattr(auto, "_most", most) or 2)
    begin = auto._reader.begin
    auto._reader.begin = lambda: seen.append(list(auto._slots or ())) or begin()  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=3 + 7 * i, ignore_eos=True) for i in range(5)]
    llm.generate(random_prompts(5, 12), params)
    assert len({len(slots) for slots in seen}) > 1
    assert min(min(slots) for slots in seen) == 0
    assert auto._chances[1] < 0.9 and auto._chances[-1] < 2


def test_forced_acceptance_verifies_all(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "3")
    llm = cpu_engine(target_dir, config_of("eagle3", 3, drafters, max_verified_drafts="auto"))
    assert type(llm.executor._draft_len) is DraftLen
    outputs = llm.generate(random_prompts(3, 12), SamplingParams(max_tokens=17, ignore_eos=True))
    assert [output.spec_stats.acceptance_length for output in outputs] == [4.0] * 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda auto: NGramDecodingConfig(**auto), "needs a drafter with a network"),
        (lambda auto: SADecodingConfig(**auto), "needs a drafter with a network"),
        (
            lambda auto: EagleDecodingConfig(max_draft_len="auto", speculative_model="d", **auto),
            "beside draft_len_schedule or max_concurrency",
        ),
        (
            lambda auto: DSparkDecodingConfig(speculative_model="d", max_concurrency=4, **auto),
            "beside draft_len_schedule or max_concurrency",
        ),
        (
            lambda auto: EagleDecodingConfig(
                max_draft_len=3, speculative_model="d", eagle3_one_model=False, **auto
            ),
            "needs a drafter inside the target's step",
        ),
        (
            lambda auto: MTPDecodingConfig(mtp_eagle_one_model=False, **auto),
            "needs a drafter inside the target's step",
        ),
    ],
)
def test_where_it_is_refused(make: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf'max_verified_drafts="auto" {said}.*give a number'):
        make({"max_verified_drafts": "auto"})


def test_over_ranks_it_is_refused(target_dir: Path, drafters: Drafters) -> None:
    config = config_of("eagle3", 3, drafters, max_verified_drafts="auto")
    with pytest.raises(ConfigError, match=r"works on one device, and this engine has 2"):
        LLM(target_dir, config, device="cpu", max_seq_len=64, tensor_parallel_size=2)
