"""EAGLE-3 and EAGLE-1 draft heads.

EAGLE-3, at every draft step (H is the head's width):

    h   = fc(cat of the captured target layers)          step 0
        = the previous step's output                     later
    x   = cat(input_layernorm(e), hidden_norm(h))        [2H], e = embedding of the next token
    r   = h + attention(x)                               norm_before_residual: hidden_norm(h) + …
    out = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(out)); `out` is fed back       norm_output: norm(out) is

EAGLE-1 reads the target's final hidden states: out = layer(fc(cat(e, h))), logits = lm_head(out).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...attention.dense import DensePass
from ...layers.embedding import Embedded
from ...layers.fused import linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...metadata.attention import AttentionMetadata, KeptRows
from ...metadata.embeds import RowEmbeds
from ...ops.layer.rope import Rope
from ..config import DecoderConfig
from ..decoder import MLP, Attention, DecoderLayer
from .base import FeedbackHead, HeadConfig


class Eagle3Layer(nn.Module):
    """The head's first layer: attention over embedding and hidden state side by side."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        kv_group: int,
        norm_before_residual: bool,
    ):
        super().__init__()
        size, norm = config.hidden_size, (config.rms_norm_eps, config.norm_offset)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(size, *norm)
        self.hidden_norm = RMSNorm(size, *norm)
        self.self_attn = Attention(config, 0, backend, kv_group, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, *norm)
        self.mlp = MLP(config.part_of_layer(0))

    def forward(
        self,
        embeddings: Tensor | Embedded,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        kept: KeptRows | None = None,
    ) -> Tensor:
        """embeddings, hidden [T, H] -> the layer's output, of `kept` rows alone [B, H]."""
        residual = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        norms = self.input_layernorm, self.hidden_norm
        hidden = self.self_attn(
            (embeddings, hidden), norms, residual, rope, meta, in_place=False, kept=kept
        )
        return self.mlp(hidden, self.post_attention_layernorm)

    def write_kv(
        self, embeddings: Tensor, hidden: Tensor, rope: Rope, meta: AttentionMetadata
    ) -> None:
        """Writes keys and values, and computes nothing else; arguments as of `forward`."""
        norms = self.input_layernorm, self.hidden_norm
        self.self_attn.write_kv((embeddings, hidden), norms, rope, meta)


class Eagle3Head(FeedbackHead):
    """EAGLE-3 with every flag of its public checkpoints. Layers after the first are plain."""

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        super().__init__(config, num_positions, kv_group)
        decoder, captured = config.decoder, len(config.layers_to_capture)
        width = captured * config.target_hidden_size
        norm = decoder.rms_norm_eps, decoder.norm_offset
        self.input_norm = RMSNorm(width, *norm) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, *norm) for _ in range(captured))
            if config.fc_norm
            else None
        )
        self.fc = Linear(width, decoder.hidden_size, bias=config.fc_bias)
        first = Eagle3Layer(decoder, backend, kv_group, config.norm_before_residual)
        rest = [DecoderLayer(decoder, i, backend, kv_group) for i in range(1, decoder.num_layers)]
        self.layers = nn.ModuleList([first, *rest])
        self.norm = RMSNorm(decoder.hidden_size, *norm)
        self.register_buffer("mask_hidden", None, persistent=False)
        self.mask_hidden: Tensor | None  # [H], what a P-EAGLE head reads at its masks

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        if self.fc_norm is not None:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden_states = torch.cat(normed, dim=-1)
        return linear((hidden_states,), self.fc)

    def write_kv_of_layer(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        inputs_embeds: RowEmbeds | None,
    ) -> None:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        layer.write_kv(self.embed(input_ids, inputs_embeds), hidden, rope, meta)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
        kept: KeptRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As of `DraftHead`; where `keeps_rows`, it can return `kept` rows alone, [B, H]."""
        first, *others = self.rope_tables.at(position_ids, attn_metadata)
        embeddings = self.embed_later(input_ids, inputs_embeds)
        hidden = self.layers[0](embeddings, hidden_states, first, attn_metadata, kept)
        for layer, rope in zip(self.layers[1:], others, strict=True):
            hidden = layer(hidden, rope, attn_metadata)
        if self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden, hidden

    @property
    def keeps_rows(self) -> bool:
        """Whether a pass can return some rows alone."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        takes_kept = type(self).forward is Eagle3Head.forward
        return takes_kept and self.num_layers == 1 and layer.self_attn.keeps_rows

    @property
    def logits_norm(self) -> RMSNorm | None:
        return None if self.config.norm_output else self.norm


class EagleHead(FeedbackHead):
    """EAGLE-1: the first layer has no input norm, and there is no final norm."""

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        super().__init__(config, num_positions, kv_group)
        decoder = config.decoder
        self.fc = Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=config.fc_bias)
        layers = [DecoderLayer(decoder, i, backend, kv_group) for i in range(decoder.num_layers)]
        layers[0].input_layernorm = None
        self.layers = nn.ModuleList(layers)

    def write_kv_of_layer(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        inputs_embeds: RowEmbeds | None,
    ) -> None:
        layer, inputs = self.layers[0], (self.embed(input_ids, inputs_embeds), hidden)
        assert isinstance(layer, DecoderLayer)
        layer.write_kv(linear(inputs, self.fc), rope, meta)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = linear((self.embed(input_ids, inputs_embeds), hidden_states), self.fc)
        for layer, rope in zip(
            self.layers, self.rope_tables.at(position_ids, attn_metadata), strict=True
        ):
            hidden = layer(hidden, rope, attn_metadata)
        return hidden, hidden
