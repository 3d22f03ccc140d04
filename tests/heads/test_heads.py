"""Draft heads: every broken or hostile directory is refused by name, every valid form loads."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import edit_tensors, set_config
from loading import HEAD_ON_CPU, ON_CPU
from safetensors.torch import load_file, save_file
from speculators_reference import build_eagle3, save_eagle3
from tiny import tiny_model_dir
from tiny_heads import SIZE, VOCAB, _layer_shapes, _weights, eagle1_dir, eagle3_dir, mtp_model_dir
from torch import Tensor

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.heads.load import load_head, read_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, TrtspecError
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.base import DraftHead, HeadConfig
from trtspec.train.records import Sequences
from trtspec.train.unroll import unroll

CPU, BIN, SAFE = torch.device("cpu"), "pytorch_model.bin", "model.safetensors"
IDS, INNER = "eagle_aux_hidden_state_layer_ids", "transformer_layer_config"
Tensors = dict[str, Tensor]


def _target(path: Path) -> Decoder:
    return load_decoder(path, ON_CPU)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    rope, path = {"rope_type": "default", "rope_theta": 5e5}, tmp_path_factory.mktemp("target")
    return _target(tiny_model_dir(path, num_hidden_layers=8, rope_parameters=rope))


def _load(path: Path, target: Decoder, kind: str = "eagle", **options: Any) -> DraftHead:
    request = HeadRequest(kind=kind, **{"num_mtp_layers": 1, **options})
    return load_head(path, target, request, HEAD_ON_CPU)


def _refused(path: Path, target: Decoder, message: str, **options: Any) -> str:
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        _load(path, target, **options)
    assert path.name in str(caught.value)
    return str(caught.value)


def _head(
    change: Callable[[Tensors], object] = len, make: Callable[..., Path] = eagle3_dir, **config: Any
) -> Callable[[Path], Path]:
    """A builder of a head with these changes to its tensors and config.json."""

    def build(tmp_path: Path) -> Path:
        path = make(tmp_path)
        edit_tensors(path, change)
        set_config(path, **config)
        return path

    return build


def _file(name: str, content: Any) -> Callable[[Path], Path]:
    """A builder of a head whose file is gone, cut, replaced, or pickled from its tensors."""

    def build(tmp_path: Path) -> Path:
        path = eagle3_dir(tmp_path, pickle=name == BIN)
        file, data = path / name, (path / name).read_bytes()
        if callable(content):
            torch.save(content(torch.load(file)), file)
        elif content is None:
            file.unlink()
        else:
            file.write_bytes(data[:content] if isinstance(content, int) else content)
        return path

    return build


def _speculators(path: Path, **fields: Any) -> Path:
    """The config.json of a raw head rewritten in the speculators format, by hand."""
    raw = json.loads((path / "config.json").read_text())
    raw = {"speculators_model_type": "eagle3", INNER: raw, "draft_vocab_size": 40} | fields
    (path / "config.json").write_text(json.dumps(raw))
    return path


# -- valid forms -------------------------------------------------------------------------------
VALID: list[dict[str, Any]] = [
    {}, {"pickle": True}, {"prefix": "layers.0."}, {"prefix": "model.midlayer."},
    {"prefix": "model.layers.0."}, {"draft_vocab": None}, {"draft_vocab": VOCAB},
    {"own_embedding": True}, {"own_embedding": True, "size": 24}, {"norm_before_fc": True},
    {"fc_norm": True}, {"attention_bias": True}, {"norm_before_residual": True},
    {"norm_output": True}, {"captured": 1, IDS: [4]}, {"captured": 4, IDS: [1, 2, 3, 8]},
    {"model_type": "qwen2"}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"num_aux_hidden_states": 3}, {"eagle_config": {"use_aux_hidden_state": True}},
]  # fmt: skip


@pytest.mark.parametrize("options", VALID, ids=str)
def test_valid_raw_heads(tmp_path: Path, target: Decoder, options: dict[str, Any]) -> None:
    head = _load(eagle3_dir(tmp_path, **options), target)
    assert not any(p.is_meta or p.requires_grad for p in head.parameters())
    assert head.shares_lm_head == (options.get("draft_vocab", 0) is None)
    assert (head.d2t is None) == (options.get("draft_vocab", 40) in (None, VOCAB))
    assert (head.embed_tokens is target.embed_tokens) == ("own_embedding" not in options)
    for flag in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"):
        assert getattr(head.config, flag) == options.get(flag, False)


def test_other_valid_heads(tmp_path: Path, target: Decoder) -> None:
    assert _load(eagle1_dir(tmp_path), target).config.kind == "eagle"
    assert _load(eagle1_dir(tmp_path, fc_bias=True), target).layers_to_capture == ()
    assert "speculators" in _load(_speculators(eagle3_dir(tmp_path)), target).config.format
    legacy = eagle3_dir(tmp_path, pickle=True)
    torch.save(torch.load(legacy / BIN), legacy / BIN, _use_new_zipfile_serialization=False)
    assert _load(legacy, target).config.kind == "eagle3"
    for layout in ("deepseek", "mimo"):
        path = mtp_model_dir(tmp_path, layout=layout, num_mtp_layers=2)
        assert _load(path, _target(path), "mtp", num_mtp_layers=2).num_layers == 2


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_own_end_equal_to_the_target_s_is_shared(tmp_path: Path, name: str) -> None:
    # On CPU a target's lm_head is packed: it can be compared where it is the embedding.
    tied = name == "lm_head"
    path = tiny_model_dir(tmp_path, num_hidden_layers=8, tie_word_embeddings=tied)
    weights, target = load_file(path / SAFE), _target(path)
    head = eagle3_dir(tmp_path, own_embedding=True, draft_vocab=VOCAB)
    assert getattr(_load(head, target), name) is not getattr(target, name)
    own = weights["model.embed_tokens.weight"]
    edit_tensors(head, lambda tensors: tensors.update({f"{name}.weight": own}))
    assert getattr(_load(head, target), name) is getattr(target, name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_whose_own_embedding_is_its_lm_head(
    tmp_path: Path, target: Decoder, tied: bool
) -> None:
    path = eagle3_dir(tmp_path, own_embedding=True, draft_vocab=None, tie_word_embeddings=tied)
    head, tensors = _load(path, target), load_file(path / SAFE)
    assert head.shares_lm_head is not tied
    hidden = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0))
    normed = torch.nn.functional.rms_norm(hidden.double(), (SIZE,), eps=1e-5)
    own = normed * tensors["norm.weight"] @ tensors["embed_tokens.weight"].T.double()
    assert torch.allclose(head.compute_logits(hidden, 0).double(), own, atol=1e-4) is tied


def test_rope_is_never_the_target_s(tmp_path: Path, target: Decoder) -> None:
    head = _load(eagle3_dir(tmp_path), target)
    assert head.config.decoder.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (
        head.config.decoder.max_position_embeddings == 64 and head.rope_tables.num_positions == 256
    )
    for fields in ({"rope_theta": 77.0}, {"rope_parameters": {"rope_theta": 77.0}}):
        head = _load(eagle3_dir(tmp_path, config=fields), target)
        assert head.config.decoder.rope_parameters["rope_theta"] == 77.0


@pytest.mark.parametrize(
    ("nested", "top", "asked", "expected"),
    [(None, None, None, (1, 3, 4)), ([0, 2, 7], None, None, (0, 2, 7)),
     (None, [1, 3, 8], None, (0, 2, 7)), ([0, 2, 7], [2, 3, 4], None, (0, 2, 7)),
     ([0, 2, 7], None, [5, 6, 7], (5, 6, 7)), (None, [1, 3, 8], [5, 6, 7], (5, 6, 7))],
)  # fmt: skip
def test_captured_layers(
    tmp_path: Path, target: Decoder, nested: Any, top: Any, asked: Any, expected: tuple[int, ...]
) -> None:
    path = eagle3_dir(tmp_path, config={"eagle_config": {IDS: nested}, IDS: top})
    assert _load(path, target, layers_to_capture=asked).layers_to_capture == expected


@pytest.mark.parametrize("flag", ["norm_output", "norm_before_fc", "fc_norm"])
def test_heads_of_the_speculators_package(tmp_path: Path, target: Decoder, flag: str) -> None:
    head = _load(save_eagle3(build_eagle3(**{flag: True}), tmp_path / "head"), target)
    assert head.layers_to_capture == (0, 1, 2) and head.config.suggested_draft_len == 3
    assert getattr(head.config, flag) and head.d2t is not None


def test_the_speculators_format_s_own_default(
    tmp_path: Path, target: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    for given, value in (({}, True), ({"norm_before_residual": False}, False)):
        head = _load(_speculators(eagle3_dir(tmp_path), **given), target)
        assert head.config.norm_before_residual is value
    assert caplog.text.count("norm_before_residual is not given") == 1


# -- files -------------------------------------------------------------------------------------
class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain", "nested"])
def test_a_pickle_runs_nothing(tmp_path: Path, target: Decoder, form: str) -> None:
    path, marker = eagle3_dir(tmp_path, pickle=True), tmp_path / "ran"
    content: Any = {**torch.load(path / BIN), "x": Payload(marker)}
    content = {"state_dict": content} if form == "nested" else content
    torch.save(content, path / BIN, _use_new_zipfile_serialization=form != "legacy")
    if form == "plain":
        (path / BIN).write_bytes(pickle.dumps(content))
    text = _refused(path, target, r"pytorch_model.bin .*could run code.*Use a safetensors file")
    (path / SAFE).write_bytes((eagle3_dir(tmp_path) / SAFE).read_bytes())
    _load(path, target)  # safetensors wins
    assert not marker.exists()
    assert "will likely succeed" not in text, "torch's advice to unpickle unsafely"


# -- broken heads ------------------------------------------------------------------------------
Case = tuple[Callable[[Path], Path], str]
HEADER = b'{"fc.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,9999]}}'
PICKLES: list[Callable[[Tensors], Any]] = [
    lambda t: {"state_dict": t}, lambda t: list(t.values()), lambda t: t["fc.weight"],
    lambda t: {}, lambda t: t | {"a": "b"}, lambda t: {1: t["d2t"]},
    *(lambda t, change=change: t | {"fc.weight": change(t["fc.weight"])} for change in (
        Tensor.to_sparse, Tensor.to_sparse_csr, lambda w: w.to("meta"),
        lambda w: torch.nested.nested_tensor([w]), lambda w: w.to(torch.complex64))),
    lambda t: t | {"d2t": t["d2t"].to("meta")},
]  # fmt: skip
FILES: list[Case] = [
    *((_file(name, keep), rf"{name} (cannot be read|is not a complete).*[Cc]opy it again")
      for name in (BIN, SAFE) for keep in (0, 7, 500, -100, -1, b"\x93junk" * 200)),
    *((_file(BIN, content), "pytorch_model.bin|no fc.weight") for content in PICKLES),
    (_file(SAFE, len(HEADER).to_bytes(8, "little") + HEADER), "not a complete.*Copy it again"),
    (_file(SAFE, None), "no weights in .*model.safetensors, pytorch_model.bin.*Copy"),
    (_file("config.json", None), "no config.json in .*Point to the head's directory"),
    *((_file("config.json", text), "config.json (cannot be read as JSON|holds a .*, not an object)")
      for text in (b"", b"{", b"[1]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000)),
    (_file("config.json", b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}"), "config.json"),
]  # fmt: skip


def _fields(name: str, values: Any, message: str) -> list[tuple[dict[str, Any], str]]:
    return [({name: value}, message.replace("GOT", f"{name}=")) for value in values]


INTS, YARN = ("a", True, 0, -1, 1.5, 10**30), {"rope_type": "yarn", "factor": 2.0}
FIELDS: list[tuple[dict[str, Any], str]] = [
    *(pair for name in ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states")
      for pair in _fields(name, INTS, r"GOT.*must be an int in 1 … \d+ or null\. Correct")),
    *(pair for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
      for pair in _fields(name, ("true", 1), "GOT.* must be true or false. Correct")),
    *_fields(IDS, ("123", 3, [], [None], ["1"], [1.0], [True]), "GOT.*list of layer numbers. Corr"),
    *_fields("eagle_config", [{IDS: v} for v in ("1", 3, [], {"a": 1})], f"g.{IDS}=.*of layer"),
    ({IDS: [0, 3, 4]}, r"\[-1, 2, 3\] .*\(inputs\).* no layer .*7.*give eagle3_layers_to_capture"),
    ({"eagle_config": {IDS: [1, 2, 8]}}, r"layers to capture .*outputs\).* 8 is no layer .*0 … 7"),
    ({IDS: [2, 3]}, r"fc.weight .* reads 3 captured layers .* 2 are to be captured: \[1, 2\]"),
    ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states=4, but 3 layers.*Give 4"),
    ({"draft_vocab_size": 41}, r"d2t has shape \[40\] .*must be \[41\].*Correct draft_vocab_size"),
    ({"draft_vocab_size": None}, r"d2t has shape \[40\] .*must be \[97\]"),
    ({"vocab_size": 98, "target_hidden_size": 40}, "width 40, the .*48.*is 98, .* 97. Use"),
    ({"hidden_size": 24}, "no embed_tokens of its own and is 24 wide.*48 wide. Use"),
    ({"num_hidden_layers": 2}, "num_hidden_layers=2, the tensors are of 1 layers. Correct it"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),  # refused before a million are built
    ({"norm_before_fc": True}, r"1 of \d+ tensors are missing: input_norm.weight. Check the flags"),
    ({"fc_norm": True}, r"3 of \d+ tensors are missing: fc_norm.0.weight.*Check the flags"),
    ({"norm_before_fc": True, "fc_norm": True}, r"both true.*one or the other.*Set .* to false"),
    ({"attention_bias": True}, "attention_bias=True, .*has no q_proj.bias. Set it to false"),
    ({"speculators_model_type": "mlp"}, "type='mlp'; allowed are 'eagle3', 'peagle', 'dflash'"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config=None;.*an object. Copy"),
    ({"speculators_model_type": "eagle3", INNER: []}, r"layer_config=\[\];.*an object. Copy"),
    ({"quantization_config": {"quant_method": "awq"}}, "'awq', 'bits': None.* is set, but .*Use"),
    ({"eagle_config": [1]}, r"eagle_config=\[1\]; it must be an object. Correct"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "state=False; allowed is True.*use an"),
    *_fields("mask_token_id", [3], "GOT.*in parallel.* no tensor mask_hidden. Copy"),
    *_fields("eagle_config", [{"mask_token_id": 3}, {"parallel_draft_step": 4}], "in parallel"),
    ({"eagle_config": {"mask_token_id": None}, "mask_token_id": 3}, "mask_token_id=3 .*in parall"),
    *(({"speculators_config": {"proposal_methods": [{"speculative_tokens": value}]}},
       "speculative_tokens=") for value in ("x", True, -1, 10**9)),
    *_fields("rope_parameters", (True, -1, "x", [], {"rope_type": 3}), "RoPE|rope"),
    *_fields("rope_scaling", [YARN | {"attention_factor": v} for v in (math.nan, -1.0)], "factor"),
    *_fields("rms_norm_eps", ("x", -1.0, math.nan, math.inf), "rms_norm_eps"),
    *_fields("head_dim", (-8, 2**62, 10**400), "GOT"), *_fields("hidden_act", ["gelu"], "silu"),
]  # fmt: skip


def _d2t(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda t: t.update(d2t=change(t["d2t"]))


def _put(name: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: value})


Q, K1 = "midlayer.self_attn.q_proj.", torch.tensor(1)
TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (_d2t(lambda d: d.index_fill(0, K1, -4)), r"1 to 1 \+ -4 = -3, outside .*0 … 96.*Use"),
    (_d2t(lambda d: d.index_fill(0, K1, 96)), r"1 \+ 96 = 97, outside .*Use"),
    (_d2t(lambda d: d.index_fill(0, K1, 2**63 - 1)), "outside the target's"),
    (_d2t(lambda d: d + torch.arange(40)), "ids in place of offsets: subtract arange"),
    (_d2t(lambda d: -torch.arange(40)), "maps 40 draft tokens to 1 target tokens.*offsets.*Copy"),
    (_d2t(lambda d: d[:39].clone()), r"shape \[39\] .*must be \[40\] .*copy the head again"),
    (_d2t(lambda d: d.float()), "dtype F32; it must be .*I64"),
    (_d2t(lambda d: d.to(torch.int8)), "dtype I8; it must be .*I64"),
    (_d2t(torch.zeros_like), "t2d marks 40 of 97 .*not those that d2t maps to.*Copy"),
    (lambda t: t["t2d"].logical_not_(), "t2d marks 57 of 97"),
    (_put("t2d", torch.ones(96)), "t2d marks tokens of a vocabulary of 96, and vocab_size is 97"),
    (lambda t: t.pop("d2t"), "among 40 of 97 tokens, but has no d2t .*Copy"),
    (lambda t: t.pop("lm_head.weight"), "draft_vocab_size=40 is not .*no lm_head.weight.*null"),
    (_put("extra", torch.ones(1)), "1 tensors have no place in EAGLE-3, raw: extra"),
    (_put("input_norm.weight", torch.ones(144)), "no place.*lacks a flag"),
    (_put("fc_norm.0.weight", torch.ones(48)), "no place.*fc_norm.0"),
    (_put("mask_hidden", torch.ones(1, 144)), "in parallel.* none of mask_token_id"),
    (lambda t: t.update({k.replace("midlayer", "layers.0"): w.clone() for k, w in t.items()}),
     "holds both .*two heads are mixed. Copy one"),
    (_put(f"{Q}bias", torch.ones(48)), "attention_bias=False, but .*holds q_proj.bias. Set it to"),
    (_put("fc.weight", torch.ones(48, 96)), r"reads 2 captured layers .* 3 are to be captured"),
    (_put("fc.weight", torch.tensor(1.0)), r"fc.weight .* has shape \[\]"),
    (_put("fc.weight", torch.ones(40, 144)), r"\[40, 144\].*Check hidden_size"),
    (_put("norm.weight", torch.ones(48, dtype=torch.int32)), "dtype I32; allowed"),
    (_put(f"{Q}weight", torch.ones(48, 96, dtype=torch.int8)), "dtype I8; .*unquantised"),
    *((lambda t, n=name, v=value: t[n].view(-1)[-1:].fill_(v), f"{name} .* 1 values that are NaN")
      for name in ("fc.weight", "norm.weight", "lm_head.weight", f"{Q}weight",
                   "midlayer.hidden_norm.weight", "midlayer.mlp.down_proj.weight")
      for value in (math.nan, math.inf, -math.inf)),
]  # fmt: skip


def _narrow_eagle1(tmp_path: Path) -> Path:
    """24 wide, for states 48 wide: fc [24, 2 * 24] cannot read cat(embedding, state)."""
    shapes = _layer_shapes("layers.0.", 24, 24, bias=False) | {"fc.weight": (24, 48)}
    shapes |= {"embed_tokens.weight": (VOCAB, 24), "lm_head.weight": (VOCAB, 24)}
    path = eagle1_dir(tmp_path)
    save_file(_weights(shapes, 3), path / SAFE)
    set_config(path, hidden_size=24, target_hidden_size=SIZE, head_dim=8)
    return path


def _d2t_without_lm_head(tmp_path: Path) -> Path:
    """The target's lm_head gives the target's ids: nothing is left to map."""
    path = eagle3_dir(tmp_path, draft_vocab=None)
    edit_tensors(path, _put("d2t", torch.tensor([1, -1] + [0] * (VOCAB - 2))))
    return path


OTHERS: list[Case] = [
    (lambda tmp: tmp / "gone", "gone is neither a directory nor a known head.*Give"),
    (_narrow_eagle1, "hidden_size|24 wide"), (_d2t_without_lm_head, "d2t"),
    (lambda tmp: _speculators(eagle3_dir(tmp), quantization_config={"quant_method": "int8"}),
     r"quantization_config \('int8'\) is set"),
    (tiny_model_dir, "no fc.weight, which every EAGLE.*Copy"),
    (mtp_model_dir, "holds MTP layers, not an EAGLE head.*MTPDecodingConfig.*mtp_eagle"),
]  # fmt: skip
CASES = [
    *FILES, *((_head(**fields), message) for fields, message in FIELDS),
    *((_head(change), message) for change, message in TENSORS), *OTHERS,
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_broken_heads(
    tmp_path: Path, target: Decoder, build: Callable[[Path], Path], message: str
) -> None:
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{message}: not refused within 5 s"))
    signal.alarm(5)
    try:
        _refused(build(tmp_path), target, message)
    finally:
        signal.alarm(0)


# -- heads that do not fit ---------------------------------------------------------------------
def test_heads_that_do_not_fit_what_is_asked(tmp_path: Path, target: Decoder) -> None:
    eagle1, eagle3, mtp = eagle1_dir(tmp_path), eagle3_dir(tmp_path), mtp_model_dir(tmp_path)
    plain, small = tiny_model_dir(tmp_path), _target(tiny_model_dir(tmp_path, vocab_size=98))
    wide = _target(tiny_model_dir(tmp_path, hidden_size=96, num_hidden_layers=8))
    for layers in ([], [1, 2, 8], [-1, 2, 3], [1, 2], ["1"], [True]):
        _refused(eagle3, target, "layers", layers_to_capture=layers)
    _refused(eagle1, target, "EAGLE-1 .*does not apply. Leave", layers_to_capture=[1, 2, 3])
    _refused(
        eagle3, small, "needs a target of 6 layers; it has 3. Give eagle3_layers.*eagle_config"
    )
    _refused(plain, target, "no MTP layers .*eh_proj.*Use a checkpoint with", kind="mtp")
    _refused(
        eagle3, target, "is an EAGLE head.*EagleDecodingConfig.*--speculative eagle3", kind="mtp"
    )
    message = "4 MTP layers are needed.* has 3. Lower num_nextn_predict_layers to 3.*vanilla"
    _refused(mtp, _target(mtp), message, kind="mtp", num_mtp_layers=4)
    _refused(mtp, small, "vocab_size=97, the target has 98. Use", kind="mtp")
    _refused(mtp, wide, "hidden_size=48, the target has 96. Use", kind="mtp")
    for path in (eagle1, eagle3):
        _refused(path, wide, "width 48, the target's are 96 wide. Use a head trained")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "deepseek", "mimo"])
def test_each_tensor_is_needed(tmp_path: Path, target: Decoder, kind: str) -> None:
    first = {"deepseek": "model.layers.3.", "mimo": "model.mtp_layers.0."}.get(kind, "")
    if kind == "eagle3":
        path = eagle3_dir(tmp_path, size=24, own_embedding=True, norm_before_fc=True)
    elif kind == "eagle1":
        path = eagle1_dir(tmp_path, fc_bias=True)
    else:
        path = mtp_model_dir(tmp_path, layout=kind, num_mtp_layers=2)
    served = _target(path) if first else target
    whole, loaded = load_file(path / SAFE), set()
    for name in [name for name in whole if name.startswith(first)]:
        save_file({n: w for n, w in whole.items() if n != name}, path / SAFE)
        try:
            _load(path, served, "mtp" if first else "eagle")
            loaded.add(name)
        except CheckpointError:
            pass
    assert loaded == {"eagle3": {"t2d"}, "eagle1": {"fc.bias", "embed_tokens.weight"}}.get(
        kind, set()
    )


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_eagle_and_mtp_tensors_mixed(tmp_path: Path, target: Decoder, kind: str) -> None:
    mtp = load_file(mtp_model_dir(tmp_path) / SAFE)
    mixed = _head(lambda t: t.update({n: w for n, w in mtp.items() if "layers.3." in n}))(tmp_path)
    _refused(mixed, target, "no place" if kind == "eagle" else "mixed. Copy", kind=kind)


@pytest.mark.parametrize("name", ["3.foo", "3.norm.weight"], ids=["surplus", "twice"])
def test_surplus_mtp_tensors(tmp_path: Path, name: str) -> None:
    path = mtp_model_dir(tmp_path)
    served = _target(path)
    edit_tensors(path, _put(f"model.layers.{name}", torch.ones(48)))
    _refused(path, served, "model.layers", kind="mtp")


def test_a_layer_number_without_end_is_no_mtp_layer(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path)
    edit_tensors(path, _put("model.layers." + "9" * 5000 + ".eh_proj.weight", torch.ones(48)))
    with pytest.raises(CheckpointError, match="1 tensors its config"):
        _target(path)


class _Sum(DraftHead):
    """A head without layers."""

    advances_positions = False

    def forward(self, input_ids: Tensor, _: Tensor, hidden_states: Tensor, *others: Any) -> Any:
        out = self.embed(input_ids) + hidden_states
        return out, out


def test_a_head_without_layers_is_unrolled_and_keeps_no_kv(target: Decoder) -> None:
    decoder = replace(target.config, num_layers=0)
    head = _Sum(HeadConfig("sum", "sum", decoder, SIZE, VOCAB), 64, kv_group=1)
    head.share(target)
    assert head.kv_group_specs(torch.float32) == []
    ids, hidden = torch.arange(8)[None], torch.ones(8, SIZE)
    texts = Sequences(ids, ids >= 0, torch.zeros_like(ids), ids)
    steps = list(unroll(head, texts, hidden, num_steps=2))
    assert [step.hidden.shape for step in steps] == [(8, SIZE)] * 2
    expected = target.embed_tokens.weight[1:3].sum(0) + 1  # row 0 reads tokens 1, then 2
    torch.testing.assert_close(steps[1].hidden[0], expected)


def test_a_head_without_its_target_is_checked(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert not read_head(eagle3_dir(tmp_path), None, stack).problems
        scalar = _head(_put("fc.weight", torch.tensor(1.0)))(tmp_path)
        assert "fc.weight" in str(read_head(scalar, None, stack).problems)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}])
def test_a_target_with_a_bad_count_of_mtp_layers(tmp_path: Path, value: Any) -> None:
    path = mtp_model_dir(tmp_path)
    set_config(path, num_nextn_predict_layers=value)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        _target(path)


# -- fuzzing -----------------------------------------------------------------------------------
VALUES = [None, True, -1, 0, 1, 10**400, math.inf, math.nan, 2.5, "x", "", [], {}, [1], {"a": None}]
NESTED = {
    "eagle_config": [IDS, "use_aux_hidden_state", "mask_token_id", "parallel_draft_step"],
    "rope_parameters": ["rope_type", "rope_theta", "factor", "partial_rotary_factor"],
    "rope_scaling": ["type", "rope_type", "factor", "original_max_position_embeddings"],
    "speculators_config": ["proposal_methods"],
}
EXTRA = [*NESTED, IDS, INNER, "speculators_model_type", "norm_output", "num_aux_hidden_states",
         "hidden_act", "layer_types", "dtype", "sliding_window", "use_sliding_window", "mlp_bias",
         "eos_token_id", "quantization_config", "tie_word_embeddings", "rope_theta", "id2label",
         "num_nextn_predict_layers"]  # fmt: skip


def _crash(path: Path, target: Decoder, kind: str, what: object) -> list[str]:
    try:
        _load(path, target, kind)
    except TrtspecError:
        pass
    except BaseException as error:  # noqa: BLE001  (a panic of Rust's is one)
        return [f"{str(what)[:60]}: {type(error).__name__}: {str(error)[:60]}"]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["raw", "qwen2", "speculators", "eagle1", "mtp"])
def test_random_fields_never_crash(tmp_path: Path, target: Decoder, form: str) -> None:
    path = {"eagle1": eagle1_dir, "mtp": mtp_model_dir}.get(form, eagle3_dir)(tmp_path)
    path = _speculators(path) if form == "speculators" else path
    raw = json.loads((path / "config.json").read_text())
    inner = raw.get(INNER, raw)
    inner |= {"model_type": "qwen2", "attention_bias": None} if form == "qwen2" else {}
    rng, crashes, kind = random.Random(form), [], "mtp" if form == "mtp" else "eagle"
    for _ in range(150):
        mutated, name, value = copy.deepcopy(raw), rng.choice([*inner, *EXTRA]), rng.choice(VALUES)
        if name in NESTED and rng.random() < 0.7:
            value = {key: rng.choice([*VALUES, "yarn", "linear"]) for key in NESTED[name]}
        at_top = name in raw or rng.random() < 0.5
        (mutated if at_top else mutated.get(INNER, mutated))[name] = value
        (path / "config.json").write_text(json.dumps(mutated))
        crashes += _crash(path, target, kind, {name: value})
    assert not crashes


@pytest.mark.parametrize("name", [BIN, SAFE])
def test_random_bytes_never_crash(tmp_path: Path, target: Decoder, name: str) -> None:
    path, rng, crashes = eagle3_dir(tmp_path, pickle=name == BIN), random.Random(name), []
    data = (path / name).read_bytes()
    for _ in range(80):
        broken = bytearray(data[: rng.randrange(1, len(data))] if rng.random() < 0.2 else data)
        for _ in range(rng.randint(1, 3)):
            reach = rng.choice([16, 1500, len(broken)])  # the header more often than the numbers
            broken[rng.randrange(min(reach, len(broken)))] = rng.randrange(256)
        (path / name).write_bytes(broken)
        crashes += _crash(path, target, "eagle", "bytes")
    assert not crashes


def test_the_arguments_of_old_load_a_head_with_a_warning(target: Decoder, tmp_path: Path) -> None:
    path = eagle3_dir(tmp_path)
    old: Any = load_head
    with pytest.warns(DeprecationWarning, match="HeadRequest, LoadOptions"):
        head = old(path, target, torch.float32, CPU, TorchAttention(), kv_group=1, kind="eagle")
    same = _load(path, target)
    assert head.config == same.config and head.kv_group == same.kv_group == 1
    with pytest.warns(DeprecationWarning, match="HeadRequest, LoadOptions"):
        how = {"dtype": torch.float32, "device": CPU, "backend": TorchAttention()}
        assert old(path, target, **how, kv_group=1, kind="eagle").config == same.config
    with ExitStack() as stack, pytest.warns(DeprecationWarning, match="HeadRequest"):
        assert "not MTP layers" in str(read_head(path, None, stack, kind="mtp").problems)
