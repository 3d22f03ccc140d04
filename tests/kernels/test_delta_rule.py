"""The gated delta rule: torch against transformers, and Triton's kernels against torch, in the
interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import covering
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from trtspec.ops.layer import delta_rule
from trtspec.ops.layer.delta_rule import (
    Contexts,
    DeltaMemory,
    DeltaRows,
    DeltaWeights,
    Generations,
    places,
)
from trtspec.ops.step import recurrent

kernels = pytest.importorskip("trtspec.ops.layer.triton_delta_rule", reason="needs triton")
begin_pass = pytest.importorskip("trtspec.ops.step.triton_recurrent").begin_pass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOTS, NAN = 4, float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [
    (2, 4, 16, 32),  # Hk, Hv, Dk, Dv
    (2, 2, 32, 16),
    (1, 3, 24, 40),  # padded
]
if DEVICE == "cuda":  # each takes seconds to compile
    SIZES = [SIZES[0], (1, 2, 32, 32)]
Sizes = tuple[int, int, int, int]


def torch_twin(name: str) -> Any:
    return getattr(delta_rule, name).__wrapped__


class Layer:
    """Random weights and rows, and memory that holds nothing but NaN."""

    def __init__(self, sizes: Sizes, taps: int, drafts: int, dtype: torch.dtype, seed: int) -> None:
        key_heads, heads, key, value = self.sizes = sizes
        self.generator = torch.Generator().manual_seed(seed)
        self.channels, self.dtype, self.drafts = 2 * key_heads * key + heads * value, dtype, drafts
        self.weights = DeltaWeights(
            conv=self.random(taps, self.channels).float(),
            a_log=self.random(heads).float(),
            dt_bias=self.random(heads).float(),
        )
        kept = SLOTS + 1, places(drafts, taps)
        self.memory = DeltaMemory(
            matrices=torch.full((SLOTS + 1, heads, key, value), NAN, device=DEVICE),
            mixed=torch.full((*kept, self.channels), NAN, dtype=dtype, device=DEVICE),
            gates=torch.full((*kept, 2 * heads), NAN, dtype=dtype, device=DEVICE),
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def rows(self, count: int) -> DeltaRows:
        """Rows that lie apart, as they do where one product computes more than them."""
        mixed = self.random(count, self.channels + 16)[:, 8 : 8 + self.channels]
        return DeltaRows(mixed, self.random(count, 2 * self.sizes[1] + 6)[:, : 2 * self.sizes[1]])

    def delta(self, name: str, rows: DeltaRows, requests: Any, scratch: bool = False) -> Tensor:
        """Runs both twins, compares what they return and keep, and returns the torch twin's."""
        ours = DeltaMemory(*(kept.clone() for kept in self.memory))
        out = getattr(kernels, name)(rows, self.weights, ours, requests)
        expected = torch_twin(name)(rows, self.weights, self.memory, requests)
        assert out.dtype == expected.dtype == self.dtype and out.shape == expected.shape
        slots = slice(SLOTS if scratch else None)  # the scratch slot's requests overwrite another
        count = len(out) - (name == "delta_generations" and scratch) * len(out)
        rounding = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 6e-2}[self.dtype]
        self.close(out[:count], expected[:count], rounding)
        if self.dtype == torch.float16 and name == "delta_generations" and DEVICE == "cpu":
            rounding = 2e-5  # nothing is rounded on the way to the matrices
        self.close(ours.matrices[slots], self.memory.matrices[slots], rounding)
        for a, b in zip(ours[1:], self.memory[1:], strict=True):
            torch.testing.assert_close(a[slots], b[slots], atol=0, rtol=0, equal_nan=True)
        return expected

    def close(self, ours: Tensor, twin: Tensor, rounding: float) -> None:
        if self.dtype == torch.float32:
            torch.testing.assert_close(ours, twin, atol=rounding, rtol=rounding, equal_nan=True)
            return
        # Roundings of what goes in, of which there are many; the interpreter cuts bf16 instead.
        assert torch.equal(ours.isnan(), twin.isnan())
        difference = (ours.float() - twin.float()).nan_to_num()
        assert difference.norm() <= rounding * twin.float().nan_to_num().norm() + 1e-6


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def contexts(*parts: tuple[int, int, int], padding: int = 0) -> Contexts:
    """Contexts of (slot, first position, rows)."""
    last_rows, positions, count = [], [], 0
    for _, first, length in parts:
        count += length
        last_rows.append(count - 1)
        positions += range(first, first + length)
    positions += [0] * padding
    return Contexts(ints(*(slot for slot, _, _ in parts)), ints(*last_rows), ints(*positions))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_texts_equal_transformers(sizes: Sizes, taps: int, drafts: int) -> None:
    """A prompt in two chunks, then drafts, some of which are accepted."""
    key_heads, heads, key, value = sizes
    layer, total = Layer(sizes, taps, drafts, torch.float32, seed=drafts), 120
    rows, weights = layer.rows(total), layer.weights
    x = F.conv1d(
        rows.mixed.t()[None],
        weights.conv.t()[:, None].contiguous(),
        padding=taps - 1,
        groups=layer.channels,
    )
    x = F.silu(x[..., :total]).transpose(1, 2)
    q, k, v = x.split([key_heads * key, key_heads * key, heads * value], -1)
    b, a = rows.gates[None].chunk(2, -1)
    q, k = (  # which not every version does itself
        y.unflatten(-1, (key_heads, key)).repeat_interleave(heads // key_heads, 2) for y in (q, k)
    )
    expected, last = reference.torch_recurrent_gated_delta_rule(
        q,
        k,
        v.unflatten(-1, (heads, value)),
        g=-weights.a_log.exp() * F.softplus(a + weights.dt_bias),
        beta=b.sigmoid(),
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
    )
    found, position, taken_in = [], 0, 0
    for chunk in (75, 2):
        part = DeltaRows(*(x[position : position + chunk] for x in rows))
        given = part, weights, layer.memory, contexts((1, position, chunk))
        found.append(torch_twin("delta_contexts")(*given))
        position = taken_in = position + chunk
    chance = random.Random(taps)
    while position + drafts < total:
        accepted = chance.randint(1, drafts + 1)
        proposed = layer.rows(drafts + 1)
        for kept, own in zip(proposed, rows, strict=True):
            kept[:accepted] = own[position : position + accepted]
        requests = Generations(ints(1), ints(position), ints(taken_in))
        out = torch_twin("delta_generations")(proposed, weights, layer.memory, requests)
        found.append(out[:accepted])
        taken_in, position = position + 1, position + accepted
    torch.testing.assert_close(torch.cat(found), expected[0, :position], atol=1e-5, rtol=1e-4)
    if drafts == 0:
        torch.testing.assert_close(layer.memory.matrices[1], last[0], atol=1e-5, rtol=1e-4)


@covering(
    sizes=SIZES,
    taps=[1, 2, 4],
    drafts=[0, 1, 3, 9, 20],
    requests=[1, 3],
    dtype=DTYPES,
    multiprocessors=[0, 132],  # larger tiles, smaller ones
)
def test_generations(
    sizes: Sizes,
    taps: int,
    drafts: int,
    requests: int,
    dtype: torch.dtype,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts that begin with drafts, at position 0, and accept some of them, or all, or none."""
    monkeypatch.setattr(kernels, "MULTIPROCESSORS", multiprocessors)
    layer = Layer(sizes, taps, drafts, dtype, seed=taps)
    slots, chance = [2, 0, 3][:requests], random.Random(drafts)
    firsts, taken_in = [0] * requests, [0] * requests
    for step in range(3):
        rows = layer.rows(requests * (drafts + 1))
        given = Generations(ints(*slots), ints(*firsts), ints(*taken_in))
        out = layer.delta("delta_generations", rows, given)
        assert bool(out.isfinite().all())
        for i in range(requests):
            accepted = drafts + 1 if step == 0 else chance.randint(1, drafts + 1)
            taken_in[i], firsts[i] = firsts[i] + 1, firsts[i] + accepted


@pytest.mark.parametrize("own", [1, 2])
def test_generations_with_fewer_drafts_and_padding(own: int) -> None:
    """Fewer rows than there could be; requests of padding share the scratch slot."""
    layer = Layer(SIZES[0], 4, 3, torch.float32, seed=1)
    rows, given = layer.rows(4), Generations(ints(0), ints(0), ints(0))
    layer.delta("delta_generations", rows, given)
    given = Generations(ints(0, SLOTS, SLOTS), ints(4, 0, 0), ints(1, 0, 0))
    layer.delta("delta_generations", layer.rows(3 * own), given, scratch=True)


PARTS: list[list[tuple[int, int, int]]] = [
    [(1, 0, 1)],
    [(1, 0, 64)],
    [(1, 0, 70), (3, 0, 128)],
    [(2, 0, 0), (0, 0, 5), (3, 0, 0), (1, 0, 63), (2, 0, 0)],
    [(2, 0, 3), (0, 0, 2), (3, 0, 129)],
]


@covering(
    sizes=SIZES,
    taps=[1, 2, 4],
    parts=PARTS,
    padding=[0, 3, 70],
    dtype=DTYPES,
    multiprocessors=[0, 132],
)
def test_contexts(
    sizes: Sizes,
    taps: int,
    parts: list[tuple[int, int, int]],
    padding: int,
    dtype: torch.dtype,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From position 0 on, chunks behind them, and generations behind those."""
    monkeypatch.setattr(kernels, "MULTIPROCESSORS", multiprocessors)
    layer, drafts = Layer(sizes, taps, 2, dtype, seed=taps), 2
    given = contexts(*parts, padding=padding)
    count = int(given.last_rows[-1]) + 1
    out = layer.delta("delta_contexts", layer.rows(count + padding), given)
    assert bool(out.isfinite().all()) and not out[count:].any()
    more = [(slot, length, 2 + 3 * i) for i, (slot, _, length) in enumerate(parts) if length]
    given = contexts(*more, padding=1)
    layer.delta("delta_contexts", layer.rows(len(given.positions)), given)
    firsts = [first + length for _, first, length in more]
    for ahead, behind in ((0, 0), (3, 1)):
        requests = Generations(
            ints(*(slot for slot, _, _ in more)),
            ints(*(first + ahead for first in firsts)),
            ints(*(first + behind for first in firsts)),
        )
        rows = layer.rows(len(more) * (drafts + 1))
        assert bool(layer.delta("delta_generations", rows, requests).isfinite().all())


def test_contexts_of_public_sizes() -> None:
    """Those of Qwen3-Next and Qwen3.5."""
    layer = Layer((1, 2, 128, 128), 4, 2, torch.float16, seed=3)
    for first, length in ((0, 70), (70, 5)):
        given = contexts((1, first, length), padding=2)
        layer.delta("delta_contexts", layer.rows(length + 2), given)


@pytest.mark.slow
def test_heads_whose_kernels_have_warpgroup_instructions() -> None:
    """None but the public size, which was compared on a GPU: Triton compiles others to wrong ones
    (decision 033)."""
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "tests/helpers/compile_delta_rule.py", "128,128", "32,32"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["128,128"]["_scan_kernel"] > 0 < counts["128,128"]["_prepare_kernel"]
    assert counts["128,128"]["_generations_kernel"] == 0
    assert len(counts["32,32"]) == 3 and not any(counts["32,32"].values())


def test_keys_that_repeat() -> None:
    """Rows alike, of which the matrix forgets nothing: a power of their system has large numbers,
    and its inverse has none."""
    layer = Layer((1, 1, 16, 16), 2, 3, torch.float32, seed=0)
    rows = layer.rows(128)
    rows.mixed[:, :32] = rows.mixed[:1, :32]
    rows.gates[:, 0], rows.gates[:, 1] = 6.0, -20.0
    layer.delta("delta_contexts", rows, contexts((0, 0, 128)))
    for first, taken_in in ((128, 128), (132, 129)):
        own = DeltaRows(rows.mixed[:4], rows.gates[:4])
        requests = Generations(ints(0), ints(first), ints(taken_in))
        layer.delta("delta_generations", own, requests)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(4, 32), (11, 24)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_norm_and_gate(dtype: torch.dtype, heads: int, size: int, is_wide: bool) -> None:
    layer = Layer(SIZES[0], 2, 0, dtype, seed=0)
    x, gate = layer.random(5, heads, size), layer.random(5, 2 * heads * size)[:, : heads * size]
    weight = layer.random(size).to(torch.float32 if is_wide else dtype)
    ours = kernels.norm_and_gate(x, gate, weight, 1e-6)
    expected = torch_twin("norm_and_gate")(x, gate, weight, 1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, atol=rounding, rtol=rounding)
    full = reference.Qwen3NextRMSNormGated(size, eps=1e-6).to(DEVICE)
    full.weight.data = weight
    theirs = full(x.flatten(0, 1), gate.reshape(-1, size)).view_as(expected)
    torch.testing.assert_close(expected, theirs.to(dtype), atol=rounding / 10, rtol=rounding / 10)


@pytest.mark.parametrize(("num_contexts", "num_generations"), [(0, 1), (3, 0), (2, 200)])
def test_begin_pass(num_contexts: int, num_generations: int) -> None:
    """What is taken in is noted by slot, and what was is returned."""
    generator = torch.Generator().manual_seed(num_contexts)

    def numbers(count: int) -> Tensor:
        return torch.randint(0, 90, (count,), generator=generator).to(DEVICE)

    taken_in, total = numbers(300), num_contexts + num_generations
    slots = torch.randperm(300, generator=generator)[:total].to(DEVICE)
    ends, firsts = numbers(num_contexts), numbers(4 * num_generations)[::4]
    expected = taken_in.clone()
    by_torch: Any = recurrent.begin_pass
    wanted = by_torch.__wrapped__(expected, slots, ends, firsts)
    for ours, twin in zip(begin_pass(taken_in, slots, ends, firsts), wanted, strict=True):
        assert torch.equal(ours, twin) and ours.is_contiguous()
    assert torch.equal(taken_in, expected)
    assert expected[slots].tolist() == [*ends.tolist(), *(firsts + 1).tolist()]
