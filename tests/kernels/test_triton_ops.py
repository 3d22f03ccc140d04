"""Triton's small operations against their torch twins; in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import covering

from trtspec.layers.norm import RMSNorm
from trtspec.ops.layer import activation, convolution
from trtspec.ops.layer.rope import CacheWrite, KeysAndValues, Rope, apply_rope, write_layers

triton_rope = pytest.importorskip("trtspec.ops.layer.triton_rope", reason="needs triton")
from trtspec.ops.layer import (  # noqa: E402
    triton_activation,
    triton_copy,
    triton_embedding,
    triton_norm,
)
from trtspec.ops.layer.triton_convolution import convolve_blocks  # noqa: E402
from trtspec.ops.tokens import (  # noqa: E402  # noqa: E402
    bitmask,
    handover,
    history,
    lookup,
    markov_walk,
    ngram,
    ring,
    triton_bitmask,
    triton_handover,
    triton_lookup,
    triton_markov_walk,
    triton_ring,
    triton_walk,
    walk,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# The interpreter truncates where a GPU rounds, so bf16 is for the GPU alone.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _norm(weight: torch.Tensor, offset: float) -> RMSNorm:
    norm = RMSNorm(len(weight), 1e-5, offset)
    norm.weight.data = weight
    return norm


def _close(ours: torch.Tensor, twin: torch.Tensor) -> None:
    rounding = 2e-2 if twin.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, twin, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, size: int, offset: float) -> None:
    x, weight = _random(5, 2 * size, dtype=dtype)[:, :size], _random(size, dtype=dtype, seed=3)
    expected = F.rms_norm(x.float(), (size,), weight.float() + offset, 1e-5).to(dtype)
    _close(triton_norm.rms_norm(x, _norm(weight, offset)), expected)


@covering(dtype=DTYPES, size=[16, 48, 576], offset=[0.0, 1.0], has_scalar=[False, True])
def test_add_normed(dtype: torch.dtype, size: int, offset: float, has_scalar: bool) -> None:
    residual, x = _random(5, 2 * size, dtype=dtype).chunk(2, dim=-1)
    weight, scalar = _random(size, dtype=dtype, seed=3), _random(1, dtype=dtype, seed=7)
    normed = F.rms_norm(x.float(), (size,), weight.float() + offset, 1e-5).to(dtype)
    expected = (residual + normed) * (scalar if has_scalar else 1)
    given = _norm(weight, offset), scalar if has_scalar else None
    _close(triton_norm.add_normed(residual, x, *given), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [8, 80, 1536])
def test_silu_and_mul(dtype: torch.dtype, inner: int) -> None:
    x = 4 * _random(3, 2 * inner, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    _close(triton_activation.silu_and_mul(x), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [8, 80, 1536])
def test_gelu_tanh_and_mul(dtype: torch.dtype, inner: int) -> None:
    x = 4 * _random(3, 2 * inner, dtype=dtype)
    x[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -7.0], dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    _close(triton_activation.gelu_tanh_and_mul(x), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [8, 80, 1536])
def test_swish_and_mul_plus_one(dtype: torch.dtype, inner: int) -> None:
    x = 4 * _random(3, 2 * inner, dtype=dtype)
    x[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -7.0], dtype=dtype)
    x[0, inner : inner + 3] = torch.tensor([-300.0, 300.0, 7.0], dtype=dtype)
    gate, up = x.double().clamp(max=7.0).chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(min=-7.0) + 1)
    for swish in (triton_activation, activation):
        _close(swish.swish_and_mul_plus_one(x, 1.702, 7.0), expected.to(dtype))
    x[1, 5] = x[2, inner + 6] = torch.nan
    isnan = triton_activation.swish_and_mul_plus_one(x, 1.702, 7.0).isnan()
    assert isnan.nonzero().tolist() == [[1, 5], [2, 6]]


@covering(dtype=DTYPES, size=[1, 48, 1040], rows=[1, 5])
def test_copy_rows(dtype: torch.dtype, size: int, rows: int) -> None:
    """Into the middle columns of a wider matrix, whose others stay."""
    source = _random(rows, 2 * size, dtype=dtype)[:, :size]
    target = _random(rows + 1, 3 * size, dtype=dtype, seed=1)
    expected = target.clone()
    expected[:rows, size : 2 * size] = source
    triton_copy.copy_rows(source, target[:rows, size : 2 * size])
    assert torch.equal(target, expected)


@covering(dtype=DTYPES, size=[48, 1040], taps=[1, 2, 3], block=[1, 2, 4], adds=[False, True])
def test_convolve_blocks(dtype: torch.dtype, size: int, taps: int, block: int, adds: bool) -> None:
    """Against the formula, number by number along a block."""
    rows, group = 3 * block, 16
    x, residual = (_random(rows, size, dtype=dtype, seed=i) for i in range(2))
    base = _random(taps, size, dtype=dtype, seed=3)
    dynamic = _random(rows, 2, taps, size // group, dtype=dtype, seed=4)[:, 1]
    weights = base.double() + dynamic.double().repeat_interleave(group, -1)
    expected = residual.double() if adds else torch.zeros(rows, size).double().to(DEVICE)
    for i in range(rows):
        for tap in range(min(taps, i % block + 1)):
            expected[i] += weights[i, tap] * x[i - tap].double()
    given = x, base, dynamic, block, residual if adds else None
    _close(convolve_blocks(*given), expected.to(dtype))
    on_cpu = (t.cpu() if isinstance(t, torch.Tensor) else t for t in given)
    _close(convolution.convolve_blocks(*on_cpu).to(DEVICE), expected.to(dtype))  # type: ignore[arg-type]


@covering(
    dtype=DTYPES,
    drafts=[1, 4],
    batch=[1, 3, 17],
    vocab=[40, 700],
    rank=[12, 64, 200],  # 200: in several tiles
    maps=[False, True],
)
def test_walk_by_draft(
    dtype: torch.dtype, drafts: int, batch: int, vocab: int, rank: int, maps: int
) -> None:
    """Against float64, draft by draft."""
    logits = _random(drafts * batch, vocab, dtype=dtype)
    logits[0, 0] = float("nan")  # never taken
    logits[-1] = float("-inf")  # nothing to take: the first
    d2t = torch.arange(vocab, device=DEVICE) if maps else None
    w1, w2 = (_random(n, rank, dtype=dtype, seed=i) for i, n in ((2, 2 * vocab), (3, vocab)))
    tables = markov_walk.MarkovTables(w1, w2 / rank**0.5, d2t)
    before = torch.arange(2 * vocab - 2, 2 * vocab - 2 + batch, device=DEVICE)  # some above W1's
    taken = triton_markov_walk.walk_by_draft(logits, before, tables)
    twin = markov_walk.walk_by_draft.__wrapped__(logits, before, tables)  # type: ignore[attr-defined]
    assert taken.shape == twin.shape == (drafts, batch)
    assert taken.dtype == twin.dtype == torch.int32
    step = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    for found in (taken, twin):
        tokens = before.clamp(max=2 * vocab - 1)
        for own, chosen in zip(logits.double().split(batch), found.long(), strict=True):
            scores = own + w1.double()[tokens] @ tables.w2.double().T
            scores = scores.masked_fill(scores.isnan(), float("-inf"))
            drafts_taken = chosen // 2 if maps else chosen
            short = scores.max(1).values - scores.gather(1, drafts_taken[:, None])[:, 0]
            assert bool(((short <= 4 * step) | short.isnan()).all())  # roundings of bias and sum
            tokens = chosen
    assert int(taken[-1, -1]) == 0
    assert torch.equal(triton_markov_walk.walk_by_draft(logits, before, tables), taken)


def test_walk_by_draft_takes_the_first_of_equals() -> None:
    """In other chunks of the vocabulary, and whatever the sign of zero is."""
    logits = torch.full((6, 1500), -1.0, device=DEVICE)
    logits[0, [3, 1200]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    logits[1, [700, 1499]] = torch.tensor([0.0, -0.0], device=DEVICE)
    logits[2, [256, 255, 900]] = 2.5
    logits[3, 600:] = -0.5
    logits[4] = float("nan")
    logits[5, [1498, 1499]] = torch.tensor([1e-30, 2e-30], device=DEVICE)
    tables = markov_walk.MarkovTables(*torch.zeros(2, 1500, 16, device=DEVICE), None)
    before = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    taken = triton_markov_walk.walk_by_draft(logits, before, tables)
    assert taken.tolist() == [[3, 700, 255], [600, 0, 1499]]


@covering(dtype=DTYPES, drafts=[1, 5], batch=[1, 3], count=[1, 5, 16], rank=[12, 256])
def test_walk_candidates(
    dtype: torch.dtype, drafts: int, batch: int, count: int, rank: int
) -> None:
    vocab = 40
    logits = _random(drafts, batch, vocab, dtype=dtype)
    unary, ids = logits.topk(count)
    if count > 1:
        unary[0, 0, 0] = float("nan")  # never taken
    states = _random(drafts, batch, rank, dtype=dtype, seed=1)
    books = walk.Codebooks(*(_random(vocab, rank, dtype=dtype, seed=i) / rank**0.5 for i in (2, 3)))
    candidates = walk.PathCandidates(ids, unary, states)
    before = torch.tensor([[39, 0], [7, 0], [45, 0]], device=DEVICE)[:batch, 0]  # 45 is read as 39
    taken = triton_walk.walk_candidates(candidates, before, books)
    twin = walk.walk_candidates.__wrapped__(candidates, before, books)  # type: ignore[attr-defined]
    assert torch.equal(taken, twin) and taken.dtype == torch.int32
    tokens = before.clamp(max=vocab - 1).tolist()
    for i in range(drafts):
        for j in range(batch):
            context = books.predecessors[tokens[j]].float() * states[i, j].float()
            scores = [
                (-1e9 if u != u else u) + float(context @ books.successors[c].float())
                for c, u in zip(ids[i, j].tolist(), unary[i, j].tolist(), strict=True)
            ]
            tokens[j] = int(ids[i, j, max(range(count), key=scores.__getitem__)])
        assert taken[i].tolist() == tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup_with_a_scale(dtype: torch.dtype) -> None:
    table = _random(30, 40, dtype=dtype)
    ids = torch.tensor([3, -1, 29, 40], device=DEVICE)
    scale = torch.tensor(48**0.5, dtype=dtype).item()
    expected = table[ids.clamp(0, 29)] * scale
    assert torch.equal(triton_embedding.lookup(ids, table, scale), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(6, 8), (9, 64), (4, 48)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rope_queries(dtype: torch.dtype, heads: int, dim: int, offset: float) -> None:
    q = _random(5, heads, 2 * dim, dtype=dtype)[..., :dim]
    angles = _random(20, dim // 2, dtype=torch.float32, seed=4)
    positions = torch.tensor([3, 19, 0, 7, 7], device=DEVICE)
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=-1), positions)
    norm = RMSNorm(dim, 1e-5, offset)
    norm.weight.data = _random(dim, dtype=dtype, seed=5)
    normed = F.rms_norm(q.float(), (dim,), norm.weight.float() + offset, 1e-5).to(dtype)
    _close(triton_rope.rope_queries(q, rope, norm), apply_rope(normed, *rope.rotation(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_norms_values(dtype: torch.dtype) -> None:
    dim, slots = 16, torch.tensor([7, 3, -1, 9, 4], device=DEVICE)
    qkv = 3 * _random(5, 9, dim, dtype=dtype)
    angles = _random(20, dim // 2, dtype=torch.float32, seed=4)
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=-1), torch.arange(5, device=DEVICE))
    norms = RMSNorm(dim, 1e-5), RMSNorm(dim, 1e-5)
    for i, norm in enumerate(norms):
        norm.weight.data = _random(dim, dtype=dtype, seed=5 + i)
    results = []
    for norms_values in (False, True):
        k_slots, v_slots = (torch.zeros(12, 2, dim, dtype=dtype, device=DEVICE) for _ in "kv")
        to = CacheWrite(k_slots, v_slots, slots, scratch_slot=11)
        q = triton_rope.rope_and_write(qkv, rope, 5, to, norms, norms_values)
        results.append((q, k_slots, v_slots))
    plain, normed = results
    assert torch.equal(plain[0], normed[0]) and torch.equal(plain[1], normed[1])
    _close(normed[2][slots], F.rms_norm(qkv[:, 7:], (dim,), eps=1e-5))


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("has_norms", [True, False])
def test_write_layers(is_alike: bool, has_norms: bool) -> None:
    """Against layer after layer by the torch twin."""
    dim, slots, layers = 16, torch.tensor([7, 3, -1, 9, 4], device=DEVICE), list[KeysAndValues]()
    cache = torch.zeros(2, 3, 12, 2, dim, device=DEVICE)
    rows = 3 * _random(5, 3 * 4 * dim, dtype=torch.float32)
    for i, kv in enumerate(rows.chunk(3, dim=-1)):
        angles = _random(20, dim // 2, dtype=torch.float32, seed=4 + i)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        rope = Rope(table, torch.arange(5, device=DEVICE) + i)
        norms = tuple(RMSNorm(dim, 1e-5, 0.0 if is_alike or i else 1.0) for _ in "qk")
        for j, norm in enumerate(norms):
            norm.weight.data = _random(dim, dtype=torch.float32, seed=2 * i + j)
        finite = is_alike or i > 0
        to = CacheWrite(cache[0, i], cache[1, i], slots, scratch_slot=11, keeps_finite=finite)
        of_layer = (norms[0], norms[1]) if has_norms else None
        layers.append(KeysAndValues(kv.view(5, 4, dim), rope, to, of_layer))
    triton_rope.write_layers(tuple(layers))
    ours = cache.clone()
    cache.zero_()
    write_layers.__wrapped__(tuple(layers))  # type: ignore[attr-defined]
    _close(ours, cache)
    assert ours[:, :, slots[slots >= 0]].all(-1).all()


@covering(**{
    "dtype": DTYPES, "heads,dim": [((6, 2), 8), ((9, 3), 64), ((4, 4), 48)],
    "keeps_finite": [False, True],
    "norm_offset": [None, 0.0, 1.0],  # None is without norms
    "few_heads": [0, 1024],  # several heads to a program, or one
})  # fmt: skip
def test_rope_and_write(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    keeps_finite: bool,
    norm_offset: float | None,
    few_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q_heads, kv_heads = heads
    monkeypatch.setattr(triton_rope, "FEW_HEADS", few_heads)
    rows, slots = 5, torch.tensor([7, 3, -1, 9, 4], device=DEVICE)
    qkv = _random(rows, q_heads + 2 * kv_heads, dim, dtype=dtype)
    if keeps_finite:
        qkv[1, q_heads, 3], qkv[2, -1, 1], qkv[3, 0, 0] = float("nan"), float("inf"), float("-inf")
    angles = _random(20, dim // 2, dtype=torch.float32, seed=4)
    positions = torch.tensor([3, 19, 0, 7, 7], device=DEVICE)
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=-1), positions)
    norms = None
    if norm_offset is not None:
        norms = RMSNorm(dim, 1e-5, norm_offset), RMSNorm(dim, 1e-5, norm_offset)
        for i, norm in enumerate(norms):
            norm.weight.data = _random(dim, dtype=dtype, seed=5 + i)
    k_slots, v_slots = (torch.zeros(12, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in "kv")
    to = CacheWrite(k_slots, v_slots, slots, scratch_slot=11, keeps_finite=keeps_finite)
    q = triton_rope.rope_and_write(qkv, rope, q_heads, to, norms)
    clean = torch.nan_to_num(qkv, 0.0, 0.0, 0.0) if keeps_finite else qkv
    qk = clean[:, : q_heads + kv_heads]
    if norms is not None:
        parts = qk.float().split([q_heads, kv_heads], dim=1)
        weights = [norm.weight.float() + norm.offset for norm in norms]
        normed = [F.rms_norm(p, (dim,), w, 1e-5) for p, w in zip(parts, weights, strict=True)]
        qk = torch.cat(normed, dim=1).to(dtype)
    rotated = apply_rope(qk, *rope.rotation(dtype))
    _close(q, rotated[:, :q_heads])
    _close(k_slots[slots], rotated[:, q_heads:])
    assert torch.equal(v_slots[slots], clean[:, q_heads + kv_heads :])
    untouched = [i for i in range(11) if i not in slots.tolist()]  # 11 is the scratch slot
    assert not k_slots[untouched].any() and not v_slots[untouched].any()


@covering(dtype=DTYPES, vocab=[31, 97, 4097], has_table=[False, True])
def test_mask_logits(dtype: torch.dtype, vocab: int, has_table: bool) -> None:
    """More rows of masks than of logits; entries past the vocabulary in the last word."""
    generator = torch.Generator().manual_seed(1)
    shape = 4, (vocab + 31) // 32
    masks = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).to(DEVICE)
    logits, table = _random(3, vocab, dtype=dtype), None
    if has_table:
        order = torch.randperm(vocab, generator=generator)[: vocab // 2].sort().values
        logits, table = logits[:, : len(order)], (order - torch.arange(len(order))).to(DEVICE)
    bits = (masks.cpu()[:, :, None] >> torch.arange(32)) & 1
    allowed = bits.flatten(1)[:3, :vocab].bool().to(DEVICE)
    if table is not None:
        allowed = allowed[:, table + torch.arange(len(table), device=DEVICE)]
    expected = logits.masked_fill(~allowed, -torch.inf)
    assert triton_bitmask.mask_logits(logits, masks, table).equal(expected)
    assert bitmask.mask_logits(logits, masks, table).equal(expected)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (3, 1100), (0, 4)])
@pytest.mark.parametrize("module", [handover, triton_handover])
def test_handing_over(module: Any, shape: tuple[int, ...]) -> None:
    """The host's further rows stay as they are. On CUDA its memory is page-locked."""
    there = torch.randint(0, 99, shape, dtype=torch.int32).to(DEVICE)
    here = torch.full((shape[0] + 2, *shape[1:]), -5, dtype=torch.int32)
    if there.is_cuda:
        here = here.pin_memory()
    module.write_to_host(there, here)
    if there.is_cuda:
        torch.cuda.synchronize()
    assert here[: shape[0]].equal(there.cpu()) and bool((here[shape[0] :] == -5).all())
    here += 7
    module.read_from_host(there, here)
    assert there.cpu().equal(here[: shape[0]])


def _texts(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of few different tokens, some of several blocks of positions."""
    generator = torch.Generator().manual_seed(seed)
    size = (6, 40, 700, 1400)[seed % 4]
    history = torch.randint(0, 2 + seed % 5, (3, size), generator=generator, dtype=torch.int32)
    lens = torch.randint(1, size + 1, (3,), generator=generator)
    lens[0] = size
    return history.to(DEVICE), lens.to(DEVICE)


@pytest.mark.parametrize("module", [history, triton_lookup])
@pytest.mark.parametrize("has_owners", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
def test_begin_texts(module: Any, has_owners: bool, is_empty: bool) -> None:
    """Texts that fill their row, end in a block of their own, have one token or none. The rest of a
    row and other slots stay as they are."""
    begin = getattr(module.begin_texts, "__wrapped__", module.begin_texts)
    size = 2 * triton_lookup.BLOCK + 3
    begun = [(3, size), (0, 1), (4, 0), (1, triton_lookup.BLOCK + 1)]
    if is_empty:
        begun = [(2, 0)]
    tokens = torch.arange(sum(count for _, count in begun) + 1, dtype=torch.int32) % 89
    held = (
        torch.full((5, size), -7, dtype=torch.int32),
        torch.full((5,), -7),
        torch.full((5, 2), -7),
    )
    expected, state = ([x.to(DEVICE).clone() for x in held] for _ in range(2))
    heads, first = [], 0
    for slot, count in begun:
        heads += [slot, 2 * history.BEGUN_WORDS * len(begun) + first, count, slot - 2, 2**40 + slot]
        expected[0][slot, :count] = tokens[first : first + count].to(DEVICE)
        expected[1][slot] = count
        if has_owners:
            expected[2][slot] = torch.tensor([slot - 2, 2**40 + slot])
        first += count
    words = torch.cat([torch.tensor(heads), tokens[: len(tokens) // 2 * 2].view(torch.int64)])
    begin(*state[:2], state[2] if has_owners else None, words.to(DEVICE), begun)
    assert all(map(torch.equal, state, expected))


def test_append_tokens() -> None:
    """Slots at their end, and beyond it; and slots of no step."""
    histories = torch.zeros(2, 5, 12, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([3, 0, 9, 11, 4], device=DEVICE).repeat(2, 1)
    slots = torch.tensor([2, 0, 3], device=DEVICE)
    tokens = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4) + 1
    counts = torch.tensor([4, 2, 1], dtype=torch.int32, device=DEVICE)
    append = history.append_tokens.__wrapped__  # type: ignore[attr-defined]
    arguments = slots, tokens, counts
    after = append(histories[0], lens[0], *arguments)
    assert torch.equal(triton_lookup.append_tokens(histories[1], lens[1], *arguments), after)
    assert torch.equal(histories[0, :, :11], histories[1, :, :11])  # the last column is scratch
    assert torch.equal(lens[0], lens[1]) and lens[0].tolist() == [5, 0, 11, 11, 4]


@pytest.mark.parametrize("module", [history, triton_lookup])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_fill_up_a_batch_append_nothing(module: Any, dtype: torch.dtype) -> None:
    """They point to the last slot, several of them, and whatever it held."""
    append = getattr(module.append_tokens, "__wrapped__", module.append_tokens)
    texts = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([3, 5, 2, 7], device=DEVICE)
    slots = torch.tensor([3, 1, 3, 3], device=DEVICE)
    tokens = torch.arange(12, dtype=torch.int32, device=DEVICE).view(4, 3) + 1
    counts = torch.tensor([3, 2, 1, 0], dtype=dtype, device=DEVICE)
    for length in (7, 9):
        assert append(texts, lens, slots, tokens, counts).tolist() == [0, length, 0, 0]
        assert lens.tolist() == [3, length, 2, 0]
    assert texts[1, :11].tolist() == [0, 0, 0, 0, 0, 4, 5, 4, 5, 0, 0]
    assert not texts[[0, 2, 3], :11].any()  # the last column is scratch


@pytest.mark.parametrize("prefer_oldest", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_propose_ngrams(seed: int, prefer_oldest: bool) -> None:
    arguments = *_texts(seed), 5, 4, 1 + seed % 3, prefer_oldest
    expected = ngram.propose_ngrams.__wrapped__(*arguments)  # type: ignore[attr-defined]
    assert torch.equal(triton_lookup.propose_ngrams(*arguments), expected)


RING_PAGES, BUCKETS = 8, 64  # few hashes share a bucket, and texts overwrite each other


def _empty_ring() -> ring.Ring:
    size, count = RING_PAGES * ring.PAGE, len(ring.SIZES)
    return ring.Ring(
        tokens=torch.zeros(size, dtype=torch.int32, device=DEVICE),
        owners=torch.zeros(RING_PAGES, ring.OWNER_WORDS, dtype=torch.int64, device=DEVICE),
        newest=torch.zeros(count, BUCKETS + 1, dtype=torch.int32, device=DEVICE),
        before=torch.zeros(count, size, dtype=torch.int32, device=DEVICE),
        end=torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )


OWNERS = torch.tensor([[5, 7], [5, 8], [-5, 8]])  # the first word is hashed, both are compared


def _ring_texts(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Texts with their owners, and where in a ring they go.

    The first have one n-gram more than a chunk holds, of each size. Of odd seeds the others begin
    with the end of a text that is looked up, more or less of it. Some end soon after that.
    """
    generator = torch.Generator().manual_seed(seed)
    start = 0
    counts = [triton_ring.CHUNK + 1 + size for size in ring.SIZES]
    counts += torch.randint(3, (RING_PAGES - 1) * ring.PAGE, (7,), generator=generator).tolist()
    for number, count in enumerate(counts):
        text = torch.randint(0, 2 + seed % 5, (count,), generator=generator).to(DEVICE)
        if seed % 2:
            most = int(torch.randint(1, 20, (1,), generator=generator))
            end = most + 2 if number % 2 else count
            text = torch.cat([_texts(seed)[0][0, -most:].long(), text[20:]])[:end]
        if len(text) < 3:
            continue
        yield text, OWNERS[number % 3 if seed % 3 else 0].to(DEVICE), start
        start = (start + ring.ring_pages(len(text)) * ring.PAGE) % (RING_PAGES * ring.PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_add_texts_to_a_ring(seed: int, together: int) -> None:
    """Both twins against one text after another. Of several, later ones overwrite earlier ones."""
    one_by_one, *rings = _empty_ring(), _empty_ring(), _empty_ring()
    texts = list(_ring_texts(seed))
    for first in range(0, len(texts), together):
        words, counts = [], []
        for text, owner, start in texts[first : first + together]:
            ring.add_to_ring(one_by_one, text, owner, start)
            words += [torch.tensor([len(text)], device=DEVICE), owner, text]
            counts.append(len(text))
        arguments = torch.cat(words), counts, texts[first][2]
        ring.add_texts.__wrapped__(rings[0], *arguments)  # type: ignore[attr-defined]
        triton_ring.add_texts(rings[1], *arguments)
        for added in rings:
            for name, expected, ours in zip(ring.Ring._fields, one_by_one, added, strict=True):
                if name == "newest":  # whose last column is scratch
                    expected, ours = expected[:, :-1], ours[:, :-1]
                assert torch.equal(expected, ours), name


def test_no_texts_change_no_ring() -> None:
    """As when the kernel is compiled before the first text ends."""
    filled = _empty_ring()
    ring.add_to_ring(filled, torch.arange(9, device=DEVICE), OWNERS[0].to(DEVICE), 0)
    before = [tensor.clone() for tensor in filled]
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    triton_ring.add_texts(filled, empty, [], ring.PAGE)
    assert all(map(torch.equal, filled, before))


@pytest.mark.parametrize("has_ring", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_look_up(seed: int, has_ring: bool) -> None:
    """In texts of their own, and in those of a ring, which are mostly of other owners."""
    texts, lens = _texts(seed)
    filled = _empty_ring()
    for text, owner, start in _ring_texts(seed):
        ring.add_to_ring(filled, text, owner, start)
    wanted = lookup.Lookup(16, 1 + seed % 3, 16, 8, 7, 1.0, 0.1)
    given = lookup.Earlier(filled, OWNERS[[0, 1, 2]].to(DEVICE)) if has_ring else None
    expected = lookup.look_up.__wrapped__(texts, lens, given, wanted)  # type: ignore[attr-defined]
    found = triton_lookup.look_up(texts, lens, given, wanted)
    torch.testing.assert_close(found.worth, expected.worth, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.match_lens, expected.match_lens)


def test_a_long_match_in_the_ring_votes_once() -> None:
    """Three matches of two tokens against one of four, which the index of two tokens has too."""
    filled, start, owner = _empty_ring(), 0, OWNERS[0].to(DEVICE)
    for tokens in ([9, 1, 2, 5, 6, 7, 8], [8, 1, 2, 5, 6, 7], [7, 1, 2, 5, 6], [3, 4, 1, 2, 0]):
        ring.add_to_ring(filled, torch.tensor(tokens, device=DEVICE), owner, start)
        start += ring.PAGE
    texts = torch.tensor([[11, 12, 3, 4, 1, 2]], dtype=torch.int32, device=DEVICE)
    given = texts, torch.tensor([6], device=DEVICE), lookup.Earlier(filled, owner[None])
    wanted = lookup.Lookup(16, 1, 16, 8, 4, 1.0, 0.1)
    expected = lookup.look_up.__wrapped__(*given, wanted)  # type: ignore[attr-defined]
    found = triton_lookup.look_up(*given, wanted)
    assert found.tokens.tolist() == expected.tokens.tolist() == [[5, 6, 7, -1]]
    torch.testing.assert_close(found.worth, expected.worth, atol=1e-5, rtol=1e-5)
