"""Shared-out verification: the choice against plain Python, kernels against their twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from latent_pass import ROTATED, make_latent_pass
from paged_pass import attend, make_pass
from torch import Tensor

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import AttentionMetadata, PackedRows
from trtspec.ops.step import packing
from trtspec.ops.tokens import probability
from trtspec.ops.tokens.markov_walk import MarkovTables, walk_by_draft

triton_packing = pytest.importorskip("trtspec.ops.step.triton_packing", reason="needs triton")
from trtspec.attention.triton_backend import TritonAttention  # noqa: E402
from trtspec.ops.tokens import triton_probability  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TWINS = [packing, triton_packing]


class Case:
    """Requests with random drafts and chances, in slots of any order."""

    def __init__(self, batch: int, width: int, seed: int, equal: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.batch, self.width = batch, width
        self.slots = torch.randperm(batch + 2, generator=generator)[:batch]
        if batch > 4:
            self.slots[3] = batch + 2  # scratch: it only fills the batch
        falling = torch.rand(batch + 3, width + 1, generator=generator).cumprod(1)
        self.chances = torch.full_like(falling, 0.25) if equal else falling
        lens = torch.randint(0, width + 1, (batch,), generator=generator)
        drafts = torch.randint(0, 90, (batch, width + 1), generator=generator).to(torch.int32)
        self.drafts = drafts[:, 1:]
        self.drafts[torch.arange(width) >= lens[:, None]] = -1
        shape = (batch * (width + 1),)
        self.rows = packing.PassRows(
            *(torch.randint(0, 99, shape, generator=generator) for _ in range(2)),
            tuple(torch.randint(-1, 99, shape, generator=generator) for _ in range(2)),
        )

    def pack(self, module: Any, num_verified: int) -> packing.Packing:
        to = [x.to(DEVICE) for x in (self.slots, self.chances)]
        # Drafts are a part of wider rows, as in a step.
        drafts = torch.zeros(self.batch, self.width + 1, dtype=torch.int32, device=DEVICE)
        drafts[:, 1:] = self.drafts.to(DEVICE)
        ids, positions, slots = self.rows
        rows = packing.PassRows(
            ids.to(DEVICE), positions.to(DEVICE), tuple(s.to(DEVICE) for s in slots)
        )
        return module.pack_rows(to[0], drafts[:, 1:], to[1], rows, num_verified)

    def lens(self, num_verified: int) -> list[int]:
        """How many drafts of each request are verified, by sorting."""
        entries = []
        for request, slot in enumerate(self.slots.tolist()):
            for depth in range(self.width):
                is_draft = bool(self.drafts[request, depth] >= 0) and slot < self.batch + 2
                chance = float(self.chances[slot, depth]) if is_draft else -1.0
                entries.append((-chance, depth, request))
        chosen = [request for *_, request in sorted(entries)[:num_verified]]
        return [chosen.count(request) for request in range(self.batch)]


@pytest.mark.parametrize("module", TWINS, ids=["torch", "triton"])
@pytest.mark.parametrize(
    ("batch", "width", "num_verified", "equal"),
    [(5, 3, 7, False), (5, 3, 7, True), (8, 7, 20, False), (1, 4, 2, False), (3, 1, 1, True),
     (17, 5, 84, False), (6, 4, 23, True)],
)  # fmt: skip
def test_the_likeliest_drafts_are_verified(
    module: Any, batch: int, width: int, num_verified: int, equal: bool
) -> None:
    case = Case(batch, width, seed=batch * 10 + width, equal=equal)
    lens = case.lens(num_verified)
    assert sum(lens) == num_verified
    found, whole = case.pack(module, num_verified), width + 1
    starts = [sum(lens[:i]) + i for i in range(batch + 1)]
    rows = [i * whole + depth for i, n in enumerate(lens) for depth in range(n + 1)]
    places = [starts[i] + min(d, n) for i, n in enumerate(lens) for d in range(whole)]
    assert found.starts.tolist() == starts and found.starts.dtype == torch.int32
    assert found.indices.tolist() == rows and found.places.tolist() == places
    for packed, of_all in zip(found.rows[:2], case.rows[:2], strict=True):
        assert torch.equal(packed.cpu(), of_all[rows])
    for packed, of_all in zip(found.rows.slot_mappings, case.rows.slot_mappings, strict=True):
        assert torch.equal(packed.cpu(), of_all[rows])
    drafts = case.drafts.clone()
    drafts[torch.arange(width) >= torch.tensor(lens)[:, None]] = -1
    assert torch.equal(found.drafts.cpu(), drafts) and found.drafts.dtype == torch.int32


@pytest.mark.parametrize("module", TWINS, ids=["torch", "triton"])
def test_chances_multiply(module: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(3, 4, generator=generator)  # of three drafts, by request
    chances = torch.full((6, 5), 9.0)
    slots = torch.tensor([4, 0, 5, 2])
    on_device = chances.to(DEVICE)
    module.save_chances(slots.to(DEVICE), tuple(given.to(DEVICE)), on_device)
    chances[slots] = 0.0
    chances[slots, :3] = given.double().cumprod(0).T.float()
    torch.testing.assert_close(on_device.cpu(), chances, atol=0, rtol=1e-6)
    of_some = on_device.cpu()[slots]
    assert (of_some[:, 1:] <= of_some[:, :-1]).all(), "no later draft is likelier"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 4096, 5000])
def test_probabilities(size: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        dtype = torch.float16  # what the interpreter rounds as a GPU does
    logits = (4 * torch.randn(6, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    logits[1, 3], logits[2] = float("nan"), float("nan")
    logits[3, 1:], logits[4] = float("-inf"), float("-inf")
    clean = logits.double().masked_fill(logits.isnan(), float("-inf"))
    expected = clean.softmax(-1).amax(-1).nan_to_num(0.0).float()
    assert expected[2] == expected[4] == 0 and expected[3] == 1
    for function in (probability.best_probabilities, triton_probability.best_probabilities):
        ours = function(logits.to(DEVICE)).cpu()
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("has_map", [False, True])
def test_probabilities_of_a_walk(has_map: bool) -> None:
    """Each draft's, behind the ones before it."""
    generator = torch.Generator().manual_seed(3)
    batch, depth, vocab, drafts, rank = 3, 4, 40, 25, 8
    logits = torch.randn(depth * batch, drafts, generator=generator)
    d2t = torch.arange(drafts) % 3 if has_map else None
    tables = MarkovTables(
        torch.randn(vocab, rank, generator=generator),
        torch.randn(drafts, rank, generator=generator), d2t,
    )  # fmt: skip
    before = torch.randint(0, vocab, (batch,), generator=generator).to(torch.int32)
    taken = walk_by_draft(logits, before, tables)
    ours = probability.walk_probabilities(logits.clone(), before, taken, tables)
    assert ours.shape == taken.shape
    for i in range(batch):
        token = int(before[i])
        for d in range(depth):
            own = logits[d * batch + i].double()
            biased = own + tables.w2.double() @ tables.w1[token].double()
            assert float(ours[d, i]) == pytest.approx(float(biased.softmax(-1).max()), rel=1e-5)
            token = int(taken[d, i])


def packed_pass(meta: AttentionMetadata, lens: list[int]) -> AttentionMetadata:
    """The pass with the first rows of each request alone."""
    whole = meta.rows_per_generation
    rows = torch.tensor([i * whole + d for i, n in enumerate(lens) for d in range(n)])
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    places = [starts[i] + min(d, n - 1) for i, n in enumerate(lens) for d in range(whole)]
    packed = PackedRows(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE), rows.to(DEVICE),
        torch.tensor(places, device=DEVICE), meta,
    )  # fmt: skip
    slots = tuple(s[packed.indices] for s in meta.slot_mappings)
    return meta.pack(packed, meta.position_ids[packed.indices], slots)


def _rows_alone(q: Tensor, meta: AttentionMetadata, rows: Tensor, **layer: Any) -> Tensor:
    """Attention of all rows, of which those that were packed are kept."""
    out = attend(TorchAttention(), q, replace(meta, derived={}), **layer)
    return out[rows]


@pytest.mark.slow
@pytest.mark.parametrize("programs", [2, 24])
@pytest.mark.parametrize(
    ("heads", "dim", "window", "lens"),
    [((6, 2), 16, None, [4, 1, 2, 3]), ((4, 4), 32, 20, [1, 1, 4, 2]),
     ((8, 1), 64, None, [4, 4, 4, 4])],
)  # fmt: skip
def test_attention(
    monkeypatch: pytest.MonkeyPatch, programs: int, heads: tuple[int, int], dim: int,
    window: int | None, lens: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr("trtspec.attention.triton_generations._cut", lambda *_: (16, programs))
    meta = make_pass([1, 70, 33, 130], 4, heads[1], dim, 8, max_seq_len=4096)
    packed = packed_pass(meta, lens)
    q = torch.randn(16, heads[0], dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert packed.packed is not None and packed.num_tokens == sum(lens)
    rows = packed.packed.indices
    expected = _rows_alone(q, meta, rows, window=window)
    for backend in (TritonAttention(), TorchAttention()):
        ours = attend(backend, q[rows], packed, window=window)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_attention_of_more_rows_than_a_tile() -> None:
    """All rows are attended then."""
    meta = make_pass([20, 3], 33, 1, 64, 16, max_seq_len=4096)
    packed = packed_pass(meta, [2, 33])
    q = torch.randn(66, 8, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert packed.packed is not None
    rows = packed.packed.indices
    ours = attend(TritonAttention(), q[rows], packed)
    expected = _rows_alone(q, meta, rows)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [2, 40])
def test_latent_attention(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr("trtspec.attention.mla._programs", lambda _: programs)
    meta = make_latent_pass([(n, 4) for n in [1, 70, 33]], 32, 8)
    packed = packed_pass(meta, [1, 4, 2])
    q = torch.randn(12, 16, 32 + ROTATED, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert packed.packed is not None
    rows = packed.packed.indices
    layer: dict[str, Any] = {"layer": 1, "window": None, "scale": 0.17}
    ours = attend(TritonAttention(), q[rows], packed, **layer)
    expected = _rows_alone(q, meta, rows, **layer)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_xqa_attends_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernel takes as many rows of each request."""
    flashinfer = pytest.importorskip("trtspec.attention.flashinfer")
    backend, seen = object.__new__(flashinfer.FlashInferAttention), []

    def attend_all(q: Tensor, meta: AttentionMetadata, cached: Any) -> Tensor:
        seen.append(meta)
        return q.clone()

    monkeypatch.setattr(backend, "_attend", attend_all)
    meta = make_pass([1, 70, 33], 4, 2, 16, 8, max_seq_len=4096)
    packed = packed_pass(meta, [4, 1, 2])
    q = torch.randn(7, 6, 16, device=DEVICE)
    out = attend(backend, q, packed)
    assert seen == [meta] and torch.equal(out, q)


@pytest.mark.parametrize("axes", [(), (3,)])
def test_rotary_positions_of_packed_rows(axes: tuple[int, ...]) -> None:
    meta = make_pass([1, 70, 33], 4, 2, 16, 8, max_seq_len=4096)
    ropes = torch.arange(12, device=DEVICE) + 50
    meta = replace(meta, rope_position_ids=ropes.expand(*axes, -1))
    packed = packed_pass(meta, [4, 1, 2])
    assert packed.rope_position_ids is not None
    expected = torch.tensor([50, 51, 52, 53, 54, 58, 59]).expand(*axes, -1)
    assert torch.equal(packed.rope_position_ids.cpu(), expected)
