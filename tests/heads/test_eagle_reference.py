"""EAGLE-3 heads against the `speculators` package's own model, step by step, in fp32."""

from __future__ import annotations

import importlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from speculators_reference import build_eagle3, parallel_logits, save_eagle3, step_logits
from tiny import DEFAULTS, prefill_metadata, tiny_model_dir
from torch import Tensor

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.base import DraftHead
from trtspec.ops.step.slots import draft_step_metadata

VOCAB, ROWS, STEPS, PAGE = DEFAULTS["vocab_size"], 20, 4, 8
STARTS = [0, 12, 16]  # rows that chains begin at; their next 3 rows fit in the pages they have

NORMS: list[dict[str, bool]] = [{}, {"norm_before_fc": True}, {"fc_norm": True}]
SCALED = {"rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}
YARN = {"rope_type": "yarn", **SCALED}
THETA = {"rope_type": "default", "rope_theta": 50.0}
IDS = "eagle_aux_hidden_state_layer_ids"
NORMED = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
FULL = {**NORMED, "num_hidden_layers": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),  # its own default head_dim, 128
    ("qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": THETA}),
    ("qwen3", {"head_dim": 8, "rope_parameters": LLAMA3, **FULL}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 6}),
    ("llama", {"rope_parameters": THETA, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN, "head_dim": 16}),
    ("llama", {"num_hidden_layers": 2}),
    ("llama", {"draft_vocab_size": VOCAB}),
    ("llama", {IDS: [3]}),
    ("llama", {IDS: [3], "norm_before_fc": True}),
    ("llama", {IDS: [1, 3, 5, 8]}),
    ("llama", {IDS: [1, 3, 5, 8], "attention_bias": True, "draft_vocab_size": VOCAB, **FULL}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=8)
    return load_decoder(path, ON_CPU)


def _load(model: Any, path: Path, target: Decoder) -> DraftHead:
    """Our head, read from the files that the package writes for `model`."""
    return _read(save_eagle3(model, path), target)


def _read(path: Path, target: Decoder) -> DraftHead:
    return load_head(
        path,
        target,
        HeadRequest(kind="eagle"),
        ON_CPU,
    )


def _inputs(model: Any) -> tuple[Tensor, Tensor]:
    """Captured hidden states [ROWS, n * H], and the token after each row [ROWS]."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, model.fc.in_features, generator=generator)
    return hidden, torch.randint(VOCAB, (ROWS,), generator=generator)


def _close(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5  # flat logits would agree whatever the head does
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=2e-5)


def _first_pass(head: DraftHead, hidden: Tensor, ids: Tensor) -> Tensor:
    meta, positions = prefill_metadata(head.config.decoder, [ROWS], PAGE)
    out, _ = head(ids, positions, head.project_target_hidden(hidden), meta, step=0)
    return head.compute_logits(out, 0)


def _chains(head: DraftHead, hidden: Tensor, ids: Tensor, steps: int) -> list[Tensor]:
    """Per step the logits [B, Vd] of one chain per start: its rows so far, then one row a step."""
    lengths, starts = [start + 1 for start in STARTS], torch.tensor(STARTS)
    meta, rows = prefill_metadata(head.config.decoder, lengths, PAGE)
    out, fed_on = head(ids[rows], rows, head.project_target_hidden(hidden[rows]), meta, step=0)
    last = torch.tensor(lengths).cumsum(0) - 1
    out, fed_on = out[last], fed_on[last]
    logits = [head.compute_logits(out, 0)]
    for step in range(1, steps):
        now = draft_step_metadata(meta, (starts + step)[:, None], steps - 1)
        assert (now.slot_mappings[0] >= 0).all()
        out, fed_on = head(ids[starts + step], now.position_ids, fed_on, now, step=step)
        logits.append(head.compute_logits(out, step))
    return logits


def _compare(target: Decoder, path: Path, family: str, steps: int = STEPS, **flags: Any) -> None:
    model = build_eagle3(family=family, **flags)
    head, (hidden, ids) = _load(model, path, target), _inputs(model)
    expected = step_logits(model, hidden, ids, steps)
    with torch.no_grad():
        _close(_first_pass(head, hidden, ids), expected[0])
        for ours, theirs in zip(_chains(head, hidden, ids, steps), expected, strict=True):
            _close(ours, theirs[STARTS])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", NORMS, ids=lambda norms: "+".join(norms) or "plain")
@pytest.mark.parametrize(("before", "output"), list(product([False, True], repeat=2)))
def test_every_flag(
    target: Decoder, tmp_path: Path, family: str, norms: dict[str, bool], before: bool, output: bool
) -> None:
    flags = {"norm_before_residual": before, "norm_output": output, **norms}
    _compare(target, tmp_path, family, head_dim=8, **flags)


@pytest.mark.parametrize(("family", "flags"), VARIANTS)
def test_variants(target: Decoder, tmp_path: Path, family: str, flags: dict[str, Any]) -> None:
    _compare(target, tmp_path, family, **flags)


def test_flags_of_eagle_config(target: Decoder, tmp_path: Path) -> None:
    """Where TensorRT-LLM reads them, and by its name of one."""
    model = build_eagle3(norm_output=True, norm_before_fc=True)
    path = save_eagle3(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["norm_output"], config["norm_before_fc"]
    config["eagle_config"] = {"norm_before_fc": True, "return_hidden_post_norm": True}
    (path / "config.json").write_text(json.dumps(config))
    head, (hidden, ids) = _read(path, target), _inputs(model)
    expected = step_logits(model, hidden, ids, STEPS)
    with torch.no_grad():
        for ours, theirs in zip(_chains(head, hidden, ids, STEPS), expected, strict=True):
            _close(ours, theirs[STARTS])


def test_sliding_window(target: Decoder, tmp_path: Path) -> None:
    """Only step 0: later the package's training mask keeps each row's first window."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    _compare(target, tmp_path, "qwen3", steps=1, head_dim=8, num_hidden_layers=2, **window)


def test_a_window_of_llamas_kind(target: Decoder, tmp_path: Path) -> None:
    """A Llama has none, but a head of its kind may: a row is as if the text began at its window."""
    model, window = build_eagle3(), 6
    whole, (hidden, ids) = _load(model, tmp_path / "whole", target), _inputs(model)
    path = save_eagle3(model, tmp_path / "slides")
    config = json.loads((path / "config.json").read_text())
    inner = config["transformer_layer_config"]
    inner |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    (path / "config.json").write_text(json.dumps(config))
    slides = _read(path, target)
    assert slides.config.decoder.window(0) == window and whole.config.decoder.window(0) is None
    with torch.no_grad():
        logits = _first_pass(slides, hidden, ids)
        for row in (3, window - 1, window, ROWS - 1):
            rows = slice(max(0, row + 1 - window), row + 1)
            seen, positions = prefill_metadata(whole.config.decoder, [rows.stop - rows.start], PAGE)
            out, _ = whole(ids[rows], positions, whole.project_target_hidden(hidden[rows]), seen, 0)
            _close(logits[row], whole.compute_logits(out[-1:], 0)[0])


@pytest.mark.filterwarnings("ignore:--target-layer-ids")
def test_default_layers(target: Decoder, tmp_path: Path) -> None:
    """Where the config names none, ours are the package's: theirs are inputs, ours outputs."""
    head = _load(build_eagle3(eagle_aux_hidden_state_layer_ids=None), tmp_path, target)
    resolve = importlib.import_module("speculators.models.utils").resolve_target_layer_ids
    theirs = resolve(None, tiny_model_dir(tmp_path, num_hidden_layers=8))
    assert head.layers_to_capture == tuple(i - 1 for i in theirs)


def test_what_the_files_say(target: Decoder, tmp_path: Path) -> None:
    model = build_eagle3(eagle_aux_hidden_state_layer_ids=[1, 5, 8])
    head = _load(model, tmp_path, target)
    assert head.d2t is not None and torch.equal(head.d2t, model.d2t)
    assert head.config.suggested_draft_len == 3
    assert head.layers_to_capture == (0, 4, 7)
    assert not head.shares_embedding and not head.shares_lm_head
    model.embed_tokens.weight.data.copy_(target.embed_tokens.weight)
    head = _load(model, tmp_path, target)
    assert head.shares_embedding and head.embed_tokens is target.embed_tokens


@pytest.mark.parametrize(
    "flags", [{"num_hidden_layers": 3}, {"norm_before_fc": True}, {"fc_norm": True, **FULL}]
)
def test_drafting_in_parallel(target: Decoder, tmp_path: Path, flags: dict[str, Any]) -> None:
    """The known rows, then masks: as the package's P-EAGLE model trains them."""
    model = build_eagle3(mask_token_id=90, **flags)
    head, (hidden, ids) = _load(model, tmp_path, target), _inputs(model)
    assert head.config.mask_token_id == 90 and head.config.trained_draft_len == 3
    expected = parallel_logits(model, hidden, ids, STEPS)
    with torch.no_grad():
        known, mask = head.project_target_hidden(hidden), head.mask_hidden
        assert isinstance(mask, Tensor)
        for last in STARTS[:2]:
            rows = last + STEPS
            meta, positions = prefill_metadata(head.config.decoder, [rows], PAGE)
            masks = torch.full((STEPS - 1,), 90)
            states = torch.cat([known[: last + 1], mask.expand(STEPS - 1, -1)])
            read = torch.cat([ids[: last + 1], masks])
            out, _ = head(read, positions, states, meta, step=0)
            _close(head.compute_logits(out[last:], 0), expected[last])
