"""One decoder for all families of `checkpoints/families/`, over a paged KV cache.

q, k, v are one matrix and gate, up another; `checkpoints/weights.py` maps the checkpoint's names.
The residual stream has the model's dtype, as in transformers.

A layer has four products. `layers/fused.py` computes each as one kernel where it can, with the norm
before it. So a norm is not called here but handed down to the product that reads its output:

    hidden [T, D] ──┬─► input_layernorm ─► qkv_proj ─► RoPE, cache write ─► attention ─► o_proj ─┐
                    └──────────────────────────── residual ──────────────────────────────────► + ┘
    hidden [T, D] ──┬─► post_attention_layernorm ─► gate_up_proj ─► silu(gate) · up ─► down_proj ┐
                    └──────────────────────────── residual ──────────────────────────────────► + ┘

    inputs    a tuple: (hidden,), or two tensors side by side (an EAGLE-3 layer, an MTP projection)
    norms     as many as inputs, applied inside the product; () if the inputs are normed already
    residual  added by the last product; None adds nothing
    in_place  the sum takes the residual's memory: `hidden` is the same tensor through all layers

So a layer's output must be copied to be kept (`HiddenStateCapture`) before the next layer runs. The
last product writes the copy where it can (`copy_to`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.base import AttentionBackend, CachedLayer
from ..attention.dense import DensePass
from ..attention.images import attend
from ..distributed.comm import ALONE
from ..distributed.logits import ShardedLogits
from ..layers.embedding import Embedding, embed
from ..layers.fused import Inputs, Norms, gated_mlp, linear, qkv_rope_and_write
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.vocabulary import sharded, vocabulary_head
from ..metadata.attention import AttentionMetadata, KeptRows
from ..metadata.embeds import RowEmbeds
from ..ops.layer.activation import gate_and_mul
from ..ops.layer.copy import copy_rows
from ..ops.layer.norm import add_normed
from ..ops.layer.rope import (
    CacheWrite,
    KeysAndValues,
    Rope,
    apply_rope,
    rope_and_write,
    write_layers,
)
from ..ops.step.rows import draft_step, gather_rows
from ..state.kv_cache import KVGroupSpec
from .config import DecoderConfig
from .gated_delta import GatedDeltaNet
from .kv_layout import kv_group_specs, kv_locations
from .mla import MLAttention
from .moe import MoE, MoEBesideMLP
from .per_layer import PerLayerGate, PerLayerInputs
from .query_attention import QueryAttention
from .rope import RopeTables, rotation_order


class Attention(nn.Module):
    """Self-attention; `input_size` is what q, k and v are made from, by default hidden_size.

    `kv_group` is the model's first, see `kv_layout.py`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        backend: AttentionBackend,
        kv_group: int,
        input_size: int | None = None,
    ):
        super().__init__()
        location = kv_locations(config)[layer]
        self.layer, self.backend = layer, backend
        self.kv_group, self.cache_layer = kv_group + location.group, location.index
        self.sanitize_kv = False
        parallel, num_kv_heads = config.parallel, config.of_layer(layer).num_kv_heads
        self.window, config = config.window(layer), config.part_of_layer(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.head_order = config.head_dim, rotation_order(config)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.attention_sink_bias: nn.Parameter | None = None  # public heads' name of the sinks
        self.sinks_name = config.sinks_name
        self.shard = parallel.heads()  # of the sinks
        if config.attention_sinks:
            sinks = torch.empty(config.num_heads)
            self.attention_sink_bias = nn.Parameter(sinks, requires_grad=False)
        self.norms_values = config.value_norm
        self.images_attend_both_ways = config.images_attend_both_ways
        self.gates_output = config.output_gate
        qkv = (self.num_q_outputs + 2 * config.num_kv_heads) * config.head_dim
        size, queries = config.hidden_size, config.num_heads * config.head_dim
        self.qkv_proj = Linear(input_size or size, qkv, config.qkv_bias, parallel.heads())
        self.kv_shard = parallel.kv_shard(num_kv_heads)
        self.o_proj = Linear(queries, size, config.o_bias, parallel.heads(1), parallel.comm)
        self.g_proj: Linear | None = None
        if config.head_gate:
            self.g_proj = Linear(size, config.num_heads, bias=False, shard=parallel.heads())
        self.q_norm = self.k_norm = None
        self.norms_all_heads = config.norms_all_heads
        if config.qk_norm:
            together = (config.num_heads, config.num_kv_heads) if self.norms_all_heads else (1, 1)
            norm = config.rms_norm_eps, config.norm_offset
            self.q_norm, self.k_norm = (RMSNorm(n * config.head_dim, *norm) for n in together)

    def forward(
        self,
        inputs: Inputs,
        norms: Norms,
        residual: Tensor | None,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        in_place: bool = True,
        kept: KeptRows | None = None,
    ) -> Tensor:
        """residual + attention over the normed inputs, [T, D].

        Args:
            inputs: of [T, input_size] together, before their `norms`.
            residual: None adds nothing.
            in_place: the sum takes the residual's memory.
            kept: returns these rows alone, [B, D], where `keeps_rows`. It needs a residual.
        """
        gate: Tensor | None = None
        if isinstance(meta, DensePass) or self.norms_all_heads or self.gates_output:
            outputs = linear(inputs, self.qkv_proj, norms)
            if self.gates_output:
                gate = outputs[:, : self.num_heads * self.head_dim]
                outputs = outputs[:, self.num_heads * self.head_dim :]
            heads = self._heads(outputs, self.num_heads)
            if isinstance(meta, DensePass):
                out = self._attend_densely(heads, rope, meta)
            else:
                to = CacheWrite.of(meta, self.kv_group, self.cache_layer, self.sanitize_kv)
                of_heads = self.qk_norms, self.norms_values
                q = rope_and_write(heads, rope, self.num_heads, to, *of_heads)
                out = self._attend_cached(q, meta)
        else:
            q = self._queries(inputs, norms, rope, meta)
            if kept is not None:
                assert residual is not None and self.keeps_rows
                own, residual = gather_rows(kept.rows, q.flatten(1), residual)
                q, meta = own.view(-1, *q.shape[1:]), kept.meta
            out = self._attend_cached(q, meta)
        if self.g_proj is not None:
            gate = linear(inputs, self.g_proj, norms)  # [T, Hq]
        if gate is not None:
            scale = gate.sigmoid().view(len(gate), self.num_heads, -1)
            out = out.view(-1, self.num_heads, self.head_dim) * scale
        out = out.reshape(-1, self.num_heads * self.head_dim)
        return linear((out,), self.o_proj, residual=residual, in_place=in_place)

    @property
    def keeps_rows(self) -> bool:
        """Whether some rows alone can be computed after all rows' keys and values."""
        return not (self.norms_all_heads or self.gates_output) and self.g_proj is None

    @property
    def qk_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of queries and keys, by head."""
        if self.q_norm is None or self.k_norm is None or self.norms_all_heads:
            return None
        return self.q_norm, self.k_norm

    def _heads(self, outputs: Tensor, q_heads: int) -> Tensor:
        """[T, (q_heads + 2 * Hkv) * D] -> [T, q_heads + 2 * Hkv, D], after norms over all heads."""
        if self.norms_all_heads and self.q_norm is not None and self.k_norm is not None:
            keys = self.num_kv_heads * self.head_dim
            q, k, v = outputs.split([q_heads * self.head_dim, keys, keys], dim=-1)
            normed = self.q_norm(q) if q_heads else q
            outputs = torch.cat((normed, self.k_norm(k), v), dim=-1)
        return outputs.view(len(outputs), -1, self.head_dim)

    @property
    def num_q_outputs(self) -> int:
        """Returns how many heads of `qkv_proj` are gates, if there are some, and queries."""
        return (1 + self.gates_output) * self.num_heads

    def write_heads(self, kv: Tensor, rope: Rope, meta: AttentionMetadata) -> None:
        """Writes keys and values to the cache: kv [T, 2 * Hkv * D], before norms and RoPE."""
        write_layers((self.keys_and_values(kv, rope, meta),))

    def keys_and_values(self, kv: Tensor, rope: Rope, meta: AttentionMetadata) -> KeysAndValues:
        """Returns what `write_heads` writes, for `write_layers`."""
        to = CacheWrite.of(meta, self.kv_group, self.cache_layer, self.sanitize_kv)
        return KeysAndValues(self._heads(kv, 0), rope, to, self.qk_norms, self.norms_values)

    def write_kv(self, inputs: Inputs, norms: Norms, rope: Rope, meta: AttentionMetadata) -> None:
        """Writes the keys and values of rows that attend to nothing; arguments as of `forward`."""
        first = self.num_q_outputs * self.head_dim  # behind the queries
        projection = self.qkv_proj.outputs_from(first)
        if projection is None:
            kv = linear(inputs, self.qkv_proj, norms)[:, first:].contiguous()
        else:
            kv = linear(inputs, projection, norms)
        self.write_heads(kv, rope, meta)

    def _queries(self, inputs: Inputs, norms: Norms, rope: Rope, meta: AttentionMetadata) -> Tensor:
        """Returns the rotated queries, [T, Hq, D]; writes keys and values."""
        to = CacheWrite.of(meta, self.kv_group, self.cache_layer, self.sanitize_kv)
        of_heads = self.qk_norms, self.norms_values
        return qkv_rope_and_write(inputs, self.qkv_proj, norms, rope, self.num_heads, to, *of_heads)

    def _attend_cached(self, q: Tensor, meta: AttentionMetadata) -> Tensor:
        cached = CachedLayer.of(
            meta,
            self.kv_group,
            self.cache_layer,
            self.window,
            self.scale,
            self.softcap,
            self.attention_sink_bias,
        )
        return attend(self.backend, q, meta, cached, self.images_attend_both_ways)

    def _attend_densely(self, qkv: Tensor, rope: Rope, dense: DensePass) -> Tensor:
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        qk_norms = self.qk_norms
        if qk_norms is not None:
            q, k = qk_norms[0](q), qk_norms[1](k)
        if self.norms_values:
            assert qk_norms is not None
            v = F.rms_norm(v, v.shape[-1:], eps=qk_norms[1].eps)
        cos_sin = rope.rotation(qkv.dtype)
        q, k = apply_rope(q, *cos_sin), apply_rope(k, *cos_sin)
        return dense.attend(
            q, k, v, self.layer, self.window, self.scale, self.softcap, self.attention_sink_bias
        )


def keep_kv_finite(drafter: nn.Module) -> None:
    """Makes a drafter write finite keys and values, whatever it computes.

    A drafter that overflows must not leave NaN in KV blocks that other requests get next. A masked
    read multiplies it by zero, which is NaN again. (A target's NaN fails its request instead.)
    """
    for module in drafter.modules():
        if isinstance(module, Attention | MLAttention):
            module.sanitize_kv = True


class MLP(nn.Module):
    """A gated MLP.

    Args:
        config: of this rank's part of the layer (`part_of_layer`).
        sums: whether `forward` adds up what the ranks return; else their parts are returned.
    """

    def __init__(self, config: DecoderConfig, sums: bool = True):
        super().__init__()
        inner, parallel = config.intermediate_size, config.parallel
        self.intermediate_size, size = inner, config.hidden_size
        self.gate_up_proj = Linear(size, 2 * inner, config.mlp_bias, parallel.shard())
        ranks = parallel.comm if sums else ALONE
        self.down_proj = Linear(inner, size, config.mlp_bias, parallel.shard(1), ranks)
        self.gate_and_mul = gate_and_mul(config.activation, config.swiglu_limit)

    def forward(
        self, hidden: Tensor, norm: RMSNorm | None, adds: bool = True, copy_to: Tensor | None = None
    ) -> Tensor:
        """hidden + MLP(norm(hidden)), [T, D], in hidden's memory; `adds=False` without hidden.
        `copy_to` [T, D] takes it too."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return gated_mlp(hidden, gate_up, down, norm, self.gate_and_mul, adds, copy_to)


def feed_forward(config: DecoderConfig, layer: int) -> MLP | MoE | MoEBesideMLP:
    """Returns what the layer has behind its attention: an MLP or a mixture of experts."""
    moe, parallel, config = config.moe_of_layer(layer), config.parallel, config.part_of_layer(layer)
    if moe is None:
        return MLP(config)
    if moe.beside_mlp:
        norm = config.rms_norm_eps, config.norm_offset
        return MoEBesideMLP(moe, config.hidden_size, MLP(config), *norm, parallel)
    shared = None
    if moe.shared_intermediate_size:
        inner, limit = moe.shared_intermediate_size // parallel.size, moe.shared_swiglu_limit
        shared_config = replace(config, intermediate_size=inner, swiglu_limit=limit, mlp_bias=False)
        shared = MLP(shared_config, sums=False)  # the mixture adds up both at once
    return MoE(moe, config.hidden_size, shared, parallel)


def attention_class(layer_config: DecoderConfig) -> Any:
    """Returns the attention module of a layer with this config."""
    if layer_config.linear_attention is not None:
        return GatedDeltaNet
    if layer_config.reads_kv_of is not None:
        return QueryAttention
    return Attention if layer_config.mla is None else MLAttention


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int):
        super().__init__()
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.input_layernorm: RMSNorm | None = RMSNorm(*norm)
        self.self_attn = attention_class(config.of_layer(layer))(config, layer, backend, kv_group)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = feed_forward(config, layer)

    def forward(
        self,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        copy_to: Tensor | None = None,
    ) -> Tensor:
        """hidden, the residual stream [T, D] -> the stream after this layer, in the same memory.

        `copy_to` [T, D] takes it too, of layers that `copies_output`.
        """
        hidden = self.self_attn((hidden,), self._input_norms, hidden, rope, meta)
        if copy_to is None:
            return self.mlp(hidden, self.post_attention_layernorm)
        return self.mlp(hidden, self.post_attention_layernorm, copy_to=copy_to)

    @property
    def copies_output(self) -> bool:
        """Whether the last product can write a copy of its sum."""
        return type(self) is DecoderLayer and isinstance(self.mlp, MLP)

    def write_kv(self, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> None:
        """Writes the keys and values of hidden [T, D], and computes nothing else."""
        self.self_attn.write_kv((hidden,), self._input_norms, rope, meta)

    @property
    def _input_norms(self) -> Norms:
        return () if self.input_layernorm is None else (self.input_layernorm,)


class SandwichLayer(DecoderLayer):
    """Gemma's layer: the outputs of attention and MLP are normed before they are added.

    `per_layer_input` [T, P] is this layer's part of `PerLayerInputs`, where the model has them.
    """

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int):
        super().__init__(config, layer, backend, kv_group)
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)
        self.layer_scalar: nn.Parameter | None = None
        if config.layer_scalar:
            self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.per_layer = PerLayerGate(config) if config.per_layer_input_size else None

    def forward(
        self,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:
        assert self.input_layernorm is not None
        out = self.self_attn((hidden,), (self.input_layernorm,), None, rope, meta)
        hidden = add_normed(hidden, out, self.post_attention_layernorm)
        out = self.mlp(hidden, self.pre_feedforward_layernorm, adds=False)
        scalar = None if self.per_layer else self.layer_scalar
        hidden = add_normed(hidden, out, self.post_feedforward_layernorm, scalar)
        if self.per_layer is None:
            return hidden
        return self.per_layer(hidden, per_layer_input, self.layer_scalar)


class PostNormLayer(DecoderLayer):
    """OLMo-2's layer: the outputs of attention and MLP are normed, their inputs are not."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int):
        super().__init__(config, layer, backend, kv_group)
        self.input_layernorm = None
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(
        self,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        copy_to: Tensor | None = None,
    ) -> Tensor:
        assert copy_to is None  # it does not `copies_output`
        out = self.self_attn((hidden,), (), None, rope, meta)
        hidden = add_normed(hidden, out, self.post_attention_layernorm)
        out = self.mlp(hidden, None, adds=False)
        return add_normed(hidden, out, self.post_feedforward_layernorm)


class HiddenStateCapture(Protocol):
    """Has room for copies of the layers' outputs it wants (`SpecMetadata` is one)."""

    def places_of_layer(self, layer_id: int, rows: int, size: int) -> Sequence[Tensor]: ...


class Decoder(nn.Module):
    """Embedding, layers, final norm and lm_head. `load_weights` fills the parameters.

    `kv_group` is the first of the metadata's KV groups that the layers live in: 0 for a target, for
    a draft model that runs inside the same step the one after the target's last. `num_positions`
    is how many the rotary tables have; None is max_position_embeddings.
    """

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        kv_group: int = 0,
        num_positions: int | None = None,
    ):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.per_layer_inputs = PerLayerInputs(config) if config.per_layer_input_size else None
        layer_class = SandwichLayer if config.sandwich_norms else DecoderLayer
        layer_class = PostNormLayer if config.post_norms else layer_class
        self.layers = nn.ModuleList(
            layer_class(config, i, backend, kv_group) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.lm_head = vocabulary_head(config.hidden_size, config.vocab_size, config.parallel)
        self.rope_tables = RopeTables(config, num_positions)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        meta: AttentionMetadata | DensePass,
        capture: HiddenStateCapture | None = None,
        inputs_embeds: RowEmbeds | None = None,
        last_rows: Tensor | None = None,
    ) -> Tensor:
        """input_ids, position_ids [T] -> hidden states after the final norm [T, D].

        `capture` keeps the residual stream after the layers it wants. `inputs_embeds` are rows
        whose embedding is given. With `last_rows`, [C] int64, of contexts alone, it returns those
        rows, [C, D]: of the others the last layer writes keys and values, and computes nothing
        else. That is where `ends_by_rows`; the last layer is not captured then.
        """
        config = self.config
        hidden = embed(
            input_ids, self.embed_tokens, config.vocab_size, config.embedding_scale, inputs_embeds
        )
        ropes = self.rope_tables.at(position_ids, meta)
        layer_inputs: Tensor | None = None  # [T, L, P]
        if self.per_layer_inputs is not None:
            layer_inputs = self.per_layer_inputs(input_ids, hidden, inputs_embeds)
        for i, layer in enumerate(self.layers):
            if last_rows is not None and i == len(self.layers) - 1:
                assert isinstance(meta, AttentionMetadata)
                return self.norm(self._last_layer(hidden, input_ids, ropes[i], meta, last_rows))
            copies = () if capture is None else capture.places_of_layer(i, *hidden.shape)
            options: dict[str, Tensor] = {}
            if layer_inputs is not None:
                options["per_layer_input"] = layer_inputs[:, i]
            if copies and layer.copies_output:
                options["copy_to"], *copies = copies
            hidden = layer(hidden, ropes[i], meta, **options)
            for copy in copies:
                copy_rows(hidden, copy)
        return self.norm(hidden)

    @property
    def ends_by_rows(self) -> bool:
        """Whether the last layer can be computed for some rows alone."""
        layer = self.layers[-1]
        return type(layer) is DecoderLayer and type(layer.self_attn) is Attention

    def _last_layer(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        rows: Tensor,
    ) -> Tensor:
        """Returns the stream after the last layer of one row of each context, [C, D].

        That row's keys and values are written twice: with the others', and by the layer.
        """
        layer = self.layers[-1]
        assert isinstance(layer, DecoderLayer)
        layer.write_kv(hidden, rope, meta)
        (kept,) = gather_rows(rows, hidden)
        tokens, positions = input_ids[rows][:, None], meta.position_ids[rows][:, None]
        _, own = draft_step(meta, tokens, positions, 0)
        kept_rope = self.rope_tables.at(own.position_ids, own)[-1]
        return cast(Tensor, layer(kept, kept_rope, own))

    def keep_logits(self, count: int) -> None:
        """Leaves out the logits of tokens from `count` on. Call it before weights are packed."""
        head = self.lm_head
        assert head.weight is not None
        if head.shard.count > 1:
            head.shard = replace(head.shard, full=min(count, self.config.vocab_size))
            return
        head.weight = nn.Parameter(head.weight.data[:count], requires_grad=False)
        head.out_features = head.weight.shape[0]

    def kv_group_specs(self, dtype: torch.dtype) -> list[KVGroupSpec]:
        """The KV groups that the layers need, in the order that their numbers mean."""
        return kv_group_specs(self.config, dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor | ShardedLogits:
        """hidden [R, D] -> logits [R, V], model dtype; with several ranks, this one's part."""
        logits, cap = linear((hidden,), self.lm_head), self.config.logits_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return sharded(logits, self.lm_head, self.config.parallel)
