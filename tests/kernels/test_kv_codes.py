"""Keys and values in FP8: codes as torch makes them, and attention over them against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_pass import ROTATED, make_latent_pass
from matrix import covering
from paged_pass import attend, in_fp8, make_pass
from torch import Tensor

from trtspec.attention.base import AttentionBackend
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.layers.norm import RMSNorm
from trtspec.metadata.attention import AttentionMetadata, KVGroup
from trtspec.ops.layer.fp8 import FP8, LARGEST
from trtspec.ops.layer.kv_codes import decode, encode, put
from trtspec.ops.layer.latent import rope_and_write_latent
from trtspec.ops.layer.rope import CacheWrite, Rope, rope_and_write

pytest.importorskip("triton", reason="needs triton")
from trtspec.attention.triton_backend import TritonAttention
from trtspec.ops.layer import triton_latent, triton_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
BACKENDS = [TorchAttention(), TritonAttention()]


def _wide(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of all sizes: e4m3's smallest and less, ties, its largest and more."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(-12, 11, shape, generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(power.float())
    eighths = torch.randint(0, 32, shape, generator=generator) / 16 * torch.exp2(power.float())
    return torch.where(torch.rand(shape, generator=generator) < 0.3, eighths, x).to(DEVICE)


# -- codes -------------------------------------------------------------------------------------
def test_codes_are_the_nearest() -> None:
    x, scales = _wide(50, 3, 64), torch.tensor([1.0, 0.25, 3.0], device=DEVICE)
    codes = encode(x, scales)
    assert codes.dtype == FP8
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    every = every[every.isfinite()].unique()
    scaled = x.cpu().double() / scales.cpu().double()[:, None]
    nearest = (every - scaled[..., None]).abs().amin(-1)
    assert torch.equal((codes.cpu().double() - scaled).abs(), nearest)
    inside = (scaled.abs() <= LARGEST) & (scaled.abs() >= 2**-6)
    assert (nearest[inside] <= scaled.abs()[inside] * 2**-4).all() and inside.sum() > 5000
    exact = codes.double() * scales.double()[:, None]
    assert torch.equal(decode(codes, scales, torch.float32), exact.float())


def test_infinities_are_cut_off_and_nan_stays() -> None:
    x = torch.zeros(3, 2, 16, device=DEVICE)
    x[0, 0, 3], x[0, 1, 4], x[2, 0, 5] = torch.inf, -torch.inf, torch.nan
    back = decode(encode(x, scales := torch.full((2,), 0.5, device=DEVICE)), scales, torch.float32)
    assert back[0, 0, 3] == 224 and back[0, 1, 4] == -224
    assert back[2, 0].isnan().all() and not back[2, 1].any() and not back[1].any()


def _write(heads: int, dim: int) -> CacheWrite:
    k_slots, v_slots = (torch.zeros(12, heads, dim, device=DEVICE).to(FP8) for _ in "kv")
    slots = torch.tensor([7, 3, -1, 9, 4], device=DEVICE)
    scales = [torch.arange(1.0, heads + 1).to(DEVICE) / n for n in (4, 7)]
    return CacheWrite(k_slots, v_slots, slots, 11, k_scales=scales[0], v_scales=scales[1])


def _rope(dim: int) -> Rope:
    angles = torch.randn(20, dim // 2, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    positions = torch.tensor([3, 19, 0, 7, 7], device=DEVICE)
    return Rope(torch.cat([angles.cos(), angles.sin()], dim=-1), positions)


@pytest.mark.slow
@covering(**{
    "heads,dim": [((6, 2), 8), ((9, 3), 64), ((4, 4), 48)], "normed": [False, True],
    "few_heads": [0, 1024], "keeps_finite": [False, True],
})  # fmt: skip
def test_rope_and_write(
    heads: tuple[int, int], dim: int, normed: bool, few_heads: int, keeps_finite: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The kernel writes the codes that torch does, which are those of what a float cache gets."""
    monkeypatch.setattr(triton_rope, "FEW_HEADS", few_heads)
    q_heads, kv_heads = heads
    qkv, rope, norms = _wide(5, q_heads + 2 * kv_heads, dim), _rope(dim), None
    qkv[1, q_heads, 3], qkv[3, -1, 0] = torch.nan, torch.nan
    if normed:
        norms = RMSNorm(dim, 1e-5), RMSNorm(dim, 1e-5)
        for i, norm in enumerate(norms):
            norm.weight.data = _wide(dim, seed=5 + i)
    floats = CacheWrite(
        *(torch.zeros(12, kv_heads, dim, device=DEVICE) for _ in "kv"),
        _write(kv_heads, dim).slots, 11, keeps_finite,
    )  # fmt: skip
    rope_and_write(qkv, rope, q_heads, floats, norms, normed)
    for function in (triton_rope.rope_and_write, rope_and_write):
        to = _write(kv_heads, dim)._replace(keeps_finite=keeps_finite)
        function(qkv, rope, q_heads, to, norms, normed)
        for codes, scales, given in zip(
            to[:2], (to.k_scales, to.v_scales), floats[:2], strict=True
        ):
            assert isinstance(codes, Tensor) and isinstance(scales, Tensor)
            codes, expected = codes.float(), encode(given, scales).float()
            assert torch.equal(codes.isnan(), expected.isnan())
            codes, expected = codes.nan_to_num(0), expected.nan_to_num(0)
            # A code may be the next one, where sums differ in the last bit.
            torch.testing.assert_close(codes, expected, atol=2**-9, rtol=2**-3)
            assert (codes != expected).float().mean() < 0.01
        assert to.k_slots[3, 0].float().isnan().all() == (not keeps_finite)
        assert to.v_slots[9, -1].float().isnan().all() == (not keeps_finite)


@pytest.mark.parametrize("has_nan", [False, True])
def test_rope_and_write_latent(has_nan: bool) -> None:
    rank, size, heads = 48, 16, 3
    q, latent, rope = _wide(5, heads, size), _wide(5, rank + size, seed=1), _rope(size)
    if has_nan:
        latent[1, rank + 2] = torch.nan
    norm, caches = RMSNorm(rank, 1e-5), []
    norm.weight.data = _wide(rank, seed=3)
    for function in (triton_latent.rope_and_write_latent, rope_and_write_latent):
        to = _write(1, rank + size)
        function(q, latent, norm, rope, torch.empty_like(q), to)
        caches.append(to.k_slots.float())
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert caches[0].isnan().sum() == (rank + size) * has_nan
    torch.testing.assert_close(*caches, atol=2**-9, rtol=2**-3, equal_nan=True)
    assert ((caches[0] != caches[1]) & ~caches[0].isnan()).float().mean() < 0.01


# -- attention ---------------------------------------------------------------------------------
def _queries(meta: AttentionMetadata, heads: int, dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(meta.num_tokens, heads, dim, generator=generator).to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(("rows", "heads", "dim", "page", "lengths", "window", "softcap"), [
    (1, (6, 2), 64, 32, [70, 5], None, None),
    (4, (4, 4), 16, 8, [1, 130], 40, None),
    (8, (2, 1), 128, 16, [65], None, 3.0),
    (16, (3, 1), 48, 16, [20, 33], None, None),
])  # fmt: skip
def test_generations(
    rows: int, heads: tuple[int, int], dim: int, page: int, lengths: list[int],
    window: int | None, softcap: float | None, backend: AttentionBackend,
) -> None:  # fmt: skip
    meta = make_pass(lengths, rows, heads[1], dim, page, max_seq_len=4096)
    coded, exact = in_fp8(meta)
    q, how = _queries(meta, heads[0], dim), {"window": window, "softcap": softcap}
    ours = attend(backend, q, coded, **how)
    twin = attend(TorchAttention(), q.double(), exact, **how)
    torch.testing.assert_close(ours.double(), twin, atol=2e-5, rtol=1e-4)
    rough = attend(TorchAttention(), q.double(), _wider(meta), **how)
    assert 1e-4 < (ours - rough).norm() / rough.norm() < 0.06


def _wider(meta: AttentionMetadata) -> AttentionMetadata:
    group = meta.kv_groups[0]
    wide = KVGroup(group.k_cache.double(), group.v_cache.double())
    return replace(meta, kv_groups=(wide,), derived={})


def _prompts(texts: AttentionMetadata, spans: list[tuple[int, int]]) -> AttentionMetadata:
    return replace(
        texts, context_lens=tuple(n for _, n in spans), context_starts=tuple(s for s, _ in spans),
        num_generations=0, rows_per_generation=1, derived={},
        position_ids=torch.cat([torch.arange(s, s + n) for s, n in spans]).to(DEVICE),
    )  # fmt: skip


SPANS = [(0, 40), (150, 9), (63, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(("heads", "dim", "window"), [((4, 2), 64, None), ((4, 1), 128, 60)])
def test_contexts(
    heads: tuple[int, int], dim: int, window: int | None, backend: AttentionBackend
) -> None:
    meta = make_pass([s + n for s, n in SPANS], 1, heads[1], dim, 16, max_seq_len=4096)
    coded, exact = in_fp8(_prompts(meta, SPANS))
    q = _queries(coded, heads[0], dim)
    ours = attend(backend, q, coded, window=window)
    twin = attend(TorchAttention(), q.double(), exact, window=window)
    torch.testing.assert_close(ours.double(), twin, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("is_prompt", [False, True])
def test_latent(is_prompt: bool, backend: AttentionBackend) -> None:
    meta = make_latent_pass([(n, 1 if is_prompt else 4) for n in [70, 5]], 32, 8)
    if is_prompt:
        meta = _prompts(meta, [(60, 10), (0, 5)])
    coded, exact = in_fp8(meta)
    q, how = _queries(coded, 6, 32 + ROTATED), {"window": None, "scale": 0.17}
    ours = attend(backend, q, coded, layer=1, **how)
    twin = attend(TorchAttention(), q.double(), exact, layer=1, **how)
    torch.testing.assert_close(ours.double(), twin, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("is_latent", [False, True])
def test_nan_reaches_the_rows_that_see_it(
    side: int, is_latent: bool, backend: AttentionBackend
) -> None:
    """Of a prompt's rows those behind a NaN; of generations the row itself."""
    if is_latent:
        texts, dim = make_latent_pass([(20, 1)], 32, 8), 32 + ROTATED
    else:
        texts, dim = make_pass([20], 1, 1, 16, 8, max_seq_len=4096), 16
    coded = in_fp8(_prompts(texts, [(2, 10)]))[0]
    group = coded.kv_groups[0]
    page = group.page_size
    slot = int(coded.block_tables[0][0, 7 // page]) * page + 7 % page
    nan = torch.full((1, 1, group.k_cache.shape[-1]), torch.nan, device=DEVICE)
    where = torch.tensor([slot], device=DEVICE)
    cache = group.layer_slots[0][0 if is_latent else side]
    put(cache, where, nan, torch.ones(1, device=DEVICE))
    q = _queries(coded, 3, dim)
    out = attend(backend, q, coded)
    assert out[5:].isnan().all()
    is_masked = backend.name == "triton" and not is_latent and side == 0  # torch adds masks
    assert not is_masked or out[:5].isfinite().all()
    generations = replace(
        coded, context_lens=(), context_starts=(), num_generations=1, rows_per_generation=3,
        position_ids=torch.tensor([5, 6, 7], device=DEVICE), derived={},
    )  # fmt: skip
    out = attend(backend, q[:3], generations)
    assert out[2].isnan().all() and (not is_masked or out[:2].isfinite().all())
