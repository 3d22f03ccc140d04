"""Tokens that may be the mask a parallel drafter was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..models.config import DecoderConfig

MOST_TRIED = 32


def special_tokens(
    raw: Mapping[str, Any], target: DecoderConfig, tokenizer: Any = None
) -> tuple[dict[str, int], list[str]]:
    """Special tokens by name, each id once, and a note where there are too many to try.

    Args:
        raw: the drafter's config.json. tokenizer: the target's.
    """
    found: dict[int, str] = {}
    for name, token in _named(raw, target, tokenizer):
        if 0 <= token < target.vocab_size:
            found.setdefault(token, name)
    chosen = {name: token for token, name in list(found.items())[:MOST_TRIED]}
    notes = []
    if len(found) > MOST_TRIED:
        notes.append(
            f"Of {len(found)} special tokens {MOST_TRIED} were tried in the place of the mask."
        )
    return chosen, notes


def _named(
    raw: Mapping[str, Any], target: DecoderConfig, tokenizer: Any
) -> Iterator[tuple[str, int]]:
    """Those with a role first: configs name them, then the tokenizer."""
    for whose, config in (("of its config.json", raw), ("of the target's config.json", target.raw)):
        nested = [value for value in config.values() if isinstance(value, dict)]
        for fields in (config, *nested):
            for name, value in fields.items():
                if not str(name).endswith(("_token_id", "_token", "_token_ids")):
                    continue
                for token in value if isinstance(value, list) else [value]:
                    if isinstance(token, int) and not isinstance(token, bool):
                        yield f"{name} {whose}", token
    yield "the first token", 0
    yield "the last token", target.vocab_size - 1
    if tokenizer is not None:
        for name, token in zip(
            tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True
        ):
            yield f"{name} of the tokenizer", token
        for token, added in sorted(tokenizer.added_tokens_decoder.items()):
            yield f"{added} of the tokenizer", token
