"""The cosine and sine tables of rotary position embedding, equal to what transformers computes.

Scaled variants come from transformers' own table of formulas, so that a model's context
extension means here what it means there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops.layer.rope import Rope
from .config import DecoderConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
NOT_ROTATED = {"rope_type": "none"}
"""RoPE parameters of layers without positions (NoPE), here alone: no config.json has them."""


class RopeTables(nn.Module):
    """Holds the tables of a model's layers; layers with the same rotation share one.

    Args:
        num_positions: None is max_position_embeddings.
    """

    def __init__(self, config: DecoderConfig, num_positions: int | None = None):
        super().__init__()
        names: dict[str, str] = {}
        self._name_of_layer: list[str] = []
        self._axes = nn.Module()  # of tables with M-RoPE, [head_dim] int64 by the table's name
        for layer in range(config.num_layers):
            layer_config = config.of_layer(layer)
            rope = layer_config.rope_parameters
            kind = repr((sorted(rope.items()), layer_config.head_dim, layer_config.rotary_dim))
            if kind not in names:
                names[kind] = f"table{len(names)}"
                table = build_cos_sin(layer_config, num_positions)  # [positions, head_dim] float32
                self.register_buffer(names[kind], table, persistent=False)
                axes = axis_of_frequency(rope)
                if axes is not None:
                    self._axes.register_buffer(names[kind], axes.repeat(2), persistent=False)
            self._name_of_layer.append(names[kind])

    def at(self, position_ids: Tensor, meta: Any = None) -> list[Rope]:
        """Returns the rotation of every layer.

        Args:
            position_ids: [T] int64.
            meta: the pass's metadata. Its `rope_position_ids`, if it has some, are for tables with
                M-RoPE; the others use `position_ids`.
        """
        rope_positions = getattr(meta, "rope_position_ids", None)
        ropes = {
            name: self._rope(name, table, position_ids, rope_positions)
            for name, table in self.named_buffers(recurse=False)
        }
        return [ropes[name] for name in self._name_of_layer]

    @property
    def has_axes(self) -> bool:
        """Whether rows may stand at three positions each (M-RoPE)."""
        return next(self._axes.buffers(), None) is not None

    def _rope(
        self, name: str, table: Tensor, position_ids: Tensor, rope_positions: Tensor | None
    ) -> Rope:
        axes = getattr(self._axes, name, None)
        if axes is None or rope_positions is None:
            return Rope(table, position_ids)
        rope_positions = rope_positions.clamp_max(len(table) - 1)  # rows past the sequence's end
        if rope_positions.dim() == 1:
            return Rope(table, rope_positions)
        of_axes = axes.expand(1, rope_positions.shape[1], -1)
        rotations = table[rope_positions].gather(0, of_axes)[0]  # [T, head_dim]
        return Rope(rotations, torch.arange(len(rotations), device=table.device))

    @property
    def num_positions(self) -> int:
        """Rows of every table. Without layers no position is looked up, and any will do."""
        table = next(self.buffers(recurse=False), None)
        return 2**63 - 1 if table is None else table.shape[0]


def build_cos_sin(config: DecoderConfig, num_positions: int | None = None) -> Tensor:
    """Returns cos of the D/2 frequencies, then their sin: [num_positions, head_dim] float32.

    The default is max_position_embeddings. A draft head must cover its target's context, however
    few positions its config names.

    Pass-through dimensions (those after the first `rotary_dim`) have angle 0. The frequencies of
    the rotary ones come first, which is how `rotation_order` lays out a head.

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
        angles = positions[:, None] * inv_freq.float()  # [P, R/2]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        pad = 0, (config.head_dim - 2 * angles.shape[1]) // 2  # pass-through dimensions
        return torch.cat([F.pad(cos, pad, value=1.0), F.pad(sin, pad)], dim=-1)


def axis_of_frequency(parameters: Mapping[str, Any]) -> Tensor | None:
    """Returns the axis (time, height, width) whose position rotates each frequency, [D/2] int64.

    None without M-RoPE (Qwen2-VL, arXiv:2409.12191).
    """
    sections = parameters.get("mrope_section")
    if not sections:
        return None
    with torch.device("cpu"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))


def rotation_order(config: DecoderConfig) -> Tensor | None:
    """Returns the checkpoint's dimension at each of ours, [head_dim] int64; None if all are equal.

    The rotation here pairs i with i + head_dim/2. Where only the first R dimensions are rotary,
    the checkpoint pairs i with i + R/2. Queries and keys laid out alike score as before.
    """
    dim, rotary = config.head_dim, config.rotary_dim
    if rotary is None or rotary == dim:
        return None
    order = torch.arange(dim, device="cpu")
    first, second = order[:rotary].chunk(2)
    passed = order[rotary:].chunk(2)  # pass-through dimensions
    return torch.cat([first, passed[0], second, passed[1]])


def _frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """[R/2] float32 inverse frequencies, and the factor on cos and sin."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == NOT_ROTATED["rope_type"]:
        return torch.zeros(config.head_dim // 2), 1.0
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type={rope_type!r} is not supported; allowed are {', '.join(ROPE_TYPES)}. "
            "Use a checkpoint with one of these."
        )
    if rope_type == "default":
        size = config.rotary_dim or config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # What the formulas read of a transformers config; the parameters are in its newest form.
    view = SimpleNamespace(
        rope_parameters=dict(config.rope_parameters),
        head_dim=config.rotary_dim or config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    try:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](view, torch.device("cpu"))
    except KeyError as error:
        raise ConfigError(
            f"rope_type={rope_type!r} needs {error} in the RoPE parameters; they are "
            f"{config.rope_parameters}. Copy config.json again from the model's source."
        ) from error
    return inv_freq, float(scaling)
