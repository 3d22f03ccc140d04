"""Whether a head fits its target (widths, vocabularies, the map between these), and is finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.config import DecoderConfig
from ...models.drafters.base import HeadConfig
from ..tensors import TensorSource
from .records import HeadReport


def not_finite(source: TensorSource, values: Tensor | None = None) -> str | None:
    """Returns a tensor's problem if it holds NaN or infinity, with its cure.

    Args:
        values: what the source holds, where it was read already.
    """
    is_finite = torch.isfinite(source.read() if values is None else values)
    if bool(is_finite.all()):
        return None
    return (
        f"{source.name} in {source.path} holds {int((~is_finite).sum())} values that are NaN or "
        "infinite. The head is broken: copy it again, or use another one."
    )


def check_ends(report: HeadReport, config: HeadConfig, target: DecoderConfig | None) -> None:
    """Reports widths and vocabularies that are not the target's."""
    size, vocab = config.decoder.hidden_size, config.decoder.vocab_size
    if not config.own_lm_head and config.draft_vocab_size != vocab:
        report.problems.append(
            f"draft_vocab_size={config.draft_vocab_size} is not vocab_size={vocab}, but there is "
            "no lm_head.weight to draft with. Use a head that has one, or set draft_vocab_size to "
            "null to share the target's."
        )
    if target is None:
        return
    if config.target_hidden_size != target.hidden_size:
        report.problems.append(
            f"The head reads hidden states of width {config.target_hidden_size}, the target's are "
            f"{target.hidden_size} wide. Use a head trained for this target, or correct "
            "target_hidden_size in its config.json."
        )
    if vocab != target.vocab_size:
        report.problems.append(
            f"The head's vocab_size is {vocab}, the target's {target.vocab_size}. Use a head "
            "trained for this target."
        )
    for has_it, name in ((config.own_embedding, "embed_tokens"), (config.own_lm_head, "lm_head")):
        if not has_it and size != target.hidden_size:
            report.problems.append(
                f"The head has no {name} of its own and is {size} wide; the target's, to be "
                f"shared, is {target.hidden_size} wide. Use a head that carries its {name}."
            )


def check_vocabulary_map(report: HeadReport, config: HeadConfig) -> None:
    """Takes d2t from the tensors, or reports what is wrong with it.

    It maps each draft id to another target id; t2d, if it is there, marks exactly those.
    """
    tensors = report.tensors
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    if "d2t" not in maps:
        if config.own_lm_head and size != vocab:
            report.problems.append(
                f"The head drafts among {size} of {vocab} tokens, but has no d2t to say which. "
                "Copy the head again, with d2t."
            )
        return
    source = maps["d2t"]
    if not config.own_lm_head:
        report.problems.append(
            "There is a d2t, but no lm_head.weight whose tokens it maps. Copy the head again, with "
            "both or neither."
        )
        return
    if source.shape != (size,) or source.dtype not in ("I64", "I32"):
        report.problems.append(
            f"d2t has shape {list(source.shape)} and dtype {source.dtype}; it must be [{size}] "
            "(draft_vocab_size) of I64. Correct draft_vocab_size, or copy the head again."
        )
        return
    offsets = source.read().to(torch.int64)
    targets = torch.arange(size) + offsets
    outside = ((targets < 0) | (targets >= vocab)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        ids = int(offsets.max()) < vocab and len(offsets.unique()) == size
        hint = " It seems to hold ids in place of offsets: subtract arange." if ids else ""
        report.problems.append(
            f"d2t maps draft token {i} to {i} + {int(offsets[i])} = {int(targets[i])}, outside the "
            f"target's vocabulary 0 … {vocab - 1}.{hint} Use the head's own d2t and vocab_size."
        )
        return
    if len(targets.unique()) != size:
        report.problems.append(
            f"d2t maps {size} draft tokens to {len(targets.unique())} target tokens: some are the "
            "same. It must hold offsets, target_id = draft_id + d2t[draft_id]. Copy it again."
        )
    if "t2d" in maps:
        _check_t2d(report, maps["t2d"], targets, vocab)
    report.d2t = offsets if bool(offsets.any()) else None


def _check_t2d(report: HeadReport, source: TensorSource, targets: Tensor, vocab: int) -> None:
    marked = source.read().to(torch.bool).flatten()
    if len(marked) != vocab:
        report.problems.append(
            f"t2d marks tokens of a vocabulary of {len(marked)}, and vocab_size is {vocab}. "
            "Correct vocab_size, or copy the head again."
        )
        return
    expected = torch.zeros(vocab, dtype=torch.bool)
    expected[targets] = True
    if not torch.equal(marked, expected):
        report.problems.append(
            f"t2d marks {int(marked.sum())} of {len(marked)} target tokens, and not those that d2t "
            "maps to: they are of two heads. Copy both from one."
        )
