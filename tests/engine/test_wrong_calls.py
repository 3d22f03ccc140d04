"""Slips in a loop of one's own are named: none gives other tokens, or an error from inside."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model_dir
from torch import Tensor

from trtspec import (
    LLM,
    ConfigError,
    MTPDecodingConfig,
    NGramDecodingConfig,
    RequestError,
    SamplingParams,
    SpecMetadata,
)
from trtspec.workers import MTPWorker, SpecWorkerBase

K, VOCAB = 2, 11


class Silent(SpecWorkerBase):
    """Drafts nothing."""

    def draft(self, inputs: Any) -> Tensor:
        return inputs.accepted_tokens[:, :0]


def step(worker: SpecWorkerBase | None = None, **fields: Any) -> dict[str, Any]:
    """Two generations with K drafts each, whose best next tokens are 5 and 9."""
    logits = torch.zeros(2 * (K + 1), VOCAB)
    logits[: K + 1, 5] = logits[K + 1 :, 9] = 4.0
    given: dict[str, Any] = {
        "input_ids": torch.arange(6),
        "position_ids": torch.arange(6),
        "hidden_states": None,
        "logits": logits,
        "attn_metadata": None,
    }
    given |= {name: fields.pop(name) for name in [*given, "spec_metadata"] if name in fields}
    of_spec = {"max_num_requests": 2, "max_draft_len": K, "max_total_draft_tokens": K}
    of_spec |= {"request_ids": [0, 1], "num_generations": 2}
    of_spec |= {"draft_tokens": torch.tensor([[5, 5], [9, 9]]), **fields}
    given.setdefault("spec_metadata", SpecMetadata(**of_spec))
    return (worker or Silent(NGramDecodingConfig(max_draft_len=K)))(**given)


def test_what_is_right() -> None:
    assert step()["new_tokens"].tolist() == [[5, 5, 5], [9, 9, 9]]
    flat = step(draft_tokens=torch.tensor([5, 5, 9, 9], dtype=torch.int32))
    assert flat["new_tokens_lens"].tolist() == [3, 3]
    batched = step(input_ids=torch.arange(6)[None], position_ids=torch.arange(6)[None])
    assert batched["new_tokens_lens"].tolist() == [3, 3]
    rotary = step(position_ids=torch.arange(6).expand(3, 1, 6))  # TensorRT-LLM's with M-RoPE
    assert rotary["new_tokens_lens"].tolist() == [3, 3]
    small = step(draft_tokens=torch.tensor([[5, 5], [9, 9]], dtype=torch.int16))
    assert small["new_tokens_lens"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_tokens": torch.tensor([[5, 9, 5, 9]]).reshape(4, 1)}, r"shape \(4, 1\) are not"),
        ({"draft_tokens": torch.tensor([[5], [9], [5]])}, r"shape \(3, 1\) are not those of 2"),
        ({"draft_tokens": torch.ones(2, K)}, r"draft_tokens are torch.float32: give token ids"),
        ({"draft_tokens": torch.ones(2, K, dtype=torch.bool)}, "draft_tokens are torch.bool"),
        ({"draft_tokens": [[5, 5], [9, 9]]}, "draft_tokens is a list: give a tensor"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, r"input_ids are of shape \(2, 3\)"),
        ({"position_ids": None}, "position_ids are None: give a tensor"),
        ({"position_ids": torch.arange(6)[:, None]}, r"position_ids are of shape \(6, 1\): give"),
        ({"logits": None}, "logits are None: give the target's"),
        ({"spec_metadata": None}, "spec_metadata is None: give a SpecMetadata"),
    ],
)
def test_inputs_of_another_kind(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step(**fields)


def sampled(**fields: Any) -> list[tuple[int, ...]]:
    """First tokens of 60 steps."""
    temperatures = torch.full((6,), 50.0)
    fields = {"allow_advanced_sampling": True, "temperatures": temperatures} | fields
    return [tuple(step(**fields)["new_tokens"][:, 0].tolist()) for _ in range(60)]


@pytest.mark.parametrize("name", ["", "top_ks", "top_ps"])
def test_filters_that_are_left_out_are_off(name: str) -> None:
    given = {"top_ks": torch.zeros(6, dtype=torch.int32), "top_ps": torch.ones(6)}
    fields = {name: given[name]} if name else {}
    assert len(set(sampled(**fields))) > 20
    seeds = {"seeds": torch.full((6,), 7)}
    assert set(sampled(**fields, **seeds)) == set(sampled(**given, **seeds))


def test_filters_without_temperatures_are_refused() -> None:
    with pytest.raises(ConfigError, match="has top_ks, but no temperatures"):
        sampled(temperatures=None, top_ks=torch.ones(6, dtype=torch.int32))


def test_seeds_need_positions() -> None:
    seeds = torch.full((6,), 7)
    assert len(set(sampled(seeds=seeds))) == 1
    with pytest.raises(ConfigError, match="2 positions for 6 rows of logits"):
        sampled(seeds=seeds, position_ids=torch.arange(2), gather_ids=None)
    known = {"positions": torch.arange(6), "position_ids": torch.arange(2)}
    assert len(set(sampled(seeds=seeds, **known))) == 1


@pytest.mark.parametrize(
    ("flags", "params", "message"),
    [
        ((True, False), SamplingParams(), "A context is behind a generation"),
        ((False, "no"), SamplingParams(), "is_generation='no': it must be True or False"),
        ((False,), None, "neither `sampling_params` nor"),
    ],
)
def test_requests_that_cannot_be_populated(
    flags: tuple[Any, ...], params: SamplingParams | None, message: str
) -> None:
    requests = [SimpleNamespace(is_generation=flag, sampling_params=params) for flag in flags]
    spec = SpecMetadata(
        max_num_requests=2, max_draft_len=K, max_total_draft_tokens=K, allow_advanced_sampling=True
    )
    with pytest.raises(ConfigError, match=message):
        spec.populate_sampling_params_for_one_model(requests)


def test_states_and_drafts_that_are_missing() -> None:
    worker = MTPWorker(MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True))
    with pytest.raises(ConfigError, match=r"give allocate_state\(…, hidden_size=…"):
        worker.allocate_state(2, 64, torch.device("cpu"))
    nothing = type("Nothing", (SpecWorkerBase,), {"draft": lambda self, inputs: None})
    with pytest.raises(ConfigError, match=r"Nothing.draft returned NoneType: return drafts"):
        step(nothing(NGramDecodingConfig(max_draft_len=K)))


def test_names_of_other_engines() -> None:
    sizes = {"max_num_requests": 2, "max_draft_len": K, "max_total_draft_tokens": K}
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_rejection_sampling'"):
        SpecMetadata(**sizes, use_rejection_sampling=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="'num_speculative_tokens': use max_draft_len"):
        _ = NGramDecodingConfig().num_speculative_tokens  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"use guided_decoding=GuidedDecodingParams\(json=…\)"):
        SamplingParams(guided_json={})  # type: ignore[call-arg]

    class Mine(SpecMetadata):
        def __init__(self, *, loop: str, **named: Any):
            super().__init__(**named)
            self.loop = loop

        @property
        def broken(self) -> int:
            return self.loop.size  # type: ignore[attr-defined]

    mine = Mine(loop="a", **sizes)
    assert mine.loop == "a"
    with pytest.raises(AttributeError, match="'str' object has no attribute 'size'"):
        _ = mine.broken
    config = NGramDecodingConfig(max_draft_len=3)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_an_llm_that_is_copied_or_shut_down(tmp_path: Path) -> None:
    llm = LLM(tiny_model_dir(tmp_path), device="cpu", dtype="float32", max_seq_len=64)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make another, not a copy"):
            copied(llm)
    llm.shutdown()
    with pytest.raises(RequestError, match="shut down"), llm:
        pass


def test_a_drafter_that_raises_type_errors(tmp_path: Path) -> None:
    from trtspec import UserProvidedDecodingConfig

    class Broken:
        def draft(self, request_id: int, token_ids: list[int], max_draft_len: int) -> list[int]:
            return [sum(["a"])]  # type: ignore[list-item]

    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=Broken())
    llm = LLM(tiny_model_dir(tmp_path), config, device="cpu", dtype="float32", max_seq_len=64)
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.error is not None and output.error.startswith("Broken.draft raised TypeError")
