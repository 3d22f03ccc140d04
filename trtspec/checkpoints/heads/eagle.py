"""Reading an EAGLE-3, P-EAGLE or EAGLE-1 head.

`eagle_config.py` reads its config.json, `masked.py` what makes it a P-EAGLE head, and `fit.py`
compares it with the target. The networks are in `models/drafters/eagle.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...attention.base import AttentionBackend
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import DraftHead, HeadConfig
from ...models.drafters.eagle import Eagle3Head, EagleHead
from .eagle_config import parse_eagle
from .fields import head_tensors
from .fit import check_ends, check_vocabulary_map
from .masked import check_mask_hidden
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest


def _is_eagle(files: HeadFiles, asked: str | None) -> bool:
    return asked != "mtp" or "fc.weight" in files.sources


def _read(
    report: HeadReport, files: HeadFiles, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    tensors = report.tensors = head_tensors(files, "EAGLE")
    if files.raw.get("tie_word_embeddings") is True and "embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])  # the head's own two
    config = report.config = parse_eagle(files, tensors, request, target)
    config = _settle_captures(report, config)
    check_ends(report, config, target)
    check_vocabulary_map(report, config)
    if config.mask_token_id is not None:
        check_mask_hidden(report, config)
    return config


def _settle_captures(report: HeadReport, config: HeadConfig) -> HeadConfig:
    """Returns the config with as many layers to capture as fc's width has room for, numbered -1.

    That is where neither the config nor a target says which.
    """
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
