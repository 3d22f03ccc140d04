"""Draft models whose embeddings are padded differently from the target's (as Qwen2.5's are)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trtspec import LLM, DraftTargetDecodingConfig, SamplingParams
from trtspec.errors import ConfigError

VOCAB, K = 97, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 9, 31, 7], [60, 2], [11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="module", params=[False, True], ids=["own_lm_head", "tied"])
def target_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("target")
    path = tiny_model_dir(folder, tie_word_embeddings=request.param)
    _give_tokenizer(path, 80)
    return path


def _give_tokenizer(path: Path, count: int) -> None:
    words = {f"word{i}": i for i in range(count)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "word0"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))


def _with_vocabulary(target: Path, folder: Path, size: int) -> Path:
    """The target itself with fewer tokens, or with more, whose logits are the highest of all."""
    path = folder / f"draft-{size}"
    shutil.copytree(target, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    tensors = load_file(path / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        rows = tensors[name]
        tensors[name] = torch.cat([rows, 9 * rows, -9 * rows])[:size].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _engine(target: Path, device: str, config: DraftTargetDecodingConfig | None = None) -> LLM:
    return LLM(target, config, device=device, dtype="float32", max_batch_size=2, max_seq_len=96)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["strict", "rejection"])
def test_more_entries(target_dir: Path, tmp_path: Path, rule: str, device: str) -> None:
    """They are never proposed: the rest is the target, so that all it proposes is accepted."""
    draft = _with_vocabulary(target_dir, tmp_path, 2 * VOCAB)
    config = DraftTargetDecodingConfig(max_draft_len=K, speculative_model=draft, acceptance=rule)
    params = SamplingParams(
        max_tokens=1 + 4 * (K + 1), ignore_eos=True, seed=1,
        temperature=0.0 if rule == "strict" else 1.5,
    )  # fmt: skip
    plain = _engine(target_dir, device).generate(PROMPTS, params)
    outputs = _engine(target_dir, device, config).generate(PROMPTS, params)
    for output, expected in zip(outputs, plain, strict=True):
        assert output.spec_stats.acceptance_length == K + 1
        if rule == "strict":
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["strict", "rejection"])
def test_fewer_entries(target_dir: Path, tmp_path: Path, rule: str, device: str) -> None:
    draft = _with_vocabulary(target_dir, tmp_path, 85)
    config = DraftTargetDecodingConfig(max_draft_len=K, speculative_model=draft, acceptance=rule)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    plain = _engine(target_dir, device).generate(PROMPTS, params)
    llm = _engine(target_dir, device, config)
    outputs = llm.generate(PROMPTS, params)
    texts = [output.outputs[0].token_ids for output in outputs]
    assert texts == [output.outputs[0].token_ids for output in plain]
    assert any(token >= 85 for text in texts for token in text), "nothing lay beyond the draft's"
    assert llm.stats().acceptance_length > 1.5
    sampled = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.5, seed=3)
    for output in llm.generate(PROMPTS, sampled):
        assert len(output.outputs[0].token_ids) == 30


def test_what_cannot_be_shown_to_be_padding(target_dir: Path, tmp_path: Path) -> None:
    draft = _with_vocabulary(target_dir, tmp_path, 128)
    config = DraftTargetDecodingConfig(max_draft_len=K, speculative_model=draft)
    _give_tokenizer(draft, 81)
    with pytest.raises(ConfigError, match=r"map 1 tokens to different ids .'word80' 80 and None"):
        _engine(target_dir, "cpu", config)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has 128 entries, the target's 97, and there are no two"):
        _engine(target_dir, "cpu", config)
