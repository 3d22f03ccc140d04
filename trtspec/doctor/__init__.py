"""Why a draft head is accepted so little: the known mistakes, tried one by one.

The target writes some texts. Along them, teacher-forced, the drafter's proposals are compared with
the target's own choices, as the drafter is loaded and then with one setting changed at a time. A
change that brings acceptance back names the mistake. Where none does and the head does as well as
when it was trained, it is simply weak.

    diagnosis.py   findings, and the verdict in words
    trials.py      a setting to try; those of every head
    heads.py       those of each kind of head; masks.py of masked heads, blocks.py of block heads
    queries.py     those of what makes queries and keys; weights.py of tensors in general
    exam.py        the target's states and a head along them; the search
    draft_model.py draft models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..attention.torch_sdpa import TorchAttention
from ..checkpoints.files import read_json_object
from ..checkpoints.heads.load import load_head, read_head
from ..checkpoints.heads.masked import pard_token
from ..checkpoints.heads.records import HeadRequest
from ..checkpoints.hf_config import load_config
from ..checkpoints.place import LoadOptions
from ..checkpoints.tensors import open_checkpoint
from ..checkpoints.tokenizer import load_tokenizer, token_problem
from ..checkpoints.weights import load_decoder
from ..checkpoints.zoo import resolve_head
from ..checks import is_number
from ..errors import CheckpointError
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from ..train.records import Sequences
from .diagnosis import Diagnosis, Finding
from .draft_model import DraftModel, DraftModelExam, is_language_model
from .exam import NUM_STEPS, HeadExam, examine
from .heads import defect_of, notes_on, suspicion_of
from .masks import special_tokens, without_twins
from .texts import texts_of
from .untrained import unfilled_tensors

__all__ = [
    "NUM_STEPS",
    "Diagnosis",
    "Finding",
    "check",
    "diagnose",
    "holds_language_model",
    "texts_of",
]


def check(
    target: DecoderConfig, head_dir: Path, kind: str | None = None, tokenizer: Any = None
) -> Diagnosis:
    """What is wrong with a directory before anything runs: `problems` alone.

    Args:
        kind, tokenizer: as in `diagnose`.
    """
    head_dir = resolve_head(head_dir)
    if _is_model(kind, head_dir):
        diagnosis = Diagnosis(drafter="draft model")
        try:
            _read_model(target, head_dir, tokenizer)
        except CheckpointError as error:
            diagnosis.problems.append(str(error))
        return diagnosis
    with ExitStack() as stack:
        return Diagnosis(read_head(head_dir, target, stack, HeadRequest(kind=kind)).problems)


def diagnose(
    target: Decoder,
    head_dir: Path,
    kind: str | None,
    sequences: Sequences,
    progress: Callable[[str], None] | None = None,
    tokenizer: Any = None,
) -> Diagnosis:
    """Examines a head or a draft model along sequences that the target wrote.

    Args:
        target: its weights not packed (`LoadOptions(pack=False)`).
        kind: "eagle", "dflash", "dspark", "mtp" (also Gemma-4 assistants), "draft" for a draft
            model; None is what the directory holds.
        sequences: on the target's device; `loss_mask` marks what the target wrote.
        tokenizer: the target's, whose special tokens may be the mask that a drafter was trained
            with, and with which a draft model's is compared.
    """
    tell, head_dir = progress or (lambda text: None), resolve_head(head_dir)
    if _is_model(kind, head_dir):
        return _diagnose_model(target, head_dir, sequences, tell, tokenizer)
    diagnosis = Diagnosis()
    with ExitStack() as stack:
        report = read_head(head_dir, target.config, stack, HeadRequest(kind=kind))
        diagnosis.problems = report.problems
        if report.problems:
            return diagnosis
        unfilled = unfilled_tensors(report.tensors)
    assert report.kind is not None
    num_mtp_layers = report.require().num_mtp_layers
    used = max(1, min(num_mtp_layers, NUM_STEPS))
    head = load_head(
        head_dir,
        target,
        HeadRequest(kind=report.kind.asked_as, num_mtp_layers=used),
        replace(_options_of(target), kv_group=1),
    )
    raw = read_json_object(head_dir / "config.json", "Point to the head's directory.")
    _compare_with_training(diagnosis, raw.get("training"))
    diagnosis.made_for = _target_named_in(raw)
    tokens = _tokens_for_mask(diagnosis, head.config.mask_token_id, raw, head, target, tokenizer)
    exam = HeadExam(target, head, sequences, report.mask_hidden, tokens)
    diagnosis.notes += notes_on(exam.patient)
    if num_mtp_layers > NUM_STEPS:
        diagnosis.notes.append(
            f"Of its {num_mtp_layers} MTP layers the first {NUM_STEPS} were examined."
        )
    suspicions = [
        text for text in (unfilled.untrained, suspicion_of(exam.patient)) if text is not None
    ]
    diagnosis.suspicion = " ".join(suspicions) or None
    diagnosis.defect = defect_of(exam.patient, diagnosis.trained)
    diagnosis.partly_filled = unfilled.partly_filled
    examine(exam, diagnosis, tell)
    diagnosis.notes += exam.notes()
    return diagnosis


def _is_model(kind: str | None, directory: Path) -> bool:
    return kind == "draft" or (kind is None and holds_language_model(directory))


def holds_language_model(directory: Path) -> bool:
    """Whether a directory holds a whole model, which can draft as it is."""
    try:
        with ExitStack() as stack:
            return is_language_model(set(open_checkpoint(directory, stack, pickle=True)))
    except CheckpointError:  # `read_head` says what is wrong
        return False


def _read_model(
    target: DecoderConfig, draft_dir: Path, tokenizer: Any
) -> tuple[DecoderConfig, Any, int | None]:
    """(config, tokenizer, mask token of a PARD model). Raises CheckpointError if it cannot draft
    for the target."""
    config, draft_tokenizer = load_config(draft_dir), load_tokenizer(draft_dir)
    mask = pard_token(config.raw, draft_dir / "config.json", config.vocab_size)
    problem = token_problem(config.vocab_size, target.vocab_size, draft_tokenizer, tokenizer)
    if problem:
        raise CheckpointError(problem)
    return config, draft_tokenizer, mask


def _options_of(target: Decoder) -> LoadOptions:
    """Returns how a drafter is loaded: in the target's dtype, on its device."""
    weight = target.embed_tokens.weight
    return LoadOptions(
        dtype=weight.dtype, device=weight.device, backend=TorchAttention(), pack=False
    )


def _diagnose_model(
    target: Decoder,
    draft_dir: Path,
    sequences: Sequences,
    tell: Callable[[str], None],
    tokenizer: Any,
) -> Diagnosis:
    diagnosis = Diagnosis(drafter="draft model")
    try:
        config, draft_tokenizer, mask = _read_model(target.config, draft_dir, tokenizer)
        model = load_decoder(draft_dir, _options_of(target))
        model.keep_logits(target.config.vocab_size)
    except CheckpointError as error:
        diagnosis.problems.append(str(error))
        return diagnosis
    diagnosis.notes.append(
        "A draft model's own settings (RoPE, norms) are not tried: they are right if the text that "
        "it writes alone is good (trtspec generate)."
    )
    if mask is None:
        diagnosis.notes.append(
            "It was examined one token a pass; with a pard_token in its config.json the doctor "
            "examines drafts from one pass."
        )
    tokens = _tokens_for_mask(diagnosis, mask, config.raw, model, target, tokenizer)
    if draft_tokenizer is None or tokenizer is None:
        diagnosis.notes.append(
            "The tokenizers were not compared: "
            + ("the draft model's" if draft_tokenizer is None else "the target's")
            + " directory holds none, or it was not given."
        )
    exam = DraftModelExam(target, DraftModel(model, mask), sequences, tokens)
    examine(exam, diagnosis, tell)
    diagnosis.notes += exam.notes()
    return diagnosis


def _tokens_for_mask(
    diagnosis: Diagnosis,
    mask: int | None,
    raw: Mapping[str, Any],
    drafter: DraftHead | Decoder,
    target: Decoder,
    tokenizer: Any,
) -> dict[int, str]:
    """Returns the names of tokens to try in place of the drafter's mask; none if it has none.

    Args:
        raw: the drafter's config.json. tokenizer: the target's.
    """
    diagnosis.reads_masks = mask is not None
    if mask is None:
        return {}
    assert drafter.embed_tokens is not None
    embedding = drafter.embed_tokens.weight
    tokens, left_out = special_tokens(raw, len(embedding), target.config, tokenizer)
    diagnosis.notes += left_out
    return without_twins(tokens, mask, embedding)


def _target_named_in(raw: Mapping[str, Any]) -> str | None:
    """The target that a head's config.json says it is for: `trtspec train` and the speculators
    package write it."""
    training, speculators = raw.get("training"), raw.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    for fields, key in ((training, "target"), (verifier, "name_or_path")):
        name = fields.get(key) if isinstance(fields, dict) else None
        if isinstance(name, str) and name:
            return name
    return None


def _compare_with_training(diagnosis: Diagnosis, notes: Any) -> None:
    """Takes acceptance at the end of training from what the trainer wrote, if it makes sense."""
    rates = notes.get("held_out_conditional") if isinstance(notes, dict) else None
    if rates is None or rates == []:  # nothing was held out
        return
    if isinstance(rates, list) and all(is_number(rate) and 0 <= rate <= 1 for rate in rates):
        diagnosis.trained = [float(rate) for rate in rates]
        return
    diagnosis.notes.append(
        f"held_out_conditional={rates!r} in its config.json is no list of numbers in 0 … 1: "
        "acceptance is not compared with training's."
    )
