"""An FP8 KV cache on CUDA: the kernels against float64 over what the codes stand for, NaN, and an
engine with graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from latent_pass import make_latent_pass
from matrix import Drafters, config_of
from oracle import random_prompts
from paged_pass import attend, in_fp8, make_pass
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir
from torch import Tensor

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import AttentionMetadata
from trtspec.ops.layer.fp8 import FP8
from trtspec.ops.layer.kv_codes import put

triton_backend = pytest.importorskip("trtspec.attention.triton_backend", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device that knows FP8",
    ),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _check(meta: AttentionMetadata, heads: int, dim: int, dtype: torch.dtype, layer: int) -> None:
    """Against float64; twice, bit for bit."""
    coded, exact = in_fp8(meta)
    generator = torch.Generator(device="cuda").manual_seed(1)
    q = torch.randn(meta.num_tokens, heads, dim, generator=generator, device="cuda").to(dtype)
    ours, again = (
        attend(triton_backend.TritonAttention(), q, replace(coded, derived={}), layer=layer)
        for _ in range(2)
    )
    assert ours.dtype == dtype and torch.equal(ours, again)
    twin = attend(TorchAttention(), q.double(), exact, layer=layer)
    error = (ours.double() - twin).abs().max() / twin.abs().max()
    assert error < (1e-4 if dtype == torch.float32 else 1e-2)


def _prompts(meta: AttentionMetadata, spans: list[tuple[int, int]]) -> AttentionMetadata:
    return replace(
        meta, context_lens=tuple(n for _, n in spans), context_starts=tuple(s for s, _ in spans),
        num_generations=0, rows_per_generation=1, derived={},
        position_ids=torch.cat([torch.arange(s, s + n) for s, n in spans]).cuda(),
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((32, 8), 128), ((4, 1), 256)])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("lengths", [[2000], [1023, 64, 700, 1], [40 * i for i in range(1, 33)]])
def test_generations(heads: tuple[int, int], dim: int, rows: int, lengths: list[int]) -> None:
    """Verifications, and drafts of blocks."""
    meta = make_pass(lengths, rows, heads[1], dim, 32, max_seq_len=4096)
    _check(meta, heads[0], dim, torch.bfloat16, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((32, 8), 128), ((2, 2), 8)])
def test_dtypes(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    meta = make_pass([700, 90], 3, heads[1], dim, 32, max_seq_len=4096)
    _check(meta, heads[0], dim, dtype, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((32, 8), 128), ((2, 1), 512)])
def test_contexts(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """Whole prompts and later chunks; keys in one part and in several."""
    for spans in ([(0, 300), (1500, 130), (63, 2)], [(3000, 20)]):
        meta = make_pass([s + n for s, n in spans], 1, heads[1], dim, 32, max_seq_len=4096)
        _check(_prompts(meta, spans), heads[0], dim, dtype, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [16, 128])
def test_latent(heads: int, dtype: torch.dtype) -> None:
    for spans in ([(n, 4) for n in (1023, 64, 1)], [(0, 90), (600, 77)]):
        is_prompt = spans[0][0] == 0
        shown = [(s + n, 1) for s, n in spans] if is_prompt else spans
        meta = make_latent_pass(shown, 512, 32, dtype=torch.float32, rotated=64, device="cuda")
        _check(_prompts(meta, spans) if is_prompt else meta, heads, 576, dtype, 1)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("dim", [64, 128])
def test_nan(dim: int, side: int) -> None:
    """It reaches a prompt's rows behind it, and of generations the row itself."""
    coded = in_fp8(_prompts(make_pass([200], 1, 1, dim, 32, max_seq_len=4096), [(20, 150)]))[0]
    group, table = coded.kv_groups[0], coded.block_tables[0]
    slot = table[0, 70 // 32].to(torch.int64) * 32 + 70 % 32
    nan = torch.full((1, 1, dim), torch.nan, device="cuda")
    put(group.layer_slots[0][side], slot[None], nan, torch.ones(1, device="cuda"))
    q = torch.randn(150, 3, dim, device="cuda").bfloat16()
    backend = triton_backend.TritonAttention()
    out = attend(backend, q, coded)
    expected = torch.arange(20, 170, device="cuda") >= 70
    assert torch.equal(out.isnan().flatten(1).all(1), expected)
    assert torch.equal(out.isnan().flatten(1).any(1), expected)
    generations = replace(
        coded, context_lens=(), context_starts=(), num_generations=1, rows_per_generation=3,
        position_ids=torch.tensor([68, 69, 70], device="cuda"), derived={},
    )  # fmt: skip
    out = attend(backend, q[:3], generations)
    assert out.isnan().flatten(1).all(1).tolist() == [False, False, True]
    assert out[:2].isfinite().all()


def _texts(path: Path, **options: object) -> list[list[int]]:
    options = {"kv_cache_config": KvCacheConfig(dtype="fp8")} | options
    with LLM(path, device="cuda", dtype="float32", max_seq_len=128, **options) as llm:  # type: ignore[arg-type]
        assert llm.executor.kv_cache.groups[0].k_cache.dtype == FP8
        outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("mode", ["ngram", "eagle3"])
@pytest.mark.parametrize("graphs", [CudaGraphConfig(batch_sizes=[8]), None])
def test_speculation_keeps_the_text(
    tmp_path: Path, mode: str, graphs: CudaGraphConfig | None
) -> None:
    path, head = tiny_model_dir(tmp_path), eagle3_dir(tmp_path)
    config = config_of(mode, 3, Drafters(head=head))
    plain = _texts(path, cuda_graph_config=None)
    assert _texts(path, speculative_config=config, cuda_graph_config=graphs) == plain


def test_kernels_write_what_torch_writes() -> None:
    """Of bf16 keys, with and without norms: codes differ in few places, by one."""
    from trtspec.layers.norm import RMSNorm
    from trtspec.ops.layer import triton_rope
    from trtspec.ops.layer.rope import CacheWrite, Rope, rope_and_write

    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    qkv, angles = normal(40, 8, 64).bfloat16() * 20, normal(99, 32)
    positions = torch.arange(40, device="cuda")
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=-1), positions)
    scales = torch.tensor([0.01, 0.3], device="cuda")
    norm = RMSNorm(64, 1e-6).cuda().bfloat16()
    norm.weight.data = (1 + 0.3 * normal(64)).bfloat16()
    for norms in (None, (norm, norm)):
        caches = []
        for function in (triton_rope.rope_and_write, rope_and_write.__wrapped__):  # type: ignore[attr-defined]
            k, v = (torch.zeros(64, 2, 64, device="cuda").to(FP8) for _ in "kv")
            to = CacheWrite(k, v, positions, 63, k_scales=scales, v_scales=scales)
            function(qkv, rope, 4, to, norms)
            caches.append(torch.stack([k, v]).float())
        assert caches[0].abs().max() == 448, "nothing was cut off"
        torch.testing.assert_close(*caches, atol=2**-9, rtol=2**-3)
        assert (caches[0] != caches[1]).float().mean() < 0.02
