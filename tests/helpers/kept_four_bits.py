"""Models whose weights of 4 bits stay so on the CPU, where engines make them floats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loading import ON_CPU
from oracle import prompt_tensors
from tiny import prefill_metadata
from torch import Tensor

from trtspec.checkpoints import place
from trtspec.checkpoints.place import WeightForm
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.logits import gather_logits
from trtspec.distributed.parallel import ONE_RANK, Parallel
from trtspec.models.decoder import Decoder

KEPT = WeightForm(keeps_fp8=True)


def has_kernels(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    """Whether `load` keeps them, as with the kernels for 4 bits."""
    monkeypatch.setattr(place, "has_four_bits", lambda dtype, device: has)


def load(path: Path, form: WeightForm, parallel: Parallel = ONE_RANK) -> Decoder:
    return load_decoder(path, replace(ON_CPU, form=form, pack=False), parallel)


@torch.no_grad()
def logits_of(model: Decoder) -> Tensor:
    prompts = prompt_tensors(90)
    meta, positions = prefill_metadata(model.config, [len(prompt) for prompt in prompts])
    return gather_logits(model.compute_logits(model(torch.cat(prompts), positions, meta)))
