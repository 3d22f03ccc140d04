"""The kernels of sampled speculation against their twins; in the interpreter where there is no GPU.

Chunks and capacities are made small, so that a small vocabulary has many of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from sampled import config_of, engine, make_models
from sampled_kernels import (
    CONTEXTS,
    DEVICE,
    GENERATIONS,
    SLOTS,
    SUBSET,
    SampledCase,
    V,
    kept_by_kernels,
    kernels,
    make_worker,
    random_normal,
)
from torch import Tensor

from trtspec import SamplingParams
from trtspec.acceptance import draw, rejection
from trtspec.acceptance import rule as acceptance_rule
from trtspec.acceptance.draw import DraftSampler
from trtspec.metadata.draft_memory import DraftMemory
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.ops.launch import dispatch
from trtspec.ops.tokens.noise import NoiseStream, uniform_noise
from trtspec.ops.tokens.sample import filter_logits

triton = pytest.importorskip("triton", reason="needs triton")
tl = pytest.importorskip("triton.language", reason="needs triton")
kernels_uniform = pytest.importorskip("trtspec.ops.tokens.triton_noise").uniform
triton_filter = pytest.importorskip("trtspec.ops.tokens.triton_filter")
triton_stats = pytest.importorskip("trtspec.ops.tokens.triton_stats")
_next_token = rejection._next_token

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SEEDS = range(30) if DEVICE == "cuda" else range(2)
RULES = ["strict", "exact_match", "rejection", "block"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_stats, "CHUNK", 128)
    monkeypatch.setattr(triton_stats, "PART", 32)
    monkeypatch.setattr(triton_filter, "CAPACITY", 48)


def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_module", lambda name: None)


def _same(ours: tuple[Tensor, ...], twin: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(ours, twin, strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "filters", "has_table"),
    [
        ("strict", "", False), ("exact_match", "kp", True), ("rejection", "", True),
        ("rejection", "kp", False), ("block", "", False), ("block", "kp", True),
    ],
)  # fmt: skip
def test_what_is_accepted(
    rule: str, filters: str, has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernels(monkeypatch)
    for seed in SEEDS:
        case = SampledCase(rule, seed, filters=filters, has_table=has_table)
        _same(case.kernels(), case.twin())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("filters", "has_table"), [("", True), ("p", False)])
def test_what_is_accepted_of_certain_drafts(
    rule: str, filters: str, has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are tokens that the drafter does not know. What they replaced is still remembered."""
    _no_kernels(monkeypatch)
    lens, differs = [], 0
    for seed in range(30):
        case = SampledCase(rule, seed, filters=filters, has_table=has_table)
        case.look_up(seed)
        twin = case.twin()
        if seed < 2 + len(SEEDS):
            _same(case.kernels(), twin)
        lens += twin[1][CONTEXTS + 1 :].tolist()
        case.worker.draft_memory.are_certain[:] = False  # type: ignore[union-attr]
        differs += not torch.equal(twin[0], case.twin()[0])
    assert differs > 0 and set(lens) == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "rejection"])
def test_of_equal_logits_the_first_are_kept(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where top-k cuts between logits that are the same."""
    _no_kernels(monkeypatch)
    for seed in SEEDS:
        case = SampledCase(rule, seed, filters="k")
        case.logits.mul_(0.5).round_()
        case.sampling.top_ks[:] = 6
        _same(case.kernels(), case.twin())


@pytest.mark.slow
def test_what_a_block_leaves_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after drafts that are together less likely than they were drawn is of
    max(w p - q, 0) with w under 1: another one than of max(p - q, 0) with these seeds."""
    _no_kernels(monkeypatch)
    for seed in (171, 311, 355):
        case = SampledCase("block", seed)
        with monkeypatch.context() as patch:
            patch.setattr(rejection, "_next_token", _without_scale)
            tokens, _, _ = case.twin()
        assert not torch.equal(case.kernels()[0], tokens)
        _same(case.kernels(), case.twin())


def _without_scale(
    log_p: Tensor, drafts: Tensor, drawn_from: rejection.DraftDistributions,
    sampling: SamplingMetadata, count: Tensor, scale: Tensor,
) -> Tensor:  # fmt: skip
    return _next_token(log_p, drafts, drawn_from, sampling, count, torch.ones_like(scale))


def test_cases_keep_drafts_and_turn_them_down(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_kernels(monkeypatch)
    for rule in RULES:
        lens = torch.stack([SampledCase(rule, seed).twin()[1] for seed in range(20)])
        assert {1, 2, 3, 4} == set(lens.flatten().tolist()), rule


def test_forced_and_bad_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_kernels(monkeypatch)
    case = SampledCase("rejection", 3)
    case.logits[CONTEXTS + 2, 7] = float("nan")  # of the first generation
    case.logits[0] = float("-inf")
    case.logits[-2, 5] = float("inf")
    bad = [True, *[False] * (CONTEXTS - 1), True, *[False] * (GENERATIONS - 1)]
    tokens, lens, is_bad = case.kernels()
    assert is_bad.tolist() == case.twin()[2].tolist() == bad
    assert bool((tokens[torch.arange(len(lens)), (lens - 1).long()] < V).all())
    assert bool((tokens[torch.arange(len(lens)), (lens - 1).long()] >= 0).all())
    case.worker.force_num_accepted_tokens = 2
    _, twin_lens, _ = case.twin()
    assert case.kernels(forced_len=3)[1].tolist() == twin_lens.tolist()
    assert twin_lens.tolist() == [1] * CONTEXTS + [3] * GENERATIONS


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(1, 1.0), (5, 1.0), (0, 0.5), (0, 0.01), (40, 0.9), (0, 0.999), (V - 1, 1.0), (V, 0.97)],
)
def test_filters(top_k: int, top_p: float, has_ties: bool) -> None:
    """The same logits are kept, of equal ones the first; more of them than can be put aside too."""
    logits = 2.5 * random_normal(2, V, seed=top_k)
    logits = logits.round() if has_ties else logits
    temperatures = torch.tensor([0.8, 1.7])
    ks, ps = torch.full((2,), top_k, dtype=torch.int32), torch.full((2,), top_p)
    kept = filter_logits(logits / temperatures[:, None], ks, ps) > float("-inf")
    weights = ((logits - logits.amax(1, keepdim=True)) / temperatures[:, None]).exp() * kept
    ours, sums = kept_by_kernels(*(x.to(DEVICE) for x in (logits, temperatures, ks, ps)))
    assert torch.equal(ours.cpu(), kept)
    torch.testing.assert_close(sums.cpu(), weights.sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("capacity", [48, 200, 1024])
@pytest.mark.parametrize("tried", [2, 8, 64])
def test_top_p_where_likely_tokens_are_in_few_parts(
    monkeypatch: pytest.MonkeyPatch, capacity: int, tried: int
) -> None:
    """As of vocabularies in the order of frequency: the parts' largest logits alone weigh less."""
    monkeypatch.setattr(triton_filter, "CAPACITY", capacity)
    monkeypatch.setattr(triton_filter, "TRIED_PARTS", tried)
    ps = torch.tensor([0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 0.999])
    count, vocab = len(ps), 1024 - 5
    logits = random_normal(count, vocab, seed=tried)
    logits[:, :32] += 4
    logits[:, 64:128] += 2
    ks, temperatures = torch.zeros(count, dtype=torch.int32), torch.linspace(0.9, 1.3, count)
    kept = filter_logits(logits / temperatures[:, None], ks, ps) > float("-inf")
    assert kept.sum(1).tolist() == sorted(kept.sum(1).tolist()) and int(kept[-1].sum()) > 200
    ours, _ = kept_by_kernels(*(x.to(DEVICE) for x in (logits, temperatures, ks, ps)))
    assert torch.equal(ours.cpu(), kept)


@pytest.mark.parametrize("around", [0.0, -20.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("capacity", [300, 1000])
def test_top_p_of_flat_rows(
    monkeypatch: pytest.MonkeyPatch, capacity: int, dtype: torch.dtype, around: float
) -> None:
    """Of which so many logits are candidates that the range is narrowed first, or not enough. Many
    are the same where the type has few numbers."""
    monkeypatch.setattr(triton_filter, "CAPACITY", capacity)
    ps = torch.tensor([0.2, 0.5, 0.7, 0.9, 0.95, 0.999])
    logits = (0.5 * random_normal(len(ps), 4000, seed=1) + around).to(dtype)
    logits[1] = logits[1].round()  # three quarters are the same
    logits[2, ::3] = -torch.inf
    temperatures = torch.linspace(0.7, 1.3, len(ps))
    ks, scaled = torch.zeros(len(ps), dtype=torch.int32), logits.double() / temperatures[:, None]
    kept = filter_logits(scaled, ks, ps.double()) > float("-inf")
    weights = (scaled - scaled.amax(1, keepdim=True)).exp() * kept
    ours, sums = kept_by_kernels(*(x.to(DEVICE) for x in (logits, temperatures, ks, ps)))
    differing = (ours.cpu() != kept).sum(1)
    assert int(differing.max()) <= 1, differing  # a sum of 4,000 weights, rounded
    torch.testing.assert_close(sums.double().cpu(), weights.sum(1), atol=0, rtol=2e-3)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_top_p_at_the_ends_of_temperature(temperature: float) -> None:
    logits = random_normal(2, V, seed=3)
    logits[1, 7] = logits[1, 9] = 9.0  # at the least temperatures the first of these alone
    ks, temperatures = torch.zeros(2, dtype=torch.int32), torch.full((2,), temperature)
    given = logits, temperatures, ks, torch.full((2,), 0.5)
    ours, sums = kept_by_kernels(*(x.to(DEVICE) for x in given))
    assert bool(sums.isfinite().all())
    expected = 1 if temperature < 1 else V // 2
    assert all(abs(n - expected) <= expected // 50 for n in ours.sum(1).tolist())


def test_top_p_that_rounds_to_all_keeps_to_top_k() -> None:
    """In rows whose 50 kept logits weigh, as they are summed, less than 0.9999999 of that sum."""
    logits = (2 * random_normal(24, V, seed=2))[[4, 13, 22]].to(torch.bfloat16).to(DEVICE)
    ks = torch.full((3,), 50, dtype=torch.int32, device=DEVICE)
    ps, temperatures = torch.full((3,), 0.9999999, device=DEVICE), torch.ones(3, device=DEVICE)
    kept, _ = kept_by_kernels(logits, temperatures, ks, ps)
    assert int(kept.sum(1).max()) <= 50


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs engines with kernels")
@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
def test_an_engine_says_the_same_with_kernels(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts, generations and drafts, sampled and greedy, with filters and without."""
    folder = make_models(tmp_path)
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True, seed=i, **wish)
        for i, wish in enumerate([{"temperature": 3.0}, {}, {"temperature": 1.0, "top_k": 9}])
    ]
    texts = []
    for served in (False, True):
        if served:
            for module in (acceptance_rule, draw):
                monkeypatch.setattr(module, "sampling_kernels", lambda logits: kernels)
        llm = engine(folder, config_of(folder, "eagle3", rule), max_batch_size=2)
        outputs = llm.generate([[5, 6, 7], [8], [9, 3]], params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["exact_match", "rejection"])
@pytest.mark.parametrize("has_table", [False, True])
def test_drafts(rule: str, has_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, and what is remembered of it."""
    d2t = (SUBSET - torch.arange(len(SUBSET))).to(DEVICE) if has_table else None
    vocab = len(SUBSET) if has_table else V
    logits = (3 * random_normal(4, vocab, seed=1)).to(DEVICE)
    logits[1, 3], logits[2, 1] = float("nan"), float("inf")
    results: list[tuple[Tensor, DraftMemory | None]] = []
    for served in (True, False):
        worker = make_worker(rule, d2t)
        if not served:
            _no_kernels(monkeypatch)
        sampler = DraftSampler(
            torch.tensor([0.9, 0.5, 1.0, 0.0]).to(DEVICE),
            torch.tensor([5, -3, 2**40, 9]).to(DEVICE),
            torch.tensor([4, 0, SLOTS, 2]).to(DEVICE), worker.draft_memory,
        )  # fmt: skip
        draw = partial(kernels.draw_drafts, logits, d2t, sampler.temperatures, sampler.seeds)
        last = torch.tensor([[7, 0], [0, 1], [4000, 2], [3, 3]]).to(DEVICE)[:, 0]
        for depth in range(2):
            if served:
                tokens = draw(last, depth, sampler.slots, sampler.memory)
            else:
                tokens = sampler.draw(logits, d2t, last, depth)
            results.append((tokens, sampler.memory))
    assert results[0][0].tolist() == results[2][0].tolist()
    assert results[1][0].tolist() == results[3][0].tolist()
    ours, twin = results[0][1], results[2][1]
    assert (ours is None) == (rule == "exact_match")
    if ours is None or twin is None:
        return
    for name in ("best", "log_sum", "log_q"):
        torch.testing.assert_close(getattr(ours, name), getattr(twin, name), atol=1e-5, rtol=1e-5)
    clean = torch.where(ours.logits.isnan(), float("-inf"), ours.logits)  # NaN is kept as it is
    assert torch.equal(clean, twin.logits)


def test_noise_is_that_of_the_twin() -> None:
    seeds = torch.tensor([0, 1, -5, 2**62 + 3, 2**33])
    positions = torch.tensor([0, 1, 77, 2**31, 12345])
    for stream in (int(NoiseStream.TARGET), int(NoiseStream.ACCEPTANCE), 21):
        twin = uniform_noise(seeds, positions, stream, 64)
        for row in range(len(seeds)):
            out = torch.empty(64, device=DEVICE)
            place = seeds[row : row + 1].to(DEVICE), positions[row : row + 1].to(DEVICE)
            _noise_kernel[(1,)](*place, stream, out)
            assert out.tolist() == twin[row].tolist()


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, stream, out_ptr):  # type: ignore[no-untyped-def]
    v = tl.arange(0, 64)
    stream = tl.full([], stream, tl.int32)
    noise = kernels_uniform(tl.load(seed_ptr), tl.load(position_ptr), stream, v)
    tl.store(out_ptr + v, noise)
