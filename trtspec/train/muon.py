"""Muon for a head's matrices, AdamW for the rest of it.

Muon (torch's own, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by
the nearest orthogonal matrix. A parameter may pack several matrices: queries, keys and values; gate
and up; what fc makes of each captured layer. Each is made orthogonal by itself, in a view of the
parameter. torch fits the size of a step to AdamW's (arXiv:2502.16982); short runs want it larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.weights import placements
from ..models.drafters.base import DraftHead

Cut = tuple[slice, slice]
TABLES = {"embed_tokens", "lm_head", "markov_head", "candidate_selector"}
"""Modules whose matrices belong to tokens: AdamW's, as embeddings are wherever Muon is used."""
FACTOR = 6
"""Muon's learning rate over AdamW's. With 1 heads learned no faster than by AdamW alone."""


class MuonAndAdamW:
    """Two optimizers with the parts of `torch.optim.Optimizer` that training uses.

    Args:
        masters: fp32 leaves by the names of the head's parameters; changed in place.
        adamw: AdamW's options, of which `lr` and `weight_decay` are Muon's too.
    """

    def __init__(self, head: DraftHead, masters: Mapping[str, Tensor], **adamw: Any):
        cuts = cuts_of(head)
        self._parts = [
            (masters[name], cut, masters[name].detach()[cut])
            for name, of_matrix in cuts.items()
            for cut in of_matrix
        ]
        self._muon = torch.optim.Muon(
            [part for _, _, part in self._parts],
            weight_decay=adamw["weight_decay"] / FACTOR,  # torch takes it times the learning rate
            adjust_lr_fn="match_rms_adamw",
        )
        others = [master for name, master in masters.items() if name not in cuts]
        self._adamw = torch.optim.AdamW(others, **adamw)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's; Muon follows their learning rate."""
        return self._adamw.param_groups

    def step(self) -> None:
        for group in self._muon.param_groups:
            group["lr"] = FACTOR * self.param_groups[0]["lr"]
        for master, cut, part in self._parts:
            part.grad = None if master.grad is None else master.grad[cut]
        self._muon.step()
        self._adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, ValueError for another optimizer's state."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def cuts_of(head: DraftHead) -> dict[str, list[Cut]]:
    """Returns by parameter's name the matrices that it packs, (rows, columns)."""
    cuts: dict[str, list[Cut]] = {}
    for placement in placements(head).values():
        name = f"{placement.module}.{placement.leaf}"
        if len(placement.shape) != 2 or not TABLES.isdisjoint(name.split(".")):
            continue
        rows = slice(placement.start, placement.start + placement.shape[0])
        width = placement.shape[1]
        if name == "fc.weight":
            width = head.config.target_hidden_size
        columns = range(0, placement.shape[1], width)
        cuts.setdefault(name, []).extend((rows, slice(i, i + width)) for i in columns)
    return cuts
