"""Draft lengths that choose themselves: simulated engines with known times, then real ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafting import make_case
from matrix import thinned
from tiny import tiny_model_dir

from trtspec import (
    LLM,
    ConfigError,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.executor import auto_draft_len
from trtspec.executor.auto_draft_len import AutoDraftLen, RunningAcceptance
from trtspec.executor.request import ScheduledBatch
from trtspec.executor.step_costs import StepCosts, StepShape

K = 6
GREEDY = StepShape(1, all_greedy=True)


class Engine:
    """A simulated engine: what a step takes and what drafts are worth are known."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: Callable[[int, int], float],
        costs: StepCosts | None = None,
    ):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(auto_draft_len, "time", SimpleNamespace(perf_counter=lambda: self.now))
        config = NGramDecodingConfig(max_draft_len="auto")  # type: ignore[arg-type]
        self.auto = AutoDraftLen(K, config, costs or StepCosts(), lambda n: n)
        self.rng, self.lengths, self.tokens = random.Random(0), Counter[int](), 0

    def run(
        self, steps: int, rates: Sequence[float], size: int = 1, temperature: float = 0
    ) -> float:
        """Returns tokens per second of these steps."""
        params = SamplingParams(temperature=temperature)
        batch = ScheduledBatch([], [SimpleNamespace(sampling_params=params)] * size)  # type: ignore
        began_at, tokens = self.now, 0
        asked = 0
        for _ in range(steps):
            began = self.now
            chosen = self.auto.of(batch, batch)
            self.lengths[chosen] += 1
            # A slow step now and then, as where the host was busy.
            self.now += self.seconds(size, chosen) * (8 if self.rng.random() < 0.01 else 1)
            for _ in range(size):
                accepted = 0
                while accepted < min(asked, chosen) and self.rng.random() < rates[accepted]:
                    accepted += 1
                self.auto.add_result(min(asked, chosen), accepted)
                tokens += 1 + accepted
            asked = chosen
            self.auto.end_step(batch, began, is_in_flight=False)
        return tokens / (self.now - began_at)


def fixed_speed(
    seconds: Callable[[int, int], float], rates: Sequence[float], k: int, size: int
) -> float:
    tokens, product = 1.0, 1.0
    for rate in rates[:k]:
        product *= rate
        tokens += product
    # One step in a hundred takes eight times as long.
    return size * tokens / (1.07 * seconds(size, k))


def of_gpu(size: int, k: int) -> float:
    """Drafting costs a little with few requests; many rows cost much."""
    return 1e-3 * (0.5 + 0.04 * k + 0.004 * size * (k + 1))


CASES = {
    "one request, good drafts": (1, [0.85] * K),
    "one request, bad drafts": (1, [0.03] * K),
    "32 requests, good drafts": (32, [0.8] * K),
    "32 requests, poor drafts": (32, [0.25] * K),
    "128 requests, middling drafts": (128, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
}


@pytest.mark.parametrize("name", CASES)
def test_near_the_best_length_and_never_below_plain(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    size, rates = CASES[name]
    engine = Engine(monkeypatch, of_gpu)
    engine.run(300, rates, size)  # times are found
    speed = engine.run(3000, rates, size)
    fixed = [fixed_speed(of_gpu, rates, k, size) for k in range(K + 1)]
    assert speed > 0.95 * max(fixed), (speed, fixed, engine.lengths)
    assert speed > 0.98 * fixed[0], (speed, fixed, engine.lengths)


def test_known_times_need_no_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Engine(monkeypatch, of_gpu, StepCosts(tmp_path / "times.json"))
    first.run(600, [0.85] * K)
    first.auto.close()
    second = Engine(monkeypatch, of_gpu, StepCosts(tmp_path / "times.json"))
    second.run(200, [0.85] * K)
    assert 0 not in second.lengths
    assert 0 in first.lengths


def test_it_follows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts turn worthless, and good again: it stops drafting, and finds that it pays again."""
    engine = Engine(monkeypatch, of_gpu)
    engine.run(600, [0.8] * K, 32)
    assert engine.auto.chosen >= 3
    engine.run(400, [0.01] * K, 32)
    assert engine.auto.chosen == 0
    engine.lengths.clear()
    engine.run(4000, [0.01] * K, 32)
    assert engine.lengths[0] > 0.98 * 4000
    engine.run(9000, [0.8] * K, 32)
    assert engine.auto.chosen >= 3


def test_greedy_and_sampled_requests_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, of_gpu)
    engine.run(600, [0.9] * K, 8)
    engine.run(600, [0.02] * K, 8, temperature=1.0)
    assert engine.auto.chosen == 0
    engine.run(1, [0.9] * K, 8)
    assert engine.auto.chosen >= 3


def test_acceptance_equals_a_count() -> None:
    acceptance, rng = RunningAcceptance(3), random.Random(1)
    for _ in range(20_000):
        accepted = 0
        while accepted < 3 and rng.random() < (0.9, 0.5, 0.2)[accepted]:
            accepted += 1
        acceptance.add(3, accepted)
    acceptance.fold()
    expected = [1, 1.9, 1.9 + 0.45, 1.9 + 0.45 + 0.09]
    assert acceptance.expected_tokens() == pytest.approx(expected, abs=0.03)


def test_steps_that_were_asked_for_less_say_nothing_of_the_rest() -> None:
    acceptance = RunningAcceptance(3)
    for _ in range(1000):
        acceptance.add(1, 1)
    acceptance.fold()
    tokens = acceptance.expected_tokens()
    assert tokens[1] > 1.98
    assert tokens[3] > 3.9  # like the first


# -- times -------------------------------------------------------------------------------------
def test_times_in_between_are_derived() -> None:
    costs = StepCosts()
    for k, seconds in ((0, 1.0), (2, 1.4), (4, 2.0)):
        costs.add(GREEDY, k, seconds)
    assert costs.of(GREEDY, [0, 1, 3, 6]) == pytest.approx({0: 1.0, 1: 1.2, 3: 1.7, 6: 2.6})


def test_an_unmeasured_size_is_scaled_from_the_nearest() -> None:
    costs, larger = StepCosts(), StepShape(8, all_greedy=True)
    for k, seconds in ((0, 1.0), (2, 1.4)):
        costs.add(GREEDY, k, seconds)
    costs.add(larger, 0, 3.0)
    assert costs.of(larger, [0, 2]) == pytest.approx({0: 3.0, 2: 4.2})


def test_times_are_medians_then_follow() -> None:
    costs = StepCosts()
    for seconds in (9.0, 1.0, 1.1, 1.0, 0.9):
        costs.add(GREEDY, 0, seconds)
    assert costs.of(GREEDY, [0])[0] == 1.0
    for _ in range(200):
        costs.add(GREEDY, 0, 2.0)
    assert costs.of(GREEDY, [0])[0] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "text", ["", "{", "[[1, 2]]", '[["a", true, 1, 1.0]]', "[[1, true, 0, -1.0]]", "[1]"]
)
def test_a_broken_file_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    assert StepCosts(path).is_empty
    assert "holds no step times" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    costs = StepCosts(tmp_path / "file" / "times.json")
    costs.add(GREEDY, 0, 1.0)
    costs.save()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=6)


# -- engines -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", thinned(["eagle3", "mtp_eagle", "eagle3_two_engine", "mtp_vanilla"], 2)
)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_stay_those_of_plain_decoding(
    target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    overlap: bool,
) -> None:
    """Lengths change at random every other step, with requests that come and go."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    rng, seen = random.Random(0), Counter[int]()

    def at_random(self: AutoDraftLen, shape: StepShape) -> None:
        self._set(rng.choice(self.lengths))
        seen[self.chosen] += 1
        self._until = self._steps + rng.choice([1, 2])

    monkeypatch.setattr(AutoDraftLen, "_decide", at_random)
    config = make_case(name, target_dir, tmp_path, 3).config
    config = replace(config, draft_len_schedule="auto")
    engine: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 128}
    llm = LLM(target_dir, config, max_batch_size=4, disable_overlap_scheduler=not overlap, **engine)
    prompts = [[3 + i % 7] * (1 + 5 * i % 23) for i in range(10)]
    params = [
        SamplingParams(max_tokens=10 + 7 * i, ignore_eos=True, temperature=0.0) for i in range(10)
    ]
    plain = LLM(target_dir, **engine)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert set(seen) == {0, 1, 2, 3}
    llm.executor.kv_cache.check_integrity()


def test_times_are_kept_for_the_next_engine(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    config = NGramDecodingConfig(draft_len_schedule="auto")
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=256)
    llm.generate([[3, 4]], SamplingParams(max_tokens=200, ignore_eos=True))
    llm.shutdown()
    (path,) = (tmp_path / "cache" / "step_times").glob("*.json")
    rows = json.loads(path.read_text())
    assert {(size, greedy) for size, greedy, _, _ in rows} == {(1, True)}
    assert {length for _, _, length, _ in rows} >= {0, 3}
    assert all(0 < seconds < 10 for *_, seconds in rows)
    again = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=256)
    assert not again.executor._draft_len.costs.is_empty


def test_run_time_limits_hold(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    config = NGramDecodingConfig(draft_len_schedule="auto", max_concurrency=1)
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=256)
    executor = llm.executor
    executor.runtime_draft_len = 1
    requests = [
        executor.enqueue([3, 4 + i], SamplingParams(max_tokens=60 * (i + 1), ignore_eos=True))
        for i in range(2)
    ]
    while executor.has_work:
        executor.step()
        running = [r for r in executor.scheduler.running if r.is_generation]
        most = 0 if len(requests) - sum(r.is_finished for r in requests) > 1 else 1
        for request in running:
            assert request.num_drafts <= max(most, 1)
    assert max(requests[1].accepted_lens) <= 1


# -- configs -----------------------------------------------------------------------------------
def test_auto_is_a_number_and_a_schedule() -> None:
    auto: Any = "auto"
    ngram = NGramDecodingConfig(max_draft_len=auto)
    assert (ngram.max_draft_len, ngram.draft_len_schedule) == (6, "auto")
    eagle = EagleDecodingConfig(max_draft_len=auto, speculative_model="smollm2-135m-eagle3")
    assert (eagle.max_draft_len, eagle.draft_len_schedule) == (0, "auto")
    for name in ("num_nextn_predict_layers", "max_draft_len"):
        mtp = MTPDecodingConfig(**{name: auto})
        assert (mtp.num_nextn_predict_layers, mtp.draft_len_schedule) == (3, "auto")


def test_auto_with_a_schedule_is_refused() -> None:
    auto: Any = "auto"
    with pytest.raises(ConfigError, match="chooses K itself"):
        NGramDecodingConfig(max_draft_len=auto, draft_len_schedule={1: 2})
    with pytest.raises(ConfigError, match='"auto" or None'):
        NGramDecodingConfig(draft_len_schedule="always")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_draft_len"):
        NGramDecodingConfig(max_draft_len="many")  # type: ignore[arg-type]
