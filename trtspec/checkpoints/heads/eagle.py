"""Reading an EAGLE-3, P-EAGLE or EAGLE-1 head: its tensors and vocabulary map, and its fit.

`config.py` reads its config.json, `masked.py` what makes it a P-EAGLE head. The networks are in
`models/drafters/eagle.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...attention.base import AttentionBackend
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import DraftHead, HeadConfig
from ...models.drafters.eagle import Eagle3Head, EagleHead
from ..tensors import TensorSource
from .config import canonical_eagle_names, parse_eagle
from .masked import MASK_HIDDEN, mask_hidden_problem, read_mask_hidden
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest

_VOCABULARY_MAPS = ("d2t", "t2d")


def _is_eagle(files: HeadFiles, asked: str | None) -> bool:
    return asked != "mtp" or "fc.weight" in files.sources


def _read(
    report: HeadReport, files: HeadFiles, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    report.tensors = canonical_eagle_names(files.sources, files.head_dir)
    if "fc.weight" not in report.tensors:
        raise CheckpointError(
            f"{files.head_dir} has no fc.weight, which every EAGLE head has: these are not a "
            "head's tensors, or not all of them. Copy the head again from its source."
        )
    config = report.config = parse_eagle(
        files.raw, report.tensors, files.config_path, target, request.layers_to_capture
    )
    config = _settle_captures(report, config)
    check_ends(report, config, target)
    check_vocabulary_map(report, config)
    _check_mask_hidden(report, config)
    return config


def _network(
    config: HeadConfig, num_positions: int, backend: AttentionBackend, kv_group: int
) -> DraftHead:
    network = EagleHead if config.kind == "eagle" else Eagle3Head
    return network(config, num_positions, backend, kv_group)


def _attach(head: DraftHead, report: HeadReport, device: torch.device, dtype: torch.dtype) -> None:
    if report.mask_hidden is not None:
        captured = report.mask_hidden.to(device, dtype)
        head.mask_hidden = head.project_target_hidden(captured)[0]


def _surplus_hint(config: HeadConfig) -> str:
    if config.kind == "eagle":
        return ""
    return (
        "config.json lacks a flag (norm_before_fc has input_norm, fc_norm has "
        "fc_norm.0 …; num_hidden_layers), or "
    )


EAGLE = HeadKind(
    asked_as="eagle",
    description="is an EAGLE head",
    how_to_give=(
        "EagleDecodingConfig(speculative_model=…), on the command line with --speculative eagle3"
    ),
    recognizes=_is_eagle,
    read=_read,
    network=_network,
    attach=_attach,
    surplus_hint=_surplus_hint,
)


def _settle_captures(report: HeadReport, config: HeadConfig) -> HeadConfig:
    """How many layers are captured, from fc's width, where neither config nor target says so."""
    if config.kind != "eagle3" or config.layers_to_capture:
        return config
    shape = report.tensors["fc.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"fc.weight in {report.head_dir} has shape {list(shape)}; it must be a matrix. Copy "
            "the head again from its source."
        )
    width = shape[1]
    return replace(config, layers_to_capture=(-1,) * max(1, width // config.target_hidden_size))


def check_ends(report: HeadReport, config: HeadConfig, target: DecoderConfig | None) -> None:
    """Widths and vocabularies against the target's, above all where its ends are shared."""
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
    """d2t maps each draft id to another target id; t2d, if it is there, marks exactly those."""
    tensors = report.tensors
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    maps = {name: tensors.pop(name) for name in _VOCABULARY_MAPS if name in tensors}
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


def _check_mask_hidden(report: HeadReport, config: HeadConfig) -> None:
    if config.mask_token_id is None:
        return
    source = report.tensors.pop(MASK_HIDDEN)
    width = len(config.layers_to_capture) * config.target_hidden_size
    problem = mask_hidden_problem(source, width)
    if problem:
        report.problems.append(problem)
    else:
        report.mask_hidden = read_mask_hidden(source)


def _check_t2d(report: HeadReport, source: TensorSource, targets: Tensor, vocab: int) -> None:
    marked = source.read().to(torch.bool).flatten()
    expected = torch.zeros(vocab, dtype=torch.bool)
    expected[targets] = True
    if not torch.equal(marked, expected):
        report.problems.append(
            f"t2d marks {int(marked.sum())} of {len(marked)} target tokens, and not those that d2t "
            "maps to: they are of two heads. Copy both from one."
        )
