"""The mixture's Triton kernels against their twins; in the interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_experts import (
    BETWEEN,
    ROUTES,
    dense_weights,
    naive_experts,
    naive_route,
    random_experts,
    to_fp4,
    to_fp8,
)
from random_four_bits import to_four_bits

from trtspec.layers.norm import RMSNorm
from trtspec.ops.experts import torch as moe
from trtspec.ops.experts.fp4 import Fp4Weight
from trtspec.ops.layer.four_bits import FourBitWeight
from trtspec.ops.layer.fp8 import Fp8Weight

triton_moe = pytest.importorskip("trtspec.ops.experts.triton", reason="needs triton")
triton_fp4 = pytest.importorskip("trtspec.ops.experts.triton_fp4", reason="needs triton")
triton_fp8 = pytest.importorskip("trtspec.ops.experts.triton_fp8", reason="needs triton")
triton_four_bits = pytest.importorskip(
    "trtspec.ops.experts.triton_four_bits", reason="needs triton"
)
KERNELS = {Fp4Weight: triton_fp4, Fp8Weight: triton_fp8, FourBitWeight: triton_four_bits}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHAPES = [(1, 8, 2), (5, 8, 3), (3, 40, 8), (400, 5, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "experts", "size"), [(1, 8, 48), (3, 5, 16), (2, 3, 5000)])
def test_router_logits(dtype: torch.dtype, rows: int, experts: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(rows, 2 * size, generator=generator).to(dtype)[:, :size]
    weight = torch.randn(experts, size, generator=generator) * size**-0.5
    ours = triton_moe.router_logits(x.to(DEVICE), weight.to(DEVICE))
    assert ours.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(ours.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "experts", "size"), [(1, 8, 48), (3, 5, 16), (2, 3, 5000)])
def test_normed_router_logits(
    dtype: torch.dtype, offset: float, rows: int, experts: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(rows, 2 * size, generator=generator).to(dtype)[:, :size]
    weight = torch.randn(experts, size, generator=generator) * size**-0.5
    norm = RMSNorm(size, 1e-5, offset)
    norm.weight.data = torch.rand(size, generator=generator).to(dtype)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = x.double() * scale * (norm.weight.double() + offset)
    normed, logits = triton_moe.normed_router_logits(
        x.to(DEVICE), norm.to(DEVICE), weight.to(DEVICE)
    )
    assert normed.dtype == dtype and logits.dtype == torch.float32
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(normed.cpu().double(), expected, atol=bound, rtol=bound)
    # The scores are of the rounded rows.
    of_rounded = normed.cpu().double() @ weight.double().T
    torch.testing.assert_close(logits.cpu().double(), of_rounded, atol=1e-5, rtol=1e-5)
    for ours, twin in zip(
        moe.normed_router_logits(x, norm.cpu(), weight), (expected, of_rounded), strict=True
    ):
        torch.testing.assert_close(ours.double(), twin, atol=2 * bound, rtol=bound)


def test_which_scores_are_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of a large weight, more of a small one."""
    few = {
        size: max(n for n in range(2000) if moe.is_few_for_router(n, torch.empty(*size)))
        for size in ((256, 7168), (128, 2048), (32, 2880), (4, 64))
    }
    assert few == {(256, 7168): 11, (128, 2048): 49, (32, 2880): 130, (4, 64): 1024}
    assert not moe.is_few_for_router(0, torch.empty(4, 64))


def test_router_logits_of_many_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).to(DEVICE) for n in (300, 5))
    expected = x.double() @ weight.double().T
    norm = RMSNorm(32, 1e-5).to(DEVICE)
    norm.weight.data = torch.ones(32, device=DEVICE)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    for logits, of_float64 in (
        (triton_moe.router_logits(x, weight), expected),
        (triton_moe.normed_router_logits(x, norm, weight)[1], expected * scale),
    ):
        torch.testing.assert_close(logits.double(), of_float64, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", ROUTES)
def test_route(options: dict[str, Any], has_bias: bool) -> None:
    options = dict(options)
    experts, top_k = options.pop("experts"), options.pop("top_k")
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(4, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.3 if has_bias else None
    of_logits = torch.randn(experts, generator=generator) if has_bias else None
    biases = (None if b is None else b.to(DEVICE) for b in (bias, of_logits))
    of_choice, of_all = biases
    ids, weights = triton_moe.route(
        logits.to(DEVICE), of_choice, top_k, **options, logit_bias=of_all
    )
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    logits = logits if of_logits is None else logits + of_logits
    expected = naive_route(logits, bias, top_k, **options)
    dense = dense_weights(ids.cpu(), weights.cpu(), experts).double()
    torch.testing.assert_close(dense, expected, atol=1e-6, rtol=1e-5)


def test_route_of_rows_that_are_not_numbers_stays_in_range() -> None:
    """Their weights are NaN, so that the request is found out; reading by their ids is safe."""
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    ids, weights = triton_moe.route(
        logits, None, 3, scoring="sigmoid", n_group=3, topk_group=2, normalize=True, scale=1.0
    )
    assert bool(((ids >= 0) & (ids < 12)).all()) and bool(weights.isnan().all())


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_one_score_that_is_no_number_is_not_lost(scoring: str) -> None:
    logits = torch.linspace(-3, 3, 24, device=DEVICE).view(2, 12)
    logits[1, 4] = torch.nan
    _, weights = triton_moe.route(logits, None, 3, scoring=scoring)
    assert weights.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize(("rows", "count", "top_k"), SHAPES)
def test_sort_by_expert(rows: int, count: int, top_k: int) -> None:
    _, _, ids, _ = random_experts(rows, count, top_k, 8, 8, torch.float32)
    expected = moe.sort_by_expert(ids, count)
    for ours, twin in zip(triton_moe.sort_by_expert(ids.to(DEVICE), count), expected, strict=True):
        assert ours.dtype == twin.dtype and torch.equal(ours.cpu(), twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "size", "columns"),
    [
        (1, 8, 2, 40, 24),
        (9, 5, 3, 20, 70),
        (30, 4, 2, 48, 80),
        (90, 4, 2, 48, 80),
        (70, 2, 1, 36, 16),
    ],
)
def test_grouped_matmul(
    dtype: torch.dtype, rows: int, count: int, top_k: int, size: int, columns: int
) -> None:
    """Some experts have no rows, others several tiles of them."""
    _, _, ids, _ = random_experts(rows, count, top_k, 8, 8, dtype)
    sources, ends, _ = moe.sort_by_expert(ids, count)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(rows, size, generator=generator).to(dtype)[sources]
    weight = (torch.randn(count, columns, size, generator=generator) * size**-0.5).to(dtype)
    owners = ids.flatten().sort().values
    expected = torch.einsum("nk,nmk->nm", x.double(), weight[owners].double())
    on_device = x.to(DEVICE), weight.to(DEVICE), ends.to(DEVICE)
    bias = torch.randn(count, columns, generator=generator).to(dtype)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    ours = triton_moe.grouped_matmul(*on_device, len(x) / count)
    torch.testing.assert_close(ours.cpu().double(), expected, atol=bound, rtol=bound)
    ours = triton_moe.grouped_matmul(*on_device, len(x) / count, bias.to(DEVICE))
    expected += bias[owners].double()
    torch.testing.assert_close(ours.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 2, 16), (7, 3, 48), (2, 8, 1200)])
def test_combine(dtype: torch.dtype, rows: int, top_k: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    y = torch.randn(rows * top_k, size, generator=generator).to(dtype)
    places = torch.randperm(rows * top_k, generator=generator)
    weights = torch.rand(rows, top_k, generator=generator)
    args = y.to(DEVICE), places.to(DEVICE), weights.to(DEVICE)
    ours, bound = triton_moe.combine(*args).cpu(), 2e-2 if dtype == torch.bfloat16 else 1e-5
    expected = (y[places].unflatten(0, weights.shape).double() * weights[..., None]).sum(1)
    for out in (ours, moe.combine(y, places, weights)):
        torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)
    wide = torch.randn(rows, 2 * size, generator=generator).to(dtype)
    expected += wide[:, :size].double()
    for combine, parts in ((triton_moe.combine, args), (moe.combine, (y, places, weights))):
        into = wide.to(parts[0].device, copy=True)
        out = combine(*parts, into[:, :size])
        assert out.data_ptr() == into.data_ptr() and torch.equal(
            into[:, size:].cpu(), wide[:, size:]
        )
        torch.testing.assert_close(out.cpu().double(), expected, atol=2 * bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (7, 8, 3), (30, 4, 1), (90, 4, 2)])
def test_experts_of_all_ranks_add_up(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, count: int, top_k: int
) -> None:
    """Each rank has some of the experts; what the kernels leave unwritten must not be read."""
    experts, x, ids, weights = random_experts(rows, count, top_k, 32, 24, dtype)
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    args = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
    stacked = experts.gate_up_proj.data.to(DEVICE), experts.down_proj.data.to(DEVICE)
    expected = moe.grouped_experts(*args, *stacked)

    def poisoned(
        x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, average: float, bias: None
    ) -> torch.Tensor:
        assert average == rows * top_k / count  # of all ranks' experts
        out = triton_moe.grouped_matmul(x, weight, ends, average, bias)
        out[int(ends[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(moe, "grouped_matmul", poisoned)
    total = torch.zeros_like(expected)
    for first in (0, count // 2):
        own = ids.to(DEVICE) - first
        own = torch.where((own < 0) | (own >= count // 2), count // 2, own)
        part = [weight[first : first + count // 2].contiguous() for weight in stacked]
        total += moe.grouped_experts(args[0], own, args[2], *part, total=count)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total, expected, atol=bound, rtol=bound)


# -- MXFP4 ---------------------------------------------------------------------------------------
FP4_SHAPES = [  # rows, experts, chosen, hidden size, inner size
    (1, 8, 2, 64, 64),
    (9, 5, 3, 192, 128),
    (40, 4, 2, 320, 64),
    (90, 4, 2, 64, 192),
    (220, 4, 1, 64, 64),
    (0, 4, 2, 64, 64),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", FP4_SHAPES)
def test_fp4_experts_equal_a_loop(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """With gpt-oss's activation; rows of other ranks' experts are not written."""
    _check_four_bits(monkeypatch, way, dtype, shape, "mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [32, 64, 128, "nvfp4"])
@pytest.mark.parametrize(
    "shape",
    [(1, 8, 2, 128, 128), (40, 5, 3, 256, 128), (90, 4, 1, 128, 256), (200, 3, 2, 128, 128)],
)
def test_records_of_experts_equal_a_loop(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    dtype: torch.dtype,
    kind: int | str,
    shape: tuple[int, ...],
) -> None:
    _check_four_bits(monkeypatch, way, dtype, shape, kind)


def _check_four_bits(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kind: int | str,
) -> None:
    count, has_bias = shape[1], shape[0] % 2 == 0
    experts, x, ids, weights = random_experts(*shape, torch.float32, has_bias=has_bias)
    stacks = to_fp4(experts) if kind == "mxfp4" else to_four_bits(experts, kind)
    x = x.to(dtype)
    expected = naive_experts(experts, x, ids, weights, "swish")
    x, ids, weights = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
    monkeypatch.setattr(moe, "grouped_matmul", _poisoned if way == "triton" else _torchs_product)
    monkeypatch.setattr(moe.tiles, "serve", lambda *args: False)
    total = torch.zeros(expected.shape, dtype=torch.float64)
    for first, here in ((0, count // 2), (count // 2, count - count // 2)):
        own = ids - first
        own = torch.where((own < 0) | (own >= here), here, own)
        part = slice(first, first + here)
        mine = [
            type(stack)(*(None if t is None else t[part].to(DEVICE) for t in stack))
            for stack in stacks
        ]
        biases = [bias[part].to(DEVICE, dtype) for bias in experts.biases or ()]
        biases = moe.ExpertBiases(*biases) if has_bias else None
        out = moe.grouped_experts(x, own, weights, *mine, BETWEEN["swish"][0], count, biases)
        assert out.dtype == dtype
        total += out.cpu().double()
    bound = FP8_BOUNDS[dtype]
    torch.testing.assert_close(total, expected, atol=bound, rtol=bound)


# -- FP8 -----------------------------------------------------------------------------------------
FP8_DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
FP8_BOUNDS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
FP8_SHAPES = [  # rows, experts, chosen, hidden size, inner size, their groups
    (1, 8, 2, 64, 48, 64, 48),
    (9, 5, 3, 320, 136, 128, 128),
    (7, 8, 3, 200, 272, 200, 128),
    (30, 4, 2, 144, 40, 48, 40),
    (90, 4, 2, 64, 36, 32, 36),
    (220, 4, 1, 256, 24, 128, 24),
    (0, 4, 2, 64, 48, 64, 48),
]


def _poisoned(*args: Any) -> torch.Tensor:
    """The kernel's product; what it leaves unwritten must not be read."""
    kernel = KERNELS[type(args[1])]
    out = kernel.grouped_matmul(*args)
    out[int(args[2][-1]) :] = torch.nan
    return out


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("shape", FP8_SHAPES)
def test_fp8_experts_equal_a_loop(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """By one rank that has all experts, and by two that have a half each."""
    rows, count, top_k, size, inner, *groups = shape
    sizes, has_bias = (rows, count, top_k, size, inner), rows % 2 == 1
    experts, x, ids, weights = random_experts(*sizes, torch.float32, has_bias=has_bias)
    fp8 = to_fp8(experts, *groups)
    biases = [bias.to(DEVICE) for bias in experts.biases or ()]
    expected = naive_experts(experts, x.to(dtype), ids, weights)
    x, ids, weights = x.to(DEVICE, dtype), ids.to(DEVICE), weights.to(DEVICE)
    monkeypatch.setattr(moe, "grouped_matmul", _poisoned if way == "triton" else _torchs_product)
    gate_up, down = fp8.part(0, count, DEVICE)
    options = {"gate_and_mul": experts.gate_and_mul, "total": count}
    of_all = moe.ExpertBiases(*biases) if has_bias else None
    whole = moe.grouped_experts(x, ids, weights, gate_up, down, **options, biases=of_all)
    parts = torch.zeros_like(whole)
    for first in (0, count // 2):
        own = ids - first
        here = count // 2 if first == 0 else count - count // 2
        own = torch.where((own < 0) | (own >= here), here, own)
        gate_up, down = fp8.part(first, here, DEVICE)
        mine = [bias[first : first + here] for bias in biases]
        mine = moe.ExpertBiases(*mine) if has_bias else None
        parts += moe.grouped_experts(x, own, weights, gate_up, down, **options, biases=mine)
    bound = FP8_BOUNDS[dtype]
    for out in (whole, parts):
        assert out.dtype == dtype
        torch.testing.assert_close(out.cpu().double(), expected, atol=bound, rtol=bound)


def _torchs_product(
    x: torch.Tensor, weight: Any, ends: torch.Tensor, average: float, bias: Any
) -> torch.Tensor:
    """What runs where there is no Triton."""
    return moe._with_bias(moe._one_expert_at_a_time(x, weight, ends), bias, ends)


@pytest.mark.slow
@pytest.mark.parametrize("between", BETWEEN)
def test_fp8_experts_with_every_gate(monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    experts, x, ids, weights = random_experts(5, 8, 3, 256, 48, torch.float32)
    fp8 = to_fp8(experts, 128, 48)
    expected = naive_experts(experts, x, ids, weights, between)
    gate_up, down = fp8.part(0, 8, DEVICE)
    args = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), gate_up, down, BETWEEN[between][0]
    for product in (moe.grouped_matmul, triton_fp8.grouped_matmul):
        monkeypatch.setattr(moe, "grouped_matmul", product)
        out = moe.grouped_experts(*args).cpu().double()
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_block_of_128_is_a_group_with_its_scale_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(3, 200, 300, generator=generator) * 50).to(torch.float8_e4m3fn)
    blocks = torch.rand(3, 2, 3, generator=generator)
    rows = blocks.repeat_interleave(128, 1)[:, :200]
    x, ends = torch.randn(8, 300, generator=generator), torch.tensor([2, 2, 8], dtype=torch.int32)
    spread = rows.repeat_interleave(128, 2)[..., :300]
    owners = torch.tensor([0, 0, 2, 2, 2, 2, 2, 2])
    values = (codes.double() * spread.double())[owners]
    expected = torch.einsum("nk,nmk->nm", x.double(), values)
    weight = Fp8Weight(codes.to(DEVICE), rows.to(DEVICE), 128)
    for product in (triton_fp8.grouped_matmul, moe.grouped_matmul):
        out = product(x.to(DEVICE), weight, ends.to(DEVICE), 8 / 3)
        torch.testing.assert_close(out.cpu().double(), expected, atol=1e-2, rtol=2e-5)
