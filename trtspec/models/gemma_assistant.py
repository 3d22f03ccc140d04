"""Gemma-4 assistants: drafters that keep no keys and values but read the target's.

    x      = pre_projection(cat(e, h))     e = the target's (scaled) embedding of the last token
    x      = layers(x)                     queries alone; keys and values are those of the target's
                                           last layer of the same kind (sliding or full) that has
                                           some (small targets' last layers have none)
    out    = norm(x);  logits = lm_head(out);  fed on: post_projection(out), in place of h

Source: transformers' `gemma4_assistant` and `SinglePositionMultiTokenCandidateGenerator`. An
example: the target has read `A B C D` at positions 0-3 and chose `E`, which nobody has read yet.

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

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.base import AttentionBackend
from ..attention.dense import DensePass
from ..cache.manager import KVGroupSpec
from ..errors import CheckpointError
from ..metadata.attention import AttentionMetadata
from ..metadata.embeds import RowEmbeds
from ..ops.embedding import embed
from ..ops.fused import linear
from ..ops.linear import Linear
from ..ops.norm import RMSNorm
from .checkpoint import TensorSource
from .clustered_head import ClusteredHead, cluster_counts
from .config import DecoderConfig
from .decoder import SandwichLayer
from .draft_head import DraftHead, HeadConfig, HeadTarget
from .hf_config import MAX_SIZE, parse_config, refuse_quantized
from .kv_layout import kv_places
from .query_attention import QueryAttention
from .rope import build_cos_sin, rotation_order

KIND = "gemma4_assistant"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class AssistantLayer(SandwichLayer):
    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend):
        super().__init__(config, layer, backend, 0)
        self.self_attn = QueryAttention(config, layer, backend)


class GemmaAssistant(DraftHead):
    advances_positions = False

    def __init__(
        self, config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
    ):
        super().__init__(config, num_positions + 1, kv_group)
        decoder, size = config.decoder, config.decoder.hidden_size
        for name, table in list(self.rope_tables.named_buffers()):
            self.rope_tables.register_buffer(name, table[1:], persistent=False)
        self.embedding_scale: float | None = None  # the target's
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
        places = kv_places(target.config)
        for i in range(self.num_layers):
            source, attention = (
                layer_read(self.config.decoder, i, target.config),
                self._attention(i),
            )
            assert source is not None
            attention.kv_layer = source
            attention.kv_group = places[source].group  # the target's groups come first
            attention.cache_layer = places[source].index

    def _attention(self, layer: int) -> QueryAttention:
        attention = self.layers[layer].self_attn
        assert isinstance(attention, QueryAttention)
        return attention

    def kv_group_of_layer(self, layer: int) -> int:
        return self._attention(layer).kv_group

    def kv_group_specs(self, dtype: torch.dtype) -> list[KVGroupSpec]:
        return []

    def embed(self, input_ids: Tensor, inputs_embeds: RowEmbeds | None = None) -> Tensor:
        vocab_size = self.config.decoder.vocab_size
        return embed(input_ids, self.embed_tokens, vocab_size, self.embedding_scale, inputs_embeds)

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
    """The layer whose keys and values the target's last layer of the same kind, sliding or full,
    reads: mostly itself. None if there is no such layer."""
    slides = assistant.window(layer) is not None
    alike = [i for i in range(target.num_layers) if (target.window(i) is not None) == slides]
    return target.kv_layer(alike[-1]) if alike else None


def read_assistant(
    raw: dict[str, Any], sources: dict[str, TensorSource], where: Path
) -> tuple[HeadConfig, dict[str, TensorSource]]:
    """The config in `where`, and the tensors under the names of `GemmaAssistant`.

    Raises:
        CheckpointError: a field is missing, or asks for what is not computed here.
    """
    refuse_quantized(raw, where)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{where}: text_config={text!r}; an assistant keeps its architecture there, as an "
            "object. Copy the file again from the model's source."
        )
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    if shared not in (None, 0, layers):
        raise CheckpointError(
            f"{where}: num_kv_shared_layers={shared!r}; all {layers} layers of an assistant read "
            "the target's keys and values. Correct it."
        )
    for name in ("hidden_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block"):
        if text.get(name):
            raise CheckpointError(
                f"{where}: {name}={text[name]!r} in text_config; an assistant has none. Correct it."
            )
    inner = {"hidden_size_per_layer_input": 0, **text, "num_kv_shared_layers": 0}
    decoder = parse_config(inner | {"model_type": "gemma4_text"}, where)
    size = raw.get("backbone_hidden_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
        raise CheckpointError(
            f"{where}: backbone_hidden_size={size!r}; it must be the target's hidden_size, an int "
            f"in 1 … {MAX_SIZE}. Copy the file again from the model's source."
        )
    tensors = {re.sub(r"^model\.", "", name): source for name, source in sources.items()}
    own, tied = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if tied is not None and (own is None or _are_equal(own, tied)):
        tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
    config = HeadConfig(
        kind=KIND,
        format="Gemma-4 assistant",
        decoder=decoder,
        target_hidden_size=size,
        draft_vocab_size=decoder.vocab_size,
        own_lm_head=True,
        norm_output=True,
        lm_head_clusters=cluster_counts(raw, decoder.vocab_size, where),
    )
    return config, tensors


def _are_equal(one: TensorSource, other: TensorSource) -> bool:
    return one.shape == other.shape and torch.equal(one.read(), other.read())


def assistant_problems(config: HeadConfig, target: DecoderConfig) -> list[str]:
    """Why the assistant cannot draft for this target, each with a cure."""
    decoder, cure = config.decoder, "Use the assistant made for this target."
    problems = []
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"The assistant reads hidden states of width {config.target_hidden_size} "
            f"(backbone_hidden_size), the target's are {target.hidden_size} wide. {cure}"
        )
    if decoder.vocab_size != target.vocab_size:
        problems.append(
            f"The assistant's vocab_size is {decoder.vocab_size}, the target's "
            f"{target.vocab_size}. {cure}"
        )
    for i in range(decoder.num_layers):
        source = layer_read(decoder, i, target)
        kind = "full" if decoder.window(i) is None else "sliding"
        if source is None:
            problems.append(
                f"Layer {i} reads the keys of the target's last {kind}-attention layer, but the "
                f"target has none. {cure}"
            )
            continue
        own, theirs = decoder.of_layer(i), target.of_layer(source)
        for name in ("head_dim", "num_kv_heads"):
            if getattr(own, name) != getattr(theirs, name):
                problems.append(
                    f"Layer {i} has {name}={getattr(own, name)}, the target's layer {source}, "
                    f"whose keys it reads, has {getattr(theirs, name)}. {cure}"
                )
        if decoder.window(i) != target.window(source):
            problems.append(
                f"Layer {i} has sliding_window={decoder.window(i)}, the target's layer {source}, "
                f"whose keys it reads, has {target.window(source)}. {cure}"
            )
        if not _turns_alike(own, theirs):
            problems.append(
                f"Layer {i} rotates its queries by {own.rope_parameters}, the target's layer "
                f"{source} its keys by {theirs.rope_parameters}. {cure}"
            )
    return list(dict.fromkeys(problems))


def _turns_alike(own: DecoderConfig, theirs: DecoderConfig) -> bool:
    """Whether queries and keys of two layers are rotated, and laid out, the same way."""
    tables = build_cos_sin(own, 64), build_cos_sin(theirs, 64)
    if tables[0].shape != tables[1].shape:
        return True  # another problem says so
    is_plain = rotation_order(own) is None and rotation_order(theirs) is None
    return is_plain and torch.allclose(*tables, atol=1e-5)
