"""A draft head that begins with the weights of an earlier one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, shown
from ..models.drafters.base import DraftHead, HeadConfig
from .create_head import trainable
from .new_head import kind_of_head, windows_of

OF_FILES = {
    "format", "captured_by", "suggested_draft_len", "trained_draft_len", "num_mtp_layers",
    "decoder", "draft_window", "value_scale", "trained_acceptance", "confidence_size",
    "confidence_bias",
}  # fmt: skip
"""Fields of a head's config in which an earlier head may differ from one that begins with it."""
OF_LAYERS = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps",
    "norm_offset", "rope_parameters", "rotary_dim", "activation", "swiglu_limit", "qkv_bias",
    "o_bias", "mlp_bias", "qk_norm", "head_gate", "attention_scale", "attention_softcap",
)  # fmt: skip
"""Fields of a head's layers in which it may not."""


def begin_with(head: DraftHead, earlier: DraftHead) -> None:
    """Gives a new head the weights of an earlier one of its kind.

    An EAGLE-3 head may draft among more tokens than the earlier one (`_grown`).

    Raises:
        ConfigError: the heads' kinds, flags or sizes differ, or a token that the earlier head
            drafts is missing here.
    """
    rows, known = _rows_of_earlier(head, earlier), earlier.config
    if rows is not None:
        known = replace(known, draft_vocab_size=head.config.draft_vocab_size)
    check_alike(known, head.config)
    differs = []
    given, wanted = dict(earlier.named_parameters(remove_duplicate=False)), trainable(head)
    for name, parameter in wanted.items():
        weight = given.get(name)
        shape = list(parameter.shape)
        if name == "lm_head.weight" and rows is not None:
            shape[0] = len(rows)
        if weight is None or list(weight.shape) != shape:
            found = "missing" if weight is None else list(weight.shape)
            differs.append(f"{name}: {found} there, {shape} here")
    _refuse(differs)
    for name, parameter in wanted.items():
        if name == "lm_head.weight" and rows is not None:
            parameter.data.copy_(_grown(parameter.data, given[name].data, rows))
        else:
            parameter.data.copy_(given[name])


def check_alike(earlier: HeadConfig, here: HeadConfig) -> None:
    """Raises ConfigError where a head cannot begin with an earlier one, as far as configs say."""
    kinds = [kind_of_head(config) for config in (earlier, here)]
    if kinds[0] != kinds[1]:
        _refuse([f"kind: {kinds[0]} there, {kinds[1]} here"])
    counts = [config.decoder.num_layers for config in (earlier, here)]
    if counts[0] != counts[1]:
        _refuse([f"num_layers: {counts[0]} there, {counts[1]} here"])
    names = [field.name for field in fields(HeadConfig) if field.name not in OF_FILES]
    pairs = [(name, getattr(earlier, name), getattr(here, name)) for name in names]
    pairs += [(name, _of_layers(earlier, name), _of_layers(here, name)) for name in OF_LAYERS]
    differs = [
        f"{name}: {shown(there)} there, {shown(value)} here"
        for name, there, value in pairs
        if there != value
    ]
    differs += other_windows(earlier, windows_of(here))
    if earlier.decoder.attention_sinks != here.decoder.attention_sinks:
        differs.append("attention_sink_bias: sinks there, none here")
    _refuse(differs)


def _refuse(differs: list[str]) -> None:
    """Raises ConfigError where there is a difference."""
    if differs:
        raise ConfigError(
            f"The earlier head is another kind of network ({'; '.join(differs)}). Give options "
            "that make a head like it, or another head."
        )


def _of_layers(config: HeadConfig, name: str) -> Any:
    """Returns a field of the head's layers: one value where they are all alike."""
    decoder = config.decoder
    values = [getattr(decoder.of_layer(i), name) for i in range(decoder.num_layers)]
    return values if any(value != values[0] for value in values) else values[0]


def _rows_of_earlier(head: DraftHead, earlier: DraftHead) -> Tensor | None:
    """Returns which rows of the lm_head are of tokens that the earlier head drafts, in its order.

    None where one of these tokens has no row, or a head drafts among all of the target's.
    """
    if head.d2t is None or earlier.d2t is None:
        return None
    here = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)
    there = earlier.d2t + torch.arange(len(earlier.d2t), device=earlier.d2t.device)
    rows = torch.searchsorted(here, there.to(here.device)).clamp_max(len(here) - 1)
    return rows if torch.equal(here[rows], there.to(here.device)) else None


def _grown(fresh: Tensor, trained: Tensor, rows: Tensor) -> Tensor:
    """Returns an lm_head [Vd, D] whose `rows` are trained ones, and whose others fit these.

    Training has turned the states that the lm_head reads. So the other rows are what the best
    linear map from fresh to trained rows makes of their fresh ones.

    Args:
        fresh: [Vd, D], the target's rows. trained: [len(rows), D].
    """
    fresh, trained = fresh.double(), trained.double()
    known = fresh[rows]
    squares = known.T @ known
    squares.diagonal().add_(1e-6 * squares.diagonal().mean())  # few rows do not say everything
    grown = fresh @ torch.linalg.solve(squares, known.T @ trained)
    grown[rows] = trained
    return grown


def other_windows(earlier: HeadConfig, here: tuple[int | None, ...]) -> list[str]:
    """Returns how an earlier head's sliding windows, by layer, differ from a new one's, if so."""
    there = windows_of(earlier)
    if there == here:
        return []
    cure = f"give --sliding-window {there[0]}" if there[0] else "leave --sliding-window out"
    cure = f" ({cure})" if len(set(there)) == 1 else ""
    return [f"sliding windows of layers: {list(there)} there, {list(here)} here{cure}"]
