"""What a stranger's model directory may not do: run code, hang, raise other than our errors."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model_dir
from tiny_gemma import assistant_dir, gemma_dir
from tiny_heads import eagle3_dir, mtp_model_dir
from tiny_step import step_dir
from tokenizers import Tokenizer, models

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints import hf_config
from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models import decoder
from trtspec.utils import cache_dir

ROOT = Path(__file__).parents[2]


def _set(path: Path, **fields: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | fields))


@contextmanager
def _pipe(path: Path) -> Iterator[None]:
    """A pipe nobody writes into. Whoever reads it fails, rather than wait for ever."""

    def fail(*_: Any) -> None:
        raise AssertionError("the pipe is read")

    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)  # so that opening it does not wait, which nothing interrupts
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.close(end)


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
    from trtspec.checkpoints.tokenizer import load_tokenizer

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


@pytest.mark.slow
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


# -- values and names that only a broken or a hostile directory has ------------------------------
HUGE = 2**70  # JSON has no largest int, torch has


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"eos_token_id": -HUGE}, "eos_token_id=-1180591620717411303424 must be a token"),
        ("llama", {"eos_token_id": [2, HUGE]}, "eos_token_id=.* must be a token id"),
        ("llama", {"rope_parameters": None, "rope_theta": None}, "rope_theta=None"),
        ("llama", {"rope_parameters": None, "rope_theta": HUGE}, "make no rotation"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": HUGE}},
         "make no rotation .*too big"),
        ("llama", {"rope_parameters": {
            "rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "mscale": "x",
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}}, "make no rotation"),
        ("llama", {"rope_parameters": {
            "rope_theta": 1e4, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0,
            "high_freq_factor": 0, "original_max_position_embeddings": 64}}, "make no rotation"),
        ("mistral", {"sliding_window": HUGE}, "sliding_window=1180591620717411303424; it must"),
        ("llama", {"num_labels": 10**5}, "num_labels=100000; it must be"),
        ("llama", {"num_attention_heads": 2**24, "num_key_value_heads": 2**24, "head_dim": 4096,
                   "hidden_size": 2**24}, "sizes that no memory holds"),
        ("step3p5", {"layer_types": 5}, "a field of another kind than 'step3p5' models have"),
        ("step3p5", {"attention_other_setting": "x"}, "a field of another kind"),
        ("step3p5", {"rope_theta": {"a": 1}}, "a field of another kind"),
        ("step3p5", {"sliding_window": HUGE}, "sliding_window=1180591620717411303424; it must"),
        ("step3p5", {"attention_other_setting": {"num_attention_heads": HUGE}},
         "must be ints in 1 … 16777216"),
    ],
)  # fmt: skip
def test_a_value_that_no_model_has_is_named(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    path = step_dir(tmp_path) if family == "step3p5" else tiny_model_dir(tmp_path, family)
    _set(path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        LLM(path, device="cpu", max_seq_len=32).generate([3, 4], SamplingParams(min_tokens=1))


def test_no_end_token_is_how_some_files_write_minus_one(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    _set(path / "config.json", eos_token_id=-1)
    (path / "generation_config.json").unlink()
    assert hf_config.load_config(path).eos_token_ids == ()


@pytest.mark.parametrize("parameters", [
    {"rope_theta": None}, {"rope_theta": "x"}, {"rope_theta": [1]}, {"rope_theta": HUGE},
    {"rope_type": ["x"]}, {"rope_type": None}, {"partial_rotary_factor": "x"},
    {"partial_rotary_factor": [1]}, {"partial_rotary_factor": HUGE}, {"factor": HUGE},
])  # fmt: skip
def test_an_assistant_s_rotation_of_the_wrong_type_is_named(
    tmp_path: Path, parameters: dict[str, Any]
) -> None:
    target = hf_config.load_config(gemma_dir(tmp_path, "gemma4_text", seed=1))
    path = assistant_dir(tmp_path, "gemma4_text")
    text = json.loads((path / "config.json").read_text())["text_config"]
    text["rope_parameters"]["full_attention"] |= parameters
    _set(path / "config.json", text_config=text)
    with ExitStack() as stack:
        (problem,) = read_head(path, target, stack, HeadRequest(kind="mtp")).problems
    assert next(iter(parameters)) in problem and "config.json" in problem


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 5000, None, 5, b"bytes", []])
def test_what_is_no_path_is_a_config_error(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model=.* Give a Hugging Face model directory"):
        LLM(model, device="cpu")


def test_a_cache_in_nobody_s_home_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", "~nosuchuser/cache")
    with pytest.raises(ConfigError, match=r"'~nosuchuser/cache' is not known .*Set TRTSPEC_CACHE"):
        cache_dir()


def test_a_head_of_an_impossible_name_is_a_checkpoint_error() -> None:
    with ExitStack() as stack:
        (problem,) = read_head(Path("x" * 5000), None, stack).problems
    assert "neither a directory nor a known head" in problem


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_shard_of_an_impossible_name_is_a_checkpoint_error(tmp_path: Path, name: str) -> None:
    path = tiny_model_dir(tmp_path)
    (path / "model.safetensors").unlink()
    _set(path / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="cannot be read"):
        LLM(path, device="cpu")


# -- what is no file -----------------------------------------------------------------------------
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "shard.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/a.jinja",
])  # fmt: skip
def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path, name: str, linked: bool) -> None:
    path, _ = _with_code(tmp_path, "config.json")
    if name in ("shard.safetensors", "model.safetensors.index.json"):
        (path / "model.safetensors").unlink()
        weights = {"model.norm.weight": "shard.safetensors"}
        _set(path / "model.safetensors.index.json", weight_map=weights)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    if linked:
        (path / name).symlink_to(tmp_path / "pipe")
    message = f"{name} is not a regular file.* a pipe"
    with (
        _pipe(tmp_path / "pipe" if linked else path / name),
        pytest.raises(CheckpointError, match=message),
    ):
        LLM(path, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_head_s_pipe_is_refused_too(tmp_path: Path, name: str) -> None:
    path = eagle3_dir(tmp_path)
    (path / ("config.json" if name == "config.json" else "model.safetensors")).unlink()
    with _pipe(path / name), ExitStack() as stack:
        (problem,) = read_head(path, None, stack).problems
    assert f"{name} is not a regular file" in problem


def test_a_gguf_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("/proc/self/mem")  # its first page is nobody's
    with pytest.raises(CheckpointError, match=r"a.gguf cannot be read"):
        LLM(tmp_path / "a.gguf", device="cpu")
