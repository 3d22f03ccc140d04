"""A new EAGLE-3 head begins with an earlier one that drafts among fewer tokens."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model_dir
from torch import Tensor
from unrolled import F32, VOCAB, load_target

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.eagle import Eagle3Head
from trtspec.train.new_head import NewHead, begin_with, create_head, lm_head_weight, trainable


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
