"""The architecture of a decoder as plain numbers and flags.

One frozen dataclass covers every family of `families/`. They differ only in these fields; nothing
downstream asks for the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # transformers 5 form: rope_type, rope_theta, and its scaling
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to the weight of every RMSNorm
    head_gate: bool = False  # attention's heads are scaled by sigmoid(g_proj(its input))
    rotary_dim: int | None = None  # of a head's dimensions only the first are rotated; None is all
    layer_windows: tuple[int | None, ...] = ()  # per layer; None is full attention
    layer_types: tuple[str, ...] = ()  # per layer, a key of `type_fields`; () is all alike
    # Both may go on after the last layer: then they are of the checkpoint's MTP layers.
    type_fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Layer type -> the fields of this config that are different in its layers."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The HF config as a dict: what a later feature needs without a new field here."""

    def window(self, layer: int) -> int | None:
        return self.layer_windows[layer] if self.layer_windows else None

    def of_layer(self, layer: int) -> DecoderConfig:
        """The config as this layer has it, with the fields of its type."""
        if not self.layer_types:
            return self
        return replace(self, **self.type_fields.get(self.layer_types[layer], {}))
