"""Trains a draft head for a frozen target.

The loss is the weighted sum over the head's unrolled steps of the soft cross-entropy with the
target (EAGLE-3's training-time test, arXiv:2503.01840), of DSpark heads mostly of the total
variation (`losses.py`). Weights are kept in fp32 and used in the target's dtype; AdamW, or with it
Muon (`muon.py`), a cosine after a linear warm-up, clipped gradients.

A run directory holds `log.jsonl` (a line per logged step), `checkpoint.pt` (fp32 weights,
optimizer, position in the data; replaced atomically), and the head at the last checkpoint, ready to
serve. The order of data depends on (seed, epoch) alone, so a resumed run goes on as if it had not
stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from ..api.sampling_params import MAX_SEED
from ..checks import is_int, is_list, is_number
from ..config import MAX_DRAFT_LEN, require_int
from ..errors import CheckpointError, ConfigError, shown
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from .blocks import Anchors
from .create_head import trainable
from .evaluation import Evaluation, evaluate
from .interrupts import held_back
from .losses import DECAY, POSITION_WEIGHTS, Objective, decay_of_block, judge
from .muon import MuonAndAdamW
from .new_head import BLOCK_KINDS, block_rows
from .records import Sequences
from .run_directory import CHECKPOINT, LOG, PARTIAL, check_run_directory, read_log
from .save_head import save_head
from .unroll import Use, teach, unroll

VARIATION = {"dspark": 0.9}
"""Share of total variation in the loss, by the head's kind, as DSpark's authors train."""
OPTIMIZERS = ("adamw", "muon")
BEFORE: dict[str, Any] = {"optimizer": "adamw", "windows": [], "rotation and norms": None}
"""Settings of runs that were begun before they could be given."""
Progress = Callable[[dict[str, Any]], None]
logger = logging.getLogger(__name__)
_OPTIONS = {
    "max_steps": " (--steps)",
    "num_steps": " (--unroll, --num-layers or --block-size)",
    "num_anchors": " (--anchors)",
    "variation": " (--total-variation)",
    "earlier head": " (--init-head)",
    "data": ", or how it is cut (--length, --seed)",
}
"""Of the command line, where they have another name."""
DAMAGE = RuntimeError, LookupError, ValueError, TypeError, AttributeError, struct.error
"""What reading a checkpoint with other contents raises."""


def damaged(path: Path, error: Exception) -> CheckpointError:
    what = (str(error).splitlines() or [type(error).__name__])[0]  # torch explains at length
    if isinstance(error, UnpicklingError):  # whose text tells to read it all the same
        what = "it is not what torch.save writes of tensors"
    return CheckpointError(
        f"{path} is damaged ({what}). Give another --out, or remove it and the head beside it to "
        "start again."
    )


def _told(names: list[str], there: dict[str, Any], here: dict[str, Any]) -> str:
    """Says which settings differ, with their values where these are plain."""
    told = list[str]()
    for name in names:
        if name == "step_decay" and "num_steps" in names:  # which decides it
            continue
        pair = there.get(name, 0), here.get(name, 0)  # a share of 0 is left out
        is_plain = all(isinstance(value, int | float | str) for value in pair)
        is_set = is_plain and name in TrainConfig.__annotations__
        values = f", {pair[0]!r} there and {pair[1]!r} here" if is_set else ""
        told.append(f"{name}{_OPTIONS.get(name, '')}{values}")
    return "; ".join(told) or "the head's sizes"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Batches are `batch_size` packed sequences of `length` tokens.

    Raises:
        ConfigError: a value is out of range.
    """

    num_steps: int = 6  # of the head, unrolled; vanilla MTP: its layers; of blocks: their drafts
    num_anchors: int = 64  # blocks of a sequence, drawn anew at every step
    position_weights: str = "exponential"  # of a block's drafts: one of `POSITION_WEIGHTS`
    step_decay: float | None = None  # of weights; None is 0.8, of blocks what their size asks for
    variation: float | None = None  # share of total variation in the loss; None is the kind's
    selector_weight: float = 1.0  # of DFlash2's choice among candidates in the loss
    optimizer: str = "adamw"  # one of `OPTIMIZERS`
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.02  # share of learning_rate that the cosine ends at
    warmup_steps: int = 50
    max_steps: int = 2000
    batch_size: int = 48
    clip: float = 0.5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    log_every: int = 20
    evaluate_every: int = 200
    checkpoint_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require_int(self, "num_steps", 1, MAX_DRAFT_LEN)
        counts = "max_steps", "num_anchors", "batch_size"
        for name in (*counts, "log_every", "evaluate_every", "checkpoint_every"):
            require_int(self, name, 1, None)
        require_int(self, "warmup_steps", 0, None)
        require_int(self, "seed", 0, MAX_SEED)
        for name in ("clip", "selector_weight"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"TrainConfig.{name}={value!r}: it must be a number > 0.")
        for name in ("learning_rate", "step_decay", "final_learning_rate"):
            value = getattr(self, name)
            if name == "step_decay" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"TrainConfig.{name}={value!r}: it must be in (0, 1].")
        decay, betas = self.weight_decay, self.betas
        if not is_number(decay) or not 0 <= decay < math.inf:
            raise ConfigError(f"TrainConfig.weight_decay={decay!r}: it must be a number >= 0.")
        if not (
            is_list(betas) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)
        ):
            raise ConfigError(f"TrainConfig.betas={betas!r}: it must be two numbers in [0, 1).")
        share = self.variation
        if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"TrainConfig.variation={share!r}: it must be in [0, 1].")
        for name, allowed in (("position_weights", POSITION_WEIGHTS), ("optimizer", OPTIMIZERS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"TrainConfig.{name}={value!r}: allowed are {', '.join(allowed)}."
                )

    def objective(self, head: DraftHead) -> Objective:
        """Returns what is minimized for a head."""
        kind, decay, variation = head.config.kind, self.step_decay, self.variation
        is_block = kind in BLOCK_KINDS
        if decay is None:
            decay = decay_of_block(block_rows(head.config)) if is_block else DECAY
        if variation is None:
            variation = VARIATION.get(kind, 0.0)
        return Objective(
            decay=decay,
            uses_dpace=is_block and self.position_weights == "d-pace",
            variation=variation,
            selector=self.selector_weight,
        )

    def rate(self, step: int) -> float:
        """Returns the learning rate of step 0, 1, …"""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        low = self.final_learning_rate
        return self.learning_rate * (low + (1 - low) * cosine)


class TextSource(Protocol):
    """Packed sequences in the order of training."""

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the sequences and their packing."""
        ...

    def batches(self, batch_size: int, first: int) -> Iterator[Sequences]:
        """Yields batches number `first`, `first` + 1, …, without end."""
        ...


class Trainer:
    """One training run.

    Args:
        target: in eval mode, its weights not packed. head: of `create_head`.
        data, held_out: sequences to train on, and to judge the head by.
        out: the run's directory.
        head_format: as in `save_head`.
        notes: written into the head's config.json.
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead,
        data: TextSource,
        held_out: list[Sequences],
        config: TrainConfig,
        out: Path,
        *,
        head_format: str = "raw",
        notes: dict[str, Any] | None = None,
    ):
        trained = head.config.trained_draft_len
        if head.config.kind in BLOCK_KINDS and config.num_steps != trained:
            raise ConfigError(
                f"TrainConfig.num_steps={config.num_steps}, but the head's block has {trained} "
                "tokens to be drafted: give the same number."
            )
        self.target, self.head, self.data, self.held_out = target, head, data, held_out
        self.config, self.out, self.head_format = config, Path(out), head_format
        self.objective = config.objective(head)
        self.notes = dict(notes or {})
        self.parameters = trainable(head)
        self.masters = {
            name: p.detach().float().clone().requires_grad_(True)
            for name, p in self.parameters.items()
        }
        options: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": config.betas,
            "weight_decay": config.weight_decay,
            "fused": target.embed_tokens.weight.is_cuda,
        }
        self.optimizer: torch.optim.Optimizer | MuonAndAdamW
        if config.optimizer == "muon":
            self.optimizer = MuonAndAdamW(head, self.masters, **options)
        else:
            self.optimizer = torch.optim.AdamW(list(self.masters.values()), **options)
        self.step = self.kept_step = 0
        self.loss_shares = torch.zeros((), device=target.embed_tokens.weight.device)  # summed
        self.log: list[dict[str, Any]] = []

    def resume(self) -> bool:
        """Resumes from the directory's checkpoint. Returns False if there is none.

        Raises:
            CheckpointError: it is damaged, or of another run, or as `check_run_directory`.
        """
        check_run_directory(self.out)
        path = self.out / CHECKPOINT
        if not path.exists():
            self._cut_log()
            return False
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            masters, run, step = dict(saved["masters"]), BEFORE | saved["run"], saved["step"]
            shapes = {name: master.shape for name, master in masters.items()}
            optimizer, notes = saved["optimizer"], dict(saved["notes"])
        except (*DAMAGE, OSError, EOFError, UnpicklingError) as error:
            raise damaged(path, error) from error
        expected = self._run() | {"earlier head": self.notes.get("init_head")}
        run = {**run, "earlier head": notes.get("init_head")}
        names = dict.fromkeys([*expected, *run])
        differing = [name for name in names if run.get(name) != expected.get(name)]
        same_shapes = shapes == {name: master.shape for name, master in self.masters.items()}
        if differing or not same_shapes:
            of_run = {*TrainConfig.__annotations__, "data"}
            same_head = same_shapes and of_run.issuperset(differing)
            begin = f" (and --init-head {self.out}, to begin with that head)" if same_head else ""
            raise CheckpointError(
                f"{path} is of another run. What differs: {_told(differing, run, expected)}. "
                f"Give another --out{begin}, or the same options."
            )
        if not is_int(step, 0, most := self.config.max_steps):
            raise damaged(path, ValueError(f"its step is {shown(step)}, of {most}"))
        for name, master in self.masters.items():
            master.data.copy_(masters[name])
        try:
            self.optimizer.load_state_dict(optimizer)
        except DAMAGE as error:
            raise damaged(path, error) from error
        self.step = self.kept_step = step
        self.notes |= notes
        self._use_masters()
        self._cut_log()
        return True

    def train(self, progress: Progress | None = None) -> Evaluation:
        """Runs to `max_steps`; returns the last evaluation on the held-out sequences.

        Raises:
            KeyboardInterrupt: Ctrl-C; the step that ran is ended and kept.
        """
        with held_back() as is_interrupted:
            return self._train(progress, is_interrupted)

    def _train(self, progress: Progress | None, is_interrupted: threading.Event) -> Evaluation:
        config = self.config
        self.out.mkdir(parents=True, exist_ok=True)
        evaluation = Evaluation()
        if self.step >= config.max_steps:  # perhaps a disk was full when the head was written
            self._save_head()
        started, tokens, first = time.perf_counter(), 0, self.step
        batches = self.data.batches(config.batch_size, self.step)
        while self.step < config.max_steps:
            sequences = next(batches)
            line = self._train_step(sequences)
            tokens += sequences.input_ids.numel()
            self.step += 1
            last = self.step == config.max_steps
            evaluates = self.step % config.evaluate_every == 0 or last
            saves = self.step % config.checkpoint_every == 0 or last
            logs = self.step % config.log_every == 0 or evaluates or saves
            saves = saves or is_interrupted.is_set()
            if logs or saves:
                line = {k: v() if callable(v) else v for k, v in line.items()}
                line["tokens_per_second"] = round(tokens / (time.perf_counter() - started))
                if not all(math.isfinite(line[name]) for name in ("loss", "gradient_norm")):
                    raise ConfigError(
                        f"At step {self.step} the loss is {line['loss']} and the gradient's norm "
                        f"{line['gradient_norm']}: training has diverged. "
                        f"Lower the learning rate ({config.learning_rate})."
                        + (f" Step {self.kept_step} is kept in {self.out}." * (self.kept_step > 0))
                    )
                seen = self.step - first
                if first < config.log_every <= seen or (last and not first):  # else it was checked
                    self._check_learns()
            if evaluates:
                evaluation = self._evaluate(line)
            if logs:
                self._write_log(line)
            if saves:
                self.checkpoint()
            if logs and progress is not None:  # last: it is the caller's, and may raise
                progress(line)
            if is_interrupted.is_set() and self.kept_step == self.step:
                raise KeyboardInterrupt
        if is_interrupted.is_set():
            raise KeyboardInterrupt
        return evaluation

    def _train_step(self, sequences: Sequences) -> dict[str, Any]:
        config, rate = self.config, self.config.rate(self.step)
        sequences = sequences.to(self.target.embed_tokens.weight.device)
        teacher = teach(self.target, self.head, sequences)
        use = Use(anchors=Anchors(config.num_anchors, seed=config.seed + self.step))
        with torch.enable_grad():
            steps = unroll(self.head, sequences, teacher.hidden, config.num_steps, use=use)
            loss, scores = judge(self.head, steps, teacher, self.objective)
        loss.backward()
        for name, master in self.masters.items():
            grad = self.parameters[name].grad
            master.grad = torch.zeros_like(master) if grad is None else grad.float()
            self.parameters[name].grad = None
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._use_masters()
        loss_share = torch.stack([s.loss_share for s in scores]).mean()
        self.loss_shares += loss_share
        # Read when logged.
        return {
            "step": self.step + 1,
            "loss": lambda: round(float(loss.detach()), 5),
            "loss_share": lambda: round(float(loss_share), 4),
            "gradient_norm": lambda: round(float(norm), 4),
            "optimizer": config.optimizer,
            "learning_rate": rate,
            "accuracy": lambda: [
                round(float(s.is_right.sum()) / max(1, int(s.is_counted.sum())), 4) for s in scores
            ],
        }

    def _evaluate(self, line: dict[str, Any]) -> Evaluation:
        """Judges the head by the held-out sequences. Adds what is found to a line of the log."""
        variation, num_steps = self.objective.variation, self.config.num_steps
        found = evaluate(self.target, self.head, self.held_out, num_steps, variation)
        if not found.is_judged:
            if self.notes.get("held_out_conditional", 0) is not None:  # said once
                logger.warning(
                    "The held-out text has no place to judge the head by: its answers are too "
                    "short, or the draft vocabulary lacks their tokens. Give more text."
                )
            self.notes["held_out_conditional"] = None
            return found
        rates = [round(rate, 4) for rate in found.conditional]
        self.notes["held_out_conditional"] = rates
        line["held_out_loss"] = round(found.loss, 4)
        line["held_out_conditional"] = rates
        line["held_out_acceptance_length"] = round(found.acceptance_length, 4)
        return found

    def _check_learns(self) -> None:
        """Raises ConfigError where no row has had a loss."""
        if float(self.loss_shares):
            return
        cure = "Give text with longer answers of the assistant, or longer rows (--length)."
        if self.head.d2t is not None:
            cure = (
                f"The target's greedy tokens are not among the {len(self.head.d2t)} tokens that "
                "the head drafts among, or answers are too short. Give a larger "
                "--draft-vocab-size, or text that the target wrote (--self-generate)."
            )
        raise ConfigError(
            f"Up to step {self.step} no row of the text has had a loss, so nothing is learned. "
            f"{cure}"
        )

    @torch.no_grad()
    def _use_masters(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    def checkpoint(self) -> None:
        """Writes the checkpoint and the head.

        Raises:
            ConfigError: the disk is full or cannot be written; the checkpoint before is kept.
        """
        path = self.out / CHECKPOINT
        partial = self.out / PARTIAL
        try:
            torch.save(
                {
                    "masters": {n: m.detach().cpu() for n, m in self.masters.items()},
                    "optimizer": self.optimizer.state_dict(),
                    "step": self.step,
                    "run": self._run(),
                    "notes": self.notes,
                },
                partial,
            )
            self._save_head()
            os.replace(partial, path)
            self.kept_step = self.step
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as the latter
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"The checkpoint of step {self.step} could not be written to {self.out} ({error}). "
                "Free some space and run the same command: it goes on from the checkpoint before."
            ) from error

    def _save_head(self) -> None:
        save_head(
            self.head,
            self.target.config,
            self.out,
            format=self.head_format,
            weights={n: m.detach() for n, m in self.masters.items()},
            notes={**self.notes, "steps": self.step, "config": asdict(self.config)},
        )

    def _run(self) -> dict[str, Any]:
        """Returns the settings that must be the same to resume a run."""
        same = asdict(self.config)
        for name in ("log_every", "evaluate_every", "checkpoint_every"):
            same.pop(name)
        same |= {"step_decay": self.objective.decay, "variation": self.objective.variation}
        if self.head.config.kind not in BLOCK_KINDS:
            for name in ("num_anchors", "position_weights"):
                same.pop(name)
        if not same["variation"]:
            same.pop("variation")
        if not self.head.config.selector_rank:
            same.pop("selector_weight")
        same["betas"] = list(same["betas"])
        config, weight = self.head.config, self.target.embed_tokens.weight
        windows = [config.decoder.window(i) for i in range(config.decoder.num_layers)]
        digest = hashlib.sha256(weight[:64].float().cpu().numpy().tobytes())
        digest.update(self.target.norm.weight.float().cpu().numpy().tobytes())
        if self.head.d2t is not None:
            digest.update(self.head.d2t.cpu().numpy().tobytes())
        return {
            **same,
            "data": self.data.fingerprint,
            "head": config.kind,
            "captured layers": list(config.layers_to_capture),
            "windows": windows if any(windows) and config.kind != "mtp" else [],
            "rotation and norms": self._other_than_target(),
            **({} if config.mask_token_id is None else {"mask token": config.mask_token_id}),
            **({"context embeddings": True} if config.context_embeddings else {}),
            "dtype": str(weight.dtype),
            "target or draft vocabulary": digest.hexdigest()[:16],
        }

    def _other_than_target(self) -> list[Any] | None:
        """Returns the head's RoPE and norms' epsilon, None where they are the target's."""
        here, there = (
            [c.rope_parameters, c.rms_norm_eps]
            for c in (self.head.config.decoder, self.target.config)
        )
        return None if here == there else here

    def _write_log(self, line: dict[str, Any]) -> None:
        self.log.append(line)
        with (self.out / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _cut_log(self) -> None:
        """Drops lines after the checkpoint: those steps run again."""
        path = self.out / LOG
        if not path.exists():
            return
        self.log = [line for line in read_log(path) if line["step"] <= self.step]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(line) + "\n" for line in self.log))
        os.replace(partial, path)
