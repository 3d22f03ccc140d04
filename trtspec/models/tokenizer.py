"""Loading a tokenizer from a model directory, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model_dir: Path) -> Any | None:
    """The directory's transformers tokenizer; None if it holds no tokenizer file.

    Raises:
        CheckpointError: the files are there but cannot be read.
    """
    if not any((model_dir / name).exists() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # its parsers raise many types; each means bad files
        raise CheckpointError(
            f"The tokenizer in {model_dir} cannot be loaded ({error}). Copy tokenizer.json and "
            "tokenizer_config.json again from the model's source."
        ) from error
