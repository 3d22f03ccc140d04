"""Hidden states on disk: what mode SAVE_HIDDEN_STATES writes and a head's trainer reads.

A directory of safetensors shards and an `index.json`. A shard is rows, one per token that the
target has read; a sample (one request's text) is some runs of rows, in the order of positions:

    token_ids, next_token_ids, positions  [N] int32     the row's token, the one after it, its place
    hidden_states                         [N, n * D]    the captured layers side by side
    last_hidden_states                    [N, D]        after the target's final norm

Shards and index are written beside and renamed, so that what the index names is always whole. A
sample enters the index when its request is finished; rows of others stay unnamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError

INDEX = "index.json"
_FORMAT = {"format": "trtspec-hidden-states", "version": 1}
_COLUMNS = ("token_ids", "next_token_ids", "positions", "hidden_states", "last_hidden_states")


@dataclass
class _Sample:
    next_position: int = 0
    segments: list[list[int]] = field(default_factory=list)  # [shard, first row, rows]


class HiddenStatesWriter:
    """Writes shards of about `rows_per_file` rows; holds no more than that and one addition.

    Args:
        directory: created if need be; one that holds an index is continued.
        layers: the captured layers, 0-based.

    Raises:
        CheckpointError: the directory holds states of another target, dtype or layers.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layers: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        rows_per_file: int,
    ):
        self.directory, self.rows_per_file = Path(directory), rows_per_file
        self._kind = {
            **_FORMAT, "layers": list(layers), "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        self._shards: list[list[Any]] = []  # [file name, rows]
        self._done: list[dict[str, Any]] = []
        if (self.directory / INDEX).exists():
            self._continue()
        self._open: dict[int, _Sample] = {}
        self._columns: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
        self._num_rows = 0
        self._is_dirty = False

    def _continue(self) -> None:
        index = _read_index(self.directory)
        for name, ours in self._kind.items():
            if index[name] != ours:
                raise CheckpointError(
                    f"{self.directory / INDEX} has {name}={index[name]!r}, this run writes "
                    f"{ours!r}. Give another output_directory, or the settings it was begun with."
                )
        self._shards, self._done = index["shards"], index["samples"]

    def add(
        self, sample: int, start: int, tokens: Sequence[int], following: Sequence[int],
        hidden: Tensor, last_hidden: Tensor,
    ) -> None:  # fmt: skip
        """Rows of a sample from position `start` on, on the CPU.

        Rows at positions that the sample already has (a preempted request computes its text
        again) are left out.
        """
        state = self._open.setdefault(sample, _Sample())
        known = state.next_position - start
        if known >= len(tokens):
            return
        if known < 0:
            raise ValueError(
                f"sample {sample} has {state.next_position} rows; {start} leaves a gap"
            )
        count = len(tokens) - known
        positions = torch.arange(state.next_position, start + len(tokens), dtype=torch.int32)
        rows = (
            torch.tensor(tokens[known:], dtype=torch.int32),
            torch.tensor(following[known:], dtype=torch.int32),
            positions,
            hidden[known:].clone(),
            last_hidden[known:].clone(),
        )
        for column, part in zip(self._columns.values(), rows, strict=True):
            column.append(part)
        shard, segments = len(self._shards), state.segments
        if segments and segments[-1][0] == shard and sum(segments[-1][1:]) == self._num_rows:
            segments[-1][2] += count
        else:
            segments.append([shard, self._num_rows, count])
        state.next_position += count
        self._num_rows += count
        if self._num_rows >= self.rows_per_file:
            self._write_shard()

    def finish(self, sample: int, prompt: Sequence[int], finish_reason: str) -> None:
        """The sample's rows are all there: it enters the index."""
        state = self._open.pop(sample, None)
        if state is None:
            return
        self._done.append({
            "prompt_sha256": prompt_digest(prompt),
            "num_prompt_tokens": len(prompt),
            "num_rows": state.next_position,
            "finish_reason": finish_reason,
            "segments": state.segments,
        })  # fmt: skip
        self._is_dirty = True

    def drop(self, sample: int) -> None:
        """A sample that will not be finished."""
        self._open.pop(sample, None)

    def flush(self) -> None:
        """Writes everything held and the index."""
        if self._num_rows:
            self._write_shard()
        elif self._is_dirty:
            self._write_index()

    def _write_shard(self) -> None:
        name = f"hidden_states-{len(self._shards):05d}.safetensors"
        tensors = {column: torch.cat(parts) for column, parts in self._columns.items()}
        beside = self.directory / f".{name}.part"
        save_file(tensors, beside, metadata={"format": "pt"})
        os.replace(beside, self.directory / name)
        self._shards.append([name, self._num_rows])
        self._columns = {column: [] for column in _COLUMNS}
        self._num_rows = 0
        self._write_index()

    def _write_index(self) -> None:
        # Of finished samples, those whose last rows are still held wait for the next shard.
        written = len(self._shards)
        samples = [s for s in self._done if all(part[0] < written for part in s["segments"])]
        index = {**self._kind, "shards": self._shards, "samples": samples}
        beside = self.directory / f".{INDEX}.part"
        beside.write_text(json.dumps(index), encoding="utf-8")
        os.replace(beside, self.directory / INDEX)
        self._is_dirty = len(samples) < len(self._done)


class SavedHiddenStates:
    """The finished samples of a directory, each a dictionary of the columns above.

    Raises:
        CheckpointError: the index or a shard is missing, damaged, or of another format.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._index = _read_index(self.directory)
        self._prompts = {sample["prompt_sha256"] for sample in self._index["samples"]}

    def __len__(self) -> int:
        return len(self._index["samples"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
        for shard, first, count in self._index["samples"][i]["segments"]:
            path = self.directory / self._index["shards"][shard][0]
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name, column in parts.items():
                        column.append(file.get_slice(name)[first : first + count])
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}). Save it again.") from error
        return {name: torch.cat(column) for name, column in parts.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    def has_prompt(self, prompt: Sequence[int]) -> bool:
        """Whether a finished sample has this prompt: a resumed job can skip it."""
        return prompt_digest(prompt) in self._prompts


def prompt_digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        keys = (*_FORMAT, "layers", "hidden_size", "dtype", "shards", "samples")
        missing = [key for key in keys if key not in index]
        wrong = {k: index[k] for k in _FORMAT if k in index and index[k] != _FORMAT[k]}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Give a directory that mode SAVE_HIDDEN_STATES wrote."
        ) from error
    if missing or wrong:
        raise CheckpointError(
            f"{path} is not an index of hidden states (missing {missing}, other {wrong}). Give a "
            "directory that mode SAVE_HIDDEN_STATES wrote."
        )
    return index
