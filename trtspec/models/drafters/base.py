"""The base of draft heads: the target's vocabulary and positions, shared embedding and lm_head.

A draft head is a network that reads the target's hidden states. It implements the `DraftModel`
protocol of `workers/protocols.py`. Sources: EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840),
DeepSeek-V3's multi-token prediction (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...attention.dense import DensePass
from ...distributed.logits import ShardedLogits
from ...layers.embedding import Embedded, Embedding, embed, embed_later
from ...layers.fused import Norms, is_one_kernel, largest_output, linear
from ...layers.linear import Linear
from ...layers.norm import RMSNorm
from ...layers.vocabulary import sharded, vocabulary_head
from ...metadata.attention import AttentionMetadata
from ...metadata.embeds import RowEmbeds
from ...ops.layer.rope import Rope
from ...state.kv_cache import KVGroupSpec
from ..config import DecoderConfig
from ..decoder import Attention
from ..kv_layout import kv_group_specs, kv_locations
from ..mla import MLAttention
from ..rope import RopeTables
from .clustered_head import ClusteredHead


@dataclass(frozen=True)
class HeadConfig:
    """A draft head as plain numbers and flags; `checkpoints/heads` reads it."""

    kind: str  # "eagle3", "eagle", "mtp", "gemma4_assistant", "dflash" or "dspark"
    format: str  # how the checkpoint is written, for people
    decoder: DecoderConfig  # the head's layers; vocab_size is the target's
    target_hidden_size: int
    draft_vocab_size: int
    own_embedding: bool = False
    own_lm_head: bool = False
    lm_head_clusters: tuple[int, int] = (0, 0)  # clusters of tokens, those that get logits; 0: none
    layers_to_capture: tuple[int, ...] = ()  # 0-based: the residual stream after these layers
    captured_by: str = ""  # where those ids come from, for people
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False  # feed back what the final norm returns
    fc_bias: bool = False
    hidden_first: bool = False  # MTP: cat(hidden, embedding) in place of cat(embedding, hidden)
    zero_centered_norms: bool = False  # the checkpoint has norms' weights minus 1
    num_mtp_layers: int = 0  # in the checkpoint; `decoder` has those in use
    suggested_draft_len: int | None = None
    mask_token_id: int | None = None  # of a head that proposes all its drafts in one pass
    trained_draft_len: int | None = None  # how many at most, where the checkpoint says so
    sees_ahead: tuple[bool, ...] = ()  # DFlash: by layer, whether rows see later ones of a block
    windows_by_row: bool = False  # DFlash: windows are counted from each row, not from the block's
    value_scale: float = 1.0  # DFlash: a factor of attention's values, until the weights have it
    samples_from_anchor: bool = False  # DFlash: the row of the last token proposes too
    markov_rank: int = 0  # DSpark: of the bias by the token before; 0 is none
    markov_kind: str = "vanilla"  # "gated", "rnn"
    confidence_size: int = 0  # DSpark: of what its confidence head reads; 0 is none
    confidence_bias: bool = True
    block_convolution: tuple[int, int] = (0, 0)  # DFlash2: taps, channels of a group; 0 is none
    selector_rank: int = 0  # DFlash2: of the choice among candidates; 0 is none
    selector_candidates: int = 0
    logit_scale: float = 1.0  # DFlash: of the head's logits
    logit_softcap: float | None = None  # DFlash: behind that, cap * tanh(logits / cap)
    embedding_scale: float | None = None  # DFlash; None is the target's of a shared embedding
    context_embeddings: bool = False  # DFlash: a context row reads the token after it too
    draft_window: int = 0  # tokens that a layer sees at most; 0 is what the decoder says
    trained_acceptance: float | None = None  # of first drafts, where the trainer wrote it down


class HeadTarget(Protocol):
    """What a head takes from its target: ours (`Decoder`), or any model's two ends."""

    config: DecoderConfig
    embed_tokens: Any  # maps ids [T] to [T, D]; has a `weight`
    lm_head: Any  # maps [R, D] to [R, V]; has a `weight`, None where it is packed


class DraftHead(nn.Module, ABC):
    """Base of the heads. `embed_tokens` and `lm_head` are the target's where the head has none."""

    advances_positions = True  # False: all drafts of a step stand at one position

    def __init__(self, config: HeadConfig, num_positions: int, kv_group: int):
        super().__init__()
        self.config, self.kv_group = config, kv_group
        decoder = config.decoder
        self.num_layers = decoder.num_layers
        self.embed_tokens: Embedding | None = None
        self.lm_head: Linear | ClusteredHead | None = None
        if config.own_embedding:
            self.embed_tokens = Embedding(decoder.vocab_size, decoder.hidden_size)
        if config.own_lm_head:
            self.lm_head = vocabulary_head(
                decoder.hidden_size, config.draft_vocab_size, decoder.parallel
            )
        self.shares_embedding, self.shares_lm_head = self.embed_tokens is None, self.lm_head is None
        self.embedding_scale: float | None = None
        # As many as the target has: the head's own config often names fewer.
        self.rope_tables = RopeTables(decoder, num_positions)
        self.register_buffer("d2t", None, persistent=False)
        self.d2t: Tensor | None  # [Vd] int64 offsets, target_id = draft_id + d2t[draft_id]

    @property
    def layers_to_capture(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads; empty: it reads the final hidden states."""
        return self.config.layers_to_capture

    def share(self, target: HeadTarget) -> None:
        """Takes the target's embedding and lm_head where the head has none of its own."""
        self.shares_embedding, self.shares_lm_head = self.embed_tokens is None, self.lm_head is None
        self.embed_tokens = self.embed_tokens or target.embed_tokens
        self.lm_head = self.lm_head or target.lm_head

    def limit_windows(self) -> None:
        """Makes no layer see more than the config's `draft_window`.

        That is a mask: the layers' KV groups, and so the blocks that are kept, stay as they are.
        """
        most = self.config.draft_window
        for module in self.modules():
            if most and isinstance(module, Attention | MLAttention):
                module.window = min(module.window or most, most)

    def owners_of_ends(self) -> dict[str, nn.Module]:
        """Returns the modules with an embedding and lm_head, by their tensors' prefix."""
        return {"": self}

    def kv_group_of_layer(self, layer: int) -> int:
        """The KV group in which a layer of the head keeps its keys and values."""
        return self.kv_group + kv_locations(self.config.decoder)[layer].group

    def kv_group_specs(self, dtype: torch.dtype) -> list[KVGroupSpec]:
        """The groups that the head needs for itself, from its first on; none if it only reads."""
        return kv_group_specs(self.config.decoder, dtype)

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """[T, n * Ht] as captured (or [T, Ht]) -> [T, H] as draft step 0 reads it."""
        return hidden_states

    def lm_head_of_step(self, step: int) -> Linear | ClusteredHead:
        """The layer that makes the logits of draft step 0, 1, …"""
        assert self.lm_head is not None
        return self.lm_head

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor | ShardedLogits:
        """[R, H] -> [R, Vd], model dtype; with several ranks, this one's part."""
        lm_head = self.lm_head_of_step(step)
        norms: Norms = ()
        if self.logits_norm is not None:
            norms = (self.logits_norm,)
            if not is_one_kernel((hidden,), lm_head, norms):  # the product alone may be one
                hidden, norms = self.logits_norm(hidden), ()
        logits = linear((hidden,), lm_head, norms)
        return sharded(logits, lm_head, self.config.decoder.parallel)

    def best_tokens(self, hidden: Tensor, step: int) -> Tensor | None:
        """Returns the target ids of each row's best token, [R, H] -> [R] int32.

        None where no kernel chooses them without the logits.
        """
        if getattr(self.compute_logits, "__func__", None) is not DraftHead.compute_logits:
            return None  # logits of its own
        return largest_output(hidden, self.lm_head_of_step(step), self.logits_norm, self.d2t)

    @property
    def logits_norm(self) -> RMSNorm | None:
        """The norm between what `forward` returns first and the lm_head; None: there is none."""
        return None

    def embed(self, input_ids: Tensor, inputs_embeds: RowEmbeds | None = None) -> Tensor:
        """[T] -> [T, H], the tokens' scaled by `embedding_scale`."""
        vocab = self.config.decoder.vocab_size
        return embed(input_ids, self.embed_tokens, vocab, self.embedding_scale, inputs_embeds)

    def embed_later(
        self, input_ids: Tensor, inputs_embeds: RowEmbeds | None = None
    ) -> Tensor | Embedded:
        """As `embed`, where a product may look them up."""
        vocab = self.config.decoder.vocab_size
        return embed_later(input_ids, self.embed_tokens, vocab, self.embedding_scale, inputs_embeds)

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata | DensePass,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft pass over T rows.

        Args:
            input_ids: [T], the token *after* each row's position.
            position_ids: [T] int64.
            hidden_states: [T, H]: at step 0 what `project_target_hidden` returned, later what the
                previous step fed back.
            step: 0 … K-1.
            inputs_embeds: rows of step 0 whose token has no embedding of its own.

        Returns:
            (what `compute_logits` reads, what the next step reads), each [T, H].
        """


class FeedbackHead(DraftHead):
    """A head that reads its own output from the second draft on: EAGLE's and MTP's."""

    @property
    def writes_kv_alone(self) -> bool:
        """Whether keys and values can be written without computing anything else.

        They then follow from each row's inputs alone. So rows may be written late, and in any
        order.
        """
        return self.num_layers == 1

    def write_kv(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """Writes the keys and values of step 0's rows, where nothing is drafted.

        Arguments are as of `forward` at step 0, with hidden_states [T, n * Ht] as captured.
        """
        hidden = self.project_target_hidden(hidden_states)
        if not self.writes_kv_alone:  # a later layer's follow from all that is before it
            self(input_ids, position_ids, hidden, attn_metadata, 0, inputs_embeds)
            return
        self.write_kv_of_projected(input_ids, position_ids, hidden, attn_metadata, inputs_embeds)

    def write_kv_of_projected(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """As `write_kv`, where `writes_kv_alone`, with hidden_states [T, H] as projected."""
        (rope,) = self.rope_tables.at(position_ids, attn_metadata)
        self.write_kv_of_layer(input_ids, hidden_states, rope, attn_metadata, inputs_embeds)

    @abstractmethod
    def write_kv_of_layer(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        inputs_embeds: RowEmbeds | None,
    ) -> None:
        """Writes keys and values of a head with one layer; hidden [T, H] is projected."""
