"""The fused loss against autograd of its definition, in float64."""

from __future__ import annotations

import pytest
import torch

from trtspec.ops.tokens import soft_cross_entropy as loss_module
from trtspec.ops.tokens.soft_cross_entropy import linear_soft_cross_entropy, soft_cross_entropy_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("vocab", [7, 64, 5001])
def test_sum_and_gradients_are_the_definition(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "ROWS", 4)  # several parts, the last one smaller
    hidden, weight = _random(10, 16, seed=1), _random(vocab, 16, seed=2)
    theirs = 3 * _random(20, vocab, seed=3)
    rows = torch.tensor([3, 19, 0, 7, 7, 1, 12, 5, 4, 18], device=DEVICE)
    counts = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool, device=DEVICE)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    total, best = linear_soft_cross_entropy(*ours, theirs, rows, counts)
    (0.5 * total).backward()

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = exact[0] @ exact[1].T
    p = theirs.double()[rows].softmax(-1)
    expected = (-(p * logits.log_softmax(-1)).sum(-1) * counts).sum()
    (0.5 * expected).backward()
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(best, logits.argmax(-1))
    for mine, reference in zip(ours, exact, strict=True):
        assert mine.grad is not None and reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, atol=2e-5, rtol=1e-4)


def test_a_frozen_weight_gets_no_gradient_and_no_rows_no_loss() -> None:
    hidden, weight = _random(3, 8, seed=1).requires_grad_(), _random(9, 8, seed=2)
    counts = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    rows = torch.arange(3, device=DEVICE)
    total, _ = linear_soft_cross_entropy(hidden, weight, _random(3, 9, seed=3), rows, counts)
    total.backward()
    assert float(total.detach()) == 0 and hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is None
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    total, best = linear_soft_cross_entropy(
        hidden[:0], weight, _random(3, 9, seed=3), none, counts[:0]
    )
    assert float(total.detach()) == 0 and best.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 300, 9001])
def test_the_kernel_is_its_twin(vocab: int, dtype: torch.dtype) -> None:
    """Equal maxima, far apart logits, a last block that is not full."""
    name = "trtspec.ops.tokens.triton_soft_cross_entropy"
    triton_loss = pytest.importorskip(name, reason="needs triton")
    logits, theirs = _random(6, vocab, seed=4), 20 * _random(9, vocab, seed=5)
    logits[2], logits[3] = logits[2].round(), 40 * logits[3]
    rows = torch.tensor([8, 0, 3, 3, 1, 2], device=DEVICE)
    counts = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    ours, twin = logits.to(dtype, copy=True), logits.to("cpu", dtype, copy=True)
    loss, best = triton_loss.soft_cross_entropy_(ours, theirs.to(dtype), rows, counts)
    given = theirs.to(dtype).cpu(), rows.cpu(), counts.cpu()
    expected = soft_cross_entropy_(twin, *given)
    torch.testing.assert_close(loss.cpu(), expected[0], atol=1e-3, rtol=1e-4)
    assert torch.equal(best.cpu(), expected[1])
    atol = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours.cpu().float(), twin.float(), atol=atol, rtol=atol)
