"""Drafting in parallel on CUDA: the executor's tests for these modes, and the drafts themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_gpu_executor as gpu
import torch
from test_executor import PARALLEL
from test_gpu_executor import draft_dir, expected, target_dir  # noqa: F401 (fixtures)

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("mode", PARALLEL),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pool", [None, 112])
def test_greedy_equals_transformers(
    target_dir: Path, draft_dir: Path, expected: list[list[int]],  # noqa: F811
    mode: str, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    gpu.test_greedy_equals_transformers_on_cuda(
        target_dir, draft_dir, expected, mode, overlap, pool
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_launching_waits_for_nothing(
    target_dir: Path, draft_dir: Path, mode: str, temperature: float  # noqa: F811
) -> None:  # fmt: skip
    gpu.test_launching_a_generation_step_waits_for_nothing(target_dir, draft_dir, mode, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_step_is_one_graph_launch(
    target_dir: Path, draft_dir: Path, mode: str, temperature: float  # noqa: F811
) -> None:  # fmt: skip
    gpu.test_a_generation_step_is_one_graph_launch(target_dir, draft_dir, mode, temperature)


def test_graphs_and_eager_steps_say_the_same(
    target_dir: Path, draft_dir: Path, expected: list[list[int]], mode: str  # noqa: F811
) -> None:  # fmt: skip
    gpu.test_graphs_and_eager_steps_say_the_same(target_dir, draft_dir, expected, mode)


def test_graphs_of_prompts_say_the_same(
    target_dir: Path, draft_dir: Path, expected: list[list[int]], mode: str  # noqa: F811
) -> None:  # fmt: skip
    gpu.test_graphs_of_prompts_say_the_same(target_dir, draft_dir, expected, mode)


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
def test_sampled_rules_in_a_graph_say_what_the_cpu_does(
    target_dir: Path, draft_dir: Path, mode: str, rule: str  # noqa: F811
) -> None:  # fmt: skip
    gpu.test_sampled_rules_in_a_graph_say_what_the_cpu_does(target_dir, draft_dir, mode, rule)


@pytest.mark.parametrize("config", [None, CudaGraphConfig(), CudaGraphConfig(context_tokens=(96,))])
def test_drafts_equal_the_cpus(
    target_dir: Path, draft_dir: Path, mode: str, config: CudaGraphConfig | None  # noqa: F811
) -> None:  # fmt: skip
    """Greedy texts are right whatever is drafted: what is drafted must be right too."""
    seen: dict[str, list[list[list[int]]]] = {}
    for device in ("cpu", "cuda"):
        llm = LLM(
            target_dir, gpu._config(mode, draft_dir), device=device, dtype="float32",
            max_batch_size=3, max_seq_len=64, disable_overlap_scheduler=True,
            cuda_graph_config=config, kv_cache_config=KvCacheConfig(max_tokens=512),
        )  # fmt: skip
        executor = llm.executor
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [prompt[:24] for prompt in gpu._prompts(4)]
        requests = [executor.enqueue(prompt, params) for prompt in prompts]
        seen[device] = [[] for _ in requests]
        while executor.has_work:
            executor.step()
            for drafts, request in zip(seen[device], requests, strict=True):
                if request.is_generation:
                    drafts.append(executor.state.next_tokens[request.slot, 1:].tolist())
    assert seen["cuda"] == seen["cpu"]
    assert all(drafts and -1 not in drafts[0] for drafts in seen["cpu"])
