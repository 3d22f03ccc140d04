"""A target whose choices are those of a drafter, so that the drafter used rightly is always
accepted: for each document where its last three tokens were to be drafted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loading import HEAD_ON_CPU, ON_CPU
from torch import Tensor

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.doctor.draft_model import DraftModel, unroll_model
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.base import DraftHead
from trtspec.train import unroll as module
from trtspec.train.records import Sequences
from trtspec.train.unroll import Teacher

CPU, F32 = torch.device("cpu"), torch.float32
STEPS, WIDTH = 3, 18


class Copied:
    """`teach` stands in the place of `train.unroll.teach`."""

    def __init__(self, target: Decoder, num_documents: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.target, self.real_teach = target, module.teach
        self.known = torch.randint(6, WIDTH - STEPS + 1, (num_documents,), generator=generator)
        shape = num_documents, WIDTH
        places = torch.arange(WIDTH).expand(shape)
        written = places - self.known[:, None]  # 0, 1, 2 where the target wrote
        ids = torch.randint(3, target.config.vocab_size, shape, generator=generator)
        documents = torch.where(written < STEPS, 0, -1)
        self.texts = Sequences(ids, (written >= 0) & (written < STEPS), documents, places.clone())
        self.choices = torch.full((num_documents * WIDTH,), -1)

    def teach(self, target: Decoder, head: DraftHead, texts: Sequences) -> Teacher:
        choices = self.choices.to(texts.input_ids.device)
        return replace(self.real_teach(target, head, texts), choices=choices)

    def follow(self, chain: Callable[[list[int], Any, list[int]], list[Tensor]]) -> None:
        """The choices are those of `NaiveHead.chain`."""
        for row, n in enumerate(self.known.tolist()):
            ids = self.texts.input_ids[row].tolist()
            for step, logits in enumerate(chain(ids[:n], None, ids[n : n + STEPS])):
                self.choices[row * WIDTH + n - 1 + step] = logits.argmax()

    @torch.no_grad()
    def follow_head(self, directory: Path, kind: str, num_mtp_layers: int = 1) -> None:
        head = load_head(
            directory,
            self.target,
            HeadRequest(kind=kind, num_mtp_layers=num_mtp_layers),
            HEAD_ON_CPU,
        )
        teacher = self.real_teach(self.target, head, self.texts)
        for step in module.unroll(head, self.texts, teacher.hidden, STEPS, teacher.keys):
            proposals = head.compute_logits(step.hidden, step.step).argmax(-1)
            self._follow(
                step.step, proposals if head.d2t is None else proposals + head.d2t[proposals]
            )

    @torch.no_grad()
    def follow_model(self, directory: Path, mask_token_id: int) -> None:
        model = load_decoder(directory, ON_CPU)
        drafter = DraftModel(model, mask_token_id)
        for step in unroll_model(drafter, self.texts, STEPS):
            self._follow(step.step, drafter.compute_logits(step.hidden, step.step).argmax(-1))

    def _follow(self, step: int, proposals: Tensor) -> None:
        rows = torch.arange(len(self.known)) * WIDTH + self.known - 2
        self.choices[rows + 1 + step] = proposals[rows]
