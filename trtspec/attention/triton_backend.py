"""The attention backend whose kernels are Triton's and, on Hopper, those of `csrc/`.

It only chooses. Rows of generations go to `triton_generations.py`, rows of contexts to
`triton_contexts.py`, latent attention to `mla.py`, and heads that none of them can hold to torch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from .base import CachedLayer
from .mla import latent_attention
from .split_kv import Tables
from .tiles import context_tiles
from .torch_sdpa import TorchAttention
from .triton_contexts import context_attention, tile_size
from .triton_generations import most_rows, paged_attention

FEW_ROWS = 8
"""Rows of a lone context in a captured pass that are attended as a generation's.

They are what the prefix cache leaves of a long prompt: few rows that see many keys. Unused ones are
at position 0, and see its key.
"""
CONTIGUOUS = torch.contiguous_format


class TritonAttention(TorchAttention):
    name: ClassVar[str] = "triton"
    lengths_on_device: ClassVar[bool] = True
    contexts_on_device: ClassVar[bool] = True

    def _attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        if cached.is_latent:
            return latent_attention(q, meta, cached)
        rows, size = meta.num_context_tokens, tile_size(q, cached)
        is_padded = meta.last_context_rows is not None
        if rows and not size and is_padded:
            raise ConfigError(
                f"{q.shape[1]} query heads on {cached.kv_heads} KV heads are too many for a graph "
                "of prompts: set CudaGraphConfig(context_tokens=())."
            )
        if not rows or not size:
            return super()._attend(q, meta, cached)
        tables = Tables(blocks=meta.block_tables[cached.kv_group], positions=meta.position_ids)
        # Codes are left to the other kernel, which finds NaN in earlier rows of the pass.
        has_few_rows = meta.num_seqs == 1 and rows <= min(FEW_ROWS, size)
        if is_padded and has_few_rows and cached.k_scales is None:
            return paged_attention(q, cached, tables, rows)
        out = _zeroed(q, meta) if is_padded else torch.empty_like(q, memory_format=CONTIGUOUS)
        context_attention(q, cached, tables, context_tiles(meta, size), size, out)
        if meta.num_generations:
            self._write_generation(q[rows:], meta, cached, out[rows:])
        return out

    def _write_generation(
        self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer, out: Tensor
    ) -> None:
        """`_generation`, into `out`, just after the contexts' attention.

        Where one kernel serves all rows there is no copy, and it may run beside that.
        """
        rows = meta.rows_per_generation
        if rows <= most_rows(q, cached):
            cached, tables = self._tables_of_generations(meta, cached)
            paged_attention(q, cached, tables, rows, out, is_beside=True)
        else:
            out.copy_(self._generation(q, meta, cached))

    def _reads_packed(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> bool:
        return cached.is_latent or meta.rows_per_generation <= most_rows(q, cached)

    def _generation(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        rows, most = meta.rows_per_generation, most_rows(q, cached)
        if not most:
            return super()._generation(q, meta, cached)
        cached, tables = self._tables_of_generations(meta, cached)
        if rows <= most:
            return paged_attention(q, cached, tables, rows)
        # Long drafts, or wide heads of which many share keys: some rows of every request at a time.
        outs = []
        for start in range(0, rows, most):
            some = slice(start, start + most)
            part, of_part = q.view(-1, rows, *q.shape[1:])[:, some], tables.of_rows(rows, some)
            out = paged_attention(part.flatten(0, 1), cached, of_part, part.shape[1])
            outs.append(out.view(part.shape))
        return torch.cat(outs, dim=1).flatten(0, 1)

    def _tables_of_generations(
        self, meta: AttentionMetadata, cached: CachedLayer
    ) -> tuple[CachedLayer, Tables]:
        """Returns what kernels read for generations' rows, with the window that they apply."""
        rows = meta.rows_per_generation
        tables = Tables(
            blocks=meta.block_tables[cached.kv_group][meta.num_contexts :],
            positions=meta.position_ids[meta.num_context_tokens :],
            starts=None if meta.packed is None else meta.packed.starts,
        )
        if cached.window is not None and meta.window_position_ids is not None:
            firsts = meta.first_keys(cached.window)[meta.num_context_tokens :]
            tables = tables._replace(firsts=firsts)
            cached = cached._replace(window=cached.window + rows - 1)
        return cached, tables


def _zeroed(q: Tensor, meta: AttentionMetadata) -> Tensor:
    """Returns a tensor like q whose padding rows are zeros, so that they stay finite.

    They belong to no tile, so the layers of a pass take turns at one tensor.
    """
    key = "attention of prompts", q.shape, q.dtype
    if key not in meta.derived:
        meta.derived[key] = torch.zeros_like(q, memory_format=CONTIGUOUS)
    return meta.derived[key]
