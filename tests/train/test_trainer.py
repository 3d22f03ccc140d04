"""Training runs: they learn, resume exactly, and what goes wrong leaves the last checkpoint."""

from __future__ import annotations

import json
import signal
import time
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned
from tiny import tiny_model_dir
from unrolled import CAPTURED, F32, TRAIN_CONFIG, VOCAB, GreedyTexts, load_target

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    SamplingParams,
)
from trtspec.config import HeadDecodingConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Decoder
from trtspec.train import trainer as trainer_module
from trtspec.train.create_head import create_head, trainable
from trtspec.train.interrupts import held_back
from trtspec.train.muon import MuonAndAdamW
from trtspec.train.new_head import NewHead, head_config
from trtspec.train.trainer import TrainConfig, Trainer


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=6)


@pytest.fixture(scope="module")
def data(target_dir: Path) -> GreedyTexts:
    return GreedyTexts(target_dir)


KINDS: dict[str, type[HeadDecodingConfig]] = {
    "eagle3": EagleDecodingConfig,
    "dflash": DFlashDecodingConfig,
    "dflash2": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
}


def _trainer(
    target_dir: Path,
    data: GreedyTexts,
    out: Path,
    config: TrainConfig = TRAIN_CONFIG,
    kind: str = "eagle3",
    window: int | None = None,
    draft_ids: torch.Tensor | None = None,
) -> Trainer:
    target: Decoder = load_target(target_dir)
    block = config.num_steps if kind == "dspark" else config.num_steps + 1
    spec = NewHead(
        kind=kind,
        layers_to_capture=CAPTURED,
        block_size=block,
        mask_token_id=VOCAB,
        sliding_window=window,
    )
    if kind == "eagle3" and draft_ids is None:
        draft_ids = torch.arange(VOCAB)
    head = create_head(spec, target, draft_ids, F32, seed=5)
    return Trainer(target, head, data, [data.take(torch.arange(12, 16))], config, out)


def _log(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


TRAINED = [*thinned(["eagle3", "dflash", "dspark"], 2), "dflash2"]
"""DSpark and DFlash2 heads are DFlash heads with more."""
RESUMED_WITH_MUON = [("eagle3", "muon"), ("dflash2", "muon")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_it_learns_and_what_it_saves_drafts(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, kind: str
) -> None:
    steps = 250 if kind == "eagle3" else 300  # the latter has a larger vocabulary
    config = replace(
        TRAIN_CONFIG, max_steps=steps, evaluate_every=125, log_every=20, checkpoint_every=250
    )
    seen: list[dict[str, object]] = []
    evaluation = _trainer(target_dir, data, tmp_path, config, kind).train(progress=seen.append)
    log = _log(tmp_path)
    lines = {*range(20, steps + 1, 20), *range(125, steps + 1, 125), steps}
    assert len(seen) == len(log) == len(lines)
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert log[-1]["accuracy"][0] > 0.9
    assert (
        1
        <= evaluation.acceptance_length
        == pytest.approx(1 + evaluation.conditional[0] * (1 + evaluation.conditional[1]))
    )
    # Served on the texts it learned, the head is nearly always right.
    served = KINDS[kind](max_draft_len=2, speculative_model=tmp_path)
    outputs = LLM(target_dir, served, device="cpu", dtype="float32").generate(
        [data.all.input_ids[i, :2].tolist() for i in range(12)],
        SamplingParams(max_tokens=20, ignore_eos=True),
    )
    lengths = [o.spec_stats.acceptance_length for o in outputs]
    assert sum(lengths) / len(lengths) > 2.3
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["training"]["steps"] == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"), [*((kind, "adamw") for kind in TRAINED), *RESUMED_WITH_MUON]
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, kind: str, optimizer: str
) -> None:
    config = replace(TRAIN_CONFIG, optimizer=optimizer)
    whole = _trainer(target_dir, data, tmp_path / "whole", config, kind)
    whole.train()
    killed = _trainer(target_dir, data, tmp_path / "killed", config, kind)

    def stop(line: dict[str, object]) -> None:
        if line["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.train(progress=stop)
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 8, "los')  # a line that the kill cut short
    again = _trainer(target_dir, data, tmp_path / "killed", config, kind)
    assert again.resume() and again.step == 4
    again.train()
    assert _log(tmp_path / "killed") == _log(tmp_path / "whole")
    assert all(torch.equal(again.masters[n], m) for n, m in whole.masters.items())
    assert not _trainer(target_dir, data, tmp_path / "new", config, kind).resume()
    assert all(line["optimizer"] == optimizer for line in _log(tmp_path / "killed"))
    raw = json.loads((tmp_path / "killed" / "config.json").read_text())
    assert raw["training"]["config"]["optimizer"] == optimizer


def test_ctrl_c_ends_the_step_and_keeps_it(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    whole, run = (_trainer(target_dir, data, tmp_path / name) for name in ("whole", "run"))
    whole.train()

    def stop(line: dict[str, object]) -> None:
        if line["step"] == 2:  # so step 3 is ended, before the first checkpoint
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run.train(progress=stop)
    again = _trainer(target_dir, data, tmp_path / "run")
    assert again.resume() and again.step == run.kept_step == 3
    again.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert _log(tmp_path / "run") == _log(tmp_path / "whole")
    assert all(torch.equal(again.masters[n], m) for n, m in whole.masters.items())


def test_ctrl_c_keeps_the_step_if_its_listener_fails_too(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    """As where it ended the process that the output goes to."""
    run = _trainer(target_dir, data, tmp_path)

    def stop(line: dict[str, object]) -> None:
        if line["step"] == 2:
            signal.raise_signal(signal.SIGINT)
        if line["step"] == 3:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run.train(progress=stop)
    assert run.kept_step == 3 and _trainer(target_dir, data, tmp_path).resume()


@pytest.mark.parametrize("is_done", [False, True])
def test_ctrl_c_at_the_end_is_heard(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    is_done: bool,
) -> None:  # fmt: skip
    config = replace(TRAIN_CONFIG, max_steps=2)
    run = _trainer(target_dir, data, tmp_path, config)
    if is_done:
        run.train()
    save = run._save_head

    def save_and_stop() -> None:
        save()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "_save_head", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.kept_step == 2


def test_a_run_that_learns_nothing_is_stopped_after_an_interrupt_too(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = data.all.input_ids[:, 2:]
    unwritten = torch.tensor(sorted({*range(VOCAB)} - {*written.flatten().tolist()}))
    config = replace(TRAIN_CONFIG, log_every=3, evaluate_every=100, checkpoint_every=100)
    run = _trainer(target_dir, data, tmp_path, config, draft_ids=unwritten)
    train_step = run._train_step

    def interrupted_step(sequences: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return train_step(sequences)

    monkeypatch.setattr(run, "_train_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not (tmp_path / "log.jsonl").exists(), "lines are those of a run without interrupts"
    again = _trainer(target_dir, data, tmp_path, config, draft_ids=unwritten)
    assert again.resume() and again.step == 1
    with pytest.raises(ConfigError, match=r"Up to step 6 no row"):
        again.train()


def test_another_share_of_variation_is_another_run(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    for here, there in ((0.0, 0.5), (0.5, 0.0)):
        configs = [replace(TRAIN_CONFIG, max_steps=2, variation=share) for share in (there, here)]
        out = tmp_path / str(here)
        _trainer(target_dir, data, out, configs[0]).train()
        with pytest.raises(CheckpointError) as error:
            _trainer(target_dir, data, out, configs[1]).resume()
        text = str(error.value).replace("0.0", "0")
        assert f"variation (--total-variation), {there:g} there and {here:g} here. Give" in text


def test_a_second_ctrl_c_does_not_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that is heard twice does."""
    heard = 0
    with pytest.raises(KeyboardInterrupt), held_back() as is_interrupted:
        for seconds in (100.0, 100.5, 102.0):
            monkeypatch.setattr(time, "monotonic", lambda now=seconds: now)
            signal.raise_signal(signal.SIGINT)
            heard += is_interrupted.is_set()
    assert heard == 2


def test_held_out_text_that_judges_nothing_is_told_of(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An acceptance of 0 would be a finding."""
    run = _trainer(target_dir, data, tmp_path, replace(TRAIN_CONFIG, max_steps=2))
    silent = run.held_out[0]
    run.held_out = [replace(silent, loss_mask=torch.zeros_like(silent.loss_mask))]
    assert not run.train().is_judged
    assert "no place to judge the head by" in caplog.text
    assert not any(key.startswith("held_out") for line in _log(tmp_path) for key in line)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["training"]["held_out_conditional"] is None


@pytest.mark.parametrize(
    ("layers", "captured"), [(4, (1, 2, 3)), (5, (1, 2, 3)), (6, (1, 3, 4)), (7, (1, 2, 3)),
                             (8, (1, 3, 4)), (36, (1, 17, 32))]
)  # fmt: skip
def test_the_layers_captured_by_default_differ(
    target_dir: Path, layers: int, captured: tuple[int, ...]
) -> None:
    target = replace(load_target(target_dir).config, num_layers=layers)
    assert head_config(NewHead(kind="eagle3"), target, 8).layers_to_capture == captured


def test_a_checkpoint_that_does_not_fit_is_refused(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    _trainer(target_dir, data, tmp_path, replace(TRAIN_CONFIG, max_steps=4)).train()
    with pytest.raises(
        CheckpointError,
        match=r"another run\. What differs: max_steps \(--steps\), 4 there and 12 here\. Give",
    ):
        _trainer(target_dir, data, tmp_path).resume()
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    for wrong in ([], saved | {"run": 3}, saved | {"masters": [1]}, saved | {"optimizer": {}},
                  saved | {"masters": dict.fromkeys(saved["masters"], 1)}, saved | {"step": -1},
                  saved | {"step": 5}, saved | {"step": 2.5}):  # fmt: skip
        torch.save(wrong, path)
        with pytest.raises(CheckpointError, match="damaged"):
            _trainer(target_dir, data, tmp_path, replace(TRAIN_CONFIG, max_steps=4)).resume()
    half = path.read_bytes()[:2000]
    for content in (half, b"", b"junk", b"q", b"r1234", b"hello world, this is text"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged \(.+\)") as error:
            _trainer(target_dir, data, tmp_path, replace(TRAIN_CONFIG, max_steps=4)).resume()
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


@pytest.mark.parametrize("kind", ["eagle3", "dflash2", "dspark", "mtp"])
def test_muon_orthogonalises_each_packed_matrix(target_dir: Path, kind: str) -> None:
    """A step from an empty state is 6 lr * 0.2 * sqrt(longer side) * U V^T of each matrix alone."""
    is_block, target = kind in ("dflash2", "dspark"), load_target(target_dir)
    spec = NewHead(
        kind=kind,
        layers_to_capture=None if kind == "mtp" else CAPTURED,
        block_size=4,
        mask_token_id=VOCAB if is_block else None,
        context_embeddings=is_block,
    )
    head = create_head(spec, target, torch.arange(VOCAB), F32, seed=5)
    config, generator = head.config.decoder, torch.Generator().manual_seed(2)
    masters = {n: p.detach().clone() for n, p in trainable(head).items()}
    for master in masters.values():
        master.grad = torch.randn(master.shape, generator=generator)
        if master.dim() == 2:  # parts of different sizes, columns that are far from orthogonal
            master.grad *= 1 + torch.arange(len(master))[:, None] + torch.arange(master.shape[1])
    before = {name: master.clone() for name, master in masters.items()}
    rates = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
    MuonAndAdamW(head, masters, **rates).step()
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    packed = {"qkv_proj": (0, [q, kv, kv]), "gate_up_proj": (0, [config.intermediate_size] * 2)}
    packed["fc"] = 1, [target.config.hidden_size] * len(CAPTURED)
    orthogonal = {"o_proj", "down_proj", "eh_proj", "kernel_projection", "context_embedding_fc"}
    seen = set()
    for name, master in masters.items():
        change, part = before[name] - master, name.split(".")[-2]
        if part not in packed and part not in orthogonal:  # AdamW's first step is a sign's
            assert master.grad is not None
            torch.testing.assert_close(change, 0.1 * master.grad.sign(), atol=1e-5, rtol=1e-3)
            continue
        seen.add(part)
        dim, sizes = packed.get(part, (0, [len(change)]))
        assert master.grad is not None
        parts = change.split(sizes, dim), master.grad.split(sizes, dim)
        for matrix, grad in zip(*parts, strict=True):
            u, s, vt = torch.linalg.svd(grad, full_matrices=False)
            values = (u.T @ matrix @ vt.T) / (6 * 0.1 * 0.2 * max(matrix.shape) ** 0.5)
            reached = values.diagonal()[s > 0.01 * s.norm()]  # five iterations lift what is above
            assert len(reached) > 0.7 * len(s)
            assert reached.min() > 0.6 and reached.max() < 1.3, (name, reached)
            assert (values - values.diagonal().diag()).abs().max() < 0.05, name
    layers = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert (
        seen
        == layers
        | {
            "eagle3": {"fc"},
            "dflash2": {"fc", "context_embedding_fc", "kernel_projection"},
            "dspark": {"fc", "context_embedding_fc"},
            "mtp": {"eh_proj"},
        }[kind]
    )


def test_another_optimizer_or_window_is_another_run(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    """A run of before they could be given had AdamW and no window."""
    config = replace(TRAIN_CONFIG, max_steps=4)
    muon = replace(config, optimizer="muon")
    _trainer(target_dir, data, tmp_path / "muon", muon).train()
    with pytest.raises(CheckpointError, match="differs: optimizer, 'muon' there and 'adamw' here"):
        _trainer(target_dir, data, tmp_path / "muon", config).resume()
    _trainer(target_dir, data, tmp_path / "window", config, window=6).train()
    with pytest.raises(CheckpointError, match="differs: windows"):
        _trainer(target_dir, data, tmp_path / "window", config).resume()
    _trainer(target_dir, data, tmp_path / "old", config).train()
    path = tmp_path / "old" / "checkpoint.pt"
    saved = torch.load(path)
    del saved["run"]["optimizer"], saved["run"]["windows"]
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match="differs: optimizer, 'adamw' there and 'muon' here"):
        _trainer(target_dir, data, tmp_path / "old", muon).resume()
    assert _trainer(target_dir, data, tmp_path / "old", config).resume()


def test_a_full_disk_keeps_the_checkpoint_before(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _trainer(target_dir, data, tmp_path)
    real, calls = torch.save, []

    def save(value: object, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(value, path)

    monkeypatch.setattr(trainer_module.torch, "save", save)
    with pytest.raises(ConfigError, match="No space left"):
        run.train()
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" in p.name) == []
    monkeypatch.undo()
    again = _trainer(target_dir, data, tmp_path)
    assert again.resume() and again.step == 4


def test_a_run_that_learns_nothing_is_stopped(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    """The target's choices are no draft tokens at all, then one of them is, then all are."""
    written = data.all.input_ids[:, 2:]
    unwritten = torch.tensor(sorted({*range(VOCAB)} - {*written.flatten().tolist()}))
    config = replace(TRAIN_CONFIG, log_every=3)
    run = _trainer(target_dir, data, tmp_path / "none", config, draft_ids=unwritten)
    with pytest.raises(ConfigError, match=r"Up to step 3 no row .* larger --draft-vocab-size"):
        run.train()
    assert not (tmp_path / "none" / "model.safetensors").exists()
    late = _trainer(target_dir, data, tmp_path / "late", config, draft_ids=unwritten)
    late.step = config.max_steps - 1  # as if resumed: what came before may have been learned from
    late.train()
    some = torch.cat([unwritten, written.flatten().mode().values[None]]).sort().values
    _trainer(target_dir, data, tmp_path / "some", config, draft_ids=some).train()
    shares = [line["loss_share"] for line in _log(tmp_path / "some")]
    assert len(shares) == 6 and all(0 < share < 1 for share in shares)
    _trainer(target_dir, data, tmp_path / "all", config, "dflash").train()
    assert all(line["loss_share"] == 1 for line in _log(tmp_path / "all"))


def test_text_without_an_answer_is_stopped(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    run = _trainer(target_dir, data, tmp_path, kind="dspark")
    silent = copy(data)
    silent.all = replace(data.all, loss_mask=torch.zeros_like(data.all.loss_mask))
    run.data = silent
    with pytest.raises(ConfigError, match=r"no row of the text has had a loss.* longer answers"):
        run.train()


def test_a_diverging_run_says_so(target_dir: Path, data: GreedyTexts, tmp_path: Path) -> None:
    run = _trainer(target_dir, data, tmp_path)
    next(iter(run.masters.values())).data.fill_(float("nan"))
    run._use_masters()
    with pytest.raises(ConfigError, match="diverged"):
        run.train()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_steps", 0), ("learning_rate", 0.0), ("clip", float("inf")), ("step_decay", 1.5),
     ("position_weights", "linear"), ("optimizer", "Muon"), ("variation", 1.5), ("variation", "1"),
     ("batch_size", "4"), ("warmup_steps", -1), ("weight_decay", -1.0), ("weight_decay", "x"),
     ("betas", (2, 3)), ("betas", 0.9), ("betas", (0.9,))],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{field: value})  # type: ignore[arg-type]


def test_the_learning_rate_warms_up_and_falls() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, max_steps=104)
    rates = [config.rate(i) for i in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[54] == pytest.approx(0.51) and rates[104] == pytest.approx(0.02)
    assert all(a >= b for a, b in pairwise(rates[4:]))


def test_a_head_that_could_not_be_written_keeps_the_checkpoint_before(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save fails; the rerun makes those steps again, and the head is the last one's."""
    from safetensors import SafetensorError

    from trtspec.train import save_head

    real, calls = save_head.save_file, []

    def save(tensors: object, path: Path, **options: object) -> None:
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half")
            raise SafetensorError("No space left on device")
        real(tensors, path, **options)

    monkeypatch.setattr(save_head, "save_file", save)
    with pytest.raises(ConfigError, match="No space left"):
        _trainer(target_dir, data, tmp_path).train()
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" in p.name) == []
    monkeypatch.undo()
    again = _trainer(target_dir, data, tmp_path)
    assert again.resume() and again.step == 8
    again.train()
    assert json.loads((tmp_path / "config.json").read_text())["training"]["steps"] == 12
    (tmp_path / "config.json").unlink()
    done = _trainer(target_dir, data, tmp_path)
    assert done.resume() and not done.train().right
    raw = json.loads((tmp_path / "config.json").read_text())["training"]
    assert raw["steps"] == 12 and len(raw["held_out_conditional"]) == 2


def test_a_gradient_that_is_not_finite_spoils_no_checkpoint(
    target_dir: Path, data: GreedyTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _trainer(
        target_dir, data, tmp_path, replace(TRAIN_CONFIG, log_every=100, evaluate_every=100)
    )
    real, calls = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters: list[torch.Tensor], most: float) -> torch.Tensor:
        calls.append(most)
        if len(calls) == 8:
            parameters[0].grad[0] = float("inf")  # type: ignore[index]
        return real(parameters, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with pytest.raises(ConfigError, match=r"step 8 .*diverged"):
        run.train()
    monkeypatch.undo()
    again = _trainer(
        target_dir, data, tmp_path, replace(TRAIN_CONFIG, log_every=100, evaluate_every=100)
    )
    assert again.resume() and again.step == 4
    assert all(bool(m.isfinite().all()) for m in again.masters.values())


def test_a_kill_before_the_first_checkpoint_leaves_no_old_lines(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    run = _trainer(target_dir, data, tmp_path)
    assert not run.resume()
    run.train()
    assert [line["step"] for line in _log(tmp_path)] == list(range(1, 13))


def test_another_target_of_the_same_shape_does_not_resume(
    target_dir: Path, data: GreedyTexts, tmp_path: Path
) -> None:
    _trainer(target_dir, data, tmp_path / "run").train()
    other = tiny_model_dir(tmp_path, seed=2, num_hidden_layers=6)
    with pytest.raises(CheckpointError, match="differs: target"):
        _trainer(other, data, tmp_path / "run").resume()
