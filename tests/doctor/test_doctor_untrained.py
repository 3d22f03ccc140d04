"""Which matrices the doctor takes for random numbers: none that is trained, all that are noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.heads.records import Sources
from trtspec.checkpoints.zoo import HEADS, resolve_head
from trtspec.doctor.untrained import half_empty_tensors, is_random, untrained_tensors

SHAPES = [(576, 1728), (1536, 576), (192, 576), (128, 128), (2048, 1024)]
MAKERS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "normal": lambda shape: torch.randn(shape) * 0.02,
    "uniform": lambda shape: torch.empty(shape).uniform_(-0.1, 0.1).bfloat16(),
    "truncated": lambda shape: torch.nn.init.trunc_normal_(torch.empty(shape)).half(),
    "linear": lambda shape: torch.nn.Linear(shape[1], shape[0]).weight.detach(),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_is_random(shape: tuple[int, int], maker: str) -> None:
    torch.manual_seed(0)
    assert all(is_random(MAKERS[maker](shape)) for _ in range(20))


@pytest.mark.parametrize("rank", [1, 4])
def test_a_learned_part_shows(rank: int) -> None:
    """Noise and a product of few columns, half as large."""
    torch.manual_seed(0)
    for shape in SHAPES:
        learned = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
        assert not is_random(torch.randn(shape) + learned / learned.std() / 2)


def test_small_matrices_are_left_out() -> None:
    assert not is_random(torch.randn(127, 4096))


def told_of(head: str | Path, tell: Callable[[Sources], str | None] = untrained_tensors) -> Any:
    with ExitStack() as stack:
        return tell(read_head(Path(head), None, stack).tensors)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tell", [untrained_tensors, half_empty_tensors])
def test_the_packages_heads_are_trained(head: str, tell: Callable[[Sources], str | None]) -> None:
    assert told_of(head, tell) is None


@pytest.mark.parametrize("third", [None, 0, 2])
def test_random_fc(third: int | None, tmp_path: Path) -> None:
    """All of it, or what reads one captured layer."""
    head = tmp_path / "head"
    shutil.copytree(resolve_head(Path("smollm2-135m-eagle3")), head)
    tensors = load_file(head / "model.safetensors")
    fc = tensors["fc.weight"]
    torch.manual_seed(0)
    part = fc if third is None else fc.narrow(1, third * 576, 576)
    part.copy_(torch.randn(part.shape) * float(part.float().std()))
    save_file(tensors, head / "model.safetensors")
    said = told_of(head)
    where = "" if third is None else f" (columns {third * 576} … {third * 576 + 575})"
    assert said is not None and said.startswith(f"fc.weight{where} holds random numbers, as before")
