"""Heads that may propose some tokens alone, of those that their lm_head has."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import VOCAB, Oracle, random_prompts
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle1_dir, eagle3_dir, mtp_model_dir
from torch import Tensor

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints import place
from trtspec.checkpoints.heads.draft_tokens import read_draft_tokens
from trtspec.errors import ConfigError
from trtspec.layers import linear
from trtspec.ops.layer.fp8 import dequantize, quantize

IDS = [*range(0, VOCAB, 3), 50, 1]
"""In no order, as the most frequent tokens of a text are."""
OWN_EAGLE3 = partial(EagleDecodingConfig, eagle3_layers_to_capture=[0, 1, 2])
HEADS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any]]] = {
    "eagle1": (eagle1_dir, EagleDecodingConfig),
    "eagle3": (partial(eagle3_dir, draft_vocab=VOCAB), OWN_EAGLE3),
    "eagle3 outside": (
        partial(eagle3_dir, draft_vocab=VOCAB),
        partial(OWN_EAGLE3, eagle3_one_model=False),
    ),
    "dflash": (dflash_dir, DFlashDecodingConfig),
    "dspark": (partial(dflash_dir, markov="vanilla"), DSparkDecodingConfig),
    "dspark gated": (partial(dflash_dir, markov="gated"), DSparkDecodingConfig),
    "mtp_eagle": (partial(mtp_model_dir, num_mtp_layers=1), MTPDecodingConfig),
    "mtp": (
        partial(mtp_model_dir, own_ends=True),
        partial(MTPDecodingConfig, use_mtp_vanilla=True),
    ),
}


def make(folder: Path, kind: str, **fields: Any) -> tuple[Path, Any]:
    """Returns the target and the config of a head of three drafts."""
    make_head, config_of = HEADS[kind]
    head = make_head(folder)
    target = head if kind.startswith("mtp") else tiny_model_dir(folder, num_hidden_layers=6)
    return target, config_of(max_draft_len=3, speculative_model=head, **fields)


def engine(target: Path, config: Any, **options: Any) -> LLM:
    return LLM(target, config, device="cpu", dtype="float32", max_seq_len=64, **options)


def logits_of(llm: LLM) -> list[Tensor]:
    """Returns what the drafts of an engine's requests are chosen by from now on."""
    model, found = llm.executor.draft_model, list[Tensor]()
    compute = model.compute_logits

    def keep(*arguments: Any) -> Tensor:
        found.append(compute(*arguments))
        return found[-1]

    model.compute_logits = keep
    return found


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_chosen_among_these_tokens(tmp_path: Path, kind: str) -> None:
    """By the logits that all of them have; texts are the target's."""
    target, config = make(tmp_path, kind, draft_token_ids=IDS)
    _, whole = make(tmp_path, kind)
    prompts, params = random_prompts(4), SamplingParams(max_tokens=14, ignore_eos=True)
    oracle, first = Oracle(target), []
    for one in (config, whole):
        llm = engine(target, one)
        logits = logits_of(llm)
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 14)
        first.append(logits[0])
        if one is config:
            d2t = llm.executor.draft_model.d2t
            assert (torch.arange(len(IDS)) + d2t).tolist() == sorted(IDS)
            target_head = llm.executor.target.lm_head
            assert target_head.out_features == VOCAB, "verification reads all tokens"
    torch.testing.assert_close(first[0], first[1][:, sorted(IDS)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dspark", "dspark gated"])
def test_a_bias_is_of_the_same_tokens(tmp_path: Path, kind: str) -> None:
    biases = []
    for fields in ({"draft_token_ids": IDS}, {}):
        head = engine(*make(tmp_path, kind, **fields)).executor.draft_model
        hidden = torch.linspace(-1, 1, 3 * head.config.decoder.hidden_size).view(3, -1)
        before = torch.tensor([3, 0, 96])
        biases.append(head.markov_head(before, hidden, head.markov_head.first_state(hidden))[0])
    assert biases[0].std() > 0.01
    torch.testing.assert_close(biases[0], biases[1][:, sorted(IDS)])


@pytest.mark.parametrize("kind", ["eagle1", "mtp_eagle", "dflash"])
def test_the_rows_kept_can_be_fp8(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a shared lm_head too, which stays as it is."""
    monkeypatch.setattr(place, "has_fp8", lambda device: True)
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)  # as on a GPU
    ids = sorted(IDS)[:32]
    target, config = make(tmp_path, kind, draft_token_ids=ids, quant="fp8")
    executor = engine(target, config).executor
    whole, rows = executor.target.lm_head, executor.draft_model.lm_head_of_step(0).fp8
    assert whole.fp8 is None and rows is not None
    values = dequantize(quantize(whole.weight[ids]), torch.float32)
    assert torch.equal(dequantize(rows, torch.float32), values)


@pytest.mark.parametrize("kind", ["eagle1", "mtp_eagle", "dflash", "dspark", "dspark gated"])
def test_with_all_tokens_nothing_changes(tmp_path: Path, kind: str) -> None:
    """Sampled requests too, whose drafts are drawn."""
    lens, prompts = [], random_prompts(5)
    params = [SamplingParams(max_tokens=20, temperature=2.0 * (i % 2), seed=i, ignore_eos=True)
              for i in range(5)]  # fmt: skip
    for fields in ({}, {"draft_token_ids": range(VOCAB)}):
        target, config = make(tmp_path, kind, **fields)
        outputs = engine(target, config).generate(prompts, params)
        lens.append([(o.outputs[0].token_ids, o.spec_stats) for o in outputs])
    assert lens[0] == lens[1]


def test_files(tmp_path: Path) -> None:
    content = {
        "ids.json": lambda path: path.write_text(json.dumps(IDS)),
        "list.pt": partial(torch.save, IDS),
        "tensor.pt": partial(torch.save, torch.tensor(IDS)),
    }
    for name, write in content.items():
        path = tmp_path / name
        write(path)
        for given in (path, str(path)):
            assert read_draft_tokens(given, VOCAB).tolist() == sorted(IDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{", "cannot be read"),
        ('{"a": 1}', r"is \{'a': 1\}: give a JSON file"),
        ("[]", r"is \[\]: give"),
        ("[1, 97]", r"holds 97: the target's tokens are 0 … 96"),
        ("[1, true]", "holds True"),
        ("[1, 2.5]", "holds 2.5"),
        ("[3, 4, 3]", "holds token 3 more than once"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_draft_tokens(path, VOCAB)


@pytest.mark.parametrize("content", ["", "junk", "q", "r1234", "hello world, this is text", "{}"])
def test_damaged_files_of_tensors_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.pt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"ids\.pt (cannot be read \(.+\)|holds other)"):
        read_draft_tokens(path, VOCAB)
    with pytest.raises(ConfigError, match="is a directory"):
        read_draft_tokens(tmp_path, VOCAB)


@pytest.mark.parametrize("given", [3, {"a": 1}, [1.5], [-1], [], "", [[1]], b"12", [np.int64(1)]])
def test_what_is_no_list_of_ids_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"DFlashDecodingConfig\.draft_token_ids"):
        DFlashDecodingConfig(speculative_model="head", draft_token_ids=given)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("small", "it drafts among 40 tokens already"),
        ("dflash2", "has weights for all tokens"),
        ("ranks", "several ranks"),
    ],
)
def test_heads_that_need_all_tokens(tmp_path: Path, kind: str, message: str) -> None:
    made: dict[str, tuple[Callable[[Path], Path], Any]] = {
        "small": (partial(dflash_dir, draft_vocab=40), DFlashDecodingConfig),
        "dflash2": (partial(dflash_dir, path={}), DFlashDecodingConfig),
        "ranks": (dflash_dir, DFlashDecodingConfig),
    }
    make_head, config_of = made[kind]
    config = config_of(max_draft_len=3, speculative_model=make_head(tmp_path), draft_token_ids=IDS)
    target = tiny_model_dir(tmp_path, num_hidden_layers=6)
    options = {"tensor_parallel_size": 2} if kind == "ranks" else {}
    with pytest.raises(ConfigError, match=message):
        engine(target, config, **options)
