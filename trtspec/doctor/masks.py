"""Trials of the token and state that a masked drafter reads at its masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import is_int
from ..models.config import DecoderConfig
from ..models.drafters.base import DraftHead
from ..models.drafters.eagle import Eagle3Head
from .trials import Change, Trial

MOST_TRIED = 32


def mask_token_trials(
    now: int, tokens: Mapping[int, str], use: Callable[[int], Change]
) -> list[Trial]:
    """Returns trials of other mask tokens; `use` makes the change to one."""
    return [
        Trial(
            f"the mask token should be {token}, {name}",
            f"the mask token in config.json (mask_token_id, ptd_token_id or pard_token) = {token}, "
            f"now {now}",
            use(token),
        )
        for token, name in tokens.items()
        if token != now
    ]


def reading(token: int) -> Change:
    """Returns the change by which a head reads a token at its masks."""

    def change(head: DraftHead) -> None:
        head.config = replace(head.config, mask_token_id=token)

    return change


def mask_trials(
    head: Eagle3Head, raw: Tensor, state_size: float, tokens: Mapping[int, str]
) -> list[Trial]:
    """Returns trials of the token and the state that a P-EAGLE head reads at its masks.

    Args:
        raw: [1, n * Ht], the checkpoint's mask_hidden.
        state_size: the root mean square of what stands in its place where it is known.
    """
    assert head.config.mask_token_id is not None

    def read_state(state: Tensor) -> Change:
        def change(head: Eagle3Head) -> None:
            now = head.mask_hidden
            assert now is not None
            head.mask_hidden = head.project_target_hidden(state.to(now.device, now.dtype))[0]

        return change

    return mask_token_trials(head.config.mask_token_id, tokens, reading) + [
        Trial(f"mask_hidden {name}", cure, read_state(state))
        for name, cure, state in _other_states(raw, len(head.layers_to_capture), state_size)
    ]


def _other_states(
    raw: Tensor, num_captured: int, state_size: float
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (what is wrong, the cure, the state)."""
    yield (
        "is not what it was trained to be: zeros do better",
        "copy mask_hidden again from the head's source",
        torch.zeros_like(raw),
    )
    if num_captured > 1:
        yield (
            "has the captured layers' parts in reverse order",
            "reverse the order of the parts of mask_hidden, one for each captured layer",
            torch.cat(raw.chunk(num_captured, dim=-1)[::-1], dim=-1),
        )
    size = float(raw.float().square().mean().sqrt())
    factors = [10.0, 0.1, state_size / size] if size else []
    for factor in factors:
        if math.isclose(factor, 1.0, rel_tol=0.05):
            continue
        wrong = "small" if factor > 1 else "large"
        yield (
            f"is too {wrong}, {max(factor, 1 / factor):.3g} times",
            f"multiply mask_hidden by {factor:.3g}",
            raw * factor,
        )


def special_tokens(
    raw: Mapping[str, Any], vocab_size: int, target: DecoderConfig, tokenizer: Any = None
) -> tuple[dict[int, str], list[str]]:
    """The names of special tokens by id, and a note where there are too many to try.

    Args:
        raw, vocab_size: the drafter's config.json and vocabulary. tokenizer: the target's.
    """
    found: dict[int, str] = {}
    for name, token in _named(raw, vocab_size, target, tokenizer):
        if 0 <= token < vocab_size:
            found.setdefault(token, name)
    chosen = dict(list(found.items())[:MOST_TRIED])
    notes = []
    if len(found) > MOST_TRIED:
        notes.append(
            f"Of {len(found)} special tokens {MOST_TRIED} were tried in the place of the mask."
        )
    return chosen, notes


def without_twins(tokens: Mapping[int, str], now: int, embedding: Tensor) -> dict[int, str]:
    """Leaves out tokens that a drafter cannot tell from an earlier one, or from its mask token.

    Tokens that the target's training never saw often have one embedding.
    """
    found, rows = dict[int, str](), [embedding[now]]
    for token, name in tokens.items():
        row = embedding[token]
        if not any(torch.equal(row, other) for other in rows):
            found[token] = name
            rows.append(row)
    return found


def _named(
    raw: Mapping[str, Any], vocab_size: int, target: DecoderConfig, tokenizer: Any
) -> Iterator[tuple[str, int]]:
    """Yields (name, token): first tokens with a role in a config, then the tokenizer's."""
    for source, config in (
        ("of its config.json", raw),
        ("of the target's config.json", target.raw),
    ):
        nested = [value for value in config.values() if isinstance(value, dict)]
        for fields in (config, *nested):
            for name, value in fields.items():
                if not str(name).endswith(("_token_id", "_token", "_token_ids")):
                    continue
                if str(name).startswith("num_"):  # num_experts_per_token
                    continue
                for token in value if isinstance(value, list) else [value]:
                    if is_int(token):
                        yield f"{name} {source}", token
    yield "the first token", 0
    yield "the last token", vocab_size - 1
    if tokenizer is not None:
        for name, token in zip(
            tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True
        ):
            yield f"{name} of the tokenizer", token
        for token, added in sorted(tokenizer.added_tokens_decoder.items()):
            yield f"{added} of the tokenizer", token
