"""The directory of a training run: its files, and whether a run can begin or go on there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown
from .save_head import HEAD_FILES

CHECKPOINT, PARTIAL = "checkpoint.pt", "checkpoint.tmp"
LOG, LINE_BEGINS = "log.jsonl", '{"step": '


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Makes the directory and holds it: two runs at a time would overwrite each other's files.

    One that was made here and holds nothing in the end is removed.

    Raises:
        CheckpointError: another process holds it.
    """
    was_there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    directory = os.open(out, os.O_RDONLY)
    try:
        _lock(directory, out)
        try:
            yield
        finally:
            if not was_there:
                with suppress(OSError):  # it holds something
                    out.rmdir()
    finally:
        os.close(directory)  # which gives the lock back


def _lock(directory: int, out: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(directory), os.stat(out))
    except (BlockingIOError, FileNotFoundError):
        is_there = False  # held, or removed since by who held it
    except OSError:  # a file system without locks
        return
    if not is_there:
        raise CheckpointError(
            f"Another process trains in {out}. Wait for its end, or give another --out."
        )


def check_run_directory(out: Path) -> None:
    """Checks that a run can begin or go on in a directory, which need not be there.

    Raises:
        CheckpointError: the head of something else, or its log, would be overwritten.
    """
    heads = [name for name in HEAD_FILES if (out / name).exists()]
    # A kill may come between the first head and its checkpoint.
    begun = any((out / name).exists() for name in (CHECKPOINT, PARTIAL))
    if heads and not begun:
        raise CheckpointError(
            f"{out} holds a head ({', '.join(heads)}) and no {CHECKPOINT} to go on from. Give "
            "another --out, or move the head away."
        )
    if (out / LOG).exists():
        read_log(out / LOG)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns a log's lines, without a last one that a kill cut short.

    Raises:
        CheckpointError: it cannot be read, or a line is not of a training run.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Give another --out.") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip("\0 "):  # of a machine that stopped while it wrote
            continue
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(texts) and text.startswith(LINE_BEGINS[: len(text)]):
                continue
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise CheckpointError(
                f"{path}:{number} is no line of a training run's log: {shown(text)}. Give another "
                "--out, or move that file away."
            )
        lines.append(line)
    return lines
