"""DFlash heads: what a block says after rejections of every length, formats, and what is refused.

Every draft logit equals a recomputation in float64 that knows a request's text and the target's
states of it, and nothing else. speculators' own model says the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import DFLASH_CASES, make_dflash_case
from drafting import (
    cases_by_k,
    run_random_schedule,
    run_with_changing_draft_len,
    run_with_rests,
)
from loading import HEAD_ON_CPU, ON_CPU
from masked import MaskedScript
from oracle import VOCAB
from safetensors.torch import load_file, save_file
from speculators_reference import block_logits, build_dflash
from tiny import prefill_metadata, tiny_model_dir
from tiny_dflash import LAYERS, as_speculators, dflash_dir
from tiny_heads import eagle3_dir

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.metadata.embeds import RowEmbeds
from trtspec.metadata.missed import CAPACITY
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.ops.step.slots import draft_step_metadata
from trtspec.ops.tokens.walk import PathCandidates, candidate_scores
from trtspec.workers import create_worker

LM_HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), cases_by_k(DFLASH_CASES, ["dflash"]))
def test_draft_logits_equal_recomputation(
    target_dir: Path, tmp_path: Path, name: str, k: int
) -> None:
    case = make_dflash_case(name, target_dir, tmp_path, k)
    compared, executor = run_random_schedule(case, k, k, MaskedScript)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1))
    assert k != 4 or executor.stats().num_preemptions > 0


# -- against the published package -------------------------------------------------------------
ROWS, PAGE = 40, 8
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
NO_MARKOV = {"confidence_head_with_markov": False}
WINDOW = {
    "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    "sliding_window_non_causal": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"head_dim": 8},
        {"head_dim": 8, "num_hidden_layers": 3, "draft_vocab_size": 40, "attention_bias": True},
        {"head_dim": 16, "block_size": 8, "aux_hidden_state_layer_ids": [8], **ROPE},
        {"head_dim": 8, "num_key_value_heads": 6, "sample_from_anchor": True},
        {"head_dim": 8, **WINDOW},
        {"head_dim": 8, "name": "dspark", "markov_rank": 12},
        {"head_dim": 8, "name": "dspark", "markov_rank": 0, **NO_MARKOV},
        {
            "head_dim": 8,
            "name": "dspark",
            "markov_rank": 12,
            "markov_head_type": "gated",
            "draft_vocab_size": 40,
        },
        {"head_dim": 8, "name": "dspark", "markov_rank": 12, "markov_head_type": "rnn"},
        {
            "head_dim": 8,
            "name": "dspark",
            "markov_rank": 12,
            "markov_head_type": "rnn",
            "sample_from_anchor": False,
        },
        {"head_dim": 8, "name": "dflash2", "selector_rank": 12},
        {
            "head_dim": 8,
            "name": "dflash2",
            "selector_rank": 10,
            "selector_top_k": 5,
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "num_hidden_layers": 3,
            "sample_from_anchor": True,
        },
        {"head_dim": 8, "name": "dflash2", "conv_kernel_size": 1, **WINDOW},
    ],
)
def test_speculators_model(target_dir: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    target = load_decoder(target_dir, ON_CPU)
    model = build_dflash(**flags)
    model.embed_tokens.weight.data.copy_(target.embed_tokens.weight)
    if model.lm_head.weight.shape == target.embed_tokens.weight.shape:  # then it is not saved
        model.lm_head.weight.data.copy_(load_file(target_dir / "model.safetensors")[LM_HEAD])
    model.save_pretrained(tmp_path / "head")
    head = load_head(
        tmp_path / "head",
        target,
        HeadRequest(kind="dspark" if flags.get("name") == "dspark" else "dflash"),
        ON_CPU,
    )
    assert isinstance(head, DFlashHead)
    model_of_confidence = getattr(model, "confidence_head", None)
    assert (head.d2t is None) == (model.d2t is None or not bool(model.d2t.any()))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, model.fc.in_features, generator=generator)
    ids, block = torch.randint(VOCAB, (ROWS,), generator=generator), model.block_size
    for anchor in (1, 9, 27):
        expected = block_logits(model, hidden, ids, anchor)
        meta, _ = prefill_metadata(head.config.decoder, [ROWS], PAGE)
        meta = dataclasses.replace(meta, max_seq_len=ROWS)
        context = dataclasses.replace(
            meta, slot_mappings=tuple(slots[:anchor] for slots in meta.slot_mappings)
        )
        read = torch.cat([ids[anchor : anchor + 1], torch.full((block - 1,), 90)])
        with torch.no_grad():
            head.read_context(hidden[:anchor], torch.arange(anchor), context)
            step = draft_step_metadata(meta, anchor + torch.arange(block)[None], block)
            out, _ = head(read, step.position_ids, hidden, step, step=0)
            ours = head.compute_logits(out, 0)
            before = ids[anchor : anchor + block]
            if not head.samples_from_anchor:
                before = torch.cat([before[:1], before[:-1]])
            if head.candidate_selector is not None:
                found = head.candidate_selector.candidates(ours, out, batch=1)
                given = PathCandidates(*(tensor[:, 0] for tensor in found))
                scores = candidate_scores(given, before, head.candidate_selector.books)
                ours = torch.full(ours.shape, -math.inf).scatter(1, given.ids, scores)
            if head.markov_head is not None:
                state, biases = head.markov_head.first_state(out[:1]), []
                for token, row in zip(before, out, strict=True):
                    bias, state = head.markov_head(token[None], row[None], state)
                    biases.append(bias)
                ours = ours + torch.cat(biases)
            if model_of_confidence is not None:
                embeddings = out[:, :0]
                read = out
                if head.markov_head is not None:
                    embeddings = head.markov_head.embeddings(before)
                    read = torch.cat([out, model.markov_head.prev_embeddings(before)], dim=-1)
                assert head.confidence_head is not None
                torch.testing.assert_close(
                    head.confidence_head(out, embeddings), model_of_confidence(read)
                )
        first = 0 if head.samples_from_anchor else 1
        assert isinstance(ours, torch.Tensor) and expected[expected > -math.inf].std() > 0.5
        torch.testing.assert_close(ours[first:], expected[first:], atol=1e-4, rtol=2e-5)


# -- in the engine -----------------------------------------------------------------------------
@pytest.mark.slow
def test_draft_logits_with_wide_windows(target_dir: Path, tmp_path: Path) -> None:
    """Rows of sliding layers that see ahead: they see as far back as the block's first row."""
    case = make_dflash_case("dflash_windows_ahead", target_dir, tmp_path, 4)
    assert run_random_schedule(case, 4, 4, MaskedScript)[0] > 30


def test_the_last_token_s_row_proposes_by_its_other_name(target_dir: Path, tmp_path: Path) -> None:
    case = make_dflash_case("dflash_anchor", target_dir, tmp_path, 4)
    file = Path(case.config.speculative_model) / "config.json"
    raw = json.loads(file.read_text())
    raw["dflash_config"]["shift_label"] = raw["dflash_config"].pop("sample_from_anchor")
    file.write_text(json.dumps(raw))
    assert run_random_schedule(case, 4, 4, MaskedScript)[0] > 30


@pytest.mark.slow
def test_an_embedding_of_its_own_is_scaled_too(target_dir: Path, tmp_path: Path) -> None:
    """As vLLM and z-lab do: the factor is of whatever embedding the head reads."""
    case = make_dflash_case("dflash_own_embedding", target_dir, tmp_path, 4)
    assert run_random_schedule(case, 4, 4, MaskedScript)[0] > 30


@pytest.mark.parametrize("copied", [True, False, None], ids=["copy", "own", "shared"])
def test_the_target_s_scale_is_of_a_shared_embedding(
    target_dir: Path, tmp_path: Path, copied: bool | None
) -> None:
    """A copy of the target's embedding in the head's file is the head's own. Images stay as they
    are."""
    target = load_decoder(target_dir, ON_CPU)
    target.config = dataclasses.replace(target.config, embedding_scale=3.0)
    path = dflash_dir(tmp_path, own_embedding=copied is not None)
    weight = target.embed_tokens.weight
    if copied:
        tensors = load_file(path / "model.safetensors") | {"embed_tokens.weight": weight.data}
        save_file(tensors, path / "model.safetensors")
    if copied is False:
        weight = load_file(path / "model.safetensors")["embed_tokens.weight"]
    options = HEAD_ON_CPU
    head = load_head(path, target, HeadRequest(kind="dflash"), options)
    ids, image = torch.tensor([5, 6, 7]), torch.randn(1, weight.shape[1])
    expected = weight[ids] * (3 if copied is None else 1)
    expected[1] = image
    assert torch.equal(head.embed(ids, RowEmbeds(torch.tensor([1]), image)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dflash_anchor"])
def test_draft_logits_up_to_the_maximum_length(target_dir: Path, tmp_path: Path, name: str) -> None:
    """Every request ends at the maximum. A block that reaches past it is not what it was trained
    as: it is compared up to there."""
    case = make_dflash_case(name, target_dir, tmp_path, 3)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=36)
    expected = case.oracle.extend([5, 6, 7], 33)
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True)).outputs[0]
    assert output.token_ids == expected and output.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dflash_anchor", "dflash_next"])
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    case = make_dflash_case(name, target_dir, tmp_path, 3)
    run_with_changing_draft_len(case, MaskedScript)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dflash_windows", "dflash_next"])
def test_a_head_reads_late_what_it_missed(target_dir: Path, tmp_path: Path, name: str) -> None:
    """Its windows are shorter than what it may miss."""
    read = run_with_rests(make_dflash_case(name, target_dir, tmp_path, 3), MaskedScript)
    assert max(read) == CAPACITY, "a rest was longer than there is room"
    assert len(read) > 5


def test_a_generation_step_has_one_draft_pass(target_dir: Path, tmp_path: Path) -> None:
    case = make_dflash_case("dflash", target_dir, tmp_path, 4)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=96)
    script, executor = MaskedScript(llm, case, seed=0), llm.executor
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for i in range(2):
        request = executor.enqueue([5, 6, 7 + i], params)
        script.requests[request.request_id] = request
    while executor.has_work:
        script.passes.clear()
        executor.step()
        assert script.passes in ([len(script.logits) * 5], []), "the last token and 4 masks of each"


def test_the_formats_of_a_head_are_one(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, block=5, draft_vocab=40)
    texts = []
    for path in (head, as_speculators(head)):
        config = DFlashDecodingConfig(speculative_model=path)
        llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=48)
        model = llm.executor.draft_model
        assert isinstance(model, DFlashHead) and model.layers_to_capture == LAYERS
        assert llm.executor.max_draft_len == 4
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append((output.outputs[0].token_ids, output.spec_stats.acceptance_length))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size=1"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": VOCAB}}, f"mask_token_id={VOCAB}"),
        ({"vocab_size": 60}, f"vocab_size is 60, the target's {VOCAB}. Use a head"),
        ({"dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3, 8]}}, "8 is no layer"),
        ({"dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3]}}, "fc.weight"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "DFlash2BeamDraftModel"),
        ({"markov_rank": 256}, "a bias like DSpark's"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type .domino"),
        ({"dflash_config": []}, "must be objects"),
        ({"architectures": "DFlashDraftModel"}, "it must be a list of names"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3"),
        ({"context_embeddings": 1}, "context_embeddings=1; it must be true or false"),
        ({"context_embeddings": True}, "has no context_embedding_fc.weight. Copy the head"),
    ],
)
def test_what_cannot_be_is_refused(
    target_dir: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    head = dflash_dir(tmp_path)
    raw = json.loads((head / "config.json").read_text()) | change
    (head / "config.json").write_text(json.dumps(raw))
    config = DFlashDecodingConfig(speculative_model=head)
    with pytest.raises(CheckpointError, match=said):
        LLM(target_dir, config, device="cpu", max_seq_len=48)


def test_context_embeddings_are_in_config_and_tensors(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, reads_next=True)
    raw, config = json.loads((head / "config.json").read_text()), None
    nested = raw["dflash_config"]
    for size, said in ((VOCAB, r"context_embedding_fc.*hidden_size"), (None, "does not say")):
        if size is None:
            nested.pop("context_embeddings")
        else:
            tensors = load_file(head / "model.safetensors")
            good = tensors["context_embedding_fc.weight"]
            wrong = tensors | {"context_embedding_fc.weight": good.new_zeros(len(good), size)}
            save_file(wrong, head / "model.safetensors")
        (head / "config.json").write_text(json.dumps(raw))
        config = DFlashDecodingConfig(speculative_model=head)
        with pytest.raises(CheckpointError, match=said):
            LLM(target_dir, config, device="cpu", max_seq_len=48)


def test_a_null_says_nothing(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, block=5, sample_from_anchor=True)
    raw = json.loads((head / "config.json").read_text())
    raw |= {"target_layer_ids": None, "sample_from_anchor": None, "mask_token_id": None}
    (head / "config.json").write_text(json.dumps(raw))
    config = DFlashDecodingConfig(speculative_model=head)
    model = LLM(target_dir, config, device="cpu", max_seq_len=48).executor.draft_model
    assert isinstance(model, DFlashHead)
    assert model.layers_to_capture == LAYERS and model.samples_from_anchor


def test_a_head_is_given_to_its_own_config(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, block=5)
    with pytest.raises(CheckpointError, match="is a DFlash head, not an EAGLE head"):
        LLM(target_dir, EagleDecodingConfig(speculative_model=head), device="cpu")
    with pytest.raises(CheckpointError, match="is an EAGLE head, not a DFlash head"):
        config = DFlashDecodingConfig(speculative_model=eagle3_dir(tmp_path))
        LLM(target_dir, config, device="cpu")
    for config_of in (DFlashDecodingConfig, DSparkDecodingConfig):
        with pytest.raises(CheckpointError, match="no tensors of a draft head: it may be a lang"):
            LLM(target_dir, config_of(speculative_model=target_dir), device="cpu")
    with pytest.raises(ConfigError, match="max_draft_len=5: the head was trained to propose 4"):
        config = DFlashDecodingConfig(speculative_model=head, max_draft_len=5)
        LLM(target_dir, config, device="cpu")
    with pytest.raises(ConfigError, match="drafts from mask tokens"):
        create_worker(DFlashDecodingConfig(speculative_model=head, max_draft_len=3))
