"""Tiny drafters taught to draft along a few texts of their target, for the doctor to examine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loading import UNPACKED, UNPACKED_HEAD
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trtspec import LLM, SamplingParams
from trtspec.checkpoints.heads.load import load_head, read_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder, placements
from trtspec.doctor import texts_of
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.eagle import Eagle3Head
from trtspec.train.records import DraftStep, Sequences
from trtspec.train.unroll import Teacher, teach, unroll

CPU, F32 = torch.device("cpu"), torch.float32
Tensors = dict[str, Tensor]
Change = Callable[[dict[str, Any], Tensors], None]


def load_target(path: Path) -> Decoder:
    return load_decoder(path, UNPACKED)


def greedy_texts(target_dir: Path, count: int = 10, length: int = 30) -> Sequences:
    prompts = [[7 * i % 90 + 3, i + 3] for i in range(count)]
    outputs = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64).generate(
        prompts, SamplingParams(max_tokens=length - 2, ignore_eos=True)
    )
    return texts_of(prompts, [o.outputs[0].token_ids for o in outputs], CPU)


@dataclass
class Trained:
    """A drafter's directory, its target, and the texts that it knows."""

    target: Decoder
    texts: Sequences
    directory: Path

    def sabotaged(self, tmp_path: Path, change: Change) -> Path:
        out = tmp_path / "sabotaged"
        shutil.copytree(self.directory, out)
        raw, tensors = json.loads((out / "config.json").read_text()), _tensors(out)
        change(raw, tensors)
        (out / "config.json").write_text(json.dumps(raw))
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
        return out


def trained_head(
    target_dir: Path, head_dir: Path, kind: str, steps: int, rate: float = 5e-3
) -> Trained:
    """Trains the head in `head_dir` where it stands, along `unroll`, and its mask_hidden."""
    target, texts = load_target(target_dir), greedy_texts(target_dir)
    head = load_head(
        head_dir,
        target,
        HeadRequest(kind=kind, num_mtp_layers=1),
        UNPACKED_HEAD,
    )
    tensors, own = _tensors(head_dir), dict(_places(head, head_dir, kind))
    parameters = {id(p): p for p, _, _, _ in own.values()}
    learned = list(parameters.values())
    mask = None
    if "mask_hidden" in tensors:
        mask = nn.Parameter(tensors["mask_hidden"].clone())
        learned.append(mask)
    for parameter in learned:
        parameter.requires_grad_(True)
    teacher = teach(target, head, texts)

    def drafts() -> Iterator[tuple[DraftStep, Tensor]]:
        if mask is not None:
            assert isinstance(head, Eagle3Head)
            head.mask_hidden = head.project_target_hidden(mask)[0]
        for step in unroll(head, texts, teacher.hidden, 3, teacher.keys):
            yield step, head.compute_logits(step.hidden[step.rows], step.step)

    fit(learned, drafts, teacher, steps, rate)
    for name, (parameter, start, rows, order) in own.items():
        part = parameter.data.narrow(0, start, rows)
        tensors[name] = (part if order is None else part[order.argsort()]).clone()
    if mask is not None:
        tensors["mask_hidden"] = mask.data
    save_file(tensors, head_dir / "model.safetensors")
    return Trained(target, texts, head_dir)


def fit(
    parameters: list[nn.Parameter], drafts: Callable[[], Iterator[tuple[DraftStep, Tensor]]],
    teacher: Teacher, steps: int, rate: float,
) -> None:  # fmt: skip
    """Cross-entropy with the target's choices."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(
            F.cross_entropy(logits, teacher.choices[step.teacher_rows]) for step, logits in drafts()
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def _tensors(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def _places(
    head: nn.Module, head_dir: Path, kind: str
) -> Iterator[tuple[str, tuple[nn.Parameter, int, int, Tensor | None]]]:
    """Tensor's name in the file -> (parameter, first row, rows, their order)."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        names = {
            n: s.name
            for n, s in read_head(head_dir, None, stack, HeadRequest(kind=kind)).tensors.items()
        }
    for name, place in placements(head).items():
        parameter = getattr(head.get_submodule(place.module), place.leaf)
        if name in names:
            yield names[name], (parameter, place.start, place.shape[0], place.order)
