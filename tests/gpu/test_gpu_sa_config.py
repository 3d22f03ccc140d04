"""`sa_config` in graphs: tokens stay, whatever proposed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, make_drafters
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, SAEnhancerConfig, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K = 3
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_seq_len": 160,
    "max_batch_size": 4,
    "cuda_graph_config": CudaGraphConfig(batch_sizes=(2, 4)),
}
LOOKUP = SAEnhancerConfig(threshold=2, global_pool_tokens=1024)
PROMPTS = [[3 + i % 7, 5] * (1 + 5 * i % 17) for i in range(9)]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=4)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


def params_of(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=20 + 7 * i, ignore_eos=True, temperature=temperature * (i % 3 > 0), seed=i
        )
        for i in range(len(PROMPTS))
    ]


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("mode", ["eagle3", "mtp", "pard", "draft_target", "dflash"])
def test_tokens_are_those_of_plain_decoding(
    target_dir: Path, drafters: Drafters, mode: str
) -> None:
    """Greedy requests and seeded ones, twice: the second time the pool has the greedy texts."""
    params = params_of(0.8)
    expected = tokens(LLM(target_dir, **ENGINE), params)
    llm = LLM(target_dir, config_of(mode, K, drafters, sa_config=LOOKUP, acceptance="exact_match"),
              **ENGINE)  # fmt: skip
    assert tokens(llm, params) == expected
    first = llm.stats()
    assert tokens(llm, params) == expected
    both = llm.stats()
    assert llm.executor.graphs.num_graphs > 0
    assert first.num_looked_up_drafts > 50
    assert both.num_looked_up_drafts > 1.5 * first.num_looked_up_drafts
    assert both.acceptance_length > first.acceptance_length


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_graphs_judge_as_eager_steps_do(target_dir: Path, drafters: Drafters, rule: str) -> None:
    """Requests one after another, so that pools are alike; some drafts are drawn, some certain."""
    said = []
    for graphs in (ENGINE["cuda_graph_config"], None):
        options = ENGINE | {"cuda_graph_config": graphs, "max_batch_size": 2}
        config = config_of("eagle3", K, drafters, sa_config=LOOKUP, acceptance=rule)
        llm = LLM(target_dir, config, **options)
        params = params_of(0.8)
        said.append(
            [llm.generate(p, s).outputs[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
        )
        assert llm.stats().num_looked_up_drafts > 50
    assert said[0] == said[1]
