"""`trtspec acceptance`: the prompts in the box, the counting, the report, the command."""

from __future__ import annotations

import base64
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from matrix import thinned
from tiny import constant_target_dir, tiny_model_dir
from tiny_heads import eagle3_dir

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
    cli,
)
from trtspec.cli import status
from trtspec.config import DecodingBaseConfig
from trtspec.data.acceptance_prompts import (
    CATEGORIES,
    AcceptancePrompt,
    fingerprint,
    load_prompts,
    prompt_fingerprints,
    select_prompts,
    text_fingerprints,
)
from trtspec.data.prompts import PROMPT_SETS
from trtspec.errors import ConfigError, RequestError
from trtspec.executor.request import StepRecord
from trtspec.report import (
    AcceptanceReport,
    acceptance_of,
    advise,
    bucket_of,
    measure_acceptance,
    measure_step_ms,
    step_times,
)
from trtspec.report.collect import Interrupted, collect_samples
from trtspec.report.contexts import pad_prompt, padding_texts
from trtspec.report.html import interval_text, render_html
from trtspec.report.measure import InterruptedReport, dead, fading
from trtspec.report.plots import draw_plots, require_matplotlib
from trtspec.report.statistics import Acceptance, Estimate, Group, bucket_name

VOCAB = 97
HAS_MATPLOTLIB = find_spec("matplotlib") is not None
K = 3


def encode(messages: Sequence[dict[str, str]]) -> list[int]:
    """A stand-in for the chat template: a token a word."""
    text = " ".join(f"{m['role']} {m['content']}" for m in messages)
    return [3 + sum(map(ord, word)) % (VOCAB - 3) for word in text.split()]


def prompt(number: int, words: int = 6, category: str = "a") -> AcceptancePrompt:
    rng = random.Random(number)
    text = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(words))
    return AcceptancePrompt(f"p{number}", category, ({"role": "user", "content": text},))


PROMPTS = [prompt(i, words=3 + 2 * i, category="ab"[i % 2]) for i in range(8)]


def build(target: Path, config: DecodingBaseConfig, **options: Any) -> LLM:
    return LLM(target, config, device="cpu", dtype="float32", **{"max_batch_size": 3, **options})


def eagle(head: Path, k: int = K) -> EagleDecodingConfig:
    return EagleDecodingConfig(
        max_draft_len=k, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acceptance")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return tiny_model_dir(folder, seed=1)


@pytest.fixture(scope="module")
def constant(folder: Path) -> Path:
    return constant_target_dir(folder, seed=2, max_position_embeddings=4096)


# -- the prompts in the box --------------------------------------------------------------------
def test_the_set_has_twenty_prompts_of_each_category() -> None:
    prompts = load_prompts()
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 20)
    assert len({p.messages[-1]["content"] for p in prompts}) == 120
    assert sum(len(p.messages) > 2 for p in prompts) >= 8
    ours = {fingerprint(text) for texts in PROMPT_SETS.values() for text in texts}
    assert not ours & prompt_fingerprints()


@pytest.mark.parametrize("category", ["summarise", "translate", "rewrite"])
def test_what_is_worked_on_is_in_the_prompt(category: str) -> None:
    own = [p for p in load_prompts() if p.category == category]
    longest = [max(len(m["content"].split()) for m in p.messages) for p in own]
    assert min(longest) >= 75 and max(longest) > 280
    assert sum(p.passage is not None for p in own) >= 19


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON"),
        ("3", "got int"),
        ("{}", "got no keys"),
        ('{"id": "x", "messages": []}', "'id', 'messages'"),
        ('{"id": "", "category": "a", "messages": []}', "'id' is ''"),
        ('{"id": "x", "category": 3, "messages": []}', "'category' is 3"),
        ('{"id": "x", "category": "a", "messages": []}', "at least one message"),
        ('{"id": "x", "category": "a", "messages": [{"role": "user"}]}', "message 0 must"),
        (
            '{"id": "x", "category": "a", "messages": [{"role": "user", "content": " "}]}',
            "message 0 must",
        ),
        (
            '{"id": "x", "category": "a", "messages": [{"role": "assistant", "content": "b"}]}',
            "the roles are assistant",
        ),
        (
            '{"id": "x", "category": "a", "messages": [{"role": "system", "content": "b"}]}',
            "end with user",
        ),
        (
            '{"id": "fine", "category": "a", "messages": [{"role": "user", "content": "b"}]}',
            "that of line 1 too",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    fine = '{"id": "fine", "category": "a", "messages": [{"role": "user", "content": "b"}]}'
    (tmp_path / "f.jsonl").write_text(f"{fine}\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"f\.jsonl:3: ") as caught:
        load_prompts(tmp_path / "f.jsonl")
    assert expected in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, word in (
        ("empty", "no prompts"), ("latin", "UTF-8"), ("nowhere", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            load_prompts(tmp_path / name)


def test_fingerprints_know_a_passage_under_another_instruction() -> None:
    found = next(p for p in load_prompts() if p.id == "rewrite-01")
    passage = found.passage
    assert passage is not None
    spoilt = passage.upper().replace(",", " ;").replace(" ", "\n")
    assert fingerprint(passage) == fingerprint(spoilt)
    assert text_fingerprints(f"Say this in Danish:\n\n{passage}") & prompt_fingerprints()
    for text in ("Hello", "Please shorten this:", "Write about a quiet afternoon in a harbour."):
        assert not text_fingerprints(text) & prompt_fingerprints()


def test_selection() -> None:
    assert [p.id for p in select_prompts(PROMPTS, ["b"], 2)] == ["p1", "p3"]
    assert len(select_prompts(PROMPTS, None, 3)) == 6
    with pytest.raises(ConfigError, match=r"'c'\. Allowed: a, b"):
        select_prompts(PROMPTS, ["c"])
    with pytest.raises(ConfigError, match="per_category=0"):
        select_prompts(PROMPTS, None, 0)


# -- counting ----------------------------------------------------------------------------------
def brute_force(clusters: Sequence[tuple[str, Sequence[StepRecord]]], k: int) -> dict[str, Any]:
    """The counts as their definitions read, one step at a time."""
    steps = [step for _, found in clusters for step in found]
    proposed, reached, accepted = [0] * k, [0] * k, [0] * k
    for step in steps:
        for position in range(1, k + 1):
            if step.proposed < position:
                break
            proposed[position - 1] += 1
            if step.accepted < position - 1:
                continue
            reached[position - 1] += 1
            accepted[position - 1] += step.accepted >= position
    return {
        "num_prompts": len({name for name, found in clusters if found}),
        "num_steps": len(steps),
        "num_tokens": sum(1 + step.accepted for step in steps),
        "proposed": tuple(proposed),
        "reached": tuple(reached),
        "accepted": tuple(accepted),
    }


def random_clusters(seed: int, k: int) -> list[tuple[str, list[StepRecord]]]:
    rng = random.Random(seed)
    clusters = []
    for number in range(rng.randint(1, 12)):
        steps = []
        for kv_len in range(rng.randint(0, 20)):
            made = rng.randint(0, k)
            steps.append(StepRecord(kv_len * 40, made, rng.randint(0, made)))
        clusters.append((f"p{number % 7}", steps))
    return clusters


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_brute_force(seed: int) -> None:
    k = 1 + seed % 5
    clusters = random_clusters(seed, k)
    found, expected = acceptance_of(clusters, k), brute_force(clusters, k)
    assert {name: getattr(found, name) for name in expected} == expected
    json.dumps(found.to_json(), allow_nan=False)
    if found.num_steps == 0:
        assert found.acceptance_length == Estimate(None, None, None)
        return
    length = found.acceptance_length.value
    assert length == found.num_tokens / found.num_steps
    shares = [rate.value or 0.0 for rate in found.unconditional]
    assert length == pytest.approx(1 + sum(shares))
    for i in range(k):
        if found.reached[i]:
            assert found.conditional[i].value == found.accepted[i] / found.reached[i]
        else:
            assert found.conditional[i].value is None
        assert found.unconditional[i].value == found.accepted[i] / found.num_steps


def test_intervals_are_over_prompts() -> None:
    """Two prompts of a hundred equal steps each know far less than two hundred prompts."""
    few = [("p0", [StepRecord(9, 1, 1)] * 100), ("p1", [StepRecord(9, 1, 0)] * 100)]
    many = [(f"p{i}", [StepRecord(9, 1, i % 2)]) for i in range(200)]
    wide, narrow = acceptance_of(few, 1).acceptance_length, acceptance_of(many, 1).acceptance_length
    assert (wide.low, wide.value, wide.high) == (1.0, 1.5, 2.0)
    assert narrow.value == 1.5 and narrow.low is not None and narrow.high is not None
    sigma = 0.5 / 200**0.5
    assert narrow.low == pytest.approx(1.5 - 1.96 * sigma, abs=0.02)
    assert narrow.high == pytest.approx(1.5 + 1.96 * sigma, abs=0.02)
    alone = acceptance_of(few[:1], 1).acceptance_length
    assert (alone.value, alone.low, alone.high) == (2.0, None, None)
    same = acceptance_of([("p0", few[0][1]), ("p0", few[1][1])], 1)  # two answers, one prompt
    assert same.num_prompts == 1 and same.acceptance_length.low is None


def test_buckets() -> None:
    edges = [(0, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
    for low, high in edges:
        assert bucket_of(low) == bucket_of(high - 1) == (low, high)
    assert [bucket_name(edge) for edge in edges] == [
        "0-256", "256-512", "512-1k", "1k-2k", "2k-4k", "4k-8k"
    ]  # fmt: skip


def test_interval_text() -> None:
    assert interval_text(Estimate(None, None, None)) == "-"
    assert interval_text(Estimate(0.5, None, None), percent=True) == "50.0 %"
    assert interval_text(Estimate(1.234, 1.1, 1.4)) == "1.23 (1.10-1.40)"


# -- on real (tiny) models ---------------------------------------------------------------------
def check_counts(report: AcceptanceReport) -> None:
    """The report's groups against a recount of the samples' steps, and these against the answers'
    lengths."""
    k = report.max_draft_len
    for sample in report.samples:
        kv_len = sample.num_prompt_tokens
        for step in sample.steps:  # the first one reads the token of the prefill
            assert step.kv_len == kv_len and 0 <= step.accepted <= step.proposed <= k
            kv_len += step.accepted + 1
        surplus = kv_len + 1 - sample.num_prompt_tokens - sample.num_output_tokens
        assert 0 <= surplus <= k, "only the last step may be cut"
    for group in report.overall:
        check_group(group, [s for s in report.samples if s.context is None], k)
    for group in report.by_category:
        own = [s for s in report.samples if s.category == group.name and s.context is None]
        check_group(group, own, k)
    total = 0
    for group in report.by_context:
        low, high = next(b for b in BUCKETS if bucket_name(b) == group.name)
        clusters = [
            (s.prompt_id, [step for step in s.steps if low <= step.kv_len < high])
            for s in report.samples
            if s.temperature == group.temperature
        ]
        expected = brute_force(clusters, k)
        assert {name: getattr(group.acceptance, name) for name in expected} == expected
        total += group.acceptance.num_steps
    assert total == sum(len(s.steps) for s in report.samples)


BUCKETS = [(0, 256), *((256 << i, 512 << i) for i in range(8))]


def check_group(group: Any, samples: Sequence[Any], k: int) -> None:
    clusters = [(s.prompt_id, s.steps) for s in samples if s.temperature == group.temperature]
    expected = brute_force(clusters, k)
    assert {name: getattr(group.acceptance, name) for name in expected} == expected


@pytest.mark.parametrize("drafter", ["draft_target", "eagle3"])
def test_a_perfect_drafter(folder: Path, target: Path, constant: Path, drafter: str) -> None:
    """Every draft accepted: AL = K + 1. The model drafts for itself; or a head with the constant
    target's own lm_head says what that says."""
    if drafter == "draft_target":
        config = DraftTargetDecodingConfig(max_draft_len=K, speculative_model=target)
        llm = build(target, config)
    else:
        llm = build(constant, eagle(eagle3_dir(folder, draft_vocab=None)), max_seq_len=256)
    report = measure_acceptance(llm, PROMPTS, max_tokens=24, encode=encode)
    found = report.overall[0].acceptance
    assert found.acceptance_length == Estimate(K + 1, K + 1, K + 1)
    assert all(rate == Estimate(1, 1, 1) for rate in (*found.conditional, *found.unconditional))
    assert found.proposed == found.reached == found.accepted == (found.num_steps,) * K
    assert report.warning is None and report.rates_to_advise == [1.0] * K
    assert [g.name for g in report.by_category] == ["a", "b"]
    assert not llm.executor.record_steps
    check_counts(report)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", thinned([True, False], 2))
def test_a_random_head(folder: Path, target: Path, overlap: bool) -> None:
    llm = build(target, eagle(eagle3_dir(folder)), disable_overlap_scheduler=not overlap)
    report = measure_acceptance(
        llm, PROMPTS, temperatures=[0, 0.7, 1.0], contexts=[60], max_tokens=20, encode=encode
    )
    assert report.temperatures == (0, 0.7, 1.0)
    assert len(report.samples) == 3 * 2 * len(PROMPTS)
    for group in report.overall:
        value = group.acceptance.acceptance_length.value
        assert value is not None and 1.0 <= value < 1.25
    check_counts(report)
    stats = llm.stats()
    assert stats.num_steps == sum(len(s.steps) for s in report.samples)
    accepted = sum(step.accepted for s in report.samples for step in s.steps)
    assert stats.acceptance_length == pytest.approx(1 + accepted / stats.num_steps)


def test_drafts_are_counted_as_they_were_proposed(target: Path) -> None:
    """A drafter with something to say now and then: `proposed` is what it said."""
    said: dict[int, list[int]] = {}

    class Drafter:
        def draft(self, request_id: int, token_ids: Sequence[int], most: int) -> list[int]:
            count = (len(token_ids) * 7 + request_id) % (most + 1)
            said.setdefault(request_id, []).append(count)
            return [5] * count

    llm = build(target, UserProvidedDecodingConfig(max_draft_len=K, drafter=Drafter()))
    report = measure_acceptance(llm, PROMPTS, max_tokens=15, encode=encode)
    assert report.warning is None
    for number, sample in enumerate(report.samples):
        assert [step.proposed for step in sample.steps] == said[number][: len(sample.steps)]
    check_counts(report)


def test_n_grams_propose_what_they_find(target: Path) -> None:
    llm = build(target, NGramDecodingConfig(max_draft_len=K, min_matching_ngram_size=1))
    report = measure_acceptance(llm, PROMPTS, max_tokens=30, encode=encode)
    steps = [step for s in report.samples for step in s.steps]
    assert 0 in {step.proposed for step in steps} and K in {step.proposed for step in steps}
    assert report.warning is None
    check_counts(report)
    # Most steps propose nothing, which the advice must not forget.
    found = report.overall[0].acceptance
    advice = advise({0: 1.0, K: 1.5}, report.rates_to_advise)
    assert found.reached[0] < found.num_steps
    assert advice.rows[K].expected_tokens == pytest.approx(found.acceptance_length.value)


@pytest.mark.slow
def test_sampled_answers_repeat(folder: Path, target: Path) -> None:
    llm = build(target, eagle(eagle3_dir(folder)))
    options: dict[str, Any] = {"temperatures": [1.0], "max_tokens": 12, "encode": encode}
    first, again = (measure_acceptance(llm, PROMPTS, **options) for _ in range(2))
    assert first.samples == again.samples
    assert measure_acceptance(llm, PROMPTS, seed=5, **options).samples != first.samples


def test_a_measurement_after_one_that_was_interrupted(folder: Path, target: Path) -> None:
    llm = build(target, eagle(eagle3_dir(folder)))
    options: dict[str, Any] = {"max_tokens": 12, "encode": encode}
    whole = collect_samples(llm, PROMPTS, **options)

    def interrupt(text: str, done: float, of: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_samples(llm, PROMPTS, progress=interrupt, **options)
    assert collect_samples(llm, PROMPTS, **options) == whole


def test_an_interrupted_measurement_reports_what_has_ended(folder: Path, target: Path) -> None:
    """At two temperatures, the second of which no answer has."""
    llm = build(target, eagle(eagle3_dir(folder)), max_batch_size=1)
    options: dict[str, Any] = {"max_tokens": 12, "encode": encode, "temperatures": (0.0, 1.0)}
    whole = measure_acceptance(llm, PROMPTS, **options)

    def interrupt(text: str, done: float, of: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedReport) as interrupted:
        measure_acceptance(llm, PROMPTS, progress=interrupt, **options)
    report = interrupted.value.report
    assert report.samples == whole.samples[:2] and report.overall[0].acceptance.num_prompts == 2
    assert report.warning is not None
    assert report.warning.startswith(f"interrupted: 2 of {2 * len(PROMPTS)} answers had ended")
    assert report.overall[1].acceptance.acceptance_length.value is None
    json.dumps(report.to_json())

    def at_once(text: str, done: float, of: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as interrupted_early:
        measure_acceptance(llm, PROMPTS, progress=at_once, **options)
    assert not interrupted_early.value.samples
    assert measure_acceptance(llm, PROMPTS, **options).samples == whole.samples


def test_a_measurement_that_others_step(folder: Path, target: Path) -> None:
    """They get its finished requests."""
    llm = build(target, eagle(eagle3_dir(folder)))
    options: dict[str, Any] = {"max_tokens": 12, "encode": encode}
    whole = collect_samples(llm, PROMPTS, **options)
    step = llm.executor.step
    assert whole == collect_samples(llm, PROMPTS, progress=lambda *told: step(), **options)

    def cancel(*told: object) -> None:
        llm.executor.cancel(next(iter(llm.executor.book.live), -1))

    with pytest.raises(RequestError, match="cancelled"):
        collect_samples(llm, PROMPTS, progress=cancel, **options)


def test_recording_is_off_unless_asked(folder: Path, target: Path) -> None:
    llm = build(target, eagle(eagle3_dir(folder)))
    request = llm.executor.enqueue([5, 6, 7])
    llm.executor.run_until_done()
    assert request.steps is None and request.num_steps > 0


def test_a_dead_head_is_told_of(folder: Path, constant: Path) -> None:
    llm = build(constant, eagle(eagle3_dir(folder, seed=3)), max_seq_len=256)
    report = measure_acceptance(llm, PROMPTS, max_tokens=24, encode=encode)
    assert report.warning is not None
    assert "looks dead" in report.warning and "trtspec doctor --target" in report.warning


def test_a_hot_target_does_not_make_a_head_dead() -> None:
    def group(temperature: float, accepted: int) -> Group:
        counts = (200,), (200,), (accepted,)
        return Group(
            "all", temperature, Acceptance(8, 200, 200, *counts, Estimate(1, 1, 1), (), ())
        )

    assert dead([group(5.0, 0)]) is None and dead([group(1.0, 4), group(5.0, 0)]) is None
    said = dead([group(5.0, 0), group(0.5, 3)])
    assert said is not None and "of 200 first drafts 3 were accepted (1.5%)" in said
    assert dead([group(0.5, 50)], trained=0.7) is None
    said = dead([group(0.5, 40)], trained=0.7)
    assert said is not None and "at the end of the head's training it was 70%" in said


def test_steps_without_a_draft_are_told_of(folder: Path, constant: Path) -> None:
    config = replace(eagle(eagle3_dir(folder, draft_vocab=None)), max_concurrency=1)
    llm = build(constant, config, max_seq_len=256)
    report = measure_acceptance(llm, PROMPTS, max_tokens=24, encode=encode)
    found = report.overall[0].acceptance
    assert report.warning is not None and "no draft was verified" in report.warning
    assert f"in {found.num_steps - found.proposed[0]} of {found.num_steps} steps" in report.warning


def test_a_head_that_fades_behind_long_texts_is_told_of() -> None:
    def group(
        name: str, value: float, high: float, temperature: float = 0.0, prompts: int = 120
    ) -> Group:
        length = Estimate(value, value - 0.1, high)
        return Group(name, temperature, Acceptance(prompts, 1, 1, (), (), (), length, (), ()))

    short, middle = group("0-256", 2.3, 2.4), group("256-512", 2.5, 2.6)
    said = fading([short, middle, group("4k-8k", 1.97, 2.2)], 0.0)
    assert (
        said is not None and "from 2.50 tokens per step in contexts of 256-512 to 1.97 in" in said
    )
    assert "--draft-window" in said
    assert fading([short, middle, group("4k-8k", 1.97, 2.26)], 0.0) is None, "it may be chance"
    few = group("4k-8k", 1.0, 1.1, prompts=59)
    assert fading([short, middle, few], 0.0) is None, "other prompts, of another kind"
    assert fading([middle], 0.0) is None and fading([], 0.0) is None
    other = group("4k-8k", 1.0, 1.1, temperature=1.0)
    assert fading([short, other, middle], 0.0) is None, "of another temperature"


def test_contexts_bring_the_steps_there(folder: Path, constant: Path) -> None:
    llm = build(constant, eagle(eagle3_dir(folder, draft_vocab=None)), max_seq_len=1400)
    report = measure_acceptance(llm, PROMPTS[:3], contexts=[256, 1024], max_tokens=8, encode=encode)
    assert [group.name for group in report.by_context] == ["0-256", "256-512", "1k-2k"]
    assert all(g.acceptance.num_prompts == 3 for g in report.by_context)
    for sample in report.samples:
        if sample.context is not None:
            assert 0 <= sample.num_prompt_tokens - sample.context < 30  # a turn
    check_counts(report)


def test_padding() -> None:
    """Just long enough, after the system message, the prompt itself untouched."""
    system = {"role": "system", "content": "be brief"}
    given = AcceptancePrompt("s", "a", (system, *PROMPTS[2].messages))
    others = [prompt(50 + i, words=70) for i in range(3)]
    seen: list[list[dict[str, str]]] = []

    def keep(messages: list[dict[str, str]]) -> list[int]:
        seen.append(messages)
        return encode(messages)

    texts = padding_texts([given, *others], given, start=1)
    assert given.messages[-1]["content"] not in texts and len(texts) == 3
    for length in (1, 30, 77, 200, 500):
        ids = pad_prompt(given, texts, length, keep)
        own = len(encode(list(given.messages)))
        messages = next(m for m in reversed(seen) if encode(m) == ids)
        assert messages[0] == system and messages[-1] == given.messages[-1]
        roles = [m["role"] for m in messages[1:]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        if length <= own:
            assert len(ids) == own
        else:
            shortest = 2 + len(texts)  # a turn cannot be shorter than what is said around it
            assert length <= len(ids) <= length + 26 + shortest
    with pytest.raises(ConfigError, match="at least two"):
        padding_texts([given], given)


def test_what_cannot_be_measured(folder: Path, target: Path) -> None:
    llm = build(target, eagle(eagle3_dir(folder)))
    for options, word in (
        ({"contexts": [250]}, "max_seq_len=256"),
        ({"contexts": [0]}, "at least 1"),
        ({"temperatures": [-1.0]}, "temperature"),
        ({"temperatures": []}, "at least one prompt"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            measure_acceptance(llm, PROMPTS, encode=encode, **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"prompt 'p9'.*300 tokens"):
        measure_acceptance(llm, [prompt(9, words=299)], encode=encode)
    assert not llm.executor.has_work and not llm.executor.record_steps
    plain = LLM(target, device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="NONE drafts nothing"):
        measure_acceptance(plain, PROMPTS, encode=encode)


# -- advice ------------------------------------------------------------------------------------
def simulated(conditional: Sequence[float], draft_len: int, resolution: int) -> float:
    """Expected tokens by going through every outcome of every draft, `resolution` a draft."""
    total = 0.0
    outcomes = resolution**draft_len
    for number in range(outcomes):
        tokens, rest = 1, number
        for rate in conditional[:draft_len]:
            rest, drawn = divmod(rest, resolution)
            if drawn >= rate * resolution:
                break
            tokens += 1
        total += tokens
    return total / outcomes


@pytest.mark.parametrize("seed", range(12))
def test_advice_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    k, batch = rng.randint(1, 4), rng.choice([1, 8])
    conditional = [rng.randint(0, 8) / 8 for _ in range(k)]
    step_ms = {n: rng.uniform(1, 5) for n in range(k + 1) if n == k or rng.random() < 0.8}
    advice = advise(step_ms, conditional, batch)
    assert [row.draft_len for row in advice.rows] == list(range(k + 1))
    speeds = {}
    for row in advice.rows:
        expected = simulated(conditional, row.draft_len, 8)
        assert row.expected_tokens == pytest.approx(expected)
        if row.draft_len in step_ms:
            speeds[row.draft_len] = batch * expected / (step_ms[row.draft_len] / 1000)
            assert row.tokens_per_second == pytest.approx(speeds[row.draft_len])
            plain = batch * 1000 / step_ms[0] if 0 in step_ms else None
            speedup = None if plain is None else speeds[row.draft_len] / plain
            assert row.speedup == (None if speedup is None else pytest.approx(speedup))
        else:
            assert row.step_ms is row.tokens_per_second is row.speedup is None
    assert speeds[advice.best_draft_len] == pytest.approx(max(speeds.values()))
    assert advice.best is advice.rows[advice.best_draft_len]
    assert json.loads(json.dumps(advice.to_json()))["batch_size"] == batch


def test_advice_of_the_extremes() -> None:
    dead = advise({0: 1.0, 1: 1.1, 4: 1.4}, [0.0, None, None, None])
    assert dead.best_draft_len == 0 and dead.rows[4].expected_tokens == 1.0
    perfect = advise({0: 1.0, 1: 1.1, 4: 1.4}, [1.0] * 4)
    assert perfect.best_draft_len == 4 and perfect.rows[4].expected_tokens == 5.0
    assert perfect.best.speedup == pytest.approx(5 / 1.4)
    assert advise({1: 2.0, 2: 2.0}, [0.5, 0.0]).best_draft_len == 1  # a tie: the shorter


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (({}, [0.5]), "empty"),
        (({2: 1.0}, [0.5]), "draft length 2"),
        (({-1: 1.0}, [0.5]), "draft length -1"),
        (({1: 0.0}, [0.5]), "above 0"),
        (({1: float("nan")}, [0.5]), "above 0"),
        (({1: 1.0}, [1.5]), "not in 0"),
        (({1: 1.0}, [float("nan")]), "not in 0"),
        (({1: 1.0}, [0.5], 0), "batch_size=0"),
        (({0: 1.0, 1: 1.2}, [None]), "No step was measured"),
    ],
)
def test_advice_refuses(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        advise(*arguments)


def test_step_times(folder: Path, constant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only steps move: half a millisecond of the plain engine, else one, and one
    more for each draft."""
    llm = build(constant, eagle(eagle3_dir(folder, draft_vocab=None)), max_seq_len=400)
    plain = LLM(constant, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=400)
    seen: list[tuple[int, int]] = []
    heats: set[float] = set()
    now = [0.0]
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for executor in (plain.executor, llm.executor):

        def spy(executor: Any = executor, step: Any = executor.step) -> Any:
            seen.append((executor.runtime_draft_len, len(executor.scheduler.running)))
            heats.update(r.sampling_params.temperature for r in executor.scheduler.running)
            is_plain = executor is plain.executor
            now[0] += 0.0005 if is_plain else 0.001 * (1 + executor.runtime_draft_len)
            return step()

        executor.step = spy  # type: ignore[method-assign]
    times = measure_step_ms(
        plain, llm, range(K + 1), [[5, 6, 7], [8, 9]], batch_size=3, steps=4, repeat=2,
        temperature=0.75,
    )  # fmt: skip
    assert heats == {0.75}
    assert times == pytest.approx({0: 0.5, 1: 2.0, 2: 3.0, 3: 4.0})
    for k in (1, 2, 3):
        assert seen.count((k, 3)) >= 4 * 3  # a turn to warm up, and two
    assert llm.executor.runtime_draft_len == K and not llm.executor.has_work
    assert step_times.step_seconds_without_drafts(llm) == pytest.approx(0.001)
    for draft_lens, batch_size, steps, word in (
        ([4], 1, 4, "0 … 3"), ([1], 4, 4, "do not fit"), ([1], 1, 400, "do not fit"),
        ([], 1, 4, "at least 1"), ([1], 0, 4, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            measure_step_ms(plain, llm, draft_lens, [[5]], batch_size=batch_size, steps=steps)


# -- the page ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def report(folder: Path, target: Path) -> AcceptanceReport:
    llm = build(target, NGramDecodingConfig(max_draft_len=2, min_matching_ngram_size=1))
    found = measure_acceptance(
        llm, PROMPTS, temperatures=[0, 1], max_tokens=20, contexts=[64], encode=encode
    )
    advice = advise({0: 1.0, 1: 1.25, 2: 1.5}, found.rates_to_advise)
    return AcceptanceReport(**{**vars(found), "advice": advice, "warning": "<dead> & gone"})


def check_page(page: str, titles: Sequence[str]) -> list[str]:
    """The page needs nothing from elsewhere; returns its images."""
    for word in ("http://", "https://", 'src="//', "url(", "@import", "<script", "<link"):
        assert word not in page
    images = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', page)
    assert [alt for alt, _ in images] == list(titles)
    return [base64.b64decode(data).decode() for _, data in images]


@pytest.mark.slow
def test_the_page_is_whole_without_matplotlib_too(report: AcceptanceReport) -> None:
    page = render_html(report, "Title & more", {"One <plot>": "<svg>é</svg>"})
    assert check_page(page, ["One &lt;plot&gt;"]) == ["<svg>é</svg>"]
    assert "<h1>Title &amp; more</h1>" in page
    assert "Warning: &lt;dead&gt; &amp; gone" in page
    for word in ("K = 2", "plain", "0-256", "draft 1", "bootstrap over prompts"):
        assert word in page
    assert page.count("<tr class=best>") == 1


class FakeFigure:
    """Takes what matplotlib's Figure would be told, and draws nothing."""

    drawn: ClassVar[list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = []

    def __init__(self, **_: Any):
        pass

    def add_subplot(self) -> FakeFigure:
        return self

    def savefig(self, buffer: Any, format: str, metadata: Any) -> None:
        buffer.write(f'<!DOCTYPE {format} "http://…">\n<svg></svg>\n')

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.drawn.append((name, args, options))


def test_what_the_plots_are_told(report: AcceptanceReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.report.plots.require_matplotlib", lambda: FakeFigure)
    FakeFigure.drawn.clear()
    plots = draw_plots(report)
    assert len(plots) == 5 and set(plots.values()) == {"<svg></svg>\n"}
    curves = [entry for entry in FakeFigure.drawn if entry[0] == "errorbar"]
    assert len(curves) == 2 * 2 + 1
    first = report.overall[0].acceptance
    _, (numbers, values), options = curves[0]
    assert list(numbers) == [1, 2]
    assert values == [rate.value for rate in first.conditional]
    below, above = options["yerr"]
    for value, low, high, rate in zip(values, below, above, first.conditional, strict=True):
        assert value - low == pytest.approx(rate.low) and value + high == pytest.approx(rate.high)
    bars = [entry for entry in FakeFigure.drawn if entry[0] == "barh"]
    assert [entry[1][1] for entry in bars[:2]] == [
        [g.acceptance.acceptance_length.value for g in report.by_category if g.temperature == t]
        for t in report.temperatures
    ]
    lengths, speeds = next(entry[1][:2] for entry in FakeFigure.drawn if entry[0] == "plot")
    assert lengths == [0, 1, 2] and report.advice is not None
    assert speeds == [row.tokens_per_second for row in report.advice.rows]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib (the extra `report`) is not installed")
def test_the_plots(report: AcceptanceReport) -> None:
    plots = draw_plots(report)
    assert len(plots) == 5
    for svg in check_page(render_html(report, "t", plots), list(plots)):
        assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
        hrefs = re.findall(r'href="([^"]*)"', svg)
        assert all(href.startswith("#") for href in hrefs), "links within the image alone"
    alone = AcceptanceReport(**{**vars(report), "advice": None, "overall": report.overall[:1]})
    assert len(draw_plots(alone)) == 3


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_without_matplotlib_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trtspec\[report\]"):
        require_matplotlib()


def test_json_has_everything(report: AcceptanceReport) -> None:
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert {
        "mode", "max_draft_len", "device", "dtype", "max_batch_size", "num_prompts", "temperatures",
        "contexts", "max_tokens", "seed", "forced_acceptance", "interval", "warning", "overall",
        "by_category", "by_context", "advice", "samples",
    } == set(found)  # fmt: skip
    assert len(found["samples"]) == 2 * 2 * len(PROMPTS)
    steps = [
        StepRecord(*step)
        for sample in found["samples"]
        if sample["temperature"] == 1 and sample["context"] is None
        for step in sample["steps"]
    ]
    (overall,) = [group for group in found["overall"] if group["temperature"] == 1]
    for name, value in brute_force([("x", steps)], 2).items():
        if name != "num_prompts":
            assert overall[name] == (list(value) if isinstance(value, tuple) else value)
    assert set(overall["acceptance_length"]) == {"value", "low", "high"}


# -- the command -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def spelling_target(folder: Path) -> Path:
    """A constant target with a tokenizer: a token a character, and a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    path = constant_target_dir(folder, seed=5, max_position_embeddings=4096)
    vocab = {"<unk>": 0} | {chr(31 + i): i for i in range(1, 96)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    fast.save_pretrained(path)
    return path


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], spelling_target: Path, folder: Path, tmp_path: Path
) -> Any:
    head = eagle3_dir(folder, draft_vocab=None, config={
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    })  # fmt: skip
    lines = [
        {"id": p.id, "category": p.category, "messages": list(p.messages)} for p in PROMPTS[:4]
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))

    def call(*arguments: object, prompts: Path | None = file, mode: str = "eagle3") -> Any:
        given = ["--model", spelling_target, "--speculative", mode, "--max-tokens", 12]
        given += ["--head", head, "--max-draft-len", 2] if mode == "eagle3" else []
        given += ["--prompts", prompts] if prompts is not None else []
        capsys.readouterr()
        code = cli.main(["acceptance", *map(str, [*given, *arguments])])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.slow
def test_the_command(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, out, err = run(
        "--temperatures", "0,1", "--contexts", "300", "--advise", "--max-batch-size", 2,
        "--json-file", file,
    )  # fmt: skip
    assert code == 0, err
    text = " ".join(out.split())
    for word in ("3.00 (3.00-3.00)", "100.0 % (100.0-100.0)", "256-512", "tok/s", "95%"):
        assert word in text
    assert "Use --max-draft-len" in text or "Plain decoding is the fastest" in text
    assert "WARNING" not in text
    found = json.loads(file.read_text())
    assert found["mode"] == "eagle3_one_model" and found["overall"][0]["conditional"][1] == {
        "value": 1.0, "low": 1.0, "high": 1.0
    }  # fmt: skip
    assert [row["draft_len"] for row in found["advice"]["rows"]] == [0, 1, 2]
    assert found["head"] is not None and found["advice"]["batch_size"] == 2


@pytest.mark.parametrize("joined", [False, True])
def test_json_with_a_file_is_the_old_spelling(run: Any, tmp_path: Path, joined: bool) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    few = ("--categories", "b", "--per-category", "1")
    code, out, err = run(*few, "--json-file", new, mode="ngram")
    assert code == 0 and f"written: {new}" in " ".join(out.split()) and "note:" not in err
    spelled = [f"--json={old}"] if joined else ["--json", old]
    code, out, err = run(*few, *spelled, mode="ngram")
    assert code == 0 and "tokens per step" in out
    assert "note: acceptance --json FILE is deprecated: write --json-file FILE." in err
    assert json.loads(old.read_text()).keys() == json.loads(new.read_text()).keys()


def test_json_alone_prints_the_object_and_nothing_else(run: Any) -> None:
    code, out, err = run("--json", "--categories", "b", "--per-category", "1", mode="ngram")
    assert code == 0 and out.count("\n") == 1, err
    assert json.loads(out)["mode"] == "ngram" and "note:" not in err


def test_a_category_called_all_has_a_row(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    lines = [{"id": name, "category": name, "messages": messages} for name in ("all", "b")]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run(prompts=file, mode="ngram")
    assert code == 0, err
    rows = [re.findall(r"\w+", line) for line in out.splitlines() if re.match(r"\W+all\b", line)]
    assert [row[-2] for row in rows] == ["1", "2"]  # prompts


def test_the_command_that_is_interrupted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as an interrupted one, after it has shown and written what there is."""
    told = status.Progress.__call__

    def interrupt(progress: Any, text: str, *counts: float) -> None:
        if "decoding" in text and counts[0] == 2:
            raise KeyboardInterrupt
        told(progress, text, *counts)

    monkeypatch.setattr(status.Progress, "__call__", interrupt)
    file = tmp_path / "report.json"
    arguments = "--temperatures", "0,1", "--max-batch-size", 1, "--json-file", file
    code, out, err = run(*arguments, mode="ngram")
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert "interrupted: 2 of 8 answers had ended" in " ".join(out.split())
    found = json.loads(file.read_text())
    assert len(found["samples"]) == 2 and found["warning"].startswith("interrupted")


def test_the_command_without_extras(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("--categories", "b", "--per-category", "1", mode="ngram")
    assert code == 0 and "1 prompts" in out and "draft length" not in out
    page = tmp_path / "page.html"
    code, _, err = run("--html", page)
    if HAS_MATPLOTLIB:
        assert code == 0 and "data:image/svg+xml" in page.read_text()
    else:
        assert code == 2 and "trtspec[report]" in err and not page.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--categories", "poetry"], "'poetry'. Allowed: a, b"),
        (["--categories", ","], "--categories ',' names none"),
        (["--html", "one", "--json-file", "one"], "--html and --json-file are both one: name two"),
        (["--temperatures", "warm"], "'warm' is not allowed"),
        (["--temperatures", "0,,1"], "'' is not allowed"),
        (["--temperatures", "-1"], "'-1' is not allowed"),
        (["--temperatures", "nan"], "'nan' is not allowed"),
        (["--contexts", "1.5"], "whole numbers"),
        (["--contexts", "4090"], "max_seq_len=4096"),
        (["--per-category", "0"], "--per-category"),
        (["--json-file", "nowhere/x.json"], "is not there"),
        (["--html", "."], "is a directory"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--advise", "--max-draft-len", "auto"], "with --max-draft-len auto steps verify fewer"),
        (["--advise", "--draft-len-schedule", "2:1"], "with --draft-len-schedule"),
        (["--advise", "--max-verified-drafts", "1"], "with --max-verified-drafts"),
    ],
)
def test_bad_usage_is_one_line(run: Any, arguments: list[str], expected: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert expected in line and "Traceback" not in err


def test_bad_files_and_modes(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    for path, word in ((tmp_path / "bad.jsonl", "bad.jsonl:1: got"), (tmp_path / "no", "be read")):
        code, _, err = run(prompts=path)
        assert code == 2 and word in err
    code, _, err = run(mode="none")
    assert code == 2 and "drafts nothing to measure" in err


ODD_NAMES = ["$\\frac{$", "a\x00\x1b[31mb\nc", "\ud800 half", "[b]x[/i] $x^2$", "long " * 40]


def odd_prompts(tmp_path: Path) -> Path:
    lines = [
        {"id": f"$ {i}", "category": name, "messages": [{"role": "user", "content": "hello"}]}
        for i, name in enumerate(ODD_NAMES)
    ]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib (the extra `report`) is not installed")
def test_names_are_drawn_as_they_are(run: Any, tmp_path: Path) -> None:
    page, file = tmp_path / "page.html", tmp_path / "report.json"
    given = odd_prompts(tmp_path)
    code, _, err = run("--html", page, "--json-file", file, prompts=given, mode="ngram")
    assert code == 0, err
    assert [g["name"] for g in json.loads(file.read_text())["by_category"]] == ODD_NAMES
    images = re.findall(r"base64,([^\"]+)", page.read_text(encoding="utf-8"))
    drawn = [base64.b64decode(data).decode() for data in images]
    for image in drawn:
        ElementTree.fromstring(image)  # XML that a browser can read
    for name in ("$\\frac{$", "a\ufffd\ufffd[31mb\ufffdc", "\ufffd half", "[b]x[/i] $x^2$"):
        assert f"<!-- {name} -->" in drawn[1]
    assert max(map(len, re.findall(r"<!-- (.*) -->", drawn[1]))) <= 50


@pytest.mark.slow
def test_what_was_measured_is_kept_where_there_is_no_advice(run: Any, tmp_path: Path) -> None:
    file, few = tmp_path / "report.json", ("--categories", "b", "--per-category", "1")
    given = (*few, "--advise", "--max-batch-size", 1000, "--json-file", file)
    code, out, err = run(*given, mode="ngram")
    assert code == 2 and "1000 prompts" in err and "do not fit the engine" in err
    assert "tokens per step" in out and json.loads(file.read_text())["advice"] is None


def test_what_was_measured_is_kept_where_steps_cannot_be_timed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr("trtspec.report.measure_step_ms", out_of_memory)
    file = tmp_path / "report.json"
    given = ("--categories", "b", "--per-category", "1", "--advise", "--json-file", file)
    with pytest.raises(MemoryError):
        run(*given, mode="ngram")
    assert json.loads(file.read_text())["overall"][0]["num_steps"] > 0


@pytest.mark.parametrize("broken", ["_print_report", "render_html"])
def test_what_was_measured_is_kept_before_it_is_shown(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    home = "trtspec.cli.acceptance" if broken == "_print_report" else "trtspec.report.html"
    monkeypatch.setattr(f"{home}.{broken}", lambda *_: {}["broken"])
    monkeypatch.setattr("trtspec.report.plots.require_matplotlib", lambda: FakeFigure)
    file = tmp_path / "report.json"
    with pytest.raises(KeyError):
        run("--json-file", file, "--html", tmp_path / "page.html", mode="ngram")
    assert json.loads(file.read_text())["num_prompts"] == 4


def test_a_template_that_leaves_turns_out_makes_no_contexts() -> None:
    given, others = PROMPTS[0], [prompt(50 + i, words=70) for i in range(3)]
    calls = 0

    def last_only(messages: list[dict[str, str]]) -> list[int]:
        nonlocal calls
        calls += 1
        assert calls < 100, "it never ends"
        return encode(messages[-1:])

    with pytest.raises(ConfigError, match="leaves earlier turns out"):
        pad_prompt(given, padding_texts([given, *others], given), 200, last_only)
