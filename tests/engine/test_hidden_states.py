"""SAVE_HIDDEN_STATES: what is on disk is what transformers computes for the texts served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from safetensors import SafetensorError
from tiny import tiny_model_dir

from trtspec import LLM, KvCacheConfig, SamplingParams, SaveHiddenStatesDecodingConfig
from trtspec.data import hidden_states
from trtspec.data.hidden_states import HiddenStatesWriter, SavedHiddenStates
from trtspec.errors import CheckpointError, ConfigError

LAYERS = [1, 0]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(10, 30)), [40] * 9, [3, 50, 60, 70, 80]]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1)


def _llm(target: Path, out: Path, rows: int = 30, **options: Any) -> LLM:
    config = SaveHiddenStatesDecodingConfig(
        output_directory=out, eagle3_layers_to_capture=LAYERS, tokens_per_file=rows
    )
    return LLM(
        target, config, **{"device": "cpu", "dtype": "float32", "max_seq_len": 64, **options}
    )


def _check(target: Path, out: Path, texts: list[list[int]]) -> None:
    """Every text is a sample, and its rows are transformers' hidden states."""
    saved, oracle = SavedHiddenStates(out), Oracle(target)
    assert len(saved) == len(texts)
    by_text = {}
    for sample in saved:
        tokens, following = sample["token_ids"].tolist(), sample["next_token_ids"].tolist()
        assert tokens[1:] == following[:-1]
        assert sample["positions"].tolist() == list(range(len(tokens)))
        by_text[tuple(tokens), following[-1]] = sample
    for text in texts:
        sample = by_text[tuple(text[:-1]), text[-1]]
        with torch.inference_mode():
            out_hf = oracle.model(torch.tensor([text[:-1]]), output_hidden_states=True)
        states = out_hf.hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in LAYERS], -1)
        torch.testing.assert_close(sample["hidden_states"], expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(
            sample["last_hidden_states"], states[-1][0], atol=1e-4, rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pool", [None, 64])
def test_saved_states_equal_transformers(
    target_dir: Path, tmp_path: Path, overlap: bool, pool: int | None
) -> None:
    """Chunked prompts, shards that end inside samples, preemption: each row once."""
    llm = _llm(
        target_dir, tmp_path, max_batch_size=3, max_num_tokens=16, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=4),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, PARAMS)
    oracle = Oracle(target_dir)
    texts = [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, outputs, strict=True)]
    assert texts == [p + oracle.extend(p, 12) for p in PROMPTS]
    if pool:
        assert llm.stats().num_preemptions > 0
    _check(target_dir, tmp_path, texts)
    index = json.loads((tmp_path / "index.json").read_text())
    assert len(index["shards"]) > 1 and not list(tmp_path.glob(".*.part"))
    rows = list(index["shards"].values())
    assert sum(rows) == sum(len(text) - 1 for text in texts) and max(rows) < 30 + 16


def test_a_job_is_resumed(target_dir: Path, tmp_path: Path) -> None:
    first = _llm(target_dir, tmp_path).generate(PROMPTS[:2], PARAMS)
    saved = SavedHiddenStates(tmp_path)
    left = [p for p in PROMPTS if not saved.has_prompt(p)]
    assert left == PROMPTS[2:]
    again = _llm(target_dir, tmp_path).generate(left, PARAMS)
    texts = [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, [*first, *again], strict=True)]
    _check(target_dir, tmp_path, texts)


def test_a_killed_job_leaves_whole_samples(target_dir: Path, tmp_path: Path) -> None:
    llm = _llm(target_dir, tmp_path, rows=20)
    executor = llm.executor
    executor.enqueue(PROMPTS[0], PARAMS)
    executor.enqueue(PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(32):
        executor.step()
    assert executor.has_work  # and here the process dies
    text = PROMPTS[0] + Oracle(target_dir).extend(PROMPTS[0], 12)
    _check(target_dir, tmp_path, [text])


def test_cancelled_requests_are_no_samples(target_dir: Path, tmp_path: Path) -> None:
    executor = _llm(target_dir, tmp_path).executor
    requests = [executor.enqueue(p, PARAMS) for p in PROMPTS[:3]]
    for _ in range(4):
        executor.step()
    executor.cancel(requests[1].request_id)
    executor.run_until_done()
    _check(target_dir, tmp_path, [requests[0].token_ids, requests[2].token_ids])


def test_another_target_or_layers_is_refused(target_dir: Path, tmp_path: Path) -> None:
    _llm(target_dir, tmp_path).generate(PROMPTS[0], PARAMS)
    for layers, size, dtype in (
        ([0, 1], 48, torch.float32),
        (LAYERS, 64, torch.float32),
        (LAYERS, 48, torch.bfloat16),
    ):
        with pytest.raises(CheckpointError, match="another output_directory"):
            HiddenStatesWriter(tmp_path, layers, size, dtype, 10)
    with pytest.raises(ConfigError, match=r"\[0, 3\].*0 … 2"):
        config = SaveHiddenStatesDecodingConfig(
            output_directory=tmp_path, eagle3_layers_to_capture=[0, 3]
        )
        LLM(target_dir, config, device="cpu")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        SavedHiddenStates(tmp_path)
    with pytest.raises(CheckpointError, match="index"):
        HiddenStatesWriter(tmp_path, LAYERS, 48, torch.float32, 10)


def test_a_missing_shard_is_named(target_dir: Path, tmp_path: Path) -> None:
    _llm(target_dir, tmp_path).generate(PROMPTS[0], PARAMS)
    for shard in tmp_path.glob("*.safetensors"):
        shard.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"hidden_states-.*cannot be read"):
        SavedHiddenStates(tmp_path)[0]
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="which is not there"):
        _llm(target_dir, tmp_path)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_is_on_disk_when_the_last_request_ends(
    target_dir: Path, tmp_path: Path, overlap: bool
) -> None:
    """By a stop token, under overlap with a step in flight that is thrown away; by an abort."""
    oracle = Oracle(target_dir)
    text = oracle.extend(PROMPTS[0], 12)
    stop = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[text[5]])
    llm = _llm(target_dir, tmp_path / "stop", disable_overlap_scheduler=not overlap)
    tokens = llm.generate(PROMPTS[0], stop).outputs[0].token_ids
    assert len(tokens) <= 6
    _check(target_dir, tmp_path / "stop", [PROMPTS[0] + tokens])

    llm = _llm(target_dir, tmp_path / "abort", disable_overlap_scheduler=not overlap)
    stream = llm.generate_stream(PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True))
    first = next(stream)
    done = llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    llm.abort(first.request_id)
    _check(target_dir, tmp_path / "abort", [PROMPTS[0] + done.outputs[0].token_ids])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_check_that_raises_or_cancels_drops_its_sample_only(
    target_dir: Path, tmp_path: Path, overlap: bool
) -> None:
    executor = _llm(target_dir, tmp_path, disable_overlap_scheduler=not overlap).executor

    def check(request: Any) -> bool:
        if len(request.output_token_ids) == 3 and request.prompt_token_ids == PROMPTS[0]:
            raise ZeroDivisionError("boom")
        if len(request.output_token_ids) == 4 and request.prompt_token_ids == PROMPTS[1]:
            executor.cancel(request.request_id)
        return False

    executor.stop_check = check
    requests = [executor.enqueue(p, PARAMS) for p in PROMPTS[:3]]
    executor.run_until_done()
    assert [r.finish_reason for r in requests] == ["error", "cancelled", "length"]
    _check(target_dir, tmp_path, [requests[2].token_ids])


@pytest.mark.parametrize(
    ("error", "fails_again"),
    [(OSError("disk full"), False), (SafetensorError("disk full"), True)],
)
def test_what_could_not_be_written_is_written_by_the_shutdown(
    target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    fails_again: bool,
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    llm = _llm(target_dir, tmp_path, rows=1000)
    monkeypatch.setattr(hidden_states, "save_file", failing)
    with pytest.raises(OSError, match=rf"written to {tmp_path} \(disk full\). Make room"):
        llm.generate(PROMPTS[:2], PARAMS)
    if fails_again:
        with pytest.raises(OSError, match=r"Make room there: .* or by shutdown\(\)"):
            llm.shutdown()
    monkeypatch.undo()
    llm.shutdown()
    oracle = Oracle(target_dir)
    _check(target_dir, tmp_path, [p + oracle.extend(p, 12) for p in PROMPTS[:2]])


def test_two_runs_may_share_a_directory(target_dir: Path, tmp_path: Path) -> None:
    runs = [_llm(target_dir, tmp_path) for _ in range(2)]
    texts = []
    for llm, prompt in zip([*runs, *runs], PROMPTS, strict=True):
        texts.append(prompt + llm.generate(prompt, PARAMS).outputs[0].token_ids)
    _check(target_dir, tmp_path, texts)


def test_states_of_another_target_are_refused(target_dir: Path, tmp_path: Path) -> None:
    _llm(target_dir, tmp_path / "out").generate(PROMPTS[0], PARAMS)
    other = tiny_model_dir(tmp_path, seed=5)
    with pytest.raises(CheckpointError, match="target="):
        _llm(other, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        _llm(target_dir, tmp_path / "file")
    with pytest.raises(ConfigError, match="needs 6 layers; the model has 3"):
        LLM(target_dir, SaveHiddenStatesDecodingConfig(output_directory=tmp_path), device="cpu")


def test_a_lock_that_an_interrupt_left_behind_is_given_back(tmp_path: Path) -> None:
    writers = [HiddenStatesWriter(tmp_path, LAYERS, 48, torch.float32, 10) for _ in range(2)]
    writers[0]._lock.acquire()  # and the interrupt comes before the work begins
    writers[0].start_over()
    assert not writers[0]._lock.is_locked
    with writers[1]._lock.acquire(timeout=0):  # another process's turn
        pass
