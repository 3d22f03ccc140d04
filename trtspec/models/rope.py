"""The cosine and sine table of rotary position embedding, equal to what transformers computes.

Scaled variants come from transformers' own table of formulas, so that a model's context
extension means here what it means there.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ..errors import ConfigError
from .config import DecoderConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def build_cos_sin(config: DecoderConfig, num_positions: int | None = None) -> Tensor:
    """[num_positions, head_dim] float32: cos of the D/2 frequencies, then their sin.

    By default for max_position_embeddings. A draft head must cover its target's context, however
    few positions its own config names.

    Both halves carry the attention scaling of the RoPE type (yarn's; 1 for the others). Always
    on the CPU, also inside `with torch.device("meta")`.

    Raises:
        ConfigError: a RoPE type outside `ROPE_TYPES`.
    """
    with torch.device("cpu"):
        inv_freq, scaling = _frequencies(config)
        positions = torch.arange(
            num_positions or config.max_position_embeddings, dtype=torch.float32
        )
        angles = positions[:, None] * inv_freq.float()  # [P, D/2]
        return torch.cat([angles.cos() * scaling, angles.sin() * scaling], dim=-1)


def _frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """[D/2] float32 inverse frequencies, and the factor on cos and sin."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type={rope_type!r} is not supported; allowed are {', '.join(ROPE_TYPES)}. "
            "Use a checkpoint with one of these."
        )
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # What the formulas read of a transformers config; the parameters are in its newest form.
    view = SimpleNamespace(
        rope_parameters=dict(config.rope_parameters),
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](view, torch.device("cpu"))
    return inv_freq, float(scaling)
