"""Ops against brute force written the slow, obvious way."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_search import ngram_search

from trtspec.layers.linear import Linear, find_min_rows
from trtspec.layers.norm import RMSNorm
from trtspec.metadata.attention import NULL_BLOCK
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.ops.step.slots import guard_positions, slot_mapping
from trtspec.ops.tokens.accept import count_accepted, last_accepted, mask_after
from trtspec.ops.tokens.ngram import propose_ngrams
from trtspec.ops.tokens.noise import (
    NoiseStream,
    _to_open_interval,
    exponential_noise,
    gumbel_noise,
    uniform_noise,
)
from trtspec.ops.tokens.sample import clean_logits, filter_logits, greedy_tokens, sample_tokens


# -- noise -------------------------------------------------------------------------------------
def _reference_noise(seed: int, position: int, stream: int, index: int) -> float:
    """The hash in plain Python integers."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask
        x = (x ^ (x >> 15)) * 0x846CA68B & mask
        return x ^ (x >> 16)

    low, high = seed & mask, (seed >> 32) & mask
    first = mix(mix((low + ((position + 1) * 0x9E3779B1 & mask)) & mask) ^ high)
    second = mix((first + 0x85EBCA6B * (stream + 1)) & mask) ^ mix((high ^ position) & mask)
    first = mix(first ^ mix(second))
    x = ((index * 0x9E3779B1 & mask) + first) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D & mask) ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B & mask
    x ^= x >> 16
    return ((x >> 9) + 0.5) * 2.0**-23


def test_noise_equals_integer_arithmetic() -> None:
    rng = random.Random(0)
    seeds = [0, 1, 2**63 - 1, *(rng.randrange(2**63) for _ in range(5))]
    positions = [0, 1, 131071, *(rng.randrange(2**17) for _ in range(5))]
    for stream in NoiseStream:
        noise = uniform_noise(torch.tensor(seeds), torch.tensor(positions), stream, 33)
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            for index in (0, 1, 32):
                expected = _reference_noise(seed, position, stream, index)
                assert noise[row, index].item() == pytest.approx(expected, abs=1e-7)


def test_noise_is_uniform_and_streams_positions_and_seeds_are_independent() -> None:
    size = 1 << 16
    rows = [(7, 3), (7, 4), (8, 3), (7 + 2**32, 3)]
    seeds = torch.tensor([seed for seed, _ in rows])
    positions = torch.tensor([position for _, position in rows])
    noise = torch.cat([uniform_noise(seeds, positions, s, size) for s in NoiseStream]).double()
    assert noise.min() > 0 and noise.max() < 1
    # Chi-square over 256 cells: mean 255, standard deviation 22.6; six sigma.
    for row in noise:
        counts = torch.histc(row.float(), 256, 0, 1).double()
        assert ((counts - size / 256) ** 2 / (size / 256)).sum() < 255 + 6 * 22.6
    centred = (noise - 0.5) * math.sqrt(12)
    correlation = (centred @ centred.T / size) - torch.eye(len(noise))
    assert correlation.abs().max() < 6 / math.sqrt(size)
    lagged = (centred[:, 1:] * centred[:, :-1]).mean(1)
    assert lagged.abs().max() < 6 / math.sqrt(size)


def test_noise_of_consecutive_positions_and_seeds_is_uniform_too() -> None:
    """The draw at one vocabulary entry over many positions, and over many seeds."""
    count = 1 << 16
    steps, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for seeds, positions in ((zeros + 5, steps), (steps, zeros + 9)):
        values = uniform_noise(seeds, positions, NoiseStream.TARGET, 1)[:, 0]
        counts = torch.histc(values, 256, 0, 1).double()
        assert ((counts - count / 256) ** 2 / (count / 256)).sum() < 255 + 6 * 22.6
        assert len(values.unique()) > count * 0.99


# -- sampling ----------------------------------------------------------------------------------
def _rows(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([value]) for name, value in values.items()}


def test_sampled_distribution_is_the_softmax() -> None:
    count, vocab = 200_000, 7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5])
    for temperature in (0.7, 1.0, 1.9):
        tokens = sample_tokens(
            logits.expand(count, vocab),
            SamplingMetadata(
                temperatures=torch.full((count,), temperature),
                top_ks=torch.zeros(count, dtype=torch.int32),
                top_ps=torch.ones(count),
                seeds=torch.full((count,), 11),
                positions=torch.arange(count),
            ),
        )
        expected = (logits / temperature).double().softmax(-1) * count
        observed = torch.bincount(tokens, minlength=vocab)
        assert ((observed - expected) ** 2 / expected).sum() < 27.9  # 6 degrees, p = 1e-4


def test_temperature_zero_is_argmax_beside_sampled_rows() -> None:
    logits = torch.randn(64, 50)
    temperatures = torch.zeros(64)
    temperatures[::2] = 1.5
    sampling = SamplingMetadata(
        temperatures=temperatures,
        top_ks=torch.zeros(64, dtype=torch.int32),
        top_ps=torch.ones(64),
        seeds=torch.arange(64),
        positions=torch.arange(64),
    )
    tokens = sample_tokens(logits, sampling)
    assert torch.equal(tokens[1::2], logits.argmax(-1)[1::2].to(torch.int32))
    assert not torch.equal(tokens[::2], logits.argmax(-1)[::2].to(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.integers(0, 10_000),
)
def test_filters_keep_what_brute_force_keeps(vocab: int, k: int, p: float, seed: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    order = sorted(range(vocab), key=lambda i: (-logits[i].item(), i))
    kept = order[:k] if 0 < k <= vocab else order
    total, chosen, reached = sum(math.exp(logits[i]) for i in kept), [], 0.0
    for i in kept:
        if reached >= p and p < 1:
            break
        chosen.append(i)
        reached += math.exp(logits[i]) / total
    # A sum that lands on p within rounding may go either way.
    near = abs(reached - p) < 1e-6 or any(
        abs(sum(math.exp(logits[i]) for i in kept[: n + 1]) / total - p) < 1e-6
        for n in range(len(kept))
    )
    out = filter_logits(logits[None], torch.tensor([k]), torch.tensor([p]))[0]
    if not near:
        assert set(torch.where(~torch.isneginf(out))[0].tolist()) == set(chosen)


def test_nan_is_minus_infinity_and_flags_its_row() -> None:
    logits = torch.tensor([[0.0, float("nan"), 3.0], [1.0, 2.0, 0.0], [float("nan")] * 3])
    clean, bad = clean_logits(logits)
    assert bad.tolist() == [True, False, True]
    assert clean.argmax(-1).tolist() == [2, 1, 0]
    _, bad = clean_logits(torch.tensor([[float("-inf")] * 2, [float("-inf"), 0.0]]))
    assert bad.tolist() == [True, False]  # nothing is allowed: no token can be right


# -- acceptance --------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_acceptance_pattern(k: int) -> None:
    for pattern in range(2**k):
        target = torch.arange(10, 11 + k, dtype=torch.int32)
        drafts = target[:-1].clone()
        for i in range(k):
            if not pattern >> i & 1:
                drafts[i] = 99 if i % 2 else -1
        expected = 1
        while expected <= k and pattern >> (expected - 1) & 1:
            expected += 1
        lens = count_accepted(target[None], drafts[None])
        assert lens.tolist() == [expected]
        rows = mask_after(target[None], lens)
        assert rows[0].tolist() == target[:expected].tolist() + [-1] * (k + 1 - expected)
        assert last_accepted(rows, lens).tolist() == [target[expected - 1].item()]


# -- slots -------------------------------------------------------------------------------------
def test_slots_follow_the_block_table_and_stop_at_the_maximum() -> None:
    table = torch.tensor([[5, 2, NULL_BLOCK], [7, NULL_BLOCK, NULL_BLOCK]], dtype=torch.int32)
    positions = torch.tensor([[3, 4, 5], [2, 3, 4]])
    guarded, inside = guard_positions(positions, max_seq_len=5)
    assert guarded.tolist() == [[3, 4, 0], [2, 3, 4]]
    slots = slot_mapping(table, guarded, inside, page_size=4)
    assert slots.tolist() == [[5 * 4 + 3, 2 * 4, -1], [7 * 4 + 2, 7 * 4 + 3, -1]]


# -- n-gram ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
)
def test_ngram_equals_a_search_in_lists(
    rows: list[list[int]], k: int, a: int, b: int, oldest: bool
) -> None:
    shortest, longest = min(a, b), max(a, b)
    history = torch.full((len(rows), 26), 1, dtype=torch.int32)  # junk past the length
    for i, row in enumerate(rows):
        history[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lens = torch.tensor([len(row) for row in rows])
    drafts = propose_ngrams(history, lens, k, longest, shortest, oldest)
    for row, draft in zip(rows, drafts.tolist(), strict=True):
        assert draft == ngram_search(row, k, longest, shortest, oldest)


# -- layers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_float64(dtype: torch.dtype, bias: bool) -> None:
    layer = Linear(96, 80, bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = layer.to(dtype)
    x = torch.randn(5, 96, dtype=dtype)
    assert layer.weight is not None
    expected = x.double() @ layer.weight.double().T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    layer.pack()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (576, 3072)])
def test_packed_bf16_rows_do_not_depend_on_their_number(shape: tuple[int, int]) -> None:
    """What makes greedy bf16 text the same with and without speculation on CPU."""
    torch.manual_seed(0)
    for _ in range(20):
        layer = Linear(*shape, bias=False).to(torch.bfloat16)
        assert layer.weight is not None
        torch.nn.init.normal_(layer.weight, std=0.05)
        layer.pack()
        if layer.weight is not None:
            pytest.skip("this CPU has no bf16 instructions: the weight is not packed")
        x = torch.randn(9, shape[0], dtype=torch.bfloat16)
        one_by_one = torch.cat([layer(row[None]) for row in x])
        for rows in range(2, 10):
            assert torch.equal(layer(x[:rows]), one_by_one[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [48, 576, 2048])
@pytest.mark.parametrize("largest", [1.0, 1000.0])
def test_a_packed_norm(
    size: int, largest: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_layer_norm, calls = torch.layer_norm, list[int]()
    monkeypatch.setattr(
        torch, "layer_norm", lambda *args: (calls.append(1), by_layer_norm(*args))[1]
    )
    torch.manual_seed(0)
    norm = RMSNorm(size, 1e-5).to(dtype)
    norm.weight.data = (torch.rand(size) + 0.5).to(dtype)
    x = torch.randn(12, size).to(dtype)
    x[:, 3] *= largest  # as models have them
    x[4] = torch.nan
    before = norm(x)
    norm.pack()
    packed = {rows: norm(x[:rows]) for rows in range(1, 13)}
    exact = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5)
    exact = exact * norm.weight.double()
    assert len(calls) == (12 if dtype == torch.bfloat16 else 0)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[dtype]
    for rows, y in packed.items():
        assert torch.equal(y.nan_to_num(), packed[12][:rows].nan_to_num())
        torch.testing.assert_close(
            y.double(), exact[:rows], rtol=rounding, atol=1e-5, equal_nan=True
        )
    if dtype != torch.bfloat16:
        torch.testing.assert_close(packed[12], before, rtol=0, atol=0, equal_nan=True)
    heads = norm(x[:4].unflatten(0, (2, 2)))
    torch.testing.assert_close(heads.flatten(0, 1), packed[4], rtol=0, atol=0)
    norm.weight.data.mul_(2)
    torch.testing.assert_close(norm(x[:4]), 2 * packed[4], rtol=0, atol=1e-7)


def test_a_packed_norm_whose_weight_was_replaced() -> None:
    norm = RMSNorm(64, 1e-5).to(torch.bfloat16)
    norm.weight.data.fill_(1)
    norm.pack()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    before, copied = norm(x), copy.deepcopy(norm)
    copied.weight.data.mul_(2)
    assert torch.equal(copied(x), 2 * before)
    norm.weight.data = torch.full((64,), 4.0, dtype=torch.bfloat16)
    assert torch.equal(norm(x), 4 * before)
    norm.pack()
    assert torch.equal(norm(x), 4 * before)
    norm.float().to(torch.bfloat16).weight.data.fill_(8)
    assert torch.equal(norm(x), 8 * before)


def test_norms_with_an_offset_are_not_packed() -> None:
    norm = RMSNorm(64, 1e-5, offset=1.0).to(torch.bfloat16)
    norm.weight.data.zero_()
    norm.pack()
    assert norm.twice is None
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-5))


@pytest.mark.parametrize(("splits_below", "expected"), [(1, 1), (2, 2), (6, 9)])
def test_rows_are_padded_where_a_kernel_depends_on_their_number(
    splits_below: int, expected: int
) -> None:
    """A kernel that rounds differently below some number of rows, as oneDNN's does on some CPUs."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if x.shape[0] < splits_below:
            return (x * 1.01).sum(-1, keepdim=True).bfloat16()
        return x.sum(-1, keepdim=True).bfloat16()

    assert find_min_rows(multiply, 64) == expected


@pytest.mark.parametrize("size", [24, 48, 129, 384])
def test_sums_of_few_inputs_show_their_order(size: int) -> None:
    """One row alone is summed by two accumulators, several rows by one."""

    def add_up(columns: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(columns.shape[0])
        for column in columns.unbind(-1):
            total = total + column
        return total

    def multiply(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        parts = [x] if x.shape[0] > 1 else [x[:, ::2], x[:, 1::2]]
        return add_up(torch.stack([add_up(part) for part in parts], -1))[:, None].bfloat16()

    assert find_min_rows(multiply, size) == 2


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_float64(offset: float) -> None:
    norm = RMSNorm(48, 1e-5, offset)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 48)
    wide = x.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = (wide * scale * (norm.weight.double() + offset)).float()
    torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=1e-5)


def test_an_offset_is_added_before_rounding() -> None:
    """bf16 cannot hold 1.003, so a sum in the model's dtype would lose most of such weights."""
    norm = RMSNorm(64, 1e-5, offset=1.0).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight, std=3e-3)
    x = torch.randn(50, 64).bfloat16()
    wide = x.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    exact = (wide * scale * (1 + norm.weight.double())).bfloat16()
    early = (wide * scale * (1 + norm.weight).double()).bfloat16()
    assert (norm(x) == exact).float().mean() > 0.99
    assert (early == exact).float().mean() < 0.9


def test_bf16_norm_rows_do_not_depend_on_their_number() -> None:
    norm = RMSNorm(576, 1e-5).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(9, 576).bfloat16()
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))


def test_noise_never_reaches_the_ends() -> None:
    """The largest hash once gave u = 1 and infinite noise: a token of probability zero won."""
    ends = _to_open_interval(torch.tensor([0, -1], dtype=torch.int32))  # the bits of uint32
    assert ends[0] > 0 and ends[1] < 1
    assert torch.isfinite(-torch.log(-torch.log(ends))).all()
    noise = gumbel_noise(torch.arange(64), torch.arange(64), NoiseStream.TARGET, 1 << 18)
    assert torch.isfinite(noise).all()  # 16.8 million draws: two per value


def test_both_noises_choose_the_same_and_never_what_has_no_probability() -> None:
    keys = torch.arange(500), torch.arange(500), NoiseStream.TARGET, 300
    p = torch.rand(500, 300).pow(8) * (torch.rand(500, 300) < 0.1)
    chosen = (p / exponential_noise(*keys)).argmax(-1)
    assert torch.equal(chosen, (p.log() + gumbel_noise(*keys)).argmax(-1))
    assert (p.gather(1, chosen[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 49_152).to(dtype).clamp_(max=2.0)
    equal = logits == logits.amax(-1, keepdim=True)
    assert (equal.sum(-1) > 100).all()
    assert greedy_tokens(logits).tolist() == [int(row.nonzero()[0]) for row in equal]


def test_logits_without_nan_are_taken_as_they_are() -> None:
    logits = torch.randn(3, 50)
    logits[1, 7], logits[2, 9] = float("inf"), float("-inf")
    cleaned, bad = clean_logits(logits)
    assert cleaned is logits and not bad.any()
    logits[2, 3] = float("nan")
    cleaned, bad = clean_logits(logits)
    assert bad.tolist() == [False, False, True] and cleaned[2, 3] == float("-inf")
    assert cleaned[1, 7] == float("inf") and logits[2, 3].isnan()


@pytest.mark.slow
def test_a_certain_token_is_always_sampled() -> None:
    logits = torch.zeros(200, 49152)
    logits[:, 7] = 100.0
    for k, p in ((0, 1.0), (5, 1.0), (0, 0.5)):
        sampling = SamplingMetadata(
            temperatures=torch.ones(200),
            top_ks=torch.full((200,), k),
            top_ps=torch.full((200,), p),
            seeds=torch.arange(200),
            positions=torch.arange(200),
        )
        assert (sample_tokens(logits, sampling) == 7).all()
