"""What a stranger's model directory may not do: run code, hang, raise other than our errors."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model_dir
from tiny_gemma import gemma_dir
from tiny_heads import eagle3_dir, mtp_model_dir
from tokenizers import Tokenizer, models

from trtspec import LLM, DraftTargetDecodingConfig, EagleDecodingConfig, MTPDecodingConfig
from trtspec.errors import CheckpointError
from trtspec.models import decoder, hf_config

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


# -- sizes that nothing in the directory backs ---------------------------------------------------
@pytest.mark.parametrize(("claimed", "message"), [
    (2**24, "num_hidden_layers=16777216; it must be an int in 1 … 1000"),
    (20_000, "num_hidden_layers=20000; it must be an int in 1 … 1000"),
    (900, "num_hidden_layers=900, but the weights beside it are of 4 layers"),
])  # fmt: skip
def test_layers_that_are_not_there_are_refused_before_they_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int, message: str
) -> None:
    path = gemma_dir(tmp_path, "gemma3_text", seed=1, num_hidden_layers=4)
    raw = json.loads((path / "config.json").read_text())
    del raw["layer_types"]
    (path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": claimed}))

    def built(*args: Any) -> None:
        raise AssertionError("layers are built")

    monkeypatch.setattr(decoder.SandwichLayer, "__init__", built)
    if claimed > 1000:  # transformers makes lists of that length
        monkeypatch.setattr(hf_config, "_hf_config", built)
    with pytest.raises(CheckpointError, match=message):
        LLM(path, device="cpu")


@pytest.mark.parametrize("mode", ["draft_target", "eagle3", "mtp"])
def test_rotary_tables_are_for_the_engine_s_longest_text_alone(tmp_path: Path, mode: str) -> None:
    """A config may claim any number of positions; a table of them all would fill the memory."""
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}  # its angles go by the claim
    fields: dict[str, Any] = {"max_position_embeddings": 2**14, "rope_parameters": scaled}
    path = mtp_model_dir(tmp_path, num_mtp_layers=1, num_hidden_layers=6, **fields)
    config: Any = {
        "draft_target": lambda: DraftTargetDecodingConfig(
            max_draft_len=2, speculative_model=tiny_model_dir(tmp_path, seed=3, **fields)
        ),
        "eagle3": lambda: EagleDecodingConfig(
            max_draft_len=2, speculative_model=eagle3_dir(tmp_path)
        ),
        "mtp": lambda: MTPDecodingConfig(num_nextn_predict_layers=1),
    }[mode]()  # fmt: skip
    executor: Any = LLM(path, config, device="cpu", max_seq_len=64).executor
    for model in (executor.target, executor.draft_model):
        assert model.rope_tables.num_positions == 64
    whole = decoder.RopeTables(executor.target.config)
    assert whole.num_positions == 2**14
    for table, part in zip(whole.buffers(), executor.target.rope_tables.buffers(), strict=True):
        assert torch.equal(table[:64], part)
