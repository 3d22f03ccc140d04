"""Edits of a checkpoint's tensors and config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def set_config(path: Path, **fields: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **fields}))
