"""Sampled speculation on CUDA: distributions by chi-square, and rows of a real vocabulary."""

from __future__ import annotations

import pytest
import sampled_kernels as small
import torch
from matrix import covering
from sampled_tables import RULES, SUBSET, decode_tables, expected_distribution, p_value
from torch import Tensor

from trtspec.ops.launch import dispatch
from trtspec.ops.tokens.sample import filter_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
V = 128_256


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "setting",
    [
        {}, {"d2t": SUBSET}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 1.5},
        {"drafts_sometimes": True}, {"is_broken": True},
    ],
    ids=["plain", "d2t", "top_k", "top_p", "hot", "fewer drafts", "broken drafter"],
)  # fmt: skip
def test_texts_are_distributed_as_the_targets(rule: str, setting: dict[str, object]) -> None:
    """As `tests/sampling/test_rejection.py` for the twins: 100,000 requests, three tokens."""
    with torch.device("cuda"):
        on_device = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in setting.items()}
        texts, _ = decode_tables(rule, **on_device)  # type: ignore[arg-type]
    given = {k: v for k, v in setting.items() if k in ("temperature", "top_k", "top_p")}
    assert p_value(texts.cpu(), expected_distribution(**given)) > 1e-3  # type: ignore[arg-type]


@covering(rule=RULES, filters=["", "k", "p", "kp"], has_table=[False, True])
def test_long_rows(
    rule: str, filters: str, has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels say what their twins do: a vocabulary of 128,256 tokens, drafts from 32,000."""
    monkeypatch.setattr(small, "V", V)
    monkeypatch.setattr(small, "SUBSET", torch.arange(0, V, 4)[:32_000])
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_module", lambda name: None)
        different = total = 0
        for seed in range(4):
            case = small.SampledCase(rule, seed, filters=filters, has_table=has_table)
            ours, twin = case.kernels(), case.twin()
            different += int((ours[0] != twin[0]).any(1).sum())
            total += len(ours[1])
    # Sums of 128,256 terms in another order: a call as close as that may fall the other way.
    assert different <= 1, f"{different} of {total} requests differ"


@covering(**{
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
    "top_k,top_p": [
        (50, 1.0), (0, 0.9), (20, 0.95), (0, 0.999), (5000, 1.0), (100_000, 0.5),
    ],
    "scale": [1.0, 6.0],  # many candidates, few
})  # fmt: skip
def test_filters_of_long_rows(dtype: torch.dtype, top_k: int, top_p: float, scale: float) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    logits = (scale * torch.randn(6, V, generator=generator, device="cuda")).to(dtype)
    temperatures = torch.tensor([0.7, 1.0, 1.3] * 2, device="cuda")
    ks = torch.full((6,), top_k, dtype=torch.int32, device="cuda")
    ps = torch.full((6,), top_p, device="cuda")
    kept, sums = small.kept_by_kernels(logits, temperatures, ks, ps)
    scaled = (logits.float() - logits.float().amax(1, keepdim=True)) / temperatures[:, None]
    wanted = filter_logits(scaled, ks, ps) > float("-inf")
    weights = (scaled.double().exp() * wanted).sum(1)
    # float32 sums of so many terms agree to some 1e-6, and equal logits are cut by count: that many
    # may fall on the other side.
    assert ((kept != wanted).sum(1) <= 2 + wanted.sum(1) * 1e-3).all()
    torch.testing.assert_close(sums.double(), weights, atol=0, rtol=1e-4)
    if top_p == 1.0:
        assert torch.equal(kept, wanted)
