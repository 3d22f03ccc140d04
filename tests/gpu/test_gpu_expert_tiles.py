"""The kernel of experts of 4 bits (`expert_tiles.cuh`), against loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import covering
from naive_experts import BETWEEN, naive_experts, random_experts, to_fp4
from random_four_bits import to_four_bits

from trtspec import native
from trtspec.layers import experts as layer
from trtspec.layers.experts import Experts
from trtspec.ops.experts import tiles
from trtspec.ops.experts import torch as moe

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
BOUND = 5e-2
KINDS: list[int | str] = ["mxfp4", 32, 64, 128, "nvfp4"]  # numbers: of integers' groups
SHAPES = [  # experts, chosen, hidden size, inner size
    (8, 2, 448, 448),
    (5, 3, 512, 576),
    (40, 16, 640, 448),
    (4, 1, 2880, 576),
    (1000, 4, 448, 512),
    (3, 2, 512, 6144),
    (2, 1, 448, 12288),
]
OF_RECORDS = [  # the same by 128 columns
    (8, 2, 512, 512), (5, 3, 768, 640), (40, 16, 640, 512), (4, 1, 2816, 640), (300, 4, 512, 512),
    (3, 2, 512, 6144), (2, 1, 512, 12288),
]  # fmt: skip
ROWS = [1, 2, 7, 8, 9, 24, 25, 60, 200]


@pytest.fixture(autouse=True)
def _no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: object, **kwargs: object) -> None:
        raise AssertionError("not by the kernel")

    monkeypatch.setattr(moe, "grouped_matmul", other)
    monkeypatch.setattr(tiles, "MAX_ROWS", dict.fromkeys(tiles.MAX_ROWS, 1000))
    monkeypatch.setattr(layer, "MAX_FP4_ROWS", 0)
    monkeypatch.setattr(layer, "MAX_RECORD_ROWS", 0)


def _random(
    rows: int,
    shape: tuple[int, int, int, int],
    kind: int | str,
    between: str = "swish",
    has_bias: bool = True,
) -> tuple[Experts, tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Experts of 4 bits on the GPU, their arguments there, and what a loop returns."""
    sizes = rows, *shape
    experts, x, ids, weights = random_experts(*sizes, torch.float32, seed=rows, has_bias=has_bias)
    codes = to_fp4(experts) if kind == "mxfp4" else to_four_bits(experts, kind)
    x = x.bfloat16()
    for bias in experts.biases or ():
        bias.data = bias.data.bfloat16()
    expected = naive_experts(experts, x, ids, weights, between)
    experts.hold(*codes)
    experts.gate_and_mul = BETWEEN[between][0]
    return experts.cuda(), (x.cuda(), ids.cuda(), weights.cuda()), expected


@covering(
    **{
        "between": list(BETWEEN),
        "rows": ROWS,
        "index": list(range(len(SHAPES))),
        "kind": KINDS,
    }
)
def test_equal_a_loop(between: str, rows: int, index: int, kind: int | str) -> None:
    """Alone, added to a residual in its memory, and of rows that are apart."""
    has_bias = between == "swish" or rows % 2 == 0
    shape = (SHAPES if kind == "mxfp4" else OF_RECORDS)[index]
    experts, (x, ids, weights), expected = _random(rows, shape, kind, between, has_bias)
    out = experts(x, ids, weights).cpu().double()
    torch.testing.assert_close(out, expected, atol=BOUND, rtol=BOUND)
    residual = torch.randn(rows, 2 * x.shape[1], device="cuda").bfloat16()[:, : x.shape[1]]
    total = expected + residual.cpu().double()
    apart = torch.cat((x, x), dim=1)[:, x.shape[1] :]
    with torch.no_grad():
        out = experts(apart, ids, weights, residual)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(out.cpu().double(), total, atol=2 * BOUND, rtol=BOUND)


@pytest.mark.parametrize("kind", ["mxfp4", 32, 128, "nvfp4"])
@pytest.mark.parametrize("rows", [24, 25, 49, 97, 256])
def test_all_rows_may_choose_one_expert(rows: int, kind: int | str) -> None:
    """Then most experts have none, and one has several tiles of rows."""
    experts, (x, ids, weights), _ = _random(rows, (6, 2, 512, 512), kind)
    for chosen in ((5, 2), (0, 1), (5, 0)):
        ids[:] = torch.tensor(chosen, device="cuda")
        out = experts(x, ids, weights)
        for row in range(rows):
            own = slice(row, row + 1)
            assert torch.equal(experts(x[own], ids[own], weights[own]), out[own])


@pytest.mark.parametrize("kind", ["mxfp4", 32, 128, "nvfp4"])
def test_a_row_does_not_depend_on_rows_beside_it(kind: int | str) -> None:
    experts, (x, ids, weights), _ = _random(70, (8, 4, 512, 640), kind)
    together = experts(x, ids, weights)
    for row in range(0, 70, 3):
        own = slice(row, row + 1)
        assert torch.equal(experts(x[own], ids[own], weights[own]), together[own])
    turned = torch.arange(69, -1, -1, device="cuda")
    assert torch.equal(experts(x[turned], ids[turned], weights[turned]), together[turned])


@pytest.mark.parametrize("kind", ["mxfp4", 128, "nvfp4"])
def test_experts_of_other_ranks_add_nothing(kind: int | str) -> None:
    experts, (x, ids, weights), expected = _random(30, (12, 4, 512, 512), kind)
    total, biases = torch.zeros_like(expected), experts.biases
    stacks: Any = experts.held
    assert stacks is not None and biases is not None
    for first, count in ((0, 5), (5, 1), (6, 6)):
        own = Experts(count, 512, 512, BETWEEN["swish"][0], has_bias=True, first=first, total=12)
        part = slice(first, first + count)
        own.hold(*(type(stack)(*(t if t is None else t[part] for t in stack)) for stack in stacks))
        own.gate_up_proj_bias.data, own.down_proj_bias.data = (bias[part] for bias in biases)
        total += own(x, ids, weights).cpu().double()
    torch.testing.assert_close(total, expected, atol=BOUND, rtol=BOUND)
    nowhere = torch.full_like(ids, 12)
    assert not own(x, nowhere, weights).any()
    with torch.no_grad():
        assert torch.equal(own(x, nowhere, weights, x.clone()), x)


@pytest.mark.parametrize("kind", ["mxfp4", 32, "nvfp4"])
def test_rows_that_are_not_numbers_stay_alone(kind: int | str) -> None:
    experts, (x, ids, weights), _ = _random(12, (3, 2, 512, 512), kind)
    expected = experts(x, ids, weights)
    x[5], weights[5] = torch.nan, torch.nan
    out = experts(x, ids, weights)
    others = [row for row in range(12) if row != 5]
    assert bool(out[5].isnan().all()) and torch.equal(out[others], expected[others])


@pytest.mark.parametrize("kind", ["mxfp4", 128])
def test_in_a_graph_whose_choices_change(kind: int | str) -> None:
    experts, (x, ids, weights), _ = _random(33, (8, 2, 512, 512), kind)
    experts(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, ids, weights)
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        ids.copy_(torch.rand(33, 8, generator=generator, device="cuda").topk(2).indices)
        x.normal_(generator=generator)
        graph.replay()
        assert torch.equal(out, experts(x, ids, weights))
