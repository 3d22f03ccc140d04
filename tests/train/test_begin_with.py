"""A new head begins with an earlier one, of EAGLE-3 with one that drafts among fewer tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loading import UNPACKED, UNPACKED_HEAD
from quantized import to_blocks
from safetensors.torch import load_file
from tiny import tiny_model_dir
from torch import Tensor
from unrolled import CPU, F32, VOCAB, load_target

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.place import weight_form
from trtspec.checkpoints.quantization import Forms, quantization_of
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.eagle import Eagle3Head
from trtspec.train.create_head import create_head, lm_head_weight, trainable
from trtspec.train.earlier_head import begin_with, check_alike
from trtspec.train.new_head import NewHead
from trtspec.train.save_head import save_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_target(tiny_model_dir(tmp_path_factory.mktemp("target")))


def _head(target: Decoder, ids: Tensor, seed: int = 0) -> Eagle3Head:
    spec = NewHead(layers_to_capture=(0, 1, 2))
    head = create_head(spec, target, ids, F32, seed)
    assert isinstance(head, Eagle3Head)
    return head


def _rows(head: Eagle3Head) -> Tensor:
    weight = trainable(head)["lm_head.weight"]
    return weight.data


def _turned(target: Decoder, ids: Tensor) -> tuple[Eagle3Head, Tensor]:
    """A head among some tokens whose lm_head has turned, and the turn [D, D]."""
    head, size = _head(target, ids, seed=1), target.config.hidden_size
    generator = torch.Generator().manual_seed(2)
    turn = torch.randn(size, size, generator=generator) / size**0.5
    _rows(head).copy_(lm_head_weight(target)[ids] @ turn)
    return head, turn


def test_tokens_that_it_did_not_draft_get_rows_that_fit(target: Decoder) -> None:
    known = torch.tensor([token for token in range(VOCAB) if token % 3])
    assert len(known) > target.config.hidden_size  # so that they say what the turn is
    earlier, turn = _turned(target, known)
    head = _head(target, torch.arange(VOCAB))
    begin_with(head, earlier)
    expected = lm_head_weight(target)[:VOCAB] @ turn
    assert torch.equal(_rows(head)[known], _rows(earlier))
    torch.testing.assert_close(_rows(head), expected, atol=2e-3, rtol=2e-3)
    for name, parameter in trainable(head).items():
        if name != "lm_head.weight":
            assert torch.equal(parameter.data, trainable(earlier)[name].data), name


def test_few_known_tokens_leave_the_other_rows_finite(target: Decoder) -> None:
    earlier, _ = _turned(target, torch.arange(7))
    head = _head(target, torch.arange(VOCAB))
    begin_with(head, earlier)
    assert torch.equal(_rows(head)[:7], _rows(earlier))
    assert _rows(head).abs().max() < 10 * lm_head_weight(target).abs().max()


def test_rows_are_the_tokens_whatever_the_earlier_order(target: Decoder) -> None:
    ids = torch.tensor([9, 4, 30, 2])
    earlier, _ = _turned(target, ids)
    head = _head(target, ids.sort().values)
    begin_with(head, earlier)
    assert torch.equal(_rows(head), _rows(earlier)[ids.argsort()])


def test_a_token_that_would_be_lost_is_refused(target: Decoder) -> None:
    earlier, _ = _turned(target, torch.arange(3, 20))
    with pytest.raises(ConfigError, match="draft_vocab_size: 17 there, 40 here"):
        begin_with(_head(target, torch.arange(4, 44)), earlier)


OTHER = {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_like_another_has_its_rotation_and_norms(target: Decoder, kind: str) -> None:
    like = replace(target.config, **OTHER)
    spec = NewHead(kind=kind, layers_to_capture=(0, 1, 2), mask_token_id=90)
    ids = torch.arange(VOCAB) if kind == "eagle3" else None
    earlier = create_head(replace(spec, like=like), target, ids, F32, seed=1)
    with pytest.raises(ConfigError, match=r"rms_norm_eps: 0.001 there, 1e-06 here; rope_param"):
        begin_with(create_head(spec, target, ids, F32, seed=0), earlier)
    head = create_head(replace(spec, like=earlier.config.decoder), target, ids, F32, seed=0)
    begin_with(head, earlier)
    assert head.norm.eps == 1e-3
    assert head.rope_tables.table0[7, 1] == earlier.rope_tables.table0[7, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation", "gelu_tanh"), ("rotary_dim", 4), ("qkv_bias", True), ("attention_scale", 0.5)],
)
def test_layers_that_compute_otherwise_are_refused(
    target: Decoder, field: str, value: object
) -> None:
    here = _head(target, torch.arange(VOCAB)).config
    earlier = replace(here, decoder=replace(here.decoder, **{field: value}))
    with pytest.raises(ConfigError, match=f"{field}: {value!r} there"):
        check_alike(earlier, here)


def test_mtp_layers_begin_with_saved_ones(target: Decoder, tmp_path: Path) -> None:
    spec = NewHead(kind="mtp")
    save_head(create_head(spec, target, None, F32, seed=1), target.config, tmp_path)
    how = UNPACKED_HEAD
    head = create_head(spec, target, None, F32, seed=0)
    begin_with(head, load_head(tmp_path, target, HeadRequest(), how))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"] = 5e5
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="rope_parameters"):
        begin_with(head, load_head(tmp_path, target, HeadRequest(), how))


def test_mtp_layers_for_a_quantised_target_are_floats(tmp_path: Path) -> None:
    """Their config.json is the target's, but for how weights are stored."""
    to_blocks(target_dir := tiny_model_dir(tmp_path), (16, 16))
    form = replace(weight_form(None, CPU), keeps_fp8=False)
    target = load_decoder(target_dir, replace(UNPACKED, form=form))
    assert "quantization_config" in target.config.raw
    head = create_head(NewHead(kind="mtp"), target, None, F32, seed=1)
    save_head(head, target.config, tmp_path / "head")
    assert {t.dtype for t in load_file(tmp_path / "head" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert quantization_of(raw, tmp_path / "head" / "config.json") == Forms()


def test_a_head_with_a_confidence_head_is_a_beginning(target: Decoder) -> None:
    """A trained head has none."""
    spec = NewHead(kind="dspark", block_size=3, mask_token_id=0, layers_to_capture=(0, 1, 2))
    config = create_head(spec, target, None, F32, seed=3).config
    check_alike(replace(config, confidence_size=60), config)
