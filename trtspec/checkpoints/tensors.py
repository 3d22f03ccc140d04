"""Tensors of a checkpoint directory by name: shapes first, contents when asked.

Weights are safetensors, whole or sharded. A draft head may also be `pytorch_model.bin`, the form
in which many were published; it is read with torch's weights-only unpickler, which builds tensors
and refuses anything that could run code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from .files import is_there, read_json_object

if TYPE_CHECKING:
    from .scaled import ScaledTensor

_LFS = b"version https://git-lfs"  # how a pointer of Git LFS begins
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSource:
    """One tensor of a checkpoint, not yet read."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: F32, BF16, I64, …
    load: Callable[[], Tensor] = field(repr=False)
    load_cut: Callable[[Cut], Tensor] | None = field(default=None, repr=False)
    """Reads a part without the rest; None: the whole tensor is read, and the part is kept."""
    scaled: ScaledTensor | None = field(default=None, repr=False)
    """What `load` makes floats of, if the checkpoint's tensor is quantised."""

    def read(self, cut: Cut | None = None) -> Tensor:
        """The tensor on the CPU, or a cut of it. Raises CheckpointError: the file is damaged."""
        try:
            if cut is None:
                return self.load()
            if self.load_cut is not None:
                return self.load_cut(cut)
            return self.load().narrow(cut.dim, cut.start, cut.length)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(damaged(self.path, error)) from error

    def rows(self, start: int, length: int) -> TensorSource:
        """Returns some of its rows as a tensor of their own."""
        quantised = self.scaled.rows(start, length) if self.scaled is not None else None
        if quantised is not None:
            return quantised

        def read(cut: Cut | None = None) -> Tensor:
            if cut is None or cut.dim > 0:
                part = self.read(Cut(0, start, length, self.shape[0]))
                return part if cut is None else part.narrow(cut.dim, cut.start, cut.length)
            return self.read(Cut(0, start + cut.start, cut.length, self.shape[0]))

        shape = length, *self.shape[1:]
        return replace(self, shape=shape, load=read, load_cut=read, scaled=None)

    def expert_rows(self, expert: int, start: int, length: int) -> TensorSource:
        """Returns some rows of one matrix of a stack as a tensor of their own."""
        of_expert = self.scaled.expert_rows if self.scaled is not None else None
        if of_expert is not None and (part := of_expert(expert, start, length)) is not None:
            return part

        def read(cut: Cut | None = None) -> Tensor:
            matrix = self.read(Cut(0, expert, 1, self.shape[0]))[0].narrow(0, start, length)
            return matrix if cut is None else matrix.narrow(cut.dim, cut.start, cut.length)

        shape = length, *self.shape[2:]
        return replace(self, shape=shape, load=read, load_cut=read, scaled=None)

    def transposed(self) -> TensorSource:
        """Returns it with its last two dimensions, of three, in each other's place."""

        def read(cut: Cut | None = None) -> Tensor:
            there = cut if cut is None or not cut.dim else cut._replace(dim=3 - cut.dim)
            return self.read(there).transpose(1, 2)

        first, rows, columns = self.shape
        return replace(self, shape=(first, columns, rows), load=read, load_cut=read)


def open_checkpoint(
    model_dir: Path, stack: ExitStack, *, pickle: bool = False
) -> dict[str, TensorSource]:
    """Every tensor of a directory by name; the files stay open until `stack` closes.

    Args:
        pickle: read `pytorch_model.bin` (weights only) where there is no safetensors file.

    Raises:
        CheckpointError: no weights, a damaged or missing file, an index that does not fit.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory. Give the checkpoint's directory.")
    safe = is_there(model_dir / WEIGHTS) or is_there(model_dir / INDEX)
    if pickle and not safe and is_there(model_dir / PICKLE):
        return _open_pickle(model_dir / PICKLE)
    sources: dict[str, TensorSource] = {}
    for path, promised in _files(model_dir, pickle).items():
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            found = {name: _safe_source(file, name, path) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(damaged(path, error)) from error
        absent = sorted(promised - found.keys())
        twice = sorted(sources.keys() & found.keys())
        if absent or twice:
            what = f"lacks {some(absent)}" if absent else f"repeats {some(twice)} of another shard"
            raise CheckpointError(
                f"{path} {what}, against {INDEX}. Copy all shards and the index from one source."
            )
        sources |= found
    return sources


def _safe_source(file: Any, name: str, path: Path) -> TensorSource:
    part = file.get_slice(name)
    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
    whole, cut = partial(file.get_tensor, name), partial(_read_cut, file, name)
    return TensorSource(name, path, shape, dtype, whole, cut)


def _read_cut(file: Any, name: str, cut: Cut) -> Tensor:
    """Reads a cut along the first or the second dimension."""
    span = slice(cut.start, cut.start + cut.length)
    return file.get_slice(name)[(slice(None),) * cut.dim + (span,)]


def _open_pickle(path: Path) -> dict[str, TensorSource]:
    content: Any = None
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes are made to raise, the file is not weights
        # Not quoted: torch's message recommends to switch its protection off.
        raise CheckpointError(
            f"{path} cannot be read as plain weights ({type(error).__name__}). It is damaged, or "
            "holds more than tensors, which could run code. Use a safetensors file, or copy it "
            "again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not tensors by name. Save the head's "
            "state_dict alone."
        )
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise CheckpointError(
                f"{path} holds {name!r} of type {type(tensor).__name__}; allowed are names with "
                "dense CPU tensors. Save the head's state_dict alone."
            )
    return {
        name: TensorSource(
            name, path, tuple(t.shape), _DTYPE_NAMES.get(t.dtype, str(t.dtype)), partial(_same, t)
        )
        for name, t in content.items()
    }


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _files(model_dir: Path, pickle: bool) -> dict[Path, set[str]]:
    """Weight file -> the tensors the index promises in it (none without an index)."""
    if is_there(model_dir / WEIGHTS):
        return {model_dir / WEIGHTS: set()}
    if not is_there(model_dir / INDEX):
        pickles = sorted(path.name for path in model_dir.glob("pytorch_model*.bin"))
        if pickles and not pickle:
            raise CheckpointError(
                f"{model_dir} holds its weights as pickle ({pickles[0]}), which can run code when "
                "loaded; allowed is safetensors. Convert it: load it with transformers and call "
                "save_pretrained."
            )
        allowed = f"{WEIGHTS}, {PICKLE}" if pickle else WEIGHTS
        raise CheckpointError(
            f"There are no weights in {model_dir}: it needs {allowed} or {INDEX} with its shards. "
            "Copy them from the model's source."
        )
    index = read_json_object(model_dir / INDEX, "Copy it again from the model's source.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{model_dir / INDEX} has no weight_map. Copy it again.")
    files: dict[Path, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{model_dir / INDEX} puts {name} into {shard!r}; allowed is a file name of "
                "the same directory. Copy the index again."
            )
        files.setdefault(model_dir / shard, set()).add(name)
    gone = sorted(path.name for path in files if not is_there(path))
    if gone:
        raise CheckpointError(
            f"{model_dir / INDEX} names {len(gone)} of {len(files)} shards that are not there: "
            f"{some(gone)}. Copy them from the model's source."
        )
    return files


def damaged(path: Path, error: Exception) -> str:
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return (
                f"{path} is a pointer of Git LFS, not the weights: run git lfs pull in its "
                "directory, or copy the file itself from its source."
            )
    return f"{path} is not a complete safetensors file ({error}). Copy it again from its source."


def some(names: Iterable[str]) -> str:
    """The first few of many names."""
    names = list(names)
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
