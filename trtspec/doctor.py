"""Why a draft head is accepted so little: the known mistakes, tried one by one.

The target writes some texts. Along them, teacher-forced, the head's proposals are compared with the
target's own choices, as the head is loaded and then with one setting changed at a time. A change
that brings acceptance back names the mistake. Where none does and the head does as well as when it
was trained, it is simply weak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .attention.torch_sdpa import TorchAttention
from .errors import ConfigError
from .models.config import DecoderConfig
from .models.decoder import Decoder
from .models.draft_head import DraftHead
from .models.eagle import Eagle3Head, Eagle3Layer
from .models.head_weights import load_head, read_head
from .models.json_object import read_json_object
from .models.mtp import MTPHead
from .models.rope import RopeTables
from .ops.norm import RMSNorm
from .train.trainer import Evaluation
from .train.unroll import StepScore, Texts, score, teach, unroll

NUM_STEPS = 3
SIGNIFICANT_GAIN = 0.10
"""How far acceptance of the first draft may lie below training's on texts of another kind."""
LEAST_GAIN, LEAST_GAIN_OF_USUAL = 0.10, 0.03
"""Drafts that a change must add to a step, on average, to be named. Less is enough where it brings
the usual setting: another RoPE base may gain a little on short texts with nothing wrong."""
CERTAIN, UNCERTAIN = 3.0, 2.0
"""Standard errors, place by place: a gain of that many is no accident, or may well be one."""
FEWEST_JUDGED = 50
"""Fewer judged places than this show nothing."""
MAP_MAY_BE_WRONG = 0.25
"""A head whose first draft is accepted more often than this has the right vocabulary map."""


@dataclass(frozen=True)
class Finding:
    """One setting tried."""

    name: str
    cure: str  # what to change, exactly
    result: Evaluation


@dataclass
class Diagnosis:
    """What the doctor found.

    `changes` are the settings to be changed together, the most telling first; none of them means
    that nothing is known to be wrong.
    """

    problems: list[str] = field(default_factory=list)  # the head cannot even be loaded
    as_loaded: Evaluation | None = None
    tried: list[Finding] = field(default_factory=list)
    changes: list[Finding] = field(default_factory=list)
    trained: list[float] | None = None  # conditional acceptance at the end of training

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.problems:
            return f"The head does not fit its target: {self.problems[0]}"
        assert self.as_loaded is not None
        before = self.as_loaded.conditional[0]
        if self.as_loaded.judged[0] < FEWEST_JUDGED:
            return (
                f"The texts are too short to judge by: {self.as_loaded.judged[0]} places, "
                f"{FEWEST_JUDGED} are the least. Give more prompts, or more tokens of each."
            )
        if self.changes:
            after = self.changes[-1].result
            return (
                f"{' and '.join(f.name for f in self.changes)}: acceptance of the first draft is "
                f"{before:.2f} as it is and {after.conditional[0]:.2f} with the change (length "
                f"{self.as_loaded.acceptance_length:.2f} and {after.acceptance_length:.2f})."
            )
        if self.trained and self.trained[0] < SIGNIFICANT_GAIN:
            return (
                "The head had learned next to nothing when its training ended: the first draft "
                f"was accepted {self.trained[0]:.2f} of the time. Train it longer, on more text."
            )
        if self.trained:
            kept = f"when it was trained it was {self.trained[0]:.2f}"
            if before >= self.trained[0] - SIGNIFICANT_GAIN:
                return (
                    f"Nothing is wrong: the first draft is accepted {before:.2f} of the time, "
                    f"{kept}. If that is too little, the head is weak for these texts: train it "
                    "on text of this kind."
                )
            return (
                f"No known mistake explains it: the first draft is accepted {before:.2f} of the "
                f"time, {kept}. Is this the target that it was trained for, and text of that kind?"
            )
        return (
            f"No known mistake was found: the first draft is accepted {before:.2f} of the time "
            f"(length {self.as_loaded.acceptance_length:.2f} with {NUM_STEPS} drafts). How it did "
            "in training it does not say; if this is too little, it is weak for these texts."
        )

    @property
    def is_well(self) -> bool:
        """The head does what it can: no mistake found, none hidden by too little text."""
        return self.verdict.startswith(("Nothing is wrong", "No known mistake was found"))


@dataclass(frozen=True)
class _Trial:
    """A setting to try: changes the head for a while, or how it is used."""

    name: str
    cure: str
    change: Callable[[DraftHead], None] = lambda head: None
    layers: tuple[int, ...] | None = None
    shift: int = 1
    is_usual: bool = False  # the setting that a head has unless somebody chose otherwise


def diagnose(
    target: Decoder,
    head_dir: Path,
    kind: str,
    texts: Texts,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Examines a head along texts that the target wrote.

    Args:
        target: its weights not packed (`load_decoder(pack=False)`).
        kind: "eagle" or "mtp".
        texts: on the target's device; `loss_mask` marks what the target wrote.
    """
    tell = progress or (lambda text: None)
    diagnosis = Diagnosis()
    device, dtype = target.embed_tokens.weight.device, target.embed_tokens.weight.dtype
    with ExitStack() as stack:
        diagnosis.problems = read_head(Path(head_dir), target.config, stack, kind=kind).problems
    if diagnosis.problems:
        return diagnosis
    head = load_head(
        Path(head_dir), target, dtype, device, TorchAttention(), kv_group=1, kind=kind, pack=False
    )
    if head.config.mask_token_id is not None:
        diagnosis.problems = [
            f"{head_dir} drafts in parallel; the doctor examines heads that draft one token a "
            "pass. Measure it in the engine: trtspec acceptance."
        ]
        return diagnosis
    if not head.advances_positions:
        diagnosis.problems = [
            f"A {head.config.format} reads the target's KV cache and cannot be run along whole "
            "texts. Measure it in the engine: trtspec acceptance."
        ]
        return diagnosis
    raw = read_json_object(Path(head_dir) / "config.json", "Point to the head's directory.")
    notes = raw.get("training")
    if isinstance(notes, dict) and isinstance(notes.get("held_out_conditional"), list):
        diagnosis.trained = [float(rate) for rate in notes["held_out_conditional"]]
    exam = _Exam(target, head, texts)
    best, made = exam.evaluate(None), list[_Trial]()
    diagnosis.as_loaded = best.result
    if len(best.accepted) < FEWEST_JUDGED:
        return diagnosis
    for _ in range(2):  # a second mistake may hide behind the first
        trials = [trial for trial in _trials(head, target.config) if trial not in made]
        found = []
        for trial in trials:
            tell(f"trying: {trial.name}")
            found.append((trial, exam.evaluate(trial)))
        diagnosis.tried += [Finding(t.name, t.cure, outcome.result) for t, outcome in found]
        trial, outcome = _most_telling(found)
        is_poor = best.result.conditional[0] <= MAP_MAY_BE_WRONG
        if not _explains(trial, outcome, best) and not made and is_poor and head.d2t is not None:
            # A wrong map hides every other mistake, and every other mistake hides it.
            tell("trying: two changes at once")
            found = [(pair, exam.evaluate(pair)) for pair in _pairs(trials, head.d2t)]
            trial, outcome = _most_telling(found)
        if not _explains(trial, outcome, best):
            break
        best = outcome
        made.append(trial)
        diagnosis.changes.append(Finding(trial.name, trial.cure, outcome.result))
        exam.keep(trial)
    return diagnosis


def _pairs(trials: Sequence[_Trial], d2t: Tensor) -> list[_Trial]:
    """Each change of the vocabulary's map together with each other change."""
    maps = _vocabulary_trials(d2t)
    names = {trial.name for trial in maps}

    def both(one: _Trial, other: _Trial) -> _Trial:
        def change(head: DraftHead) -> None:
            one.change(head)
            other.change(head)

        return _Trial(
            f"{one.name} and {other.name}", f"{one.cure}; {other.cure}", change, other.layers,
            other.shift,
        )  # fmt: skip

    return [both(one, other) for one in maps for other in trials if other.name not in names]


@dataclass(frozen=True)
class _Outcome:
    """How the head does with a setting."""

    result: Evaluation
    accepted: Tensor  # [R] float64, drafts accepted at each place the target wrote

    def gain_over(self, other: _Outcome) -> tuple[float, float]:
        """(mean, standard error) of the drafts gained, place by place."""
        gain = self.accepted - other.accepted
        return float(gain.mean()), float(gain.std()) / math.sqrt(len(gain))


def _most_telling(found: Sequence[tuple[_Trial, _Outcome]]) -> tuple[_Trial, _Outcome]:
    """The best, or an earlier one that the best surpasses by chance at most (of RoPE's bases the
    target's is the first)."""
    _, best = max(found, key=lambda pair: pair[1].result.acceptance_length)
    for trial, outcome in found:
        gain, error = best.gain_over(outcome)
        if gain <= UNCERTAIN * error:
            return trial, outcome
    raise AssertionError("the best does not surpass itself")


def _explains(trial: _Trial, new: _Outcome, old: _Outcome) -> bool:
    gain, error = new.gain_over(old)
    least = LEAST_GAIN_OF_USUAL if trial.is_usual else LEAST_GAIN
    return gain >= max(least, CERTAIN * error)


class _Exam:
    """The target's states along the texts, made once; the head with one change after another."""

    def __init__(self, target: Decoder, head: DraftHead, texts: Texts):
        self.target, self.head, self.texts = target, head, texts
        self.kept_layers: tuple[int, ...] | None = None
        self.kept_shift = 1
        self.states: Tensor | None = None  # [T, num_layers, D]
        layers = head.layers_to_capture
        if not layers:
            self.teacher = teach(target, head, texts)
            return
        every = tuple(range(target.config.num_layers))
        with _capturing(head, every):
            teacher = teach(target, head, texts)
        self.states = teacher.hidden.view(len(teacher.hidden), len(every), -1)
        self.teacher = replace(teacher, hidden=self.states[:, list(layers)].flatten(1))

    @torch.no_grad()
    def evaluate(self, trial: _Trial | None) -> _Outcome:
        layers = trial.layers if trial and trial.layers is not None else self.kept_layers
        hidden = self.teacher.hidden
        if layers is not None and self.states is not None:
            hidden = self.states[:, list(layers)].flatten(1)
        teacher = replace(self.teacher, hidden=hidden)
        shift = trial.shift if trial and trial.shift != 1 else self.kept_shift
        result = Evaluation()
        with _unchanged_after(self.head):
            if trial is not None:
                trial.change(self.head)
            steps = unroll(self.head, self.texts, teacher.hidden, NUM_STEPS, shift)
            scores: list[StepScore] = [
                score(self.head, step, teacher, with_loss=False) for step in steps
            ]
        result.add(scores)
        right = torch.stack([each.is_right for each in scores])[:, scores[0].is_counted]
        return _Outcome(result, right.double().cumprod(0).sum(0))

    def keep(self, trial: _Trial) -> None:
        trial.change(self.head)
        self.kept_layers = trial.layers if trial.layers is not None else self.kept_layers
        self.kept_shift = trial.shift if trial.shift != 1 else self.kept_shift


@contextmanager
def _capturing(head: DraftHead, layers: tuple[int, ...]) -> Iterator[None]:
    config = head.config
    head.config = replace(config, layers_to_capture=layers)
    try:
        yield
    finally:
        head.config = config


@contextmanager
def _unchanged_after(head: DraftHead) -> Iterator[None]:
    """Puts back what a trial may change: flags, tables, and the order of columns."""
    config, tables, d2t = head.config, head.rope_tables, head.d2t
    flags = {
        module: dict(norm_before_residual=module.norm_before_residual)
        for module in head.modules() if isinstance(module, Eagle3Layer)
    }  # fmt: skip
    weights = {name: p.data for name, p in head.named_parameters()}
    try:
        yield
    finally:
        head.config, head.rope_tables, head.d2t = config, tables, d2t
        for module, values in flags.items():
            for name, value in values.items():
                setattr(module, name, value)
        for name, parameter in head.named_parameters():
            parameter.data = weights[name]


def _trials(head: DraftHead, target: DecoderConfig) -> list[_Trial]:
    trials = [*_rope_trials(head, target), *_shift_trials()]
    if isinstance(head, Eagle3Head):
        trials += [*_capture_trials(head, target), *_eagle3_trials(head)]
    if isinstance(head, MTPHead):
        trials += _mtp_trials(head)
    if head.d2t is not None:
        trials += _vocabulary_trials(head.d2t)
    return trials


def _capture_trials(head: Eagle3Head, target: DecoderConfig) -> list[_Trial]:
    now = head.layers_to_capture
    trials = []
    for name, layers in (
        ("layers are captured one too early", tuple(i + 1 for i in now)),
        ("layers are captured one too late", tuple(i - 1 for i in now)),
        ("layers are captured two too early", tuple(i + 2 for i in now)),
        ("layers are captured two too late", tuple(i - 2 for i in now)),
        ("captured layers are in reverse order", tuple(reversed(now))),
        ("captured layers are not EAGLE-3's own", _default_layers(target, len(now))),
    ):
        if layers != now and layers and all(0 <= i < target.num_layers for i in layers):
            cure = f"eagle3_layers_to_capture={list(layers)} (0-based outputs), now {list(now)}"
            is_usual = layers == _default_layers(target, len(now))
            trials.append(_Trial(name, cure, layers=layers, is_usual=is_usual))
    return trials


def _default_layers(target: DecoderConfig, count: int) -> tuple[int, ...]:
    n = target.num_layers
    return (1, n // 2 - 1, n - 4) if count == 3 and n >= 6 else ()


def _eagle3_trials(head: Eagle3Head) -> list[_Trial]:
    first = head.layers[0]
    assert isinstance(first, Eagle3Layer)

    def flip_residual(head: DraftHead) -> None:
        layer = head.layers[0]  # type: ignore[index]
        assert isinstance(layer, Eagle3Layer)
        layer.norm_before_residual = not layer.norm_before_residual

    return [
        _Trial(
            "norm_before_residual is wrong",
            f'"norm_before_residual": {str(not first.norm_before_residual).lower()} in config.json',
            flip_residual,
        ),
        _Trial(
            "the hidden state should be fed on "
            + ("before the final norm" if head.config.norm_output else "after the final norm"),
            f'"norm_output": {str(not head.config.norm_output).lower()} in config.json',
            _flip_norm_output,
        ),
        _Trial(
            "embedding and hidden state are side by side in the other order",
            "swap the two halves of the columns of q_proj, k_proj and v_proj of the first layer",
            _swap_eagle_inputs,
        ),
    ]


def _flip_norm_output(head: DraftHead) -> None:
    head.config = replace(head.config, norm_output=not head.config.norm_output)


def _swap_eagle_inputs(head: DraftHead) -> None:
    weight = head.layers[0].self_attn.qkv_proj.weight  # type: ignore[index, union-attr]
    half = weight.shape[1] // 2
    weight.data = torch.cat([weight.data[:, half:], weight.data[:, :half]], dim=1)


def _mtp_trials(head: MTPHead) -> list[_Trial]:
    def reverse(head: DraftHead) -> None:
        for layer in head.layers:  # type: ignore[union-attr]
            weight = layer.eh_proj.weight
            half = weight.shape[1] // 2
            weight.data = torch.cat([weight.data[:, half:], weight.data[:, :half]], dim=1)

    is_around_0 = head.config.zero_centered_norms or head.config.decoder.norm_offset != 0

    def shift_norms(head: DraftHead) -> None:
        for module in head.modules():
            if isinstance(module, RMSNorm):
                module.weight.data = module.weight.data + (-1 if is_around_0 else 1)

    return [
        _Trial(
            "embedding and hidden state are concatenated in the other order",
            "swap the two halves of the columns of eh_proj (input_proj)",
            reverse,
        ),
        _Trial(
            "the hidden state should be fed on "
            + ("before the final norm" if head.config.norm_output else "after the final norm"),
            f"MTPDecodingConfig(mtp_feeds_post_norm={not head.config.norm_output})",
            _flip_norm_output,
        ),
        _Trial(
            "norms are written " + ("around 1" if is_around_0 else "around 0"),
            f"{'subtract 1 from' if is_around_0 else 'add 1 to'} the weights of its norms: in "
            f"{head.config.format} they are {'minus 1' if is_around_0 else 'as they are'}",
            shift_norms,
        ),
    ]


def _rope_trials(head: DraftHead, target: DecoderConfig) -> list[_Trial]:
    if head.config.decoder.type_fields:  # its layers turn in several ways
        return []
    now = head.config.decoder.rope_parameters
    theirs = target.rope_parameters
    trials: list[_Trial] = []
    for theta in dict.fromkeys((theirs["rope_theta"], 10_000.0, 500_000.0, 1_000_000.0)):
        parameters = {"rope_type": "default", "rope_theta": theta}
        if theta == theirs["rope_theta"]:
            parameters = dict(theirs)
        if parameters == now or (theta == now.get("rope_theta") and parameters != theirs):
            continue

        def change(head: DraftHead, parameters: dict[str, object] = parameters) -> None:
            decoder = replace(head.config.decoder, rope_parameters=parameters)
            now = head.rope_tables
            device = next(now.buffers()).device
            head.rope_tables = RopeTables(decoder, now.num_positions).to(device)

        whose = "the target's" if theta == theirs["rope_theta"] else "another"
        trials.append(
            _Trial(
                f"rope_theta should be {whose}, {theta:g}",
                f'"rope_theta": {theta:g} in config.json, now {now.get("rope_theta"):g}',
                change,
                is_usual=theta == theirs["rope_theta"],
            )
        )
    return trials


def _shift_trials() -> list[_Trial]:
    return [
        _Trial(
            "the head reads a row's own token, not the next one",
            "the head was trained on unshifted ids: train it with ids shifted left by one",
            shift=0,
        ),
        _Trial(
            "the head reads the token after the next one",
            "the head was trained on ids shifted by two: train it with ids shifted left by one",
            shift=2,
        ),
    ]


def _vocabulary_trials(d2t: Tensor) -> list[_Trial]:
    rows = torch.arange(len(d2t), device=d2t.device)

    def use(new: Tensor) -> Callable[[DraftHead], None]:
        def change(head: DraftHead) -> None:
            head.d2t = new

        return change

    return [
        _Trial("d2t holds ids in place of offsets", "subtract arange from d2t", use(d2t - rows)),
        _Trial("d2t maps one token too high", "subtract 1 from d2t", use(d2t - 1)),
        _Trial("d2t maps one token too low", "add 1 to d2t", use(d2t + 1)),
        _Trial(
            "draft ids are the target's own",
            "remove d2t and t2d, or set d2t to zeros",
            use(torch.zeros_like(d2t)),
        ),
    ]


def texts_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device
) -> Texts:
    """Each prompt with the text the target wrote after it, short ones side by side in a row.

    Raises:
        ConfigError: nothing was written.
    """
    rows = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
    if not any(len(o) for o in outputs):
        raise ConfigError("The target wrote nothing after these prompts: give other ones.")
    length = max(map(len, rows))
    places, used = list[tuple[int, int]](), list[int]()  # (line, first column); columns, by line
    for row in rows:
        line = next((i for i, n in enumerate(used) if n + len(row) <= length), len(used))
        used += [0] * (line == len(used))
        places.append((line, used[line]))
        used[line] += len(row)
    shape = len(used), length
    ids, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    mask = torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(shape, dtype=torch.int64)
    for row, prompt, (line, first) in zip(rows, prompts, places, strict=True):
        end = first + len(row)
        ids[line, first:end] = torch.tensor(row)
        documents[line, first:end] = documents[line].max() + 1
        mask[line, first + len(prompt) : end] = True
        positions[line, first:end] = torch.arange(len(row))
    return Texts(ids, mask, documents, positions).to(device)
