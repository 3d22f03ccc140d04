"""Mixtures of experts on CUDA: every way of computing them, and whole steps as graphs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from matrix import MTP, Drafters, config_of
from naive_experts import naive_experts, random_experts, to_fp8
from oracle import VOCAB, Oracle
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from trtspec.ops.experts import torch as moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [  # rows, experts, chosen, hidden size, inner size
    (1, 8, 2, 64, 48),
    (8, 8, 8, 64, 48),
    (70, 8, 3, 64, 48),
    (300, 64, 4, 128, 24),
    (300, 16, 4, 128, 80),
    (33, 160, 8, 256, 136),
    (4, 128, 8, 1024, 704),
]


def _bound(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "top_k", "size", "inner"), SHAPES)
def test_experts_equal_a_loop(
    dtype: torch.dtype, rows: int, count: int, top_k: int, size: int, inner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What `Experts` chooses, and each way that serves these, against float64 row by row."""
    experts, x, ids, weights = random_experts(rows, count, top_k, size, inner, dtype)
    expected = naive_experts(experts, x, ids, weights)
    experts.cuda()
    args = x.cuda(), ids.cuda(), weights.cuda()
    stacked = experts.gate_up_proj, experts.down_proj
    ways = {"chosen": experts(*args)}
    for name, least in (("the library", 0), ("Triton", 1 << 30)):
        with monkeypatch.context() as patch:
            patch.setattr(moe, "MIN_LIBRARY_ROWS", least)
            ways[name] = moe.grouped_experts(*args, *stacked)
    bound = _bound(dtype)
    for name, out in ways.items():
        assert out.dtype == dtype, name
        torch.testing.assert_close(
            out.cpu().double(), expected, atol=bound, rtol=bound, msg=partial("{}: {}".format, name)
        )


def test_hopper_has_the_grouped_product() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(2, 24, 64, device="cuda")
    assert moe.has_grouped_mm(x, weight) and not moe.has_grouped_mm(x, weight[:, :20])
    assert not moe.has_grouped_mm(x.half(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [4, 100])
def test_experts_wait_for_nothing_and_replay_in_a_graph(dtype: torch.dtype, rows: int) -> None:
    """The graph is captured with one choice of experts and replayed with others."""
    experts, x, _, _ = random_experts(rows, 16, 4, 64, 48, dtype)
    experts.cuda()
    logits, inputs = torch.zeros(rows, 16, device="cuda"), torch.zeros_like(x, device="cuda")

    def step() -> torch.Tensor:
        ids, weights = moe.route(logits, None, 4, n_group=4, topk_group=2, scale=1.5)
        return experts(inputs, ids, weights)

    with torch.no_grad():
        graph, out = steady.captured(step)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            logits.copy_(torch.randn(rows, 16, generator=generator))
            inputs.copy_(torch.randn(x.shape, generator=generator))
            graph.replay()
            bound = _bound(dtype)
            torch.testing.assert_close(out, step(), atol=bound, rtol=bound)
            assert bool((out != 0).any())


FP8_SHAPES = [  # rows, experts, chosen, hidden size, inner size
    (1, 8, 2, 256, 136),
    (33, 160, 8, 256, 136),
    (300, 64, 4, 128, 24),
    (300, 4, 2, 384, 200),
    (4, 128, 8, 1024, 704),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(("rows", "count", "top_k", "size", "inner"), FP8_SHAPES)
def test_fp8_experts_equal_a_loop(
    dtype: torch.dtype, by_rows: bool, rows: int, count: int, top_k: int, size: int, inner: int
) -> None:
    """Against float64 over the values of the codes, with a scale for each row and for groups."""
    experts, x, ids, weights = random_experts(rows, count, top_k, size, inner, torch.float32)
    fp8 = to_fp8(experts, *((size, inner) if by_rows else (128, 128)))
    x = x.to(dtype)
    expected = naive_experts(experts, x, ids, weights)
    gate_up, down = fp8.part(0, count, "cuda")
    args = x.cuda(), ids.cuda(), weights.cuda(), gate_up, down
    out = moe.grouped_experts(*args)
    assert out.dtype == dtype
    bound = _bound(dtype)
    torch.testing.assert_close(out.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("rows", [4, 300])
def test_fp8_experts_wait_for_nothing_and_replay_in_a_graph(by_rows: bool, rows: int) -> None:
    experts, x, _, _ = random_experts(rows, 16, 4, 256, 136, torch.float32)
    fp8 = to_fp8(experts, *((256, 136) if by_rows else (128, 128)))
    gate_up, down = fp8.part(0, 12, "cuda")  # 4 experts are another rank's
    logits = torch.zeros(rows, 16, device="cuda")
    inputs = torch.zeros(x.shape, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        ids, weights = moe.route(logits, None, 4, n_group=4, topk_group=2, scale=1.5)
        own = torch.where(ids >= 12, 12, ids)
        return moe.grouped_experts(inputs, own, weights, gate_up, down, total=16)

    with torch.no_grad():
        graph, out = steady.captured(step)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            logits.copy_(torch.randn(rows, 16, generator=generator))
            inputs.copy_(torch.randn(x.shape, generator=generator))
            graph.replay()
            torch.testing.assert_close(out, step(), atol=5e-2, rtol=5e-2)
            assert bool((out != 0).any())


# -- whole steps ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mtp_model_dir(tmp_path_factory.mktemp("target"), layout="glm", num_mtp_layers=3, seed=1)
    return path, Oracle(path)


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def _llm(path: Path, mode: str, **options: Any) -> LLM:
    spec = config_of(mode, 3, Drafters())
    defaults = {
        "dtype": "float32", "max_batch_size": 4, "max_seq_len": 96,
        "kv_cache_config": KvCacheConfig(max_tokens=1024, tokens_per_block=8),
    }  # fmt: skip
    return LLM(path, spec, device="cuda", **{**defaults, **options})


@pytest.mark.parametrize("mode", ["none", *MTP])
@pytest.mark.parametrize("graphs", [CudaGraphConfig(), None])
def test_greedy_equals_transformers_on_cuda(target: Any, mode: str, graphs: Any) -> None:
    path, oracle = target
    llm = _llm(path, mode, cuda_graph_config=graphs, max_num_tokens=32, enable_chunked_prefill=True)
    prompts = _prompts(6)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 24)
    llm.executor.kv_cache.check_integrity()


@pytest.mark.parametrize("mode", ["none", "mtp", "mtp_eagle"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_step_is_one_graph_that_waits_for_nothing(target: Any, mode: str, dtype: str) -> None:
    llm = _llm(
        target[0], mode, dtype=dtype, max_batch_size=2, max_seq_len=200,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=128),
    )  # fmt: skip
    steady.start(llm.executor)
    steady.launch(llm.executor)
    steady.finish(llm.executor)
