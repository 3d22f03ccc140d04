"""Linear attention by the gated delta rule, in the layers of Qwen3-Next and Qwen3.5.

    normed inputs ─┬─▶ in_proj ─┬─ q, k, v ─▶ convolution ▸ delta rule ─▶ norm · silu(z) ─▶ out_proj
                   │            └─ z ─────────────────────────────────────┘
                   └─▶ gates_proj ─ strengths, decays ─▶ (delta rule)

With float weights `in_proj` is both products in one, if 16 divides their rows.
A layer keeps no keys: it has a matrix per head and slot (`ops/layer/delta_rule.py` has the formula,
and what becomes of rejected drafts).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.base import AttentionBackend
from ..attention.dense import DensePass
from ..distributed.parallel import Parallel
from ..errors import ConfigError
from ..layers.fused import TILE, Inputs, Norms, linear
from ..layers.linear import Linear
from ..metadata.attention import AttentionMetadata
from ..metadata.recurrent import DeltaMemory
from ..ops.layer.delta_rule import (
    Contexts,
    DeltaRows,
    DeltaWeights,
    Generations,
    HeadNorm,
    delta_contexts,
    norm_and_gate,
    places,
    read_generations,
)
from .config import DecoderConfig, LinearAttentionConfig
from .placement import Placement, beside


class GatedDeltaNet(nn.Module):
    """A layer's linear attention. Arguments as of `Attention`; there is no rotation, and nothing
    of the KV cache. Convolution, decays and their biases stay in float32."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int):
        super().__init__()
        sizes = config.part_of_layer(layer).linear_attention
        assert sizes is not None
        self.sizes, self.index = sizes, config.linear_layers.index(layer)
        self.parallel, size, heads = config.parallel, config.hidden_size, sizes.num_value_heads
        shard = self.parallel.heads()
        in_size = sizes.conv_size + sizes.value_size
        self.in_proj = Linear(size, in_size, bias=False, shard=shard)
        self.gates_proj: Linear | None = Linear(size, 2 * heads, bias=False, shard=shard)
        self.out_proj = Linear(
            sizes.value_size, size, False, self.parallel.heads(1), self.parallel.comm
        )
        self.conv1d = _parameter(sizes.conv_size, 1, sizes.conv_taps)
        self.a_log, self.dt_bias = _parameter(heads), _parameter(heads)
        self.norm, self.eps = _parameter(sizes.value_head_dim), config.rms_norm_eps

    def forward(
        self,
        inputs: Inputs,
        norms: Norms,
        residual: Tensor | None,
        rope: Any,
        meta: AttentionMetadata | DensePass,
        in_place: bool = True,
    ) -> Tensor:
        """residual + linear attention over the normed inputs, [T, D]."""
        sizes = self.sizes.conv_size, self.sizes.value_size
        mixed, z, gates = linear(inputs, self.in_proj, norms).tensor_split(
            (sizes[0], sum(sizes)), dim=1
        )
        if self.gates_proj is not None:
            gates = linear(inputs, self.gates_proj, norms)
        rows, norm = DeltaRows(mixed, gates), HeadNorm(z, self.norm, self.eps)
        if isinstance(meta, DensePass):
            out = norm_and_gate(self._read_documents(rows, meta), *norm)
        else:
            out = self._read(rows, norm, meta)
        return linear((out,), self.out_proj, residual=residual, in_place=in_place)

    def _read(self, rows: DeltaRows, norm: HeadNorm, meta: AttentionMetadata) -> Tensor:
        states, count, contexts = meta.recurrent, meta.num_context_tokens, meta.num_contexts
        if states is None:
            raise ConfigError(
                "AttentionMetadata.recurrent is None, and this model has linear attention. Give "
                "what RecurrentStates.begin_pass returns (trtspec.state.recurrent)."
            )
        memory, outs = states.layers[self.index], []
        if contexts:
            requests = Contexts(
                slots=states.slots[:contexts],
                last_rows=meta.ends_of_contexts(),
                positions=meta.position_ids[:count],
            )
            of_contexts = DeltaRows(*(x[:count] for x in rows))
            out = delta_contexts(of_contexts, self.weights, memory, requests)
            outs.append(norm_and_gate(out, *norm.of_rows(slice(count))))
        if meta.num_generations:
            slots = states.slots[contexts:]
            generations = Generations(slots, states.firsts, states.taken_in)
            of_generations, behind = DeltaRows(*(x[count:] for x in rows)), slice(count, None)
            outs.append(
                read_generations(
                    of_generations, self.weights, memory, generations, norm.of_rows(behind)
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _read_documents(self, rows: DeltaRows, dense: DensePass) -> Tensor:
        """Reads whole sequences, each document of which begins with zeros."""
        last_rows, positions = dense.documents
        sizes, count = self.sizes, last_rows.shape[0]
        memory = empty_memory(sizes, count, sizes.conv_taps, rows.mixed)
        slots = torch.arange(count, device=positions.device)
        return delta_contexts(rows, self.weights, memory, Contexts(slots, last_rows, positions))

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv1d.data, self.a_log.data, self.dt_bias.data)

    def arrange(self) -> None:
        """Arranges loaded weights as they are read, unless that was done before: `conv1d` [W, C] of
        a checkpoint's [C, 1, W], and the gates' rows behind those of `in_proj`."""
        if self.conv1d.dim() == 3:
            turned = self.conv1d.data[:, 0].t().contiguous()
            self.conv1d = nn.Parameter(turned, requires_grad=False)
        first, second = self.in_proj, self.gates_proj
        if second is None or first.weight is None or second.weight is None or first.fp8 is not None:
            return
        if (first.out_features + second.out_features) % TILE == 0:  # what kernels make at a time
            weight = torch.cat([first.weight.data, second.weight.data])
            first.weight = nn.Parameter(weight, requires_grad=False)
            first.out_features, self.gates_proj = len(weight), None

    def placements(self, name: str) -> dict[str, Placement]:
        """Returns the placement of each tensor; the checkpoint's module is `linear_attn`. A rank
        reads all of `in_proj` and takes its heads of each kind."""
        sizes, size = self.sizes, self.in_proj.in_features
        rows = HeadRows(sizes, self.parallel)
        if sizes.is_grouped:
            parts = [
                ("in_proj_qkvz", "in_proj", 0, rows.of_groups()),
                ("in_proj_ba", "gates_proj", 0, rows.gates_of_groups()),
            ]
        else:
            heads = sizes.num_value_heads
            parts = [
                ("in_proj_qkv", "in_proj", 0, rows.of_convolution()),
                ("in_proj_z", "in_proj", sizes.conv_size, rows.of_values()),
                ("in_proj_b", "gates_proj", 0, rows.of_heads()),
                ("in_proj_a", "gates_proj", heads, rows.of_heads()),
            ]
        found = {}
        for part, module, start, (order, full) in parts:
            shape = len(order), size
            place = Placement(f"{name}.{module}", "weight", start, shape, order, full)
            found[f"{part}.weight"] = place
        for part, leaf, (order, full) in (
            ("conv1d.weight", "conv1d", rows.of_convolution()),
            ("A_log", "a_log", rows.of_heads()),
            ("dt_bias", "dt_bias", rows.of_heads()),
        ):
            shape = tuple(getattr(self, leaf).shape)
            found[part] = Placement(name, leaf, 0, shape, order, full, dtype=torch.float32)
        cut, columns = self.out_proj.shard.source(sizes.value_size), (size, sizes.value_size)
        found["out_proj.weight"] = Placement(f"{name}.out_proj", "weight", 0, columns, cut=cut)
        found["norm.weight"] = Placement(name, "norm", 0, (sizes.value_head_dim,))
        return {beside(name, f"linear_attn.{part}"): place for part, place in found.items()}


class HeadRows:
    """Which rows of a checkpoint's tensors a rank takes, in which order, and of how many.

    Args:
        sizes: of this rank's part.
    """

    def __init__(self, sizes: LinearAttentionConfig, parallel: Parallel):
        self.sizes, self.ranks = sizes, parallel.head_ranks
        self.rank = parallel.rank if self.ranks > 1 else 0

    def of_heads(self) -> tuple[Tensor, int]:
        """Of a row for each value head."""
        return self._taken([self._heads(self.sizes.num_value_heads, 1)])

    def of_values(self) -> tuple[Tensor, int]:
        return self._taken([self._heads(self.sizes.num_value_heads, self.sizes.value_head_dim)])

    def of_convolution(self) -> tuple[Tensor, int]:
        """Of queries, keys and values of all heads, one kind after the other."""
        sizes = self.sizes
        keys = self._heads(sizes.num_key_heads, sizes.key_head_dim)
        return self._taken([keys, keys, self._heads(sizes.num_value_heads, sizes.value_head_dim)])

    def of_groups(self) -> tuple[Tensor, int]:
        """Of q, k, v and z of each key head, which are put together by kind."""
        sizes, values = self.sizes, self.sizes.value_size // self.sizes.num_key_heads
        return self._by_kind([sizes.key_head_dim, sizes.key_head_dim, values, values])

    def gates_of_groups(self) -> tuple[Tensor, int]:
        """Of strengths and decays of each key head's values, in the same way."""
        shared = self.sizes.num_value_heads // self.sizes.num_key_heads
        return self._by_kind([shared, shared])

    def _by_kind(self, parts: list[int]) -> tuple[Tensor, int]:
        groups, full = self._heads(self.sizes.num_key_heads, sum(parts))
        kinds = groups.view(-1, sum(parts)).split(parts, dim=1)
        return torch.cat([kind.flatten() for kind in kinds]), full

    def _heads(self, count: int, size: int) -> tuple[Tensor, int]:
        """Returns the rows of this rank's `count` heads, and the number of all ranks' rows."""
        first = self.rank * count * size
        return torch.arange(first, first + count * size, device="cpu"), self.ranks * count * size

    @staticmethod
    def _taken(kinds: list[tuple[Tensor, int]]) -> tuple[Tensor, int]:
        found, before = [], 0
        for rows, full in kinds:
            found.append(rows + before)
            before += full
        return torch.cat(found), before


def empty_memory(
    sizes: LinearAttentionConfig, slots: int, places: int, like: Tensor
) -> DeltaMemory:
    """Returns what one layer keeps of some slots, with anything in it.

    Args:
        places: R, the rows that each slot keeps.
        like: has the dtype of those rows, and the device.
    """
    heads = sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
    return DeltaMemory(
        matrices=like.new_empty(slots, *heads, dtype=torch.float32),
        mixed=like.new_empty(slots, places, sizes.conv_size),
        gates=like.new_empty(slots, places, 2 * sizes.num_value_heads),
    )


def allocate_memory(
    config: DecoderConfig, num_slots: int, max_draft_len: int, like: Tensor
) -> tuple[DeltaMemory, ...]:
    """Returns what all such layers of a model keep of S slots and one scratch slot, zeroed.

    Args:
        num_slots: S, with rows for copies of them.
        max_draft_len: K, the most drafts of a pass.
        like: as of `empty_memory`.
    """
    found = []
    for layer in config.linear_layers:
        sizes = config.part_of_layer(layer).linear_attention
        assert sizes is not None
        count = places(max_draft_len, sizes.conv_taps)
        found.append(empty_memory(sizes, num_slots + 1, count, like))
        for tensor in found[-1]:
            tensor.zero_()
    return tuple(found)


def bytes_of_memory(config: DecoderConfig, num_slots: int, max_draft_len: int, like: Tensor) -> int:
    """Returns the bytes of what `allocate_memory` returns."""
    layers = allocate_memory(config, num_slots, max_draft_len, like.new_empty(0, device="meta"))
    return sum(tensor.nbytes for memory in layers for tensor in memory)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
