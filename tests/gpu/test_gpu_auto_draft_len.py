"""Draft lengths that choose themselves, as graphs: tokens stay, times are known at the start."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, make_drafters
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, SamplingParams
from trtspec.executor.auto_draft_len import AutoDraftLen
from trtspec.executor.request import ScheduledBatch

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
    graphs = llm.executor.graphs
    assert graphs.num_graphs <= 2 * 4 * 2 + 2 * 2 * len(graphs.contexts)


def test_times_are_measured_at_the_start(target_dir: Path, drafters: Drafters, cache: Path) -> None:
    config = config_of("eagle3", 3, drafters, draft_len_schedule="auto")
    llm = LLM(target_dir, config, **ENGINE)
    rows = json.loads(next(cache.glob("*.json")).read_text())
    lengths = llm.executor._draft_len.lengths
    assert {(size, greedy, k) for size, greedy, _, k, _ in rows} == set(
        itertools.product((2, 4), (True, False), lengths)
    )
    assert all(1e-6 < seconds < 0.1 for *_, seconds in rows)
    assert llm.executor.graphs.num_graphs == len(rows)
    again = LLM(target_dir, config, **ENGINE)
    assert again.executor.graphs.num_graphs == 0  # the times are known


def _tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
