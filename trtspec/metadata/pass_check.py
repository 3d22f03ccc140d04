"""`AttentionMetadata.check`: whether the fields of a pass fit each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import is_int
from ..errors import ConfigError
from .attention import NUM_RESERVED_BLOCKS, AttentionMetadata


def check_pass(meta: AttentionMetadata) -> None:
    """As `AttentionMetadata.check`."""
    if meta.packed is not None or meta.last_context_rows is not None:
        raise ConfigError("A packed or padded pass is the executor's: check the one before.")
    _check_host_data(meta)
    num_seqs, rows = meta.num_seqs, meta.num_tokens
    _check("position_ids", meta.position_ids, torch.int64, (rows,), "one for each row")
    _check("kv_lens", meta.kv_lens, torch.int32, (num_seqs,), "one for each request")
    groups = len(meta.kv_groups)
    for name in ("block_tables", "slot_mappings"):
        given = getattr(meta, name)
        if not isinstance(given, tuple) or len(given) != groups:
            raise ConfigError(f"{name}: give a tuple of {groups} tensors, one for each KV group.")
        for group, value in enumerate(given):
            if name == "slot_mappings":
                _check(f"{name}[{group}]", value, torch.int64, (rows,), "one for each row")
            else:
                _check(f"{name}[{group}]", value, torch.int32, (num_seqs, None), "a row a request")
    if not groups:
        return
    counts = meta.context_lens + (meta.rows_per_generation,) * meta.num_generations
    requests = torch.arange(num_seqs).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    positions = meta.position_ids.cpu()
    is_past = torch.stack([slots.cpu() < 0 for slots in meta.slot_mappings]).all(0)
    is_past &= (positions == 0) & (requests >= meta.num_contexts)
    inside = _Rows(requests[~is_past], positions[~is_past], (~is_past).nonzero()[:, 0])
    _check_positions(meta, inside)
    _check_lengths(meta, inside)
    for group in range(groups):
        _check_blocks(meta, group, inside)
        _check_slots(meta, group, inside)


def _check_host_data(meta: AttentionMetadata) -> None:
    for name in ("context_lens", "context_starts"):
        value = getattr(meta, name)
        if not isinstance(value, tuple) or not all(is_int(n, 0) for n in value):
            raise ConfigError(f"{name}={value!r}: give a tuple of ints, one for each context.")
    if len(meta.context_starts) not in (0, meta.num_contexts):
        raise ConfigError(
            f"context_starts={meta.context_starts} has {len(meta.context_starts)} for "
            f"{meta.num_contexts} contexts: give one for each, or () for 0 everywhere."
        )
    for name in ("num_generations", "rows_per_generation", "max_kv_len", "max_seq_len"):
        if not is_int(getattr(meta, name), 0):
            raise ConfigError(f"{name}={getattr(meta, name)!r}: give an int >= 0.")


class _Rows(NamedTuple):
    """The rows of a pass but for those past the maximum length."""

    requests: Tensor  # [N] int64, of 0 … B - 1
    positions: Tensor  # [N] int64
    indices: Tensor  # [N] int64, in the pass


def _check_positions(meta: AttentionMetadata, rows: _Rows) -> None:
    """A request's rows are consecutive, a context's from its start on, all below the maximum."""
    starts = torch.tensor(meta.context_starts or (0,) * meta.num_contexts, dtype=torch.int64)
    is_first = torch.ones_like(rows.requests, dtype=torch.bool)
    is_first[1:] = rows.requests[1:] != rows.requests[:-1]
    expected = rows.positions.clone()
    expected[1:] = torch.where(is_first[1:], rows.positions[1:], rows.positions[:-1] + 1)
    of_context = is_first & (rows.requests < meta.num_contexts)
    expected[of_context] = starts[rows.requests[of_context]]
    if (i := _first(rows.positions.ne(expected))) is not None:
        raise ConfigError(
            f"position_ids[{rows.indices[i]}]={rows.positions[i]}: by context_starts and the rows "
            f"before, this row of request {rows.requests[i]} is at {expected[i]}."
        )
    if (i := _first((rows.positions < 0) | (rows.positions >= meta.max_seq_len))) is not None:
        raise ConfigError(
            f"position_ids[{rows.indices[i]}]={rows.positions[i]} with max_seq_len="
            f"{meta.max_seq_len}: rows from there on are at 0, with slot -1."
        )


def _check_lengths(meta: AttentionMetadata, rows: _Rows) -> None:
    lens = meta.kv_lens.cpu().to(torch.int64)
    seen = torch.zeros_like(lens).scatter_reduce(0, rows.requests, rows.positions + 1, "amax")
    expected = torch.where(seen > 0, seen, lens)
    if (i := _first(lens.ne(expected))) is not None:
        raise ConfigError(
            f"kv_lens[{i}]={lens[i]}: the last row of request {i} is at {expected[i] - 1}, so it "
            f"sees {expected[i]} keys."
        )
    if (longest := int(lens.max()) if len(lens) else 0) > meta.max_kv_len:
        raise ConfigError(
            f"max_kv_len={meta.max_kv_len} is below the longest of kv_lens, {longest}: it is an "
            "upper bound of them."
        )


def _check_blocks(meta: AttentionMetadata, group: int, rows: _Rows) -> None:
    """The blocks that the rows are written to are there, and not reserved."""
    table, storage = meta.block_tables[group].cpu(), meta.kv_groups[group]
    page, num_blocks = storage.page_size, storage.k_cache.shape[1]
    needed = int(rows.positions.max()) // page + 1 if len(rows.positions) else 0
    if needed > table.shape[1]:
        raise ConfigError(
            f"block_tables[{group}] has {table.shape[1]} blocks a request, the rows need {needed} "
            f"of {page} tokens."
        )
    blocks = table[rows.requests, rows.positions // page]
    i = _first((blocks < NUM_RESERVED_BLOCKS) | (blocks >= num_blocks))
    if i is not None:
        raise ConfigError(
            f"block_tables[{group}] has block {blocks[i]} for request {rows.requests[i]}: hand out "
            f"{NUM_RESERVED_BLOCKS} … {num_blocks - 1}, the blocks before are reserved."
        )


def _check_slots(meta: AttentionMetadata, group: int, rows: _Rows) -> None:
    table, page = meta.block_tables[group].cpu(), meta.kv_groups[group].page_size
    expected = torch.full((meta.num_tokens,), -1)
    blocks = table[rows.requests, rows.positions // page].to(torch.int64)
    expected[rows.indices] = blocks * page + rows.positions % page
    slots = meta.slot_mappings[group].cpu()
    if (i := _first(slots.ne(expected))) is not None:
        raise ConfigError(
            f"slot_mappings[{group}][{i}]={slots[i]}: by its block table and position it is "
            f"{expected[i]} (block * {page} + position % {page}; -1 past max_seq_len)."
        )
    order = slots[rows.indices].argsort(stable=True)
    written = slots[rows.indices][order]
    if (i := _first(written[1:] == written[:-1])) is not None:
        one, other = order[i], order[i + 1]
        raise ConfigError(
            f"slot_mappings[{group}] has {written[i]} for requests {rows.requests[one]} and "
            f"{rows.requests[other]}: block {int(written[i]) // page} is in both tables. Give each "
            "request blocks of its own."
        )


def _check(
    name: str, value: Any, dtype: torch.dtype, shape: tuple[int | None, ...], what: str
) -> None:
    wanted = f"[{', '.join('*' if size is None else str(size) for size in shape)}]"
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}: give a tensor {wanted}, {what}.")
    fits = len(value.shape) == len(shape) and all(
        size in (None, found) for size, found in zip(shape, value.shape, strict=True)
    )
    if value.dtype != dtype or not fits:
        raise ConfigError(
            f"{name} is {value.dtype} {list(value.shape)}: give {dtype} {wanted}, {what}."
        )


def _first(wrong: Tensor) -> int | None:
    """Returns where the first True is."""
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None
