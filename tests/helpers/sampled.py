"""Engines and requests of the tests of sampled speculation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import matrix
from matrix import Drafters
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle3_dir, mtp_model_dir, p_eagle_dir, pard_dir

from trtspec import (
    LLM,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig

VOCAB, K = 97, 3


def make_models(path: Path) -> Path:
    """A target with MTP layers, drafting models and EAGLE-3 heads."""
    mtp_model_dir(path, seed=1, num_mtp_layers=K).rename(path / "target")
    tiny_model_dir(path, seed=2).rename(path / "draft")
    eagle3_dir(path).rename(path / "head")
    p_eagle_dir(path).rename(path / "masked_head")
    pard_dir(path).rename(path / "masked_draft")
    dflash_dir(path).rename(path / "block_head")
    dflash_dir(path, path={"selector_top_k": 70}).rename(path / "path_head")
    dflash_dir(path, markov="gated", confidence="markov").rename(path / "markov_head")
    return path


def config_of(folder: Path, mode: str, rule: str) -> DecodingBaseConfig | None:
    names = ("draft", "head", "masked_head", "masked_draft", "block_head", "path_head")
    names = (*names, "markov_head")
    drafters = Drafters(**{name: folder / name for name in names})
    return matrix.config_of(mode, K, drafters, **({} if mode == "none" else {"acceptance": rule}))


def engine(folder: Path, config: DecodingBaseConfig | None, **options: Any) -> LLM:
    given: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 96} | options
    return LLM(folder / "target", config, device="cpu", dtype="float32", **given)


def requests(count: int, longest: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    settings: list[dict[str, Any]] = [
        {"temperature": 6.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 0.0},
        {"temperature": 4.0, "top_p": 0.9},
    ]  # fmt: skip
    params = [
        SamplingParams(
            max_tokens=rng.randint(longest // 3, longest),
            seed=i,
            ignore_eos=True,
            **settings[i % 4],
        )
        for i in range(count)
    ]
    return prompts, params


def texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
