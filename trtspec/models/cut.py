"""Whether a model can be cut over a number of ranks."""

from __future__ import annotations

from ..errors import ConfigError
from .config import DecoderConfig


def check_cut(config: DecoderConfig, where: str) -> None:
    """Checks that every layer's sizes divide over the ranks of `config.parallel`.

    Args:
        where: the model's name, for messages.

    Raises:
        ConfigError: with the size that does not, and the numbers of ranks that would do.
    """
    parallel = config.parallel
    if parallel.size == 1:
        return
    for layer in range(config.num_layers):
        for what, value in _sizes(config, layer):
            if value % parallel.size:
                raise ConfigError(
                    f"tensor_parallel_size={parallel.size}: layer {layer} of {where} has {what} "
                    f"{value}, which does not divide. Use one of {_divisors(value)}."
                )
        config_of_layer = config.of_layer(layer)
        heads = config_of_layer.num_kv_heads
        if config_of_layer.mla is None and heads % parallel.size and parallel.size % heads:
            raise ConfigError(
                f"tensor_parallel_size={parallel.size}: layer {layer} of {where} has {heads} KV "
                "heads; the ranks must divide them, or be a multiple of them."
            )
        moe = config.moe_of_layer(layer)
        if moe is None:
            continue
        for name, value, ranks in (
            ("experts", moe.num_experts, parallel.expert_ranks),
            ("an expert width of", moe.intermediate_size, parallel.width_ranks),
        ):
            if value % ranks:
                raise ConfigError(
                    f"moe_expert_parallel_size={parallel.expert_ranks} of "
                    f"{parallel.size} ranks: layer {layer} of {where} has {value} as {name}, which "
                    f"does not divide by {ranks}."
                )


def _sizes(config: DecoderConfig, layer: int) -> list[tuple[str, int]]:
    moe, config = config.moe_of_layer(layer), config.of_layer(layer)
    sizes = [("num_attention_heads", config.num_heads)]
    if moe is None or moe.beside_mlp:
        sizes.append(("intermediate_size", config.intermediate_size))
    elif moe.shared_intermediate_size:
        sizes.append(("the shared experts' width", moe.shared_intermediate_size))
    return sizes


def _divisors(value: int) -> str:
    found = [n for n in range(1, min(value, 64) + 1) if value % n == 0]
    return ", ".join(map(str, found))
