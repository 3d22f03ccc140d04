"""Latent attention on CUDA in DeepSeek-V3's own sizes, and a tiny DeepSeek with its MTP layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import steady
import torch
from latent_pass import make_latent_pass
from matrix import MTP, Drafters, config_of
from oracle import Oracle, random_prompts
from paged_pass import attend
from tiny_heads import mtp_model_dir
from torch import Tensor

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import AttentionMetadata, KVGroup

triton_backend = pytest.importorskip("trtspec.attention.triton_backend", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATENT, ROTATED = 512, 64
SCALE = (128 + 64) ** -0.5


def _pass(spans: list[tuple[int, int]], dtype: torch.dtype) -> AttentionMetadata:
    return make_latent_pass(
        spans, LATENT, 32, max_seq_len=1 << 15, dtype=dtype, rotated=ROTATED, device="cuda"
    )


def _queries(rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = rows, heads, LATENT + ROTATED
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _check(meta: AttentionMetadata, q: Tensor) -> None:
    """Against the twin in fp32; twice, bit for bit."""
    backend = triton_backend.TritonAttention()
    ours, again = (
        attend(backend, q, replace(meta, derived={}), layer=1, scale=SCALE) for _ in range(2)
    )
    assert ours.dtype == q.dtype and torch.equal(ours, again)
    cache = meta.kv_groups[0].k_cache.float()
    exact = replace(meta, kv_groups=(KVGroup(cache, cache[..., :LATENT]),), derived={})
    twin = attend(TorchAttention(), q.float(), exact, layer=1, scale=SCALE)
    error = (ours.float() - twin).abs().max() / twin.abs().max()
    assert error < (1e-4 if q.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "lengths", [[0], [8190], [1023, 64, 5000, 1], [300 * i for i in range(1, 17)]]
)
def test_generations_equal_torch(heads: int, rows: int, lengths: list[int]) -> None:
    meta = _pass([(n, rows) for n in lengths], torch.bfloat16)
    _check(meta, _queries(len(lengths) * rows, heads, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    meta = _pass([(n, 3) for n in [700, 90]], dtype)
    _check(meta, _queries(6, 16, dtype))


@pytest.mark.parametrize("heads", [16, 128])
def test_contexts_equal_torch(heads: int) -> None:
    """Whole prompts and later chunks beside generations."""
    starts, counts, generations, rows = [0, 0, 600], [1, 300, 77], [9, 2000], 4
    spans = [*zip(starts, counts, strict=True), *((n, rows) for n in generations)]
    texts = _pass([(start + count, 1) for start, count in spans], torch.bfloat16)
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).cuda()
    meta = replace(
        texts, context_lens=tuple(counts), context_starts=tuple(starts),
        num_generations=len(generations), rows_per_generation=rows, position_ids=positions,
        max_kv_len=2100, derived={},
    )  # fmt: skip
    _check(meta, _queries(len(positions), heads, torch.bfloat16))


# -- a tiny DeepSeek ---------------------------------------------------------------------------
MODES = ["none", *MTP]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("deepseek"), layout="deepseek_v3")


@pytest.fixture(scope="module")
def expected(target_dir: Path) -> list[list[int]]:
    oracle = Oracle(target_dir)
    return [oracle.extend(prompt, 24) for prompt in random_prompts(6)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graphs", [CudaGraphConfig(batch_sizes=[8]), None])
def test_graphs_and_eager_steps_equal_transformers(
    target_dir: Path, expected: list[list[int]], mode: str, graphs: CudaGraphConfig | None
) -> None:
    """Five requests in a graph for eight."""
    config = config_of(mode, 3, Drafters())
    llm = LLM(
        target_dir, config, device="cuda", dtype="float32", max_batch_size=8, max_seq_len=96,
        cuda_graph_config=graphs,
        kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
    )  # fmt: skip
    outputs = llm.generate(random_prompts(6)[:5], SamplingParams(max_tokens=24, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected[:5]
    captured = llm.executor.graphs
    assert (captured is None) == (graphs is None)
    assert captured is None or captured.num_graphs > 0


def test_flashinfer_leaves_it_to_triton(target_dir: Path, expected: list[list[int]]) -> None:
    pytest.importorskip("flashinfer")
    llm = LLM(
        target_dir, MTPDecodingConfig(num_nextn_predict_layers=3), device="cuda", dtype="float32",
        max_batch_size=3, max_seq_len=96, attn_backend="flashinfer",
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("mode", ["none", "mtp_eagle"])
def test_graphs_of_prompts_say_the_same(
    target_dir: Path, expected: list[list[int]], mode: str
) -> None:
    config = config_of(mode, 3, Drafters())
    llm = LLM(
        target_dir, config, device="cuda", dtype="float32", max_batch_size=3, max_seq_len=96,
        cuda_graph_config=CudaGraphConfig(context_tokens=(32, 96)),
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_step_is_one_graph_launch(
    target_dir: Path, mode: str, temperature: float
) -> None:
    """No kernel is launched by itself; a two-engine mode launches one graph for the step and one
    for each draft pass."""
    executor = steady.engine(target_dir, config_of(mode, 3, Drafters()), temperature).executor
    steady.launch(executor, 4 if mode.endswith("two_engine") else 1)
    steady.finish(executor)
