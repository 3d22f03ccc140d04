"""The two kernels of a mixture for few rows (`expert_linear.cuh`), against loops in float64."""

from __future__ import annotations

import pytest
import steady
import torch
from matrix import covering
from naive_experts import BETWEEN, naive_experts, random_experts, to_fp4, to_fp8
from random_four_bits import to_four_bits

from trtspec import native
from trtspec.layers import experts as layer
from trtspec.layers.experts import Experts
from trtspec.ops.experts import torch as moe

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
BOUNDS = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
SHAPES = [  # experts, chosen, hidden size, inner size
    (8, 2, 64, 64),
    (5, 3, 192, 320),
    (40, 16, 128, 128),
    (12, 8, 2048, 768),
    (1000, 8, 64, 128),
    (9, 8, 2816, 704),
    (4, 2, 4096, 1536),
]


@pytest.fixture(autouse=True)
def _no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: object, **kwargs: object) -> None:
        raise AssertionError("not by the kernels for few rows")

    monkeypatch.setattr(layer, "grouped_experts", other)


@covering(**{
    "dtype": list(BOUNDS), "between": list(BETWEEN), "rows": list(range(1, 9)), "shape": SHAPES,
})  # fmt: skip
def test_equal_a_loop(
    dtype: torch.dtype, between: str, rows: int, shape: tuple[int, int, int, int]
) -> None:
    """Alone, added to a residual in its memory, and of rows that are apart."""
    count, top_k, size, inner = shape
    sizes, has_bias = (rows, count, top_k, size, inner), rows % 2 == 0 or between == "swish"
    experts, x, ids, weights = random_experts(*sizes, dtype, seed=rows, has_bias=has_bias)
    experts.gate_and_mul = BETWEEN[between][0]
    expected = naive_experts(experts, x, ids, weights, between)
    _check(experts.cuda(), (x, ids, weights), expected, BOUNDS[dtype])


@covering(**{
    "groups": ["rows", "128", "64"], "rows": [1, 2, 3, 4],
    "shape": [shape for shape in SHAPES if shape[2] * shape[3] <= layer.MAX_FP8_VALUES],
})  # fmt: skip
def test_fp8_equal_a_loop(groups: str, rows: int, shape: tuple[int, int, int, int]) -> None:
    count, top_k, size, inner = shape
    experts, x, ids, weights = random_experts(
        rows, count, top_k, size, inner, torch.float32, seed=rows
    )
    by = (size, inner) if groups == "rows" else (int(groups),) * 2
    codes, x = to_fp8(experts, *by), x.bfloat16()
    expected = naive_experts(experts, x, ids, weights)
    experts.hold(*codes)
    _check(experts.cuda(), (x, ids, weights), expected, BOUNDS[torch.bfloat16])


@covering(**{
    "between": ["silu", "swish"], "rows": list(range(1, layer.MAX_FP4_ROWS + 1)),
    "shape": [shape for shape in SHAPES if shape[2] % 64 == shape[3] % 64 == 0] + [
        (4, 2, 2880, 576), (6, 3, 64, 192),
    ],
})  # fmt: skip
def test_fp4_equal_a_loop(between: str, rows: int, shape: tuple[int, int, int, int]) -> None:
    _check_four_bits("mxfp4", between, rows, shape)


@covering(**{
    "kind": [32, 64, 128, "nvfp4"], "rows": list(range(1, layer.MAX_RECORD_ROWS + 1)),
    "between": ["silu", "swish"],
    "shape": [
        (3, 2, 128, 128), (8, 8, 256, 128), (4, 2, 2816, 640), (40, 16, 384, 256),
        (300, 4, 128, 128),
    ],
})  # fmt: skip
def test_records_equal_a_loop(
    kind: int | str, rows: int, between: str, shape: tuple[int, int, int, int]
) -> None:
    _check_four_bits(kind, between, rows, shape)


def _check_four_bits(
    kind: int | str, between: str, rows: int, shape: tuple[int, int, int, int]
) -> None:
    sizes, has_bias = (rows, *shape), between == "swish"
    experts, x, ids, weights = random_experts(*sizes, torch.float32, seed=rows, has_bias=has_bias)
    codes = to_fp4(experts) if kind == "mxfp4" else to_four_bits(experts, kind)
    x = x.bfloat16()
    for bias in experts.biases or ():
        bias.data = bias.data.bfloat16()
    expected = naive_experts(experts, x, ids, weights, between)
    experts.hold(*codes)
    experts.gate_and_mul = BETWEEN[between][0]
    _check(experts.cuda(), (x, ids, weights), expected, BOUNDS[torch.bfloat16])


def _check(
    experts: Experts,
    args: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expected: torch.Tensor,
    bound: float,
) -> None:
    x, ids, weights = (t.cuda() for t in args)
    torch.testing.assert_close(
        experts(x, ids, weights).cpu().double(), expected, atol=bound, rtol=bound
    )
    residual = torch.randn(len(x), 2 * x.shape[1], device="cuda").to(x.dtype)[:, : x.shape[1]]
    total = expected + residual.cpu().double()
    apart = torch.cat((x, x), dim=1)[:, x.shape[1] :]
    with torch.no_grad():
        out = experts(apart, ids, weights, residual)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(out.cpu().double(), total, atol=2 * bound, rtol=bound)


@pytest.mark.parametrize("kind", ["floats", "mxfp4", 32, 128, "nvfp4"])
def test_a_row_does_not_depend_on_rows_beside_it(kind: int | str) -> None:
    is_held = kind != "floats"
    sizes = layer.MAX_FP4_ROWS if is_held else layer.MAX_ROWS, 16, 4, 256, 128
    experts, x, ids, weights = random_experts(*sizes, torch.bfloat16, has_bias=is_held)
    if is_held:
        experts.hold(*(to_fp4(experts) if kind == "mxfp4" else to_four_bits(experts, kind)))
    experts.cuda()
    x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
    together = experts(x, ids, weights)
    for row in range(len(x)):
        own = slice(row, row + 1)
        assert torch.equal(experts(x[own], ids[own], weights[own]), together[own])
        # Nor on the order of its choices.
        turned = ids[own].flip(1), weights[own].flip(1)
        assert torch.equal(experts(x[own], *turned), together[own])


@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_of_other_ranks_add_nothing(has_bias: bool) -> None:
    sizes = 6, 12, 4, 128, 64
    experts, x, ids, weights = random_experts(*sizes, torch.bfloat16, has_bias=has_bias)
    expected = naive_experts(experts, x, ids, weights)
    total = torch.zeros(6, 128, dtype=torch.float64)
    for first, count in ((0, 5), (5, 1), (6, 6)):
        own = Experts(count, 128, 64, has_bias=has_bias, first=first, total=12).cuda()
        for mine, all_of in zip(own.parameters(), experts.parameters(), strict=True):
            mine.data = all_of.data[first : first + count].cuda()
        total += own(x.cuda(), ids.cuda(), weights.cuda()).cpu().double()
    torch.testing.assert_close(total, expected, atol=5e-2, rtol=5e-2)
    nowhere = torch.full_like(ids, 12).cuda()
    assert not own(x.cuda(), nowhere, weights.cuda()).any()
    residual = x.cuda()
    with torch.no_grad():
        assert torch.equal(own(x.cuda(), nowhere, weights.cuda(), residual.clone()), residual)


@pytest.mark.parametrize("kind", ["floats", "mxfp4", 32, 128, "nvfp4"])
def test_rows_that_are_not_numbers_stay_alone(
    kind: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "MAX_FP4_ROWS", 3)
    is_held = kind != "floats"
    experts, x, ids, weights = random_experts(3, 8, 2, 128, 256, torch.bfloat16, has_bias=is_held)
    if is_held:
        experts.hold(*(to_fp4(experts) if kind == "mxfp4" else to_four_bits(experts, kind)))
    experts.cuda()
    x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
    expected = experts(x, ids, weights)
    x[1], weights[1] = torch.nan, torch.nan
    out = experts(x, ids, weights)
    assert bool(out[1].isnan().all()) and torch.equal(out[::2], expected[::2])


def test_what_a_row_chose_twice_counts_once() -> None:
    """As rows of NaN do: then both kernels must mean the same choice."""
    experts, x, ids, weights = random_experts(4, 8, 3, 128, 64, torch.bfloat16)
    ids[2] = ids[2, 1]
    once = weights.clone()
    once[2, 1:] = 0
    expected = naive_experts(experts, x, ids, once)
    experts.cuda()
    for _ in range(20):
        out = experts(x.cuda(), ids.cuda(), weights.cuda())
        torch.testing.assert_close(out.cpu().double(), expected, atol=5e-2, rtol=5e-2)


def test_gradients_are_not_lost() -> None:
    experts, x, ids, weights = random_experts(2, 8, 2, 64, 64, torch.bfloat16)
    experts.cuda()
    x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
    residual = torch.zeros_like(x).requires_grad_()
    trained = weights.clone().requires_grad_()
    for weights_of_case, added in ((weights, residual), (trained, None)):
        with pytest.raises(AssertionError, match="not by the kernels"):
            experts(x, ids, weights_of_case, added)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_wait_for_nothing_and_replay_in_a_graph(rows: int) -> None:
    """The graph is captured with one choice of experts and replayed with others."""
    experts, x, _, _ = random_experts(rows, 16, 4, 128, 64, torch.bfloat16)
    experts.cuda()
    logits, inputs = torch.zeros(rows, 16, device="cuda"), torch.zeros_like(x, device="cuda")

    def step() -> torch.Tensor:
        hidden = inputs
        for _ in range(3):  # each early start beside the kernels before
            ids, weights = moe.route(logits, None, 4, n_group=4, topk_group=2)
            hidden = experts(hidden, ids, weights)
        return hidden

    with torch.no_grad():
        graph, out = steady.captured(step)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            logits.copy_(torch.randn(rows, 16, generator=generator))
            inputs.copy_(torch.randn(x.shape, generator=generator))
            graph.replay()
            assert torch.equal(out, step()) and bool((out != 0).any())
