"""The mixture of experts that stands in an MLP's place (DeepSeek-V3, GLM-4-MoE, Qwen3-MoE)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.moe import Experts, route, router_logits
from ..ops.norm import RMSNorm
from .config import MoEConfig

if TYPE_CHECKING:
    from .weights import Placement


class Router(nn.Module):
    """Scores of experts, whose weight and bias stay in float32 whatever the model's dtype."""

    def __init__(self, config: MoEConfig, size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, size), requires_grad=False)
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.has_correction_bias:
            bias = torch.empty(config.num_experts)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> experts [T, k] int64 and their weights [T, k] float32."""
        config = self.config
        return route(
            router_logits(x, self.weight), self.e_score_correction_bias,
            config.experts_per_token, scoring=config.scoring, n_group=config.n_group,
            topk_group=config.topk_group, normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )  # fmt: skip


class MoE(nn.Module):
    """Routed experts and, where there are shared ones, an MLP that every row goes through too."""

    def __init__(self, config: MoEConfig, size: int, shared_experts: Any = None):
        """`shared_experts` is an `MLP` of the decoder's, or None."""
        super().__init__()
        self.gate = Router(config, size)
        self.experts = Experts(config.num_experts, size, config.intermediate_size)
        self.shared_experts = shared_experts

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden + MoE(norm(hidden)), [T, D], in hidden's memory."""
        x = norm(hidden)
        routed = self.experts(x, *self.gate(x))
        if self.shared_experts is not None:
            hidden = self.shared_experts(hidden, norm)
        return hidden + routed if torch.is_grad_enabled() else hidden.add_(routed)

    def placements(self, name: str) -> dict[str, Placement]:
        """Checkpoint name -> its place. Experts are stacked here and single there."""
        from .weights import Placement  # which imports the decoder, which imports this

        experts, gate = self.experts, f"{name}.gate"
        count, size = experts.num_experts, experts.size
        router: dict[str, tuple[int, ...]] = {"weight": (count, size)}
        if self.gate.e_score_correction_bias is not None:
            router["e_score_correction_bias"] = (count,)
        places = {
            f"{gate}.{leaf}": Placement(gate, leaf, 0, shape, dtype=torch.float32)
            for leaf, shape in router.items()
        }
        for part, leaf, start, shape in _parts(size, experts.inner):
            for e in range(count):
                places[f"{name}.experts.{e}.{part}.weight"] = Placement(
                    f"{name}.experts", leaf, start, shape, expert=e
                )
        if self.shared_experts is not None:
            own = f"{name}.shared_experts"
            for part, leaf, start, shape in _parts(size, self.shared_experts.intermediate_size):
                places[f"{own}.{part}.weight"] = Placement(f"{own}.{leaf}", "weight", start, shape)
        return places


def _parts(size: int, inner: int) -> tuple[tuple[str, str, int, tuple[int, int]], ...]:
    """Of an MLP: name in the checkpoint, where it is stacked, its first row there, its shape."""
    return (
        ("gate_proj", "gate_up_proj", 0, (inner, size)),
        ("up_proj", "gate_up_proj", inner, (inner, size)),
        ("down_proj", "down_proj", 0, (size, inner)),
    )
