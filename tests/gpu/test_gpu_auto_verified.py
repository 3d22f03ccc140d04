"""`max_verified_drafts="auto"`: a graph for each number of drafts that a step may verify."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, make_drafters
from test_gpu_auto_draft_len import ENGINE, _tokens
from tiny_heads import mtp_model_dir

from trtspec import LLM, SamplingParams
from trtspec.executor.cuda_graphs.graphs import CudaGraphs
from trtspec.executor.draft_lens import choose_draft_len
from trtspec.executor.draft_lens.auto_verified import AutoVerified
from trtspec.executor.request import ScheduledBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K = 3


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    return tmp_path / "step_times"


@pytest.mark.parametrize("mode", ["eagle3", "mtp_eagle", "mtp", "dflash", "dspark", "draft_target"])
def test_tokens_stay_while_the_number_changes_at_every_step(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy requests, and seeded ones that say what plain decoding says."""
    rng, seen = random.Random(0), Counter[int]()

    def at_random(self: AutoVerified, batch: ScheduledBatch, most: int) -> int:
        self.chosen, self._most = rng.choice(self.lengths), most
        seen[self.chosen] += 1
        return self.chosen

    prompts = [[3 + i % 7, 5] * (1 + 5 * i % 17) for i in range(9)]
    params = [
        SamplingParams(
            max_tokens=20 + 7 * i, ignore_eos=True, temperature=0.8 * (i % 3 == 2), seed=i
        )
        for i in range(9)
    ]
    expected = _tokens(LLM(target_dir, **ENGINE), prompts, params)
    config = config_of(mode, K, drafters, acceptance="exact_match", max_verified_drafts="auto")
    llm = LLM(target_dir, config, **ENGINE)
    monkeypatch.setattr(AutoVerified, "_choose", at_random)
    assert _tokens(llm, prompts, params) == expected
    assert set(seen) == {0, 1, 2, 3}
    graphs = llm.executor.graphs
    assert graphs is not None
    verified = {(k.num_drafts, k.draft_len, k.mean_verified) for k in graphs._graphs}
    assert {(3, 3, 1), (3, 3, 2), (3, 3, None), (0, 0, None)} == verified


def test_it_times_reads_chances_and_chooses(
    target_dir: Path, drafters: Drafters, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_draft_len, "SECONDS_AT_START", inf)  # the first may compile kernels
    config: Any = config_of("eagle3", K, drafters, max_verified_drafts="auto")
    llm = LLM(target_dir, config, **ENGINE)
    auto = llm.executor._draft_len
    assert isinstance(auto, AutoVerified) and auto._is_guess
    rows = json.loads(next(cache.glob("*.json")).read_text())
    assert {(size, greedy, k) for size, greedy, _, k, *_ in rows} == set(
        itertools.product((2, 4), (True, False), range(K + 1))
    )
    prompts = [[3 + i % 7, 5] * (1 + 5 * i % 17) for i in range(4)]
    params = [SamplingParams(max_tokens=60, ignore_eos=True)] * 4
    expected = _tokens(LLM(target_dir, **ENGINE), prompts, params)
    assert _tokens(llm, prompts, params) == expected
    assert not auto._is_guess, "chances were read"
    assert auto._predicted != auto._accepted, "what was accepted was compared with the chances"
    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphs, "replay_seconds", lambda *args, **kwargs: pytest.fail("again"))
        LLM(target_dir, config, **ENGINE)
