"""How families name and wire their MTP layers in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import CheckpointError


@dataclass(frozen=True)
class MTPLayout:
    """How a family writes and wires its MTP layers. A new family is a new row of `MTP_LAYOUTS`."""

    format: str
    prefix: str  # regular expression; its first group is the layer's number
    is_absolute: bool  # numbered after the target's layers, not from 0
    renames: dict[str, str]  # name in the checkpoint -> name here
    hidden_first: bool
    norm_output: bool  # the feedback is the normed hidden state, unless the family differs
    shared_prefix: str | None = None  # of names without a number, which belong to every layer
    zero_centered_norms: bool = False  # a norm's weight is kept as its difference from 1
    marker: str = ""  # the tensor of each layer that tells the layout; by default its projection
    layer_per_draft: bool = False  # trained so that layer i drafts token i, never the first for all


MTP_LAYOUTS = (
    MTPLayout(  # before DeepSeek's, whose names it has too
        format="Step-3.5 MTP layers",
        prefix=r"model\.layers\.(\d{1,6})\.(?:transformer\.)?",
        is_absolute=True,
        renames={"shared_head.norm": "norm", "shared_head.output": "lm_head"},
        hidden_first=False,
        norm_output=False,
        marker="shared_head.output",
        layer_per_draft=True,
    ),
    MTPLayout(
        format="DeepSeek-style MTP layers",
        prefix=r"model\.layers\.(\d{1,6})\.",
        is_absolute=True,
        renames={"shared_head.norm": "norm", "shared_head.head": "lm_head"},
        hidden_first=False,
        norm_output=True,
    ),
    MTPLayout(
        format="MiMo MTP layers",
        prefix=r"model\.mtp_layers\.(\d{1,6})\.",
        is_absolute=False,
        renames={
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "norm",
        },
        hidden_first=True,
        norm_output=True,
    ),
    MTPLayout(
        format="Qwen3-Next MTP layers",
        prefix=r"mtp\.layers\.(\d{1,6})\.",
        is_absolute=False,
        renames={
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "fc": "eh_proj",
        },
        hidden_first=False,
        norm_output=True,
        shared_prefix="mtp.",
        zero_centered_norms=True,
    ),
)


def mtp_layout(names: set[str]) -> MTPLayout | None:
    """The layout whose markers are among the tensor names, if there is one."""
    for layout in MTP_LAYOUTS:
        checkpoint_names = {new: old for old, new in layout.renames.items()}
        last = layout.marker or checkpoint_names.get("eh_proj", "eh_proj")
        prefix = layout.prefix if layout.shared_prefix is None else re.escape(layout.shared_prefix)
        if any(re.fullmatch(rf"{prefix}{last}\.weight", name) for name in names):
            return layout
    return None


def mtp_names(names: set[str], layout: MTPLayout, num_layers: int) -> dict[str, str]:
    """Name as `MTPHead` has it, layers counted from 0 -> name in the checkpoint.

    Args:
        num_layers: of the target; an absolute layout numbers its MTP layers from there.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    first = num_layers if layout.is_absolute else 0
    matches = {name: re.match(layout.prefix, name) for name in names}
    numbers = sorted({int(match[1]) for match in matches.values() if match} - set(range(first)))
    renamed: dict[str, str] = {}
    for name, match in sorted(matches.items()):
        if match is not None:
            owners, rest = [int(match[1])], name[match.end() :]
        elif layout.shared_prefix is not None and name.startswith(layout.shared_prefix):
            owners, rest = numbers, name.removeprefix(layout.shared_prefix)
        else:
            continue
        for old, new in layout.renames.items():
            if rest.startswith(f"{old}."):
                rest = new + rest[len(old) :]
        for number in owners:
            key = f"layers.{number - first}.{rest}"
            if number < first:
                continue
            if key in renamed:
                raise CheckpointError(
                    f"{renamed[key]} and {name} are two names of one tensor: the tensors of two "
                    "heads are mixed. Copy one checkpoint again, into an empty directory."
                )
            renamed[key] = name
    return renamed
