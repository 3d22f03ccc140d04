"""Which matrices the doctor takes for random numbers: none that is trained, all that are noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.zoo import HEADS, resolve_head
from trtspec.doctor.untrained import Unfilled, is_random, unfilled_tensors

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


def told_of(head: str | Path) -> Unfilled:
    with ExitStack() as stack:
        return unfilled_tensors(read_head(Path(head), None, stack).tensors)


@pytest.mark.parametrize("head", HEADS)
def test_the_packages_heads_are_trained(head: str) -> None:
    assert told_of(head) == (None, None)


@pytest.mark.parametrize(("zeros", "said"), [(8, None), (9, "9 of the 64 rows of layers.0.")])
def test_a_few_rows_of_zeros_are_no_mistake(zeros: int, said: str | None) -> None:
    """As of heads that were added to make their number even."""
    weight = torch.ones(64, 5)
    weight[:zeros] = 0
    sources: Any = {
        name: SimpleNamespace(name=name, shape=weight.shape, read=lambda: weight)
        for name in (f"layers.{i}.o_proj.weight" for i in range(5))
    }
    found = unfilled_tensors(sources).partly_filled
    assert (found is None) == (said is None)
    assert found is None or (found.startswith(str(said)) and ", and 2 more. Trained" in found)


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
    said = told_of(head).untrained
    where = "" if third is None else f" (columns {third * 576} … {third * 576 + 575})"
    assert said is not None and said.startswith(f"fc.weight{where} holds random numbers, as before")
