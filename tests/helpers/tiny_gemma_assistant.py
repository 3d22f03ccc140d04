"""A Gemma assistant with its target and its oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafting import Case
from tiny_gemma import (
    NaiveAssistant,
)

from trtspec import (
    MTPDecodingConfig,
)


def assistant_config(
    assistant: Path, k: int, one_model: bool = True, **options: Any
) -> MTPDecodingConfig:
    return MTPDecodingConfig(
        num_nextn_predict_layers=k, speculative_model=assistant, mtp_eagle_one_model=one_model,
        **options,
    )  # fmt: skip


def assistant_case(pair: tuple[Path, Path], k: int, one_model: bool = True) -> Case:
    target, assistant = pair
    naive: Any = NaiveAssistant(assistant, target)
    return Case(target, assistant_config(assistant, k, one_model), naive)
