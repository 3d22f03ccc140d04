"""The kinds of heads that can be loaded. A new kind is a module like these and one row."""

from __future__ import annotations

from ...errors import CheckpointError
from .dflash import DFLASH, DSPARK
from .eagle import EAGLE
from .gemma_assistant import GEMMA_ASSISTANT
from .mtp import MTP
from .records import HeadFiles, HeadKind

HEAD_KINDS: tuple[HeadKind, ...] = (GEMMA_ASSISTANT, DSPARK, DFLASH, MTP, EAGLE)
"""The first row that recognizes a directory reads it."""

_ASKED = {
    "dflash": "not a DFlash head",
    "dspark": "not a DSpark head",
    "eagle": "not an EAGLE head",
    "mtp": "not MTP layers",
}


def kind_of(files: HeadFiles, asked: str | None) -> HeadKind:
    """Returns the row that reads a directory.

    Args:
        asked: as `HeadRequest.kind`.

    Raises:
        CheckpointError: it holds another kind, or none.
    """
    _refuse_mtp_of_speculators(files)
    found = next((kind for kind in HEAD_KINDS if kind.recognizes(files, asked)), None)
    if found is None:
        raise CheckpointError(
            f"{files.head_dir} holds no MTP layers (no eh_proj of DeepSeek's names, no input_proj "
            "of MiMo's, no mtp.fc of Qwen3-Next's). Use a checkpoint with its MTP layers, or give "
            "the head's directory."
        )
    if asked is not None and found.asked_as != asked:
        of_eagle = "fc.", "midlayer."
        if found is EAGLE and not any(part in name for name in files.sources for part in of_eagle):
            raise CheckpointError(
                f"{files.head_dir} has no tensors of a draft head: it may be a language model, as "
                "the target is. Give the head's directory."
            )
        raise CheckpointError(
            f"{files.head_dir} {found.description}, {_ASKED[asked]}. Give it as "
            f"{found.how_to_give}."
        )
    return found


def _refuse_mtp_of_speculators(files: HeadFiles) -> None:
    """They join embedding and hidden state in another order than MiMo's, whose names they have."""
    if files.raw.get("speculators_model_type") == "mtp":
        raise CheckpointError(
            f"{files.config_path}: speculators_model_type='mtp' is not supported; allowed are "
            "'eagle3', 'peagle', 'dflash', 'dflash2' and 'dspark'. Use the MTP layers of the "
            "target's own checkpoint."
        )
