"""Multi-token-prediction layers, of the target's own kind.

    x   = eh_proj(cat(enorm(e), hnorm(h)))    e = embedding of the next token; h as given
    out = decoder layer(x)
    logits = lm_head(norm(out))
    fed on:  norm(out), or with norm_output=False `out`

`h` is the target's final hidden state at depth 0 and the previous depth's output after that
(DeepSeek-V3, section 2.2). MiMo concatenates the other way round, GLM-4-MoE feeds on `out`, and
Qwen3-Next has one eh_proj, enorm, hnorm and norm for all its layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...attention.dense import DensePass
from ...errors import CheckpointError
from ...layers.embedding import Embedding, embed
from ...layers.fused import linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...metadata.attention import AttentionMetadata
from ...metadata.embeds import RowEmbeds
from ...ops.layer.rope import Rope
from ..config import DecoderConfig
from ..decoder import DecoderLayer
from .base import DraftHead, HeadConfig, HeadTarget


@dataclass(frozen=True)
class MTPLayout:
    """How a family writes and wires its MTP layers. A new family is a new row of `MTP_LAYOUTS`."""

    format: str
    prefix: str  # regular expression; its first group is the layer's number
    is_absolute: bool  # numbered after the target's layers, not from 0
    renames: dict[str, str]  # name in the checkpoint -> name here
    hidden_first: bool
    norm_output: bool  # the hidden state fed on is the normed one, unless the family differs
    shared_prefix: str | None = None  # of names without a number, which belong to every layer
    zero_centered_norms: bool = False  # a norm's weight is kept as its difference from 1
    marker: str = ""  # the tensor of each layer that tells the layout; by default its projection
    layer_per_draft: bool = False  # trained so that layer i drafts token i, never the first for all


MTP_LAYOUTS = (
    MTPLayout(  # before DeepSeek's, whose names it has too
        format="Step-3.5 MTP layers",
        prefix=r"model\.layers\.(\d{1,6})\.(?:transformer\.)?",
        is_absolute=True,
        renames={"shared_head.norm": "norm", "shared_head.output": "lm_head"},
        hidden_first=False,
        norm_output=False,
        marker="shared_head.output",
        layer_per_draft=True,
    ),
    MTPLayout(
        format="DeepSeek-style MTP layers",
        prefix=r"model\.layers\.(\d{1,6})\.",
        is_absolute=True,
        renames={"shared_head.norm": "norm", "shared_head.head": "lm_head"},
        hidden_first=False,
        norm_output=True,
    ),
    MTPLayout(
        format="MiMo MTP layers",
        prefix=r"model\.mtp_layers\.(\d{1,6})\.",
        is_absolute=False,
        renames={
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "norm",
        },
        hidden_first=True,
        norm_output=True,
    ),
    MTPLayout(
        format="Qwen3-Next MTP layers",
        prefix=r"mtp\.layers\.(\d{1,6})\.",
        is_absolute=False,
        renames={
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "fc": "eh_proj",
        },
        hidden_first=False,
        norm_output=True,
        shared_prefix="mtp.",
        zero_centered_norms=True,
    ),
)


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
            self.lm_head = Linear(size, decoder.vocab_size, bias=False)
        self.hidden_first = config.hidden_first

    def forward(  # type: ignore[override]
        self, embeddings: Tensor, hidden: Tensor, rope: Rope, meta: AttentionMetadata | DensePass
    ) -> tuple[Tensor, Tensor]:
        """embeddings, hidden [T, H] -> (the final norm of the layer's output, the output)."""
        inputs, norms = (embeddings, hidden), (self.enorm, self.hnorm)
        if self.hidden_first:
            inputs, norms = inputs[::-1], norms[::-1]
        out = super().forward(linear(inputs, self.eh_proj, norms), rope, meta)
        return self.norm(out), out


class MTPHead(DraftHead):
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

    def layer_of_step(self, step: int) -> MTPLayer:
        layer = self.layers[step % len(self.layers)]
        assert isinstance(layer, MTPLayer)
        return layer

    def lm_head_of_step(self, step: int) -> Linear:
        lm_head = self.layer_of_step(step).lm_head
        assert lm_head is not None
        return lm_head

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
        vocab = self.config.decoder.vocab_size
        embeddings = embed(input_ids, layer.embed_tokens, vocab, merged=inputs_embeds)
        rope = self.rope_tables.at(position_ids, attn_metadata)[step % len(self.layers)]
        normed, hidden = layer(embeddings, hidden_states, rope, attn_metadata)
        return normed, normed if self.config.norm_output else hidden


def mtp_layout(names: set[str]) -> MTPLayout | None:
    """The layout whose markers are among the tensor names, if there is one."""
    for layout in MTP_LAYOUTS:
        projections = {old for old, new in layout.renames.items() if new == "eh_proj"}
        last = layout.marker or (projections or {"eh_proj"}).pop()
        prefix = layout.prefix if layout.shared_prefix is None else re.escape(layout.shared_prefix)
        if any(re.fullmatch(rf"{prefix}{last}\.weight", name) for name in names):
            return layout
    return None


def mtp_names(names: set[str], layout: MTPLayout, num_layers: int) -> dict[str, str]:
    """Name as `MTPHead` has it, layers counted from 0 -> name in the checkpoint.

    Args:
        num_layers: of the target; an absolute layout numbers its MTP layers from there.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    first = num_layers if layout.is_absolute else 0
    matches = {name: re.match(layout.prefix, name) for name in names}
    numbers = sorted({int(match[1]) for match in matches.values() if match} - set(range(first)))
    renamed: dict[str, str] = {}
    for name, match in sorted(matches.items()):
        if match is not None:
            owners, rest = [int(match[1])], name[match.end() :]
        elif layout.shared_prefix is not None and name.startswith(layout.shared_prefix):
            owners, rest = numbers, name.removeprefix(layout.shared_prefix)
        else:
            continue
        for old, new in layout.renames.items():
            if rest.startswith(f"{old}."):
                rest = new + rest[len(old) :]
        for number in owners:
            key = f"layers.{number - first}.{rest}"
            if number < first:
                continue
            if key in renamed:
                raise CheckpointError(
                    f"{renamed[key]} and {name} are two names of one tensor: the tensors of two "
                    "heads are mixed. Copy one checkpoint again, into an empty directory."
                )
            renamed[key] = name
    return renamed


def mtp_decoder_config(target: DecoderConfig, num_layers: int) -> DecoderConfig:
    """The decoder config of MTP layers: the target's, with layer n + i's own window and type where
    the target's lists go that far, else with what all of the target's layers have in common.

    Raises:
        CheckpointError: the lists end before the MTP layers do, and the target's layers differ.
    """
    first, windows, types, moe = (
        target.num_layers, target.layer_windows, target.layer_types, target.moe
    )  # fmt: skip
    if moe is not None:  # which layers are mixtures of experts goes by n + i too
        moe = replace(moe, first_k_dense_replace=max(0, moe.first_k_dense_replace - first))
    return replace(
        target,
        num_layers=num_layers,
        moe=moe,
        layer_windows=_of_mtp_layers(windows, first, num_layers, "layer_windows"),
        layer_types=_of_mtp_layers(types, first, num_layers, "layer_types"),
    )


def _of_mtp_layers(
    per_layer: tuple[Any, ...], first: int, count: int, name: str
) -> tuple[Any, ...]:
    found = per_layer[first : first + count]
    if len(found) == count or not per_layer:
        return found
    kinds = set(per_layer[:first])
    if len(kinds) > 1:
        raise CheckpointError(
            f"The target's layers are of several kinds ({name}: {list(per_layer)}), and its "
            f"config.json does not say which of them the {count} MTP layers are. Give "
            f"num_nextn_predict_layers, and layer_types for {first} + {count} layers, as Step-3.5 "
            "does, or draft otherwise."
        )
    return tuple(kinds) * count
