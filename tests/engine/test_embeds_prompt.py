"""Prompts with vectors in place of embeddings and positions of three axes, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embeds import (
    IMAGE,
    LAYERS,
    MASK,
    PROMPT,
    SIZE,
    embeds_configs,
    embeds_prompt,
    greedy_with_embeds,
    mrope_positions_of_prompt,
    vl_model_dir,
    vl_with_mtp,
)
from last_rows import watch_last_rows
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir, p_eagle_dir
from torch import Tensor

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.errors import CheckpointError, ConfigError, RequestError


@pytest.fixture(scope="module")
def vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vl_model_dir(tmp_path_factory.mktemp("vl"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {}, {"enable_chunked_prefill": True, "max_num_tokens": 12, "max_batch_size": 2},
    {"disable_overlap_scheduler": False},
])  # fmt: skip
def test_positions_of_three_axes_equal_transformers(
    vl_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    expected = greedy_with_embeds(vl_dir, prompt, 12)
    assert expected != greedy_with_embeds(vl_dir, embeds_prompt(), 12), (
        "the positions do not matter to this model"
    )
    settings = {"max_batch_size": 2, **settings}
    for name, config in embeds_configs(tmp_path, vl_dir).items():
        llm = LLM(vl_dir, config, device="cpu", dtype="float32", max_seq_len=64, **settings)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        text = [11, 12, 13]
        mixed, plain = llm.generate([prompt, text], params)
        assert mixed.outputs[0].token_ids == expected, name
        alone = llm.generate(text, params)
        assert plain.outputs[0].token_ids == alone.outputs[0].token_ids, name


def test_a_prompt_that_ends_with_an_image_stands_where_it_is(
    vl_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last row alone would be taken for a generation's, behind the text before."""
    prompt = embeds_prompt(
        prompt_token_ids=PROMPT[:-1],
        is_embed=MASK[:-1],
        mrope_positions=mrope_positions_of_prompt()[:, :-1],
    )

    def first_token() -> tuple[int, float]:
        llm = LLM(vl_dir, device="cpu", dtype="float32", max_seq_len=64)
        output = llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=1)).outputs[0]
        assert output.logprobs is not None
        return output.token_ids[0], output.logprobs[0][output.token_ids[0]].logprob

    token, logprob = first_token()
    passes = watch_last_rows(monkeypatch)
    assert first_token() == (token, pytest.approx(logprob, abs=1e-4))
    assert not passes


def test_the_older_form_is_read_too(vl_dir: Path, tmp_path: Path) -> None:
    """Qwen2-VL's first checkpoints: the text's fields and tensors beside the encoder's."""
    raw = json.loads((vl_dir / "config.json").read_text())
    inner = raw.pop("text_config")
    rope = inner.pop("rope_parameters")
    inner |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "config.json").write_text(json.dumps({**inner, **raw}))
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(vl_dir / "model.safetensors").items()
    }
    assert any(name.startswith("visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    llm = LLM(tmp_path, device="cpu", dtype="float32", max_seq_len=64)
    output = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy_with_embeds(vl_dir, prompt, 12)


def test_a_drafter_turns_by_the_target_s_axes(vl_dir: Path) -> None:
    """The target itself drafts; the vectors are the placeholder's own, so it can read them."""
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(vl_dir))
    llm = LLM(vl_dir, config, device="cpu", dtype="float32", max_seq_len=64)
    own = llm.executor.target.embed_tokens.weight[IMAGE].expand(int(MASK.sum()), -1)
    prompt = embeds_prompt(prompt_embeds=own, mrope_positions=mrope_positions_of_prompt())
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    for output in llm.generate([prompt, [11, 12, 13]], params):
        assert output.spec_stats.acceptance_length == 4


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "vanilla"])
def test_preempted_requests_read_their_vectors_again(
    vl_dir: Path, tmp_path: Path, drafter: str
) -> None:
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    expected = greedy_with_embeds(vl_dir, prompt, 30)
    if drafter == "eagle3":
        head = eagle3_dir(tmp_path, draft_vocab=None)
        target, config = vl_dir, EagleDecodingConfig(max_draft_len=3, speculative_model=str(head))
    else:
        target = vl_with_mtp(vl_dir, tmp_path, 3)
        config = MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=64,
        kv_cache_config=KvCacheConfig(max_tokens=104, tokens_per_block=8),
    )  # fmt: skip
    outputs = llm.generate([prompt] * 3, SamplingParams(max_tokens=30, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [expected] * 3
    assert llm.stats().num_preemptions > 0


def test_what_a_head_reads_late_stands_where_it_stood(vl_dir: Path, tmp_path: Path) -> None:
    """A rest leaves rows behind an image to the head. Its keys are those that it writes at once."""
    target = vl_with_mtp(vl_dir, tmp_path, 1)
    config = MTPDecodingConfig(
        num_nextn_predict_layers=3, use_mtp_vanilla=False, draft_len_schedule={64: 3}
    )
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    keys: list[Tensor] = []
    for rest in (0, 8):
        llm = LLM(
            target, config, device="cpu", dtype="float32", max_seq_len=64,
            disable_overlap_scheduler=True,
        )  # fmt: skip
        executor = llm.executor
        request = executor.enqueue(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        executor.step()
        executor.runtime_draft_len = 0
        for _ in range(rest):
            executor.step()
        assert request.num_missed == max(0, rest - 1), "the first one verifies drafts"
        executor.runtime_draft_len = 3
        while len(request.output_token_ids) < 16:
            executor.step()
        blocks = executor.kv_cache.table_of(request.request_id)[1]
        known = len(PROMPT) + 14
        rows = executor.kv_cache.groups[1].k_cache[:, list(blocks)].flatten(1, 2)
        keys.append(rows[:, :known].clone())
    torch.testing.assert_close(keys[1], keys[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafter", ["draft_target", "p_eagle"])
def test_drafts_amid_a_prompt_leave_its_keys_alone(
    vl_dir: Path, tmp_path: Path, drafter: str
) -> None:
    """A part's last row is read as the prompt has it. Then drafting reads it as text, for nothing
    that stays: it may be in an image, or have one after it."""
    config: Any = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(vl_dir))
    if drafter == "p_eagle":
        config = EagleDecodingConfig(max_draft_len=3, speculative_model=str(p_eagle_dir(tmp_path)))
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    keys: list[Tensor] = []
    for chunk in (64, 5, 4):
        llm = LLM(
            vl_dir, config, device="cpu", dtype="float32", max_seq_len=64, max_batch_size=1,
            max_num_tokens=chunk, enable_chunked_prefill=True,
        )  # fmt: skip
        executor = llm.executor
        request = executor.enqueue(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
        while not request.output_token_ids:
            executor.step()
        blocks = executor.kv_cache.table_of(request.request_id)[1]
        rows = executor.kv_cache.groups[1].k_cache[:, list(blocks)].flatten(1, 2)
        keys.append(rows[:, : len(PROMPT)].clone())
    for others in keys[1:]:
        torch.testing.assert_close(others, keys[0], atol=1e-5, rtol=1e-5)


def test_vectors_without_axes_and_what_a_head_reads(tmp_path: Path) -> None:
    """Also: row i of draft step 0 has the vector of place i + 1, whatever the chunking."""
    target = mtp_model_dir(tmp_path, num_hidden_layers=LAYERS, num_mtp_layers=1)
    prompt = embeds_prompt()
    expected = greedy_with_embeds(target, prompt, 12)
    for chunk in (64, 5, 4):
        config = MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=False)
        llm = LLM(
            target, config, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64,
            max_num_tokens=chunk, enable_chunked_prefill=True,
        )  # fmt: skip
        read: list[Tensor] = []
        layer = llm.executor.draft_model.layers[0]  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0].clone()))
        output = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        assert output.outputs[0].token_ids == expected
        firsts = [e for e in read if len(e) > 1] if chunk == 64 else read
        seen = torch.cat(firsts)
        wanted = prompt.prompt_embeds
        missing = [i for i, row in enumerate(wanted) if not (seen == row).all(1).any()]
        assert not missing
        if chunk == 64:
            places = prompt.positions - 1
            assert torch.equal(firsts[0][places], wanted)


def test_refusals(vl_dir: Path, tmp_path: Path) -> None:
    vectors = torch.zeros(int(MASK.sum()), SIZE)
    for changes, said in (
        ({"prompt_embeds": vectors[:3]}, "3 rows for 8 tokens"),
        ({"prompt_token_ids": None}, "list of token ids"),
        ({"prompt_embeds": vectors.long()}, "float tensor"),
        ({"is_embed": MASK[:4]}, "bool tensor"),
        ({"mrope_positions": torch.zeros(2, 4, dtype=torch.int64)}, r"\[3, 14\]"),
        ({"mrope_positions": torch.full((3, len(PROMPT)), -1)}, ">= 0"),
    ):
        with pytest.raises(RequestError, match=said):
            embeds_prompt(**changes)
    llm = LLM(vl_dir, device="cpu", dtype="float32", max_seq_len=64)
    with pytest.raises(RequestError, match=f"hidden size is {SIZE}"):
        llm.generate(embeds_prompt(prompt_embeds=torch.zeros(len(vectors), SIZE + 1)))
    with pytest.raises(RequestError, match="the model has 256 positions"):
        llm.generate(embeds_prompt(mrope_positions=mrope_positions_of_prompt() + 250))
    plain = tiny_model_dir(tmp_path, num_hidden_layers=LAYERS)
    llm = LLM(plain, device="cpu", dtype="float32", max_seq_len=64)
    with pytest.raises(RequestError, match="no mrope_section"):
        llm.generate(embeds_prompt(mrope_positions=mrope_positions_of_prompt()))
    saving = SaveHiddenStatesDecodingConfig(output_directory=str(tmp_path / "states"))
    llm = LLM(plain, saving, device="cpu", dtype="float32", max_seq_len=64)
    with pytest.raises(RequestError, match="SAVE_HIDDEN_STATES"):
        llm.generate(embeds_prompt())


@pytest.mark.slow
def test_places_past_the_table_s_end(vl_dir: Path, tmp_path: Path) -> None:
    """Rows of drafts that can no longer come out stand past the last rotary position."""
    positions = mrope_positions_of_prompt()
    positions[:, -1] = 255 - 114  # output goes to the table's last position
    prompt = embeds_prompt(mrope_positions=positions)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(vl_dir))
    llm = LLM(vl_dir, config, device="cpu", dtype="float32", max_seq_len=256)
    output = llm.generate(prompt, SamplingParams(max_tokens=114, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 114
    with pytest.raises(RequestError, match="256 positions"):
        llm.generate([[1, 2, 3], prompt], SamplingParams(max_tokens=116, ignore_eos=True))
    assert not llm.executor.has_work, "nothing was started"
    # A draft model without axes goes by places, however few positions it has.
    small = tiny_model_dir(tmp_path, num_hidden_layers=1, max_position_embeddings=64)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(small))
    llm = LLM(vl_dir, config, device="cpu", dtype="float32")
    output = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy_with_embeds(vl_dir, prompt, 12)


def test_vanilla_mtp_reads_text_of_a_model_with_axes(vl_dir: Path, tmp_path: Path) -> None:
    target = vl_with_mtp(vl_dir, tmp_path, 2)
    config = MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for path, spec in ((vl_dir, None), (target, config)):
        llm = LLM(path, spec, device="cpu", dtype="float32", max_seq_len=64)
        texts.append(llm.generate([11, 12, 13], params).outputs[0].token_ids)
    assert texts[0] == texts[1]


def _vanilla(target: Path, num_layers: int, chunk: int, batch: int) -> LLM:
    config = MTPDecodingConfig(num_nextn_predict_layers=num_layers, use_mtp_vanilla=True)
    return LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=batch, max_seq_len=64,
        max_num_tokens=chunk, enable_chunked_prefill=True,
    )  # fmt: skip


@pytest.mark.parametrize("num_layers", [1, 3])
def test_each_depth_of_vanilla_mtp_reads_the_vectors_ahead(tmp_path: Path, num_layers: int) -> None:
    """Row i of depth k has the vector of place i + k + 1, and drafts are the same however the
    prompt is cut: rows that are computed again read their vectors again."""
    target = mtp_model_dir(tmp_path, num_hidden_layers=LAYERS, num_mtp_layers=num_layers)
    prompt, params = embeds_prompt(), SamplingParams(max_tokens=12, ignore_eos=True)
    expected, drafted = greedy_with_embeds(target, prompt, 12), []
    for chunk in (64, 7, 5):
        llm = _vanilla(target, num_layers, chunk, batch=1)
        read: dict[int, list[Tensor]] = {depth: [] for depth in range(num_layers)}
        for depth, layer in enumerate(llm.executor.draft_model.layers):  # type: ignore[union-attr]
            layer.register_forward_pre_hook(
                lambda _, args, seen=read[depth]: seen.append(args[0].clone())
            )
        logits: list[Tensor] = []
        worker, propose = llm.executor.worker, llm.executor.worker.propose

        def keeping(row: Tensor, *rest: Any, seen=logits, propose=propose) -> Tensor:  # type: ignore[no-untyped-def]
            seen.append(row.clone())
            return propose(row, *rest)

        worker.propose = keeping  # type: ignore[method-assign]
        output = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == expected
        steps = output.spec_stats.num_steps
        drafted.append(torch.cat(logits)[-num_layers * steps :])
        if chunk == 64:
            for depth in range(num_layers):
                rows = prompt.positions - depth - 1
                is_row = rows >= 0
                assert torch.equal(read[depth][0][rows[is_row]], prompt.prompt_embeds[is_row])
    for other in drafted[1:]:
        torch.testing.assert_close(other, drafted[0], atol=1e-4, rtol=1e-4)


def test_vectors_of_the_next_token_alone_are_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = _vanilla(mtp_model_dir(tmp_path, num_mtp_layers=2), 2, 64, batch=1)
    monkeypatch.setattr("trtspec.executor.inputs.reread_embeds", lambda *_: None)
    with pytest.raises(ConfigError, match="reread_embeds"):
        llm.generate(embeds_prompt(), SamplingParams(max_tokens=4))


@pytest.mark.parametrize("chunk", [64, 7, 6])
def test_rows_computed_again_stand_where_they_stood(
    vl_dir: Path, tmp_path: Path, chunk: int
) -> None:
    """Beside a text, which has one position a token."""
    llm = _vanilla(vl_with_mtp(vl_dir, tmp_path, 2), 2, chunk, batch=2)
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    expected = greedy_with_embeds(vl_dir, prompt, 12)
    tables, passes = llm.executor.draft_model.rope_tables, []  # type: ignore[union-attr]
    at = tables.at

    def watching(position_ids: Tensor, meta: Any) -> Any:
        passes.append(meta)
        return at(position_ids, meta)

    tables.at = watching  # type: ignore[method-assign]
    given = [prompt, [11, 12, 13]]
    outputs = llm.generate(given, SamplingParams(max_tokens=12, ignore_eos=True))
    assert outputs[0].outputs[0].token_ids == expected
    compared = 0
    for meta in passes:
        lens = [*meta.context_lens, *[meta.rows_per_generation] * meta.num_generations]
        rotated = meta.rope_position_ids.expand(3, -1).split(lens, dim=1)
        for request, (own, places) in enumerate(
            zip(rotated, meta.position_ids.split(lens), strict=True)
        ):
            delta = int(meta.rope_deltas[request])
            if delta == 0:
                assert torch.equal(own, places.expand(3, -1))
                continue
            compared += len(places)
            axes = torch.cat(
                [mrope_positions_of_prompt(), torch.arange(14, 64).expand(3, -1) + delta], 1
            )
            written = meta.slot_mappings[-1].split(lens)[request] >= 0
            assert torch.equal(own[:, written], axes[:, places[written]])
    assert compared > 50


@pytest.mark.parametrize(("sections", "interleaved", "said"), [
    ([1, 1], False, "three ints"), ([4, 4, 4], False, "sum to head_dim"),
    ([1, 1, 2], True, "mrope_interleaved"),
])  # fmt: skip
def test_sections_that_cannot_be(
    vl_dir: Path, tmp_path: Path, sections: list[int], interleaved: bool, said: str
) -> None:
    raw = json.loads((vl_dir / "config.json").read_text())
    raw["text_config"]["rope_parameters"] |= {
        "mrope_section": sections, "mrope_interleaved": interleaved
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said):
        LLM(tmp_path, device="cpu")
