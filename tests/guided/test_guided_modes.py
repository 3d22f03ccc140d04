"""Grammars with every drafter: the tokens are those of guided greedy decoding by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guided import LANGUAGES, VOCAB, GuidedOracle, Language, save_tokenizer, token_texts
from halves import launch_in_halves
from matrix import MODES, NETWORKS, Drafters, config_of, cpu_engine, make_drafters, spread
from oracle import Oracle
from tiny_dflash import dflash_dir
from tiny_heads import mtp_model_dir

from trtspec import GuidedDecodingParams, SAEnhancerConfig, SamplingParams
from trtspec.acceptance.guided import hand_over_drafts, mask_drafts
from trtspec.metadata.guided import ChosenPoint, DraftPoint, GuidedStep, HandedOver, Point

K, COUNT = 3, 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = mtp_model_dir(tmp_path_factory.mktemp("models"), seed=1, num_mtp_layers=K)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def drafters(target: Path) -> Drafters:
    return make_drafters(target.parent, Oracle(target))


@pytest.fixture(scope="module")
def oracle(target: Path) -> GuidedOracle:
    return GuidedOracle(target)


def test_what_is_masked_and_handed_over_at_each_depth() -> None:
    """Two drafts of three are masked: the host wants the first. One row may have no token."""
    masks = torch.tensor([[0b0110], [0]], dtype=torch.int32)
    host = HandedOver(torch.zeros(2, 4), torch.zeros(2), torch.full((2,), -1), masks)
    points: list[Point] = []
    step = GuidedStep(torch.empty(0, 1), masks, host, 2, points.append)
    logits, never = torch.ones(2, 4), float("-inf")
    for depth in range(3):
        masked = mask_drafts(step, logits, None, depth)
        assert masked.tolist() == [[never, 1, 1, never] if depth < 2 else [1] * 4, [1] * 4]
        hand_over_drafts(step, torch.tensor([depth, 7]), depth, has_pass=True)
        assert host.drafts.tolist() == [0, 7]
    assert points == [DraftPoint(0), ChosenPoint(), DraftPoint(1)]


Case = tuple[list[int], Language | None, tuple[int, ...]]


@pytest.fixture(scope="module")
def cases(oracle: GuidedOracle) -> list[Case]:
    """Prompts, with a grammar or without; some grammars begin after a token of the output."""
    rng = random.Random(4)
    cases: list[Case] = []
    for i in range(8):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 30))]
        if i % 4 == 3:
            cases.append((prompt, None, ()))
            continue
        marker: tuple[int, ...] = ()
        if i % 4 == 2:  # two tokens in a row that free decoding comes to
            start = rng.randint(2, 6)
            free = oracle.extend(prompt, start + 2, LANGUAGES[0], marker=(-1,))
            marker = tuple(free[start : start + 2])
        cases.append((prompt, LANGUAGES[i % len(LANGUAGES)], marker))
    return cases


@pytest.fixture(scope="module")
def expected(oracle: GuidedOracle, cases: list[Case]) -> list[list[int]]:
    return [oracle.extend(prompt, COUNT, language, marker) for prompt, language, marker in cases]


def params_of(language: Language | None, marker: tuple[int, ...], **others: Any) -> SamplingParams:
    guided = None
    if language is not None:
        fields = {name: getattr(language.params, name) for name in ("regex", "grammar", "choice")}
        if language.params.json is not None:
            fields["json"] = language.params.json
        guided = GuidedDecodingParams(**fields, reasoning_end=marker or None)
    return SamplingParams(max_tokens=COUNT, guided_decoding=guided, **others)


@pytest.fixture
def outputs_of(target: Path, cases: list[Case]) -> Iterator[Any]:
    def run(config: Any, pool: int | None, **options: Any) -> list[list[int]]:
        with cpu_engine(target, config, pool=pool, **options) as llm:
            outputs = llm.generate(
                [prompt for prompt, _, _ in cases],
                [params_of(language, marker) for _, language, marker in cases],
            )
            assert not [output.error for output in outputs if output.error]
            assert pool is None or llm.stats().num_preemptions > 0
            return [output.outputs[0].token_ids for output in outputs]

    yield run


@pytest.mark.slow
@spread(
    mode=MODES,
    **{
        "chunk,pool": [(17, 96), (17, None), (None, None)],
        "overlap,rule": [
            (True, "strict"), (False, "rejection"), (True, "rejection"), (False, "strict"),
        ],
    },
)  # fmt: skip
def test_tokens_are_those_of_brute_force(
    drafters: Drafters,
    outputs_of: Any,
    expected: list[list[int]],
    mode: str,
    chunk: int | None,
    pool: int | None,
    overlap: bool,
    rule: str,
) -> None:
    """Greedy requests; prompts whole and in chunks, preempted, steps that overlap or not."""
    fields = {} if mode in ("none", "ngram", "user_provided") else {"acceptance": rule}
    config = config_of(mode, K, drafters, **fields)
    assert outputs_of(config, chunk=chunk, pool=pool, overlap=overlap) == expected


@pytest.mark.slow
@spread(mode=NETWORKS, **{"chunk,pool,overlap": [(17, 96, True), (None, None, False)]})
def test_launches_in_halves(
    drafters: Drafters,
    outputs_of: Any,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    chunk: int | None,
    pool: int | None,
    overlap: bool,
) -> None:
    """The second half comes in the next call, after prompts were scheduled and steps were read."""
    launch_in_halves(monkeypatch)
    config = config_of(mode, K, drafters)
    assert outputs_of(config, chunk=chunk, pool=pool, overlap=overlap) == expected


@pytest.mark.slow
def test_between_the_halves_of_a_launch(
    target: Path,
    drafters: Drafters,
    cases: list[Case],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step before is read; requests come, are cancelled and lose their slots; errors end it."""
    launch_in_halves(monkeypatch)
    rng, waits = random.Random(5), 0
    given = [(prompt, params_of(language, marker)) for prompt, language, marker in cases]
    with cpu_engine(target, config_of("eagle3", K, drafters)) as llm:
        executor = llm.executor
        requests: list[Any] = []
        others: list[Any] = []
        for _ in range(150):
            if len(requests) < len(given):
                requests.append(executor.enqueue(*given[len(requests)]))
            if rng.random() < 0.4:
                others.append(executor.enqueue(*rng.choice(given)))
            if others and rng.random() < 0.4:
                executor.cancel(others.pop(rng.randrange(len(others))).request_id)
            if rng.random() < 0.05 and executor._pending:
                with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
                    context.setattr(executor.runner.masks.draft, "wait", _interrupt)
                    while True:
                        executor.step()
            executor.step()
            if executor._pending and executor._pending[-1].launch_rest is not None:
                waits += 1
                assert len(executor._pending) == 1
        executor.run_until_done()
        assert waits > 50
        assert [request.output_token_ids for request in requests] == expected
        executor.kv_cache.check_integrity()


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "overlap"), [("eagle3", True), ("mtp", False), ("pard", True)])
def test_drafts_that_are_looked_up_follow_no_grammar(
    drafters: Drafters, outputs_of: Any, expected: list[list[int]], mode: str, overlap: bool
) -> None:
    """They stand in place of drafts that the host followed. The target's masks reject them."""
    config = config_of(mode, K, drafters, sa_config=SAEnhancerConfig(threshold=1))
    assert outputs_of(config, pool=None, overlap=overlap) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", NETWORKS)
def test_every_draft_follows_the_grammar(
    target: Path, drafters: Drafters, tmp_path: Path, mode: str
) -> None:
    """Texts would be right without, as the target's masks reject the others."""
    if mode == "dflash2":  # fewer candidates than are allowed, and than are not
        few = dflash_dir(tmp_path, path={"selector_top_k": 3})
        drafters = replace(drafters, path_head=few)
    letters = [token_texts().index(letter) for letter in "cdegh"]
    guided = GuidedDecodingParams(regex="[cdegh]{16}")
    params = SamplingParams(max_tokens=10, guided_decoding=guided)
    with cpu_engine(target, config_of(mode, K, drafters), overlap=False) as llm:
        executor = llm.executor
        requests = [executor.enqueue(list(range(5, end)), params) for end in (9, 30)]
        drafts: list[int] = []
        while executor.has_work:
            executor.step()
            slots = [request.slot for request in requests if request.is_generation]
            drafts += executor.state.next_tokens[slots, 1:].flatten().tolist()
    assert len(drafts) > 5 * K and set(drafts) <= {*letters}


def test_the_cases_reach_what_they_are_for(cases: list[Case], expected: list[list[int]]) -> None:
    """Some outputs end by their grammar, some by length; a marker is reached in mid-output."""
    texts = token_texts()
    ends = [output[-1] == 2 for output in expected]
    assert any(ends) and not all(ends)
    for (_, language, marker), output in zip(cases, expected, strict=True):
        if language is None:
            continue
        begin = 0
        if marker:
            spans = [output[i : i + len(marker)] for i in range(len(output))]
            begin = spans.index(list(marker)) + len(marker)
            assert 2 < begin < len(output)
        text = "".join(texts[i] for i in output[begin:] if i != 2)
        assert language.is_prefix(text)
        assert (output[-1] == 2) == language.is_whole(text) or len(output) == COUNT


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "eagle3", "mtp", "dflash"])
def test_prompts_found_in_the_prefix_cache(
    drafters: Drafters,
    target: Path,
    cases: list[Case],
    expected: list[list[int]],
    mode: str,
) -> None:
    """A grammar follows the output alone, however much of the prompt is computed."""
    params = [params_of(language, marker) for _, language, marker in cases]
    with cpu_engine(target, config_of(mode, K, drafters), page=4) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _, _ in cases], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(output.cached_tokens for output in outputs) > 20
