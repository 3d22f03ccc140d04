"""Attention with queries alone, over keys and values that another layer has written.

The last layers of small Gemma-4 models read those of an earlier layer of their model
(`DecoderConfig.reads_kv_of`); a Gemma-4 assistant's layers read its target's.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..attention.base import AttentionBackend
from ..attention.dense import DensePass
from ..attention.images import attend
from ..layers.fused import Inputs, Norms, linear
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..metadata.attention import AttentionMetadata
from ..ops.layer.rope import Rope, apply_rope, rope_queries
from .config import DecoderConfig
from .kv_layout import kv_places


class QueryAttention(nn.Module):
    """Arguments as of `Attention`. What is read is the place of `kv_layer`; an assistant's layers
    get their target's (`kv_group`, `cache_layer`) when they meet it."""

    def __init__(
        self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int = 0
    ):
        super().__init__()
        place, self.kv_layer = kv_places(config)[layer], config.kv_layer(layer)
        self.kv_group, self.cache_layer = kv_group + place.group, place.index
        self.backend, self.window, own = backend, config.window(layer), config.of_layer(layer)
        self.num_heads, self.head_dim = own.num_heads, own.head_dim
        self.scale, self.softcap = own.attention_scale, own.attention_softcap
        self.images_attend_both_ways = own.images_attend_both_ways
        width = own.num_heads * own.head_dim
        self.q_proj = Linear(own.hidden_size, width, own.qkv_bias)
        self.o_proj = Linear(width, own.hidden_size, own.o_bias)
        self.q_norm = RMSNorm(own.head_dim, own.rms_norm_eps, own.norm_offset)

    def forward(
        self,
        inputs: Inputs,
        norms: Norms,
        residual: None,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
    ) -> Tensor:
        """As `Attention.forward`, without residual."""
        q = linear(inputs, self.q_proj, norms).view(-1, self.num_heads, self.head_dim)
        if isinstance(meta, DensePass):  # training differentiates, which kernels do not
            q = apply_rope(self.q_norm(q), *rope.rotation(q.dtype))
            out = meta.attend_again(q, self.kv_layer, self.window, self.scale, self.softcap)
        else:
            out = attend(
                self.backend,
                rope_queries(q, rope, self.q_norm),
                meta,
                kv_group=self.kv_group,
                layer=self.cache_layer,
                window=self.window,
                scale=self.scale,
                softcap=self.softcap,
                images_both_ways=self.images_attend_both_ways,
            )
        return linear((out.reshape(-1, self.num_heads * self.head_dim),), self.o_proj)
