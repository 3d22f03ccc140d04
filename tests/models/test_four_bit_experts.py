"""Experts of 4 bits that stay so, also over ranks: on the CPU here, in engines on Hopper."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from four_bits import Form, four_bits
from kept_four_bits import KEPT, has_kernels, load, logits_of
from quantized import write
from safetensors.torch import load_file
from thread_ranks import ThreadRanks
from tiny import tiny_model_dir
from torch import Tensor

from trtspec.checkpoints import place_four_bits
from trtspec.checkpoints.four_bit_parts import FourBitParts
from trtspec.checkpoints.place import WeightForm
from trtspec.distributed.comm import Communicator
from trtspec.distributed.parallel import Parallel
from trtspec.executor.cuda_graphs.context_inputs import seconds_of_row
from trtspec.layers.experts import Experts
from trtspec.models.decoder import Decoder
from trtspec.ops.layer.four_bits import FourBitWeight
from trtspec.ops.layer.fp8 import Fp8Weight

FORMS = [
    Form("pack-quantized"), Form("awq", group=128, symmetric=False), Form("gptq", group=64),
    Form("nvfp4-pack-quantized"), Form("modelopt"),
]  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "moe_intermediate_size": 512,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64}, "mixtral": {"intermediate_size": 512},
    "deepseek_v3": {"num_key_value_heads": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernels(monkeypatch, True)


def _mixtures(model: Decoder) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def _checkpoint(name: str, path: Path, form: Form, **sizes: Any) -> tuple[Path, Tensor]:
    """One whose experts have 4 bits, and the logits of their values."""
    path = tiny_model_dir(path, name, **{**SIZES, **MORE[name], **sizes})
    twin = load_file(path / "model.safetensors")
    is_random = form.method != "mxfp4-pack-quantized"  # whose scales would be up to 2^125
    tensors, config = four_bits(form, twin, lambda name: ".experts." in name, random=is_random)
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)
    return path, expected


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_are_those_of_floats(tmp_path: Path, name: str, form: Form) -> None:
    path, expected = _checkpoint(name, tmp_path, form)
    model = load(path, KEPT)
    assert {mixture.kind for mixture in _mixtures(model)} == {FourBitWeight}
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[3]], ids=str)
@pytest.mark.parametrize("experts", [1, 2])
def test_over_ranks(
    tmp_path: Path, form: Form, experts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts that are dealt out stay 4 bits, but kernels do not read a half of a width of 128."""
    path, expected = _checkpoint("qwen3_moe", tmp_path, form, moe_intermediate_size=128)

    def of_rank(comm: Communicator) -> tuple[Tensor, set[bool]]:
        model = load(path, KEPT, Parallel(comm, experts))
        kept = {mixture.kind is FourBitWeight for mixture in _mixtures(model)}
        return logits_of(model), kept

    with caplog.at_level(logging.WARNING):
        results = ThreadRanks(2).run(of_rank)
    for logits, kept in results:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert kept == {experts == 2}
    assert ("moe_expert_parallel_size" in caplog.text) is (experts == 1)


def test_wide_experts_are_cut(tmp_path: Path) -> None:
    path, expected = _checkpoint("qwen3_moe", tmp_path, FORMS[1], moe_intermediate_size=1024)

    def of_rank(comm: Communicator) -> Tensor:
        model = load(path, KEPT, Parallel(comm))
        assert all(mixture.kind is FourBitWeight for mixture in _mixtures(model))
        return logits_of(model)

    for logits in ThreadRanks(2).run(of_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_both_products_stay_or_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """down_proj has 4 bits and the others are floats."""
    path = tiny_model_dir(tmp_path, "qwen3_moe", **SIZES, **MORE["qwen3_moe"])
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(FORMS[1], twin, lambda n: ".experts." in n and "down" in n)
    write(path, twin, None)
    expected = logits_of(load(path, WeightForm()))
    write(path, tensors, config)
    with caplog.at_level(logging.WARNING):
        model = load(path, KEPT)
    assert {mixture.kind for mixture in _mixtures(model)} == {None}  # floats
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)
    assert "The experts of 2 of 2 mixtures do not stay 4 bits" in caplog.text


@pytest.mark.parametrize(
    "form", [Form("mxfp4-pack-quantized"), Form("pack-quantized", dtype=torch.float32)], ids=str
)
def test_others_become_fp8(tmp_path: Path, form: Form, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        path, expected = _checkpoint("qwen3_moe", tmp_path, form)
        model = load(path, KEPT)
    assert {mixture.kind for mixture in _mixtures(model)} == {Fp8Weight}
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)
    assert "become FP8 with scales of groups" in caplog.text


def test_wide_and_narrow_experts(tmp_path: Path) -> None:
    """As Mixtral's, wider than what rests in shared memory; and of few columns."""
    for inner in (128, 14336):
        sizes = {"hidden_size": 128, "intermediate_size": inner, "num_hidden_layers": 1}
        path, expected = _checkpoint("mixtral", tmp_path / str(inner), FORMS[1], **sizes)
        model = load(path, KEPT)
        assert {mixture.kind for mixture in _mixtures(model)} == {FourBitWeight}
        torch.testing.assert_close(logits_of(model), expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_one_expert_at_a_time_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that takes beside the model is small."""
    path, _ = _checkpoint("qwen3_moe", tmp_path, FORMS[0])
    alive: weakref.WeakSet[FourBitParts] = weakref.WeakSet()
    most = []

    class Counted(FourBitParts):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(place_four_bits, "FourBitParts", Counted)
    load(path, KEPT)
    assert len(most) > 10 and max(most) <= 2


def test_the_operations_of_a_row_count_weights_not_bytes(tmp_path: Path) -> None:
    path, _ = _checkpoint("qwen3_moe", tmp_path, FORMS[1])
    kept, floats = load(path, KEPT), load(path, WeightForm())
    assert seconds_of_row(kept) == pytest.approx(seconds_of_row(floats))
