"""Hidden states on disk: what mode SAVE_HIDDEN_STATES writes and a head's trainer reads.

A directory of safetensors shards and an `index.json`. A shard is rows, one per token that the
target has read; a sample (one request's text) is some runs of rows, in the order of positions:

    token_ids, next_token_ids, positions  [N] int32     the row's token, the one after it, its place
    hidden_states                         [N, n * D]    the captured layers side by side
    last_hidden_states                    [N, D]        after the target's final norm

Shards and index are written beside and renamed, so that what the index names is always whole. A
sample enters the index when its request is finished; rows of others stay unnamed. Shard names are
random and the index is brought up to date under a lock, so several runs may write side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..utils import set_usual_mode

INDEX, LOCK = "index.json", ".lock"
_FORMAT = {"format": "trtspec-hidden-states", "version": 1}
_COLUMNS = ("token_ids", "next_token_ids", "positions", "hidden_states", "last_hidden_states")


@dataclass
class _Sample:
    next_position: int = 0
    segments: list[list[Any]] = field(default_factory=list)  # [shard, first row, rows]


class HiddenStatesWriter:
    """Writes shards of about `rows_per_file` rows; holds no more than that and one step's rows.

    Args:
        directory: created if need be; one that holds an index is continued.
        layers: the captured layers, 0-based.
        target: says which model's states these are; states of another are refused.

    Raises:
        CheckpointError: the directory holds states of another target, dtype or layers.
        ConfigError: it cannot be created or written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layers: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        rows_per_file: int,
        target: str = "",
    ):
        self.directory, self.rows_per_file = Path(directory), rows_per_file
        self._lock = FileLock(self.directory / LOCK, thread_local=False)
        self._kind = {
            **_FORMAT,
            "layers": list(layers),
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            "target": target,
        }
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._index()
        except OSError as error:
            raise ConfigError(
                f"output_directory={str(directory)!r} cannot be written to ({error}). Give a "
                "directory that can."
            ) from error
        self._open: dict[int, _Sample] = {}
        self._done: list[dict[str, Any]] = []  # finished, not in the index yet
        self._columns: dict[str, list[Tensor]]
        self._shard: str
        self._begin_shard()

    def add(
        self,
        sample: int,
        start: int,
        tokens: Sequence[int],
        following: Sequence[int],
        hidden: Tensor,
        last_hidden: Tensor,
    ) -> None:
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
        rows = (
            torch.tensor(tokens[known:], dtype=torch.int32),
            torch.tensor(following[known:], dtype=torch.int32),
            torch.arange(state.next_position, start + len(tokens), dtype=torch.int32),
            hidden[known:].clone(),
            last_hidden[known:].clone(),
        )
        for column, part in zip(self._columns.values(), rows, strict=True):
            column.append(part)
        last = state.segments[-1] if state.segments else None
        if last is not None and last[0] == self._shard and last[1] + last[2] == self._num_rows:
            last[2] += count
        else:
            state.segments.append([self._shard, self._num_rows, count])
        state.next_position += count
        self._num_rows += count

    def finish(self, sample: int, prompt: Sequence[int], finish_reason: str) -> None:
        """The sample's rows are all there: it enters the index with them."""
        state = self._open.get(sample)
        if state is None:
            return
        self._done.append(
            {
                "prompt_sha256": prompt_digest(prompt),
                "num_prompt_tokens": len(prompt),
                "num_rows": state.next_position,
                "finish_reason": finish_reason,
                "segments": state.segments,
            }
        )
        del self._open[sample]

    def drop(self, sample: int) -> None:
        """A sample that will not be finished."""
        self._open.pop(sample, None)

    def start_over(self) -> set[int]:
        """After an exception: samples under way are dropped, and what a call left half done is
        either undone or, where it reached the disk, known to be done. Returns those dropped."""
        dropped = set(self._open)
        with self._locked():
            index = self._index()
        self._done = [sample for sample in self._done if sample not in index["samples"]]
        if self._shard in index["shards"]:
            self._begin_shard()
        count = min(len(parts) for parts in self._columns.values())
        self._columns = {column: parts[:count] for column, parts in self._columns.items()}
        self._num_rows = sum(len(part) for part in self._columns[_COLUMNS[0]])
        self._open.clear()
        return dropped

    def _begin_shard(self) -> None:
        self._columns = {column: [] for column in _COLUMNS}
        self._num_rows, self._shard = 0, _shard_name()

    def write_full_shard(self) -> None:
        """Writes what is held if it is a shard's worth."""
        if self._num_rows >= self.rows_per_file:
            self.flush()

    def flush(self) -> None:
        """Writes everything held, and the index.

        Raises:
            OSError: it cannot be written, as on a full disk. The next call tries again.
        """
        if not self._num_rows and not self._done:
            return
        try:
            self._write()
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"Hidden states cannot be written to {self.directory} ({error}). Make room there: "
                "finished samples are held, and written with the next ones or by shutdown()."
            ) from error

    def _write(self) -> None:
        if self._num_rows:
            tensors = {column: torch.cat(parts) for column, parts in self._columns.items()}
            beside = self.directory / f".{self._shard}.part"
            save_file(tensors, beside, metadata={"format": "pt"})
            set_usual_mode(beside)
            os.replace(beside, self.directory / self._shard)
        with self._locked():
            index = self._index()
            if self._num_rows:
                index["shards"][self._shard] = self._num_rows
            index["samples"] += self._done
            beside = self.directory / f".{INDEX}.part"
            beside.write_text(json.dumps(index), encoding="utf-8")
            os.replace(beside, self.directory / INDEX)
        self._done = []
        self._begin_shard()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release(force=True)  # also what an interrupt left behind

    def _index(self) -> dict[str, Any]:
        """The index as it is on disk, checked to be of this kind; a new one if there is none."""
        if not (self.directory / INDEX).exists():
            return {**self._kind, "shards": {}, "samples": []}
        index = _read_index(self.directory)
        for name, wanted in self._kind.items():
            if index[name] != wanted:
                raise CheckpointError(
                    f"{self.directory / INDEX} has {name}={index[name]!r}, this run writes "
                    f"{wanted!r}. Give another output_directory, or the settings it was begun with."
                )
        gone = [name for name in index["shards"] if not (self.directory / name).exists()]
        if gone:
            raise CheckpointError(
                f"{self.directory / INDEX} names {gone[0]}, which is not there. Restore it, or "
                "give another output_directory."
            )
        return index


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
            path = self.directory / shard
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


def _shard_name() -> str:
    return f"hidden_states-{uuid.uuid4().hex[:12]}.safetensors"


def prompt_digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        keys = (*_FORMAT, "layers", "hidden_size", "dtype", "target", "shards", "samples")
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
