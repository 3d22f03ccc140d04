"""Where a command's JSON object goes: `--json` prints it in the text's place, `--json-file` writes
it to a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import CliError, show_note
from .options import JsonOptions

_OLD_SPELLING = "acceptance --json FILE is deprecated: write --json-file FILE."


def write_json(options: JsonOptions, report: Mapping[str, Any]) -> None:
    """Writes the object to where the options say. Where one place cannot be written, the other one
    is, and an old file stays."""
    line = json.dumps(report, allow_nan=False) + "\n"
    try:
        if options.as_json:
            sys.stdout.write(line)
            sys.stdout.flush()
    finally:
        if options.json_file is not None:
            _write_file(options.json_file, line)


def _write_file(path: Path, text: str) -> None:
    """Writes a file as a whole; devices, pipes and what nothing can lie beside, in place."""
    is_open = str(path.absolute()).startswith(("/dev/", "/proc/"))
    is_old = path.exists()
    if is_open or (is_old and not (path.is_file() and os.access(path.resolve().parent, os.W_OK))):
        path.write_text(text, encoding="utf-8")
        return
    from ..utils import replace_text

    mode = path.stat().st_mode if is_old else None
    path = path.resolve()
    replace_text(path, text)
    if mode is not None:
        path.chmod(mode)


def check_writable(path: Path | None) -> None:
    """Raises CliError where a file cannot be written, before anything is computed."""
    if path is None:
        return
    if path.is_dir():
        raise CliError(f"{path} is a directory: give the name of a file to write.")
    if not path.absolute().parent.is_dir():
        raise CliError(f"{path} cannot be written: the directory {path.parent} is not there.")
    place = path if path.exists() else path.absolute().parent
    if not os.access(place, os.W_OK):
        raise CliError(f"{path} cannot be written: there is no permission to. Name another file.")


def check_files(files: Mapping[str, Path | None]) -> list[Path]:
    """Returns the files that are given, by option.

    Raises:
        CliError: one cannot be written, or two are the same.
    """
    found: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        check_writable(path)
        if (other := found.setdefault(path.absolute(), option)) != option:
            raise CliError(f"{other} and {option} are both {path}: name two files.")
    return [path for path in files.values() if path is not None]


def check_directory(path: Path) -> None:
    """Raises CliError where a directory cannot be made or written, before anything is computed."""
    place = path.absolute()
    while not os.path.exists(place):
        place = place.parent
    if not os.path.isdir(place):
        raise CliError(f"{path} cannot be a directory: {place} is a file. Name another directory.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CliError(
            f"{path} cannot be written: there is no permission to. Name another directory."
        )


def in_new_spelling(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `acceptance --json FILE` as `--json-file FILE`, and says so.

    No other argument of `acceptance` stands alone, so a word behind `--json` is its file.
    """
    new = list(arguments)
    if new[:1] != ["acceptance"]:
        return new
    for i, argument in enumerate(new):
        follows = new[i + 1] if i + 1 < len(new) else "-"
        if argument.startswith("--json=") or (argument == "--json" and follows[:1] != "-"):
            new[i] = argument.replace("--json", "--json-file", 1)
            show_note(_OLD_SPELLING)
    return new
