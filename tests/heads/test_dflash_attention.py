"""Sinks, scaled values and windows of DFlash heads: how they are read, refused, shown and cut.

What such heads draft is compared with the formula in `test_dflash.py`, `test_dflash2.py` and
`test_dspark.py`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU, UNPACKED
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from tiny import prefill_metadata, tiny_model_dir
from tiny_dflash import as_speculators, dflash_dir
from tiny_heads import HEADS, MASK_TOKEN
from torch import Tensor

from trtspec import LLM, DFlashDecodingConfig, cli
from trtspec.checkpoints.heads.load import load_head, read_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.comm import ALONE, Communicator
from trtspec.distributed.parallel import Parallel
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.drafters.base import HeadConfig
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.ops.step.slots import draft_step_metadata
from trtspec.train.create_head import create_head
from trtspec.train.earlier_head import begin_with, check_alike
from trtspec.train.new_head import NewHead

CPU, F32 = torch.device("cpu"), torch.float32
SINKS = "layers.1.self_attn.attention_sink_bias"
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(
        tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip


def config_of(head: Path) -> HeadConfig:
    with ExitStack() as stack:
        return read_head(head, None, stack).require()


def load(head: Path, target_dir: Path, comm: Communicator = ALONE, pack: bool = True) -> DFlashHead:
    target = load_decoder(target_dir, ON_CPU, Parallel(comm))
    options = replace(ON_CPU, pack=pack)
    model = load_head(head, target, HeadRequest(), options)
    assert isinstance(model, DFlashHead)
    return model


@pytest.mark.parametrize(
    ("nested", "inner", "windows", "sees_ahead"),
    [
        # MiMo-V2.5's heads: no layer_types. ModelOpt's: all full, `causal` is always written.
        ({}, {"sliding_window": 30}, [20, 20], [True, True]),
        ({"causal": True}, FULL, [20, 20], [False, False]),
        ({"causal": False}, FULL, [20, 20], [True, True]),
        # layer_types says which layers slide, dflash_config how far.
        ({}, {**MIXED, "sliding_window": 30}, [20, None], [False, True]),
        ({"causal": False}, MIXED, [20, None], [True, True]),
        ({"causal": False}, {**MIXED, "is_causal": True}, [20, None], [False, False]),
        ({"swa_window_size": None}, {"sliding_window": 30}, [30, 30], [True, True]),
        ({"use_swa": False}, {"sliding_window": 30}, [None, None], [True, True]),
        # Without use_swa it is a window as of layer_types, wider where rows see later ones.
        ({"use_swa": None}, {**MIXED, "sliding_window": 30}, [20, None], [False, True]),
        ({"use_swa": None, "causal": False}, MIXED, [29, None], [True, True]),
    ],
)
def test_use_swa(
    tmp_path: Path, nested: dict[str, Any], inner: dict[str, Any], windows: list[int | None],
    sees_ahead: list[bool],
) -> None:  # fmt: skip
    nested = {"use_swa": True, "swa_window_size": 20, **nested}
    config = config_of(dflash_dir(tmp_path, block=9, inner=inner, **nested))
    assert [config.decoder.window(i) for i in range(2)] == windows
    assert list(config.sees_ahead) == sees_ahead
    assert config.windows_by_row == bool(nested["use_swa"])


def _edited(
    head: Path, nested: dict[str, Any] | None = None, top: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
) -> Path:  # fmt: skip
    raw = json.loads((head / "config.json").read_text()) | (top or {})
    raw["dflash_config"] |= nested or {}
    (head / "config.json").write_text(json.dumps(raw))
    edited = load_file(head / "model.safetensors") | (tensors or {})
    kept = {name: tensor for name, tensor in edited.items() if tensor is not None}
    save_file(kept, head / "model.safetensors", metadata={"format": "pt"})
    return head


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"nested": {"attention_sink_bias": None}},
         r"does not say attention_sink_bias, but the head has 2 such tensors"),
        ({"nested": {"attention_sink_bias": False}}, "does not say attention_sink_bias"),
        ({"nested": {"attention_sink_bias": 1}}, "attention_sink_bias=1; it must be true or false"),
        ({"tensors": {SINKS: None}}, f"has no {SINKS}. Copy the head"),
        ({"tensors": {SINKS: torch.zeros(HEADS + 1)}},
         r"has shape \[7\], but config.json makes it \[6\]. Check num_attention_heads"),
        ({"tensors": {SINKS: torch.tensor([0.0] * 5 + [torch.nan])}}, "1 values that are NaN"),
        ({"tensors": {SINKS: torch.zeros(HEADS, dtype=torch.int32)}}, "has dtype I32"),
        ({"nested": {"attention_value_scale": 0}}, "attention_value_scale=0; it must be"),
        ({"nested": {"attention_value_scale": -1.5}}, "attention_value_scale=-1.5; it must be"),
        ({"nested": {"attention_value_scale": "0.6"}}, "attention_value_scale='0.6'; it must be"),
        ({"nested": {"attention_value_scale": float("inf")}}, "attention_value_scale=inf; it must"),
        ({"nested": {"attention_value_scale": float("nan")}}, "attention_value_scale=nan; it must"),
        ({"nested": {"use_swa": "yes"}}, "use_swa='yes'; it must be true or false"),
        ({"nested": {"use_swa": True}}, "swa_window_size=None: it must be an int from block_size"),
        ({"nested": {"use_swa": True, "swa_window_size": 8}}, "swa_window_size=8: it must be an"),
        ({"nested": {"use_swa": True, "swa_window_size": 0}}, "swa_window_size=0; it must be an"),
        ({"nested": {"swa_window_size": 2.5}}, "swa_window_size=2.5; .* or null"),
        ({"nested": {"swa_window_size": 20}}, "=20, but nothing says that layers slide. Write"),
        ({"nested": {"backbone_rotary_base": 5000000}}, "a RoPE base of the context's own"),
        ({"nested": {"is_neox_style": False}}, "RoPE that rotates neighbours"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    target_dir: Path, tmp_path: Path, edit: dict[str, Any], said: str
) -> None:
    head = _edited(dflash_dir(tmp_path, sinks=True), **edit)
    with pytest.raises(CheckpointError, match=said):
        LLM(target_dir, DFlashDecodingConfig(speculative_model=head), device="cpu", max_seq_len=48)


def test_a_file_with_the_masks_embedding_is_refused(tmp_path: Path) -> None:
    head = dflash_dir(tmp_path)
    (head / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt, which is not read. Put it"):
        config_of(head)


@pytest.mark.parametrize("name", ["attention_sink_bias", "add_swa_attention_sink_bias"])
def test_names_at_the_top(tmp_path: Path, name: str) -> None:
    nested = {"attention_sink_bias": None, "attention_value_scale": None}
    top = {name: True, "attention_value_scale": 0.5}
    config = config_of(_edited(dflash_dir(tmp_path, sinks=True), nested=nested, top=top))
    assert config.decoder.attention_sinks and config.value_scale == 0.5


def test_the_speculators_format_has_sinks_too(tmp_path: Path) -> None:
    head = as_speculators(dflash_dir(tmp_path, sinks=True))
    with pytest.raises(CheckpointError, match="does not say attention_sink_bias"):
        config_of(head)
    raw = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(raw | {"attention_sink_bias": True}))
    assert config_of(head).decoder.attention_sinks


def test_inspect_head_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = {"attention_value_scale": 0.612, "use_swa": True, "swa_window_size": 20}
    for head, shown in (
        (dflash_dir(tmp_path), False),
        (dflash_dir(tmp_path, sinks=True, **nested), True),
    ):
        assert cli.main(["inspect-head", str(head), "--json"]) == 0
        text = capsys.readouterr().out
        for fact in ("attention sinks", "values times 0.612", "windows are counted from each row"):
            assert (fact in text) == shown
        assert ("window 20" in text) == shown


def _block(head: DFlashHead) -> Tensor:
    """A block behind a context, in one pass."""
    generator, rows, block = torch.Generator().manual_seed(3), 12, 5
    meta, positions = prefill_metadata(head.config.decoder, [rows], 8)
    hidden = torch.randn(rows, head.config.target_hidden_size * 3, generator=generator)
    with torch.no_grad():
        head.read_context(hidden, positions, meta)
        step = draft_step_metadata(meta, 7 + torch.arange(block)[None], block)
        ids = torch.tensor([4] + [MASK_TOKEN] * (block - 1))
        return head(ids, step.position_ids, hidden, step, step=0)[0]


@pytest.mark.parametrize("changed", [SINKS, "attention_value_scale", None])
def test_ranks_cut_sinks_and_values_with_their_heads(
    target_dir: Path, tmp_path: Path, changed: str | None
) -> None:
    nested = {"attention_value_scale": 0.612, "use_swa": True, "swa_window_size": 9}
    head = dflash_dir(tmp_path, sinks=True, bias=True, **nested)
    expected = _block(load(head, target_dir))
    if changed == SINKS:  # all that is compared depends on them
        _edited(head, tensors={SINKS: load_file(head / "model.safetensors")[SINKS].flip(0)})
    if changed == "attention_value_scale":
        _edited(head, nested={"attention_value_scale": 0.5})
    found = ThreadRanks(2).run(lambda comm: _block(load(head, target_dir, comm)))
    for out in found:
        if changed is None:
            torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        else:
            assert (out - expected).abs().max() > 1e-2


def test_a_new_head_does_not_begin_with_one_that_has_sinks(
    target_dir: Path, tmp_path: Path
) -> None:
    target = load_decoder(target_dir, UNPACKED)
    spec = NewHead(
        kind="dflash",
        num_layers=2,
        block_size=9,
        mask_token_id=MASK_TOKEN,
        layers_to_capture=(1, 3, 4),
    )
    path = dflash_dir(tmp_path, attention_value_scale=0.5)
    scaled = load(path, target_dir, pack=False)
    spec = replace(spec, like=scaled.config.decoder)
    new = create_head(spec, target, None, F32, seed=1)
    with ExitStack() as stack:  # known before it is loaded
        earlier = read_head(path, target.config, stack).require()
        check_alike(replace(earlier, trained_acceptance=0.5), new.config)
    begin_with(new, scaled)  # its weights have the scale, as those of the new head will
    values = scaled.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(new.layers[0].self_attn.qkv_proj.weight, values)
    for options, said in (
        ({"sinks": True}, "attention_sink_bias: sinks there, none here"),
        ({"use_swa": True, "swa_window_size": 20}, "windows_by_row: True there, False here"),
    ):
        earlier = load(dflash_dir(tmp_path, **options), target_dir, pack=False)
        with pytest.raises(ConfigError, match=said):
            begin_with(new, earlier)


@pytest.mark.parametrize("name", ["is_causal", "causal", "causal_head"])
@pytest.mark.parametrize("place", ["top", "dflash_config"])
def test_what_a_block_sees_is_said_in_either_place(tmp_path: Path, name: str, place: str) -> None:
    given = {name: True}
    head = dflash_dir(tmp_path, **({"inner": given} if place == "top" else given))
    assert list(config_of(head).sees_ahead) == [False, False]


@pytest.mark.parametrize(
    ("inner", "nested", "said"),
    [
        ({"block_size": 9}, {"block_size": 5}, "block_size=9, and 5 in dflash_config"),
        ({}, {"causal": True, "causal_head": False}, "causal=True and causal_head=False contra"),
        ({}, {"sample_from_anchor": True, "shift_label": False}, "shift_label=False contradict"),
        ({}, {"aux_hidden_state_layer_ids": [1, 2, 3]}, "are not the same states"),
        ({}, {"target_layer_ids": [3, 3, 4]}, "one is there twice"),
        ({"num_target_layers": "8"}, {}, "num_target_layers='8'; it must be an int"),
        ({}, {"draft_window": 5}, "draft_window=5 stands in dflash_config, where it is not read"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "sliding_window"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, inner: dict[str, Any], nested: dict[str, Any], said: str
) -> None:
    """A config with two answers drafts badly by one of them, and nothing would say so."""
    with pytest.raises(CheckpointError, match=said):
        config_of(dflash_dir(tmp_path, inner=inner, **nested))


def test_fields_where_nothing_reads_them_are_refused(tmp_path: Path) -> None:
    head = as_speculators(dflash_dir(tmp_path))
    path = head / "config.json"
    raw = json.loads(path.read_text())
    raw["transformer_layer_config"]["use_swa"] = True
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="use_swa=True stands in transformer_layer_config"):
        config_of(head)
