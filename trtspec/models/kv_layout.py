"""Where the keys and values of each layer are: a KV group, and an index in it.

Layers that look back equally far and keep equally much share a group, and so a block table: a
model of full and sliding-window layers has two groups, most models have one. A layer that reads
another's keys and values has that one's location, and so no memory. Linear attention has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..state.kv_cache import KVGroupSpec
from ..utils import renamed
from .config import DecoderConfig


@dataclass(frozen=True)
class KVLocation:
    """Where one layer's keys and values are."""

    group: int  # counted from the model's first
    index: int  # of the layer within the group


def kv_locations(config: DecoderConfig) -> dict[int, KVLocation]:
    """Returns the location of every layer that has keys and values."""
    seen: dict[object, int] = {}
    counts: list[int] = []
    locations: dict[int, KVLocation] = {}
    without = config.linear_layers
    for layer in range(config.num_layers):
        if layer in without:
            continue
        source = config.kv_layer(layer)
        if source != layer:
            locations[layer] = locations[source]
            continue
        group = seen.setdefault(_kind(config, layer), len(seen))
        if group == len(counts):
            counts.append(0)
        locations[layer] = KVLocation(group, counts[group])
        counts[group] += 1
    return locations


def kv_group_specs(config: DecoderConfig, dtype: torch.dtype) -> list[KVGroupSpec]:
    """Returns the shapes of the model's groups, in their order; none without layers."""
    locations = kv_locations(config)
    specs = []
    for group in range(max((location.group for location in locations.values()), default=-1) + 1):
        layers = [i for i, location in locations.items() if location.group == group]
        count = len({locations[i] for i in layers})  # of those with keys and values of their own
        window, kv_heads, head_dim, value_dim = _kind(config, layers[0])
        specs.append(
            KVGroupSpec(count, kv_heads, head_dim, dtype, window=window, value_dim=value_dim)
        )
    return specs


def with_scales(
    specs: Sequence[KVGroupSpec],
    config: DecoderConfig,
    scales: Sequence[tuple[Tensor, Tensor]],
) -> list[KVGroupSpec]:
    """Returns groups in FP8 with the scales of their layers.

    Args:
        scales: of every layer of the model, of keys and of values, each [Hkv] float32.
    """
    locations, found = kv_locations(config), []
    for group, spec in enumerate(specs):
        of_group = {
            location.index: scales[layer]
            for layer, location in locations.items()
            if location.group == group and config.kv_layer(layer) == layer
        }
        k, v = (torch.stack([of_group[i][side] for i in range(spec.num_layers)]) for side in (0, 1))
        # The values of latent attention are part of the keys.
        found.append(replace(spec, k_scales=k, v_scales=v if spec.value_dim is None else k))
    return found


def _kind(config: DecoderConfig, layer: int) -> tuple[int | None, int, int, int | None]:
    """Returns what layers of one group have in common: window, heads and size of keys, and the
    size of values where these are the beginning of the keys (latent attention)."""
    layer_config = config.part_of_layer(layer)
    if layer_config.mla is not None:
        return config.window(layer), 1, layer_config.mla.latent_dim, layer_config.mla.kv_lora_rank
    return config.window(layer), layer_config.num_kv_heads, layer_config.head_dim, None


__getattr__ = renamed(__name__, {"KVPlace": "KVLocation", "kv_places": "kv_locations"})
