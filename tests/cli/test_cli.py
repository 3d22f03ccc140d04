"""The command line against a fake engine: formatting, JSON schemas, errors, exit codes.

The fake spells out numbers, two accepted draft tokens and a bonus token per step, and has the
public face of `trtspec.LLM`. Tests of the commands on a real model are elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import trtspec
from trtspec import cli
from trtspec.api.outputs import CompletionOutput, EngineStats, RequestOutput, SpecStats
from trtspec.api.sampling_params import SamplingParams
from trtspec.cli import generate, render, status
from trtspec.cli.app import app
from trtspec.cli.engine import chosen_head, make_sampling_params, make_spec_config, parse_mode
from trtspec.cli.errors import CliError
from trtspec.cli.options import SPECULATIVE_NAMES, EngineOptions, SamplingOptions
from trtspec.cli.other_options import DRAFTERS, NOT_OFFERED, OTHER_NAMES
from trtspec.data.prompts import DEMO_PROMPTS, PROMPT_SETS
from trtspec.errors import CheckpointError, ConfigError, RequestError
from trtspec.executor import book
from trtspec.metadata.mode import SpeculativeDecodingMode

FORCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
OUTPUT_KEYS = [
    "prompt",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "num_steps",
    "acceptance_length",
    "acceptance_per_position",
]


class FakeTokenizer:
    def decode(self, ids, skip_special_tokens=False):
        return "".join(f" {i}" for i in ids)


class FakeLLM:
    """Answers every prompt with 100, 101, 102, …"""

    built: list[FakeLLM] = []  # noqa: RUF012
    configs: list = []  # noqa: RUF012
    forced = None
    bad_request = ""  # a prompt that holds this text ends with an error
    diverges_at = None  # token from which speculation differs (a fault worth reporting)

    def __init__(self, model, speculative_config=None, **options):
        self.model_dir, self.options = model, options
        config = speculative_config
        self.mode = config.spec_dec_mode if config else SpeculativeDecodingMode.NONE
        self.max_draft_len = config.max_draft_len if config else 0
        self.chooses_draft_len = bool(config) and config.draft_len_schedule == "auto"
        self.acceptance = config.acceptance if config else None
        self.device, self.dtype = "cpu", "torch.bfloat16"
        self.tokenizer = FakeTokenizer()
        self.texts: dict[int, str] = {}
        self.num_tokens = 0
        self.calls: list[list] = []
        self.salts: list = []
        self.executor = SimpleNamespace(
            runtime_draft_len=self.max_draft_len, config=SimpleNamespace(max_seq_len=8192)
        )
        FakeLLM.built.append(self)
        FakeLLM.configs.append(speculative_config)
        self.config = speculative_config

    def apply_chat_template(self, messages):
        ids = [1, len(messages), len(messages[-1]["content"])]
        self.texts[id(ids)] = messages[-1]["content"]
        return ids

    def generate(self, prompts, params, *, cache_salt=None):
        self.calls.append(prompts)
        self.salts.append(cache_salt)
        return [list(self.generate_stream(prompt, params))[-1] for prompt in prompts]

    def generate_stream(self, prompt, params):
        text = prompt if isinstance(prompt, str) else self.texts.get(id(prompt), "")
        if "too long" in text:
            raise RequestError("The prompt has 9 tokens, at most 8 are allowed: shorten it.")
        if "interrupt" in text:
            raise KeyboardInterrupt
        ids = [100 + i for i in range(params.max_tokens)]
        if self.diverges_at is not None and not self.mode.is_none():
            ids[self.diverges_at :] = [7] * len(ids[self.diverges_at :])
        width = 1 if self.mode.is_none() else 3
        is_bad = bool(self.bad_request) and self.bad_request in text
        for start in range(0, len(ids), width):
            self.num_tokens += len(ids[start : start + width])
            is_last = start + width >= len(ids)
            yield self._snapshot(prompt, ids[: start + width], start, is_bad, is_last)

    def _snapshot(self, prompt, ids, start, is_bad, is_last):
        decode = self.tokenizer.decode
        completion = CompletionOutput(
            token_ids=ids,
            text=decode(ids),
            finish_reason=("error" if is_bad else "length") if is_last else None,
            token_ids_diff=ids[start:],
            text_diff=decode(ids[start:]),
        )
        return RequestOutput(
            request_id=0,
            prompt=None,
            prompt_token_ids=[1, 2] if isinstance(prompt, str) else prompt,
            outputs=[completion],
            spec_stats=self._spec_stats(len(ids)),
            error="the logits are NaN" if is_bad else None,
            finished=is_last,
        )

    def _spec_stats(self, num_tokens):
        width = 1 if self.mode.is_none() else 3
        return SpecStats(
            acceptance_length=float(width),
            acceptance_per_position=[1.0, 1.0, 0.25, 0.0][: self.max_draft_len],
            num_steps=-(-num_tokens // width),
        )

    def stats(self):
        speed = 20.0 if self.mode.is_none() else 50.0
        spec = self._spec_stats(self.num_tokens)
        known = {
            "generated_tokens": self.num_tokens,
            "prefill_seconds": self.num_tokens / speed / 4,
            "decode_seconds": self.num_tokens / speed,
            "tokens_per_second": speed,
            "acceptance_length": spec.acceptance_length,
            "acceptance_per_position": spec.acceptance_per_position,
            "forced_acceptance": self.forced,
        }
        return EngineStats(**{field.name: 0 for field in fields(EngineStats)} | known)

    def reset_stats(self):
        self.num_tokens = 0

    def shutdown(self):
        self.is_shut_down = True

    def reset_prefix_cache(self):
        self.num_resets = getattr(self, "num_resets", 0) + 1


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    """The commands meet `FakeLLM`, and a directory `model` to load it from."""
    monkeypatch.setitem(vars(trtspec), "LLM", FakeLLM)  # setattr would load the real one
    monkeypatch.setattr(FakeLLM, "built", [])
    monkeypatch.setattr(FakeLLM, "configs", [])
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return FakeLLM


@pytest.fixture
def run(capsys):
    """`run("generate", …)` -> exit code, stdout, stderr; the model is the fake's."""

    def call(command, *arguments, model="model"):
        code = cli.main([command, "--model", model, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def error_line(err):
    """The error on stderr, which must be one line and no traceback."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


# -- generate ----------------------------------------------------------------------------------
def test_one_prompt_streams_its_text_and_a_summary(run):
    code, out, err = run(
        "generate", "--speculative", "ngram", "--max-draft-len", "4",
        "--prompt", "count", "--max-tokens", "7",
    )  # fmt: skip
    assert code == 0, err
    text, summary = out.splitlines()
    assert text == " 100 101 102 103 104 105 106"
    assert summary == "7 tokens · 50.0 tok/s · acceptance length 3.00 · NGRAM, K = 4"
    assert "loading model with NGRAM" in err
    _, out, _ = run(
        "generate", "--speculative", "ngram", "--max-draft-len", "auto", "--prompt", "count",
    )  # fmt: skip
    assert out.endswith("NGRAM, K = 0…6\n"), "each step's is chosen"


def test_several_prompts_are_printed_with_headings(run):
    code, out, _ = run("generate", "--prompt", "a", "--prompt", "b", "--max-tokens", "2")
    assert code == 0
    assert "[1/2] a" in out and "[2/2] b" in out
    assert out.count(" 100 101") == 2
    assert "4 tokens" in out and "NONE" in out


def test_several_prompts_are_printed_as_they_finish(run, fake, monkeypatch):
    lengths = {"slow": 9, "quick": 2, "queued": 1}
    whole = fake.generate_stream

    def stream(self, prompt, params):
        return whole(self, prompt, SamplingParams(max_tokens=lengths[self.texts[id(prompt)]]))

    monkeypatch.setattr(fake, "generate_stream", stream)
    prompts = [part for text in lengths for part in ("--prompt", text)]
    code, out, _ = run("generate", *prompts, "--max-batch-size", "2")
    assert code == 0
    headings = [line for line in out.splitlines() if line.startswith("[")]
    assert headings == ["[2/3] quick", "[3/3] queued", "[1/3] slow"]


def test_json_is_the_only_thing_on_stdout(run):
    code, out, _ = run(
        "generate", "--speculative", "ngram", "--max-draft-len", "2", "--prompt", "count",
        "--max-tokens", "4", "--json",
    )  # fmt: skip
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert list(report) == [
        "model", "mode", "max_draft_len", "chooses_draft_len", "acceptance", "device", "dtype",
        "outputs", "stats",
    ]  # fmt: skip
    assert report["mode"] == "ngram" and report["max_draft_len"] == 2
    assert report["device"] == "cpu" and report["dtype"] == "bfloat16"
    (output,) = report["outputs"]
    assert list(output) == OUTPUT_KEYS
    assert output["prompt"] == "count" and output["prompt_token_ids"] == [1, 1, 5]
    assert output["token_ids"] == [100, 101, 102, 103]
    assert output["acceptance_per_position"] == [1.0, 1.0] and output["num_steps"] == 2
    assert report["stats"] == {
        "generated_tokens": 4,
        "decode_seconds": 0.08,
        "tokens_per_second": 50.0,
        "acceptance_length": 3.0,
        "forced_acceptance": None,
    }


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("printed", [False, True])
def test_a_json_file_holds_what_json_prints(run, tmp_path, command, printed):
    given = [command, "--prompt", "count", "--max-tokens", "4"]
    _, expected, _ = run(*given, "--json")
    code, out, _ = run(*given, "--json-file", "found.json", *(["--json"] if printed else []))
    assert code == 0
    assert (tmp_path / "found.json").read_text() == expected
    assert out == expected if printed else "tok/s" in out


def test_a_file_that_cannot_be_written_loses_nothing(run, monkeypatch, tmp_path):
    """The old file stays, and stdout has the result."""
    given = ["generate", "--prompt", "count", "--max-tokens", "4", "--json"]
    _, expected, _ = run(*given)
    (tmp_path / "old.json").write_text("old")

    def full(self, text, **options):
        with open(self, "w") as file:
            file.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run(*given, "--json-file", "old.json")
    assert code == 1 and out == expected and "No space left" in err
    assert [path.name for path in tmp_path.glob("*.json*")] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_json_file_may_be_a_pipe_and_keeps_its_mode(run, tmp_path):
    given = ["generate", "--prompt", "count", "--max-tokens", "4"]
    _, expected, _ = run(*given, "--json")
    old = tmp_path / "old.json"
    old.write_text("old")
    old.chmod(0o600)
    (tmp_path / "link.json").symlink_to(old)
    assert run(*given, "--json-file", "link.json")[0] == 0
    assert old.read_text() == expected and old.stat().st_mode & 0o777 == 0o600
    read, write = os.pipe()
    assert run(*given, "--json-file", f"/dev/fd/{write}")[0] == 0
    os.close(write)
    with open(read) as pipe:
        assert pipe.read() == expected


@pytest.mark.parametrize(
    ("file", "expected"), [("nowhere/x.json", "is not there"), (".", "is a directory")]
)
def test_a_json_file_is_checked_before_anything_is_loaded(run, fake, file, expected):
    code, out, err = run("generate", "--prompt", "a", "--json-file", file)
    assert code == 2 and expected in error_line(err) and out == "" and not fake.built


def test_numbers_json_has_no_word_for_become_null(run, fake, monkeypatch):
    nothing = SpecStats(float("nan"), [float("nan")], 0)
    monkeypatch.setattr(fake, "_spec_stats", lambda self, n: nothing)
    code, out, _ = run("generate", "--prompt", "a", "--json")
    assert code == 0
    assert json.loads(out)["outputs"][0]["acceptance_length"] is None
    assert json.loads(out)["outputs"][0]["acceptance_per_position"] == [None]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_request_is_reported_and_exits_1(run, fake, monkeypatch, as_json):
    monkeypatch.setattr(fake, "bad_request", "bad")
    flags = ["--json"] if as_json else []
    code, out, err = run("generate", "--prompt", "good", "--prompt", "bad", *flags)
    assert code == 1
    assert "the logits are NaN" in error_line(err)
    if as_json:
        good, bad = json.loads(out)["outputs"]
        assert list(good) == OUTPUT_KEYS
        assert list(bad) == [*OUTPUT_KEYS, "error"] and bad["error"] == "the logits are NaN"


@pytest.mark.parametrize("prompts", [["bad"], ["bad", "worse"]])
def test_where_all_requests_failed_there_is_no_summary(run, fake, monkeypatch, prompts):
    monkeypatch.setattr(fake, "bad_request", prompts[0])
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    _, out, _ = run("generate", *given)
    assert ("tok/s" in out) == (len(prompts) > 1)


def test_generate_says_once_why_a_request_failed(caplog):
    with generate._failures_told_at_the_end():
        book.logger.error(book.FAILED, 0, "the logits are NaN")
        book.logger.error("Something else.")
    book.logger.error(book.FAILED, 1, "the logits are NaN")
    assert [r.getMessage() for r in caplog.records] == [
        "Something else.",
        "Request 1 failed: the logits are NaN",
    ]


def test_a_refused_request_exits_1(run):
    code, _, err = run("generate", "--prompt", "much too long")
    assert code == 1
    assert "at most 8 are allowed" in error_line(err)


def test_forced_acceptance_is_loud(run, fake, monkeypatch):
    monkeypatch.setattr(fake, "forced", 1.5)
    _, out, _ = run("generate", "--prompt", "a", "--speculative", "ngram")
    assert "FORCED ACCEPTANCE IS ON: 1.5 draft tokens per step (bonus token not counted)" in out
    assert FORCE in out and "acceptance length 3.00 (FORCED 1.5)" in out
    _, out, _ = run("generate", "--prompt", "a", "--speculative", "ngram", "--json")
    assert json.loads(out)["stats"]["forced_acceptance"] == 1.5


def test_raw_gives_the_text_itself(run, fake):
    code, out, _ = run("generate", "--prompt", "a", "--raw", "--json")
    assert code == 0
    assert fake.built[0].calls == [["a"]]
    assert json.loads(out)["outputs"][0]["prompt_token_ids"] == [1, 2]


def test_options_reach_the_engine(run, fake):
    run("generate", "--prompt", "a", "--dtype", "float32", "--device", "cpu",
        "--quant", "fp8", "--max-batch-size", "3", "--tp", "2", "--ep", "2",
        "--prefill-batch-size", "auto")  # fmt: skip
    assert fake.built[0].options == {
        "device": "cpu", "dtype": "float32", "max_batch_size": 3, "tensor_parallel_size": 2,
        "moe_expert_parallel_size": 2, "kv_cache_config": trtspec.KvCacheConfig(), "quant": "fp8",
        "prefill_batch_size": "auto",
    }  # fmt: skip
    code, _, err = run("generate", "--prompt", "a", "--prefill-batch-size", "many")
    assert code == 2 and "--prefill-batch-size 'many': give a number of slots, or auto." in err
    run("bench", "--prompt", "a", "--speculative", "ngram", "--no-block-reuse", "--repeat", "2",
        "--quant", "fp8")  # fmt: skip
    for llm in fake.built[1:]:
        assert not llm.options["kv_cache_config"].enable_block_reuse
        assert llm.options["quant"] == "fp8"
        assert llm.num_resets == 3, "a run finds nothing of the one before"


def test_acceptance_rules_by_name(run):
    drafting = ["--speculative", "ngram", "--acceptance", "block"]
    code, out, _ = run("generate", "--prompt", "a", "--json", *drafting)
    assert code == 0 and json.loads(out)["acceptance"] == "block"
    sampled = ["bench", "--prompt", "a", "--temperature", "1", "--repeat", "1"]
    code, out, _ = run(*sampled, *drafting)  # for NGRAM all rules are one
    assert code == 0 and "identical" in out
    network = ["--speculative", "mtp_eagle", "--acceptance", "block"]
    code, out, _ = run(*sampled, *network)
    assert code == 0 and "other draws" in out
    code, out, _ = run(*sampled, *network, "--json")
    assert json.loads(out)["draws_anew"] is True
    code, _, err = run(
        "generate", "--prompt", "a", "--speculative", "none", "--acceptance", "block"
    )
    assert code == 2 and "nothing drafts" in err
    code, _, err = run("generate", "--prompt", "a", *drafting[:-1], "lenient")
    assert code == 2 and "'strict', 'exact_match', 'rejection' or 'block'" in " ".join(err.split())


def test_ctrl_c_exits_130_without_a_traceback(run):
    code, _, err = run("generate", "--prompt", "interrupt")
    assert code == 130
    assert "interrupted" in err and "Traceback" not in err


def test_sigterm_ends_a_command_as_ctrl_c_does(run, fake, monkeypatch, tmp_path):
    real = fake.generate

    def generate(self, prompts, params, **options):
        if self.options["max_batch_size"] == 4:
            signal.raise_signal(signal.SIGTERM)
        return real(self, prompts, params, **options)

    monkeypatch.setattr(fake, "generate", generate)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        code, _, err = run(
            *SWEEP, "--concurrency", "1,4", "--kinds", "code", "--temperatures", "0", "--csv",
            "t.csv",
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 143 and err.endswith("these are 1 of 2 cells.\nterminated\n")
    lines = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in lines} == {"1"}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("seconds", [30, 0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_where_python_drops_exceptions_is_heard(run, fake, monkeypatch, number, seconds):
    """As in the callbacks of weak references, which imports have many of. It comes again, but not
    after the command has ended."""

    real = fake.generate_stream

    class Lost:
        def __del__(self):
            signal.raise_signal(number)

    def generate_stream(self, *arguments, **options):
        Lost()
        time.sleep(seconds)
        return real(self, *arguments, **options)

    monkeypatch.setattr(fake, "generate_stream", generate_stream)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = run("generate", "--prompt", "a")
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 128 + number
    if seconds:
        assert err.endswith("interrupted\n" if number == signal.SIGINT else "terminated\n")


@pytest.mark.parametrize(
    ("arguments", "mode", "k"),
    [
        (["eagle3", "--head", "h"], "eagle3_one_model", 0),
        (["EAGLE3_ONE_MODEL", "--head", "h", "--max-draft-len", "3"], "eagle3_one_model", 3),
        (["eagle3", "--head", "h", "--two-engine", "--max-draft-len", "3"], "eagle3", 3),
        (["mtp"], "mtp", 1),
        (["mtp", "--head", "h", "--max-draft-len", "3"], "mtp", 3),
        (["mtp_eagle", "--max-draft-len", "2"], "mtp_eagle_one_model", 2),
        (["mtp_eagle", "--head", "h", "--two-engine"], "mtp_eagle", 1),
    ],
)
def test_heads_by_name(run, fake, arguments, mode, k):
    code, out, _ = run("generate", "--prompt", "a", "--json", "--speculative", *arguments)
    assert code == 0
    report = json.loads(out)
    assert report["mode"] == mode and report["max_draft_len"] == k


def test_a_bug_keeps_its_traceback(run, fake, monkeypatch):
    def broken(self, prompt, params):
        raise AssertionError("a bug")

    monkeypatch.setattr(fake, "generate_stream", broken)
    with pytest.raises(AssertionError, match="a bug"):
        run("generate", "--prompt", "a")


# -- bad usage ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give --prompt TEXT"),
        (["--prompt", " "], "--prompt is empty"),
        (["--prompt", "a", "--prompt-file", "f"], "use one of them"),
        (
            ["--prompt", "a", "--speculative", "warp"],
            "'warp' is unknown: give one of none, ngram, sa,",
        ),
        (["--prompt", "a", "--speculative", "eagle3"], "EAGLE3 needs a draft head: give --head"),
        (["--prompt", "a", "--speculative", "ngram", "--head", "h"], "ngram drafts without a head"),
        (
            ["--prompt", "a", "--speculative", "mtp", "--draft-model", "d"],
            "MTP drafts without a model. Give its directory with --head",
        ),
        (["--prompt", "a", "--speculative", "mtp", "--two-engine"], "MTP has no two-engine form"),
        (["--prompt", "a", "--speculative", "ngram", "--two-engine"], "no two-engine form"),
        (["--prompt", "a", "--speculative", "save_hidden_states"], "needs an output_directory"),
        (["--prompt", "a", "--speculative", "user_provided"], "use the Python API"),
        (["--prompt", "a", "--speculative", "draft_target"], "give --draft-model DIR"),
        (["--prompt", "a", "--draft-model", "model"], "NONE drafts without a model"),
        (["--prompt", "a", "--max-draft-len", "4"], "nothing drafts: name a --speculative mode"),
        (
            ["--prompt", "a", "--speculative", "ngram", "--max-draft-len", "-1"],
            "--max-draft-len -1: give 1 or more",
        ),
        (["--prompt", "a", "--speculative", "ngram", "--max-draft-len", "0"], "give 1 or more"),
        (["--prompt", "a", "--draft-len-schedule", "4:2"], "nothing drafts"),
        (["--prompt", "a", "--sa"], "--sa was given, but nothing drafts"),
        (["--prompt", "a", "--two-engine"], "--two-engine was given, but nothing drafts"),
        (["--prompt", "a", "--draft-quant", "fp8"], "--draft-quant was given, but nothing drafts"),
        (
            ["--prompt", "a", "--speculative", "ngram", "--draft-len-schedule", "4=2"],
            "'4=2': give numbers of requests and draft lengths, like 4:4",
        ),
        (
            ["--prompt", "a", "--speculative", "ngram", "--draft-len-schedule", "4:2,4:1"],
            "names a number of requests twice",
        ),
        (
            ["--prompt", "a", "--speculative", "ngram", "--draft-len-schedule", "4:7"],
            "draft_len_schedule={4: 7}: it must be",
        ),
        (["--prompt", "a", "--max-tokens", "0"], "SamplingParams.max_tokens=0"),
        (["--prompt", "a", "--top-p", "2"], "SamplingParams.top_p=2.0"),
        (["--prompt", "a", "--top-p", "0.9"], "--top-p was given, but temperature 0 is greedy"),
        (["--prompt", "a", "--top-k", "5"], "--top-k was given, but temperature 0 is greedy"),
        (["--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "a", "--surplus"], "--surplus"),
    ],
)
def test_bad_usage_is_one_line_and_exits_2(run, arguments, expected):
    code, out, err = run("generate", *arguments)
    assert code == 2
    assert expected in error_line(err)
    assert out == ""


def test_names_in_the_error_are_those_of_the_help():
    (option,) = (field for field in fields(EngineOptions) if field.name == "speculative")
    words = re.findall(r"\w+", option.type.__metadata__[0].help)
    assert [name for name in SPECULATIVE_NAMES if name not in words] == []
    modes = {parse_mode(name) for name in SPECULATIVE_NAMES}
    of_python = {SpeculativeDecodingMode.USER_PROVIDED, SpeculativeDecodingMode.SAVE_HIDDEN_STATES}
    with_options = {mode for mode in SpeculativeDecodingMode if mode.name.endswith("_ONE_MODEL")}
    assert modes == set(SpeculativeDecodingMode) - of_python - with_options


def test_a_broken_checkpoint_exits_2(run, fake, monkeypatch):
    def broken(self, *_, **__):
        raise CheckpointError("model/config.json is missing:\n give a HF directory.")

    monkeypatch.setattr(fake, "__init__", broken)
    code, _, err = run("generate", "--prompt", "a")
    assert code == 2
    assert "config.json is missing: give" in error_line(err)  # on one line


def test_unknown_command_and_no_command(capsys):
    assert cli.main(["decode"]) == 2
    assert "decode" in error_line(capsys.readouterr().err)
    assert cli.main([]) == 0
    assert "generate" in capsys.readouterr().out


# -- prompt files ------------------------------------------------------------------------------
def test_prompt_file_takes_all_three_forms(run, tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "c"}]
    lines = ["a", {"prompt": "b\u2028b"}, {"messages": messages}]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    (tmp_path / "f.jsonl").write_text(content, encoding="utf-8")
    code, out, err = run("generate", "--prompt-file", "f.jsonl", "--json")
    assert code == 0, err
    outputs = json.loads(out)["outputs"]
    assert [output["prompt"] for output in outputs] == ["a", "b\u2028b", messages]
    assert outputs[2]["prompt_token_ids"] == [1, 2, 1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON"),
        ("3", "got int"),
        ("null", "got NoneType"),
        ('""', "the prompt is empty"),
        ('{"prompt": 3}', "got int"),
        ('{"text": "a"}', "keys 'text'"),
        ("{}", "keys none"),
        ('{"prompt": "a", "messages": []}', "keys 'prompt', 'messages'"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "a"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "message 0"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 0"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_prompt_file_errors_name_the_line(run, tmp_path, line, expected):
    (tmp_path / "f.jsonl").write_text(f'"fine"\n\n{line}\n')
    code, out, err = run("generate", "--prompt-file", "f.jsonl", "--json")
    assert code == 2 and out == ""
    assert "f.jsonl, line 3: " in error_line(err)
    assert expected in error_line(err)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\n \n", "has no prompts"), (b'"\xff"', "not UTF-8")]
)
def test_prompt_file_without_prompts(run, tmp_path, content, expected):
    (tmp_path / "f.jsonl").write_bytes(content)
    code, _, err = run("generate", "--prompt-file", "f.jsonl")
    assert code == 2 and expected in error_line(err)


def test_prompt_file_missing_or_a_directory(run):
    assert "cannot be read" in error_line(run("generate", "--prompt-file", "nowhere")[2])
    assert "cannot be read" in error_line(run("generate", "--prompt-file", "model")[2])


def test_raw_refuses_messages(run, tmp_path):
    line = {"messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "f.jsonl").write_text(json.dumps(line))
    code, _, err = run("generate", "--prompt-file", "f.jsonl", "--raw")
    assert code == 2 and "prompt 1 is a list of messages" in error_line(err)


# -- bench -------------------------------------------------------------------------------------
def test_bench_compares_both_built_in_sets(run, fake):
    code, out, err = run("bench", "--repeat", "2", "--max-tokens", "3", "--max-draft-len", "3")
    assert code == 0, err
    assert "repeats (4)" in out and "open (4)" in out
    assert "2.50x" in out and "identical" in out and "median of 2 run(s)" in out
    assert "draft  3" in out and "25.0 %" in out
    speculative, plain = fake.built
    assert (plain.mode.name, speculative.mode.name) == ("NONE", "NGRAM")
    assert [len(call) for call in plain.calls] == [1, 4, 4] * 2  # warm-up, then the two runs
    assert [len(call) for call in speculative.calls] == [1, 4, 4] * 2
    assert len(set(speculative.salts)) == 6, "no run may find an earlier one's answers"


def test_bench_json(run):
    code, out, _ = run("bench", "--prompt", "a", "--repeat", "3", "--max-tokens", "4", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["mode"] == "ngram" and report["repeat"] == 3
    (result,) = report["sets"]
    assert result["name"] == "given" and result["speedup"] == 2.5
    assert result["identical"] is True and result["first_differences"] == [None]
    assert result["plain"]["tokens_per_second_runs"] == [20.0] * 3
    assert result["speculative"]["acceptance_length"] == 3.0


def test_bench_tells_when_tokens_differ(run, fake, monkeypatch):
    monkeypatch.setattr(fake, "diverges_at", 2)
    code, out, _ = run("bench", "--prompt", "a", "--repeat", "1", "--max-tokens", "4")
    assert code == 0 and "1 of 1 differ, first at token 2" in out
    _, out, _ = run("bench", "--prompt", "a", "--repeat", "1", "--max-tokens", "4", "--json")
    assert json.loads(out)["sets"][0]["first_differences"] == [2]


def test_an_interrupted_bench_keeps_whole_sets(run, monkeypatch, tmp_path):
    from trtspec.cli import bench

    measure, done = bench.Measurement.run, []

    def interrupted(self, name, prompts):
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return measure(self, name, prompts)

    monkeypatch.setattr(bench.Measurement, "run", interrupted)
    path = tmp_path / "bench.json"
    code, out, err = run("bench", "--repeat", "1", "--max-tokens", "3", "--json-file", str(path))
    report = json.loads(path.read_text())
    assert code == 130 and [each["name"] for each in report["sets"]] == done
    assert report["num_sets"] == 2 and "these are 1 of 2 prompt sets" in err and done[0] in out


def test_bench_errors(run, fake, monkeypatch):
    code, _, err = run("bench", "--speculative", "none")
    assert code == 2 and "nothing to compare" in error_line(err)
    code, _, err = run("bench", "--repeat", "0")
    assert code == 2 and "--repeat" in error_line(err)
    monkeypatch.setattr(fake, "bad_request", "a")
    code, _, err = run("bench", "--prompt", "a")
    assert code == 1 and "the logits are NaN" in error_line(err)


# -- bench --sweep -----------------------------------------------------------------------------
SWEEP = ["bench", "--sweep", "--speculative", "ngram", "--max-draft-len", "3", "--max-tokens", "3"]


def test_a_sweep_has_a_row_per_place_and_a_column_per_way(run, fake):
    code, out, err = run(*SWEEP, "--concurrency", "1,4", "--temperatures", "0,0.7")
    assert code == 0, err
    for word in (
        "plain",
        "K=1",
        "K=2",
        "K=3",
        "auto",
        "sa",
        "auto/plain",
        "with prompts",
        "auto/best",
    ):
        assert word in out
    assert out.count("chat") == 4 and out.count("agent") == 4
    assert "2.50" in out and "1.00" in out and "median of 1 run(s)" in out
    assert len(fake.built) == 9 and all(llm.is_shut_down for llm in fake.built)
    assert {llm.options["max_batch_size"] for llm in fake.built[1:]} == {1, 4}
    sizes = {llm.options["kv_cache_config"].max_tokens for llm in fake.built[1:]}
    assert max(sizes) < 2000, "each engine leaves memory for the others"
    schedules = [c.draft_len_schedule for c in fake.configs if c is not None]
    assert schedules.count("auto") == 2
    salts = [tuple(salts) for llm in fake.built for salts in llm.salts]
    assert len(salts) == len(set(salts)), "no run may find an earlier one's answers"


def test_columns_of_a_sweep_differ_in_speculation_only(run, fake):
    code, _, err = run(
        *SWEEP,
        "--concurrency",
        "1",
        "--temperatures",
        "0",
        "--quant",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "--dtype",
        "float32",
        "--no-block-reuse",
        "--free-gpu-memory-fraction",
        "0.4",
    )
    assert code == 0, err
    assert [llm.mode.name for llm in fake.built[1:]] == ["NONE", "NGRAM", "NGRAM", "SA"]
    for llm in fake.built[1:]:
        cache = llm.options["kv_cache_config"]
        assert llm.options["quant"] == "fp8" and llm.options["dtype"] == "float32"
        assert cache.dtype == "fp8" and not cache.enable_block_reuse
        assert cache.free_gpu_memory_fraction == 0.4


def test_a_sweep_in_json_and_csv(run, tmp_path):
    code, out, err = run(
        *SWEEP, "--concurrency", "3", "--temperatures", "0.5", "--kinds", "code", "--repeat", "2",
        "--columns", "plain,fixed,auto", "--fixed", "1,3", "--csv", "table.csv", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report["mode"] == "ngram" and report["seed"] == 0 and report["repeat"] == 2
    (cell,) = report["cells"]
    assert cell["concurrency"] == cell["num_prompts"] == 3
    assert cell["temperature"] == 0.5 and cell["kind"] == "code" and cell["context"] is None
    assert list(cell["columns"]) == ["plain", "K=1", "K=3", "auto"]
    assert cell["columns"]["auto"] == {
        "tokens_per_second": 50.0, "tokens_per_second_runs": [50.0, 50.0],
        "tokens_per_second_with_prompts": pytest.approx(40.0), "acceptance_length": 3.0,
    }  # fmt: skip
    assert cell["auto_over_plain"] == 2.5 and cell["auto_over_best_fixed"] == 1.0
    assert cell["auto_over_plain_with_prompts"] == pytest.approx(2.5)
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0].startswith("concurrency,temperature,kind,context,column,")
    assert lines[1:3] == [
        "3,0.5,code,,plain,20.0000,1.0000,16.0000",
        "3,0.5,code,,K=1,50.0000,3.0000,40.0000",
    ]


def test_where_auto_falls_short_is_marked(run, fake, monkeypatch):
    real = fake.stats

    def stats(self):
        slow = self.config is not None and self.config.draft_len_schedule == "auto"
        return replace(real(self), tokens_per_second=19.0) if slow else real(self)

    monkeypatch.setattr(fake, "stats", stats)
    _, out, _ = run(*SWEEP, "--concurrency", "1", "--temperatures", "0", "--kinds", "maths")
    assert "0.95 !" in out and "0.38 !" in out


def test_a_sweep_with_a_head_has_both(run, fake, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(
        "bench", "--sweep", "--speculative", "draft_target", "--draft-model", "model",
        "--concurrency", "1", "--temperatures", "0", "--prompt", "a", "--prompt", "b",
        "--columns", "plain,both", "--max-tokens", "3", "--picture", "p.svg",
    )  # fmt: skip
    assert code == 0, err
    assert "draft_target+sa" in out and "given" in out and "auto" not in out
    assert fake.configs[1] is None and fake.configs[2].sa_config is not None
    picture = (tmp_path / "p.svg").read_text()
    assert picture.startswith("<svg") and "given, T=0" in picture and "draft_target+sa" in picture


def test_contexts_of_a_sweep_are_padded(run, fake, monkeypatch):
    def template(self, messages):
        ids = [1] * sum(len(message["content"].split()) + 3 for message in messages)
        self.texts[id(ids)] = messages[-1]["content"]
        return ids

    monkeypatch.setattr(fake, "apply_chat_template", template)
    monkeypatch.setattr(fake, "generate_stream", lambda self, prompt, params: self.made(prompt))
    monkeypatch.setattr(
        fake, "made", lambda self, ids: [self._snapshot(ids, [100], 0, False, True)], raising=False
    )
    code, out, err = run(
        *SWEEP, "--concurrency", "1", "--temperatures", "0", "--kinds", "summarise",
        "--contexts", "400", "--columns", "plain,auto",
    )  # fmt: skip
    assert code == 0, err
    assert "context" in out and "400" in out
    assert all(len(ids) >= 400 for llm in fake.built for call in llm.calls for ids in call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "'0' is not allowed. Give whole numbers in 1 … 4096, separated"),
        (["--contexts", "0"], "Give whole numbers in 1 … 1048576, separated by commas"),
        (["--temperatures", "-1"], "Give numbers in 0 … 100, separated by commas"),
        (["--kinds", "poems"], "'poems' is not one of chat"),
        (["--kinds", ","], "--kinds ',' names nothing: give some of chat"),
        (["--columns", ""], "--columns '' names nothing: give some of plain"),
        (["--columns", "plain,auto", "--fixed", "1"], "which --columns leaves out. Name it there"),
        (["--max-draft-len", "-3", "--fixed", "1"], "--max-draft-len -3: give 1 or more"),
        (["--kinds", "code", "--prompt", "a"], "which are a kind of their own"),
        (["--top-k", "5", "--temperatures", "0"], "--top-k was given, but temperature 0"),
        (["--columns", "plain,both"], "there is no such column"),
        (["--fixed", "5"], "K is 3"),
        (["--temperature", "1"], "takes --temperatures 0,1"),
        (["--max-batch-size", "8"], "takes --concurrency"),
        (["--draft-len-schedule", "auto"], "the column auto"),
        (["--max-draft-len", "auto"], "has a column for it"),
        (["--speculative", "none"], "nothing to compare"),
        (["--csv", "nowhere/t.csv"], "is not there"),
        (["--max-tokens", "8192"], "more than the model's 8192"),
        (["--max-tokens", "1"], "no step would follow to be measured"),
        (["--csv", "t", "--json-file", "./t"], "--csv and --json-file are both t: name two files"),
        (["--prefill-batch-size", "2"], "--prefill-batch-size 2 is above --concurrency 1"),
        (["--prefill-batch-size", "0"], "--prefill-batch-size 0: give 1 or more, or auto"),
        (["--prefill-batch-size", "few"], "--prefill-batch-size 'few': give a number of slots"),
    ],
)
def test_what_a_sweep_refuses(run, arguments, message):
    code, _, err = run(*SWEEP, *arguments)
    assert code == 2 and message in error_line(err)


def test_one_token_is_nothing_to_measure(run, fake):
    for command in ("bench", "acceptance"):
        code, _, err = run(command, "--speculative", "ngram", "--max-tokens", "1")
        assert code == 2 and "--max-tokens 1: " in error_line(err)
    assert fake.built == []


def test_a_fixed_length_above_k_is_refused_before_an_engine_is_loaded(run, fake):
    code, _, err = run(*SWEEP, "--max-draft-len", "4", "--fixed", "2,9")
    assert code == 2 and "--fixed 9: K is 4" in error_line(err)
    assert fake.built == []


def test_pictures_are_svg(run, fake, tmp_path):
    picture = tmp_path / "p.png"
    code, _, err = run(*SWEEP, "--picture", str(picture))
    assert code == 2 and "p.png: the table is drawn as SVG alone. Give a name" in error_line(err)
    assert fake.built == [] and not picture.exists()


def test_a_sweep_waits_for_slots_that_all_its_engines_have(run, fake):
    code, _, err = run(*SWEEP, "--prefill-batch-size", "2", "--concurrency", "2,4")
    assert code == 0, err
    scout, *others = [llm.options["prefill_batch_size"] for llm in fake.built]
    assert scout is None and set(others) == {2}


def test_options_of_a_sweep_need_it(run):
    code, _, err = run("bench", "--kinds", "code")
    assert code == 2 and "--kinds is of --sweep" in error_line(err)


def test_a_request_that_fails_ends_the_sweep(run, fake, monkeypatch):
    real = fake._snapshot
    monkeypatch.setattr(fake, "_snapshot", lambda self, p, ids, *_: real(self, p, ids, 0, 1, 1))
    code, out, err = run(*SWEEP)
    assert code == 1 and "the logits are NaN" in error_line(err)
    assert out == ""


@pytest.mark.parametrize("error", [RequestError("no block left"), KeyboardInterrupt()])
def test_a_sweep_that_ends_early_shows_what_it_has(run, fake, monkeypatch, tmp_path, error):
    real = fake.generate

    def generate(self, prompts, params, **options):
        if self.options["max_batch_size"] == 4:
            raise error
        return real(self, prompts, params, **options)

    monkeypatch.setattr(fake, "generate", generate)
    code, out, err = run(
        *SWEEP, "--concurrency", "1,4", "--kinds", "code", "--temperatures", "0,1",
        "--csv", "t.csv", "--json-file", "t.json",
    )  # fmt: skip
    assert "note: these are 2 of 4 cells." in err
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert out.count("code") == 2 and "written: t.csv" in out
    lines = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in lines} == {"1"}
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["num_cells"] == 4 and len(found["cells"]) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{nope", "is not JSON: Expecting property name"),
        ("[1]", "holds a list: a schema is an object"),
        ("[" * 5000, "is not JSON"),
    ],
)
def test_a_schema_that_is_none_is_refused_before_the_model_is_loaded(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(text)
    with pytest.raises(CliError) as refused:
        make_sampling_params(SamplingOptions(json_schema=path))
    assert f"--json-schema {path} {words}" in str(refused.value)


def test_the_head_that_reports_name() -> None:
    """The package's where none is given."""
    head = {mode: chosen_head(EngineOptions(speculative=mode)) for mode in ("eagle3", "mtp", "sa")}
    assert head == {"eagle3": "smollm2-135m-eagle3", "mtp": None, "sa": None}
    assert chosen_head(EngineOptions(speculative="eagle3", head="mine")) == "mine"
    assert chosen_head(EngineOptions(model="other", speculative="eagle3")) is None


def test_lookup_beside_a_drafter():
    options = EngineOptions(speculative="draft_target", draft_model="model", sa=True)
    config = make_spec_config(options, lambda *_: None)
    assert config.sa_config.threshold == 4
    with pytest.raises(CliError, match=r"NGRAM drafts without a network.*--speculative sa"):
        make_spec_config(EngineOptions(speculative="ngram", sa=True), lambda *_: None)


# -- demo --------------------------------------------------------------------------------------
def test_demo_in_plain_text(run, fake):
    code, out, err = run("demo", "--max-tokens", "6", "--max-draft-len", "4")
    assert code == 0, err
    assert not any(llm.options["kv_cache_config"].enable_block_reuse for llm in fake.built)
    assert out.count(" 100 101 102 103 104 105") == 2 * len(DEMO_PROMPTS)
    assert out.count("[tokens: identical]") == len(DEMO_PROMPTS)
    assert "20.0 tok/s" in out and "50.0 tok/s" in out and "2.50x" in out
    assert "draft  4" in out and "\x1b" not in out and "╭" not in out


def test_demo_has_no_option_for_the_cache_that_it_leaves_out(run):
    code, _, err = run("demo", "--no-block-reuse")
    assert code == 2 and "No such option: --no-block-reuse" in error_line(err)


def test_demo_is_honest_about_differences(run, fake, monkeypatch):
    monkeypatch.setattr(fake, "diverges_at", 5)
    code, out, _ = run("demo", "--max-tokens", "6")
    assert code == 0
    assert "[tokens: 1 of 1 differ, first at token 5]" in out
    assert "--dtype float32" in out


def test_demo_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("demo", "--max-tokens", "6")
    assert code == 0
    assert "\x1b[1;32m 100 101" in out  # accepted draft tokens in green
    assert "without speculation" in out and "summary" in out


def test_demo_reports_a_failed_request(run, fake, monkeypatch):
    monkeypatch.setattr(fake, "bad_request", "lighthouse")
    code, _, err = run("demo", "--max-tokens", "6")
    assert code == 1 and "the logits are NaN" in error_line(err)


# -- parts -------------------------------------------------------------------------------------
def test_split_step_marks_accepted_drafts():
    step = SimpleNamespace(token_ids_diff=[1, 2, 3], text_diff=" 1 2 3")
    assert render.split_step(FakeTokenizer(), step) == [(" 1 2", True), (" 3", False)]
    alone = SimpleNamespace(token_ids_diff=[3], text_diff=" 3")
    assert render.split_step(FakeTokenizer(), alone) == [(" 3", False)]
    other = SimpleNamespace(token_ids_diff=[1, 2], text_diff="1 2")  # decodes differently alone
    assert render.split_step(FakeTokenizer(), other) == [("1 2", False)]
    held_back = SimpleNamespace(token_ids_diff=[1, 2], text_diff="")
    assert render.split_step(FakeTokenizer(), held_back) == []


def test_first_difference():
    assert render.first_difference([1, 2], [1, 2]) is None
    assert render.first_difference([1, 2], [1, 3]) == 1
    assert render.first_difference([1, 2], [1]) == 1


def test_progress_prints_a_message_once(capsys):
    with status.Progress() as progress:
        for percent in range(5):
            progress("fetching", percent, 4)
        progress("converting")
    assert capsys.readouterr().err == "fetching\nconverting\n"


def test_prompt_sets_are_distinct():
    texts = [text for texts in PROMPT_SETS.values() for text in texts]
    assert len(set(texts)) == len(texts) == 8


def start(*arguments, path=(), **options):
    """Python in a process of its own; `path` comes before the packages."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(trtspec.__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, root)))}
    given = {"env": environment, "timeout": 60, "text": True, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *arguments], **given)


@pytest.mark.parametrize(
    ("module", "heavy"), [("cli.app", ("torch", "numpy")), ("cli", ("typer", "rich"))]
)
def test_importing_the_cli_does_not_import_what_takes_long(module, heavy):
    code = f"import sys, trtspec.{module}; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert start("-c", code).returncode == 0


def test_ctrl_c_while_importing_exits_130_quietly(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = start("-m", "trtspec", "--version", path=[tmp_path])
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# -- options -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("serve m --max-num-seqs 4", "--max-num-seqs. Use --max-batch-size. (trtspec serve --help"),
        ("serve m --max_model_len=4", "--max_model_len. Use --max-seq-len. "),
        ("serve --model m", "--model. Use the argument model. "),
        ("doctor --model m", "--model. Use --target. "),
        ("bench --tp_size 2", "--tp_size. Use --tp. (trtspec bench --help lists the options)"),
        ("generate --json_file f", "--json_file. Use --json-file. "),
        ("serve m --speculative-algorithm x", "--speculative-algorithm. Use --speculative. "),
        ("serve m --speculative_num_steps 3", "--speculative_num_steps. Use --max-draft-len. "),
        ("generate --model-path m", "--model-path. Use --model. "),
        ("serve m --tool-call-parser x", "--tool-call-parser. Leave it out: the chat template "),
        ("serve m --extra_llm_api_options f", "--extra_llm_api_options. Leave it out: options "),
        ("serve m --seed 1", "--seed. Leave it out: a seed is a request's. "),
        ("generate --max-model-len 4", "--max-model-len (Possible options: "),
        ("generate --nothing-like-it", "--nothing-like-it (trtspec generate --help lists"),
    ],
)
def test_an_unknown_option_names_ours_and_the_help_of_its_command(capsys, arguments, expected):
    code = cli.main(arguments.split())
    assert code == 2 and f"No such option: {expected}" in error_line(capsys.readouterr().err)


def test_our_names_for_options_of_others_exist():
    commands = typer.main.get_command(app).commands.values()
    offered = {name for command in commands for param in command.params for name in param.opts}
    assert {word for words in OTHER_NAMES.values() for word in words} <= offered
    assert not set(NOT_OFFERED) & set(OTHER_NAMES) and set(NOT_OFFERED) & offered <= {
        "--seed",
        "--block-size",
    }


@pytest.mark.parametrize("name", ["suffix", "NEXTN", "draft-model", "pard", "eagle"])
def test_a_word_of_others_for_a_drafter_names_ours(name):
    ours = DRAFTERS[name.lower().replace("-", "_")]
    with pytest.raises(CliError, match=rf"'{name}' is unknown: .*\. Here it is {ours}\.$"):
        parse_mode(name)
    assert set(DRAFTERS.values()) <= set(SPECULATIVE_NAMES)


# -- where output goes -------------------------------------------------------------------------
@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_a_full_output_exits_1_with_a_sentence(argument):
    with open("/dev/full", "w") as full:
        done = start("-m", "trtspec", argument, stdout=full)
    assert done.returncode == 1
    assert error_line(done.stderr) == (
        "error: the output cannot be written: No space left on device. Make room, or write "
        "elsewhere."
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_file_without_room_is_no_bad_usage(run, fake, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a-file")

    monkeypatch.setattr(fake, "generate_stream", fail)
    code, _, err = run("generate", "--prompt", "a")
    assert code == 1 and "a-file cannot be written: No space left" in error_line(err)


def test_a_full_stderr_keeps_the_exit_code():
    with open("/dev/full", "w") as full:
        assert start("-m", "trtspec", "decode", stderr=full).returncode == 2


def test_a_closed_output_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["generate", "--model", "model", "--prompt", "a", "--json"]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"trtspec {trtspec.__version__}"


@pytest.mark.parametrize(("asked", "k"), [(None, 3), ("2", 2)])
def test_the_package_s_mtp_head_has_its_own_k(asked: str | None, k: int) -> None:
    options = EngineOptions(speculative="mtp_eagle", max_draft_len=asked, device="cpu")
    config = make_spec_config(options, lambda text: None)
    assert config is not None and config.max_draft_len == k


def test_a_draft_length_that_chooses_itself() -> None:
    for options in (
        EngineOptions(speculative="ngram", max_draft_len="auto"),
        EngineOptions(speculative="ngram", max_draft_len="6", draft_len_schedule="auto"),
    ):
        config = make_spec_config(options, lambda text: None)
        assert config is not None
        assert (config.max_draft_len, config.draft_len_schedule) == (6, "auto")


@pytest.mark.parametrize("text", ["", "many", "4.0", "--4", "4 5"])
def test_a_draft_length_that_is_none(text: str) -> None:
    options = EngineOptions(speculative="ngram", max_draft_len=text)
    with pytest.raises(CliError, match="give a number of drafts, or auto"):
        make_spec_config(options, lambda text: None)


def test_a_quantised_drafter(run, tmp_path):
    for speculative in ("eagle3", "dflash", "mtp", "draft_target"):
        options = EngineOptions(
            speculative=speculative,
            head=None if speculative == "draft_target" else "h",
            draft_model=str(tmp_path) if speculative == "draft_target" else None,
            draft_quant="fp8",
        )
        assert make_spec_config(options, lambda *_: None).quant == "fp8"
        assert options.with_plain().draft_quant is None
    with pytest.raises(ConfigError, match="quant='int4': use 'fp8' or None"):
        make_spec_config(EngineOptions(speculative="eagle3", head="h", draft_quant="int4"), print)
    code, _, err = run(
        "generate", "--prompt", "a", "--speculative", "ngram", "--draft-quant", "fp8"
    )
    assert code == 2 and "NGRAM drafts without a network" in " ".join(err.split())
