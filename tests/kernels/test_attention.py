"""The torch attention backend against a softmax written row by row in float64."""

from __future__ import annotations

import random

import pytest
import torch
from paged_pass import write_and_attend
from torch import Tensor

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import NULL_BLOCK, AttentionMetadata, KVGroup
from trtspec.ops.step.slots import guard_positions, slot_mapping
from trtspec.state.kv_cache import KVGroupSpec


def _naive(
    q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None, sinks: Tensor | None
) -> Tensor:
    """q [Hq, D] at `position`; k, v [S, Hkv, D] -> [Hq, D] float64."""
    low = 0 if window is None else max(0, position - window + 1)
    k, v = k[low : position + 1].double(), v[low : position + 1].double()
    per_kv = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // per_kv] @ q[head].double() / q.shape[1] ** 0.5
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
        out.append(weights / total @ v[:, head // per_kv])
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "value_dim"), [((4, 4), None), ((6, 2), None), ((3, 1), None), ((3, 1), 10)]
)
@pytest.mark.parametrize(
    ("contexts", "generations", "rows"),
    [([(0, 7)], [], 1), ([], [9], 1), ([], [3, 30, 17], 4), ([(0, 5), (8, 4)], [12, 1], 3)],
)
def test_ragged_pass(
    dtype: torch.dtype,
    window: int | None,
    has_sinks: bool,
    heads: tuple[int, int],
    value_dim: int | None,
    contexts: list[tuple[int, int]],
    generations: list[int],
    rows: int,
) -> None:
    """contexts: (KV before, rows); generations: KV before. With value_dim, values are so many
    numbers of the keys (latent attention)."""
    torch.manual_seed(0)
    q_heads, kv_heads, dim, page_size, max_blocks = *heads, 16, 4, 12
    spans = contexts + [(past, rows) for past in generations]
    blocks = list(range(2, 2 + len(spans) * max_blocks))
    random.Random(1).shuffle(blocks)
    shape = (2, 2 + len(blocks), page_size, kv_heads, dim)
    group = KVGroupSpec(2, kv_heads, dim, dtype, value_dim=value_dim).allocate(
        shape[1], page_size, torch.device("cpu")
    )
    assert (group.v_cache.data_ptr() == group.k_cache.data_ptr()) == (value_dim is not None)
    table = torch.full((len(spans), max_blocks), NULL_BLOCK, dtype=torch.int32)
    history = []
    for i, (past, new) in enumerate(spans):
        for page in range(-(-(past + new) // page_size)):
            table[i, page] = blocks.pop()
        k, v = (torch.randn(past + new, kv_heads, dim, dtype=dtype) for _ in range(2))
        v = v if value_dim is None else k[..., :value_dim]
        history.append((k, v))
        for position in range(past):
            block, offset = int(table[i, position // page_size]), position % page_size
            group.k_cache[1, block, offset], group.v_cache[1, block, offset] = (
                k[position],
                v[position],
            )
    positions, slots = [], []
    for i, (past, new) in enumerate(spans):
        guarded, inside = guard_positions(torch.arange(past, past + new)[None], 10_000)
        positions.append(guarded[0])
        slots.append(slot_mapping(table[i : i + 1], guarded, inside, page_size)[0])
    lens = [past + new for past, new in spans]
    meta = AttentionMetadata(
        context_lens=tuple(new for _, new in contexts),
        num_generations=len(generations),
        rows_per_generation=rows,
        position_ids=torch.cat(positions),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        max_kv_len=max(lens) + 3,  # an upper bound, as under overlap
        kv_groups=(group,),
        block_tables=(table,),
        slot_mappings=(torch.cat(slots),),
        max_seq_len=10_000,
    )
    q = torch.randn(meta.num_tokens, q_heads, dim, dtype=dtype)
    k = torch.cat([k[past:] for (k, _), (past, _) in zip(history, spans, strict=True)])
    v = torch.cat([v[past:] for (_, v), (past, _) in zip(history, spans, strict=True)])
    sinks = 2 * torch.randn(q_heads).to(dtype) if has_sinks else None
    out = write_and_attend(TorchAttention(), q, k, v, meta, layer=1, window=window, sinks=sinks)

    row = 0
    for (k_all, v_all), (past, new) in zip(history, spans, strict=True):
        for j in range(new):
            expected = _naive(q[row], k_all, v_all, past + j, window, sinks)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out[row].double(), expected, atol=tolerance, rtol=tolerance)
            row += 1
    assert not group.k_cache[0].any(), "another layer's cache was written"
    assert not group.k_cache[1, NULL_BLOCK].any(), "the null block was written"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("past", "has_sinks"),
    [(10, False), (100, False), (700, False), (1050, False), (30, True), (500, True)],
)
def test_bf16_rows_do_not_depend_on_how_many_are_verified(past: int, has_sinks: bool) -> None:
    """Row r of a (K+1)-row pass is bit for bit the row of a one-row pass at its position."""
    torch.manual_seed(1)
    total, page = past + 8, 16
    blocks = -(-total // page)
    k, v = (torch.randn(total, 3, 64, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(total, 9, 64, dtype=torch.bfloat16)
    table = torch.arange(2, 2 + blocks, dtype=torch.int32)[None]
    sinks = torch.randn(9).bfloat16() if has_sinks else None

    def rows(start: int, count: int) -> Tensor:
        shape = (1, 2 + blocks, page, 3, 64)
        group = KVGroup(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
        group.k_cache[0, 2:].view(-1, 3, 64)[:start] = k[:start]
        group.v_cache[0, 2:].view(-1, 3, 64)[:start] = v[:start]
        positions = torch.arange(start, start + count)
        meta = AttentionMetadata(
            context_lens=(),
            num_generations=1,
            rows_per_generation=count,
            position_ids=positions,
            kv_lens=torch.tensor([start + count], dtype=torch.int32),
            max_kv_len=start + count,
            kv_groups=(group,),
            block_tables=(table,),
            slot_mappings=(2 * page + positions,),
            max_seq_len=10_000,
        )
        span = slice(start, start + count)
        return write_and_attend(TorchAttention(), q[span], k[span], v[span], meta, sinks=sinks)

    for _ in range(200):  # one row in a thousand differed where groups of 3 heads were not padded
        k, v = (torch.randn(total, 3, 64, dtype=torch.bfloat16) for _ in range(2))
        q = 2 * torch.randn(total, 9, 64, dtype=torch.bfloat16)
        together = rows(past, 7)
        for r in range(7):
            assert torch.equal(together[r], rows(past + r, 1)[0])


def test_rows_past_the_maximum_write_nowhere_and_do_not_disturb_the_others() -> None:
    torch.manual_seed(2)
    page, max_len = 4, 8
    shape = (1, 4, page, 1, 8)
    group = KVGroup(torch.zeros(shape), torch.zeros(shape))
    table = torch.tensor([[2, 3]], dtype=torch.int32)
    positions, inside = guard_positions(torch.tensor([[6, 7, 8, 9]]), max_len)
    slots = slot_mapping(table, positions, inside, page)
    meta = AttentionMetadata(
        (), 1, 4, positions[0], torch.tensor([8], dtype=torch.int32), 8,
        (group,), (table,), (slots[0],), max_len,
    )  # fmt: skip
    q, k, v = (torch.randn(4, 1, 8) for _ in range(3))
    out = write_and_attend(TorchAttention(), q, k, v, meta)
    assert torch.isfinite(out).all()
    cache = group.k_cache[0, 2:].reshape(-1, 8)
    assert torch.equal(cache[6:8], k[:2, 0])
    assert not cache[:6].any(), "a row past the maximum was written inside the request"
