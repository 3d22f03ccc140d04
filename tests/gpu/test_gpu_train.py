"""Training on CUDA: the CPU's loss and gradients, and steps that wait for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loading import UNPACKED
from steady import no_waiting
from tiny import tiny_model_dir
from torch import Tensor
from unrolled import CAPTURED, TRAIN_CONFIG, VOCAB, padded_texts

from trtspec.checkpoints.weights import load_decoder
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.base import DraftHead
from trtspec.train.blocks import Anchors
from trtspec.train.create_head import create_head, trainable
from trtspec.train.losses import Objective, judge
from trtspec.train.new_head import NewHead
from trtspec.train.trainer import Trainer
from trtspec.train.unroll import Use, teach, unroll

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = padded_texts([[20, 9], [30], [12, 12]], 32)


def _pair(path: Path, kind: str, dtype: torch.dtype, device: str) -> tuple[Decoder, DraftHead]:
    if not (path / "model").exists():
        tiny_model_dir(path, seed=1, num_hidden_layers=6).rename(path / "model")
    target = load_decoder(
        path / "model", replace(UNPACKED, dtype=dtype, device=torch.device(device))
    )
    spec = NewHead(
        kind=kind,
        layers_to_capture=CAPTURED,
        block_size=4 if kind == "dspark" else 5,
        mask_token_id=VOCAB,
    )
    draft_ids = torch.arange(VOCAB) if kind == "eagle3" else None
    head = create_head(spec, target, draft_ids, dtype, seed=5)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainable(head).items():  # what begins as nothing
        if any(part in name for part in ("markov_w2", "conv.", "codebook")):
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return target, head


@pytest.mark.parametrize("objective", [Objective(), Objective(uses_dpace=True, variation=0.9)])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_loss_and_gradients_are_those_of_the_cpu(
    tmp_path: Path, kind: str, objective: Objective
) -> None:
    found: list[dict[str, Tensor]] = []
    for device in ("cpu", "cuda"):
        target, head = _pair(tmp_path, kind, torch.float32, device)
        texts = TEXTS.to(torch.device(device))
        teacher = teach(target, head, texts)
        use = Use(anchors=Anchors(count=9))
        steps = unroll(head, texts, teacher.hidden, 4, use=use)
        loss, scores = judge(head, steps, teacher, objective)
        loss.backward()
        grads = {n: p.grad.cpu() for n, p in trainable(head).items() if p.grad is not None}
        right = {f"right {i}": s.is_right.float().cpu() for i, s in enumerate(scores)}
        found.append({"loss": loss.detach().cpu(), **grads, **right})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("weights", "optimizer"), [("exponential", "adamw"), ("d-pace", "adamw"), ("d-pace", "muon")]
)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2", "dspark"])
def test_an_optimizer_step_waits_for_nothing(
    tmp_path: Path, kind: str, weights: str, optimizer: str
) -> None:
    target, head = _pair(tmp_path, kind, torch.bfloat16, "cuda")
    config = replace(
        TRAIN_CONFIG, num_steps=4, num_anchors=9, position_weights=weights, optimizer=optimizer
    )
    trainer = Trainer(target, head, None, [], config, tmp_path / "run")  # type: ignore[arg-type]
    for _ in range(2):  # kernels are compiled
        trainer._train_step(TEXTS)
    with no_waiting():
        line = trainer._train_step(TEXTS)
    assert line["loss"]() > 0
