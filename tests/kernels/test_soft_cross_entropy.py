"""The fused loss against autograd of its definition, in float64."""

from __future__ import annotations

import pytest
import torch

from trtspec.ops.tokens import soft_cross_entropy as loss_module
from trtspec.ops.tokens.soft_cross_entropy import Judgement, Product, draft_loss_, linear_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("variation", [0.0, 0.9])
@pytest.mark.parametrize("vocab", [7, 64, 5001])
def test_sum_and_gradients_are_the_definition(
    vocab: int, variation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits that are a sum of two products, their rows weighed in pairs by what they are."""
    monkeypatch.setattr(loss_module, "ROWS", 5)  # several parts of whole pairs, the last smaller
    shapes = (10, 16), (vocab, 16), (10, 3), (vocab, 3)
    given = [_random(*shape, seed=i) for i, shape in enumerate(shapes)]
    theirs = 3 * _random(20, vocab, seed=13)
    rows = torch.tensor([3, 19, 0, 7, 7, 1, 12, 5, 4, 18], device=DEVICE)
    counts = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool, device=DEVICE)

    def weigh(chances: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert chances.shape == counts.shape and chances.shape[1] == 2
        return (1 + chances.flip(1)) * torch.tensor([1.0, 0.3], device=DEVICE)

    judgement = Judgement(theirs, rows, counts, variation, group=2, weigh=weigh)
    ours = [x.clone().requires_grad_() for x in given]
    total, found = linear_loss([Product(*ours[:2]), Product(*ours[2:])], judgement)
    (0.5 * total).backward()

    exact = [x.double().requires_grad_() for x in given]
    logits = exact[0] @ exact[1].T + exact[2] @ exact[3].T
    p, q = theirs.double()[rows].softmax(-1), logits.softmax(-1)
    chances = q.detach().gather(1, theirs[rows].argmax(-1, keepdim=True))[:, 0]
    losses = (1 - variation) * -(p * logits.log_softmax(-1)).sum(-1)
    losses = (losses + variation * (q - p).abs().sum(-1) / 2) * counts
    expected = (losses * weigh(chances.view(-1, 2), counts.view(-1, 2)).flatten()).sum()
    (0.5 * expected).backward()
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.loss.double(), losses, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.chance.double(), chances, atol=1e-5, rtol=1e-4)
    assert torch.equal(found.best, logits.argmax(-1))
    for mine, reference in zip(ours, exact, strict=True):
        assert mine.grad is not None and reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, atol=4e-5, rtol=1e-4)


def test_a_frozen_weight_gets_no_gradient_and_no_rows_no_loss() -> None:
    hidden, weight = _random(3, 8, seed=1).requires_grad_(), _random(9, 8, seed=2)
    theirs, rows = _random(3, 9, seed=3), torch.arange(3, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    total, _ = linear_loss([Product(hidden, weight)], Judgement(theirs, rows, counts))
    total.backward()
    assert float(total.detach()) == 0 and hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is None
    none = Judgement(theirs, rows[:0], counts[:0])
    total, found = linear_loss([Product(hidden[:0], weight)], none)
    assert float(total.detach()) == 0 and found.best.shape == (0,)


@pytest.mark.parametrize("variation", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 300, 9001])
def test_the_kernel_is_its_twin(vocab: int, dtype: torch.dtype, variation: float) -> None:
    """Equal maxima, far apart logits, a last block that is not full."""
    name = "trtspec.ops.tokens.triton_soft_cross_entropy"
    triton_loss = pytest.importorskip(name, reason="needs triton")
    logits, theirs = _random(6, vocab, seed=4), 20 * _random(9, vocab, seed=5)
    logits[2], logits[3] = logits[2].round(), 40 * logits[3]
    theirs[1, : vocab // 2] = theirs[2, vocab // 2 :] = -torch.inf  # tokens that cannot follow
    logits[5, vocab // 2 :] = -torch.inf
    logits[4, : vocab // 2] = theirs[1, : vocab // 2]
    rows = torch.tensor([8, 0, 3, 3, 1, 2], device=DEVICE)
    counts = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    ours, twin = logits.to(dtype, copy=True), logits.to("cpu", dtype, copy=True)
    found = triton_loss.draft_loss_(ours, theirs.to(dtype), rows, counts, variation)
    given = theirs.to(dtype).cpu(), rows.cpu(), counts.cpu()
    loss, best, chance = draft_loss_(twin, *given, variation)
    torch.testing.assert_close(found[0].cpu(), loss, atol=1e-3, rtol=1e-4)
    assert torch.equal(found[1].cpu(), best)
    torch.testing.assert_close(found[2].cpu(), chance, atol=1e-5, rtol=1e-4)
    atol = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours.cpu().float(), twin.float(), atol=atol, rtol=atol)
