"""The architecture of a decoder as plain numbers and flags.

One frozen dataclass covers Llama, Mistral, Qwen2, Qwen3 and SmolLM2 (which is a Llama). The
families differ only in these fields; nothing downstream asks for the model's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    layer_windows: tuple[int | None, ...] = ()  # per layer; None is full attention
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The HF config as a dict: what a later feature needs without a new field here."""

    def window(self, layer: int) -> int | None:
        return self.layer_windows[layer] if self.layer_windows else None
