"""DFlash2's layer: a DFlash layer with a causal convolution before and behind attention and MLP.

    x = norm(hidden);  k, k' = W x                     the rows' own weights of both convolutions
    hidden = hidden + convolve(attention(convolve(x, k)), k')
    the same around the MLP

A row of a block so reads the row before it, in every layer. The convolutions run along a block's
rows alone; the context has none. Source: DFlash2 (z-lab), https://github.com/z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...attention.base import AttentionBackend
from ...layers.fused import linear
from ...layers.linear import Linear
from ...metadata.attention import AttentionMetadata
from ...ops.layer.convolution import convolve_blocks
from ...ops.layer.rope import Rope
from ..config import DecoderConfig
from ..decoder import MLP, DecoderLayer


class BlockConvolution(nn.Module):
    """The convolutions before and behind a part of a layer.

    Args:
        size: of the residual stream. taps: rows that a convolution reads.
        group: channels that share a row's own weight.
    """

    def __init__(self, size: int, taps: int, group: int):
        super().__init__()
        self.shape = 2, taps, size // group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size), requires_grad=False)
        self.kernel_projection = Linear(size, 2 * taps * (size // group), bias=False)

    def around(
        self, part: Callable[[Tensor], Tensor], normed: Tensor, residual: Tensor, block: int
    ) -> Tensor:
        """Returns residual + the convolved part of the convolved rows, all [T, H]."""
        own = linear((normed,), self.kernel_projection).view(-1, *self.shape)
        before, behind = own.unbind(1)
        read = convolve_blocks(normed, self.base_kernel[0], before, block)
        return convolve_blocks(part(read), self.base_kernel[1], behind, block, residual)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer over blocks, the same number of rows for every request.

    Args:
        convolution: taps, and channels of a group.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        backend: AttentionBackend,
        kv_group: int,
        convolution: tuple[int, int],
    ):
        super().__init__(config, layer, backend, kv_group)
        self.attention_conv = BlockConvolution(config.hidden_size, *convolution)
        self.mlp_conv = BlockConvolution(config.hidden_size, *convolution)

    def forward(self, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:  # type: ignore[override]
        """hidden, the residual stream [T, H] -> the stream after this layer, a new tensor."""
        block, attention = meta.rows_per_generation, self.self_attn
        assert self.input_layernorm is not None
        hidden = self.attention_conv.around(
            lambda x: attention((x,), (), None, rope, meta),
            self.input_layernorm(hidden),
            hidden,
            block,
        )
        return self.mlp_conv.around(
            self._multiply, self.post_attention_layernorm(hidden), hidden, block
        )

    def _multiply(self, x: Tensor) -> Tensor:
        """The MLP of rows that are normed already."""
        mlp = self.mlp
        assert isinstance(mlp, MLP)
        return linear((mlp.gate_and_mul(linear((x,), mlp.gate_up_proj)),), mlp.down_proj)
