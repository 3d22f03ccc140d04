"""Drafting in parallel: what a pass with masks says after rejections of every length, and configs.

Greedy and sampled texts of these modes are in test_executor.py and test_sampled_speculation.py.
Here every draft logit equals a recomputation in float64 that knows a request's text and nothing
else: it reads [text | masks] from scratch, without a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import cases_by_k, run_random_schedule, run_with_changing_draft_len
from masked import MASKED_CASES, MaskedScript, make_masked_case
from oracle import VOCAB
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_heads import MASK_TOKEN, eagle1_dir, eagle3_dir, p_eagle_dir, pard_dir

from trtspec import LLM, DraftTargetDecodingConfig, EagleDecodingConfig, SamplingParams
from trtspec.config import DecodingBaseConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.workers import MaskedDraftTargetWorker, MaskedEagle3Worker, create_worker
from trtspec.workers.draft_target import DraftTargetWorker

LAYERS = 8


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=LAYERS)


# -- logits ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), cases_by_k(MASKED_CASES, ["p_eagle"]))
def test_draft_logits_equal_recomputation(
    target_dir: Path, tmp_path: Path, name: str, k: int
) -> None:
    case = make_masked_case(name, target_dir, tmp_path, k)
    compared, executor = run_random_schedule(case, k, k, MaskedScript)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1)), (
        "every length must have been accepted"
    )
    assert k != 4 or executor.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED_CASES)
def test_draft_logits_up_to_the_maximum_length(target_dir: Path, tmp_path: Path, name: str) -> None:
    """K = 8, and every request ends at the maximum: rows run past it."""
    case = make_masked_case(name, target_dir, tmp_path, 8)
    compared, _ = run_random_schedule(case, 8, 3, MaskedScript, max_seq_len=36)
    assert compared > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p_eagle", "pard"])
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    case = make_masked_case(name, target_dir, tmp_path, 3)
    run_with_changing_draft_len(case, MaskedScript)


@pytest.mark.parametrize("name", ["p_eagle", "pard"])
def test_a_generation_step_has_one_draft_pass(target_dir: Path, tmp_path: Path, name: str) -> None:
    k = 4
    case = make_masked_case(name, target_dir, tmp_path, k)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=96)
    script, executor = MaskedScript(llm, case, seed=0), llm.executor
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for i in range(2):
        request = executor.enqueue([5, 6, 7 + i], params)
        script.requests[request.request_id] = request
    executor.step()
    assert script.passes == [6, 2 * k]  # the prompts, then the bonus and K - 1 masks of each
    while executor.has_work:
        script.passes.clear()
        executor.step()
        requests = len(script.logits)
        assert script.passes in ([requests * 2 * k], []), "K + 1 rows verified and K - 1 more"


# -- configs -----------------------------------------------------------------------------------
def _engine(target: Path, config: DecodingBaseConfig) -> LLM:
    return LLM(target, config, device="cpu", dtype="float32", max_seq_len=48)


def _p_eagle(tmp_path: Path, k: int = 3, one_model: bool = True, **options: Any) -> Any:
    head = p_eagle_dir(tmp_path, **options)
    return EagleDecodingConfig(max_draft_len=k, speculative_model=head, eagle3_one_model=one_model)


def _without(path: Path, tensor: str) -> Path:
    tensors = load_file(path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, path / "model.safetensors")
    return path


def _reshaped(path: Path, shape: tuple[int, ...]) -> Path:
    tensors = load_file(path / "model.safetensors")
    tensors["mask_hidden"] = (
        tensors["mask_hidden"].flatten()[: torch.Size(shape).numel()].view(shape)
    )
    save_file(tensors, path / "model.safetensors")
    return path


def _edit(path: Path, **changes: Any) -> Path:
    raw = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


def _speculators(path: Path, **changes: Any) -> Path:
    """The same head as vLLM's speculators write it."""
    raw = json.loads((path / "config.json").read_text())
    own = ("draft_vocab_size", "target_hidden_size", "architectures", "ptd_token_id")
    raw = {
        "speculators_model_type": "peagle", "mask_token_id": MASK_TOKEN,
        "transformer_layer_config": {n: v for n, v in raw.items() if n not in own},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],  # counted as inputs
        "draft_vocab_size": raw["draft_vocab_size"], "norm_before_residual": False,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}, **changes,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(raw))
    return _reshaped(path, (1, 1, 3 * 48))


def test_the_formats_of_a_head_are_one(target_dir: Path, tmp_path: Path) -> None:
    raw, nested = p_eagle_dir(tmp_path), p_eagle_dir(tmp_path)
    _edit(nested, ptd_token_id=None, eagle_config={"mask_token_id": MASK_TOKEN})
    texts, stats = [], []
    for head in (raw, nested, _speculators(p_eagle_dir(tmp_path), num_depths=8)):
        llm = _engine(target_dir, EagleDecodingConfig(max_draft_len=5, speculative_model=head))
        assert isinstance(llm.executor.worker, MaskedEagle3Worker)
        assert llm.executor.worker.mask_token_id == MASK_TOKEN
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append(output.outputs[0].token_ids)
        stats.append(output.spec_stats)
    assert texts[0] == texts[1] == texts[2] and stats[0] == stats[1] == stats[2]


def test_the_length_is_what_the_head_says(target_dir: Path, tmp_path: Path) -> None:
    for head, k in (
        (p_eagle_dir(tmp_path), 4),
        (p_eagle_dir(tmp_path, config={"num_depths": 7}), 7),
        (_speculators(p_eagle_dir(tmp_path), num_depths=8), 5),
    ):
        assert (
            _engine(target_dir, EagleDecodingConfig(speculative_model=head)).executor.max_draft_len
            == k
        )


def test_a_draft_model_may_be_used_either_way(target_dir: Path, tmp_path: Path) -> None:
    pard = pard_dir(tmp_path)
    plain = tiny_model_dir(tmp_path, seed=2)
    for path, asked, worker in (
        (pard, None, MaskedDraftTargetWorker), (pard, True, MaskedDraftTargetWorker),
        (pard, False, DraftTargetWorker), (plain, None, DraftTargetWorker),
        (plain, False, DraftTargetWorker),
    ):  # fmt: skip
        config = DraftTargetDecodingConfig(speculative_model=path, parallel_drafting=asked)
        assert type(_engine(target_dir, config).executor.worker) is worker


REFUSED: dict[str, tuple[Any, str]] = {
    "longer than trained": (
        lambda p: _p_eagle(p, 6, config={"parallel_draft_step": 5}),
        "max_draft_len=6: .* trained to propose 5 .* Give at most 5",
    ),
    "longer than its depths": (
        lambda p: EagleDecodingConfig(
            max_draft_len=9, speculative_model=_speculators(p_eagle_dir(p), num_depths=8)
        ),
        "max_draft_len=9: .* trained to propose 8",
    ),
    "longer than trained, speculators": (
        lambda p: EagleDecodingConfig(
            max_draft_len=6, speculative_model=_speculators(p_eagle_dir(p))
        ),
        "max_draft_len=6: .* trained to propose 5",
    ),
    "two engines": (
        lambda p: _p_eagle(p, one_model=False),
        "Mode EAGLE3 does not draft in parallel .* leave out eagle3_one_model",
    ),
    "no mask token": (
        lambda p: _p_eagle(p, config={"ptd_token_id": None}),
        "none of mask_token_id, ptd_token_id, pard_token is there. Add mask_token_id",
    ),
    "no mask token, speculators": (
        lambda p: EagleDecodingConfig(
            speculative_model=_speculators(p_eagle_dir(p), mask_token_id=None)
        ),
        "none of mask_token_id",
    ),
    "heads in place of masks": (
        lambda p: EagleDecodingConfig(
            speculative_model=eagle3_dir(p, config={"parallel_draft_step": 4})
        ),
        "parallel_draft_heads are another kind, which is not supported",
    ),
    "mask token outside": (
        lambda p: _p_eagle(p, config={"ptd_token_id": VOCAB}),
        "ptd_token_id=97, the mask token, is not in the vocabulary 0 … 96. Correct",
    ),
    "mask token is no number": (
        lambda p: _p_eagle(p, config={"ptd_token_id": "93"}), "ptd_token_id='93'.*Correct",
    ),
    "two mask tokens": (
        lambda p: _p_eagle(p, config={"eagle_config": {"mask_token_id": 5}}),
        "mask_token_id=5 and ptd_token_id=93 mean the same and differ. Remove",
    ),
    "no mask_hidden": (
        lambda p: EagleDecodingConfig(
            speculative_model=_without(p_eagle_dir(p), "mask_hidden")
        ),
        "ptd_token_id=93 belongs to a head that drafts in parallel.* no tensor mask_hidden. Copy",
    ),
    "mask_hidden of another width": (
        lambda p: EagleDecodingConfig(speculative_model=_reshaped(p_eagle_dir(p), (1, 48))),
        r"mask_hidden .* has shape \[1, 48\]; it must be \[1, 144\].* Check",
    ),
    "bad length": (
        lambda p: _p_eagle(p, config={"num_depths": 0}), "num_depths=0; it must be .*Correct",
    ),
    "EAGLE-1": (
        lambda p: EagleDecodingConfig(
            speculative_model=_edit(
                _add_mask_hidden(eagle1_dir(p)), mask_token_id=3
            )
        ),
        "EAGLE-1 head with a mask token .* Use one of those",
    ),
    "a draft model without one": (
        lambda p: DraftTargetDecodingConfig(
            speculative_model=tiny_model_dir(p, seed=2), parallel_drafting=True
        ),
        "parallel_drafting=True, but .* no pard_token.* Use a PARD model",
    ),
    "a draft model's outside": (
        lambda p: DraftTargetDecodingConfig(speculative_model=_edit(pard_dir(p), pard_token=-1)),
        "pard_token=-1, the mask token, is not in the vocabulary 0 … 96",
    ),
}  # fmt: skip


def _add_mask_hidden(path: Path) -> Path:
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mask_hidden": torch.ones(1, 48)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(target_dir: Path, tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    config = make(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        _engine(target_dir, config)


def test_config_and_modes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="parallel_drafting='yes': it must be True, False or None"
    ):
        DraftTargetDecodingConfig(speculative_model="d", parallel_drafting="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Mode NONE does not draft in parallel"):
        create_worker(None, 3)


def test_a_worker_that_drafts_one_by_one_refuses_the_head(target_dir: Path, tmp_path: Path) -> None:
    """In a loop of one's own; the builder chooses the right one."""
    config = _p_eagle(tmp_path)
    llm = _engine(target_dir, config)
    llm.executor.runner.step.worker = create_worker(config)
    with pytest.raises(ConfigError, match=r"make the worker with create_worker\(config, head"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
