"""Reading MTP layers, of the target's checkpoint or of their own.

`mtp_layouts.py` knows how the families name them. The network is in `models/drafters/mtp.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import HeadConfig
from ...models.drafters.mtp import MTPHead, mtp_decoder_config
from ..hf_config import parse_config
from ..tensors import some
from .fields import refuse_other_layers, with_found_parameters
from .mtp_layouts import MTPLayout, mtp_layout, mtp_names
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest, Sources


def _are_mtp_layers(files: HeadFiles, asked: str | None) -> bool:
    is_eagle = asked == "eagle" and "fc.weight" in files.sources
    return not is_eagle and mtp_layout(set(files.sources)) is not None


def _read(
    report: HeadReport, files: HeadFiles, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    sources, layout = files.sources, mtp_layout(set(files.sources))
    assert layout is not None
    eagle = [name for name in sources if name == "fc.weight" or name.startswith("midlayer.")]
    if eagle:
        raise CheckpointError(
            f"{files.head_dir} holds MTP layers and also {some(eagle)}: the tensors of two heads "
            "are mixed. Copy one head again, into an empty directory."
        )
    layer_per_draft = request.layer_per_draft
    if layer_per_draft is None:
        layer_per_draft = layout.layer_per_draft
    decoder = parse_config(files.raw, files.config_path)
    found = mtp_names(set(sources), layout, decoder.num_layers)
    renamed = {new: sources[old] for new, old in found.items()}
    count = len({name.split(".")[1] for name in renamed})
    if not count:
        raise CheckpointError(
            f"{report.head_dir}: the MTP layers are not numbered from {decoder.num_layers}, which "
            "is num_hidden_layers. Use the config.json that belongs to these weights."
        )
    needed = _num_needed(report, count, request.num_mtp_layers if layer_per_draft else 1)
    report.tensors = {n: s for n, s in renamed.items() if int(n.split(".")[1]) < needed}
    config = parse_mtp(decoder, report.tensors, layout, needed)
    if target is not None:
        _check_sizes(report, decoder, target)
    return replace(config, num_mtp_layers=count)


def _num_needed(report: HeadReport, count: int, asked: int | None) -> int:
    """Returns how many of the checkpoint's `count` layers are to be loaded."""
    if asked is not None and asked > count:
        report.problems.append(
            f"{asked} MTP layers are needed, one for each draft token, and the checkpoint has "
            f"{count}. Lower num_nextn_predict_layers to {count}, or use one layer "
            "for all of them (use_mtp_vanilla=False; --speculative mtp_eagle)."
        )
        return count
    return count if asked is None else asked


def _check_sizes(report: HeadReport, decoder: DecoderConfig, target: DecoderConfig) -> None:
    for name in ("hidden_size", "vocab_size"):
        size, target_size = getattr(decoder, name), getattr(target, name)
        if size != target_size:
            report.problems.append(
                f"The MTP layers are for {name}={size}, the target has {target_size}. Use the MTP "
                "layers trained with this target."
            )


def parse_mtp(
    decoder: DecoderConfig, names: Sources, layout: MTPLayout, num_layers: int
) -> HeadConfig:
    """Returns the config of MTP layers written in `layout`.

    Args:
        decoder: the target's architecture.
        names: tensors under the names of `MTPHead`.
    """
    refuse_other_layers(decoder, "MTP layers over this target")
    inner = with_found_parameters(mtp_decoder_config(decoder, num_layers), names)
    inner = replace(inner, head_gate="layers.0.self_attn.g_proj.weight" in names)
    of_family = decoder.mtp_feeds_post_norm
    return HeadConfig(
        kind="mtp",
        format=layout.format,
        decoder=inner,
        target_hidden_size=decoder.hidden_size,
        draft_vocab_size=decoder.vocab_size,
        own_embedding="layers.0.embed_tokens.weight" in names,
        own_lm_head="layers.0.lm_head.weight" in names,
        hidden_first=layout.hidden_first,
        norm_output=layout.norm_output if of_family is None else of_family,
        zero_centered_norms=layout.zero_centered_norms and not decoder.norm_offset,
    )


MTP = HeadKind(
    asked_as="mtp",
    description="holds MTP layers",
    how_to_give=(
        "MTPDecodingConfig(speculative_model=…), on the command line with --speculative mtp_eagle"
    ),
    recognizes=_are_mtp_layers,
    read=_read,
    network=MTPHead,
)
