"""The tokens that a head is asked to draft among, of those that its lm_head has.

An lm_head of all tokens is a large part of what a draft pass reads. Most of its rows are of rare
tokens (FR-Spec, arXiv:2502.14856).
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checks import is_int
from ...errors import ConfigError, shown
from ...layers.linear import Linear
from ...models.drafters.base import DraftHead
from ..files import is_there
from ..place import LoadOptions

FORMATS = "a JSON file or a .pt file with a list of token ids"


def read_draft_tokens(given: Sequence[int] | str | os.PathLike[str], vocab_size: int) -> Tensor:
    """Returns the ids of tokens, ascending, [n] int64.

    Args:
        given: ids, or a file of them: JSON, or .pt as SGLang's `--speculative-token-map` reads.
        vocab_size: the target's.

    Raises:
        ConfigError: the file cannot be read, or holds something else than different token ids.
    """
    ids, name = given, "draft_token_ids"
    if isinstance(given, str | os.PathLike):
        ids, name = _content(Path(given)), str(given)
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ConfigError(f"{name} is {shown(ids)}: give {FORMATS}, or the ids.")
    wrong = next((token for token in ids if not is_int(token, 0, vocab_size - 1)), None)
    if wrong is not None:
        raise ConfigError(
            f"{name} holds {shown(wrong)}: the target's tokens are 0 … {vocab_size - 1}. Give ids "
            "of its own tokenizer."
        )
    twice = next((token for token, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{name} holds token {twice} more than once: give each once.")
    return torch.tensor(sorted(ids), dtype=torch.int64)


def _content(path: Path) -> Any:
    """Returns what a file holds, tensors as lists."""
    if path.is_dir():
        raise ConfigError(f"draft_token_ids: {path} is a directory. Give {FORMATS}.")
    if not is_there(path):
        raise ConfigError(f"draft_token_ids: there is no file {path}. Give {FORMATS}.")
    try:
        if path.suffix != ".pt":
            return json.loads(path.read_text(encoding="utf-8"))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} holds other objects than numbers. Give {FORMATS}.") from error
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, struct.error) as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"{path} cannot be read ({why}). Give {FORMATS}.") from error
    return content.tolist() if isinstance(content, Tensor) else content


def draft_among(head: DraftHead, ids: Tensor, options: LoadOptions) -> None:
    """Leaves the head the lm_head's rows of these tokens, [n] int64, ascending.

    Of DSpark's bias it leaves their rows, too. A shared lm_head stays whole for verification: the
    head gets copies.

    Raises:
        ConfigError: the head drafts among fewer tokens already, or needs all of them.
    """
    config, owners = head.config, list(head.owners_of_ends().values())
    why = None
    if head.d2t is not None:
        why = f"it drafts among {config.draft_vocab_size} tokens already"
    elif config.selector_rank:
        why = "its choice among drafts has weights for all tokens"
    elif config.decoder.parallel.size > 1:
        why = "each of several ranks has other tokens"
    elif not all(isinstance(owner.lm_head, Linear) for owner in owners):
        why = "its lm_head has clusters of tokens"
    if why is not None:
        raise ConfigError(
            f"draft_token_ids does not go with this {config.format}: {why}. Leave it out."
        )
    kept: dict[int, Linear] = {}  # of each lm_head, which layers may share
    for owner in owners:
        whole: Any = owner.lm_head
        if id(whole) not in kept:
            kept[id(whole)] = _some_outputs(whole, ids, options)
        owner.lm_head = kept[id(whole)]
    markov = getattr(head, "markov_head", None)
    if markov is not None:
        markov.markov_w2 = _some_outputs(markov.markov_w2, ids, options)
    head.d2t = (ids - torch.arange(len(ids))).to(options.device)
    head.config = replace(config, draft_vocab_size=len(ids))


def _some_outputs(whole: Linear, ids: Tensor, options: LoadOptions) -> Linear:
    part = whole.at(ids)
    if options.pack:
        part.pack()
    return part
