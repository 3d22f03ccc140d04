"""The heads in the package: found by name, whole, small, and as good as their cards say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from matrix import full

from trtspec import LLM, EagleDecodingConfig, MTPDecodingConfig, SamplingParams
from trtspec.checkpoints.zoo import HEADS, head_for, resolve_head
from trtspec.config import DecodingBaseConfig, DSparkDecodingConfig
from trtspec.data.acceptance_prompts import load_prompts
from trtspec.errors import CheckpointError

ROOT = Path(__file__).parents[2]
MOST_BYTES = 40_000_000
CONFIGS: dict[str, DecodingBaseConfig] = {
    "smollm2-135m-dspark": DSparkDecodingConfig(
        max_draft_len=7, speculative_model="smollm2-135m-dspark"
    ),
    "smollm2-135m-eagle3": EagleDecodingConfig(
        max_draft_len=4, speculative_model="smollm2-135m-eagle3"
    ),
    "smollm2-135m-mtp": MTPDecodingConfig(
        num_nextn_predict_layers=3, speculative_model="smollm2-135m-mtp"
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_directory_is_whole_small_and_packaged(name: str) -> None:
    directory = resolve_head(name)
    files = {path.name for path in directory.iterdir()}
    assert files == {"README.md", "config.json", "log.jsonl", "model.safetensors"}
    assert (directory / "model.safetensors").stat().st_size <= MOST_BYTES
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for glob in settings["package-data"]["trtspec"]
        for path in (ROOT / "trtspec").glob(glob)
    }
    assert {directory / file for file in files} <= packaged


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert head_for("smollm2-135m", "eagle3") == "smollm2-135m-eagle3"
    assert head_for("smollm2-135m", "dspark") == "smollm2-135m-dspark"
    assert head_for("smollm2-135m", "mtp") == "smollm2-135m-mtp"
    assert head_for("some/directory", "eagle3") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-mtp").mkdir()  # what the user has by that name is the user's
    assert resolve_head("smollm2-135m-mtp") == Path("smollm2-135m-mtp")


@pytest.mark.model
def test_an_unknown_name_says_what_there_is() -> None:
    config = EagleDecodingConfig(max_draft_len=2, speculative_model="smollm2-135m-eagle")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a known head.*-eagle3"):
        LLM("smollm2-135m", config, device="cpu")


def _texts(config: DecodingBaseConfig | None) -> tuple[list[list[int]], float]:
    """Greedy fp32 answers to a prompt of each kind, or two, and the acceptance length."""
    prompts = load_prompts()
    chosen = [list(prompt.messages) for prompt in prompts[:: len(prompts) // (12 if full() else 4)]]
    llm = LLM(
        "smollm2-135m",
        config,
        device="cpu",
        dtype=torch.float32,
        max_batch_size=12,
        max_seq_len=512,
    )
    outputs = llm.chat(chosen, SamplingParams(max_tokens=48 if full() else 24))
    return [output.outputs[0].token_ids for output in outputs], llm.stats().acceptance_length


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    return _texts(None)[0]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "least"),
    [("smollm2-135m-dspark", 2.2), ("smollm2-135m-eagle3", 2.0), ("smollm2-135m-mtp", 1.7)],
)
def test_text_is_the_targets_and_drafts_are_accepted(
    plain_texts: list[list[int]], name: str, least: float
) -> None:
    texts, acceptance_length = _texts(CONFIGS[name])
    assert texts == plain_texts
    assert acceptance_length >= least
