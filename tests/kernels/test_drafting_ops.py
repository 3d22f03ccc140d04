"""Drafting's bookkeeping: torch twins against plain Python loops, Triton's kernels against twins.

The kernels run on the GPU, or in Triton's interpreter where there is none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import full, spread
from tiny import tiny_model_dir
from tiny_heads import eagle1_dir, eagle3_dir, mtp_model_dir, p_eagle_dir, pard_dir
from torch import Tensor

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.metadata.attention import NULL_BLOCK, AttentionMetadata, KVGroup
from trtspec.metadata.missed import CAPACITY, MissedRows
from trtspec.metadata.sampling import SlotSampling
from trtspec.ops.launch import dispatch
from trtspec.ops.padded import torch as padded
from trtspec.ops.step import missed as step_missed
from trtspec.ops.step import rows as step_rows
from trtspec.ops.step.rows import BlockShape

pytest.importorskip("triton", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SEEDS = st.integers(0, 10**6)
# Triton's interpreter takes most of the time; on a GPU all examples are quick.
CASES = settings(max_examples=25 if DEVICE == "cuda" or full() else 12, deadline=None)


@contextmanager
def kernels() -> Iterator[None]:
    """Triton's kernels of these operations for CPU tensors too."""

    def chosen(module: str, x: Tensor) -> Any:
        return dispatch._module(module) if module.startswith(("step.", "padded.")) else None

    with patch.object(dispatch, "kernels", chosen):
        yield


@contextmanager
def no_kernels() -> Iterator[None]:
    """Torch's twins, on a GPU too."""
    with patch.object(dispatch, "kernels", lambda module, x: None):
        yield


def _move(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, (tuple, list)):
        moved = [_move(item) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, AttentionMetadata):
        given = {f.name: _move(getattr(value, f.name)) for f in fields(value) if f.init}
        return AttentionMetadata(**{**given, "derived": {}})
    return value


def _plain(value: Any) -> Any:
    """Tensors as (dtype, nested lists), so that results compare with ==."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, KVGroup):
        return value.page_size
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.compare}
    return value


def run(name: str, *args: Any, **options: Any) -> Any:
    """The twin's result; the kernel's is the same, dtypes included."""
    function = getattr(step_rows, name, None) or getattr(padded, name)
    with no_kernels():
        twin = function(*args, **options)
    with kernels():
        ours = function(*_move(list(args)), **{k: _move(v) for k, v in options.items()})
    assert _plain(ours) == _plain(twin)
    return twin


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _tables(rng: random.Random, num_seqs: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """1 to 3 KV groups: tables of their own width with holes, inside a wider buffer, and pages."""
    tables, pages = [], []
    for _ in range(rng.randint(1, 3)):
        width, start = rng.randint(1, 6), rng.randint(0, 2)
        rows = [[rng.choice([NULL_BLOCK, *range(2, 40)]) for _ in range(width + start)]
                for _ in range(num_seqs)]  # fmt: skip
        tables.append(ints(rows).view(num_seqs, width + start)[:, start:])
        pages.append(rng.choice([1, 4, 5, 16]))
    return tuple(tables), tuple(pages)


def _slot(table: Tensor, seq: int, position: int, page_size: int, max_seq_len: int) -> int:
    if position >= max_seq_len:
        return -1
    page = position // page_size
    block = int(table[seq, page]) if page < table.shape[1] else NULL_BLOCK
    return -1 if block == NULL_BLOCK else block * page_size + position % page_size


# -- vLLM's drafting kernels -------------------------------------------------------------------
@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_next_tokens_padded(seed: int, num_seqs: int, k: int) -> None:
    rng, vocab = random.Random(seed), 10
    rows = [[rng.choice([-1, -1, 0, 3, 9, 10, 11]) for _ in range(k + 1)] for _ in range(num_seqs)]
    backup = [rng.randrange(vocab) for _ in range(num_seqs)]
    discard = [rng.random() < 0.3 for _ in range(num_seqs)]
    counts, tokens = run(
        "next_tokens_padded", ints(rows).view(num_seqs, k + 1), ints(backup),
        ints(discard, torch.bool), vocab,
    )  # fmt: skip
    for b in range(num_seqs):
        valid = [t for t in rows[b] if t != -1 and t < vocab]
        valid = [] if discard[b] else valid
        assert counts[b] == len(valid)
        assert tokens[b] == (valid[-1] if valid else backup[b])


@CASES
@given(SEEDS, st.integers(0, 200))
def test_inputs_padded(seed: int, num_seqs: int) -> None:
    rng = random.Random(seed)
    drafts = [rng.randint(0, 8) for _ in range(num_seqs)]
    rows = [d + 1 if d else rng.randint(1, 9) for d in drafts]
    valid = [rng.randint(0, d + 1) for d in drafts]
    starts = [sum(rows[:b]) for b in range(num_seqs + 1)]
    places, rejected = run("inputs_padded", ints(starts), ints(drafts), ints(valid))
    for b in range(num_seqs):
        expected = drafts[b] + 1 - valid[b] if drafts[b] else 0
        assert rejected[b] == expected
        assert places[b] == starts[b] + rows[b] - 1 - expected


@pytest.mark.slow
@CASES
@given(SEEDS, st.integers(0, 200), st.integers(0, 3))
def test_compact_rejected(seed: int, num_seqs: int, surplus: int) -> None:
    rng = random.Random(seed)
    rows = [rng.choice([0, 1, 1, 5, 9]) for _ in range(num_seqs)]
    rejected = [rng.randint(0, n) for n in rows]
    starts = [sum(rows[:b]) for b in range(num_seqs + 1)]
    new_starts, left = run(
        "compact_rejected", ints(starts), ints(rejected), starts[-1] + surplus
    )  # fmt: skip
    kept = [r for b, n in enumerate(rows) for r in range(starts[b], starts[b] + n - rejected[b])]
    assert left.tolist() == kept + [-1] * (starts[-1] + surplus - len(kept))
    left_of = [n - r for n, r in zip(rows, rejected, strict=True)]
    assert new_starts.tolist() == [sum(left_of[:b]) for b in range(num_seqs + 1)]


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 3))
def test_step_slots_and_lens(seed: int, num_seqs: int, padding: int) -> None:
    rng = random.Random(seed)
    max_seq_len = rng.randint(1, 24)
    tables, pages = _tables(rng, num_seqs)
    positions = [rng.randint(0, max_seq_len + 2) for _ in range(num_seqs)]
    lens = [p + 1 + rng.choice([0, 0, 3]) for p in positions]
    guarded, slots, new_lens = run(
        "step_slots_and_lens", ints(positions, torch.int64), ints(lens), tables, pages,
        max_seq_len, num_rows=num_seqs + padding if padding else None,
    )  # fmt: skip
    for b, position in enumerate(positions):
        over = position + 1 >= max_seq_len
        assert guarded[b] == (0 if over else position + 1)
        assert new_lens[b] == (1 if over else min(lens[b] + 1, max_seq_len))
        for table, page, own in zip(tables, pages, slots, strict=True):
            assert own[b] == _slot(table, b, position + 1, page, max_seq_len)
    assert guarded.shape[0] == num_seqs + padding
    assert guarded[num_seqs:].tolist() == [0] * padding
    assert new_lens[num_seqs:].tolist() == [1] * padding
    assert all(own[num_seqs:].tolist() == [-1] * padding for own in slots)


@CASES
@given(SEEDS, st.integers(1, 5), st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_expand_for_parallel_drafting(
    seed: int, num_seqs: int, proposals: int, shift: bool, surplus: int
) -> None:
    rng, mask = random.Random(seed), 77
    longest = rng.choice([6, 6, 6, 150])  # more rows than a program takes in one turn
    rows = [rng.randint(rng.choice([0, 1, 1]), longest) for _ in range(num_seqs)]
    starts = [sum(rows[:b]) for b in range(num_seqs + 1)]
    rejected = [rng.randint(0, min(n, 8)) for n in rows]  # all of a discarded request's
    firsts = [rng.randint(0, 50) for _ in range(num_seqs)]
    ids = [rng.randint(-1, 70) for _ in range(starts[-1] + surplus)]
    positions = [firsts[b] + j for b in range(num_seqs) for j in range(rows[b])] + [0] * surplus
    bonus = [rng.randrange(70) for _ in range(num_seqs)]
    out = run(
        "expand_for_parallel_drafting", ints(ids, torch.int64), ints(positions, torch.int64),
        ints(bonus), ints(rejected), ints(starts), proposals, mask, shift=shift,
    )  # fmt: skip

    expected: list[tuple[int, int, bool, bool, int]] = []
    samples: list[list[int] | None] = []
    for b in range(num_seqs):
        extra = proposals - 1 if shift else proposals
        if not rows[b]:
            expected += [(padded.PADDING_TOKEN, 0, True, False, -1)] * extra
            samples.append(None)
            continue
        valid, begin = max(rows[b] - rejected[b], 1), len(expected)
        text = ids[starts[b] : starts[b] + valid]
        tokens = (text[1:] if shift else text) + [bonus[b]] + [mask] * (proposals - 1)
        for j, token in enumerate(tokens):
            is_masked = j > len(tokens) - proposals
            state = starts[b] + j if j < valid else -1
            expected.append((token, firsts[b] + j, False, is_masked, state))
        samples.append(list(range(len(expected) - proposals, len(expected))))
        expected += [(padded.PADDING_TOKEN, 0, True, False, -1)] * (rows[b] - valid)
        assert len(expected) - begin == rows[b] + extra
    expected += [(padded.PADDING_TOKEN, 0, True, False, -1)] * surplus
    columns = [out.input_ids, out.position_ids, out.is_rejected, out.is_masked, out.hidden_rows]
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    for own, wanted in zip(out.rows_to_sample.tolist(), samples, strict=True):
        assert own == wanted or wanted is None
        assert all(0 <= row < max(len(expected), 1) for row in own)


def test_expanding_an_empty_batch() -> None:
    none = ints([], torch.int64)
    for shift in (True, False):
        out = run(
            "expand_for_parallel_drafting", none, none, ints([]), ints([]), ints([0]), 3, 7,
            shift=shift,
        )  # fmt: skip
        assert out.input_ids.shape == (0,) and out.rows_to_sample.shape == (0, 3)
        surplus = ints([5, 6], torch.int64)
        out = run(
            "expand_for_parallel_drafting", surplus, surplus, ints([]), ints([]), ints([0]), 3, 7,
            shift=shift,
        )  # fmt: skip
        assert out.input_ids.tolist() == [padded.PADDING_TOKEN] * 2
        assert out.position_ids.tolist() == [0, 0] and out.hidden_rows.tolist() == [-1, -1]
        assert out.is_rejected.all() and not out.is_masked.any()


@CASES
@given(SEEDS, st.integers(0, 200), st.integers(0, 8))
def test_extend_queries(seed: int, num_seqs: int, num_rows: int) -> None:
    rng = random.Random(seed)
    rows = [rng.randint(1, 5) for _ in range(num_seqs)]
    lens = [n + rng.randint(0, 9) for n in rows]
    starts = [sum(rows[:b]) for b in range(num_seqs + 1)]
    queries = padded.Queries(
        ints(starts), ints(lens), starts[-1], max(rows, default=0), max(lens, default=0)
    )
    with no_kernels():
        out = padded.extend_queries(queries, num_rows)
    with kernels():
        moved = replace(queries, query_starts=_move(ints(starts)), seq_lens=_move(ints(lens)))
        assert _plain(padded.extend_queries(moved, num_rows)) == _plain(out)
    longer = [n + num_rows for n in rows]
    assert out.query_starts.tolist() == [sum(longer[:b]) for b in range(num_seqs + 1)]
    assert out.seq_lens.tolist() == [n + num_rows for n in lens]
    assert out.num_tokens == sum(longer)
    if num_seqs:
        assert out.max_query_len == max(longer) and out.max_seq_len == max(lens) + num_rows


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_a_discard_mask_may_be_of_ints(dtype: torch.dtype) -> None:
    sampled = ints([[4, 5, -1], [6, -1, -1], [7, 8, 9]])
    discard = torch.tensor([0, 2, 1]).to(dtype)
    counts, tokens = run("next_tokens_padded", sampled, ints([1, 2, 3]), discard, 10)
    assert counts.tolist() == [2, 0, 0] and tokens.tolist() == [5, 2, 3]


INT_ARGUMENTS: dict[str, tuple[Any, ...]] = {  # tensors as lists; 2 requests of 3 and 2 rows
    "next_tokens_padded": ([[4, 5, -1], [6, -1, -1]], [1, 2], [0, 1], 10),
    "inputs_padded": ([0, 3, 5], [2, 1], [1, 2]),
    "compact_rejected": ([0, 3, 5], [2, 0], 6),
    "step_slots_and_lens": ([4, 7], [5, 8], ([[2, 3], [4, 5]],), (4,), 8, 3),
    "expand_for_parallel_drafting": (
        [4, 5, 6, 7, 8], [0, 1, 2, 9, 10], [11, 12], [1, 0], [0, 3, 5], 3, 77,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", INT_ARGUMENTS)
def test_ints_of_either_width_give_the_dtypes_promised(name: str, dtype: torch.dtype) -> None:
    def tensors(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensors, value))
        return ints(value, dtype) if isinstance(value, list) else value

    arguments = tensors(INT_ARGUMENTS[name])
    options = {"shift": True} if name == "expand_for_parallel_drafting" else {}
    out = run(name, *arguments, **options)  # the kernel's dtypes are the twin's
    int32, int64 = torch.int32, torch.int64
    if name == "step_slots_and_lens":
        positions, (slots,), lens = out
        assert (positions.dtype, slots.dtype, lens.dtype) == (int64, int64, int32)
        assert positions.tolist() == [5, 0, 0] and slots.tolist() == [13, -1, -1]
    elif name == "expand_for_parallel_drafting":
        rows = out.input_ids, out.position_ids, out.rows_to_sample, out.hidden_rows
        assert {row.dtype for row in rows} == {int64}
    else:
        promised = {
            "next_tokens_padded": (int32, int32),
            "inputs_padded": (int64, int32),
            "compact_rejected": (int32, int64),
        }
        assert tuple(tensor.dtype for tensor in out) == promised[name]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_extended_queries_keep_their_dtype(dtype: torch.dtype) -> None:
    queries = padded.Queries(ints([0, 3, 5], dtype), ints([4, 9], dtype), 5, 3, 9)
    with no_kernels():
        twin = padded.extend_queries(queries, 2)
    with kernels():
        moved = replace(
            queries, query_starts=_move(queries.query_starts), seq_lens=_move(queries.seq_lens)
        )
        assert _plain(padded.extend_queries(moved, 2)) == _plain(twin)
    assert twin.query_starts.dtype == twin.seq_lens.dtype == dtype


def test_what_padding_rows_read_can_be_chosen() -> None:
    arguments = [ints(v, torch.int64) for v in ([4, 5, 6], [0, 1, 2], [9], [1], [0, 3])]
    for shift in (True, False):
        out = run("expand_for_parallel_drafting", *arguments, 2, 77, shift=shift, padding_token=3)
        assert set(out.input_ids[out.is_rejected].tolist()) == {3}
        none = ints([], torch.int64)
        out = run(
            "expand_for_parallel_drafting", arguments[0], arguments[1], none, none, ints([0]), 2,
            77, shift=shift, padding_token=3,
        )  # fmt: skip
        assert out.input_ids.tolist() == [3, 3, 3]


# -- our generation step -----------------------------------------------------------------------
@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_gather_step_inputs(seed: int, num_seqs: int, k: int) -> None:
    rng = random.Random(seed)
    num_slots, rows, first_row = num_seqs + 3, rng.randint(1, k + 1), rng.choice([0, 1, 7])
    max_seq_len, page = rng.randint(1, 24), rng.choice([1, 4, 16])
    tables, _ = _tables(rng, num_seqs)
    slots = rng.sample(range(num_slots), num_seqs)
    tokens = [[rng.randint(-1, 50) for _ in range(k + 1)] for _ in range(num_slots)]
    past = [rng.randint(0, max_seq_len + 2) for _ in range(num_slots)]
    sampling = SlotSampling(
        temperatures=torch.tensor([rng.random() for _ in range(num_slots)]),
        top_ks=ints(range(num_slots)),
        top_ps=torch.tensor([rng.random() for _ in range(num_slots)]),
        seeds=ints([2**40 + i for i in range(num_slots)], torch.int64),
    )
    step, drafts = run(
        "gather_step_inputs", ints(slots, torch.int64), ints(tokens), ints(past, torch.int64),
        sampling, tables, page, rows, max_seq_len, first_row,
    )  # fmt: skip
    assert drafts.tolist() == [tokens[s][1:rows] for s in slots]
    assert step.gather_ids.tolist() == list(range(first_row, first_row + num_seqs * rows))
    for g, slot in enumerate(slots):
        assert step.kv_lens[g] == min(past[slot] + rows, max_seq_len)
        for r in range(rows):
            row, position = g * rows + r, past[slot] + r
            inside = position < max_seq_len
            assert step.input_ids[row] == tokens[slot][r]
            assert step.position_ids[row] == (position if inside else 0)
            assert step.next_positions[row] == step.position_ids[row] + 1
            for given_values, own in zip(sampling, step.sampling, strict=True):
                assert own[row] == given_values[slot]
            for table, own in zip(tables, step.slot_mappings, strict=True):
                assert own[row] == _slot(table, g, position, page, max_seq_len)


def _accepted(rng: random.Random, num_seqs: int, k: int, most: int) -> tuple[list, list[int]]:
    lens = [rng.randint(1, most) for _ in range(num_seqs)]
    return [[rng.randrange(50) if i < n else -1 for i in range(k + 1)] for n in lens], lens


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_shift_for_drafting(seed: int, num_seqs: int, k: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(1, k + 1)
    accepted, lens = _accepted(rng, num_seqs, k, rows)
    starts = [rng.randrange(100) for _ in range(num_seqs)]
    positions = [p + r for p in starts for r in range(rows)]
    ids, last, last_positions = run(
        "shift_for_drafting", ints(accepted).view(num_seqs, k + 1), ints(lens),
        ints(positions, torch.int64), rows,
    )  # fmt: skip
    assert ids.tolist() == [t for row in accepted for t in row[:rows]]
    assert last.tolist() == [g * rows + n - 1 for g, n in enumerate(lens)]
    assert last_positions.tolist() == [p + n for p, n in zip(starts, lens, strict=True)]


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_last_two_tokens(seed: int, num_seqs: int, k: int) -> None:
    rng = random.Random(seed)
    accepted, lens = _accepted(rng, num_seqs, k, k + 1)
    ids = [rng.randrange(50) for _ in range(30)]
    positions = [rng.randrange(90) for _ in range(30)]
    certain = [rng.randrange(30) for _ in range(num_seqs)]
    tokens, where = run(
        "last_two_tokens", ints(ids, torch.int64), ints(positions, torch.int64),
        ints(accepted).view(num_seqs, k + 1), ints(lens), ints(certain, torch.int64),
    )  # fmt: skip
    for b, (row, n) in enumerate(zip(accepted, lens, strict=True)):
        read = [ids[certain[b]], *row[:n]]
        last = positions[certain[b]] + n
        assert tokens[b].tolist() == read[-2:] and where[b].tolist() == [last - 1, last]


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8), st.integers(1, 8), st.integers(0, 1))
def test_masked_rows(seed: int, num_seqs: int, k: int, proposals: int, offset: int) -> None:
    rng, mask = random.Random(seed), 77
    longest = rng.randint(1, k + 1)
    rows = longest + proposals - 1
    accepted, lens = _accepted(rng, num_seqs, k, longest)
    positions = [rng.randrange(100) for _ in range(40)]
    certain = [rng.randrange(30) for _ in range(num_seqs)]
    out = run(
        "masked_rows", ints(accepted).view(num_seqs, k + 1), ints(lens),
        ints(positions, torch.int64), ints(certain, torch.int64), rows, proposals, mask, offset,
    )  # fmt: skip
    for b, (row, n) in enumerate(zip(accepted, lens, strict=True)):
        assert out.tokens[b].tolist() == row[:n] + [mask] * (rows - n)
        first = positions[certain[b]] + offset
        assert out.positions[b].tolist() == list(range(first, first + rows))
        sources = [certain[b] + j if j < n else len(positions) for j in range(rows)]
        assert out.sources[b * rows : (b + 1) * rows].tolist() == sources
        expected = [b * rows + n - 1 + i for i in range(proposals)]
        assert out.proposing[b::num_seqs].tolist() == expected
        assert out.last_positions[b] == positions[certain[b]] + n


def _meta_before(
    num_seqs: int, tables: tuple[Tensor, ...], pages: tuple[int, ...], max_seq_len: int
) -> AttentionMetadata:
    """Returns metadata of the target's pass, with a prompt in it, that draft passes follow."""
    groups = tuple(KVGroup(*(torch.zeros(1, 2, page, 1, 1) for _ in "kv")) for page in pages)
    return AttentionMetadata(
        context_lens=(3,), context_starts=(2,), num_generations=num_seqs, rows_per_generation=4,
        position_ids=ints([], torch.int64), kv_lens=ints([]), max_kv_len=7, kv_groups=groups,
        block_tables=tables, slot_mappings=(), max_seq_len=max_seq_len, derived={"old": 1},
    )  # fmt: skip


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8), st.integers(1, 8), st.integers(0, 1))
def test_start_block(seed: int, num_seqs: int, k: int, proposals: int, more: int) -> None:
    rng, mask, rows = random.Random(seed), 77, proposals + more
    max_seq_len, generation_rows = rng.randint(1, 30), rng.randint(1, k + 1)
    tables, pages = _tables(rng, num_seqs)
    contexts = rng.randint(0, num_seqs)
    lengths = tuple(rng.randint(1, 4) for _ in range(contexts))
    firsts = [sum(lengths) + generation_rows * i for i in range(num_seqs - contexts)]
    certain = [sum(lengths[: i + 1]) - 1 for i in range(contexts)] + firsts
    positions = [rng.randrange(20) for _ in range(sum(lengths) + generation_rows * len(firsts))]
    meta = replace(
        _meta_before(num_seqs, tables, pages, max_seq_len),
        context_lens=lengths, context_starts=(0,) * contexts, num_generations=len(firsts),
        rows_per_generation=generation_rows, position_ids=ints(positions, torch.int64),
    )  # fmt: skip
    accepted, lens = _accepted(rng, num_seqs, k, generation_rows)
    block = BlockShape(rows, proposals, mask)
    args = [meta, ints(accepted).view(num_seqs, k + 1), ints(lens), block, 5]
    start = run("start_block", *args)
    step = start.meta
    with kernels():
        ours = step_rows.start_block(*_move(args)).meta
    assert ours.largest_positions().tolist() == step.largest_positions().tolist()
    assert (step.num_contexts, step.num_generations) == (0, num_seqs)
    assert step.rows_per_generation == rows and step.max_kv_len == min(12, max_seq_len)
    for b, (row, n) in enumerate(zip(accepted, lens, strict=True)):
        assert start.tokens[b].tolist() == [row[n - 1]] + [mask] * (rows - 1)
        last = positions[certain[b]] + n
        assert start.last_positions[b] == last
        expected = [b * rows + more + i for i in range(proposals)]
        assert start.proposing[b::num_seqs].tolist() == expected
        own = slice(b * rows, (b + 1) * rows)
        guarded = [p if p < max_seq_len else 0 for p in range(last, last + rows)]
        assert step.position_ids[own].tolist() == guarded
        assert step.kv_lens[b] == guarded[-1] + 1
        assert step.largest_positions()[own].tolist() == [max(guarded)] * rows
        for table, page, slots in zip(tables, pages, step.slot_mappings, strict=True):
            wanted = [_slot(table, b, p, page, max_seq_len) for p in range(last, last + rows)]
            assert slots[own].tolist() == wanted


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(1, 3))
def test_draft_step(seed: int, num_seqs: int, rows: int) -> None:
    rng = random.Random(seed)
    max_seq_len, advance = rng.randint(1, 24), rng.randint(0, 5)
    tables, pages = _tables(rng, num_seqs)
    meta = _meta_before(num_seqs, tables, pages, max_seq_len)
    starts = [rng.randint(0, max_seq_len + 2) for _ in range(num_seqs)]
    tokens = [[rng.randrange(50) for _ in range(rows)] for _ in range(num_seqs)]
    wider = ints([[p + r for r in range(-1, rows)] for p in starts], torch.int64)
    positions = wider.view(num_seqs, rows + 1)[:, 1:]
    ids, step = run(
        "draft_step", meta, ints(tokens).view(num_seqs, rows), positions, 5, advance=advance
    )
    assert ids.tolist() == [t for row in tokens for t in row]
    assert step.num_contexts == 0 and step.context_starts == () and step.derived == {}
    assert (step.num_generations, step.rows_per_generation) == (num_seqs, rows)
    assert step.max_kv_len == min(12, max_seq_len)
    for b, start in enumerate(starts):
        for r in range(rows):
            row, position = b * rows + r, start + advance + r
            assert step.position_ids[row] == (position if position < max_seq_len else 0)
            for table, page, own in zip(tables, pages, step.slot_mappings, strict=True):
                assert own[row] == _slot(table, b, position, page, max_seq_len)
        assert step.kv_lens[b] == step.position_ids[b * rows + rows - 1] + 1


@CASES
@given(SEEDS, st.integers(1, 5), st.integers(1, 4))
def test_draft_steps(seed: int, num_seqs: int, count: int) -> None:
    rng = random.Random(seed)
    max_seq_len = rng.randint(1, 24)
    tables, pages = _tables(rng, num_seqs)
    meta = _meta_before(num_seqs, tables, pages, max_seq_len)
    starts = [rng.randint(0, max_seq_len + 2) for _ in range(num_seqs)]
    apart = ints([[start, -1] for start in starts], torch.int64).view(num_seqs, 2)[:, 0]
    steps = run("draft_steps", meta, apart, 5, count)
    assert len(steps) == count
    for i, step in enumerate(steps):
        assert step.num_contexts == 0 and step.context_starts == () and step.derived == {}
        assert (step.num_generations, step.rows_per_generation) == (num_seqs, 1)
        assert step.max_kv_len == min(12, max_seq_len)
        for b, start in enumerate(starts):
            position = start + i if start + i < max_seq_len else 0
            assert step.position_ids[b] == position and step.kv_lens[b] == position + 1
            for table, page, own in zip(tables, pages, step.slot_mappings, strict=True):
                assert own[b] == _slot(table, b, start + i, page, max_seq_len)


@CASES
@given(SEEDS, st.integers(1, 5), st.integers(0, 8), st.integers(1, 4))
def test_start_chain(seed: int, num_seqs: int, k: int, count: int) -> None:
    rng = random.Random(seed)
    max_seq_len, rows = rng.randint(1, 24), rng.randint(1, k + 1)
    accepted, lens = _accepted(rng, num_seqs, k, rows)
    tables, pages = _tables(rng, num_seqs)
    starts = [rng.randrange(max_seq_len) for _ in range(num_seqs)]
    guarded = [p + r if p + r < max_seq_len else 0 for p in starts for r in range(rows)]
    meta = replace(
        _meta_before(num_seqs, tables, pages, max_seq_len),
        context_lens=(),
        context_starts=(),
        num_generations=num_seqs,
        rows_per_generation=rows,
        position_ids=ints(guarded, torch.int64),
    )
    chain = run("start_chain", meta, ints(accepted).view(num_seqs, k + 1), ints(lens), 5, count)
    assert chain.ids.tolist() == [t for row in accepted for t in row[:rows]]
    assert chain.proposing.tolist() == [g * rows + n - 1 for g, n in enumerate(lens)]
    assert chain.positions.tolist() == [p + n for p, n in zip(starts, lens, strict=True)]
    assert len(chain.passes) == count
    for i, step in enumerate(chain.passes):
        assert step.num_contexts == 0 and step.derived == {}
        assert (step.num_generations, step.rows_per_generation) == (num_seqs, 1)
        assert step.max_kv_len == min(12, max_seq_len)
        for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
            place = start + length - 1 + i  # from the row that proposes on
            position = place if place < max_seq_len else 0
            assert step.position_ids[b] == position and step.kv_lens[b] == position + 1
            for table, page, own in zip(tables, pages, step.slot_mappings, strict=True):
                assert own[b] == _slot(table, b, place, page, max_seq_len)


@CASES
@given(SEEDS, st.integers(1, 4), st.integers(0, 3))
def test_gather_context_inputs(seed: int, num_contexts: int, num_unused: int) -> None:
    """Contexts of random lengths, rows and contexts behind them that are none."""
    rng = random.Random(seed)
    count, max_seq_len = num_contexts + num_unused, rng.randint(4, 24)
    tables, pages = _tables(rng, count)
    page, widest = pages[0], min(table.shape[1] for table in tables)
    owners: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    last_rows: list[int] = []
    for context in range(num_contexts):
        length = rng.randint(1, max(1, min(5, widest * page)))
        start = rng.randint(0, max(0, widest * page - length))
        owners += [context] * length
        positions += range(start, start + length)
        ends.append(start + length)
        last_rows.append(len(owners) - 1)
    padding = rng.randint(num_unused > 0, 3)
    owners, positions = owners + [-1] * padding, positions + [0] * padding
    ends, last_rows = ends + [1] * num_unused, last_rows + [len(owners) - 1] * num_unused
    slots, longs = [rng.randrange(6) for _ in range(count)], torch.int64
    sampling = SlotSampling(
        torch.rand(6), torch.randint(9, (6,), dtype=torch.int32), torch.rand(6),
        torch.randint(2**40, (6,)),
    )  # fmt: skip
    layout = step_rows.ContextLayout(
        ints(positions, longs), ints(owners, longs), ints(ends, longs), ints(last_rows, longs)
    )
    got = run(
        "gather_context_inputs", ints(slots, longs), layout, sampling, tables, page, max_seq_len
    )
    for table, own in zip(tables, got.slot_mappings, strict=True):
        for row, (owner, position) in enumerate(zip(owners, positions, strict=True)):
            block = NULL_BLOCK if owner < 0 else int(table[owner, position // page])
            assert own[row] == (-1 if block == NULL_BLOCK else block * page + position % page)
    assert got.kv_lens.tolist() == [min(end, max_seq_len) for end in ends]
    assert got.next_positions.tolist() == [positions[row] + 1 for row in last_rows]
    for column, of_slots in zip(got.sampling, sampling, strict=True):
        assert column.tolist() == of_slots[slots].tolist()


@CASES
@given(SEEDS, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 3))
def test_shift_contexts(seed: int, lens: list[int], num_unused: int) -> None:
    rng = random.Random(seed)
    padding = rng.randint(0, 2)
    ids = [rng.randrange(100) for _ in range(sum(lens) + padding)]
    ends, expected = [], []
    accepted = [[rng.randrange(100, 200), -1] for _ in range(len(lens) + num_unused)]
    known = [rng.choice([-1, rng.randrange(200, 300)]) for _ in accepted]
    for i, length in enumerate(lens):
        begin = len(expected)
        expected += ids[begin + 1 : begin + length]
        expected.append(accepted[i][0] if known[i] < 0 else known[i])
        ends.append(len(expected) - 1)
    # Those that are unused end at the first row of padding, or where the last context does.
    ends += [min(len(expected), len(ids) - 1)] * num_unused
    given = ints(ids, torch.int64), ints(accepted)[:, 0]
    shifted = run("shift_contexts", *given, ints(known), ints(ends, torch.int64))
    assert shifted[: len(expected)].tolist() == expected
    sampled = run("shift_contexts", *given, None, ints(ends, torch.int64))
    assert [int(sampled[row]) for row in ends[: len(lens)]] == [a for a, _ in accepted][: len(lens)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_rows(dtype: torch.dtype) -> None:
    states = [torch.randn(9, 3000)[:, :size].to(dtype) for size in (48, 2500)]
    for count in (0, 4):
        rows = torch.randint(9, (count,))
        for chosen in (states[:1], states, states[:1] * 2):
            outs = run("gather_rows", rows, *chosen)
            assert all(
                torch.equal(out[i], state[row])
                for out, state in zip(outs, chosen, strict=True)
                for i, row in enumerate(rows)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 2500])
def test_keep_missed(dtype: torch.dtype, width: int) -> None:
    slots, positions = torch.tensor([4, 0, 3]), torch.tensor([37, 0, 15])
    kv_slots = torch.tensor([9, 4, -1])
    states, tokens = torch.randn(3, 3000).to(dtype)[:, :width], torch.randint(90, (3, 4)).int()
    rows = MissedRows.allocate(6, width, dtype, states.device)
    filled = MissedRows(*(torch.full_like(tensor, -7) for tensor in rows))

    both = []
    for device in ("cpu", DEVICE):
        missed = MissedRows(*(tensor.clone().to(device) for tensor in filled))
        args = [tensor.to(device) for tensor in (slots, positions, kv_slots, states, tokens)]
        with kernels() if both else no_kernels():  # the twin first
            step_missed.keep_missed(*args[:4], args[4][:, 0], missed)
        both.append(missed)
    assert _plain(both[0]) == _plain(both[1])
    missed = both[0]
    for row, (slot, place) in enumerate([(4, 5), (0, 0), (3, 15)]):
        assert torch.equal(missed.hidden[slot, place], states[row])
        assert missed.tokens[slot, place] == tokens[row, 0]
        missed.hidden[slot, place] = missed.tokens[slot, place] = -7
    assert missed.positions[4, 5] == 37 and missed.positions[0, 0] == 0
    assert missed.positions[3, 15] == -1, "it has no place in the cache"
    assert (missed.hidden == -7).all() and (missed.tokens == -7).all()
    assert (missed.positions == -7).sum() == 6 * CAPACITY - 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 2500])
@pytest.mark.parametrize("has_deltas", [False, True])
def test_take_missed(dtype: torch.dtype, width: int, has_deltas: bool) -> None:
    page_size, slots = 4, torch.tensor([4, 0, 3])
    kept = MissedRows.allocate(6, width, dtype, slots.device)
    kept.hidden.normal_()
    kept.tokens.random_(90)
    # Of slot 4 seven rows, of slot 0 none, of slot 3 the first two positions; another's stay.
    for slot, positions in {4: range(37, 44), 3: range(2), 5: range(9)}.items():
        for position in positions:
            kept.positions[slot, position % CAPACITY] = position
    # A group with all blocks, and one where 37 … 39 have none.
    tables = torch.arange(1, 37).view(3, 12).int(), torch.arange(101, 137).view(3, 12).int()
    tables[1][0, :10] = NULL_BLOCK
    deltas = torch.tensor([0, 0, 0, 5, -40, 0]) if has_deltas else None

    both = []
    for device in ("cpu", DEVICE):
        missed = MissedRows(*(tensor.clone().to(device) for tensor in kept))
        moved = None if deltas is None else deltas.to(device)
        with kernels() if both else no_kernels():  # the twin first
            taken = step_missed.take_missed(
                slots.to(device), missed, moved, tuple(t.to(device) for t in tables), page_size
            )
        assert (missed.positions.cpu()[[4, 0, 3]] == -1).all() and torch.equal(
            missed.positions[5].cpu(), kept.positions[5]
        )
        both.append(taken)
    assert _plain(both[0]) == _plain(both[1])
    taken = both[0]
    assert taken.is_row.sum() == 9 and taken.is_row.shape == (3 * CAPACITY,)
    for request, slot in enumerate(slots.tolist()):
        for place in range(CAPACITY):
            at, position = request * CAPACITY + place, int(kept.positions[slot, place])
            if position < 0:
                assert not taken.is_row[at] and not taken.positions[at]
                assert all(of_group[at] == -1 for of_group in taken.slot_mappings)
                continue
            assert torch.equal(taken.hidden[at], kept.hidden[slot, place])
            assert taken.tokens[at] == kept.tokens[slot, place]
            assert taken.positions[at] == position and taken.kv_lens[at] == position + 1
            delta = 0 if deltas is None else int(deltas[slot])
            assert taken.rotary[at] == max(0, position + delta)
            for table, of_group in zip(tables, taken.slot_mappings, strict=True):
                block = int(table[request, position // page_size])
                there = block * page_size + position % page_size
                assert of_group[at] == (-1 if block == NULL_BLOCK else there)
    alone = taken.rows_alone()
    assert alone.positions.tolist() == [*range(37, 44), 0, 1]
    assert alone.hidden.shape == (9, width) and len(alone.slot_mappings[1]) == 9


@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_to_target_ids(count: int) -> None:
    d2t, tokens = torch.randint(100, (40,)), torch.randint(40, (count,), dtype=torch.int32)
    out = run("to_target_ids", tokens, d2t)
    assert out.tolist() == [t + int(d2t[t]) for t in tokens.tolist()]


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_finish_drafts(seed: int, num_seqs: int, k: int) -> None:
    rng = random.Random(seed)
    max_seq_len, passes = rng.randint(1, 20), rng.randint(0, k)
    positions = [rng.randint(0, max_seq_len + 1) for _ in range(num_seqs)]
    proposals = [[rng.randrange(50) for _ in range(num_seqs)] for _ in range(passes)]
    every_other = ints([x for p in positions for x in (p, 0)], torch.int64)[::2]
    out = run("finish_drafts", [ints(p) for p in proposals], every_other, max_seq_len, k)
    assert out.shape == (num_seqs, k)
    for b, position in enumerate(positions):
        for i in range(k):
            fits = i < passes and position + 1 + i < max_seq_len
            assert out[b, i] == (proposals[i][b] if fits else -1)
    if passes:
        accepted, lens = _accepted(rng, num_seqs, k, rng.randint(1, k + 1))
        path = ints(accepted).view(num_seqs, k + 1), ints(lens)
        proposed = tuple(ints(p) for p in proposals)
        whole = run("limit_and_lead", *path, proposed, every_other, max_seq_len, k)
        assert torch.equal(whole[:, 1:], out)
        assert whole[:, 0].tolist() == [r[n - 1] for r, n in zip(accepted, lens, strict=True)]


@CASES
@given(SEEDS, st.integers(0, 5), st.integers(0, 8))
def test_next_new_tokens_and_saving_them(seed: int, num_seqs: int, k: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(1, k + 1)
    accepted, lens = _accepted(rng, num_seqs, k, rows)
    drafts = ints([[rng.randint(-1, 50) for _ in range(k + 1)] for _ in range(num_seqs)])
    proposed = rng.randint(0, k)
    drafts = drafts.view(num_seqs, k + 1)[:, 1 : 1 + proposed]
    tokens = run("next_new_tokens", ints(accepted).view(num_seqs, k + 1), ints(lens), drafts, k)
    expected = [
        [row[n - 1], *d, *[-1] * (k - proposed)]
        for row, n, d in zip(accepted, lens, drafts.tolist(), strict=True)
    ]
    assert tokens.tolist() == expected and tokens.dtype == torch.int32

    slots = rng.sample(range(num_seqs + 2), num_seqs)
    positions = [rng.randrange(100) for _ in range(num_seqs * rows)]
    left = []
    for device in ("cpu", DEVICE):
        past = torch.full((num_seqs + 2,), 7, device=device)
        kept = torch.full((num_seqs + 2, k + 1), 8, dtype=torch.int32, device=device)
        args = [ints(slots, torch.int64), ints(positions, torch.int64), ints(lens), tokens]
        with kernels() if left else no_kernels():  # the twin first
            step_rows.save_step(*(arg.to(device) for arg in args), past, kept)
        left.append((past.tolist(), kept.tolist()))
    assert left[0] == left[1]
    for g, slot in enumerate(slots):
        is_scratch = slot == num_seqs + 1
        assert left[0][0][slot] == (0 if is_scratch else positions[g * rows] + lens[g])
        assert left[0][1][slot] == expected[g]
    for slot in set(range(num_seqs + 2)) - set(slots):
        assert left[0][0][slot] == 7 and left[0][1][slot] == [8] * (k + 1)


# -- the whole step ----------------------------------------------------------------------------
def _config(name: str, tmp_path: Path) -> tuple[Path, Any]:
    if name.startswith("mtp"):
        vanilla = name == "mtp_vanilla"
        target = mtp_model_dir(tmp_path, num_mtp_layers=3 if vanilla else 1)
        return target, MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=vanilla)
    target = tiny_model_dir(tmp_path, num_hidden_layers=8)
    if name in ("draft_target", "pard"):
        make = tiny_model_dir if name == "draft_target" else pard_dir
        draft = make(tmp_path, num_hidden_layers=1)
        return target, DraftTargetDecodingConfig(max_draft_len=3, speculative_model=draft)
    heads = {"eagle1": eagle1_dir, "p_eagle": p_eagle_dir}
    head = heads.get(name, eagle3_dir)(tmp_path)
    one_model = name != "eagle3_two_engine"
    return target, EagleDecodingConfig(
        max_draft_len=3, speculative_model=head, eagle3_one_model=one_model
    )


WHOLE_STEPS = [
    "eagle3", "eagle3_two_engine", "eagle1", "mtp_eagle", "mtp_vanilla", "draft_target", "p_eagle",
    "pard", "plain",
]  # fmt: skip


@pytest.mark.slow
@spread(name=WHOLE_STEPS, temperature=[0.0, 1.0])
def test_a_run_with_kernels_is_the_same(tmp_path: Path, name: str, temperature: float) -> None:
    """Texts, and what every step leaves in the slots, up to the maximum length."""
    target, config = (
        _config(name, tmp_path) if name != "plain" else (tiny_model_dir(tmp_path), None)
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=5)

    def play() -> list[Any]:
        llm = LLM(
            target, config, device=DEVICE, dtype="float32", max_batch_size=3, max_seq_len=16,
            kv_cache_config=KvCacheConfig(max_tokens=120, tokens_per_block=4),
        )  # fmt: skip
        executor, seen = llm.executor, []
        requests = [executor.enqueue(list(range(5, 5 + n)), params) for n in (2, 5, 9)]
        while executor.has_work:
            executor.step()
            state = executor.state
            seen.append((state.past_lens[:3].tolist(), state.next_tokens[:3].tolist()))
        return [*seen, [request.token_ids for request in requests]]

    with no_kernels():
        expected = play()
    with kernels():
        assert play() == expected
    assert max(len(ids) for ids in expected[-1]) == 16
