"""`draft_window`: a head's layers see the last tokens alone, and all keys are kept."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import LAYERS, make_case, run_random_schedule
from matrix import cpu_engine
from oracle import VOCAB
from tiny import tiny_model_dir
from tiny_dflash import LAYERS as CAPTURED
from tiny_dflash import dflash_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import (
    DFlashDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.cli import main
from trtspec.config import HeadDecodingConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Attention
from trtspec.models.mla import MLAttention

WINDOW, BLOCK = 70, 9


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(
        tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=LAYERS,
        max_position_embeddings=256,
    )  # fmt: skip


def _prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "mtp_eagle", "mtp_vanilla"])
def test_draft_logits_equal_recomputation(target_dir: Path, tmp_path: Path, name: str) -> None:
    """At every step of a random schedule, with and without what is further back."""
    case = make_case(name, target_dir, tmp_path, 3)
    limits: dict[str, Any] = {
        "max_seq_len": 128, "kv_cache_config": KvCacheConfig(max_tokens=300, tokens_per_block=4),
    }  # fmt: skip
    assert isinstance(case.config, HeadDecodingConfig)
    case.config = replace(case.config, draft_window=WINDOW)
    case.naive.flags["window"] = WINDOW
    prompts = _prompts(50, 90, 66, 95)
    compared, executor = run_random_schedule(case, 3, 1, prompts=prompts, **limits)
    assert compared > 30
    assert set(executor.kv_cache.windows) == {None}, "all keys are kept"
    case.naive.flags["window"] = WINDOW + 1
    with pytest.raises(AssertionError, match="not close"):
        run_random_schedule(case, 3, 1, prompts=prompts, **limits)


def test_a_block_is_as_with_a_sliding_window(target_dir: Path, tmp_path: Path) -> None:
    """Which reaches as far back from the block's end."""
    sliding = {
        "use_sliding_window": True, "sliding_window": WINDOW - BLOCK, "max_window_layers": 0,
        "sliding_window_non_causal": True,
    }  # fmt: skip
    heads = [dflash_dir(tmp_path / name, block=BLOCK, inner=inner)
             for name, inner in (("whole", {}), ("slides", sliding))]  # fmt: skip
    configs = [
        DFlashDecodingConfig(
            max_draft_len=4, speculative_model=head, target_layer_ids=list(CAPTURED),
            draft_window=window,
        )
        for head, window in ((heads[0], WINDOW), (heads[1], None), (heads[0], None))
    ]  # fmt: skip
    logits: list[list[torch.Tensor]] = []
    for config in configs:
        llm = cpu_engine(target_dir, config, max_seq_len=160)
        seen: list[torch.Tensor] = []
        worker: Any = llm.executor.worker
        sample = worker.draft_sampler_greedy

        def kept(
            rows: torch.Tensor, d2t: Any = None, seen: Any = seen, sample: Any = sample
        ) -> Any:
            seen.append(rows.clone())
            return sample(rows, d2t)

        worker.draft_sampler_greedy = kept
        llm.generate(_prompts(90)[0], SamplingParams(max_tokens=2, ignore_eos=True))
        logits.append(seen[:4])
    for ours, slides, whole in zip(*logits, strict=True):
        torch.testing.assert_close(ours, slides, atol=1e-5, rtol=1e-5)
        assert (ours - whole).abs().max() > 1e-3


def test_where_it_comes_from(target_dir: Path, tmp_path: Path) -> None:
    """The option counts before the head's file; 0 is all."""
    head = eagle3_dir(tmp_path)
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_window": 80}))
    for asked, window in ((None, 80), (90, 90), (0, None)):
        config = EagleDecodingConfig(max_draft_len=2, speculative_model=head, draft_window=asked)
        llm = cpu_engine(target_dir, config)
        model: Any = llm.executor.runner.step.draft_model
        windows = [m.window for m in model.modules() if isinstance(m, Attention)]
        assert windows == [window]
        assert model.config.draft_window == (window or 0)


def test_latent_layers_and_shorter_windows(tmp_path: Path) -> None:
    target = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=1)
    config = MTPDecodingConfig(num_nextn_predict_layers=2, draft_window=WINDOW)
    llm = cpu_engine(target, config)
    model: Any = llm.executor.runner.step.draft_model
    latent = [m for m in model.modules() if isinstance(m, MLAttention)]
    assert [m.window for m in latent] == [WINDOW]
    head = dflash_dir(
        tmp_path, inner={"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    )
    whole = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=LAYERS)
    config = DFlashDecodingConfig(speculative_model=head, draft_window=WINDOW)  # type: ignore[assignment]
    model = cpu_engine(whole, config).executor.runner.step.draft_model
    assert [layer.self_attn.window for layer in model.layers] == [WINDOW, 6]


@pytest.mark.parametrize("window", [64, 1, -1, "70", 70.0, True, False])
def test_what_cannot_be(target_dir: Path, tmp_path: Path, window: Any) -> None:
    with pytest.raises(ConfigError, match="draft_window"):
        EagleDecodingConfig(max_draft_len=2, speculative_model="x", draft_window=window)
    head = eagle3_dir(tmp_path)
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_window": window}))
    config = EagleDecodingConfig(max_draft_len=2, speculative_model=head)
    with pytest.raises(CheckpointError, match=r"draft_window=.*; it must be null, 0 or an int in"):
        cpu_engine(target_dir, config)


def test_on_the_command_line(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["generate", "--speculative", "ngram", "--draft-window", "80", "--prompt", "a"]) == 2
    )
    assert "--draft-window was given, but --speculative ngram drafts without" in (
        " ".join(capsys.readouterr().err.split())
    )
    head = eagle3_dir(tmp_path)
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_window": 1080}))
    assert main(["inspect-head", str(head)]) == 0
    assert "a layer sees the last 1,080 tokens at most" in capsys.readouterr().out
