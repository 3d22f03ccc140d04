"""Reading a DFlash, DFlash2 or DSpark head: z-lab's format, ModelOpt's and that of speculators.

`dflash_config.py` reads its config.json. The network is in `models/drafters/dflash.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import DraftHead, HeadConfig
from ...models.drafters.dflash import DFlashHead
from .dflash_config import is_dflash, is_dspark, parse_dflash
from .fields import head_tensors
from .fit import check_ends, check_vocabulary_map
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest, Sources

_CONTEXT_EMBEDDING = "context_embedding_fc.weight"


def _read(
    report: HeadReport, files: HeadFiles, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    report.tensors = {
        name: source
        for name, source in head_tensors(files, "DFlash").items()
        if not name.startswith(("verifier_norm.", "verifier_lm_head."))  # of training alone
    }
    if is_dspark(files.raw):
        report.tensors = _dspark_tensors(report.tensors)
    if (files.head_dir / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{files.head_dir} has the mask token's embedding in mask_embedding.pt, which is not "
            "read. Put it into an embed_tokens.weight of the head, in the row of mask_token_id, "
            "and remove the file."
        )
    config = report.config = parse_dflash(files, report.tensors, request, target)
    if not config.confidence_size:
        report.tensors = {
            name: source
            for name, source in report.tensors.items()
            if not name.startswith("confidence_head.")
        }
    _check_context_embeddings(report, config, files.config_path)
    _check_sinks(report, config, files.config_path)
    check_ends(report, config, target)
    check_vocabulary_map(report, config)
    return config


def _check_context_embeddings(report: HeadReport, config: HeadConfig, where: Path) -> None:
    """Raises CheckpointError where the field and the tensors differ: the head would draft badly."""
    present = _CONTEXT_EMBEDDING in report.tensors
    if present and not config.context_embeddings:
        raise CheckpointError(
            f"{where} does not say context_embeddings, but the head has {_CONTEXT_EMBEDDING}: it "
            'was trained to read the token after each row. Write "context_embeddings": true into '
            "dflash_config."
        )
    if config.context_embeddings and not present:
        raise CheckpointError(
            f"{where} says context_embeddings, but the head has no {_CONTEXT_EMBEDDING}. Copy the "
            "head again from its source, or remove the field."
        )


def _check_sinks(report: HeadReport, config: HeadConfig, where: Path) -> None:
    """Raises CheckpointError where the field and the tensors differ."""
    found = [name for name in report.tensors if name.endswith(".attention_sink_bias")]
    if found and not config.decoder.attention_sinks:
        raise CheckpointError(
            f"{where} does not say attention_sink_bias, but the head has {len(found)} such tensors "
            f'({found[0]} …). Write "attention_sink_bias": true into dflash_config.'
        )
    layers = range(config.decoder.num_layers)
    wanted = [f"layers.{i}.self_attn.attention_sink_bias" for i in layers]
    missing = [name for name in wanted if name not in found]
    if config.decoder.attention_sinks and missing:
        raise CheckpointError(
            f"{where} says attention_sink_bias, but the head has no {', '.join(missing)}. Copy the "
            "head again from its source, or remove the field if no layer has sinks."
        )


def _dspark_tensors(sources: Sources) -> Sources:
    """Returns the tensors under their names in `MarkovHead` and `ConfidenceHead`."""
    renamed: Sources = {}
    for name, source in sources.items():
        new = re.sub(r"^(markov_w[12]|gate_proj|joint_proj)\.", r"markov_head.\1.", name)
        new = re.sub(r"^confidence_(head\.)?proj\.", "confidence_head.confidence_proj.", new)
        renamed[new] = source
    return renamed


def _attach(head: DraftHead, report: HeadReport, device: torch.device, dtype: torch.dtype) -> None:
    assert isinstance(head, DFlashHead)
    head.scale_values()
    head.prepare_context()


DFLASH = HeadKind(
    asked_as="dflash",
    description="is a DFlash head",
    how_to_give=(
        "DFlashDecodingConfig(speculative_model=…), on the command line with --speculative dflash"
    ),
    recognizes=lambda files, asked: is_dflash(files.raw),
    read=_read,
    network=DFlashHead,
    attach=_attach,
    surplus_hint=lambda config: "num_hidden_layers in config.json (DSpark: markov_rank), or ",
)
DSPARK = replace(
    DFLASH,
    asked_as="dspark",
    description="is a DSpark head",
    how_to_give=(
        "DSparkDecodingConfig(speculative_model=…), on the command line with --speculative dspark"
    ),
    recognizes=lambda files, asked: is_dspark(files.raw),
)
