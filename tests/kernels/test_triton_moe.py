"""The mixture's Triton kernels against their twins; in the interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_experts import ROUTES, dense_weights, naive_route, random_experts

from trtspec.ops.experts import torch as moe

triton_moe = pytest.importorskip("trtspec.ops.experts.triton", reason="needs triton")

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


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", ROUTES)
def test_route(options: dict[str, Any], has_bias: bool) -> None:
    options = dict(options)
    experts, top_k = options.pop("experts"), options.pop("top_k")
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(4, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.3 if has_bias else None
    ids, weights = triton_moe.route(
        logits.to(DEVICE), None if bias is None else bias.to(DEVICE), top_k, **options
    )
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
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
    ours = triton_moe.grouped_matmul(*on_device, len(x) / count)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 2, 16), (7, 3, 48), (2, 8, 1200)])
def test_combine(dtype: torch.dtype, rows: int, top_k: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    y = torch.randn(rows * top_k, size, generator=generator).to(dtype)
    places = torch.randperm(rows * top_k, generator=generator)
    weights = torch.rand(rows, top_k, generator=generator)
    ours = triton_moe.combine(y.to(DEVICE), places.to(DEVICE), weights.to(DEVICE)).cpu()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, moe.combine(y, places, weights), atol=bound, rtol=bound)


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
        x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, average: float
    ) -> torch.Tensor:
        assert average == rows * top_k / count  # of all ranks' experts
        out = triton_moe.grouped_matmul(x, weight, ends, average)
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
