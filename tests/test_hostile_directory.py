"""What a stranger's model directory may not do: run code, hang, raise other than our errors."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model_dir
from tokenizers import Tokenizer, models

from trtspec import LLM
from trtspec.errors import CheckpointError

ROOT = Path(__file__).parent.parent


def _set(path: Path, **fields: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | fields))


def _with_code(tmp_path: Path, file: str, **fields: Any) -> tuple[Path, Path]:
    """A directory whose `file` names a Python file beside it, and what that file would write."""
    path, marker = tiny_model_dir(tmp_path), tmp_path / "ran"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    (path / "own.py").write_text(code)
    _set(path / file, **fields)
    return path, marker


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}},
         "tokenizer in .* is Python code .*runs no code of a model directory"),
        ("config.json", {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"},
         "model_type='own' is not supported"),
    ],
)  # fmt: skip
def test_a_directory_runs_no_code_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, fields: dict[str, Any], message: str
) -> None:
    from trtspec.models.tokenizer import load_tokenizer

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, marker = _with_code(tmp_path, file, **fields)
    answers = io.StringIO("y\ny\n")
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(CheckpointError, match=message):
        LLM(path, device="cpu")
    if file == "config.json":  # a tokenizer is loaded by the directory's config too
        assert load_tokenizer(path) is not None
    assert not marker.exists()
    assert answers.read() == "y\ny\n"


def test_every_call_of_transformers_loaders_trusts_no_code() -> None:
    """An Auto class asks on stdin where it is not told."""
    calls = [
        (path.name, node)
        for folder in ("trtspec", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert calls
    careless = [
        f"{name}:{node.lineno}"
        for name, node in calls
        if "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
    assert not careless
