"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed.

    c_q = norm(W_DQ x)          q_nope, q_pe = heads of W_UQ c_q      q_pe rotated
    c   = norm(W_DKV x), k_pe rotated                                 what the cache keeps
    score = (q_nope W_UK) . c + q_pe . k_pe                           keys are never unfolded
    out   = W_O heads of ((softmax(score) c) W_UV)                    nor are values

So all query heads share one key of `kv_lora_rank + qk_rope_head_dim` numbers, whose first
`kv_lora_rank` are the value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention.base import AttentionBackend, CachedLayer
from ..attention.dense import DensePass
from ..distributed.parallel import WHOLE, Shard
from ..layers.fused import Inputs, Norms, linear
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..metadata.attention import AttentionMetadata
from ..ops.layer.latent import latent_key, multiply_heads, rope_and_write_latent
from ..ops.layer.rope import CacheWrite, Rope, apply_rope
from .config import DecoderConfig
from .kv_layout import kv_locations
from .placement import Placement

LATENT_NORM_EPS = 1e-6  # of both inner norms, whatever the config's rms_norm_eps


class MLAttention(nn.Module):
    """In place of `decoder.Attention`, for a config with `mla`."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend, kv_group: int):
        super().__init__()
        location = kv_locations(config)[layer]
        self.layer, self.backend = layer, backend
        self.kv_group, self.cache_layer = kv_group + location.group, location.index
        self.sanitize_kv = False
        parallel = config.parallel
        self.window, config = config.window(layer), config.part_of_layer(layer)
        assert config.mla is not None
        self.mla, self.num_heads = config.mla, config.num_heads
        m, heads, size = config.mla, config.num_heads, config.hidden_size
        queries = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        self.q_size = m.q_lora_rank or queries
        self.a_proj = Linear(size, self.q_size + m.latent_dim, bias=False)
        """Queries, or what they are made from; then the latent and the shared key."""
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if m.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(m.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(m.q_lora_rank, queries, bias=False, shard=parallel.heads())
        self.kv_a_layernorm = RMSNorm(m.kv_lora_rank, LATENT_NORM_EPS)
        rows = heads * (m.qk_nope_head_dim + m.v_head_dim)
        self.kv_b_proj = nn.Parameter(torch.empty(rows, m.kv_lora_rank), requires_grad=False)
        """All heads' W_UK, then all heads' W_UV."""
        shard = parallel.heads(1)
        self.o_proj = Linear(heads * m.v_head_dim, size, False, shard, parallel.comm)
        self.head_shard = parallel.heads()

    def forward(
        self,
        inputs: Inputs,
        norms: Norms,
        residual: Tensor,
        rope: Rope,
        meta: AttentionMetadata | DensePass,
        in_place: bool = True,
    ) -> Tensor:
        """residual + attention over the normed inputs, [T, D]; arguments as in `Attention`."""
        m = self.mla
        q, latent = linear(inputs, self.a_proj, norms).split([self.q_size, m.latent_dim], dim=1)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            q = linear((q,), self.q_b_proj, (self.q_a_layernorm,))
        q = q.view(-1, self.num_heads, m.qk_nope_head_dim + m.qk_rope_head_dim)
        if isinstance(meta, DensePass):
            out = self._attend_densely(q, latent, rope, meta)
        else:
            out = self._attend_cached(q, latent, rope, meta)
        return linear((out,), self.o_proj, residual=residual, in_place=in_place)

    def write_kv(self, inputs: Inputs, norms: Norms, rope: Rope, meta: AttentionMetadata) -> None:
        """Writes the latents and keys of rows that attend to nothing; arguments as of `forward`."""
        projection, size = self.a_proj.outputs_from(self.q_size), self.mla.qk_rope_head_dim
        if projection is None:
            latent = linear(inputs, self.a_proj, norms)[:, self.q_size :].contiguous()
        else:
            latent = linear(inputs, projection, norms)
        no_queries = latent.new_empty(latent.shape[0], 0, size)
        to = CacheWrite.of(meta, self.kv_group, self.cache_layer, self.sanitize_kv)
        rope_and_write_latent(no_queries, latent, self.kv_a_layernorm, rope, no_queries, to)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, nope, L] and W_UV [H, L, v], as queries and results are multiplied by them."""
        m, heads = self.mla, self.num_heads
        keys, values = self.kv_b_proj.split([heads * m.qk_nope_head_dim, heads * m.v_head_dim])
        return (
            keys.view(heads, m.qk_nope_head_dim, -1),
            values.view(heads, m.v_head_dim, -1).transpose(1, 2),
        )

    def _attend_cached(
        self, q: Tensor, latent: Tensor, rope: Rope, meta: AttentionMetadata
    ) -> Tensor:
        """q [T, H, nope + R], latent [T, L + R] -> [T, H * v]."""
        m = self.mla
        w_uk, w_uv = self._up_projections()
        queries = q.new_empty(q.shape[0], self.num_heads, m.latent_dim)
        rope_and_write_latent(
            q[..., m.qk_nope_head_dim :],
            latent,
            self.kv_a_layernorm,
            rope,
            queries[..., m.kv_lora_rank :],
            CacheWrite.of(meta, self.kv_group, self.cache_layer, self.sanitize_kv),
        )
        multiply_heads(q[..., : m.qk_nope_head_dim], w_uk, queries[..., : m.kv_lora_rank])
        cached = CachedLayer.of(meta, self.kv_group, self.cache_layer, self.window, m.softmax_scale)
        attended = self.backend.attend(queries, meta, cached)
        out = q.new_empty(q.shape[0], self.num_heads, m.v_head_dim)
        multiply_heads(attended, w_uv, out)
        return out.flatten(1)

    def _attend_densely(self, q: Tensor, latent: Tensor, rope: Rope, dense: DensePass) -> Tensor:
        """Attends over whole sequences, with a derivative."""
        m = self.mla
        w_uk, w_uv = self._up_projections()
        nope, rotary = q.split([m.qk_nope_head_dim, m.qk_rope_head_dim], dim=-1)
        rotation = rope.rotation(q.dtype)
        queries = torch.cat(
            [torch.einsum("thn,hnl->thl", nope, w_uk), apply_rope(rotary, *rotation)], dim=-1
        )
        key = latent_key(latent, self.kv_a_layernorm, rotation, m.qk_rope_head_dim)
        out = dense.attend(
            queries, key, key[..., : m.kv_lora_rank], self.layer, self.window, m.softmax_scale
        )
        return torch.einsum("thl,hlv->thv", out, w_uv).flatten(1)

    def placements(self, name: str) -> dict[str, Placement]:
        """Returns where the tensors of a checkpoint go.

        Heads are laid out for half-split rotation. The checkpoint's `kv_b_proj` has each head's
        W_UK and W_UV by turns; here all heads' W_UK come first.
        """
        m, cpu = self.mla, torch.device("cpu")
        rotary = torch.arange(m.qk_rope_head_dim, device=cpu)
        if m.rope_interleave:
            rotary = torch.cat([rotary[0::2], rotary[1::2]])
        nope = torch.arange(m.qk_nope_head_dim, device=cpu)
        head = torch.cat([nope, rotary + len(nope)])
        starts = torch.arange(self.num_heads, device=cpu)[:, None] * len(head)
        q_order = (starts + head).flatten()
        kv_a_order = torch.cat([torch.arange(m.kv_lora_rank, device=cpu), rotary + m.kv_lora_rank])
        kv_b = torch.arange(self.kv_b_proj.shape[0], device=cpu).view(self.num_heads, -1)
        kv_b_order = torch.cat([kv_b[:, : len(nope)].flatten(), kv_b[:, len(nope) :].flatten()])

        def placement(
            module: str,
            shard: Shard = WHOLE,
            start: int = 0,
            rows: int | None = None,
            order: Tensor | None = None,
        ) -> Placement:
            shape = getattr(self, module).weight.shape
            shape = rows or shape[0], *shape[1:]
            cut = shard.source(shape[shard.dim])
            return Placement(f"{name}.{module}", "weight", start, shape, order, cut=cut)

        heads, kv_b_shape = self.head_shard, tuple(self.kv_b_proj.shape)
        placement_of = {
            "kv_a_proj_with_mqa": placement(
                "a_proj", start=self.q_size, rows=m.latent_dim, order=kv_a_order
            ),
            "kv_a_layernorm": placement("kv_a_layernorm"),
            "kv_b_proj": Placement(
                name, "kv_b_proj", 0, kv_b_shape, kv_b_order, cut=heads.source(kv_b_shape[0])
            ),
            "o_proj": placement("o_proj", self.o_proj.shard),
        }
        if m.q_lora_rank is None:
            placement_of["q_proj"] = placement("a_proj", heads, rows=self.q_size, order=q_order)
        else:
            placement_of["q_a_proj"] = placement("a_proj", rows=self.q_size)
            placement_of["q_a_layernorm"] = placement("q_a_layernorm")
            placement_of["q_b_proj"] = placement("q_b_proj", heads, order=q_order)
        return {f"{name}.{part}.weight": where for part, where in placement_of.items()}
