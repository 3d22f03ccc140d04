"""Per-layer inputs of small Gemma-4 models: every layer also receives an embedding of the token.

    layer_inputs = (norm(projection(e) * D^-0.5) + embed_tokens_per_layer[token] * P^0.5) * 2^-0.5
    x            = x + norm(projection_i(gelu(gate_i(x)) * layer_inputs[i]))    behind layer i's MLP

e is the row's (scaled) embedding [D]; layer_inputs are [L, P], P = hidden_size_per_layer_input.
Where an encoder gave the row's embedding, the padding token stands for the token. Source:
transformers' `gemma4`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.embedding import Embedding, embed
from ..layers.fused import linear
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..metadata.embeds import RowEmbeds
from ..ops.layer.norm import add_normed
from .config import DecoderConfig
from .placement import Placement, beside


class PerLayerInputs(nn.Module):
    """Computes the inputs of all layers, once in a pass."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.vocab_size, self.pad_id = config.vocab_size, config.per_layer_pad_id
        self.size = config.per_layer_input_size
        width = config.num_layers * self.size
        self.scale = config.hidden_size**-0.5
        self.embed_tokens_per_layer = Embedding(config.vocab_size, width)
        self.per_layer_model_projection = Linear(config.hidden_size, width, bias=False)
        self.per_layer_projection_norm = RMSNorm(self.size, config.rms_norm_eps, config.norm_offset)

    def forward(
        self, input_ids: Tensor, embedded: Tensor, inputs_embeds: RowEmbeds | None
    ) -> Tensor:
        """input_ids [T], their embeddings [T, D], given ones included -> layer inputs [T, L, P]."""
        if inputs_embeds is not None:
            input_ids = input_ids.index_fill(0, inputs_embeds.rows, self.pad_id)
        of_token = embed(
            input_ids, self.embed_tokens_per_layer, self.vocab_size, float(self.size) ** 0.5
        )
        projected = linear((embedded,), self.per_layer_model_projection) * self.scale
        rows = projected.shape[0], -1, self.size
        normed = self.per_layer_projection_norm(projected.view(rows))
        return (normed + of_token.view(rows)) * 2.0**-0.5

    def placements(self, name: str) -> dict[str, Placement]:
        return _placements_beside(self, name)


class PerLayerGate(nn.Module):
    """Adds one layer's input to the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        size, inner = config.hidden_size, config.per_layer_input_size
        self.per_layer_input_gate = Linear(size, inner, bias=False)
        self.per_layer_projection = Linear(inner, size, bias=False)
        self.post_per_layer_input_norm = RMSNorm(size, config.rms_norm_eps, config.norm_offset)

    def forward(self, hidden: Tensor, layer_input: Tensor, scalar: Tensor | None) -> Tensor:
        """hidden [T, D], layer_input [T, P], scalar [1] -> the stream after the layer."""
        gate = F.gelu(linear((hidden,), self.per_layer_input_gate), approximate="tanh")
        out = linear((gate * layer_input,), self.per_layer_projection)
        return add_normed(hidden, out, self.post_per_layer_input_norm, scalar)

    def placements(self, name: str) -> dict[str, Placement]:
        return _placements_beside(self, name)


def _placements_beside(module: nn.Module, name: str) -> dict[str, Placement]:
    """Returns the placements of a module whose parts the checkpoint has without the module."""
    placement_of = {}
    for path, parameter in module.named_parameters():
        part, leaf = path.rsplit(".", 1)
        placement = Placement(f"{name}.{part}", leaf, 0, tuple(parameter.shape))
        placement_of[beside(name, path)] = placement
    return placement_of
