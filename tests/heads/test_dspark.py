"""DSpark heads: drafts chosen in turn from one pass, against float64, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_cases import DSPARK_CASES, NaiveDFlash, make_dspark_case
from drafting import Case, Script, cases_by_k, run_random_schedule, run_with_changing_draft_len
from guided import save_tokenizer
from matrix import cpu_engine
from oracle import Oracle, random_prompts
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_dflash import LAYERS, dflash_dir

from trtspec import (
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    GuidedDecodingParams,
    SamplingParams,
)
from trtspec.errors import CheckpointError
from trtspec.models.drafters.markov import MarkovHead
from trtspec.ops.tokens.markov_walk import MarkovTables

LETTERS = GuidedDecodingParams(regex="[cdegh]{40}")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), cases_by_k(DSPARK_CASES, ["dspark"]))
def test_draft_logits_equal_recomputation(
    target_dir: Path, tmp_path: Path, name: str, k: int
) -> None:
    case = make_dspark_case(name, target_dir, tmp_path, k)
    compared, executor = run_random_schedule(case, k, k, Script)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "dspark_rnn"])
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    run_with_changing_draft_len(make_dspark_case(name, target_dir, tmp_path, 3), Script)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "exact_match", "rejection", "block"])
def test_texts_are_right_under_every_rule(
    target_dir: Path, oracle: Oracle, tmp_path: Path, rule: str
) -> None:
    head = dflash_dir(tmp_path, markov="gated", block=4)
    config = DSparkDecodingConfig(speculative_model=head, acceptance=rule)
    prompts = random_prompts(5)
    llm = cpu_engine(target_dir, config, chunk=24, pool=112)
    greedy = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, output in zip(prompts, greedy, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 20)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    sampled = llm.generate(prompts, params)
    if rule in ("strict", "exact_match"):  # whose seeded texts are those without speculation
        plain = cpu_engine(target_dir, None).generate(prompts, params)
        assert [o.outputs[0].token_ids for o in sampled] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.slow
@pytest.mark.parametrize("asks", [{"temperature": 5.0, "seed": 3}, {"guided_decoding": LETTERS}])
def test_a_walk_by_tables_is_for_greedy_drafts_alone(
    tmp_path: Path, asks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are sampled or masked are drawn one by one, though a GPU has the tables."""
    target = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=8)
    save_tokenizer(target)
    head = dflash_dir(tmp_path, markov="vanilla", block=4)
    weights = load_file(head / "model.safetensors")
    tables = MarkovTables(*(weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2)), None)
    config = DSparkDecodingConfig(speculative_model=head, acceptance="rejection")
    said = []
    for known in (None, tables):  # on a CPU the weights are packed: there are none
        monkeypatch.setattr(MarkovHead, "tables", lambda *_, known=known: known)
        params = SamplingParams(max_tokens=40, ignore_eos=True, **asks)
        outputs = cpu_engine(target, config).generate(random_prompts(3), params)
        said.append(
            [(o.outputs[0].token_ids, o.spec_stats.num_accepted_draft_tokens) for o in outputs]
        )
    assert said[0] == said[1]
    assert sum(accepted for _, accepted in said[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_what_modelopt_exports_drafts_as_the_formula(
    target_dir: Path, tmp_path: Path, kind: str
) -> None:
    """Its fields are in `dflash_config`, its tensors without the prefix; no name is DSpark's."""
    own = dflash_dir(tmp_path, markov=kind, block=3, confidence="markov")
    raw = json.loads((own / "config.json").read_text())
    assert raw["architectures"] == ["DSparkDraftModel"]
    raw["architectures"] = ["DFlashDraftModel"]
    raw["dflash_config"] |= {
        "projector_type": "dspark", "shift_label": True, "use_confidence_head": True,
        "causal": False, "markov_rank": raw.pop("markov_rank"),
        "markov_head_type": raw.pop("markov_head_type"),
    }  # fmt: skip
    path = tmp_path / "modelopt"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensor
        for name, tensor in load_file(own / "model.safetensors").items()
    }
    assert "markov_w1.weight" in tensors and "confidence_proj.bias" in tensors
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    naive = NaiveDFlash(
        own, target_dir, "dflash", theta=5000.0, markov=kind, sample_from_anchor=True
    )
    config = DSparkDecodingConfig(max_draft_len=3, speculative_model=path)
    compared, _ = run_random_schedule(Case(target_dir, config, naive, capture=LAYERS), 3, 3, Script)
    assert compared > 30


def test_what_is_of_another_kind_is_refused(target_dir: Path, tmp_path: Path) -> None:
    dspark, dflash = dflash_dir(tmp_path, markov="vanilla"), dflash_dir(tmp_path)
    with pytest.raises(CheckpointError, match="is a DSpark head, not a DFlash head"):
        cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=dspark))
    with pytest.raises(CheckpointError, match="is a DFlash head, not a DSpark head"):
        cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=dflash))
    odd = dflash_dir(tmp_path, markov="vanilla", inner={"markov_head_type": "lstm"})
    with pytest.raises(CheckpointError, match="markov_head_type='lstm'; allowed are vanilla"):
        cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=odd))
    odd = dflash_dir(tmp_path, markov="vanilla", rank=12, inner={"markov_rank": 13})
    with pytest.raises(CheckpointError, match=r"markov_w1.*Check markov_rank and vocab_size"):
        cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=odd))


def test_a_confidence_head_is_in_config_and_tensors(
    target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = dflash_dir(tmp_path, markov="vanilla", confidence="markov")
    raw, tensors = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    config = DSparkDecodingConfig(speculative_model=path)

    def confidence_of(**fields: Any) -> Any:
        (path / "config.json").write_text(json.dumps(raw | fields))
        return cpu_engine(target_dir, config).executor.runner.step.draft_model.confidence_head

    for given in ({}, {"enable_confidence_head": True}, {"use_confidence_head": True}):
        assert confidence_of(**given) is not None
    assert confidence_of(enable_confidence_head=False) is None
    with pytest.raises(CheckpointError, match="enable_confidence_head=True and use_confidence_hea"):
        confidence_of(enable_confidence_head=True, use_confidence_head=False)
    raw["dflash_config"]["confidence_head_with_markov"] = False
    with pytest.raises(
        CheckpointError,
        match=r"confidence_head.proj.weight in .*Check hidden_size, markov_rank and",
    ):
        confidence_of()
    kept = {key: w for key, w in load_file(tensors).items() if "confidence" not in key}
    save_file(kept, tensors, metadata={"format": "pt"})
    assert confidence_of() is None and not caplog.messages
    assert confidence_of(enable_confidence_head=True) is None
    assert any("has no confidence_head.proj.weight" in message for message in caplog.messages)


@pytest.mark.parametrize("reads", ["markov", "hidden"])
def test_a_confidence_head_s_width_says_what_it_reads(
    target_dir: Path, tmp_path: Path, reads: str
) -> None:
    """Where its field is not given: sources differ in what that means."""
    path = dflash_dir(tmp_path, markov="vanilla", confidence=reads)
    raw = json.loads((path / "config.json").read_text())
    said = raw["dflash_config"].pop("confidence_head_with_markov")
    (path / "config.json").write_text(json.dumps(raw))
    llm = cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=path))
    head = llm.executor.runner.step.draft_model
    assert head.config.confidence_size > head.config.decoder.hidden_size or not said
    assert (reads == "markov") == said
