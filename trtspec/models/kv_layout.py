"""Which KV group each layer of a model keeps its keys and values in.

Layers that look back equally far and keep equally much share a group, and so a block table: a
model of full and sliding-window layers has two groups, most models have one. A layer that reads
another's keys and values has that one's place, and so no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..state.kv_cache import KVGroupSpec
from .config import DecoderConfig


@dataclass(frozen=True)
class KVPlace:
    """Of one layer."""

    group: int  # counted from the model's first
    index: int  # of the layer within the group


def kv_places(config: DecoderConfig) -> tuple[KVPlace, ...]:
    """One for every layer."""
    seen: dict[object, int] = {}
    counts: list[int] = []
    places: list[KVPlace] = []
    for layer in range(config.num_layers):
        source = config.kv_layer(layer)
        if source != layer:
            places.append(places[source])
            continue
        group = seen.setdefault(_kind(config, layer), len(seen))
        if group == len(counts):
            counts.append(0)
        places.append(KVPlace(group, counts[group]))
        counts[group] += 1
    return tuple(places)


def kv_group_specs(config: DecoderConfig, dtype: torch.dtype) -> list[KVGroupSpec]:
    """The shapes of the model's groups, in their order."""
    places = kv_places(config)
    specs = []
    for group in range(max(place.group for place in places) + 1):
        layers = [i for i, place in enumerate(places) if place.group == group]
        count = len({places[i] for i in layers})  # of those with keys and values of their own
        window, kv_heads, head_dim, value_dim = _kind(config, layers[0])
        specs.append(
            KVGroupSpec(count, kv_heads, head_dim, dtype, window=window, value_dim=value_dim)
        )
    return specs


def _kind(config: DecoderConfig, layer: int) -> tuple[int | None, int, int, int | None]:
    own = config.of_layer(layer)
    if own.mla is not None:
        return config.window(layer), 1, own.mla.latent_dim, own.mla.kv_lora_rank
    return config.window(layer), own.num_kv_heads, own.head_dim, None
