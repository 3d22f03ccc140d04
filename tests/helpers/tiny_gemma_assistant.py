"""A Gemma assistant with its target and its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from drafting import Case
from tiny_gemma import NaiveAssistant
from torch import Tensor

from trtspec import MTPDecodingConfig


def assistant_config(
    assistant: Path, k: int, one_model: bool = True, **options: Any
) -> MTPDecodingConfig:
    return MTPDecodingConfig(
        num_nextn_predict_layers=k, speculative_model=assistant, mtp_eagle_one_model=one_model,
        **options,
    )  # fmt: skip


class AssistantCase(Case):
    """Its oracle reads the target's keys by itself."""

    def hidden(self, text: Sequence[int]) -> Tensor:
        return torch.empty(0)

    def foresee(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        for prompt, said in zip(prompts, self.oracle.extend_all(prompts, count), strict=True):
            self.naive.foresee([*prompt, *said])  # type: ignore[attr-defined]


def assistant_case(pair: tuple[Path, Path], k: int, one_model: bool = True) -> Case:
    target, assistant = pair
    naive: Any = NaiveAssistant(assistant, target)
    return AssistantCase(target, assistant_config(assistant, k, one_model), naive)
