"""The loss of a DFlash2 head's choice among each row's best tokens.

    candidates              a row's C best tokens; the target's choice in the last one's place
                            where it is not among them
    score of b behind a     its logit + <A[a] * W h, B[b]>, a the text's own token
    loss                    cross-entropy of the scores with the target's choice

So the loss has a label in every row, and what is proposed is chosen as in serving. Source: DFlash2
as the speculators package trains it (`speculators/models/dflash2`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..layers.fused import linear
from ..layers.linear import Linear
from ..ops.tokens.walk import Codebooks, PathCandidates, candidate_scores

ROWS = 2048
"""Rows whose candidates' rows of the lm_head are gathered at a time."""


@dataclass(frozen=True)
class PathTables:
    """What the scores are made of."""

    lm_head: Tensor  # [V, H]
    projection: Linear  # W
    books: Codebooks


@dataclass(frozen=True)
class PathRows:
    """Rows that propose, and who judges them."""

    hidden: Tensor  # [R, H]
    before: Tensor  # [R] int64, the tokens before
    candidates: Tensor  # [R, C] int64, the best tokens
    choices: Tensor  # [R] int64, the target's


def path_losses(rows: PathRows, tables: PathTables) -> tuple[Tensor, Tensor]:
    """Returns (losses [R] float32 or wider, differentiable; proposals [R] int64).

    A part's scores are computed again for the backward pass, so those of all rows never exist
    together.
    """
    wide = torch.promote_types(rows.hidden.dtype, torch.float32)
    books = Codebooks(*(book.to(wide) for book in tables.books))  # gradients are summed in it
    tables = PathTables(tables.lm_head, tables.projection, books)
    columns = rows.hidden, rows.before, rows.candidates, rows.choices
    parts = [
        checkpoint(_judge, PathRows(*part), tables, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(column.split(ROWS) for column in columns), strict=True)
    ]
    losses, proposals = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(proposals)


def _judge(rows: PathRows, tables: PathTables) -> tuple[Tensor, Tensor]:
    found = rows.candidates == rows.choices[:, None]
    is_missing = ~found.any(1)
    last = rows.candidates[:, -1].where(~is_missing, rows.choices)
    ids = torch.cat([rows.candidates[:, :-1], last[:, None]], dim=1)
    place = found.int().argmax(1).masked_fill(is_missing, ids.shape[1] - 1)
    unary = (tables.lm_head[ids] @ rows.hidden[:, :, None])[..., 0]
    states = linear((rows.hidden,), tables.projection)
    scores = candidate_scores(PathCandidates(ids, unary, states), rows.before, tables.books)
    best = scores.argmax(1, keepdim=True)
    return F.cross_entropy(scores, place, reduction="none"), rows.candidates.gather(1, best)[:, 0]
