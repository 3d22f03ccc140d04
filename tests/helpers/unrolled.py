"""Sequences and targets of the tests that train and examine heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from loading import UNPACKED

from trtspec import LLM, SamplingParams
from trtspec.checkpoints.weights import load_decoder
from trtspec.train.records import Sequences
from trtspec.train.trainer import TrainConfig

CPU, F32 = torch.device("cpu"), torch.float32
CAPTURED, VOCAB, STEPS = (1, 3, 4), 96, 3


def load_target(path: Path):
    return load_decoder(path, UNPACKED)


def padded_texts(lengths: list[list[int]], width: int, seed: int = 0) -> Sequences:
    """Rows of documents of these lengths, padded to `width`; a random tenth of tokens is unseen."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), width
    ids = torch.randint(VOCAB, shape, generator=generator)
    documents, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for n, row in enumerate(lengths):
        start = 0
        for i, length in enumerate(row):
            documents[n, start : start + length] = i
            positions[n, start : start + length] = torch.arange(length)
            start += length
    mask = (torch.rand(shape, generator=generator) < 0.9) & (documents >= 0)
    return Sequences(ids, mask, documents, positions)


TRAIN_CONFIG = TrainConfig(
    max_steps=12, batch_size=4, num_steps=2, learning_rate=3e-3, warmup_steps=2, log_every=1,
    evaluate_every=6, checkpoint_every=4,
)  # fmt: skip


class GreedyTexts:
    """Sequences that the tiny target writes, over and over."""

    fingerprint = "greedy"

    def __init__(self, target_dir: Path, count: int = 16, length: int = 24):
        prompts = [[7 * i % VOCAB, i] for i in range(count)]
        outputs = LLM(target_dir, device="cpu", dtype="float32").generate(
            prompts, SamplingParams(max_tokens=length - 2, ignore_eos=True)
        )
        rows = [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)]
        ids = torch.tensor(rows)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, :2] = False
        self.all = Sequences(ids, mask, torch.zeros_like(ids), torch.arange(length).expand_as(ids))

    def take(self, rows: torch.Tensor) -> Sequences:
        return Sequences(*(t[rows] for t in (
            self.all.input_ids, self.all.loss_mask, self.all.document_ids, self.all.positions
        )))  # fmt: skip

    def batches(self, batch_size: int, first: int) -> Iterator[Sequences]:
        number = first
        while True:
            yield self.take((torch.arange(batch_size) + number * batch_size) % 12)
            number += 1
