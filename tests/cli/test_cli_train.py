"""`trtspec train` and `trtspec doctor` on the real model, as small as they can be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guided import save_tokenizer
from matrix import full
from safetensors.torch import load_file
from tiny import tiny_model_dir
from transformers import AutoTokenizer
from unrolled import F32, load_target

from trtspec import cli
from trtspec.cli.options import TrainOptions
from trtspec.cli.train_options import train_config
from trtspec.train.create_head import create_head
from trtspec.train.new_head import NewHead
from trtspec.train.run_directory import held
from trtspec.train.save_head import save_head

Captured = pytest.CaptureFixture[str]
SMALL = ["--length", "64", "--steps", "2", "--batch-size", "2", "--unroll", "2",
         "--draft-vocab-size", "600", "--device", "cpu", "--dtype", "float32"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.model
def test_from_nothing_to_a_head_that_serves(tmp_path: Path, capsys: Captured) -> None:
    out, text = tmp_path / "head", tmp_path / "text.jsonl"
    train = ["train", "eagle3", "--out", str(out), "--data", str(text), *SMALL]
    generate = ["--self-generate", "4", "--max-answer", "16", "--max-batch-size", "4"]
    if not full():  # the prompts made from templates have passages that the target writes first
        asked = tmp_path / "asked.txt"
        asked.write_text("Say hello.\nCount to five.\nName a colour.\nWhat is rain?\n")
        generate += ["--prompts", str(asked)]
    assert cli.main([*train, *generate]) == 0, capsys.readouterr().err
    assert len(text.read_text().splitlines()) == 5  # a header and four conversations
    for name in ("config.json", "model.safetensors", "checkpoint.pt", "log.jsonl"):
        assert (out / name).exists(), name
    raw = json.loads((out / "config.json").read_text())
    assert raw["draft_vocab_size"] == 600 and len(raw["training"]["held_out_conditional"]) == 2
    assert raw["draft_window"] == 128, "twice as long as the rows it was trained on"
    assert cli.main(train) == 0 and "is trained" in capsys.readouterr().err
    assert cli.main([*train, "--learning-rate", "0.5"]) == 2
    assert "learning_rate" in capsys.readouterr().err
    # Another run begins with it, but not one of another network.
    again = ["train", "eagle3", "--out", str(tmp_path / "again"), "--data", str(text), *SMALL]
    assert cli.main([*again, "--init-head", str(out), "--capture-layers", "1,2,3"]) == 2
    assert "layers_to_capture" in capsys.readouterr().err
    assert cli.main([*again, "--init-head", str(out), "--draft-vocab-size", "500"]) == 2
    assert "drafts among 600 tokens" in capsys.readouterr().err
    assert cli.main([*again, "--init-head", str(out), "--sliding-window", "64"]) == 2
    assert "[None] there, [64] here (leave --sliding-window out)" in capsys.readouterr().err
    more = ["--init-head", str(out), "--draft-vocab-size", "700", "--learning-rate", "1e-9",
            "--total-variation", "0.9"]  # fmt: skip
    assert cli.main([*again, *more]) == 0
    first, second = (load_file(run / "model.safetensors") for run in (out, tmp_path / "again"))
    tokens, grown = ((head["d2t"] + torch.arange(len(head["d2t"]))).tolist()
                     for head in (first, second))  # fmt: skip
    assert len(grown) == 700 and set(tokens) <= set(grown)
    second["lm_head.weight"] = second["lm_head.weight"][[grown.index(i) for i in tokens]]
    for name in ("fc.weight", "lm_head.weight"):
        torch.testing.assert_close(second[name], first[name], atol=1e-6, rtol=1e-5)
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw["training"]["init_head"] == str(out)
    assert raw["training"]["config"]["variation"] == 0.9
    assert cli.main(["inspect-head", str(out), "--target", "smollm2-135m"]) == 0
    capsys.readouterr()
    prompts, tokens = ("8", "30") if full() else ("2", "8")
    doctor = ["doctor", "--target", "smollm2-135m", "--head", str(out), "--prompts", prompts,
              "--max-tokens", tokens, "--device", "cpu", "--json"]  # fmt: skip
    assert cli.main(doctor) == 1
    verdict = json.loads(capsys.readouterr().out)
    expected, tried = ("next to nothing", 11) if full() else ("too short to judge by", 0)
    assert expected in verdict["verdict"] and verdict["problems"] == []
    assert len(verdict["tried"]) >= tried
    assert len(verdict["conditional_acceptance"]) == 3
    served = cli.main([
        "generate", "--speculative", "eagle3", "--head", str(out), "--max-draft-len", "2",
        "--prompt", "Hello", "--max-tokens", "4", "--device", "cpu", "--json",
    ])  # fmt: skip
    assert served == 0 and json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle3"], "--self-generate"),
        (["medusa", "--self-generate", "3"], "kind='medusa'"),
        (["medusa"], "kind='medusa'"),
        (["medusa", "--self-generate", "3", "--markov-rank", "8"], "kind='medusa'"),
        (["mtp", "--self-generate", "3", "--format", "speculators"], "allowed: raw"),
        (["eagle3", "--self-generate", "3", "--length", "100000"], "--length 100000"),
        (["eagle3", "--self-generate", "3", "--learning-rate", "-1"], "learning_rate"),
        (["eagle3", "--self-generate", "3", "--learning-rate", "1e300"], "learning_rate"),
        (["eagle3", "--self-generate", "3", "--epochs", "inf"], "--epochs inf"),
        (["eagle3", "--self-generate", "3", "--epochs", "1e308"], "--epochs 1e+308"),
        (["eagle3", "--self-generate", "3", "--position-weights", "d-pace"], "not for eagle3"),
        (["mtp", "--self-generate", "3", "--anchors", "8"], "not for mtp"),
        (["dflash", "--self-generate", "3", "--markov-rank", "8"], "not for dflash"),
        (["dspark", "--self-generate", "3", "--unroll", "3"], "not for dspark"),
        (["mtp", "--self-generate", "3", "--num-layers", "2", "--unroll", "3"], "--unroll 3"),
        (["mtp", "--self-generate", "3", "--draft-vocab-size", "600"], "not for mtp"),
        (["dspark", "--self-generate", "3", "--selector-rank", "8"], "not for dspark"),
        (["dflash", "--self-generate", "3", "--selector-weight", "1"], "not for dflash"),
        (["mtp", "--self-generate", "3", "--capture-layers", "1"], "not for mtp"),
        (["mtp", "--self-generate", "3", "--sliding-window", "64"], "not for mtp"),
        (["eagle3", "--self-generate", "3", "--context-embeddings"], "not for eagle3"),
        (
            ["eagle3", "--self-generate", "3", "--optimizer", "sgd"],
            "optimizer='sgd': allowed are adamw, muon",
        ),
        (["eagle3", "--self-generate", "3", "--capture-layers", "1,b"], "--capture-layers '1,b'"),
        (
            ["dflash2", "--self-generate", "3", "--mask-token-id", "4", "--selector-weight", "-1"],
            "selector_weight=-1.0",
        ),
        (["dspark", "--self-generate", "3"], "dspark needs --mask-token-id"),
        (
            ["dspark", "--self-generate", "3", "--mask-token-id", "4", "--position-weights", "x"],
            "position_weights='x': allowed are exponential, d-pace",
        ),
        (["eagle3", "--data", "missing.jsonl", "--target", "nowhere"], "nowhere"),
        (["eagle3", "--data", "t.jsonl", "--prompts", "p.txt"], "--prompts was given, but is for"),
        (["eagle3", "--data", "t.jsonl", "--self-written", "0"], "--self-written was given"),
        (["eagle3", "--data", "t.jsonl", "--max-turns", "3"], "--max-turns was given"),
        (["eagle3", "--data", "t.jsonl", "--max-answer", "9"], "--max-answer was given"),
        (["eagle3", "--data", "t.jsonl", "--max-batch-size", "8"], "--max-batch-size was given"),
        (["eagle3", "--data", "t.jsonl", "--tp", "2"], "give --self-generate N too"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    tmp_path: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    assert cli.main(["train", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error.removeprefix("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle3"], "needs a target of 4 layers; it has 3. Give layers_to_capture"),
        (["eagle3", "--capture-layers", "0,1,3"], "layers_to_capture=[0, 1, 3]"),
        (["dflash", "--mask-token-id", "5"], "needs a target of 4 layers; it has 3"),
        (["dspark", "--mask-token-id", "97", "--capture-layers", "1"], "mask_token_id=97"),
        (["mtp"], "training a mixture of experts is not supported"),
    ],
)
def test_what_does_not_fit_the_target_is_said_before_it_writes(
    tmp_path: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    target = tiny_model_dir(tmp_path, "qwen3_moe" if "mtp" in arguments else "llama")
    save_tokenizer(target)
    train = ["train", *arguments, "--target", str(target), "--self-generate", "3"]
    out = tmp_path / "out"
    assert cli.main([*train, "--length", "64", "--device", "cpu", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def _tiny_target(path: Path) -> Path:
    target = tiny_model_dir(path)
    tokenizer = save_tokenizer(target)
    tokenizer.chat_template = (
        "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    tokenizer.save_pretrained(target)
    return target


def _tiny_head(target: Path, path: Path, **fields: Any) -> Path:
    """Saves a head that the target did not train."""
    spec, decoder = NewHead(layers_to_capture=(0, 1, 2), **fields), load_target(target)
    ids = torch.arange(60) if spec.kind == "eagle3" else None
    save_head(create_head(spec, decoder, ids, F32, seed=0), decoder.config, path)
    return path


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, ["dflash", "--mask-token-id", "90"], "head of kind eagle3, and dflash is to be"),
        ({}, ["mtp"], "head of kind eagle3, and mtp is to be trained"),
        (
            {"kind": "dflash", "mask_token_id": 90},
            ["eagle3", "--draft-vocab-size", "50"],
            "head of kind dflash, and eagle3 is to be",
        ),
        ({}, ["eagle3", "--draft-vocab-size", "50"], "drafts among 60 tokens"),
        ({}, ["eagle3", "--num-layers", "2"], "num_layers: 1 there, 2 here"),
        ({}, ["eagle3", "--sliding-window", "20"], "[None] there, [20] here"),
        ({}, ["eagle3", "--capture-layers", "2,1,0"], "layers_to_capture: (0, 1, 2) there"),
        (
            {"kind": "dflash", "mask_token_id": 90},
            ["dflash", "--mask-token-id", "91", "--context-embeddings"],
            "mask_token_id: 90 there, 91 here; context_embeddings: False there, True here",
        ),
        (
            {"kind": "dspark", "mask_token_id": 90, "markov_rank": 8},
            ["dspark", "--mask-token-id", "90"],
            "markov_rank: 8 there, 16 here",
        ),
    ],
)
def test_another_head_to_begin_with_is_refused_before_the_target_writes(
    tmp_path: Path, capsys: Captured, fields: dict[str, Any], arguments: list[str], message: str
) -> None:
    target = _tiny_target(tmp_path)
    head, out = _tiny_head(target, tmp_path / "head", **fields), tmp_path / "out"
    train = ["train", *arguments, "--target", str(target), "--init-head", str(head)]
    train += ["--self-generate", "3", "--length", "64", "--device", "cpu", "--out", str(out)]
    assert cli.main(train) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def _write_texts(path: Path, count: int = 12) -> Path:
    """Writes conversations that a tiny target can read."""
    lines = [
        json.dumps({"messages": [
            {"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i} {i} {i}"},
        ]})
        for i in range(count)
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def _train(target: Path, out: Path, text: Path | None, *more: str) -> list[str]:
    """Returns a command that trains a head in a moment."""
    data = [] if text is None else ["--data", str(text)]
    small = ["--length", "64", "--steps", "2", "--batch-size", "2", "--unroll", "2"]
    train = ["train", "eagle3", "--target", str(target), "--capture-layers", "0,1,2", *small]
    return [*train, "--device", "cpu", "--out", str(out), *data, *more]


def test_an_earlier_head_keeps_its_rotation_and_norms(tmp_path: Path, capsys: Captured) -> None:
    target, text = _tiny_target(tmp_path), _write_texts(tmp_path / "text.jsonl")
    head, out = _tiny_head(target, tmp_path / "head"), tmp_path / "out"
    config = json.loads((head / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 5e5
    config["rms_norm_eps"] = 1e-3
    (head / "config.json").write_text(json.dumps(config))
    train = _train(target, out, text, "--init-head", str(head))
    assert cli.main(train) == 0, capsys.readouterr().err
    written = json.loads((out / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["rms_norm_eps"] == 1e-3
    assert cli.main(train) == 0 and "is trained" in capsys.readouterr().err
    assert cli.main(_train(target, out, text, "--draft-vocab-size", "60")) == 2
    assert "rotation and norms" in capsys.readouterr().err


def test_a_head_without_its_checkpoint_is_not_overwritten(tmp_path: Path, capsys: Captured) -> None:
    """A directory of the target's text alone, or one that a kill left, is no such head."""
    target, out = _tiny_target(tmp_path), tmp_path / "out"
    out.mkdir()
    train = _train(target, out, _write_texts(out / "text.jsonl"))
    assert cli.main(train) == 0, capsys.readouterr().err
    weights = (out / "model.safetensors").read_bytes()
    (out / "checkpoint.pt").rename(out / "checkpoint.tmp")  # as a kill before the first does
    assert cli.main(train) == 0 and (out / "checkpoint.pt").exists()
    (out / "checkpoint.pt").unlink()
    capsys.readouterr()
    nowhere = [*train, "--target", str(tmp_path / "nowhere")]  # is refused before it is looked for
    for command in (train, [*train, "--init-head", str(out), "--seed", "1"], nowhere):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert "holds a head (model.safetensors, config.json) and no checkpoint.pt" in error
    assert (out / "model.safetensors").read_bytes() == weights


def test_a_directory_that_another_run_holds_is_refused(tmp_path: Path, capsys: Captured) -> None:
    target, out = _tiny_target(tmp_path), tmp_path / "out"
    train = _train(target, out, _write_texts(tmp_path / "text.jsonl"))
    with held(out):
        for _ in range(2):  # who is refused leaves the other's directory and lock
            assert cli.main(train) == 2
            assert f"Another process trains in {out}" in capsys.readouterr().err
        assert out.exists()
    assert not out.exists(), "an empty directory is left"
    out.mkdir()
    assert cli.main([*train, "--data", str(tmp_path / "nowhere")]) == 2
    assert out.exists(), "it was there before"
    assert cli.main(train) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "where"),
    [('{"event": "started"}', "1"), ('{"step": 1}\n[2]', "2"), ("12", "1"), ("not JSON", "1"),
     ('{"step": 1, "lo\n{"step": 1}', "1"), ('{"step": "one"}', "1")],
)  # fmt: skip
def test_a_log_of_something_else_is_kept(
    tmp_path: Path, capsys: Captured, content: str, where: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    train = ["train", "eagle3", "--self-generate", "3", "--target", str(tmp_path / "nowhere")]
    assert cli.main([*train, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"log.jsonl:{where} is no line of a training run's log" in error
    assert log.read_text() == content


@pytest.mark.parametrize("inside", ["", "head"])
def test_an_out_that_cannot_be_a_directory_is_refused_first(
    tmp_path: Path, capsys: Captured, inside: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    train = ["train", "eagle3", "--self-generate", "3", "--target", str(tmp_path / "nowhere")]
    assert cli.main([*train, "--out", str(file / inside)]) == 2
    error = capsys.readouterr().err
    assert f"cannot be a directory: {file} is a file. Name another" in " ".join(error.split())


def test_steps_stand_in_for_epochs(tmp_path: Path) -> None:
    options = TrainOptions(kind="eagle3", out=tmp_path, epochs=math.inf, max_steps=5)
    assert train_config(options, 100, NewHead()).max_steps == 5


def test_text_that_was_trained_on_does_not_grow(tmp_path: Path, capsys: Captured) -> None:
    """Else the run could not go on. It is said, and the run goes on."""
    target, out, asked = _tiny_target(tmp_path), tmp_path / "out", tmp_path / "asked.txt"
    asked.write_text("".join(f"question {i}\n" for i in range(20)))
    train = _train(target, out, None, "--prompts", str(asked), "--max-answer", "8",
                   "--max-batch-size", "4", "--self-written", "0")  # fmt: skip
    assert cli.main([*train, "--self-generate", "4"]) == 0, capsys.readouterr().err
    text = (out / "text.jsonl").read_bytes()
    for more in (["--self-generate", "8"], ["--self-generate", "4"]):
        assert cli.main([*train, *more]) == 0
        error = " ".join(capsys.readouterr().err.split())
        assert "text.jsonl stays as it is" in error and "is trained" in error
    assert cli.main([*train, "--self-generate", "8", "--learning-rate", "0.01"]) == 2
    assert (out / "text.jsonl").read_bytes() == text


def test_an_earlier_head_is_part_of_a_run(tmp_path: Path, capsys: Captured) -> None:
    target, text = _tiny_target(tmp_path), _write_texts(tmp_path / "text.jsonl")
    head, out = _tiny_head(target, tmp_path / "head"), tmp_path / "out"
    train = _train(target, out, text)
    assert cli.main(train) == 0, capsys.readouterr().err
    config = (out / "config.json").read_bytes()
    assert cli.main([*train, "--init-head", str(head)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "earlier head (--init-head)" in error and (out / "config.json").read_bytes() == config


def test_special_tokens_beyond_the_models_rows(tmp_path: Path, capsys: Captured) -> None:
    """As an added token for padding is."""
    target = _tiny_target(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(target)
    rows = json.loads((target / "config.json").read_text())["vocab_size"]
    assert tokenizer.pad_token_id >= rows
    train = _train(target, tmp_path / "out", _write_texts(tmp_path / "text.jsonl"))
    assert cli.main(train) == 0, capsys.readouterr().err


def test_a_mask_token_of_the_text_is_warned_of(tmp_path: Path, capsys: Captured) -> None:
    target, text = _tiny_target(tmp_path), _write_texts(tmp_path / "text.jsonl")
    for token, is_there in ((2, True), (93, False)):
        out = tmp_path / f"out{token}"
        train = ["train", "dspark", *_train(target, out, text)[2:], "--mask-token-id", str(token)]
        for name in ("--unroll", "--draft-vocab-size"):
            if name in train:
                del train[train.index(name) : train.index(name) + 2]
        assert cli.main(train) == 0, capsys.readouterr().err
        error = " ".join(capsys.readouterr().err.split())
        assert ("drafts are asked for by it" in error) == is_there
    # A head that goes on from another has its block.
    assert cli.main([*train, "--out", str(tmp_path / "small"), "--block-size", "4"]) == 0
    again = [*train, "--out", str(tmp_path / "again"), "--init-head", str(tmp_path / "small")]
    assert cli.main(again) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "again" / "config.json").read_text())["block_size"] == 4
