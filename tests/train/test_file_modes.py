"""What is written as safetensors has the mode that the umask asks for, as other files have."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import tiny_model_dir
from unrolled import F32, load_target

from trtspec.data.hidden_states import HiddenStatesWriter
from trtspec.train.create_head import create_head
from trtspec.train.new_head import NewHead
from trtspec.train.save_head import save_head


@pytest.fixture(params=[0o022, 0o027])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of new files under an umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def _modes(directory: Path) -> dict[str, int]:
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    return {name: found for name, found in files.items() if name != ".lock"}


def test_a_head_s_files(tmp_path: Path, mode: int) -> None:
    target = load_target(tiny_model_dir(tmp_path))
    head = create_head(NewHead(layers_to_capture=(0, 1, 2)), target, torch.arange(50), F32, seed=0)
    save_head(head, target.config, tmp_path / "head")
    assert _modes(tmp_path / "head") == {"config.json": mode, "model.safetensors": mode}


def test_a_shard_s_files(tmp_path: Path, mode: int) -> None:
    writer = HiddenStatesWriter(tmp_path, [0], 8, F32, 10)
    writer.add(0, 0, [1, 2], [2, 3], torch.zeros(2, 8), torch.zeros(2, 8))
    writer.finish(0, [1], "length")
    writer.flush()
    assert len(_modes(tmp_path)) == 2 and set(_modes(tmp_path).values()) == {mode}
