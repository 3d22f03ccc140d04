"""`SweepRun` with engines of tiny models: what is compared with what, and with whose texts."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matrix import Drafters, config_of, cpu_engine, make_drafters
from oracle import VOCAB
from tiny_heads import mtp_model_dir

from trtspec import LLM, RequestError, SADecodingConfig, SAEnhancerConfig, SamplingParams
from trtspec.data.acceptance_prompts import AcceptancePrompt
from trtspec.report.sweep import Axes, Sweep, SweepRun, Way, draw_sweep, encode_prompts

K, TOKENS = 2, 8
WAYS = [
    Way("plain", "plain"), Way("K=1", "fixed", 1), Way("K=2", "fixed", 2), Way("auto", "auto"),
    Way("sa", "sa"), Way("mtp+sa", "both"),
]  # fmt: skip
KINDS = {
    kind: [AcceptancePrompt(f"{kind}-{i}", kind, ({"role": "user", "content": f"{kind} {i}"},))
           for i in range(2)]
    for kind in ("short", "long")
}  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))


def encoded(messages: list[dict[str, str]]) -> list[int]:
    """The characters of a chat as tokens, with two around each message."""
    text = "".join(f"<{message['content']}>" for message in messages)
    return [ord(character) % VOCAB for character in text]


def run_sweep(
    target_dir: Path, drafters: Drafters, ways: list[Way] = WAYS, **options: Any
) -> tuple[Sweep, list[Any]]:
    opened: list[tuple[int, dict[str, LLM]]] = []
    mtp = config_of("mtp_eagle", K, drafters)
    assert mtp is not None
    configs = {
        "plain": None,
        "fixed": mtp,
        "auto": replace(mtp, draft_len_schedule="auto"),
        "sa": SADecodingConfig(max_draft_len=8, min_token_prob=0.0),
        "both": replace(mtp, sa_config=SAEnhancerConfig(threshold=1)),
    }

    def open_engines(concurrency: int) -> dict[str, LLM]:
        engines = {}
        for name in dict.fromkeys(way.engine for way in ways):
            engines[name] = cpu_engine(
                target_dir,
                configs[name],
                max_batch_size=concurrency,
                max_seq_len=256,
                overlap=False,
            )
        opened.append((concurrency, engines))
        return engines

    given: dict[str, Any] = {"concurrencies": [1, 3], "temperatures": [0.0, 2.0], "kinds": KINDS}
    axes = Axes(**given | options)
    run = SweepRun(
        ways=ways, axes=axes, prompts=encode_prompts(axes, encoded),
        params=SamplingParams(max_tokens=TOKENS, seed=0, ignore_eos=True),
        repeat=2, open_engines=open_engines, progress=lambda *_: None,
    )  # fmt: skip
    return Sweep(ways, list(run.cells())), opened


@pytest.fixture(scope="module")
def whole(
    target_dir: Path, drafters: Drafters, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Sweep, list[Any]]:
    """One sweep that several tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_sweep(target_dir, drafters)


def test_cells_and_columns(whole: tuple[Sweep, list[Any]]) -> None:
    sweep, opened = whole
    assert [concurrency for concurrency, _ in opened] == [1, 3]
    places = [cell.place for cell in sweep.cells]
    assert len(set(places)) == len(places) == 8
    assert {(place.concurrency, place.temperature, place.kind) for place in places} == {
        (n, t, kind) for n in (1, 3) for t in (0.0, 2.0) for kind in KINDS
    }
    for cell in sweep.cells:
        assert cell.num_prompts == max(2, cell.place.concurrency)
        assert {len(runs) for runs in cell.runs.values()} == {2}
        assert cell.acceptance_length("plain") == 1.0
        for runs in cell.runs.values():
            assert all(run.generated_tokens == TOKENS * cell.num_prompts for run in runs)
        for way in WAYS:
            most = {"plain": 0, "K=1": 1, "sa": 8}.get(way.name, K)
            assert 1 <= cell.acceptance_length(way.name) <= 1 + most
        row = sweep.rows()[places.index(cell.place)]
        fixed = {name: row["columns"][name]["tokens_per_second"] for name in ("K=1", "K=2")}
        assert row["best_fixed"] == max(fixed, key=fixed.__getitem__)
        auto = row["columns"]["auto"]["tokens_per_second"]
        assert row["auto_over_best_fixed"] == auto / max(fixed.values())
    lines = list(csv.DictReader(io.StringIO(sweep.to_csv())))
    assert len(lines) == len(places) * len(WAYS)
    assert sum(line["column"] == "mtp+sa" for line in lines) == len(places)


def test_no_run_drafts_from_another_ones_answers(whole: tuple[Sweep, list[Any]]) -> None:
    """Greedy answers are the same in each run: found again, they would be accepted as a whole.
    With three at once the first prompt comes twice, and neither answer is found for the other."""
    greedy = [cell for cell in whole[0].cells if cell.place.temperature == 0]
    assert {cell.place.concurrency for cell in greedy} == {1, 3}
    for cell in greedy:
        first, second = cell.runs["sa"]
        assert first.acceptance_length == second.acceptance_length < 3


class Counted:
    """An engine that answers nothing and counts its calls by temperature."""

    def __init__(self, device: str, chooses_draft_len: bool = False):
        self.chooses_draft_len = chooses_draft_len
        self.device, self.executor = device, SimpleNamespace(runtime_draft_len=K)
        self.calls: list[tuple[float, int]] = []
        self.salted: list[tuple[str, ...]] = []

    def generate(self, prompts: Any, params: Any, *, cache_salt: Any = None) -> list[Any]:
        self.calls.append((params.temperature, len(prompts)))
        self.salted += [
            (salt, *map(str, prompt)) for salt, prompt in zip(cache_salt, prompts, strict=True)
        ]
        return []

    def stats(self) -> None: ...

    def reset_stats(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self) -> None: ...


def test_a_cell_that_fails_leaves_no_engine() -> None:
    class Failing(Counted):
        is_open = True

        def generate(self, *args: Any, **named: Any) -> list[Any]:
            raise RequestError("no")

        def shutdown(self) -> None:
            self.is_open = False

    engines = {name: Failing("cpu") for name in ("plain", "auto")}
    axes = Axes([3], [0.0], {"short": KINDS["short"]})
    run = SweepRun(
        ways=[Way("plain", "plain"), Way("auto", "auto")], axes=axes,
        prompts=encode_prompts(axes, encoded), params=SamplingParams(max_tokens=2), repeat=1,
        open_engines=lambda concurrency: engines, progress=lambda *_: None,
    )  # fmt: skip
    with pytest.raises(RequestError):
        next(run.cells())
    assert not any(engine.is_open for engine in engines.values())


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_does_not_count(device: str) -> None:
    """On CUDA no cell's run captures a graph, greedy or sampled, for a run before it did."""
    engines = {name: Counted(device, name == "auto") for name in ("plain", "auto")}
    axes = Axes([3], [0.0, 1.0], {"short": KINDS["short"]})
    run = SweepRun(
        ways=[Way("plain", "plain"), Way("auto", "auto")], axes=axes,
        prompts=encode_prompts(axes, encoded), params=SamplingParams(max_tokens=2), repeat=1,
        open_engines=lambda concurrency: engines, progress=lambda *_: None,
    )  # fmt: skip
    assert len(list(run.cells())) == 2
    salted = engines["auto"].salted  # a prompt that comes again has another salt each time
    assert len({one[1:] for one in salted}) == 2
    assert len(set(salted)) == len(salted) == 3 * len(engines["auto"].calls)
    assert engines["auto"].calls == [(0.0, 3)] * 2 + [(1.0, 3)] * 2
    if device == "cpu":
        assert engines["plain"].calls == [(0.0, 1), (0.0, 3), (1.0, 3)]
    else:
        assert engines["plain"].calls == engines["auto"].calls


def test_rounds_are_prompts_for_each_request_at_once() -> None:
    engines = {"plain": Counted("cpu")}
    axes = Axes([1, 4], [0.0], {"short": KINDS["short"]}, rounds=3)
    run = SweepRun(
        ways=[Way("plain", "plain")], axes=axes, prompts=encode_prompts(axes, encoded),
        params=SamplingParams(max_tokens=2), repeat=2,
        open_engines=lambda concurrency: engines, progress=lambda *_: None,
    )  # fmt: skip
    assert [cell.num_prompts for cell in run.cells()] == [3, 12]
    # Each concurrency begins with a prompt that does not count.
    assert [count for _, count in engines["plain"].calls] == [1, 3, 3, 1, 12, 12]


@pytest.mark.slow
def test_contexts(target_dir: Path, drafters: Drafters) -> None:
    contexts = {"contexts": [None, 120], "concurrencies": [1], "temperatures": [0.0]}
    sweep, _ = run_sweep(target_dir, drafters, WAYS[:2], **contexts)
    assert [cell.place.context for cell in sweep.cells] == [None, None, 120, 120]


def test_picture(whole: tuple[Sweep, list[Any]]) -> None:
    pytest.importorskip("matplotlib")
    picture = draw_sweep(whole[0])
    assert picture.startswith("<svg")
    for text in ("short, T=0", "long, T=2", "mtp+sa", "tokens/s over plain"):
        assert text in picture
