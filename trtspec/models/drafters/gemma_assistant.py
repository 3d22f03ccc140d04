"""Gemma-4 assistants: drafters that keep no keys and values but read the target's.

    x      = pre_projection(cat(e, h))     e = the target's (scaled) embedding of the last token
    x      = layers(x)                     queries alone; keys and values are those of the target's
                                           last layer of the same kind (sliding or full) that has
                                           some (small targets' last layers have none)
    out    = norm(x);  logits = lm_head(out);  feedback: post_projection(out), in place of h

Source: transformers' `gemma4_assistant` and `SinglePositionMultiTokenCandidateGenerator`. An
example: the target has read `A B C D` at positions 0-3 and chose `E`, which no pass has read yet.

    draft step   token   h                   keys seen   position of the rotation
    0            E       the target's at D   of A … D    4, where E stands
    1            F'      step 0's            of A … D    4
    2            G'      step 1's            of A … D    4

So a row sees what the target knows up to the last token it has read and was right about, and what
rejected drafts left behind that is masked like any later position. In the metadata that row stands
at 3, the last key it sees; only its rotation is one further on, which is how the head's tables are
laid out. A sliding layer sees the last `sliding_window` keys up to there. (transformers shows it
one key more, and of a rejected draft; both are accidents of its cropping.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...attention.dense import DensePass
from ...layers.fused import linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...metadata.attention import AttentionMetadata
from ...metadata.embeds import RowEmbeds
from ...state.kv_cache import KVGroupSpec
from ..config import DecoderConfig
from ..decoder import SandwichLayer
from ..kv_layout import kv_locations
from ..query_attention import QueryAttention
from .base import DraftHead, HeadConfig, HeadTarget
from .clustered_head import ClusteredHead

KIND = "gemma4_assistant"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class AssistantLayer(SandwichLayer):
    """A layer of Gemma-4's whose attention has queries alone."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend):
        super().__init__(config, layer, backend, 0)
        self.self_attn = QueryAttention(config, layer, backend)


class GemmaAssistant(DraftHead):
    """The network. Which of the target's layers each of its own reads is known after `share`."""

    advances_positions = False

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        super().__init__(config, num_positions + 1, kv_group)
        decoder, size = config.decoder, config.decoder.hidden_size
        for name, table in list(self.rope_tables.named_buffers()):
            self.rope_tables.register_buffer(name, table[1:], persistent=False)
        self.pre_projection = Linear(2 * config.target_hidden_size, size, bias=False)
        self.layers = nn.ModuleList(
            AssistantLayer(decoder, i, backend) for i in range(decoder.num_layers)
        )
        self.norm = RMSNorm(size, decoder.rms_norm_eps, decoder.norm_offset)
        self.post_projection = Linear(size, config.target_hidden_size, bias=False)
        if config.lm_head_clusters[0]:
            self.lm_head = ClusteredHead(size, decoder.vocab_size, *config.lm_head_clusters)

    def share(self, target: HeadTarget) -> None:
        super().share(target)
        self.embedding_scale = target.config.embedding_scale
        locations = kv_locations(target.config)
        for i in range(self.num_layers):
            source = layer_read(self.config.decoder, i, target.config)
            assert source is not None
            attention = self._attention(i)
            attention.kv_layer = source
            attention.kv_group = locations[source].group  # the target's groups come first
            attention.cache_layer = locations[source].index

    def _attention(self, layer: int) -> QueryAttention:
        attention = self.layers[layer].self_attn
        assert isinstance(attention, QueryAttention)
        return attention

    def kv_group_of_layer(self, layer: int) -> int:
        return self._attention(layer).kv_group

    def kv_group_specs(self, dtype: torch.dtype) -> list[KVGroupSpec]:
        return []

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = linear((self.embed(input_ids, inputs_embeds), hidden_states), self.pre_projection)
        for layer, rope in zip(
            self.layers, self.rope_tables.at(position_ids, attn_metadata), strict=True
        ):
            hidden = layer(hidden, rope, attn_metadata)
        out = self.norm(hidden)
        fed_on = out if self.config.norm_output else hidden
        return out, linear((fed_on,), self.post_projection)


def layer_read(assistant: DecoderConfig, layer: int, target: DecoderConfig) -> int | None:
    """Returns the layer of the target whose keys and values an assistant's layer reads.

    They are those that the target's last layer of the same kind (sliding or full) reads: mostly
    its own. None if there is no such layer.
    """
    slides = assistant.window(layer) is not None
    alike = [i for i in range(target.num_layers) if (target.window(i) is not None) == slides]
    return target.kv_layer(alike[-1]) if alike else None
