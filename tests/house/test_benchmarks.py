"""`benchmarks/gpu_step.py` end to end on CPU: a tiny model, no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"
FORCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
Bench = Callable[..., tuple[dict[str, Any], str]]
SHORT = ["--device", "cpu", "--replays", "2"]


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != FORCE}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    """Runs the script in this process; gives its JSON and what it printed."""

    def run(*args: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "report.json"
        monkeypatch.delenv(FORCE, raising=False)
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", *SHORT, "--json", str(path), *args])
        import gpu_step

        gpu_step.main()
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


def test_every_combination_is_a_line_with_all_its_fields(bench: Bench) -> None:
    report, text = bench(
        "--preset", "tiny", "--modes", "eagle3_one_model,ngram,plain", "--k", "1,3",
        "--batch", "1,3", "--context", "40", "--accept", "1.5", "--blocks", "8",
    )  # fmt: skip
    for field in ("command", "date", "hardware", "device", "versions", "copy_bytes_per_second"):
        assert report[field], field
    assert report["versions"]["torch"] and report["accept"] == 1.5
    sizes = [(batch, 40) for batch in (1, 3)]
    engines = [("plain", 0), *((m, k) for m in ("eagle3_one_model", "ngram") for k in (1, 3))]
    rows = report["rows"]
    found = [(r["mode"], r["k"], r["batch"], r["context"]) for r in rows]
    assert found == [(*engine, *size) for engine in engines for size in sizes]
    for row in rows:
        assert row["step_ms"] > 0 and row["plain_ms"] > 0 and row["times_plain"] > 0
        assert row["target_ms"] > 0 and row["graph_ms"] is None  # there are no graphs on CPU
        assert {"accept_ms", "draft_ms", "kv_tokens"} < row.keys()
        assert row["prompts_ms"] > 0
        assert len(row["block_ms"]) == 8 and row["tokens_per_second"] > 0
        assert row["times_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])
        drafts = row["bytes"]["draft_weights"], row["bytes"]["draft_kv"]
        assert all(drafts) if row["mode"] == "eagle3_one_model" else not any(drafts)
        assert row["bytes"]["target_weights"] > 0 and row["bytes"]["target_kv"] > 0
        forced = min(1.5, row["k"])  # 80 steps and more: 0.2 is four standard deviations
        assert row["acceptance_length"] == pytest.approx(1 + forced, abs=0.2)
        assert row["forced_acceptance"] == (None if row["mode"] == "plain" else forced)
    slopes = {(s["mode"], s["batch"], s["context"]) for s in report["further_draft_ms"]}
    assert slopes == {(m, *size) for m in ("eagle3_one_model", "ngram") for size in sizes}
    assert "FORCED" in text and text.count(" forced\n") == 8 and "each further draft" in text


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_config_file_and_modes_with_other_heads(
    bench: Bench, tmp_path: Path, family: str
) -> None:
    config = {
        "model_type": family, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": family == "qwen3", "head_dim": 8,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    modes = ["eagle3", "mtp", "mtp_eagle"] if family == "qwen3" else ["mtp_eagle_one_model"]
    report, text = bench(
        "--config", str(path), "--modes", ",".join(modes), "--k", "2", "--batch", "2",
        "--context", "30", "--accept", "0", "--blocks", "1",
    )  # fmt: skip
    assert [row["mode"] for row in report["rows"]] == modes
    assert all(row["plain_ms"] is None for row in report["rows"])
    assert all(row["forced_acceptance"] is None for row in report["rows"])
    assert "FORCED" not in text


def test_profile_lists_what_runs(bench: Bench) -> None:
    report, text = bench(
        "--preset", "tiny", "--modes", "plain", "--batch", "1", "--context", "20",
        "--blocks", "1", "--profile",
    )  # fmt: skip
    (row,) = report["rows"]
    kernels = row["profile"]["kernels"]
    assert 0 < len(kernels) <= 40 and all(len(kernel["name"]) <= 80 for kernel in kernels)
    assert all(kernel["us_per_step"] > 0 and kernel["per_step"] > 0 for kernel in kernels)
    total = row["profile"]["kernel_ms"] + row["profile"]["gap_ms"]
    assert total == pytest.approx(row["step_ms"]) and "mean us" in text


def test_what_a_kernel_adds_is_after_those_that_ended_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from step_timing import added_us

    def event(key: str, start: float, end: float, on: DeviceType = DeviceType.CUDA) -> object:
        return SimpleNamespace(
            key=key, device_type=on, time_range=SimpleNamespace(start=start, end=end)
        )

    events = [
        event("b", 2, 14),  # starts while a runs
        event("a", 0, 10),
        event("c", 11, 13),  # within b
        event("launch", 0, 99, DeviceType.CPU),
        event("a", 20, 26),  # behind a pause
    ]
    assert added_us(events) == {"a": 10 + 6, "c": 2, "b": 1}


@pytest.mark.parametrize(
    ("args", "cure"),
    [
        (["--preset", "llama-9"], "one of smollm2-135m"),
        (["--modes", "plain,eagle9"], "comma list of plain"),
        (["--k", "0"], ">= 1"),
        (["--k", "1,65"], "lower it"),
        (["--batch", "1,x"], ">= 1"),
        (["--accept", "-1"], ">= 0"),
        (["--config", "nowhere.json"], "config.json"),
        (["--max-seq-len", "64"], "give more"),
        (["--json", "nowhere/report.json"], "make it first"),
        (["--device", "tpu"], "'cpu'"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(
    args: list[str], cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *args])
    import gpu_step

    with pytest.raises(SystemExit) as stopped:
        gpu_step.main()
    printed = capsys.readouterr()
    message = printed.err.strip() or str(stopped.value.code)
    assert message.startswith("error: ") and "\n" not in message and printed.out == ""
    assert cure in message and args[1].split(",")[-1] in message


def test_a_refusal_is_all_that_is_printed() -> None:
    done = _run("--preset", "llama-9")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
