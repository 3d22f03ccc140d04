"""Paged attention in plain torch: the CPU path, and the oracle of every other backend.

Pages are gathered into a padded [G, S] view and given to `scaled_dot_product_attention` with a
mask built from the rows' positions, so post-acceptance lengths never need the host.

On CPU in bf16, a row of a lone request must not depend on how many rows are verified together, or
greedy text with and without speculation would differ at near-ties. So each row is a batch entry by
itself (K and V are shared by stride 0, not copied), and its position alone decides how many keys it
is shown. Rows folded into one matrix differ in one element of a few thousand. In fp32 such ties do
not matter, and of several requests each is shown as many keys as the longest has: there rows are
folded (docs/decisions/003).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..metadata.attention import AttentionMetadata
from ..ops.layer.kv_codes import look_up
from ..ops.step.rows import gather_rows
from .base import AttentionBackend, CachedLayer

_ALIGNED_GROUP = 8
"""On CPU in bf16 the query heads of a group are padded to a multiple of this.

Each thread of torch's kernel has its scratch memory behind the one before. With other counts it is
not aligned to a cache line, and then its sums differ from the first thread's in the last bit, once
in a thousand rows.
"""


class TorchAttention(AttentionBackend):
    name: ClassVar[str] = "torch"
    supports_multi_token_generation: ClassVar[bool] = True

    def attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        packed = meta.packed
        if packed is None or self._reads_packed(q, meta, cached):
            return self._attend(q, meta, cached)
        (of_all,) = gather_rows(packed.places, q.flatten(1))
        out = self._attend(of_all.view(-1, *q.shape[1:]), packed.whole, cached)
        (of_verified,) = gather_rows(packed.indices, out.flatten(1))
        return of_verified.view(-1, *out.shape[1:])

    def _reads_packed(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> bool:
        """Whether generations may have different numbers of rows."""
        return False

    def _attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        """As `attend`; all generations have the same number of rows, unless `_reads_packed`."""
        outs, start = [], 0
        for i, rows in enumerate(meta.context_lens):
            outs.append(self._context(q[start : start + rows], meta, i, cached))
            start += rows
        if meta.num_generations:
            outs.append(self._generation(q[start:], meta, cached))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _context(
        self, q: Tensor, meta: AttentionMetadata, index: int, cached: CachedLayer
    ) -> Tensor:
        """Attends for one context's rows [n, Hq, D]; they see its last row's position + 1 keys."""
        key = ("context", index, cached.kv_group, cached.window)
        if key not in meta.derived:
            start = sum(meta.context_lens[:index])
            # Contexts' lengths are the host's own numbers; padding up to max_kv_len is masked.
            indices, length = _gather_indices(meta, cached.kv_group, slice(index, index + 1))
            rows = slice(start, start + q.shape[0])
            meta.derived[key] = indices, _mask(meta, rows, length, cached.window, q.dtype)
        indices, mask = meta.derived[key]
        keys, values = _gather(cached, indices, q)
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, Hkv, S, D]
        out = masked_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            mask[None, None],
            cached.scale,
            cached.softcap,
            cached.sinks,
        )
        return out[0, ..., : cached.v_slots.shape[2]].transpose(0, 1)

    def _generation(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        """Attends for all generation rows, [G*R, Hq, D] -> [G*R, Hq, Dv]."""
        num_seqs, rows = meta.num_generations, meta.rows_per_generation
        q_heads, kv_heads, dim = q.shape[1], cached.kv_heads, q.shape[2]
        per_kv, value_dim = q_heads // kv_heads, cached.v_slots.shape[2]
        one_by_one = num_seqs == 1 and q.device.type == "cpu" and q.dtype != torch.float32
        key = ("generation", cached.kv_group, cached.window)
        if key not in meta.derived:
            seqs = slice(meta.num_contexts, meta.num_contexts + num_seqs)
            indices, length = _gather_indices(meta, cached.kv_group, seqs)
            of_generations = slice(meta.num_context_tokens, None)
            mask = _mask(meta, of_generations, length, cached.window, q.dtype)  # [G*R, S]
            if one_by_one:
                mask = mask[:, None, None]  # [R, 1, 1, S]
            else:  # [G, 1, R*Hq/Hkv, S]
                mask = mask.repeat_interleave(per_kv, dim=0).view(num_seqs, 1, rows * per_kv, -1)
            meta.derived[key] = indices, mask
        indices, mask = meta.derived[key]
        keys, values = (
            x.view(num_seqs, -1, kv_heads, dim).transpose(1, 2)  # [G, Hkv, S, D]
            for x in _gather(cached, indices, q)
        )
        grouped = q.view(num_seqs, rows, kv_heads, per_kv, dim)
        if one_by_one:
            out = _one_by_one(grouped[0], keys, values, mask, meta, cached)
        else:
            out = _folded(grouped, keys, values, mask, cached)
        return out[..., :value_dim].reshape(num_seqs * rows, q_heads, value_dim)


def _folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cached: CachedLayer) -> Tensor:
    """Attends with the rows and heads that share keys as one matrix.

    Args:
        q: [G, R, Hkv, Hq/Hkv, D], as what is returned.
        k, v: [G, Hkv, S, D]. mask: [G, 1, R*Hq/Hkv, S].
    """
    rows, kv_heads = q.shape[1:3]
    sinks = cached.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1).repeat(1, rows)
    matrices = q.transpose(1, 2).flatten(2, 3)
    out = masked_attention(matrices, k, v, mask, cached.scale, cached.softcap, sinks)
    return out.unflatten(2, (rows, -1)).transpose(1, 2)


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, meta: AttentionMetadata, cached: CachedLayer
) -> Tensor:
    """Attends for a lone request on the CPU, each row a batch entry by itself.

    Args:
        q: [R, Hkv, Hq/Hkv, D], as what is returned.
        k, v: [1, Hkv, S, D]. mask: [R, 1, 1, S].
    """
    rows, kv_heads, per_kv = q.shape[:3]
    sinks = None if cached.sinks is None else cached.sinks.view(kv_heads, per_kv)
    if unused := -per_kv % _ALIGNED_GROUP:
        q = F.pad(q, (0, 0, 0, unused))
        sinks = sinks if sinks is None else F.pad(sinks, (0, unused))
    k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
    length, outs = k.shape[2], []
    for part, shown in _shown_lengths(meta, cached.kv_group, length):
        some = q, k, v, mask
        if part is not None:
            some = q[part], k[part], v[part], mask[part]
        if shown < length:
            own, keys, values, seen = some
            some = own, keys[:, :, :shown], values[:, :, :shown], seen[..., :shown]
        outs.append(masked_attention(*some, cached.scale, cached.softcap, sinks))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[:, :, :per_kv]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q k^T) v under a mask, [B, Hq, R, D].

    Args:
        q: [B, Hq, R, D].
        k, v: [B, Hkv, S, D].
        mask: [B or 1, 1, R, S], added or bool; None shows all.
        scale, softcap: as of `CachedLayer`.
        sinks: [Hq], as of `CachedLayer`; [Hq, R] where rows are of several heads.
    """
    if sinks is not None:
        k, v, mask = _with_sinks(q, k, v, mask, sinks)
    is_grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=is_grouped, scale=scale
        )
    if is_grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        is_added = mask.dtype != torch.bool
        scores = scores + mask if is_added else scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys and values with a further one of zeros, and a mask that has sinks as its score.

    Arguments are as of `masked_attention`. torch's kernels know no sinks. Behind all keys the
    column leaves a row's result independent of other rows, as `_shown_lengths` does.
    """
    batch, heads, rows = q.shape[:3]
    if mask is None:
        mask = q.new_zeros(1, 1, 1, k.shape[2])
    elif mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill(~mask, float("-inf"))
    column = sinks.to(mask.dtype).view(1, heads, -1, 1).expand(batch, -1, rows, -1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return k, v, torch.cat([mask.expand(batch, heads, rows, -1), column], dim=-1)


def _shown_lengths(
    meta: AttentionMetadata, kv_group: int, length: int
) -> list[tuple[slice | None, int]]:
    """Returns runs of a lone request's rows with the number of keys they are shown, masked or not.

    That number must follow from a row's own position: how a sum over keys is cut into blocks
    depends on it, and so does the last bit. None in place of a run is all rows.
    """
    key = ("shown lengths", kv_group)
    if key not in meta.derived:
        page = meta.kv_groups[kv_group].page_size
        positions = meta.position_ids[meta.num_context_tokens :].tolist()
        shown = [min((p // page + 1) * page, length) for p in positions]
        starts = [i for i, n in enumerate(shown) if i == 0 or n != shown[i - 1]]
        runs = [slice(i, j) for i, j in zip(starts, [*starts[1:], len(shown)], strict=True)]
        meta.derived[key] = [(run if len(runs) > 1 else None, shown[run.start]) for run in runs]
    return meta.derived[key]


def _gather(cached: CachedLayer, indices: Tensor | slice, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values at some slots, each [n * S, Hkv, D] in the queries' dtype.

    Values are as wide as keys, padded with zeros: torch's faster kernels take no others.
    """
    keys = look_up(cached.k_slots, indices, cached.k_scales, q.dtype)
    values = look_up(cached.v_slots, indices, cached.v_scales, q.dtype)
    missing = keys.shape[-1] - values.shape[-1]
    return keys, F.pad(values, (0, missing)) if missing else values


def _gather_indices(
    meta: AttentionMetadata, kv_group: int, seqs: slice
) -> tuple[Tensor | slice, int]:
    """Returns the slots of positions 0 … S-1 of some requests, [n * S] int64, and S.

    S covers the host's upper bound of the lengths. On CPU, where looking costs nothing, a lone
    request whose blocks lie side by side is a slice.
    """
    page_size = meta.kv_groups[kv_group].page_size
    pages = min(-(-meta.max_kv_len // page_size), meta.block_tables[kv_group].shape[1])
    blocks = meta.block_tables[kv_group][seqs, :pages].to(torch.int64)
    length = pages * page_size
    if blocks.device.type == "cpu" and blocks.shape[0] == 1:
        first = int(blocks[0, 0])
        if torch.equal(blocks[0], torch.arange(first, first + pages)):
            return slice(first * page_size, first * page_size + length), length
    offsets = torch.arange(page_size, device=blocks.device)
    return (blocks[:, :, None] * page_size + offsets).flatten(), length


def _mask(
    meta: AttentionMetadata, rows: slice, length: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Returns the additive mask [n, length]: row p sees key j where p - window < j <= p."""
    positions = meta.position_ids[rows]
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    if window is not None:
        seen &= keys >= meta.first_keys(window)[rows, None]
    return torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill_(
        ~seen, float("-inf")
    )
