"""Mixtures of experts: in an MLP's place (DeepSeek-V3, GLM-4-MoE, gpt-oss, Qwen3-MoE, Step-3.5), or
beside it (Gemma-4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.parallel import Cut, Parallel, Shard
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..ops.experts.torch import normed_router_logits, route, router_logits
from ..ops.layer.activation import gate_and_mul
from ..ops.layer.norm import add_normed
from .config import MoEConfig, MoENames
from .placement import Placement, beside


class Router(nn.Module):
    """Scores of experts, whose weight and biases stay in float32 whatever the model's dtype."""

    def __init__(self, config: MoEConfig, size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, size), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if config.names.router_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False)
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.has_correction_bias:
            bias = torch.empty(config.num_experts)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> experts [T, k] int64 and their weights [T, k] float32."""
        return self.choose(router_logits(x, self.weight))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, of scores [T, E] without the bias."""
        config = self.config
        return route(
            logits,
            self.e_score_correction_bias,
            config.experts_per_token,
            scoring=config.scoring,
            n_group=config.n_group,
            topk_group=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            logit_bias=self.bias,
        )


class NormedRouter(Router):
    """Gemma-4's: x is normed and scaled before it is scored, the weights by a number per expert."""

    def __init__(self, config: MoEConfig, size: int, eps: float):
        super().__init__(config, size)
        self.norm, self.factor = RMSNorm(size, eps), size**-0.5
        scale = torch.empty(config.num_experts)
        self.per_expert_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().forward(self.norm(x) * self.factor)
        return ids, weights * self.per_expert_scale[ids]


class MoE(nn.Module):
    """Routed experts and, where there are shared ones, an MLP that every row goes through too.

    Args:
        shared_experts: an `MLP` that does not add up the ranks' parts, or None.
    """

    def __init__(self, config: MoEConfig, size: int, shared_experts: Any, parallel: Parallel):
        super().__init__()
        self.gate, self.experts = Router(config, size), _experts(config, size, parallel)
        self.shared_experts, self.ranks = shared_experts, parallel.comm
        self.shared_expert_gate: Linear | None = None
        if config.gates_shared:
            self.shared_expert_gate = Linear(size, 1, bias=False)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden + MoE(norm(hidden)), [T, D], in hidden's memory."""
        x, logits = normed_router_logits(hidden, norm, self.gate.weight)
        chosen = self.gate.choose(logits)
        if self.ranks.size > 1:
            routed = self.experts(x, *chosen)
            if self.shared_experts is not None:
                routed = routed + self._gated(self.shared_experts(hidden, norm, adds=False), x)
            return hidden.add_(self.ranks.all_reduce(routed))
        if self.shared_expert_gate is not None:
            hidden.add_(self._gated(self.shared_experts(hidden, norm, adds=False), x))
        elif self.shared_experts is not None:
            hidden = self.shared_experts(hidden, norm)
        return self.experts(x, *chosen, hidden)

    def _gated(self, shared: Tensor, x: Tensor) -> Tensor:
        """Scales what the shared experts return by the gate of their inputs, [T, D] both."""
        if self.shared_expert_gate is None:
            return shared
        return shared * self.shared_expert_gate(x).sigmoid()

    def placements(self, name: str) -> dict[str, Placement]:
        """Returns the placement of each tensor. All experts are one parameter here, and in the
        checkpoint one tensor, or one each."""
        names = self.gate.config.names
        placement_of = _router_placements(self.gate, f"{name}.gate", name)
        placement_of |= _expert_placements(self.experts, names, f"{name}.experts", name)
        if self.shared_experts is not None:
            shared = beside(name, names.shared)
            placement_of |= _mlp_placements(self.shared_experts, shared, f"{name}.shared_experts")
        if self.shared_expert_gate is not None:
            gate = f"{name}.shared_expert_gate"
            size = self.shared_expert_gate.in_features
            placement_of[beside(name, names.shared_gate)] = Placement(gate, "weight", 0, (1, size))
        return placement_of


class MoEBesideMLP(nn.Module):
    """Gemma-4's: the sum of an MLP and of experts that read the same rows through another norm,
    each of them normed.

        post_1(mlp(norm(hidden))) + post_2(experts(pre_2(hidden)))

    Args:
        mlp: an `MLP` of the decoder. eps, offset: of the norms.
    """

    def __init__(
        self, config: MoEConfig, size: int, mlp: Any, eps: float, offset: float, parallel: Parallel
    ):
        super().__init__()
        self.mlp, self.ranks = mlp, parallel.comm
        self.router = NormedRouter(config, size, eps)
        self.experts = _experts(config, size, parallel)
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps, offset)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps, offset)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps, offset)

    def forward(self, hidden: Tensor, norm: RMSNorm, adds: bool = False) -> Tensor:
        """hidden [T, D] -> what a sandwich layer norms once more and adds, [T, D]."""
        assert not adds
        dense = self.post_feedforward_layernorm_1(self.mlp(hidden, norm, adds=False))
        routed = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router(hidden))
        routed = self.ranks.all_reduce(routed)
        return add_normed(dense, routed, self.post_feedforward_layernorm_2)

    def placements(self, name: str) -> dict[str, Placement]:
        """As `MoE.placements`."""
        router, size = self.router, (self.experts.size,)
        placement_of = _mlp_placements(self.mlp, name, f"{name}.mlp")
        placement_of |= _router_placements(router, f"{name}.router", name)
        placement_of |= _expert_placements(
            self.experts, router.config.names, f"{name}.experts", name
        )
        for norm in (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ):
            placement_of[beside(name, f"{norm}.weight")] = Placement(
                f"{name}.{norm}", "weight", 0, size
            )
        placement_of[beside(name, "router.scale")] = Placement(
            f"{name}.router.norm", "weight", 0, size
        )
        per_expert = Placement(
            f"{name}.router", "per_expert_scale", 0, (self.experts.total,), dtype=torch.float32
        )
        placement_of[beside(name, "router.per_expert_scale")] = per_expert
        return placement_of


def _experts(config: MoEConfig, size: int, parallel: Parallel) -> Experts:
    """Returns this rank's part of a mixture: some experts, or some of each one's width."""
    between = gate_and_mul(config.activation, config.swiglu_limit, config.swiglu_alpha)
    count, ranks = config.num_experts // parallel.expert_ranks, parallel.width_ranks
    first = parallel.rank // ranks * count
    width = config.intermediate_size // ranks
    shard = Shard(0, parallel.rank % ranks, ranks)
    return Experts(
        count,
        size,
        width,
        between,
        has_bias=bool(config.names.expert_bias),
        first=first,
        total=config.num_experts,
        shard=shard,
    )


def _router_placements(router: Router, module: str, name: str) -> dict[str, Placement]:
    names, shape = router.config.names, tuple(router.weight.shape)
    found = {beside(name, names.router): ("weight", shape)}
    if router.bias is not None:
        found[beside(name, names.router_bias)] = ("bias", shape[:1])
    if router.e_score_correction_bias is not None:
        found[beside(name, names.correction_bias)] = ("e_score_correction_bias", shape[:1])
    return {
        source: Placement(module, leaf, 0, shape, dtype=torch.float32)
        for source, (leaf, shape) in found.items()
    }


def _expert_placements(
    experts: Experts, names: MoENames, module: str, name: str
) -> dict[str, Placement]:
    """Returns the placements of a tensor for each expert and part, or for each part; of biases,
    for each part."""
    assert not names.expert_bias or "{expert}" not in names.expert
    first, size, inner = experts.first, experts.size, experts.inner
    parts = _parts(size, inner)
    if names.has_gate_up:
        parts = (("gate_up_proj", "gate_up_proj", 0, (2 * inner, size)), parts[-1])
    placement_of = {}
    for part, leaf, start, shape in parts:
        if "{expert}" in names.expert:
            cut = _width_cut(experts, part, shape)
            for e in range(experts.total):
                source = names.expert.format(expert=e, part=names.parts.get(part, part))
                placement_of[beside(name, source)] = Placement(
                    module,
                    leaf,
                    start,
                    shape,
                    expert=e - first,
                    cut=cut,
                    is_elsewhere=not first <= e < first + experts.num_experts,
                )
        else:
            source = beside(name, names.expert.format(part=part))
            stacked = _stacked(experts, part, Placement(module, leaf, start, shape))
            order = _gates_first(inner) if names.interleaves and part == "gate_up_proj" else None
            by_columns = names.floats_by_columns
            placement_of[source] = replace(stacked, order=order, floats_by_columns=by_columns)
            if names.expert_bias:
                bias = Placement(module, f"{leaf}_bias", start, shape[:1])
                bias = _stacked(experts, part, bias)
                source = beside(name, names.expert_bias.format(part=part))
                placement_of[source] = replace(bias, order=order)
    return placement_of


def _gates_first(inner: int) -> Tensor:
    """Returns the order of rows that are a gate's and an up's in turn."""
    return torch.arange(2 * inner, device="cpu").view(-1, 2).t().flatten()


def _width_cut(experts: Experts, part: str, shape: tuple[int, ...]) -> Cut | None:
    """Returns what a rank takes of one expert's tensor."""
    shard = replace(experts.shard, dim=1 if part == "down_proj" else 0)
    return shard.source(shape[shard.dim])


def _stacked(experts: Experts, part: str, of_one: Placement) -> Placement:
    """Returns the placement of all experts' tensors of a kind as one, [E, …]."""
    count, shape = experts.num_experts, of_one.shape
    cut = None if len(shape) == 1 and part == "down_proj" else _width_cut(experts, part, shape)
    own = Cut(0, experts.first, count, experts.total) if count < experts.total else None
    stacked = replace(of_one, shape=(count, *shape), dim=1)
    if cut is None:
        return replace(stacked, cut=own)
    return replace(stacked, cut=cut._replace(dim=cut.dim + 1), experts=own)


def _mlp_placements(mlp: Any, source: str, module: str) -> dict[str, Placement]:
    size = mlp.down_proj.out_features
    placement_of = {}
    for part, leaf, start, shape in _parts(size, mlp.intermediate_size):
        shard = getattr(mlp, leaf).shard
        placement_of[f"{source}.{part}.weight"] = Placement(
            f"{module}.{leaf}", "weight", start, shape, cut=shard.source(shape[shard.dim])
        )
    return placement_of


def _parts(size: int, inner: int) -> tuple[tuple[str, str, int, tuple[int, int]], ...]:
    """Returns an MLP's (name in the checkpoint, module here, first row there, shape)."""
    return (
        ("gate_proj", "gate_up_proj", 0, (inner, size)),
        ("up_proj", "gate_up_proj", inner, (inner, size)),
        ("down_proj", "down_proj", 0, (size, inner)),
    )
