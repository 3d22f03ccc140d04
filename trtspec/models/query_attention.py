"""Attention with queries alone, over keys and values that another layer has written.

The last layers of small Gemma-4 models read those of an earlier layer of their model
(`DecoderConfig.reads_kv_of`); a Gemma-4 assistant's layers read its target's.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..attention.base import AttentionBackend, CachedLayer
from ..attention.dense import DensePass
from ..attention.images import attend
from ..layers.fused import Inputs, Norms, linear
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..metadata.attention import AttentionMetadata
from ..ops.layer.rope import Rope, apply_rope, rope_queries
from .config import DecoderConfig
from .kv_layout import kv_locations


class QueryAttention(nn.Module):
    """Attends over the keys and values of `kv_layer`. Arguments as of `Attention`.

    An assistant's layers get their target's location (`kv_group`, `cache_layer`) in `share`.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int = 0
    ):
        super().__init__()
        location, self.kv_layer = kv_locations(config)[layer], config.kv_layer(layer)
        self.kv_group, self.cache_layer = kv_group + location.group, location.index
        self.backend, self.window = backend, config.window(layer)
        parallel, config = config.parallel, config.part_of_layer(layer)
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.images_attend_both_ways = config.images_attend_both_ways
        width = config.num_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, config.qkv_bias, parallel.heads())
        self.o_proj = Linear(
            width, config.hidden_size, config.o_bias, parallel.heads(1), parallel.comm
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)

    def forward(
        self,
        inputs: Inputs,
        norms: Norms,
        residual: None,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
    ) -> Tensor:
        """Returns what `Attention.forward` does, without residual."""
        q = linear(inputs, self.q_proj, norms).view(-1, self.num_heads, self.head_dim)
        if isinstance(meta, DensePass):  # training differentiates, which kernels do not
            q = apply_rope(self.q_norm(q), *rope.rotation(q.dtype))
            out = meta.attend_again(q, self.kv_layer, self.window, self.scale, self.softcap)
        else:
            q = rope_queries(q, rope, self.q_norm)
            cached = CachedLayer.of(
                meta, self.kv_group, self.cache_layer, self.window, self.scale, self.softcap
            )
            out = attend(self.backend, q, meta, cached, self.images_attend_both_ways)
        return linear((out.reshape(-1, self.num_heads * self.head_dim),), self.o_proj)
