"""The mixture-of-experts fields that families share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...checks import MAX_SIZE, checked_int, checked_positive
from ...errors import CheckpointError
from ...models.config import MoEConfig, MoENames
from .family import refuse_other

_SIZES, _COUNTS = range(1, MAX_SIZE + 1), range(1, 4096 + 1)
"""Of widths; of experts and their groups."""


def deepseek_moe(hf: Any, where: Path) -> MoEConfig | None:
    """The mixture that DeepSeek-V3's fields describe, which GLM-4-MoE's config has too; None where
    every layer is dense.

    Raises:
        CheckpointError: a number is out of its range, or a variant is named that is not computed.
    """
    refuse_other(hf, where, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    first = _count(hf, "first_k_dense_replace", range(MAX_SIZE + 1), where)
    if first >= hf.num_hidden_layers + (getattr(hf, "num_nextn_predict_layers", None) or 0):
        return None
    inner = _count(hf, "moe_intermediate_size", _SIZES, where)
    moe = MoEConfig(
        num_experts=_count(hf, "n_routed_experts", _COUNTS, where),
        experts_per_token=_count(hf, "num_experts_per_tok", _COUNTS, where),
        intermediate_size=inner,
        shared_intermediate_size=inner * _count(hf, "n_shared_experts", range(65), where),
        n_group=_count(hf, "n_group", _COUNTS, where),
        topk_group=_count(hf, "topk_group", _COUNTS, where),
        norm_topk_prob=bool(hf.norm_topk_prob),
        routed_scaling_factor=_factor(hf, "routed_scaling_factor", where),
        first_k_dense_replace=first,
    )
    _check_choice(moe, where)
    return moe


def qwen_moe(hf: Any, where: Path) -> MoEConfig:
    """Qwen3-MoE's, in every layer: softmax over all experts, no bias, no groups, nothing shared.

    Raises:
        CheckpointError: as `deepseek_moe`.
    """
    refuse_other(hf, where, decoder_sparse_step=1, mlp_only_layers=[])
    moe = MoEConfig(
        num_experts=_count(hf, "num_experts", _COUNTS, where),
        experts_per_token=_count(hf, "num_experts_per_tok", _COUNTS, where),
        intermediate_size=_count(hf, "moe_intermediate_size", _SIZES, where),
        scoring="softmax",
        has_correction_bias=False,
        norm_topk_prob=bool(getattr(hf, "norm_topk_prob", True)),
    )
    _check_choice(moe, where)
    return moe


def gpt_oss_moe(hf: Any, where: Path) -> MoEConfig:
    """gpt-oss's: softmax over the chosen experts, which is softmax over all, normalized; biases in
    router and experts, and a clamped activation.

    Raises:
        CheckpointError: as `deepseek_moe`.
    """
    count = _count(hf, "num_local_experts", _COUNTS, where)
    return MoEConfig(
        num_experts=count,
        experts_per_token=_count(hf, "num_experts_per_tok", range(1, count + 1), where),
        intermediate_size=_count(hf, "intermediate_size", _SIZES, where),
        scoring="softmax",
        has_correction_bias=False,
        swiglu_limit=_factor(hf, "swiglu_limit", where, 7.0),
        swiglu_alpha=_factor(hf, "swiglu_alpha", where, 1.702),
        names=MoENames(
            router="mlp.router.weight",
            router_bias="mlp.router.bias",
            expert="mlp.experts.{part}",
            expert_bias="mlp.experts.{part}_bias",
            has_gate_up=True,
            interleaves=True,
            floats_by_columns=True,
        ),
    )


_MIXTRAL_NAMES = MoENames(
    router="block_sparse_moe.gate.weight",
    correction_bias="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{expert}.{part}.weight",
    parts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)


def mixtral_moe(hf: Any, where: Path, has_bias: bool) -> MoEConfig:
    """Mixtral's: softmax over the chosen experts, which is softmax over all, normalized. With a
    bias MiniMax-M2's: sigmoids, and a bias for the choice.

    Raises:
        CheckpointError: as `deepseek_moe`.
    """
    count = _count(hf, "num_local_experts", _COUNTS, where)
    return MoEConfig(
        num_experts=count,
        experts_per_token=_count(hf, "num_experts_per_tok", range(1, count + 1), where),
        intermediate_size=_count(hf, "intermediate_size", _SIZES, where),
        scoring="sigmoid" if has_bias else "softmax",
        has_correction_bias=has_bias,
        names=_MIXTRAL_NAMES,
    )


def step_moe(raw: Mapping[str, Any], where: Path) -> MoEConfig:
    """Step-3.5's, by its own names: DeepSeek-V3's router without groups, one shared expert. Scores
    are taken in float32 here whatever `need_fp32_gate` says.

    Raises:
        CheckpointError: as `deepseek_moe`.
    """
    for name, only in (("moe_router_activation", "sigmoid"), ("norm_expert_weight", True)):
        if raw.get(name, only) != only:
            raise CheckpointError(
                f"{where}: {name}={raw[name]!r} is not supported; allowed is {only!r}. Use another "
                "model."
            )
    hf = SimpleNamespace(**raw)
    count = _count(hf, "moe_num_experts", _COUNTS, where)
    return MoEConfig(
        num_experts=count,
        experts_per_token=_count(hf, "moe_top_k", range(1, count + 1), where),
        intermediate_size=_count(hf, "moe_intermediate_size", _SIZES, where),
        shared_intermediate_size=_count(hf, "share_expert_dim", _SIZES, where),
        has_correction_bias=bool(raw.get("use_moe_router_bias")),
        routed_scaling_factor=_factor(hf, "moe_router_scaling_factor", where),
        names=MoENames(
            router="moe.gate.weight",
            correction_bias="moe.router_bias",
            expert="moe.{part}.weight",
            shared="share_expert",
        ),
    )


def gemma_moe(hf: Any, where: Path) -> MoEConfig | None:
    """Gemma-4's, beside the MLP: softmax over all experts, whose gates are the MLP's; None where
    `enable_moe_block` is not set.

    Raises:
        CheckpointError: as `deepseek_moe`.
    """
    if not getattr(hf, "enable_moe_block", False):
        return None
    count = _count(hf, "num_experts", _COUNTS, where)
    return MoEConfig(
        num_experts=count,
        experts_per_token=_count(hf, "top_k_experts", range(1, count + 1), where),
        intermediate_size=_count(hf, "moe_intermediate_size", _SIZES, where),
        scoring="softmax",
        has_correction_bias=False,
        activation="gelu_tanh",
        beside_mlp=True,
        names=MoENames("router.proj.weight", expert="experts.{part}", has_gate_up=True),
    )


def _check_choice(moe: MoEConfig, where: Path) -> None:
    count, groups = moe.num_experts, moe.n_group
    per_group = count // groups
    if count % groups or moe.topk_group > groups or (groups > 1 and per_group < 2):
        raise CheckpointError(
            f"{where}: {count} experts in n_group={groups} groups of which topk_group="
            f"{moe.topk_group} are searched: groups must be of one size, at least 2, and no more "
            "searched than there are. Correct n_group and topk_group."
        )
    if moe.experts_per_token > moe.topk_group * per_group:
        raise CheckpointError(
            f"{where}: num_experts_per_tok={moe.experts_per_token}, but the {moe.topk_group} "
            f"searched groups hold {moe.topk_group * per_group} experts. Lower it."
        )


def _count(hf: Any, name: str, allowed: range, where: Path) -> int:
    value = getattr(hf, name, None)
    value = 0 if value is None and 0 in allowed else value
    return checked_int(where, name, value, allowed)


def _factor(hf: Any, name: str, where: Path, default: float = 1.0) -> float:
    return checked_positive(where, name, getattr(hf, name, default))
