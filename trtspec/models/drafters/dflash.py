"""DFlash heads, which draft a block of tokens in one pass from the target's own states.

    context   c = fc(cat of the captured target layers) at every row that the target has read;
              layer i's keys and values are those of hidden_norm(c), at the row's own position
    block     x = [embedding of the last token, of the mask token, …, of the mask token], at the
              positions from the last token's on; all layers, over context and block
    logits    lm_head(norm(x)) at the masks (at all rows of heads that sample from the anchor)

No attention and no MLP runs over the context: its keys and values need the target's states alone.
With `context_embeddings`, an option of ours, they need the token after each row too:

    layer i's keys and values are those of hidden_norm(c) + context_embedding_fc(norm(embedding))

So a row knows what followed it, as an EAGLE-3 head's does, and the head can copy that.

Inside a block rows see each other both ways, in layers for which the head's config says so.
DSpark heads add a bias by the token before (`markov.py`), and some say how likely each draft is to
be accepted (`confidence.py`). DFlash2 heads have convolutions along a
block's rows (`convolved.py`) and choose among each row's best tokens (`selector.py`).
Source: DFlash (z-lab), https://github.com/z-lab/dflash.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...attention.dense import DensePass, Keys
from ...distributed.logits import ShardedLogits
from ...layers.fused import Inputs, linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...metadata.attention import AttentionMetadata
from ...metadata.embeds import RowEmbeds
from ...ops.layer.rope import apply_rope, write_layers
from ..decoder import Attention, DecoderLayer
from .base import DraftHead, HeadConfig, HeadTarget
from .confidence import ConfidenceHead
from .convolved import ConvolvedLayer
from .markov import MarkovHead
from .selector import CandidateSelector


class DFlashHead(DraftHead):
    """A DFlash head of the Qwen3 kind."""

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        super().__init__(config, num_positions, kv_group)
        decoder, captured = config.decoder, len(config.layers_to_capture)
        norm = decoder.hidden_size, decoder.rms_norm_eps
        self.fc = Linear(captured * config.target_hidden_size, decoder.hidden_size, config.fc_bias)
        self.hidden_norm = RMSNorm(*norm)
        self.context_embedding_norm: RMSNorm | None = None
        self.context_embedding_fc: Linear | None = None
        if config.context_embeddings:
            self.context_embedding_norm = RMSNorm(*norm)
            self.context_embedding_fc = Linear(decoder.hidden_size, decoder.hidden_size, bias=False)
        layer_class: Any = DecoderLayer
        if all(config.block_convolution):
            layer_class = partial(ConvolvedLayer, convolution=config.block_convolution)
        self.layers = nn.ModuleList(
            layer_class(decoder, i, backend, kv_group) for i in range(decoder.num_layers)
        )
        self.norm = RMSNorm(*norm)
        self.embedding_scale = config.embedding_scale
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            sizes = decoder.vocab_size, config.draft_vocab_size, config.markov_rank
            self.markov_head = MarkovHead(
                config.markov_kind, (*sizes, decoder.hidden_size), decoder.parallel
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence_size:
            self.confidence_head = ConfidenceHead(config.confidence_size, config.confidence_bias)
        self.candidate_selector: CandidateSelector | None = None
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                decoder.vocab_size,
                decoder.hidden_size,
                config.selector_rank,
                config.selector_candidates,
            )
        self.context_kv: Linear | None = None  # copies, made by `prepare_context`

    def share(self, target: HeadTarget) -> None:
        super().share(target)
        if self.config.embedding_scale is None and not self.config.own_embedding:
            self.embedding_scale = target.config.embedding_scale

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor | ShardedLogits:
        logits, config = super().compute_logits(hidden, step), self.config
        if config.logit_scale == 1 and config.logit_softcap is None:
            return logits
        part = logits.part if isinstance(logits, ShardedLogits) else logits
        part = part * config.logit_scale
        if config.logit_softcap is not None:
            part = torch.tanh(part / config.logit_softcap) * config.logit_softcap
        return replace(logits, part=part) if isinstance(logits, ShardedLogits) else part

    def _attention(self, layer: int) -> Attention:
        attention = self.layers[layer].self_attn
        assert isinstance(attention, Attention)
        return attention

    @property
    def samples_from_anchor(self) -> bool:
        """Whether the last token's row proposes too."""
        return self.config.samples_from_anchor

    @property
    def reads_next_tokens(self) -> bool:
        """Whether a context row reads the token after it."""
        return self.config.context_embeddings

    @torch.no_grad()
    def scale_values(self) -> None:
        """Multiplies the weights that make values by the config's factor, which is 1 from then on.

        Each weight is rounded once more, as each value would be. In a value the weights' errors
        average out, so this is no less exact, and costs a pass nothing. Call it before
        `prepare_context`.
        """
        for i in range(self.num_layers):
            attention = self._attention(i)
            first = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
            for part in (attention.qkv_proj.weight, attention.qkv_proj.bias):
                if part is not None:
                    part[first:] *= self.config.value_scale
        self.config = replace(self.config, value_scale=1.0)

    @torch.no_grad()
    def prepare_context(self) -> None:
        """Copies all layers' weights of keys and values into one, by which a context is read.

        Those of the next tokens' embeddings stand to the left. Call it before the layers' own
        weights are packed.
        """
        weights, biases = [], []
        for i in range(self.num_layers):
            attention = self._attention(i)
            projection, queries = attention.qkv_proj, attention.num_heads * attention.head_dim
            assert projection.weight is not None
            weights.append(projection.weight[queries:])
            if projection.bias is not None:
                biases.append(projection.bias[queries:])
        weight = torch.cat(weights)
        if self.context_embedding_fc is not None:
            assert self.context_embedding_fc.weight is not None
            ahead = weight.float() @ self.context_embedding_fc.weight.float()
            weight = torch.cat([ahead.to(weight.dtype), weight], dim=1)
        self.context_kv = Linear.of(weight, torch.cat(biases) if biases else None)

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        return linear((hidden_states,), self.fc)

    @property
    def writes_kv_alone(self) -> bool:
        return True

    def write_kv(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        self.read_context(hidden_states, position_ids, attn_metadata, input_ids, inputs_embeds)

    def read_context(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        meta: AttentionMetadata,
        next_tokens: Tensor | None = None,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """Writes the keys and values of rows that the target has read, for all layers.

        Args:
            hidden_states: [T, n * Ht], as captured.
            position_ids: [T] int64.
            meta: of the target's pass.
            next_tokens: [T] int32 or int64, after each row, for heads that read them; anything
                after rejected rows. inputs_embeds: of those that have no embedding of their own.
        """
        inputs: Inputs = (self.project_target_hidden(hidden_states),)
        before: tuple[RMSNorm, ...] = (self.hidden_norm,)
        if self.context_embedding_norm is not None:
            assert next_tokens is not None, "the head reads the token after each row"
            inputs = self.embed_later(next_tokens, inputs_embeds), *inputs
            before = self.context_embedding_norm, *before
        rows = linear(inputs, self.context_kv, before)
        ropes = self.rope_tables.at(position_ids, meta)
        parts = enumerate(rows.chunk(self.num_layers, dim=-1))
        write_layers(
            tuple(self._attention(i).keys_and_values(kv, ropes[i], meta) for i, kv in parts)
        )

    def context_of(
        self, hidden_states: Tensor, position_ids: Tensor, next_tokens: Tensor
    ) -> list[Keys]:
        """Returns each layer's keys and values of a context, [T, Hkv, D] both; differentiable.

        Args:
            hidden_states: [T, n * Ht], as captured. position_ids: [T] int64.
            next_tokens: [T] int64, after each row.
        """
        states = self.hidden_norm(self.project_target_hidden(hidden_states))
        if self.context_embedding_fc is not None and self.context_embedding_norm is not None:
            embeddings = self.context_embedding_norm(self.embed(next_tokens))
            states = states + self.context_embedding_fc(embeddings)
        found = []
        for i, rope in enumerate(self.rope_tables.at(position_ids)):
            attention = self._attention(i)
            projection, queries = attention.qkv_proj, attention.num_heads * attention.head_dim
            assert projection.weight is not None, "the head's weights are packed"
            bias = None if projection.bias is None else projection.bias[queries:]
            rows = F.linear(states, projection.weight[queries:], bias)
            heads = rows.unflatten(-1, (2, attention.num_kv_heads, attention.head_dim))
            k, v = heads.unbind(1)
            k = k if attention.k_norm is None else attention.k_norm(k)
            found.append((apply_rope(k, *rope.rotation(k.dtype)), v))
        return found

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over blocks, the same number of rows for every request.

        Args:
            hidden_states: not read; the context is in the cache.
            attn_metadata: of the blocks, whose rows see earlier rows of their own; or a
                `BlockPass`, which knows what its rows see.
        """
        both_ways = attn_metadata
        if isinstance(attn_metadata, AttentionMetadata):
            both_ways = attn_metadata.seen_both_ways(windows_by_row=self.config.windows_by_row)
        hidden = self.embed(input_ids, inputs_embeds)
        ropes = self.rope_tables.at(position_ids, attn_metadata)
        for layer, rope, sees_ahead in zip(self.layers, ropes, self.config.sees_ahead, strict=True):
            hidden = layer(hidden, rope, both_ways if sees_ahead else attn_metadata)
        normed = self.norm(hidden)
        return normed, normed
