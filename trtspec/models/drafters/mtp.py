"""Multi-token-prediction layers, of the target's own kind.

    x   = eh_proj(cat(enorm(e), hnorm(h)))    e = embedding of the next token; h as given
    out = decoder layer(x)
    logits = lm_head(norm(out))
    feedback:  norm(out), or with norm_output=False `out`

`h` is the target's final hidden state at depth 0 and the previous depth's output after that
(DeepSeek-V3, section 2.2). MiMo concatenates the other way round, GLM-4-MoE feeds back `out`, and
Qwen3-Next has one eh_proj, enorm, hnorm and norm for all its layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...attention.dense import DensePass
from ...errors import CheckpointError
from ...layers.embedding import Embedding, embed
from ...layers.fused import linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...layers.vocabulary import vocabulary_head
from ...metadata.attention import AttentionMetadata
from ...metadata.embeds import RowEmbeds
from ...ops.layer.rope import Rope
from ..config import DecoderConfig
from ..decoder import DecoderLayer
from .base import FeedbackHead, HeadConfig, HeadTarget


class MTPLayer(DecoderLayer):
    """One depth: a decoder layer with its input projection, final norm and perhaps own ends."""

    def __init__(self, config: HeadConfig, index: int, backend: AttentionBackend, kv_group: int):
        decoder = config.decoder
        super().__init__(decoder, index, backend, kv_group)
        size, norm = decoder.hidden_size, (decoder.rms_norm_eps, decoder.norm_offset)
        self.enorm, self.hnorm = RMSNorm(size, *norm), RMSNorm(size, *norm)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.norm = RMSNorm(size, *norm)
        self.embed_tokens: Embedding | None = None
        self.lm_head: Linear | None = None
        if config.own_embedding:
            self.embed_tokens = Embedding(decoder.vocab_size, size)
        if config.own_lm_head:
            self.lm_head = vocabulary_head(size, decoder.vocab_size, decoder.parallel)
        self.hidden_first = config.hidden_first

    def forward(  # type: ignore[override]
        self, embeddings: Tensor, hidden: Tensor, rope: Rope, meta: AttentionMetadata | DensePass
    ) -> tuple[Tensor, Tensor]:
        """embeddings, hidden [T, H] -> (the final norm of the layer's output, the output)."""
        out = super().forward(self.joined(embeddings, hidden), rope, meta)
        return self.norm(out), out

    def joined(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns what the decoder layer reads, [T, H]."""
        inputs, norms = (embeddings, hidden), (self.enorm, self.hnorm)
        if self.hidden_first:
            inputs, norms = inputs[::-1], norms[::-1]
        return linear(inputs, self.eh_proj, norms)


class MTPHead(FeedbackHead):
    """MTP layers, used once each by draft step ("vanilla") or the first one for all of them."""

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        ends = replace(config, own_embedding=False, own_lm_head=False)  # those are the layers'
        super().__init__(ends, num_positions, kv_group)
        self.layers = nn.ModuleList(
            MTPLayer(config, i, backend, kv_group) for i in range(config.decoder.num_layers)
        )

    def share(self, target: HeadTarget) -> None:
        super().share(target)
        self.shares_embedding = all(layer.embed_tokens is None for layer in self.layers)
        self.shares_lm_head = all(layer.lm_head is None for layer in self.layers)
        for layer in self.layers:
            layer.embed_tokens = layer.embed_tokens or target.embed_tokens
            layer.lm_head = layer.lm_head or target.lm_head

    def owners_of_ends(self) -> dict[str, nn.Module]:
        return {f"layers.{i}.": layer for i, layer in enumerate(self.layers)}

    def layer_of_step(self, step: int) -> MTPLayer:
        layer = self.layers[step % len(self.layers)]
        assert isinstance(layer, MTPLayer)
        return layer

    def lm_head_of_step(self, step: int) -> Linear:
        lm_head = self.layer_of_step(step).lm_head
        assert lm_head is not None
        return lm_head

    def write_kv_of_layer(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        inputs_embeds: RowEmbeds | None,
    ) -> None:
        layer = self.layer_of_step(0)
        embeddings = self.embed_for(layer, input_ids, inputs_embeds)
        layer.write_kv(layer.joined(embeddings, hidden), rope, meta)

    def embed_for(
        self, layer: MTPLayer, input_ids: Tensor, inputs_embeds: RowEmbeds | None
    ) -> Tensor:
        """[T] -> [T, H], by the layer's own embedding if it has one."""
        vocab = self.config.decoder.vocab_size
        return embed(input_ids, layer.embed_tokens, vocab, merged=inputs_embeds)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        layer = self.layer_of_step(step)
        embeddings = self.embed_for(layer, input_ids, inputs_embeds)
        rope = self.rope_tables.at(position_ids, attn_metadata)[step % len(self.layers)]
        normed, hidden = layer(embeddings, hidden_states, rope, attn_metadata)
        return normed, normed if self.config.norm_output else hidden


def mtp_decoder_config(target: DecoderConfig, num_layers: int) -> DecoderConfig:
    """Returns the decoder config of MTP layers, from their target's.

    MTP layer i has the window and the type that the target's lists say of layer n + i. Where the
    lists end at n, it has those that all of the target's layers have in common.

    Raises:
        CheckpointError: the lists end before the MTP layers do, and the target's layers differ.
    """
    first, moe = target.num_layers, target.moe
    if moe is not None:  # which layers are mixtures of experts goes by n + i too
        moe = replace(moe, first_k_dense_replace=max(0, moe.first_k_dense_replace - first))
    return replace(
        target,
        num_layers=num_layers,
        moe=moe,
        layer_windows=_of_mtp_layers(target, num_layers, "layer_windows"),
        layer_types=_of_mtp_layers(target, num_layers, "layer_types"),
    )


def _of_mtp_layers(target: DecoderConfig, count: int, name: str) -> tuple[Any, ...]:
    per_layer, first = getattr(target, name), target.num_layers
    found = per_layer[first : first + count]
    if len(found) == count or not per_layer:
        return found
    kinds = set(per_layer[:first])
    if len(kinds) > 1:
        raise CheckpointError(
            f"The target's layers are of several kinds ({name}: {list(per_layer)}), and its "
            f"config.json does not say which of them the {count} MTP layers are. Of such models "
            "Step-3.5 alone says so. Draft otherwise."
        )
    return tuple(kinds) * count
