"""Settings that the doctor tries, and those that concern every head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.families.long_rope import rope_of_other_layers
from ..models.config import DecoderConfig
from ..models.decoder import Attention
from ..models.drafters.base import DraftHead
from ..models.mla import MLAttention
from ..models.rope import NOT_ROTATED, RopeTables
from ..train.unroll import Use

Change = Callable[[Any], None]
Rope = dict[str, Any]
_USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True)
class Setting(Use):
    """How the drafter is used, and what it reads of the target."""

    layers: tuple[int, ...] | None = None  # captured; None is what the head says
    before_norm: bool = False  # the target's last states without its final norm
    norms_last: bool = False  # the last layer's captured state with it


@dataclass(frozen=True)
class Trial:
    """A setting to try: changes the drafter for a while, or how it is used."""

    name: str
    cure: str
    change: Change = lambda drafter: None
    sets: Mapping[str, Any] = field(default_factory=dict)  # fields of `Setting`
    is_usual: bool = False  # the setting that heads have by default


def pairs(trials: Sequence[Trial], d2t: Tensor) -> list[Trial]:
    """Combines each change of the vocabulary's map with each other change."""
    maps = vocabulary_trials(d2t)
    names = {trial.name for trial in maps}

    def both(one: Trial, other: Trial) -> Trial:
        def change(head: DraftHead) -> None:
            one.change(head)
            other.change(head)

        return Trial(
            f"{one.name} and {other.name}",
            f"{one.cure}; {other.cure}",
            change,
            {**one.sets, **other.sets},
        )

    return [both(one, other) for one in maps for other in trials if other.name not in names]


def shift_trials() -> list[Trial]:
    return [
        Trial(
            "the head reads a row's own token, not the next one",
            "the head was trained on unshifted ids: train it with ids shifted left by one",
            sets={"shift": 0},
        ),
        Trial(
            "the head reads the token after the next one",
            "the head was trained on ids shifted by two: train it with ids shifted left by one",
            sets={"shift": 2},
        ),
    ]


def window_trials(head: DraftHead) -> list[Trial]:
    """Layers without windows, where some have one."""
    windows = [layer.window for layer in _layers_with_windows(head)]
    if not windows:
        return []

    def drop(head: DraftHead) -> None:
        for layer in _layers_with_windows(head):
            layer.window = None

    return [
        Trial(
            "the head's layers should have no window",
            "remove layer_types, sliding_window, use_swa, swa_window_size and draft_window from "
            f"config.json; the shortest window is now {min(windows)}",
            drop,
        )
    ]


def _layers_with_windows(head: DraftHead) -> list[Any]:
    layers = [m for m in head.modules() if isinstance(m, Attention | MLAttention)]
    return [layer for layer in layers if layer.window is not None]


def vocabulary_trials(d2t: Tensor) -> list[Trial]:
    rows = torch.arange(len(d2t), device=d2t.device)

    def use(new: Tensor) -> Change:
        def change(head: DraftHead) -> None:
            head.d2t = new

        return change

    return [
        Trial("d2t holds ids in place of offsets", "subtract arange from d2t", use(d2t - rows)),
        Trial("d2t maps one token too high", "subtract 1 from d2t", use(d2t - 1)),
        Trial("d2t maps one token too low", "add 1 to d2t", use(d2t + 1)),
        Trial(
            "draft ids are the target's own",
            "remove d2t and t2d, or set d2t to zeros",
            use(torch.zeros_like(d2t)),
        ),
    ]


def flip_norm_output(head: DraftHead) -> None:
    head.config = replace(head.config, norm_output=not head.config.norm_output)


def swap_halves(weight: torch.nn.Parameter) -> None:
    """Swaps the two halves of a weight's columns, as if its two inputs were swapped."""
    half = weight.shape[1] // 2
    weight.data = torch.cat([weight.data[:, half:], weight.data[:, :half]], dim=1)


# -- RoPE --------------------------------------------------------------------------------------
def rope_trials(head: DraftHead, target: DecoderConfig) -> list[Trial]:
    """Other rotations, for each kind of the head's layers where there are several."""
    decoder = head.config.decoder
    kinds = list(dict.fromkeys(decoder.layer_types[: decoder.num_layers])) or [""]
    trials = [trial for kind in kinds for trial in _rope_trials_of(kind, decoder, target)]
    if len(kinds) == 2:
        one, other = (_rope_of(decoder, kind) for kind in kinds)
        if one != other:
            trials.append(
                Trial(
                    "RoPE of the head's two kinds of layers is swapped",
                    f"rope_parameters in config.json: {kinds[0]} {other}, {kinds[1]} {one}",
                    _with_ropes({kinds[0]: other, kinds[1]: one}),
                )
            )
    return trials


def _rope_trials_of(kind: str, decoder: DecoderConfig, target: DecoderConfig) -> list[Trial]:
    """kind: "" where all layers are alike."""
    now, of_kind = _rope_of(decoder, kind), f" of its {kind} layers" if kind else ""
    if now == NOT_ROTATED:
        return []
    trials, bases = list[Trial](), set() if _is_scaled(now) else {now.get("rope_theta")}
    for name, parameters in _candidates(target, kind, decoder):
        theta, is_of_target = parameters["rope_theta"], bool(name)
        if parameters == now or (not is_of_target and theta in bases):
            continue
        if not _is_scaled(parameters):
            bases.add(theta)
        what = f"rope_theta{of_kind} should be {name or 'another'}, {theta:g}"
        if not is_of_target and theta == now.get("rope_theta"):
            what = f"RoPE{of_kind} should not be scaled"
        trials.append(
            Trial(
                what,
                f'"rope_theta"{of_kind}: {theta:g} in config.json, now {now.get("rope_theta"):g}'
                + (f" ({parameters})" if _is_scaled(parameters) or _is_scaled(now) else ""),
                _with_ropes({kind: parameters}),
                is_usual=is_of_target and (not kind or f" {kind} " in name),
            )
        )
    return trials


def _candidates(
    target: DecoderConfig, kind: str, decoder: DecoderConfig
) -> Iterator[tuple[str, Rope]]:
    """Yields (name of the target's layers, "" for a usual base; the parameters).

    The target's come first, those of the same kind before others. A head may be trained without
    the scaling that extends its target's context.
    """
    kinds = list(dict.fromkeys(target.layer_types[: target.num_layers]))
    seen: list[Rope] = []
    for target_kind in sorted(kinds, key=lambda k: k != kind) or [""]:
        rotary_dim = decoder.rotary_dim or decoder.head_dim
        parameters = rope_of_other_layers(_rope_of(target, target_kind), rotary_dim)
        if parameters not in (NOT_ROTATED, *seen):
            seen.append(parameters)
            name = f"the target's {target_kind} layers'" if target_kind else "the target's"
            yield name, parameters
    for theta in (_rope_of(decoder, kind)["rope_theta"], *_USUAL_BASES):
        yield "", {"rope_type": "default", "rope_theta": theta}


def _is_scaled(parameters: Rope) -> bool:
    return parameters.get("rope_type", "default") != "default"


def _rope_of(config: DecoderConfig, kind: str) -> Rope:
    return config.type_fields.get(kind, {}).get("rope_parameters", config.rope_parameters)


def _with_ropes(ropes: Mapping[str, Rope]) -> Change:
    """ropes: kind of layers -> its parameters."""

    def change(head: DraftHead) -> None:
        decoder = head.config.decoder
        types = {kind: dict(fields) for kind, fields in decoder.type_fields.items()}
        for kind, parameters in ropes.items():
            if kind:
                types.setdefault(kind, {})["rope_parameters"] = parameters
            else:
                decoder = replace(decoder, rope_parameters=parameters)
        decoder = replace(decoder, type_fields=types)
        head.config = replace(head.config, decoder=decoder)
        now = head.rope_tables
        head.rope_tables = RopeTables(decoder, now.num_positions).to(next(now.buffers()).device)

    return change
