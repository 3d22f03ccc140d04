"""Paged attention in Triton: lengths and block tables come from the device.

Generations are split-KV ("flash decoding"): the keys of all requests and KV heads are cut into
parts of one size, for as many programs as the GPU runs at once, so that one long request fills it
and a short one beside it waits for nobody; a second kernel joins what belongs together. Each
program finds its part from all requests' positions. All query rows of a request that share a KV
head are one tile.
Nothing depends on the host's idea of a length, so a captured graph stays right as texts grow.

Contexts are cut into tiles of query rows ("flash attention"); one launch serves those of all
requests in a pass. The host knows their lengths and says which rows a tile has.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.launch.triton import after_previous, dependent_launch
from .mla import latent_attention
from .split_kv import (
    BLOCK_N,
    JOIN_PROGRAMS,
    LOG2_E,
    MULTIPROCESSORS,
    blocks_of,
    context_tiles,
    prefetch,
    share_out,
)
from .torch_sdpa import TorchAttention

MAX_TILE = 128 * 128  # query rows times head size that one program's registers hold
CONTEXT_TILE = 128  # query rows of a context's tile, times the heads that share keys


class TritonAttention(TorchAttention):
    name: ClassVar[str] = "triton"
    lengths_on_device: ClassVar[bool] = True
    contexts_on_device: ClassVar[bool] = True

    def attend(
        self,
        q: Tensor,
        meta: AttentionMetadata,
        *,
        kv_group: int,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        k_slots, v_slots = meta.kv_groups[kv_group].layer_slots[layer]
        if v_slots.shape[2] != k_slots.shape[2]:
            scale = k_slots.shape[2] ** -0.5 if scale is None else scale
            return latent_attention(q, meta, kv_group, layer, window, scale)
        rows, size = meta.num_context_tokens, _context_tile(q, k_slots)
        if rows and not size and meta.last_context_rows is not None:
            raise ConfigError(
                f"{q.shape[1]} query heads on {k_slots.shape[1]} KV heads are too many for a graph "
                "of prompts: set CudaGraphConfig(context_tokens=())."
            )
        if not rows or not size:
            return super().attend(
                q, meta, kv_group=kv_group, layer=layer, window=window, scale=scale, softcap=softcap
            )
        # Padding is of no tile. It is nobody's, but had better stay finite.
        is_padded = meta.last_context_rows is not None
        new = torch.zeros_like if is_padded else torch.empty_like
        out = new(q, memory_format=torch.contiguous_format)
        context_attention(
            q,
            k_slots,
            v_slots,
            meta.block_tables[kv_group],
            meta.position_ids,
            context_tiles(meta, size),
            size,
            meta.kv_groups[kv_group].page_size,
            window,
            out,
            scale,
            softcap,
        )
        if meta.num_generations:
            out[rows:] = self._generation(
                q[rows:], k_slots, v_slots, meta, kv_group, window, scale, softcap
            )
        return out

    def _generation(
        self,
        q: Tensor,
        k_slots: Tensor,
        v_slots: Tensor,
        meta: AttentionMetadata,
        kv_group: int,
        window: int | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        rows, per_kv = meta.rows_per_generation, q.shape[1] // k_slots.shape[1]
        most = MAX_TILE // (per_kv * q.shape[2])
        if not most:
            return super()._generation(q, k_slots, v_slots, meta, kv_group, window, scale, softcap)
        tables = meta.block_tables[kv_group][meta.num_contexts :]
        positions = meta.position_ids[meta.num_context_tokens :]
        page_size = meta.kv_groups[kv_group].page_size
        if rows <= most:
            return paged_attention(
                q, k_slots, v_slots, tables, positions, rows, page_size, window, scale, softcap
            )
        # Long drafts, or wide heads of which many share keys: some rows of every request at a time.
        outs = [
            paged_attention(
                part.flatten(0, 1), k_slots, v_slots, tables, own.flatten().contiguous(),
                part.shape[1], page_size, window, scale, softcap,
            ).view(part.shape)
            for part, own in zip(
                q.view(-1, rows, *q.shape[1:]).split(most, dim=1),
                positions.view(-1, rows).split(most, dim=1),
                strict=True,
            )
        ]  # fmt: skip
        return torch.cat(outs, dim=1).flatten(0, 1)


def paged_attention(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    block_tables: Tensor,
    position_ids: Tensor,
    rows: int,
    page_size: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of generation rows over a paged cache.

    Args:
        q: [G * rows, Hq, D].
        k_slots, v_slots: [slots, Hkv, D], indexed by block * page_size + offset.
        block_tables: [G, M] int32.
        position_ids: [G * rows] int64; a row sees the keys at positions up to its own. A request's
            rows follow one another, but for those past the maximum length, which are at 0.
        window: how many of the last of those it sees; None is all.
        scale: of the scores, None is 1 / sqrt(D).
        softcap: scaled scores s become softcap * tanh(s / softcap).

    Returns:
        [G * rows, Hq, D].
    """
    num_seqs, table_width = block_tables.shape
    q_heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_slots.shape[1]
    per_kv = q_heads // kv_heads
    block_m = max(16, triton.next_power_of_2(rows * per_kv))
    block_d = _block_d(dim)
    pairs, tile = num_seqs * kv_heads, triton.next_power_of_2(rows * per_kv)
    block_n, programs = _cut(pairs, block_d, q.dtype)
    most_parts = min(pairs + programs, pairs * triton.cdiv(table_width * page_size, block_n))
    out = torch.empty_like(q)
    partial = torch.empty((most_parts, block_m, block_d), dtype=torch.float32, device=q.device)
    stats = torch.empty((most_parts, block_m, 2), dtype=torch.float32, device=q.device)
    shared = {
        "rows": rows, "per_kv": per_kv, "kv_heads": kv_heads, "dim": dim, "page_size": page_size,
        "window": -1 if window is None else window, "PROGRAMS": programs,
        "SEQS": triton.next_power_of_2(num_seqs), "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_D": block_d, "num_warps": 4, **dependent_launch(q),
    }  # fmt: skip
    factor, cap = _base_2(dim, scale, softcap)
    _partial_kernel[(most_parts,)](
        q, k_slots, v_slots, block_tables, position_ids, partial, stats, out,
        factor,
        q.stride(0), q.stride(1), k_slots.stride(0), k_slots.stride(1),
        v_slots.stride(0), v_slots.stride(1), block_tables.stride(0), table_width,
        out.stride(0), out.stride(1), num_seqs, **shared, num_stages=2,
        CAP=cap, PREFETCH=pairs < MULTIPROCESSORS,  # with more, DRAM is busy and asking early costs
    )  # fmt: skip
    join_rows = min(tile, triton.next_power_of_2(triton.cdiv(pairs * tile, JOIN_PROGRAMS)))
    join_parts = min(triton.next_power_of_2(programs // pairs + 1), 64)
    _join_kernel[(num_seqs, kv_heads, tile // join_rows)](
        partial, stats, position_ids, out, table_width, out.stride(0), out.stride(1), num_seqs,
        **shared, ROWS=join_rows, PARTS=join_parts,
    )  # fmt: skip
    return out


def _base_2(dim: int, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """What a product of query and key is multiplied by, to be a score in base 2 or, with a cap,
    twice its tanh's argument in base 2; and the cap in base 2, 0 for none."""
    factor = (dim**-0.5 if scale is None else scale) * LOG2_E
    return (factor, 0.0) if softcap is None else (2 * factor / softcap, softcap * LOG2_E)


def _cut(pairs: int, block_d: int, dtype: torch.dtype) -> tuple[int, int]:
    """The keys of a block and the programs that all keys are cut for, by measurement: where there
    are requests and heads enough for every multiprocessor, fewer programs with larger blocks."""
    each = 4 if block_d > 64 else 6
    if block_d > 256:  # two stages of keys and values have to fit shared memory
        return BLOCK_N // (4 if dtype == torch.float32 else 2), each * MULTIPROCESSORS
    if pairs < MULTIPROCESSORS:
        return BLOCK_N, each * MULTIPROCESSORS
    too_large = block_d > 128 or dtype == torch.float32
    if too_large or (block_d > 64 and pairs >= 3 * MULTIPROCESSORS):
        return BLOCK_N, 2 * MULTIPROCESSORS
    return 2 * BLOCK_N, (each - 2) * MULTIPROCESSORS


def _context_tile(q: Tensor, k_slots: Tensor) -> int:
    """Rows of a context that are one tile; 0 if the heads that share keys are more than fit."""
    block_d = _block_d(q.shape[2])
    most = min(CONTEXT_TILE, MAX_TILE // block_d)
    if q.dtype == torch.float32:  # such products keep whole rows in registers
        most = min(64, 4096 // block_d)
    return most // (q.shape[1] // k_slots.shape[1])


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a program may have the shared memory of a Hopper GPU, or of Blackwell's of the data
    centre; others spill with the tiles that are best there."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= 162 << 10


def _block_d(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))  # tl.dot needs 16


def context_attention(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    block_tables: Tensor,
    position_ids: Tensor,
    tiles: Tensor,
    tile_rows: int,
    page_size: int,
    window: int | None,
    out: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of contexts' rows over a paged cache, into `out`.

    Args:
        q, out: [T, Hq, D]; rows of no tile are left alone.
        k_slots, v_slots, window, scale, softcap: as in `paged_attention`.
        block_tables: [B, M] int32. position_ids: [T] int64.
        tiles: [N, 3] int32, of at most `tile_rows` rows each, which follow one another in a text.
    """
    q_heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_slots.shape[1]
    per_kv, block_d = q_heads // kv_heads, _block_d(dim)
    block_m = max(16, triton.next_power_of_2(tile_rows * per_kv))
    block_n, split = BLOCK_N // max(block_d // 128, 1), True
    num_warps = 8 if block_m * block_d > 128 * 64 else 4
    if q.dtype == torch.float32:  # several loops would spill
        block_n, num_warps, split = max(block_n // 2, 16), 8 if block_d <= 128 else 4, False
    elif block_d > 64 and _has_room(q.device):
        block_n, num_warps = (2 * BLOCK_N, 8) if block_d == 128 else (block_n, 4)
    factor, cap = _base_2(dim, scale, softcap)
    _context_kernel[(len(tiles), kv_heads)](
        q, k_slots, v_slots, block_tables, position_ids, tiles, out,
        factor,
        q.stride(0), q.stride(1), k_slots.stride(0), k_slots.stride(1),
        v_slots.stride(0), v_slots.stride(1), block_tables.stride(0), block_tables.shape[1],
        out.stride(0), out.stride(1),
        per_kv=per_kv, dim=dim, page_size=page_size, window=-1 if window is None else window,
        CAP=cap, SPLIT=split, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=num_warps, num_stages=2, **dependent_launch(q),
    )  # fmt: skip


@triton.jit
def _no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return best, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _sums(
    best, total, acc, q, positions, start, end,
    k_ptr, v_ptr, k_row, v_row, table_ptr, table_width, scale,
    dim: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax sums of query rows, in base 2: the largest score, the sum of weights, the sum of
    weighted values; with the keys at positions start … end - 1 added. Not MASKED: whole blocks of
    keys that every row sees."""
    d = tl.arange(0, BLOCK_D)
    for begin in range(start, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        page = n // page_size
        inside = (n[:, None] < end) & (d[None, :] < dim)
        if MASKED:
            block = tl.load(table_ptr + page, mask=(n < end) & (page < table_width), other=0)
        else:
            block = tl.load(table_ptr + page)
        slot = block.to(tl.int64) * page_size + n % page_size
        if MASKED or dim < BLOCK_D:
            k = tl.load(k_ptr + slot[:, None] * k_row + d[None, :], mask=inside, other=0.0)
            v = tl.load(v_ptr + slot[:, None] * v_row + d[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(k_ptr + slot[:, None] * k_row + d[None, :])
            v = tl.load(v_ptr + slot[:, None] * v_row + d[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP > 0:  # tanh(x / 2) = 1 - 2 / (exp(x) + 1)
            scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            seen = (n[None, :] <= positions[:, None]) & (n[None, :] < end)
            if window > 0:
                seen = seen & (n[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet has no best: keep its weights at zero, not NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_row", "table_width"])  # they change as texts come and go
def _context_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, position_ptr, tile_ptr, out_ptr, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row, table_width, out_row, out_head,
    per_kv: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    CAP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of a context's rows, with the query heads of one KV head."""
    after_previous(PDL)
    tile, kv_head = tile_ptr + tl.program_id(0) * 3, tl.program_id(1)
    seq, first_row, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, head = (first_row + m // per_kv).to(tl.int64), kv_head * per_kv + m % per_kv
    is_row = m // per_kv < rows
    positions = tl.load(position_ptr + row, mask=is_row, other=0).to(tl.int32)
    inside = is_row[:, None] & (d[None, :] < dim)
    q = tl.load(
        q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=inside, other=0.0
    )
    k_ptr, v_ptr = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    table_ptr += seq * table_row
    best, total, acc = _no_sums(BLOCK_M, BLOCK_D)
    end = tl.max(tl.where(is_row, positions, 0), 0) + 1
    earliest = tl.min(tl.where(is_row, positions, end), 0)
    start = end * 0
    if window > 0:
        start = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        # From here on there are keys that some row does not see yet.
        partly = tl.minimum(earliest + 1, end) // BLOCK_N * BLOCK_N
        if window > 0:
            # Up to here there are keys that some row does not see any more.
            clear = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N, end)
            best, total, acc = _sums(
                best, total, acc, q, positions, start, clear,
                k_ptr, v_ptr, k_row, v_row, table_ptr, table_width, scale,
                dim=dim, page_size=page_size, window=window, CAP=CAP, MASKED=True,
                BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
            )  # fmt: skip
            start = clear
        best, total, acc = _sums(
            best, total, acc, q, positions, start, partly,
            k_ptr, v_ptr, k_row, v_row, table_ptr, table_width, scale,
            dim=dim, page_size=page_size, window=window, CAP=CAP, MASKED=False,
            BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        start = tl.maximum(start, partly)
    _best, total, acc = _sums(
        best, total, acc, q, positions, start, end,
        k_ptr, v_ptr, k_row, v_row, table_ptr, table_width, scale,
        dim=dim, page_size=page_size, window=window, CAP=CAP, MASKED=True,
        BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    acc = acc / tl.where(is_row, total, 1.0)[:, None]
    tl.store(
        out_ptr + row[:, None] * out_row + head[:, None] * out_head + d[None, :],
        acc.to(out_ptr.dtype.element_ty), mask=inside,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "table_width", "num_seqs"])
def _partial_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, position_ptr, partial_ptr, stats_ptr, out_ptr, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row, table_width, out_row, out_head,
    num_seqs,
    rows: tl.constexpr, per_kv: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    page_size: tl.constexpr, window: tl.constexpr, PROGRAMS: tl.constexpr, SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
    CAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one request and KV head: its rows' softmax sums in base 2, or their
    attention where it is the only part. All full parts come before all rests, so that what starts
    last is short."""
    kv_head, number = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    starts, full, rest, part = share_out(
        position_ptr, num_seqs, table_width, rows=rows, kv_heads=kv_heads, page_size=page_size,
        window=window, PROGRAMS=PROGRAMS, SEQS=SEQS, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    num_full = tl.sum(full, 0)
    is_rest = number >= num_full
    own = tl.where(is_rest, rest, full)
    number -= tl.where(is_rest, num_full, 0)
    seq = tl.sum((tl.cumsum(own, 0) <= number).to(tl.int32), 0)
    s = tl.arange(0, SEQS)
    position = tl.sum(tl.where(s == seq, starts, 0), 0)
    first, blocks = blocks_of(position, table_width, rows, page_size, window, BLOCK_N)
    index = tl.where(is_rest, blocks // part, number - tl.sum(tl.where(s < seq, full, 0), 0))
    start = (first + index * part) * BLOCK_N
    end = tl.minimum(start + part * BLOCK_N, position + rows)
    if PDL and PREFETCH:  # noqa: SIM102 - the outer one is for the compiler
        if seq < num_seqs:
            prefetch(
                start, end, k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, k_row, v_row,
                table_ptr + seq * table_row, table_width,
                page_size=page_size, dim=dim, BLOCK_N=BLOCK_N,
            )  # fmt: skip
    after_previous(PDL)  # which wrote q and the pass's own keys; positions and tables are older
    if seq >= num_seqs:
        return

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, head = seq * rows + m // per_kv, kv_head * per_kv + m % per_kv
    is_row = m // per_kv < rows
    positions = tl.load(position_ptr + row, mask=is_row, other=0).to(tl.int32)
    inside = is_row[:, None] & (d[None, :] < dim)
    q = tl.load(
        q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=inside, other=0.0
    )
    best, total, acc = _no_sums(BLOCK_M, BLOCK_D)
    best, total, acc = _sums(
        best, total, acc, q, positions, start, end,
        k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, k_row, v_row,
        table_ptr + seq * table_row, table_width, scale,
        dim=dim, page_size=page_size, window=window, CAP=CAP, MASKED=True,
        BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    if blocks <= part:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row[:, None] * out_row + head[:, None] * out_head + d[None, :],
            acc.to(out_ptr.dtype.element_ty), mask=inside,
        )  # fmt: skip
    else:
        before = tl.sum(tl.where(s < seq, full + rest, 0), 0)
        place = ((before + index) * kv_heads + kv_head) * BLOCK_M + m
        tl.store(partial_ptr + place[:, None] * BLOCK_D + d[None, :], acc)
        tl.store(stats_ptr + place * 2, best)
        tl.store(stats_ptr + place * 2 + 1, total)


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def _join_kernel(
    partial_ptr, stats_ptr, position_ptr, out_ptr, table_width, out_row, out_head, num_seqs,
    rows: tl.constexpr, per_kv: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    page_size: tl.constexpr, window: tl.constexpr, PROGRAMS: tl.constexpr, SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS query rows of one request and KV head, put together from several parts, PARTS of them
    at once."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    _starts, full, rest, _part = share_out(
        position_ptr, num_seqs, table_width, rows=rows, kv_heads=kv_heads, page_size=page_size,
        window=window, PROGRAMS=PROGRAMS, SEQS=SEQS, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    s = tl.arange(0, SEQS)
    count = tl.sum(tl.where(s == seq, full + rest, 0), 0)
    before = tl.sum(tl.where(s < seq, full + rest, 0), 0)
    after_previous(PDL)
    if count == 1:
        return
    m, d = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for begin in range(0, count, PARTS):
        parts = begin + tl.arange(0, PARTS)
        place = ((before + parts) * kv_heads + kv_head)[:, None] * BLOCK_M + m[None, :]
        is_part = (parts < count)[:, None] & (m < BLOCK_M)[None, :]
        bests = tl.load(stats_ptr + place * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(stats_ptr + place * 2 + 1, mask=is_part, other=0.0)
        values = tl.load(
            partial_ptr + place[:, :, None] * BLOCK_D + d[None, None, :],
            mask=is_part[:, :, None], other=0.0,
        )  # fmt: skip
        new_best = tl.maximum(best, tl.max(bests, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(bests - base[None, :])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep[:, None] + tl.sum(values * weights[:, :, None], 0)
        best = new_best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    row, head = seq * rows + m // per_kv, kv_head * per_kv + m % per_kv
    tl.store(
        out_ptr + row[:, None] * out_row + head[:, None] * out_head + d[None, :],
        out.to(out_ptr.dtype.element_ty), mask=(m // per_kv < rows)[:, None] & (d[None, :] < dim),
    )  # fmt: skip
