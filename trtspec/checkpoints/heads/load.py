"""Draft heads from their directories: read, checked against the target, loaded.

`read_head` collects every mismatch instead of stopping at the first; loading refuses a head that
has one, `trtspec inspect-head` shows them all. What the kinds of heads differ in is a row of
`HEAD_KINDS` (`kinds.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...attention.torch_sdpa import TorchAttention
from ...checks import MAX_SIZE, is_int, is_number
from ...config import MAX_DRAFT_LEN
from ...distributed.parallel import WHOLE
from ...errors import CheckpointError
from ...layers.norm import RMSNorm
from ...models.config import DecoderConfig
from ...models.cut import check_cut
from ...models.decoder import keep_kv_finite
from ...models.drafters.base import DraftHead, HeadConfig, HeadTarget
from ...models.drafters.clustered_head import ClusteredHead
from ...models.placement import Placement
from ..dequantized import dequantized
from ..files import read_json_object
from ..place import LoadOptions, lm_head_for_drafts, place_tensors
from ..tensors import TensorSource, open_checkpoint, some
from ..weights import finish, placements, shape_problem, sizes_alone, take_experts_apart
from ..zoo import HEADS, hub_advice, resolve_head
from .draft_tokens import draft_among, read_draft_tokens
from .fit import not_finite
from .kinds import kind_of
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest, Sources


def read_head(
    head_dir: Path,
    target: DecoderConfig | None,
    stack: ExitStack,
    request: HeadRequest | None = None,
    **old_options: Any,
) -> HeadReport:
    """Reads and checks a head, contents of every tensor included.

    Args:
        head_dir: a directory, or a name in `zoo.HEADS`.
        target: what it is to draft for; None checks the head alone.
        stack: keeps the files open.
        request: by default whatever the directory holds.
        old_options: fields of `HeadRequest`, deprecated.
    """
    if old_options:
        _warn_of("read_head(…, kind=…)", "read_head(…, HeadRequest(kind=…))")
    request = replace(request or HeadRequest(), **old_options)
    report = HeadReport(resolve_head(head_dir))
    if not os.path.isdir(report.head_dir):
        report.problems.append(
            f"{head_dir} is neither a directory nor a known head. Give the head's directory, or "
            f"one of: {', '.join(HEADS)}.{hub_advice(head_dir)}"
        )
        return report
    try:
        files = _open(report.head_dir, stack)
        report.kind = kind_of(files, request.kind)
        config = report.kind.read(report, files, request, target)
        config = replace(config, trained_acceptance=_trained_acceptance(files.raw))
        report.config = _with_window(config, files, request)
        _check_tensors(report, report.kind, report.config)
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def load_head(
    head_dir: Path,
    target: HeadTarget,
    request: HeadRequest | torch.dtype | None = None,
    options: LoadOptions | torch.device | None = None,
    *old_arguments: Any,
    **old_options: Any,
) -> DraftHead:
    """Returns a head ready to draft for `target`.

    It shares the target's embedding and lm_head where it has none of its own, and where its own
    equals the target's. (On CPU the target's lm_head is packed and cannot be compared, unless it
    is its embedding.)

    Args:
        head_dir: a directory, or a name in `zoo.HEADS`.
        target: a `Decoder`, or anything with `config`, `embed_tokens` and `lm_head`.
        request, options: both are needed.
        old_arguments, old_options: dtype, device, backend and then the fields of both records by
            name, in the records' place, deprecated.

    Raises:
        CheckpointError: with everything that is wrong with the head.
    """
    if not isinstance(request, HeadRequest) or not isinstance(options, LoadOptions):
        request, options = _of_old_call((request, options, *old_arguments), old_options)
    with ExitStack() as stack:
        report = read_head(head_dir, target.config, stack, request)
        config, kind = report.require(), report.kind
        assert kind is not None
        if request.norm_output is not None:
            config = replace(config, norm_output=request.norm_output)
        decoder = replace(config.decoder, parallel=target.config.parallel)
        check_cut(decoder, str(report.head_dir))
        config = replace(config, decoder=decoder)
        num_positions = options.num_positions or target.config.max_position_embeddings
        with sizes_alone(report.head_dir):
            head = kind.network(config, num_positions, options.backend, options.kv_group)
        head.limit_windows()
        _drop_what_the_target_has(head, report.tensors, target, options.dtype)
        placement_of = _placements_with_offsets(head)
        options = replace(options, form=replace(options.form, is_of_head=True))
        place_tensors(head, placement_of, report.tensors, options)
    head.d2t = None if report.d2t is None else report.d2t.to(options.device)
    kind.attach(head, report, options.device, options.dtype)
    finish(head, options.device, options.pack)
    keep_kv_finite(head)
    head.share(target)
    owners = head.owners_of_ends().values()
    sharing = [owner for owner in owners if owner.lm_head is target.lm_head]
    if request.draft_tokens is not None:
        ids = read_draft_tokens(request.draft_tokens, target.config.vocab_size)
        draft_among(head, ids, options)
    if sharing:  # all of it, or one copy of some rows
        lm_head = lm_head_for_drafts(sharing[0].lm_head, options.form)
        for owner in sharing:
            owner.lm_head = lm_head
    return head.eval()


def _of_old_call(
    arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[HeadRequest, LoadOptions]:
    """Returns the records for `load_head(head_dir, target, dtype, device, backend, kv_group=…)`."""
    _warn_of(
        "load_head(…, dtype, device, backend, kind=…)", "load_head(…, HeadRequest, LoadOptions)"
    )
    names = "dtype", "device", "backend"
    given = {k: v for k, v in zip(names, arguments, strict=False) if v is not None} | named
    options = {name: given.pop(name) for name in LoadOptions.__annotations__ if name in given}
    return HeadRequest(**{"num_mtp_layers": 1, **given}), LoadOptions(**options)


def _warn_of(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: call {new}.", DeprecationWarning, stacklevel=3)


def _open(head_dir: Path, stack: ExitStack) -> HeadFiles:
    sources = open_checkpoint(head_dir, stack, pickle=True)
    where = head_dir / "config.json"
    raw = read_json_object(where, "Point to the head's directory.")
    return HeadFiles(head_dir, raw, dequantized(sources, raw, where))


def _trained_acceptance(raw: Mapping[str, Any]) -> float | None:
    """Returns what share of first drafts was accepted at the end of training, if config.json says
    so in the trainer's words. (The doctor speaks of numbers that make no sense.)"""
    notes = raw.get("training")
    rates = notes.get("held_out_conditional") if isinstance(notes, dict) else None
    first = rates[0] if isinstance(rates, list) and rates else None
    return float(first) if is_number(first) and 0 < first <= 1 else None


def _with_window(config: HeadConfig, files: HeadFiles, request: HeadRequest) -> HeadConfig:
    """Returns the config with the `draft_window` that was asked for, or that the files say."""
    asked = request.draft_window
    window = files.raw.get("draft_window") if asked is None else asked
    if window is None or is_int(window, 0, 0):
        return config
    if asked is None and not is_int(window, MAX_DRAFT_LEN + 1, MAX_SIZE):
        raise CheckpointError(
            f"{files.config_path}: draft_window={window!r}; it must be null, 0 or an int in "
            f"{MAX_DRAFT_LEN + 1} … {MAX_SIZE}. Correct it."
        )
    if config.kind == "gemma4_assistant":
        raise CheckpointError(
            f"draft_window={window}: {files.head_dir} is a {config.format}, whose layers read the "
            "target's keys through the target's windows. Leave it out."
        )
    return replace(config, draft_window=window)


def _check_tensors(report: HeadReport, kind: HeadKind, config: HeadConfig) -> None:
    """Reports parameters without a tensor, wrong tensors, and tensors that are left over."""
    sources = report.tensors
    layers = {name.split(".")[1] for name in sources if name.startswith("layers.")}
    if config.decoder.num_layers > len(layers):
        report.problems.append(
            f"config.json says num_hidden_layers={config.decoder.num_layers}, the tensors are of "
            f"{len(layers)} layers. Correct it, or copy the head again."
        )
        return
    with sizes_alone(report.head_dir):
        placement_of = placements(kind.network(config, 1, TorchAttention(), 0))
    take_experts_apart(sources, placement_of)
    missing = [name for name in placement_of if name not in sources]
    if missing:
        report.problems.append(
            f"{len(missing)} of {len(placement_of)} tensors are missing: {some(missing)}. Check "
            "the flags and num_hidden_layers in config.json, or copy the head again."
        )
    surplus = [
        source.name
        for name, source in sources.items()
        if name not in placement_of and not name.endswith("rotary_emb.inv_freq")
    ]
    if surplus:
        report.problems.append(
            f"{len(surplus)} tensors have no place in {config.format}: {some(surplus)}. Check: "
            f"{kind.surplus_hint(config)}the tensors of two heads are mixed."
        )
    for name, placement in placement_of.items():
        if name in sources:
            source = sources[name]
            problem = _shape_problem(name, source, placement, config)
            if problem is None:
                values = source.read()
                problem = not_finite(source, values)
                if values.dim() > 1 and not bool(values.any()):
                    report.zero_weights.append(source.name)
            if problem is not None:
                report.problems.append(problem)


def _shape_problem(
    name: str, source: TensorSource, placement: Placement, config: HeadConfig
) -> str | None:
    layers, width = config.layers_to_capture, config.target_hidden_size
    if source.shape != placement.source_shape and name == "fc.weight" and layers:
        rows = placement.source_shape[0]
        if len(source.shape) == 2 and source.shape[0] == rows and source.shape[1] % width == 0:
            count = source.shape[1] // width
            return (
                f"{name} in {source.path} reads {count} captured layers of width {width}, and "
                f"{len(layers)} are to be captured: {list(layers)}. Name those of its training, in "
                "config.json or by eagle3_layers_to_capture or target_layer_ids."
            )
        return (
            f"{shape_problem(name, source, placement)} It is made for {len(layers)} captured "
            f"layers of width {width}."
        )
    return shape_problem(name, source, placement)


def _placements_with_offsets(head: DraftHead) -> dict[str, Placement]:
    """Returns `placements`, which add 1 to weights of norms that the checkpoint has around 0."""
    placement_of = placements(head)
    if head.config.zero_centered_norms:
        for name, placement in placement_of.items():
            if isinstance(head.get_submodule(placement.module), RMSNorm):
                placement_of[name] = replace(placement, offset=1.0)
    return placement_of


def _drop_what_the_target_has(
    head: DraftHead, sources: Sources, target: HeadTarget, dtype: torch.dtype
) -> None:
    """Leaves out an embedding or lm_head of the head that is a copy of the target's."""
    embedding, lm_head = target.embed_tokens.weight, target.lm_head.weight
    if target.config.tie_word_embeddings:
        lm_head = embedding
    for prefix, owner in head.owners_of_ends().items():
        for name, weight in (("embed_tokens", embedding), ("lm_head", lm_head)):
            source, layer = sources.get(f"{prefix}{name}.weight"), getattr(owner, name)
            if source is None or weight is None or isinstance(layer, ClusteredHead):
                continue
            cut = None
            if weight is not embedding:  # of an lm_head, a rank may have a part
                cut = getattr(target.lm_head, "shard", WHOLE).source(weight.shape[0])
            same_size = source.shape[0] == (weight.shape[0] if cut is None else cut.full)
            if not same_size or source.shape[1:] != tuple(weight.shape[1:]):
                continue
            of_target = weight if cut is None else weight[: cut.length]
            if torch.equal(source.read(cut).to(dtype), of_target.cpu()):
                setattr(owner, name, None)
