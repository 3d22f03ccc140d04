"""Drafters that propose several tokens from one pass: what their checkpoints say of mask tokens.

Two kinds are public. A P-EAGLE head (arXiv:2602.01469) is an EAGLE-3 head with a mask token and a
tensor `mask_hidden`, as wide as the captured layers: where a target's hidden states are not known
yet, the head reads these, through the same norms and `fc`. The speculators format calls it
"peagle". A PARD draft model (arXiv:2504.18583) is a language model with a mask token, `pard_token`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checks import checked_int, is_int
from ...config import MAX_DRAFT_LEN
from ...errors import CheckpointError
from ...models.drafters.base import HeadConfig
from ...utils import renamed
from ..tensors import FLOATS, TensorSource
from .fit import not_finite
from .records import HeadReport

MASK_HIDDEN = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
_TRAINED_LENGTHS = ("parallel_draft_step", "num_depths", "para_depths")


def parse_masked(
    raw: Mapping[str, Any],
    nested: Mapping[str, Any],
    tensors: Mapping[str, TensorSource],
    where: Path,
    vocab_size: int,
) -> tuple[int | None, int | None]:
    """Returns the mask token of an EAGLE-3 head and how many drafts it was trained for.

    Both are None if the head drafts one token a pass, the number also if the checkpoint does not
    say it.

    Args:
        raw: `config.json`; nested: its eagle_config. tensors: under canonical names.

    Raises:
        CheckpointError: something of a P-EAGLE head is missing, or is not what it can be.
    """
    token = _only_value(_MASK_TOKENS, raw, nested, where)
    trained = _only_value(_TRAINED_LENGTHS, raw, nested, where)
    names_masks = raw.get("speculators_model_type") == "peagle"
    if trained is not None:
        name, value = trained
        checked_int(where, name, value, range(1, MAX_DRAFT_LEN + 1), cure="Correct it.")
        names_masks |= value > 1
    if token is None:
        if names_masks or MASK_HIDDEN in tensors:
            raise CheckpointError(
                f"{where} says that the head drafts in parallel, but not what it reads at the "
                f"positions to be drafted: none of {', '.join(_MASK_TOKENS)} is there. Add "
                "mask_token_id, or use a P-EAGLE head (heads with parallel_draft_heads are another "
                "kind, which is not supported)."
            )
        return None, None
    if MASK_HIDDEN not in tensors:
        raise CheckpointError(
            f"{where}: {token[0]}={token[1]!r} belongs to a head that drafts in parallel, and "
            f"those read a learned state at the masks, but there is no tensor {MASK_HIDDEN}. Copy "
            f"the head again from its source, or remove {token[0]} if it drafts one token a pass."
        )
    return mask_token(*token, where, vocab_size), None if trained is None else trained[1]


def pard_token(raw: Mapping[str, Any], where: Path, vocab_size: int) -> int | None:
    """Returns the mask token of a draft model, None where its config.json names none.

    Raises:
        CheckpointError: it is not in the model's vocabulary.
    """
    # Not mask_token_id: a tokenizer's mask token does not make a model a masked drafter.
    token = _only_value(("pard_token", "ptd_token_id"), raw, {}, where)
    return None if token is None else mask_token(*token, where, vocab_size)


def mask_token(name: str, value: Any, where: Path, vocab_size: int) -> int:
    """Returns the value if it is a token. Raises CheckpointError."""
    if not is_int(value, 0, vocab_size - 1):
        raise CheckpointError(
            f"{where}: {name}={value!r}, the mask token, is not in the vocabulary 0 … "
            f"{vocab_size - 1}. Correct it to the token that the drafter was trained with."
        )
    return int(value)


def check_mask_hidden(report: HeadReport, config: HeadConfig) -> None:
    """Takes `mask_hidden` from a P-EAGLE head's tensors, if it fits the captured layers."""
    source = report.tensors.pop(MASK_HIDDEN)
    problem = _mask_hidden_problem(
        source, len(config.layers_to_capture) * config.target_hidden_size
    )
    if problem is None:
        report.mask_hidden = source.read().reshape(1, -1)
    else:
        report.problems.append(problem)


def _mask_hidden_problem(source: TensorSource, width: int) -> str | None:
    """Returns what is wrong with it, and its cure; None if it fits."""
    if source.shape not in ((width,), (1, width), (1, 1, width)):
        return (
            f"{source.name} in {source.path} has shape {list(source.shape)}; it must be "
            f"[1, {width}], as wide as the captured layers. Check target_hidden_size and the "
            "captured layers in config.json."
        )
    if source.dtype not in FLOATS:
        return (
            f"{source.name} in {source.path} has dtype {source.dtype}; allowed are "
            f"{', '.join(FLOATS)}. Copy the head again from its source."
        )
    return not_finite(source)


def _only_value(
    names: tuple[str, ...], raw: Mapping[str, Any], nested: Mapping[str, Any], where: Path
) -> tuple[str, Any] | None:
    """Returns the first of the names that has a value, at the top or nested, and that value."""
    found = [(n, d[n]) for n in names for d in (raw, nested) if d.get(n) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise CheckpointError(
                f"{where}: {found[0][0]}={found[0][1]!r} and {name}={value!r} mean the same and "
                "differ. Remove the wrong one."
            )
    return found[0] if found else None


__getattr__ = renamed(__name__, {"parse_parallel": "parse_masked"})
