"""Loading a tokenizer from a model directory, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checks import is_number
from ..errors import CheckpointError
from .files import is_there

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model_dir: Path) -> Any | None:
    """The directory's transformers tokenizer; None if it holds no tokenizer file.

    Raises:
        CheckpointError: the files are there but cannot be read, or need code of the directory.
    """
    if not any(is_there(model_dir / name) for name in _FILES):
        return None
    for path in (*model_dir.glob("*.*"), *model_dir.glob("*/*.jinja")):
        if not path.is_dir():  # of the others transformers opens whatever has one of its names
            is_there(path)
    from transformers import AutoTokenizer

    try:
        # Without this argument transformers asks on stdin whether to run the directory's code.
        tokenizer = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its parsers raise many types; each means bad files
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"The tokenizer in {model_dir} is Python code (auto_map in tokenizer_config.json), "
                "and trtspec runs no code of a model directory. If its tokenizer.json is enough, "
                "remove auto_map; else use a model whose tokenizer transformers has itself."
            ) from error
        raise CheckpointError(
            f"The tokenizer in {model_dir} cannot be loaded ({error}). Copy tokenizer.json and "
            "tokenizer_config.json again from the model's source."
        ) from error
    if not is_number(tokenizer.model_max_length):
        raise CheckpointError(
            f"The tokenizer in {model_dir} has model_max_length={tokenizer.model_max_length!r}; it "
            "must be a number. Correct tokenizer_config.json."
        )
    return tokenizer


def token_problem(
    draft_size: int, target_size: int, draft: Any | None, target: Any | None
) -> str | None:
    """Why a draft model's tokens are not the target's, and the cure; None if they are. Embeddings
    may be padded to different lengths, as Qwen2.5's are: tokenizers that agree show it.

    Args:
        draft_size, target_size: their vocabularies. draft, target: their tokenizers, if known.
    """
    cure = "Choose a draft model of the target's own family, with the same tokenizer."
    if draft is None or target is None:
        if draft_size == target_size:
            return None
        return (
            f"The draft model's vocabulary has {draft_size} entries, the target's {target_size}, "
            "and there are no two tokenizers to show that this is padding. Put each model's "
            f"tokenizer beside it. {cure}"
        )
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    if draft_ids == target_ids:
        return None
    other = sorted(
        t for t in draft_ids.keys() | target_ids.keys() if draft_ids.get(t) != target_ids.get(t)
    )
    examples = ", ".join(f"{t!r} {draft_ids.get(t)} and {target_ids.get(t)}" for t in other[:3])
    return (
        f"The tokenizers of the draft model and the target map {len(other)} tokens to different "
        f"ids ({examples}). {cure}"
    )
