"""`trtspec inspect-head` on real (tiny) heads: facts, mismatches with their cures, exit codes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_heads import eagle1_dir, eagle3_dir, mtp_model_dir, p_eagle_dir
from tiny_step import step_dir

from trtspec import cli
from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.hf_config import load_config
from trtspec.cli.inspect_head import describe_head


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(
        tmp_path_factory.mktemp("target"), num_hidden_layers=8, rope_theta=77000.0
    )


def _inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["inspect-head", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


def test_what_it_tells_of_a_head_that_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target_dir: Path
) -> None:
    head = eagle3_dir(
        tmp_path, norm_before_residual=True,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}},
    )  # fmt: skip
    code, text = _inspect(capsys, head, "--target", target_dir)
    assert code == 0
    for fact in (
        "EAGLE-3, raw", "2, 3, 6 (0-based outputs)", "theta 10000", "theta 77000",
        "97, of which 40 (41%) are drafted, by d2t", "norm_before_residual", "embedding",
        "It fits the target",
    ):  # fmt: skip
        assert fact in text
    code, text = _inspect(capsys, head)
    assert code == 0 and "It is whole" in text


def test_zero_weights_and_tensors_of_another_place_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = eagle3_dir(tmp_path)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * 0}, weights)
    code, text = _inspect(capsys, path)
    assert code == 0 and "fc.weight: a trained head has none" in text
    save_file({f"net.{name}": tensor for name, tensor in tensors.items()}, weights)
    code, text = _inspect(capsys, path)
    assert code == 1 and "no fc.weight" in text and "There is a net.fc.weight: its prefix" in text


def test_every_mismatch_is_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target_dir: Path
) -> None:
    head = eagle3_dir(tmp_path, size=24, target_size=32, own_embedding=False)
    code, text = _inspect(capsys, head, "--target", target_dir)
    assert code == 1
    assert "width 32, the target's are 48 wide. Use a head trained for this target" in text
    assert "no embed_tokens of its own and is 24 wide" in text
    code, text = _inspect(capsys, head, "--target", target_dir, "--json")
    assert code == 1
    report = json.loads(text)
    assert len(report["problems"]) == 2 and report["format"] == "EAGLE-3, raw"


def test_other_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path, target_dir: Path) -> None:
    code, text = _inspect(capsys, eagle1_dir(tmp_path), "--target", target_dir)
    assert code == 0 and "EAGLE-1" in text and "after its final norm" in text
    code, text = _inspect(capsys, mtp_model_dir(tmp_path, num_mtp_layers=3))
    assert code == 0 and "DeepSeek-style MTP layers" in text and "Layers │ 3," in text
    code, text = _inspect(capsys, mtp_model_dir(tmp_path, layout="mimo"))
    assert code == 0 and "hidden state, embedding; fed on after" in text
    code, text = _inspect(capsys, p_eagle_dir(tmp_path, config={"num_depths": 7}))
    assert code == 0 and "P-EAGLE" in text and "mask token 93, at most 7 tokens" in text
    state = load_file(p_eagle_dir(tmp_path) / "model.safetensors")["mask_hidden"]
    assert f"mask_hidden of norm {float(state.norm()):.4g} (by captured" in text
    assert f"{float(state[:, :48].norm()):.4g}, " in text


def test_layers_of_several_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = step_dir(tmp_path)
    code, text = _inspect(capsys, path, "--target", path, "--json")
    assert code == 0
    report = json.loads(text)
    assert report["rope"].splitlines() == [
        "sliding_attention (layers 0, 2): default, theta 10000",
        "full_attention (layers 1, 3): default, theta 500, rotates 4 of 8 dimensions",
    ]
    attention = report["attention"].splitlines()
    assert attention[0].startswith("sliding_attention (layers 0, 2): 4 heads, 2 KV heads")
    assert attention[0].endswith("window 5") and ": 6 heads" in attention[1]
    with ExitStack() as stack:
        facts = describe_head(read_head(path, load_config(path), stack), load_config(path))
    assert (
        "RoPE full_attention: default, theta 500, rotates 4 of 8 dimensions; sliding_attention: "
        "default, theta 10000" in facts["Target"]
    )


def test_a_mask_state_of_zeros(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = p_eagle_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["mask_hidden"] *= 0
    save_file(tensors, path / "model.safetensors")
    _, text = _inspect(capsys, path)
    assert "zero everywhere, which a trained one is not" in text


def test_what_is_no_head(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target_dir: Path
) -> None:
    missing = tmp_path / "none"
    for directory, word in (
        (target_dir, "is a whole model, not a head. Let it draft with DRAFT_TARGET"),
        (missing, "neither a directory"),
    ):
        code, text = _inspect(capsys, directory)
        assert code == 1 and word in text and "Traceback" not in text
    code, text = _inspect(capsys, eagle3_dir(tmp_path), "--target", tmp_path / "nothing")
    assert code == 2 and "Traceback" not in text
