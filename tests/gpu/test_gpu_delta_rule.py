"""Linear attention in public sizes, against torch: csrc's kernel of generations
(`delta_rule.cuh`), and Triton's of contexts."""

from __future__ import annotations

import pytest
import torch
from matrix import covering
from torch import Tensor

from trtspec import native
from trtspec.ops.layer import delta_rule
from trtspec.ops.layer.delta_rule import (
    Contexts,
    DeltaMemory,
    DeltaRows,
    DeltaWeights,
    Generations,
    HeadNorm,
    delta_contexts,
    places,
    read_generations,
)

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
SIZE, TAPS = 128, 4
torch_generations, torch_contexts, torch_norm_and_gate = (
    op.__wrapped__  # type: ignore[attr-defined]  # an op's torch function, by `functools.wraps`
    for op in (delta_rule.delta_generations, delta_contexts, delta_rule.norm_and_gate)
)


@pytest.fixture(autouse=True)
def _no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: object, **kwargs: object) -> None:
        raise AssertionError("not by the kernel")

    monkeypatch.setattr(delta_rule, "delta_generations", other)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@covering(
    dtype=[torch.bfloat16, torch.float16], heads=[(16, 32), (4, 4), (2, 8)], drafts=[0, 3, 7, 15],
    requests=[1, 3, 20],
)  # fmt: skip
def test_what_rows_read_and_matrices_take_in(
    dtype: torch.dtype, heads: tuple[int, int], drafts: int, requests: int
) -> None:
    """Slots in any order, requests at their beginning, all numbers of rows read again."""
    torch.manual_seed(requests)
    own, (key_heads, count) = drafts + 1, heads
    channels, total = (2 * key_heads + count) * SIZE, requests * own
    memory = DeltaMemory(
        matrices=_random(requests + 2, count, SIZE, SIZE, dtype=torch.float32) / 8,
        mixed=_random(requests + 2, places(drafts, TAPS), channels, dtype=dtype),
        gates=_random(requests + 2, places(drafts, TAPS), 2 * count, dtype=dtype),
    )
    weights = DeltaWeights(
        conv=_random(TAPS, channels, dtype=torch.float32) / 2,
        a_log=torch.rand(count, device="cuda"),
        dt_bias=_random(count, dtype=torch.float32),
    )
    joined = _random(total, channels + count * SIZE, dtype=dtype)
    rows = DeltaRows(joined[:, :channels], _random(total, 2 * count, dtype=dtype))
    norm = HeadNorm(joined[:, channels:], 1 + _random(SIZE, dtype=dtype) / 4, 1e-6)
    firsts = torch.randint(16, 90, (requests,), device="cuda")
    firsts[1:2], firsts[2:3] = 0, 2  # with nothing before, and fewer rows than taps
    again = torch.arange(requests, device="cuda") % own
    slots = torch.randperm(requests + 1, device="cuda")[:requests]
    memory.matrices[slots[1:2]] = float("nan")
    generations = Generations(slots, firsts, (firsts - again).clamp_min(0))
    twin = DeltaMemory(*(kept.clone() for kept in memory))

    out = read_generations(rows, weights, memory, generations, norm)
    expected = torch_norm_and_gate(torch_generations(rows, weights, twin, generations), *norm)
    worst = float(expected.float().abs().max())
    assert float((out.float() - expected.float()).abs().max()) < 6e-3 * worst
    # A channel rounds otherwise where torch's sum of the convolution is at a border.
    torch.testing.assert_close(memory.matrices, twin.matrices, atol=4e-3, rtol=4e-3, equal_nan=True)
    for ours, theirs in zip(memory[1:], twin[1:], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "first"), [((70,), 0), ((64, 1, 200, 33), 5), ((1000,), 64), ((300,) * 20, 0)]
)
def test_contexts_of_public_sizes(dtype: torch.dtype, lengths: tuple[int, ...], first: int) -> None:
    """By Triton's kernels, which other tests compile for small heads alone."""
    torch.manual_seed(len(lengths))
    key_heads, count, drafts, total = 4, 8, 3, sum(lengths)
    channels = (2 * key_heads + count) * SIZE
    memory = DeltaMemory(
        matrices=_random(len(lengths) + 1, count, SIZE, SIZE, dtype=torch.float32) / 8,
        mixed=_random(len(lengths) + 1, places(drafts, TAPS), channels, dtype=dtype),
        gates=_random(len(lengths) + 1, places(drafts, TAPS), 2 * count, dtype=dtype),
    )
    weights = DeltaWeights(
        conv=_random(TAPS, channels, dtype=torch.float32) / 2,
        a_log=torch.rand(count, device="cuda"),
        dt_bias=_random(count, dtype=torch.float32),
    )
    joined = _random(total + 7, channels + count * SIZE, dtype=dtype)
    rows = DeltaRows(joined[:, :channels], _random(total + 7, 2 * count, dtype=dtype))
    positions = [torch.arange(first, first + length, device="cuda") for length in lengths]
    contexts = Contexts(
        slots=torch.randperm(len(lengths), device="cuda"),
        last_rows=torch.tensor(lengths, device="cuda").cumsum(0) - 1,
        positions=torch.cat([*positions, torch.zeros(7, dtype=torch.int64, device="cuda")]),
    )
    twin = DeltaMemory(*(kept.clone() for kept in memory))
    out = delta_contexts(rows, weights, memory, contexts)[:total].float()
    expected = torch_contexts(rows, weights, twin, contexts)[:total].float()
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((out - expected).norm()) < bound * float(expected.norm())
    difference = float((memory.matrices - twin.matrices).norm())
    assert difference < bound * float(twin.matrices.norm())
    assert torch.equal(memory.mixed, twin.mixed)
