"""Step-3.5: the dense target, and MTP layers of two kinds in two KV groups, a head for each."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import run_random_schedule
from freed_blocks import Ledger, assert_nothing_leaked, poison_free_blocks
from loading import ON_CPU
from matrix import covering
from safetensors.torch import load_file, save_file
from tiny import prefill_metadata
from tiny_heads import mtp_model_dir
from tiny_step import (
    FULL,
    MTP_TYPES,
    SLIDING,
    VOCAB,
    WINDOW,
    NaiveStepMTP,
    StepCase,
    StepOracle,
    step_config,
    step_dir,
)

from trtspec import LLM, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.hf_config import load_config, parse_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError
from trtspec.metadata.mode import SpeculativeDecodingMode

pytest.importorskip("transformers.models.step3p7", reason="transformers is too old for an oracle")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_dir(tmp_path_factory.mktemp("step"), WINDOW)


@pytest.fixture(scope="module")
def oracle(target: Path) -> StepOracle:
    return StepOracle(target)


def test_the_target_equals_transformers(target: Path, oracle: StepOracle) -> None:
    model = load_decoder(target, ON_CPU)
    assert len(model.kv_group_specs(torch.float32)) == 2
    rng = random.Random(0)
    texts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (30, 7)]
    meta, positions = prefill_metadata(model.config, [30, 7], page_size=4)
    with torch.inference_mode():
        hidden = model(torch.tensor(texts[0] + texts[1]), positions, meta)
        ours = model.compute_logits(hidden)
    expected = torch.cat([oracle.logits(text) for text in texts])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "max_seq_len"), [(1, 64), (2, 64), (4, 64), (4, 36)])
def test_draft_logits_equal_recomputation(
    target: Path, oracle: StepOracle, k: int, max_seq_len: int
) -> None:
    """At every step of a random schedule with chunks, preemption and every acceptance length, also
    where drafts run past the maximum length."""
    config = MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla=True)
    case: Any = StepCase(target, config, NaiveStepMTP(target, WINDOW), oracle)
    compared, executor = run_random_schedule(case, k, seed=k, max_seq_len=max_seq_len)
    assert compared > 30 and set(executor.statistics.accepted_lens) == set(range(k + 1))
    assert executor.kv_cache.windows == (None, WINDOW, *([WINDOW] if k == 1 else [WINDOW, None]))


@pytest.mark.slow
@covering(chunked=[False, True], overlap=[False, True], pool=[None, 88])
def test_greedy_equals_transformers(
    target: Path, oracle: StepOracle, monkeypatch: pytest.MonkeyPatch,
    chunked: bool, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    llm = LLM(
        target, MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True), device="cpu",
        dtype="float32", max_batch_size=3, max_seq_len=128, max_num_tokens=16 if chunked else 128,
        enable_chunked_prefill=chunked, disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=4),
    )  # fmt: skip
    Ledger(monkeypatch)
    poison_free_blocks(llm, monkeypatch)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in ((12, 9, 14, 7))]
    if pool is None:
        prompts[0] *= 4
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    expected = oracle.extend_all(prompts, 40)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (llm.stats().num_preemptions > 0) == (pool is not None)
    assert_nothing_leaked(llm)


def test_sampled_drafts_of_every_step_are_remembered(target: Path) -> None:
    """Each step's own distribution, in the slot and at the depth where rejection looks for it."""
    config = MTPDecodingConfig(
        num_nextn_predict_layers=3, use_mtp_vanilla=True, acceptance="rejection"
    )
    llm = LLM(target, config, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=64)
    worker, drawn = llm.executor.worker, {}
    propose = worker.propose

    def remembering(logits: torch.Tensor, d2t: Any, sampler: Any, last: Any, depth: int) -> Any:
        drawn[depth] = logits.clone()
        return propose(logits, d2t, sampler, last, depth)

    worker.propose = remembering  # type: ignore[method-assign]
    llm.executor.enqueue([5, 6, 7], SamplingParams(max_tokens=20, temperature=0.9, seed=1))
    for _ in range(3):
        llm.executor.step()
    assert worker.draft_memory is not None
    slot = llm.executor.scheduler.running[0].slot
    kept = worker.draft_memory.logits[slot]
    for depth in range(3):
        torch.testing.assert_close(kept[depth], drawn[depth][0].to(kept.dtype))
    assert not torch.equal(drawn[0], drawn[1])


# -- which layers draft ------------------------------------------------------------------------
MODES = SpeculativeDecodingMode


@pytest.mark.parametrize(
    ("k", "options", "mode", "layers"),
    [
        (3, {}, MODES.MTP, 3),  # what the family was trained for
        (4, {}, MODES.MTP, 4),
        (1, {}, MODES.MTP_EAGLE_ONE_MODEL, 1),  # with one draft both are the same
        (3, {"use_mtp_vanilla": True}, MODES.MTP, 3),
        (3, {"use_mtp_vanilla": False}, MODES.MTP_EAGLE_ONE_MODEL, 1),
        (3, {"mtp_eagle_one_model": False}, MODES.MTP_EAGLE, 1),
    ],
)
def test_each_draft_has_its_layer_unless_the_config_says_otherwise(
    target: Path, caplog: pytest.LogCaptureFixture,
    k: int, options: dict[str, bool], mode: SpeculativeDecodingMode, layers: int,
) -> None:  # fmt: skip
    config = MTPDecodingConfig(num_nextn_predict_layers=k, **options)
    llm = LLM(target, config, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64)
    assert llm.mode is mode and llm.executor.worker.config.spec_dec_mode is mode
    assert llm.max_draft_len == k and llm.executor.draft_model.num_layers == layers
    told = [record.getMessage() for record in caplog.records if "All drafts" in record.message]
    if layers == 4:
        assert not told
    else:
        (message,) = told
        first = "layer" if layers == 1 else f"{layers} layers"
        assert f"from the first {first} of the checkpoint's 4 MTP layers" in message
        assert "num_nextn_predict_layers=4, use_mtp_vanilla=True" in message


def test_more_drafts_than_layers_are_refused_as_the_family_drafts(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 4.*use_mtp_vanilla=False"):
        LLM(target, MTPDecodingConfig(num_nextn_predict_layers=5), device="cpu")


def test_other_families_draft_with_their_first_layer_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=3)
    llm = LLM(several, MTPDecodingConfig(num_nextn_predict_layers=3), device="cpu",
              dtype="float32", max_batch_size=1, max_seq_len=64)  # fmt: skip
    assert llm.mode is MODES.MTP_EAGLE_ONE_MODEL and llm.executor.draft_model.num_layers == 1
    assert "from the first layer of the checkpoint's 3 MTP layers" in caplog.text
    caplog.clear()
    one = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=1)
    LLM(one, MTPDecodingConfig(num_nextn_predict_layers=3), device="cpu", dtype="float32",
        max_batch_size=1, max_seq_len=64)  # fmt: skip
    assert "All drafts" not in caplog.text


# -- reading the checkpoint --------------------------------------------------------------------
def test_the_layout_is_told_from_deepseeks(target: Path) -> None:
    with ExitStack() as stack:
        report = read_head(target, load_config(target), stack)
    assert report.config is not None and not report.problems
    config = report.config
    assert config.format == "Step-3.5 MTP layers" and not config.norm_output
    assert config.own_lm_head and not config.own_embedding
    assert list(config.decoder.layer_types) == MTP_TYPES
    assert config.decoder.layer_windows == (WINDOW, None, WINDOW, None)
    assert config.decoder.norm_offset == 1.0 and config.decoder.head_gate


def test_more_steps_than_layers_are_refused(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"5 MTP layers are needed.*has 4"):
        LLM(target, MTPDecodingConfig(num_nextn_predict_layers=5, use_mtp_vanilla=True),
            device="cpu")  # fmt: skip


def test_names_without_the_infix_are_the_same(target: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace(".transformer.", "."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    with ExitStack() as stack:
        plain, infixed = (read_head(p, load_config(p), stack) for p in (tmp_path, target))
    assert plain.config == infixed.config and set(plain.tensors) == set(infixed.tensors)


def test_mtp_layers_of_unknown_kind_are_refused(tmp_path: Path) -> None:
    path = step_dir(tmp_path)
    raw = json.loads((path / "config.json").read_text())
    raw["layer_types"] = raw["layer_types"][:4]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="several kinds"):
        LLM(path, MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [FULL]}, "layer_types has 1 entries for 4 layers and 4 MTP layers"),
        ({"layer_types": ["chunked"] * 4}, "chunked"),
        ({"sliding_window": None}, "sliding_window=None"),
        ({"zero_centered": False}, "zero_centered=False"),
        ({"use_rope_layers": [True, False]}, "use_rope_layers"),
        ({"rope_theta": [1.0, 2.0, 3.0, 1.0]}, "rope_theta"),
        ({"partial_rotary_factors": [0.4] * 4}, "3 of it rotated"),
        ({"attention_other_setting": {"num_attention_heads": 3}}, "3 heads on 2 groups"),
        ({"num_attention_groups": None}, "num_attention_groups"),
        ({"num_attention_heads": None}, "does not say num_attention_heads"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(step_config(WINDOW, **changes), Path("config.json"))


def test_rope_scaling_is_for_the_kinds_it_names() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    config = parse_config(step_config(WINDOW, rope_scaling=scaling), Path("config.json"))
    kinds = {kind: config.type_fields[kind]["rope_parameters"] for kind in (FULL, SLIDING)}
    assert kinds[FULL] == {"rope_theta": 500.0, **scaling}
    assert kinds[SLIDING] == {"rope_type": "default", "rope_theta": 10000.0}
