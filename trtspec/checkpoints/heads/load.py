"""Draft heads from their directories: read, checked against the target, loaded.

`read_head` collects every mismatch instead of stopping at the first; loading refuses a head that
has one, `trtspec inspect-head` shows them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ...attention.base import AttentionBackend
from ...attention.torch_sdpa import TorchAttention
from ...errors import CheckpointError
from ...layers.norm import RMSNorm
from ...models.config import DecoderConfig
from ...models.decoder import keep_kv_finite
from ...models.drafters.base import DraftHead, HeadConfig, HeadTarget
from ...models.drafters.clustered_head import ORDERING, ClusteredHead
from ...models.drafters.eagle import Eagle3Head, EagleHead
from ...models.drafters.gemma_assistant import KIND, MODEL_TYPES, GemmaAssistant
from ...models.drafters.mtp import MTPHead, MTPLayout, mtp_layout, mtp_names
from ...models.placement import Placement
from ..fp8 import dequantized
from ..hf_config import parse_config
from ..json_object import read_json_object
from ..tensors import FLOATS, TensorSource, open_checkpoint, some
from ..weights import finish, place_tensors, placements, shape_problem, sizes_alone
from ..zoo import HEADS, resolve_head
from .config import Sources, canonical_eagle_names, parse_eagle, parse_mtp
from .gemma_assistant import assistant_problems, read_assistant, read_clusters
from .masked import MASK_HIDDEN, mask_hidden_problem, read_mask_hidden

_HEAD_CLASSES: dict[str, Callable[[HeadConfig, int, AttentionBackend, int], DraftHead]] = {
    "eagle3": Eagle3Head,
    "eagle": EagleHead,
    "mtp": MTPHead,
    KIND: GemmaAssistant,
}
_VOCABULARY_MAPS = ("d2t", "t2d")


@dataclass
class HeadReport:
    """What a head directory holds, and everything that is wrong with it."""

    head_dir: Path
    config: HeadConfig | None = None
    tensors: Sources = field(default_factory=dict)  # under the names of the module
    num_mtp_layers: int = 0  # in the checkpoint
    d2t: Tensor | None = None  # [Vd] int64 offsets
    mask_hidden: Tensor | None = None  # [1, n * Ht], of a head that drafts in parallel
    clusters: Tensor | None = None  # [C, V / C] int64, tokens of a clustered lm_head
    problems: list[str] = field(default_factory=list)  # each with its cure

    def require(self) -> HeadConfig:
        """The config. Raises CheckpointError with every problem, if there is one."""
        if self.problems or self.config is None:
            what = f"{self.head_dir} cannot be used as a draft head"
            if len(self.problems) == 1:
                (problem,) = self.problems
                is_about_it = problem.startswith(str(self.head_dir))
                raise CheckpointError(problem if is_about_it else f"{what}: {problem}")
            raise CheckpointError(f"{what}:\n- " + "\n- ".join(self.problems))
        return self.config


def read_head(
    head_dir: Path,
    target: DecoderConfig | None,
    stack: ExitStack,
    *,
    kind: str | None = None,
    layers_to_capture: Sequence[int] | None = None,
    num_mtp_layers: int | None = None,
    layer_per_draft: bool | None = True,
) -> HeadReport:
    """Reads and checks a head, contents of every tensor included.

    Args:
        head_dir: a directory, or a name in `zoo.HEADS`.
        target: what it is to draft for; None checks the head alone.
        stack: keeps the files open.
        kind: "eagle" (EAGLE-1 or -3) or "mtp" where only that will do.
        num_mtp_layers: MTP layers that are needed, one for each draft; None is all there are.
        layer_per_draft: False needs the first of them alone; None is what the family was trained
            for.
    """
    report = HeadReport(resolve_head(head_dir))
    if not os.path.isdir(report.head_dir):
        report.problems.append(
            f"{head_dir} is neither a directory nor a known head. Give the head's directory, or "
            f"one of: {', '.join(HEADS)}."
        )
        return report
    try:
        _read(report, target, stack, kind, layers_to_capture, num_mtp_layers, layer_per_draft)
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def load_head(
    head_dir: Path,
    target: HeadTarget,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    *,
    kv_group: int,
    kind: str,
    layers_to_capture: Sequence[int] | None = None,
    num_mtp_layers: int = 1,
    layer_per_draft: bool | None = True,
    norm_output: bool | None = None,
    pack: bool = True,
    num_positions: int | None = None,
) -> DraftHead:
    """A head ready to draft for `target`, sharing its embedding and lm_head where it has no own.

    An own embedding or lm_head that equals the target's is shared too. (On CPU the target's
    lm_head is packed and cannot be compared, unless it is its embedding.)

    Args:
        head_dir: a directory, or a name in `zoo.HEADS`.
        target: a `Decoder`, or anything with `config`, `embed_tokens` and `lm_head`.
        kind, layers_to_capture, num_mtp_layers, layer_per_draft: as in `read_head`.
        norm_output: feed the normed hidden state on, or not; None is the checkpoint's way.
        pack: on CPU, weights in the layout its kernels like.
        num_positions: the longest text; None is the target's max_position_embeddings.

    Raises:
        CheckpointError: with everything that is wrong with the head.
    """
    with ExitStack() as stack:
        report = read_head(
            head_dir, target.config, stack, kind=kind, layers_to_capture=layers_to_capture,
            num_mtp_layers=num_mtp_layers, layer_per_draft=layer_per_draft,
        )  # fmt: skip
        config = report.require()
        if norm_output is not None:
            config = replace(config, norm_output=norm_output)
        num_positions = num_positions or target.config.max_position_embeddings
        head = _build(report.head_dir, config, num_positions, backend, kv_group)
        _drop_what_the_target_has(head, report.tensors, target, dtype)
        place_tensors(head, _places(head), report.tensors, dtype, device)
    head.d2t = None if report.d2t is None else report.d2t.to(device)
    finish(head, device, pack)
    if report.mask_hidden is not None:
        raw = report.mask_hidden.to(device, dtype)
        head.mask_hidden = head.project_target_hidden(raw)[0]
    if isinstance(head.lm_head, ClusteredHead):
        assert report.clusters is not None
        head.lm_head.clusters = report.clusters.to(device)
    keep_kv_finite(head)
    head.share(target)
    return head.eval()


def _read(
    report: HeadReport,
    target: DecoderConfig | None,
    stack: ExitStack,
    kind: str | None,
    layers_to_capture: Sequence[int] | None,
    num_mtp_layers: int | None,
    layer_per_draft: bool | None,
) -> None:
    head_dir = report.head_dir
    sources = open_checkpoint(head_dir, stack, pickle=True)
    where = head_dir / "config.json"
    raw = read_json_object(where, "Point to the head's directory.")
    sources = dequantized(sources, raw, where)
    if raw.get("model_type") in MODEL_TYPES:
        if kind == "eagle":
            raise CheckpointError(
                f"{head_dir} is a Gemma-4 assistant, not an EAGLE head. Give it as "
                "MTPDecodingConfig(speculative_model=…)."
            )
        report.config, report.tensors = read_assistant(raw, sources, where)
        _read_clusters(report)
        if target is not None:
            report.problems += assistant_problems(report.config, target)
        _check_tensors(report)
        return
    layout = None if kind == "eagle" else mtp_layout(set(sources))
    if kind == "mtp" and layout is None and "fc.weight" in sources:
        raise CheckpointError(
            f"{head_dir} is an EAGLE head, not MTP layers. Give it as "
            "EagleDecodingConfig(speculative_model=…), on the command line with --speculative "
            "eagle3."
        )
    if kind == "mtp" and layout is None:
        raise CheckpointError(
            f"{head_dir} holds no MTP layers (no eh_proj of DeepSeek's names, no input_proj of "
            "MiMo's, no mtp.fc of Qwen3-Next's). Use a checkpoint with its MTP layers, or give the "
            "head's directory."
        )
    if kind == "eagle" and "fc.weight" not in sources and mtp_layout(set(sources)) is not None:
        raise CheckpointError(
            f"{head_dir} holds MTP layers, not an EAGLE head. Give it as "
            "MTPDecodingConfig(speculative_model=…), on the command line with --speculative "
            "mtp_eagle."
        )
    eagle = [name for name in sources if name == "fc.weight" or name.startswith("midlayer.")]
    if layout is not None and eagle:
        raise CheckpointError(
            f"{head_dir} holds MTP layers and also {some(eagle)}: the tensors of two heads are "
            "mixed. Copy one head again, into an empty directory."
        )
    if layout is not None:
        if layer_per_draft is None:
            layer_per_draft = layout.layer_per_draft
        asked = num_mtp_layers if layer_per_draft else 1
        _read_mtp(report, sources, layout, parse_config(raw, where), target, asked)
    else:
        report.tensors = canonical_eagle_names(sources, head_dir)
        if "fc.weight" not in report.tensors:
            raise CheckpointError(
                f"{head_dir} has no fc.weight, which every EAGLE head has: these are not a head's "
                "tensors, or not all of them. Copy the head again from its source."
            )
        report.config = parse_eagle(raw, report.tensors, where, target, layers_to_capture)
        report.config = _settle_captures(report)
        _check_ends(report, target)
        _check_vocabulary_map(report)
        _check_mask_hidden(report)
    _check_tensors(report)


def _read_mtp(
    report: HeadReport,
    sources: Sources,
    layout: MTPLayout,
    decoder: DecoderConfig,
    target: DecoderConfig | None,
    asked: int | None,
) -> None:
    found = mtp_names(set(sources), layout, decoder.num_layers)
    names = {new: sources[old] for new, old in found.items()}
    numbers = {name.split(".")[1] for name in names}
    if not numbers:
        raise CheckpointError(
            f"{report.head_dir}: the MTP layers are not numbered from {decoder.num_layers}, which "
            "is num_hidden_layers. Use the config.json that belongs to these weights."
        )
    needed = report.num_mtp_layers = len(numbers)
    if asked is not None:
        needed = asked
    if needed > len(numbers):
        report.problems.append(
            f"{needed} MTP layers are needed, one for each draft token, and the checkpoint has "
            f"{len(numbers)}. Lower num_nextn_predict_layers to {len(numbers)}, or use one layer "
            "for all of them (use_mtp_vanilla=False; --speculative mtp_eagle)."
        )
        needed = len(numbers)
    report.tensors = {n: s for n, s in names.items() if int(n.split(".")[1]) < needed}
    config = parse_mtp(decoder, report.tensors, layout, needed)
    report.config = replace(config, num_mtp_layers=len(numbers))
    if target is not None:
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(decoder, name), getattr(target, name)
            if ours != theirs:
                report.problems.append(
                    f"The MTP layers are for {name}={ours}, the target has {theirs}. Use the MTP "
                    "layers trained with this target."
                )


def _settle_captures(report: HeadReport) -> HeadConfig:
    """How many layers are captured, from fc's width, where neither config nor target says so."""
    config = report.config
    assert config is not None
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


def _check_ends(report: HeadReport, target: DecoderConfig | None) -> None:
    """Widths and vocabularies against the target's, above all where its ends are shared."""
    config = report.config
    assert config is not None
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
    for own, name in ((config.own_embedding, "embed_tokens"), (config.own_lm_head, "lm_head")):
        if not own and size != target.hidden_size:
            report.problems.append(
                f"The head has no {name} of its own and is {size} wide; the target's, to be "
                f"shared, is {target.hidden_size} wide. Use a head that carries its {name}."
            )


def _check_vocabulary_map(report: HeadReport) -> None:
    """d2t maps each draft id to another target id; t2d, if it is there, marks exactly those."""
    config, tensors = report.config, report.tensors
    assert config is not None
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


def _read_clusters(report: HeadReport) -> None:
    config = report.config
    assert config is not None
    count, vocab = config.lm_head_clusters[0], config.decoder.vocab_size
    if not count:
        return
    clusters = read_clusters(report.tensors.pop(ORDERING, None), count, vocab)
    if isinstance(clusters, str):
        report.problems.append(clusters)
    else:
        report.clusters = clusters


def _check_mask_hidden(report: HeadReport) -> None:
    config = report.config
    assert config is not None
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


def _check_tensors(report: HeadReport) -> None:
    """Every parameter has its tensor, of the right shape and finite, and no tensor is left."""
    config, sources = report.config, report.tensors
    assert config is not None
    layers = {name.split(".")[1] for name in sources if name.startswith("layers.")}
    if config.decoder.num_layers > len(layers):
        report.problems.append(
            f"config.json says num_hidden_layers={config.decoder.num_layers}, the tensors are of "
            f"{len(layers)} layers. Correct it, or copy the head again."
        )
        return
    places = placements(_build(report.head_dir, config, 1, TorchAttention(), 0))
    missing = [name for name in places if name not in sources]
    if missing:
        report.problems.append(
            f"{len(missing)} of {len(places)} tensors are missing: {some(missing)}. Check the "
            "flags and num_hidden_layers in config.json, or copy the head again."
        )
    surplus = [
        source.name
        for name, source in sources.items()
        if name not in places and not name.endswith("rotary_emb.inv_freq")
    ]
    if surplus:
        flags = ""
        if config.kind == "eagle3":
            flags = (
                "config.json lacks a flag (norm_before_fc has input_norm, fc_norm has "
                "fc_norm.0 …; num_hidden_layers), or "
            )
        elif config.kind == KIND:
            flags = "use_ordered_embeddings (it has masked_embedding.…), or "
        report.problems.append(
            f"{len(surplus)} tensors have no place in {config.format}: {some(surplus)}. Check: "
            f"{flags}the tensors of two heads are mixed."
        )
    for name, place in places.items():
        if name in sources:
            problem = _tensor_problem(name, sources[name], place, config)
            if problem:
                report.problems.append(problem)


def _tensor_problem(
    name: str, source: TensorSource, place: Placement, config: HeadConfig
) -> str | None:
    problem = shape_problem(name, source, place)
    if source.shape != place.shape and name == "fc.weight" and config.kind == "eagle3":
        return (
            f"{problem} It is made for {len(config.layers_to_capture)} captured layers of width "
            f"{config.target_hidden_size}."
        )
    if problem or source.dtype not in FLOATS:
        return problem
    tensor = source.read()
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        return (
            f"{source.name} in {source.path} holds {bad} values that are NaN or infinite. The head "
            "is broken: copy it again, or use another one."
        )
    return None


def _build(
    head_dir: Path,
    config: HeadConfig,
    num_positions: int,
    backend: AttentionBackend,
    kv_group: int,
) -> DraftHead:
    with sizes_alone(head_dir):
        return _HEAD_CLASSES[config.kind](config, num_positions, backend, kv_group)


def _places(head: DraftHead) -> dict[str, Placement]:
    """`placements`, with 1 added to the weights of norms that the checkpoint has around 0."""
    places = placements(head)
    if head.config.zero_centered_norms:
        for name, place in places.items():
            if isinstance(head.get_submodule(place.module), RMSNorm):
                places[name] = replace(place, offset=1.0)
    return places


def _drop_what_the_target_has(
    head: DraftHead, sources: Sources, target: HeadTarget, dtype: torch.dtype
) -> None:
    """Own ends that are copies of the target's are not loaded a second time."""
    owners = [("", head)]
    if isinstance(head, MTPHead):
        owners = [(f"layers.{i}.", layer) for i, layer in enumerate(head.layers)]  # type: ignore[misc]
    embedding, lm_head = target.embed_tokens.weight, target.lm_head.weight
    if target.config.tie_word_embeddings:
        lm_head = embedding
    for prefix, owner in owners:
        for name, theirs in (("embed_tokens", embedding), ("lm_head", lm_head)):
            own = sources.get(f"{prefix}{name}.weight")
            if own is None or theirs is None or own.shape != tuple(theirs.shape):
                continue
            if isinstance(getattr(owner, name), ClusteredHead):
                continue
            if torch.equal(own.read().to(dtype), theirs.cpu()):
                setattr(owner, name, None)
