"""Draft lengths that choose themselves, as graphs: tokens stay, times are known at the start."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, make_drafters
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.executor import runner
from trtspec.executor.cuda_graphs.graph_key import GraphKey
from trtspec.executor.cuda_graphs.graphs import CudaGraphs
from trtspec.executor.draft_lens import choose_draft_len
from trtspec.executor.draft_lens.auto_draft_len import AutoDraftLen
from trtspec.executor.draft_lens.step_costs import StepCosts
from trtspec.executor.request import ScheduledBatch
from trtspec.metadata.missed import CAPACITY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_seq_len": 160,
    "max_batch_size": 4,
    "cuda_graph_config": CudaGraphConfig(batch_sizes=(2, 4)),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=4)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    return tmp_path / "step_times"


def _auto(llm: LLM) -> AutoDraftLen:
    draft_len = llm.executor._draft_len
    assert isinstance(draft_len, AutoDraftLen)
    return draft_len


@pytest.mark.parametrize("mode", ["ngram", "eagle3", "mtp_eagle", "dflash", "eagle3_two_engine"])
def test_tokens_stay_while_lengths_change_at_every_step(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy requests, and seeded ones that say what plain decoding says."""
    rng, seen = random.Random(0), set()

    def at_random(self: AutoDraftLen, batch: ScheduledBatch, most: int) -> int:
        self.chosen = rng.choice(self.lengths)
        seen.add(self.chosen)
        return self.chosen

    prompts = [[3 + i % 7, 5] * (1 + 5 * i % 17) for i in range(9)]
    params = [
        SamplingParams(
            max_tokens=20 + 7 * i, ignore_eos=True, temperature=0.8 * (i % 3 == 2), seed=i
        )
        for i in range(9)
    ]
    expected = _tokens(LLM(target_dir, **ENGINE), prompts, params)
    config = config_of(mode, 3, drafters, acceptance="exact_match", draft_len_schedule="auto")
    llm = LLM(target_dir, config, **ENGINE)
    monkeypatch.setattr(AutoDraftLen, "_choose", at_random)
    assert _tokens(llm, prompts, params) == expected
    assert seen >= {0, 1, 2, 3}
    # A graph for each size, length and kind of sampling: greedy, sampled; and those of prompts.
    # At two sizes the head reads late what it missed.
    graphs = llm.executor.graphs
    assert graphs.num_graphs <= 2 * 4 * 2 + 2 * 2 * len(graphs.contexts) + 2


def test_times_are_measured_at_the_first_start(
    target_dir: Path, drafters: Drafters, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_draft_len, "SECONDS_AT_START", inf)  # the first may compile kernels
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    llm = LLM(target_dir, config, **ENGINE)
    rows = json.loads(next(cache.glob("*.json")).read_text())
    lengths = _auto(llm).lengths
    assert {(size, greedy, k) for size, greedy, _, k, *_ in rows} == set(
        itertools.product((2, 4), (True, False), lengths)
    )
    assert all(1e-6 < fixed < 0.1 and 0 <= per_token < 1e-4 for *_, fixed, per_token in rows)
    # For each size also what the head reads late, and passes over prompts, greedy and sampled.
    captured = len(rows) + 2 + 2 * len(llm.executor.graphs.contexts)
    assert llm.executor.graphs.num_graphs == captured
    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphs, "replay_seconds", lambda *args, **kwargs: pytest.fail("again"))
        again = LLM(target_dir, config, **ENGINE)
    assert again.executor.graphs.num_graphs == captured  # the times are known, the graphs not kept


def test_sizes_in_between_are_left_for_later_when_a_start_takes_too_long(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_draft_len, "SECONDS_AT_START", 0.0)
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    graph_config = CudaGraphConfig(batch_sizes=(2, 3, 4))
    llm = LLM(target_dir, config, **ENGINE | {"cuda_graph_config": graph_config})
    graphs = llm.executor.graphs
    assert {key.batch_size for key in graphs._graphs if not key.context_tokens} == {2, 4}
    passes = sorted({key.context_tokens for key in graphs._graphs if key.context_tokens})
    assert passes[-1] == graphs.contexts[-1].num_tokens
    assert all(2 * a <= b for a, b in pairwise(passes)) and len(passes) < len(graphs.contexts)
    params = [SamplingParams(max_tokens=20, ignore_eos=True)] * 3
    prompts = [[3, 5], [7, 9, 4], [8]]
    expected = _tokens(LLM(target_dir, **ENGINE), prompts, params)
    assert _tokens(llm, prompts, params) == expected


def test_what_is_captured_at_start_is_not_captured_later(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every length of every size, greedy and sampled, and what the head reads late."""
    graph_config = CudaGraphConfig(batch_sizes=(2, 4), capture_at_start=True)
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    for _ in range(2):  # the second one knows the times
        llm = LLM(target_dir, config, **ENGINE | {"cuda_graph_config": graph_config})
        graphs = llm.executor.graphs
        captured = graphs.num_graphs
        assert captured == 2 * 4 * 2 + 2 + 2 * len(graphs.contexts)
        with monkeypatch.context() as patch:
            patch.setattr(AutoDraftLen, "_choose", _in_turn([3, 0, 0, 1, 2, 0, 3]))
            for heat in (0.0, 0.8):
                params = [
                    SamplingParams(max_tokens=9 + 7 * i, ignore_eos=True, temperature=heat)
                    for i in range(6)
                ]
                _tokens(llm, [[3, 5 + i] for i in range(6)], params)
        assert graphs.num_graphs == captured


def test_a_missing_graph_is_captured_once_it_would_have_paid(
    target_dir: Path, drafters: Drafters, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine knows the times and captures nothing at start. Random drafts are not worth a
    step.

    The times are made up, so that what else the machine does changes nothing.
    """
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    LLM(target_dir, config, **ENGINE).shutdown()
    (times,) = cache.glob("*.json")
    rows = json.loads(times.read_text())
    times.write_text(
        json.dumps([[*shape, k, 1e-3 * (1 + 0.2 * k), 0.0] for *shape, k, _, _ in rows])
    )
    monkeypatch.setattr(StepCosts, "add", lambda *args: None)
    monkeypatch.setattr(choose_draft_len, "_capture", lambda *args: None)
    llm = LLM(target_dir, config, **ENGINE)
    graphs, auto = llm.executor.graphs, _auto(llm)
    params = [SamplingParams(max_tokens=120, ignore_eos=True)] * 4
    prompts = [[3, 5 + i] for i in range(4)]
    for _ in range(200):
        if auto.chosen == 0:
            break
        _tokens(llm, prompts, params)
    assert auto.chosen == 0
    lengths = {key.draft_len for key in graphs._graphs if not key.context_tokens}
    assert 0 in lengths and len(lengths) < 4, "not all were worth a capture"


@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_engine", "mtp_eagle"])
def test_a_head_reads_late_what_it_missed(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting rests longer than there is room, and resumes. The head is perfect, so that anything
    that it lacks costs acceptance."""
    lengths = [3] * 4 + [0] * (CAPACITY + 5) + [3] * 6 + [0] * 3 + [3] * 40
    target, options = one_layer_target(tmp_path), {"draft_len_schedule": "auto"}
    if mode == "mtp_eagle":
        add_perfect_mtp(target, 3)
        config: Any = MTPDecodingConfig(num_nextn_predict_layers=3, **options)
    else:
        head, fused = perfect_eagle3(tmp_path, target), mode == "eagle3"
        config = EagleDecodingConfig(
            max_draft_len=3, speculative_model=head, eagle3_one_model=fused, **options
        )
    prompts = [[(3 + i * j) % 97 for j in range(20 + i)] for i in range(1, 5)]
    params = [SamplingParams(max_tokens=90, ignore_eos=True)] * 4
    expected = _tokens(LLM(target, **ENGINE), prompts, params)
    accepted = []
    for reads_late in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(AutoDraftLen, "_choose", _in_turn(lengths))
            if not reads_late:
                patch.setattr(runner, "_may_read_late", lambda parts: False)
            llm = LLM(target, config, **ENGINE)
            graphs = llm.executor.graphs
            assert _tokens(llm, prompts, params) == expected
        late = [key for key in graphs._graphs if key.reads_missed]
        assert bool(late) is reads_late
        accepted.append(llm.executor.statistics.accepted_lens)
    assert accepted[0] == accepted[1]
    assert set(accepted[0]) == {0, 3}


def test_a_length_whose_graph_finds_no_memory_is_given_up(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on, and the step itself runs eagerly."""
    capture = CudaGraphs._capture_inert

    def capture_some(self: CudaGraphs, key: GraphKey) -> Any:
        if key.draft_len == 2 and not key.context_tokens:
            raise torch.OutOfMemoryError("no memory")
        return capture(self, key)

    monkeypatch.setattr(CudaGraphs, "_capture_inert", capture_some)
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    llm = LLM(target_dir, config, **ENGINE)
    auto = _auto(llm)
    auto.chosen = 2
    params = [SamplingParams(max_tokens=90, ignore_eos=True)] * 2
    prompts = [[3, 5], [7, 9, 4]]
    expected = _tokens(LLM(target_dir, **ENGINE), prompts, params)
    assert _tokens(llm, prompts, params) == expected
    assert 2 not in auto._allowed and auto.chosen != 2


def _in_turn(lengths: list[int]) -> Callable[..., int]:
    turn = itertools.cycle(lengths)
    return lambda self, batch, most: next(turn)


def _tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
