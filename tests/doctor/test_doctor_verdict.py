"""The doctor's reasoning without a drafter: verdicts on made-up acceptance, and the search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import UNPACKED_HEAD
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import MASK_TOKEN, eagle1_dir, eagle3_dir
from tiny_trained import load_target
from torch import nn
from unrolled import padded_texts

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.doctor import _compare_with_training
from trtspec.doctor.captures import capture_trials
from trtspec.doctor.diagnosis import Diagnosis, Finding, _ordinal
from trtspec.doctor.exam import (
    Exam,
    HeadExam,
    Outcome,
    best_explanation,
    examine,
    likely_explanation,
)
from trtspec.doctor.heads import Patient, notes_on
from trtspec.doctor.masks import special_tokens, without_twins
from trtspec.doctor.trials import (
    Setting,
    Trial,
    rope_trials,
    vocabulary_trials,
    window_trials,
)
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.base import DraftHead
from trtspec.train.evaluation import Evaluation
from trtspec.train.losses import StepScore


def _diagnosis(*right: int, judged: int = 1000, **fields: Any) -> Diagnosis:
    """Of drafts judged where those before were right."""
    places = [judged, *right[:-1]]
    return Diagnosis(as_loaded=Evaluation(list(right), places), **fields)


# -- verdicts ----------------------------------------------------------------------------------
def test_a_dead_drafter_is_not_well() -> None:
    for kind in ("head", "draft model"):
        dead = _diagnosis(3, 0, 0, drafter=kind)
        assert not dead.is_well, dead.verdict
        assert dead.verdict.startswith("No known mistake explains it: the first draft is accepted")
        assert (
            "hardly ever" in dead.verdict and f"the target that the {kind} is for" in dead.verdict
        )
        assert dead.verdict.endswith(f"If so, copy the {kind} again from its source.")
    assert _diagnosis(21, 0, 0).is_well, "above the engine's own floor"


def test_later_drafts_are_compared_with_training_too() -> None:
    short = _diagnosis(800, 240, 200, trained=[0.8, 0.7, 0.6])
    assert not short.is_well
    assert "the second draft is accepted 0.30 of the time, after right ones, when it was trained " \
        "it was 0.70" in short.verdict  # fmt: skip
    assert short.verdict.endswith("of that kind? If so, copy the head again from its source.")
    assert _diagnosis(800, 560, 390, trained=[0.8, 0.7, 0.6]).is_well
    few = _diagnosis(400, 190, 0, judged=500, trained=[0.8, 0.5, 0.6])
    assert few.is_well, "the third draft was judged 190 times"


def test_a_change_that_brings_back_a_part_is_not_the_whole() -> None:
    def with_change(*right: int, **fields: Any) -> str:
        found = _diagnosis(10, 0, 0, **fields)
        assert found.as_loaded is not None
        places = [1000, *right[:-1]]
        change = Finding("its draft ids are the target's", "", Evaluation(list(right), places))
        found.changes = [change]
        return found.verdict

    said = with_change(160, 30, 0, trained=[0.74, 0.7, 0.6])
    assert "0.01 as it is and 0.16 with the change" in said
    assert "That is not all of it" in said and "0.74 of the time" in said
    assert "That is not all of it" not in with_change(730, 500, 300, trained=[0.74, 0.7, 0.6])
    assert "That is not all of it" not in with_change(160, 30, 0), "how it was trained is unknown"
    assert "hardly ever with the change, too" in with_change(15, 0, 0)


def test_a_change_that_regains_little_is_not_the_whole() -> None:
    """Of the 0.20 that the first draft lost, 0.04; by 256 places that is short of certain."""
    found = _diagnosis(143, 74, 30, judged=256, trained=[0.76, 0.7, 0.6])
    change = Finding("another base", "", Evaluation([154, 80, 30], [256, 154, 80]))
    found.changes = [change]
    assert "That is not all of it: when it was trained the first draft was" in found.verdict
    found.changes = [replace(change, result=Evaluation([174, 120, 80], [256, 174, 120]))]
    assert "That is not all of it" not in found.verdict


def test_acceptance_below_trainings_is_told_where_it_may_be_chance() -> None:
    found = _diagnosis(210, 147, 103, judged=384, trained=[0.67, 0.7, 0.7])
    assert found.is_well and "Nothing is wrong" not in found.verdict
    assert found.verdict.startswith("No known mistake was found, but the first draft is accepted")


@pytest.mark.parametrize("rates", [[None, "x"], [0.5, float("nan")], [1.5], "0.5", {"a": 1}])
def test_odd_notes_of_training_are_left_alone(rates: Any) -> None:
    diagnosis = Diagnosis()
    _compare_with_training(diagnosis, {"held_out_conditional": rates})
    assert diagnosis.trained is None and "is no list of numbers" in diagnosis.notes[0]
    _compare_with_training(diagnosis, {"held_out_conditional": [0, 0.5]})
    assert diagnosis.trained == [0.0, 0.5]
    for notes in (None, {}, [], "x", {"held_out_conditional": []}):
        _compare_with_training(other := Diagnosis(), notes)
        assert other.trained is None and not other.notes


@pytest.mark.parametrize(
    ("right", "judged", "is_blamed"),
    [
        ((800, 40, 20), 1000, True),
        ((800, 312, 250), 1000, False),  # 0.39, by chance below half of 0.8
        ((80, 0, 0), 1000, False),  # too little accepted before any mask
    ],
)
def test_masks_are_blamed_with_certainty(
    right: tuple[int, ...], judged: int, is_blamed: bool
) -> None:
    found = _diagnosis(*right, judged=judged, reads_masks=True)
    assert found.verdict.startswith("Something is wrong at the masks") is is_blamed, found.verdict
    assert found.is_well is not is_blamed
    if is_blamed:
        assert "trained too little with masks" in found.verdict


def test_a_draft_after_the_third_is_named() -> None:
    result = Evaluation([790, 780, 770, 10, 5], [800, 790, 780, 770, 10])
    diagnosis = Diagnosis(as_loaded=result, trained=[0.98, 0.98, 0.98, 0.98, 0.5])
    assert "the 4th draft is accepted 0.01 of the time, after right ones" in diagnosis.verdict
    assert [_ordinal(i) for i in (0, 10, 20, 21, 29)] == ["first", "11th", "21st", "22nd", "30th"]


def test_a_suspicion_speaks_only_where_masks_fail() -> None:
    zeros = "mask_hidden is zero everywhere."
    lost = _diagnosis(800, 40, 20, reads_masks=True, suspicion=zeros)
    assert zeros in lost.verdict and not lost.is_well and lost.remarks == []
    good = _diagnosis(800, 640, 500, reads_masks=True, suspicion=zeros)
    assert good.is_well and zeros not in good.verdict and good.remarks == [zeros]


def test_what_a_draft_model_is_told() -> None:
    found = _diagnosis(300, 100, 20, drafter="draft model")
    assert found.is_well and "train" not in found.verdict, found.verdict


def test_what_explains_bad_acceptance_is_told_beside_the_question() -> None:
    dead = _diagnosis(3, 0, 0, suspicion="fc.weight is zero.", made_for="a/target").verdict
    assert "hardly ever. fc.weight is zero. Is this the target that the head is for?" in dead
    assert "(Its config.json names a/target.) If so, copy the head again" in dead


def test_a_draft_vocabulary_without_the_texts_tokens() -> None:
    """Told where it costs at least half of the drafts that are lost."""
    found = _diagnosis(350, 250, 200, coverage=(400, 1000))
    assert not found.is_well and "it holds 0.40 of the tokens that the target" in found.verdict
    for right, held in ((350, 900), (100, 700), (850, 1000)):
        other = _diagnosis(right, 80, 60, coverage=(held, 1000))
        assert "vocabulary" not in other.verdict, (right, held)
        assert any("0.70 of the tokens" in note for note in other.remarks) is (held == 700)
    as_trained = _diagnosis(350, 250, 200, coverage=(400, 1000), trained=[0.35, 0.7, 0.8])
    assert as_trained.is_well and any("vocabulary" in note for note in as_trained.remarks)


def test_tokens_of_other_meanings() -> None:
    found = _diagnosis(20, 5, 1, refitted=(300, 1000))
    assert "right 0.30 of the time in the other half, as it is 0.02" in found.verdict
    assert not found.is_well
    for right, refitted in ((20, 150), (220, 340)):  # by chance, or no better
        other = _diagnosis(right, 5, 1, refitted=(refitted, 1000))
        assert "mean other ones" not in other.verdict


def test_values_that_are_not_finite_are_told_before_all_else() -> None:
    change = Finding("a change", "", Evaluation([900], [1000]))
    found = _diagnosis(3, 0, 0, overflow="NaN.", changes=[change], reads_masks=True)
    assert found.verdict == "NaN." and not found.is_well


def test_acceptance_differs_between_texts() -> None:
    """Of ten texts two are hard: 0.60 may be chance where training had 0.75."""
    texts = torch.arange(PLACES) % 10
    accepted = torch.where(texts < 2, 0.0, (torch.arange(PLACES) // 10 % 4 < 3).double())
    outcome = Outcome(Evaluation([int(accepted.sum())], [PLACES]), accepted, texts)
    outcome.set_errors()
    rates = torch.tensor([0.0] * 2 + [0.75] * 8)
    assert outcome.result.errors == pytest.approx([float(rates.std()) / 10**0.5])
    assert outcome.result.conditional == [pytest.approx(0.6)]
    assert Diagnosis(as_loaded=outcome.result, trained=[0.75]).is_well
    outcome.result.errors.clear()
    assert not Diagnosis(as_loaded=outcome.result, trained=[0.75]).is_well


# -- special tokens ----------------------------------------------------------------------------
def test_no_special_token_is_lost_to_its_name() -> None:
    raw = {
        "eos_token_id": [1, 2, MASK_TOKEN], "text_config": {"eos_token_id": 50},
        "num_experts_per_token": 8,
    }  # fmt: skip
    target: Any = SimpleNamespace(raw={})
    found, _ = special_tokens(raw, 97, target)
    assert {1, 2, MASK_TOKEN, 50} <= set(found) and 8 not in found


def test_tokens_of_one_embedding_are_tried_once() -> None:
    embedding = torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0])[:, None]
    tokens = {1: "a", 2: "as the mask", 3: "as a", 4: "b"}
    assert without_twins(tokens, 0, embedding) == {1: "a", 4: "b"}


# -- the search --------------------------------------------------------------------------------
PLACES = 1000


def _outcome(share: float, seed: int = 0) -> Outcome:
    """Drafts accepted at a share of the places, the same ones for the same seed."""
    order = torch.randperm(PLACES, generator=torch.Generator().manual_seed(seed))
    accepted = (order < share * PLACES).double()
    return Outcome(Evaluation([int(accepted.sum())], [PLACES]), accepted, torch.arange(PLACES))


class _Exam(Exam):
    """Acceptance by the names of the changes made."""

    def __init__(self, shares: dict[tuple[str, ...], float], names: str, d2t: Any = None):
        super().__init__(nn.Module())
        self.shares, self.names, self.made, self.d2t = shares, names, list[str](), d2t

    def trials(self) -> list[Trial]:
        return [Trial(name, f"change {name}") for name in self.names]  # closures made anew

    def scores(self, setting: Setting) -> list[StepScore]:
        raise AssertionError

    def read_states(self) -> torch.Tensor:
        return torch.zeros(1)

    def evaluate(self, trial: Trial | None) -> Outcome:
        names = [*self.made, *([] if trial is None else [trial.name])]
        return _outcome(self.shares.get(tuple(names), 0.2))

    def keep(self, trial: Trial) -> None:
        self.made.append(trial.name)


def test_a_weaker_trial_does_not_hide_a_mistake() -> None:
    old, noise = _outcome(0.20), _outcome(0.32, seed=1)
    spread = 4 * torch.randn(PLACES, generator=torch.Generator().manual_seed(0))
    noise = replace(noise, accepted=noise.accepted + spread)  # by chance as good
    weak, right = Trial("weak", ""), Trial("right", "")
    best = _outcome(0.33)
    assert best.gain_over(noise)[0] <= 2 * best.gain_over(noise)[1]
    assert best_explanation([(weak, noise), (right, best)], old) == (right, best)
    assert best_explanation([(weak, noise)], old) is None


def test_an_unusual_setting_does_not_hide_a_usual_one() -> None:
    old, unusual, usual = _outcome(0.50), _outcome(0.555), _outcome(0.555)
    trials = Trial("unusual", ""), Trial("usual", "", is_usual=True)
    found = best_explanation(list(zip(trials, (unusual, usual), strict=True)), old)
    assert found is not None and found[0].name == "usual"


def test_a_few_texts_are_no_proof() -> None:
    """A gain at all places of two texts of ten."""
    texts = torch.arange(PLACES) % 10
    old, new = (replace(_outcome(0.0), sequences=texts) for _ in range(2))
    new = replace(new, accepted=(texts < 2).double())
    gain, error = new.gain_over(old)
    assert gain == pytest.approx(0.2) and error == pytest.approx(0.4 / 3)
    assert best_explanation([(Trial("by chance", ""), new)], old) is None


def test_a_likely_mistake_is_told_as_such() -> None:
    """At 50 texts, 3 of which a change helps much: 1.8 standard errors; 5: 2.3."""
    texts = torch.arange(PLACES) % 50
    old, new = (replace(_outcome(0.0), sequences=texts) for _ in range(2))

    def gained(count: int) -> Outcome:
        return replace(new, accepted=2.0 * (texts < count))

    named = Trial("layers", "other layers"), Trial("norms", "other norms")
    assert likely_explanation([(named[0], gained(3))], old) is None
    both = list(zip(named, (gained(5), gained(6)), strict=True))
    assert best_explanation(both, old) is None
    likely = likely_explanation(both, old)
    assert likely is not None and likely.name == "norms"
    likely = replace(likely, result=Evaluation([700, 420, 210], [1000, 700, 420]))
    found = _diagnosis(600, 300, 100, trained=[0.7, 0.6, 0.5], likely=likely)
    assert found.verdict.startswith("No mistake is certain, but one is likely: norms (length ")
    assert found.verdict.endswith("or try the change: other norms.") and not found.is_well
    assert _diagnosis(690, 400, 200, trained=[0.7, 0.6, 0.5], likely=likely).is_well


def test_too_little_text() -> None:
    assert "too short to judge by: 190 places" in _diagnosis(100, 50, 30, judged=190).verdict
    one = _diagnosis(800, 600, 500, num_texts=1)
    assert "1000 places of 1, 200 of 2 are the least" in one.verdict and not one.is_well


def test_two_mistakes_one_behind_the_other() -> None:
    exam, diagnosis = _Exam({("a",): 0.5, ("a", "b"): 0.8}, "abc"), Diagnosis()
    examine(exam, diagnosis, lambda text: None)
    assert [change.name for change in diagnosis.changes] == ["a", "b"]
    names = [finding.name for finding in diagnosis.tried]
    assert names == ["a", "b", "c", "a, and: b", "a, and: c"], "a is not tried again"


def test_pairs_are_told_and_are_the_last_change() -> None:
    d2t, mapped = torch.zeros(9, dtype=torch.int64), vocabulary_trials(torch.zeros(9))[0].name
    pair = f"{mapped} and a"
    exam, diagnosis = _Exam({(pair,): 0.6, (pair, "b"): 0.9}, "ab", d2t), Diagnosis()
    examine(exam, diagnosis, lambda text: None)
    assert [change.name for change in diagnosis.changes] == [pair]
    names = [finding.name for finding in diagnosis.tried]
    assert pair in names and not any(name.startswith("with") for name in names)


def test_a_head_without_its_targets_scaling_is_tried(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 300_000.0}
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=8, rope_parameters=scaled))
    head = _load(eagle3_dir(tmp_path), target)
    names = {now["rope_type"]: _names_of_ropes(head, target, now) for now in (scaled, PLAIN)}
    assert (
        names["linear"][0] == "RoPE should not be scaled" and "the target's" in names["default"][0]
    )
    assert not any("not be scaled" in name for name in names["default"])
    assert all(len(set(found)) == len(found) for found in names.values())


PLAIN = {"rope_type": "default", "rope_theta": 300_000.0}


def _names_of_ropes(head: DraftHead, target: Decoder, now: dict[str, Any]) -> list[str]:
    decoder = replace(head.config.decoder, rope_parameters=now)
    head.config = replace(head.config, decoder=decoder)
    return [trial.name for trial in rope_trials(head, target.config)]


def test_the_last_layers_state_with_the_targets_final_norm(tmp_path: Path) -> None:
    """And the final state without it."""
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=8))
    texts, size = padded_texts([[24], [20, 4]], 24), target.config.hidden_size
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 7]}}
    reads_last = _load(eagle3_dir(tmp_path, captured=2, config=layers), target)
    of_last = HeadExam(target, reads_last, texts, None, {})
    of_final = HeadExam(target, _load(eagle1_dir(tmp_path), target), texts, None, {})
    sets = [
        t.sets
        for exam in (of_last, of_final)
        for t in exam.trials()
        if "target's final norm" in t.name or "its final norm" in t.name
    ]
    assert sets == [{"norms_last": True}, {"before_norm": True}]
    now, other = of_last._hidden(Setting()), of_last._hidden(Setting(norms_last=True))
    before, after = of_final._hidden(Setting(before_norm=True)), of_final._hidden(Setting())
    torch.testing.assert_close(now[:, size:], before)
    torch.testing.assert_close(other[:, size:], after)
    torch.testing.assert_close(other[:, :size], now[:, :size])
    reads_others = _load(eagle3_dir(tmp_path, config={}), target)
    names = [trial.name for trial in HeadExam(target, reads_others, texts, None, {}).trials()]
    assert not any("target's final norm" in name for name in names)


# -- notes -------------------------------------------------------------------------------------
def test_two_swapped_layers_of_many_are_tried() -> None:
    trials = capture_trials((1, 2, 3, 27, 14), 30, "target_layer_ids", None)
    names = {trial.sets["layers"]: trial.name for trial in trials}
    assert names[1, 2, 3, 14, 27] == "captured layers 27 and 14 are in each other's place"


def _load(directory: Path, target: Decoder) -> DraftHead:
    return load_head(
        directory,
        target,
        HeadRequest(),
        UNPACKED_HEAD,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"use_swa": True, "swa_window_size": 20},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20},
        {"draft_window": 70},
    ],
    ids=lambda fields: min(fields),
)
def test_the_cure_of_windows_leaves_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=8))
    directory = dflash_dir(tmp_path)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"use_sliding_window": True} | fields))
    (trial,) = window_trials(_load(directory, target))
    said = trial.cure.replace(",", "").split()
    left = {name: value for name, value in fields.items() if name not in said}
    path.write_text(json.dumps(raw | {"use_sliding_window": True} | left))
    assert not window_trials(_load(directory, target))


def test_what_is_not_tried_is_noted(tmp_path: Path) -> None:
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=8))
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6]}}
    notes = []
    for directory in (
        eagle1_dir(tmp_path),
        eagle3_dir(tmp_path, captured=4, config=layers),
        dflash_dir(tmp_path),
    ):
        head = _load(directory, target)
        if head.config.kind == "dflash":
            head.config = replace(head.config, layers_to_capture=(0, 2, 4, 6))
        notes.append(" ".join(notes_on(Patient(head, target.config, None, 1.0, {}, head))))
    assert "fc_norm" not in notes[0]
    assert "norm_before_fc and fc_norm are not tried" in notes[1]
    for note in notes[1:]:
        assert "orders of its 4 captured layers only the reverse and those with two" in note
    assert _Exam({}, "a").notes() == ["Drafts after number 3 were not examined."]
