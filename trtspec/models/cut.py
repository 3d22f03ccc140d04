"""Whether a model can be cut over a number of ranks."""

from __future__ import annotations

from ..errors import ConfigError
from .config import DecoderConfig

_MOST = 64  # ranks that a message names


def check_cut(config: DecoderConfig, where: str) -> None:
    """Checks that every layer's sizes divide over the ranks of `config.parallel`.

    Args:
        where: the model's name, for messages.

    Raises:
        ConfigError: with the size that does not divide, and the numbers of ranks that would do.
    """
    size, expert_ranks = config.parallel.size, config.parallel.expert_ranks
    cuts_heads = not config.parallel.attention_dp
    problem = _problem(config, size, cuts_heads)
    if problem is not None:
        fitting = [str(n) for n in range(1, _MOST + 1) if _problem(config, n, cuts_heads) is None]
        raise ConfigError(
            f"tensor_parallel_size={size}: {where} cannot be cut so, for {problem}. Use one of "
            f"{', '.join(fitting)}."
        )
    problem = _problem_of_experts(config, size, expert_ranks)
    if problem is not None:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        fitting = [str(n) for n in divisors if _problem_of_experts(config, size, n) is None]
        cure = f"Use one of {', '.join(fitting)}" if fitting else "Use fewer ranks"
        raise ConfigError(
            f"moe_expert_parallel_size={expert_ranks} of {size} ranks: {where} cannot be cut so, "
            f"for {problem}. {cure}."
        )


def _problem(config: DecoderConfig, size: int, cuts_heads: bool) -> str | None:
    """Returns what of the layers outside their experts does not divide; None if all does."""
    if size == 1:
        return None
    for layer in range(config.num_layers):
        moe, layer_config = config.moe_of_layer(layer), config.of_layer(layer)
        sizes = {"num_attention_heads": layer_config.num_heads if cuts_heads else 0}
        linear = layer_config.linear_attention
        if linear is not None:
            if not cuts_heads:
                return f"layer {layer} has linear attention (enable_attention_dp does not keep it)"
            sizes = {"linear_num_key_heads": linear.num_key_heads}
        if moe is None or moe.beside_mlp:
            sizes["intermediate_size"] = layer_config.intermediate_size
        else:
            sizes["the shared experts' width"] = moe.shared_intermediate_size
        for name, value in sizes.items():
            if value % size:
                return f"layer {layer} has {name} {value}"
        if cuts_heads and layer_config.qk_norm and layer_config.norms_all_heads:
            return (
                f"layer {layer} has norms over all heads at once (enable_attention_dp keeps them)"
            )
        heads = layer_config.num_kv_heads
        if (
            linear is None
            and cuts_heads
            and layer_config.mla is None
            and heads % size
            and size % heads
        ):
            return f"layer {layer} has {heads} KV heads"
    return None


def _problem_of_experts(config: DecoderConfig, size: int, expert_ranks: int) -> str | None:
    """The same of the experts of mixtures."""
    for layer in range(config.num_layers):
        moe, width_ranks = config.moe_of_layer(layer), size // expert_ranks
        if moe is None:
            continue
        if moe.num_experts % expert_ranks:
            return f"layer {layer} has {moe.num_experts} experts"
        if moe.intermediate_size % width_ranks:
            return f"the width of layer {layer}'s experts is {moe.intermediate_size}"
        if moe.names.has_gate_up and not moe.names.interleaves and width_ranks > 1:
            return f"gate and up of layer {layer}'s experts are one tensor, which is not cut"
    return None
