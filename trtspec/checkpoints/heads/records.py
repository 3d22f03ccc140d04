"""The records of reading a head: its files, what is asked of it, what was found, and its kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...attention.base import AttentionBackend
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import DraftHead, HeadConfig
from ..place import LoadOptions as LoadOptions
from ..tensors import TensorSource

Sources = dict[str, TensorSource]
Network = Callable[[HeadConfig, int, AttentionBackend, int], DraftHead]
"""A head's class: (config, num_positions, backend, kv_group) -> the module."""


@dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """What a user asks of a head's checkpoint. None leaves it to the checkpoint."""

    kind: str | None = None  # the `HeadKind.asked_as` that it must be: "eagle", "mtp", …
    layers_to_capture: Sequence[int] | None = None  # of an EAGLE-3 head, 0-based
    num_mtp_layers: int | None = None  # that are needed, one for each draft; None is all there are
    layer_per_draft: bool | None = True  # False needs the first MTP layer alone
    norm_output: bool | None = None  # feed the normed hidden state on, or not
    draft_window: int | None = None  # tokens that its layers see at most; 0 is all
    draft_tokens: Sequence[int] | str | os.PathLike[str] | None = None  # that it may propose


@dataclass(frozen=True)
class HeadFiles:
    """A head's directory, opened."""

    head_dir: Path
    raw: dict[str, Any]  # config.json's content
    sources: Sources  # tensors under the checkpoint's names

    @property
    def config_path(self) -> Path:
        return self.head_dir / "config.json"


@dataclass
class HeadReport:
    """What a head directory holds, and everything that is wrong with it."""

    head_dir: Path
    config: HeadConfig | None = None
    tensors: Sources = field(default_factory=dict)  # under the names of the module
    d2t: Tensor | None = None  # [Vd] int64 offsets
    mask_hidden: Tensor | None = None  # [1, n * Ht], of a head that drafts from mask tokens
    clusters: Tensor | None = None  # [C, V / C] int64, tokens of a clustered lm_head
    problems: list[str] = field(default_factory=list)  # each with its cure
    zero_weights: list[str] = field(default_factory=list)  # matrices that are zero everywhere
    kind: HeadKind | None = None

    def require(self) -> HeadConfig:
        """Returns the config. Raises CheckpointError with every problem, if there is one."""
        if self.problems or self.config is None:
            what = f"{self.head_dir} cannot be used as a draft head"
            if len(self.problems) == 1:
                (problem,) = self.problems
                is_about_it = problem.startswith(str(self.head_dir))
                raise CheckpointError(problem if is_about_it else f"{what}: {problem}")
            raise CheckpointError(f"{what}:\n- " + "\n- ".join(self.problems))
        return self.config


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """How one kind of head is recognized, read and built: a row of `HEAD_KINDS`."""

    asked_as: str  # the `HeadRequest.kind` that accepts it
    description: str  # "is …" or "holds …", behind the directory's name
    how_to_give: str  # the argument that takes it, for messages
    recognizes: Callable[[HeadFiles, str | None], bool]
    """(files, the request's kind) -> whether the directory is of this kind."""
    read: Callable[[HeadReport, HeadFiles, HeadRequest, DecoderConfig | None], HeadConfig]
    """Puts tensors and problems into the report; returns the config. The config is the target's,
    None where the head is read alone."""
    network: Network
    attach: Callable[[DraftHead, HeadReport, torch.device, torch.dtype], None] = (
        lambda head, report, device, dtype: None
    )
    """Gives the loaded head those of its tensors that are no parameters."""
    surplus_hint: Callable[[HeadConfig], str] = lambda config: ""
    """Which field to check where tensors are left over, ending in ", or "."""
