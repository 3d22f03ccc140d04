"""`trtspec doctor` as a command: what it is given, when it says what is wrong, what it leaves."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from guided import save_tokenizer
from tiny import tiny_model_dir

from trtspec import LLM, cli
from trtspec.checkpoints import weights, zoo
from trtspec.cli import doctor
from trtspec.cli.inputs import encoder
from trtspec.errors import RequestError

Captured = pytest.CaptureFixture[str]


class _Engine:
    """Writes random texts."""

    open: ClassVar[list[_Engine]] = []

    def __init__(self, *arguments: Any, **options: Any):
        _Engine.open.append(self)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        _Engine.open.remove(self)

    def apply_chat_template(self, messages: list[Any]) -> list[int]:
        return [len(message["content"]) for message in messages]

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 97, (len(prompts), 30), generator=generator).tolist()
        return [
            SimpleNamespace(prompt_token_ids=row[:4], outputs=[SimpleNamespace(token_ids=row[4:])])
            for row in ids
        ]


def _main(*arguments: object) -> int:
    return cli.main([*map(str, arguments), "--device", "cpu", "--dtype", "float32"])


def _doctor(*arguments: object) -> int:
    return _main("doctor", *arguments)


def test_a_draft_model_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    target, load = tiny_model_dir(tmp_path), weights.load_decoder
    num_open: list[int] = []

    def load_decoder(*arguments: Any, **options: Any) -> Any:
        num_open.append(len(_Engine.open))
        return load(*arguments, **options)

    monkeypatch.setattr("trtspec.llm.LLM", _Engine)
    monkeypatch.setattr(weights, "load_decoder", load_decoder)
    monkeypatch.setitem(zoo.MODELS, "known", SimpleNamespace())
    monkeypatch.setattr(zoo, "_from_wheel", lambda entry, tell: target)
    code = _doctor("--target", target, "--head", "known", "--prompts", 12, "--json")
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["is_well"] and found["suspicion"] is None, found
    assert found["conditional_acceptance"] == [1.0, 1.0, 1.0]
    assert num_open[0] == 0, "the engine that wrote the texts is shut down before"


def test_a_target_of_few_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Engine(_Engine):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            lengths.append(options["max_seq_len"])

    monkeypatch.setattr("trtspec.llm.LLM", Engine)
    for num_positions in (200, 4096):
        target = tiny_model_dir(tmp_path, max_position_embeddings=num_positions)
        assert _doctor("--target", target, "--head", target, "--prompts", 12) == 0
    assert lengths == [200, 1024]


def test_a_wrong_directory_is_told_before_the_target_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("trtspec.llm.LLM", refuse)
    target, other = tiny_model_dir(tmp_path), tiny_model_dir(tmp_path, vocab_size=101)
    empty = tmp_path / "empty"
    empty.mkdir()
    for head, word in ((empty, "empty"), (other, "vocabulary has 101 entries")):
        assert _doctor("--target", target, "--head", head) == 1
        assert word in " ".join(capsys.readouterr().out.split())
    assert _doctor("--target", target, "--head", "nowhere") == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_no_tokens_are_too_few(tmp_path: Path, capsys: Captured) -> None:
    assert _doctor("--target", tmp_path, "--head", tmp_path, "--max-tokens", 0) == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_a_model_without_a_chat_template(tmp_path: Path, capsys: Captured) -> None:
    """Commands and the server's errors say what else there is; `--raw` gives the text alone."""
    target = tiny_model_dir(tmp_path, max_position_embeddings=4096)
    tokenizer = save_tokenizer(target)
    measuring = ["acceptance", "--model", target, "--speculative", "ngram", "--per-category", 1]
    measuring += ["--max-tokens", 2]
    examining = ["--target", target, "--head", target, "--prompts", 12, "--max-tokens", 24]
    for run in (partial(_main, *measuring), partial(_doctor, *examining)):
        assert run() == 2
        error = " ".join(capsys.readouterr().err.split())
        assert "has no chat template" in error and "--raw gives the text" in error, error
        code, (out, error) = run("--raw", "--json"), capsys.readouterr()
        assert code == 0 and json.loads(out), error
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    with LLM(target, device="cpu", dtype="float32", max_seq_len=64) as llm:
        assert encoder(llm, raw=True)(messages) == tokenizer.encode("ab\n\nc")
        with pytest.raises(RequestError, match=r"to generate\(\) or /v1/completions"):
            llm.chat(messages)


def test_the_best_of_many_trials_are_shown(capsys: Captured) -> None:
    results = [
        SimpleNamespace(name=f"trial-{i}", result=SimpleNamespace(
            conditional=[0.5] * 8, acceptance_length=1 + (7 * i % 40) / 100))
        for i in range(40)
    ]  # fmt: skip
    diagnosis: Any = SimpleNamespace(
        as_loaded=results[0].result, tried=results[1:], problems=["none"], changes=[], remarks=[]
    )
    doctor._print(diagnosis, Path("head"))
    text = capsys.readouterr().out
    best = sorted(results[1:], key=lambda f: -f.result.acceptance_length)[: doctor.MAX_ROWS]
    assert "as it is" in text
    assert [line.split()[1] for line in text.splitlines() if "trial-" in line] == [
        f.name for f in best
    ]
    hidden = 39 - doctor.MAX_ROWS
    assert f"{hidden} others were tried, of length 1.27 at most (--json has all)" in text
