"""`trtspec inspect-head`: what a draft head is, and what keeps it from drafting for a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .engine import resolve_model
from .errors import EXIT_FAILED
from .options import JsonOptions
from .output import check_writable, write_json
from .render import make_console
from .status import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoints.heads.load import HeadReport
    from ..models.config import DecoderConfig
    from ..models.drafters.base import HeadConfig

_WHOLE_MODEL = (
    "{0} is a whole model, not a head. Let it draft with DRAFT_TARGET "
    "(DraftTargetDecodingConfig, --speculative draft_target); trtspec doctor --target MODEL_DIR "
    "--head {0} examines it."
)


def run_inspect_head(directory: Path, target: str | None, output: JsonOptions) -> int:
    """Returns the exit code: 0 if the head can be used, else 1."""
    from ..checkpoints.heads.load import HeadReport, read_head
    from ..checkpoints.hf_config import load_config
    from ..doctor import holds_language_model

    check_writable(output.json_file)
    config = None
    if target is not None:
        with Progress() as progress:
            config = load_config(Path(resolve_model(target, progress)))
    if holds_language_model(directory):
        report = HeadReport(directory, problems=[_WHOLE_MODEL.format(directory)])
    else:
        with ExitStack() as stack:
            report = read_head(directory, config, stack)
    facts = describe_head(report, config)
    if output.is_wanted:
        found = {name.lower().replace(" ", "_"): value for name, value in facts.items()}
        about = {**found, "head": str(directory), "target": target}
        write_json(output, {**about, "problems": report.problems})
    if not output.as_json:
        _print(directory, report, facts, has_target=config is not None)
    return EXIT_FAILED if report.problems else 0


def _print(directory: Path, report: HeadReport, facts: dict[str, str], has_target: bool) -> None:
    console = make_console()
    table = Table(title=str(directory), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    if facts:
        console.print(table)
    for problem in report.problems:
        console.print(Text(f"✗ {problem}", style="red"), soft_wrap=True)
    if not report.problems:
        fits = "It fits the target." if has_target else "It is whole; give --target too."
        console.print(Text(f"✓ {fits}", style="green"), soft_wrap=True)


def describe_head(report: HeadReport, target: DecoderConfig | None) -> dict[str, str]:
    """Returns what the report says of the head, by heading; nothing if nothing could be read."""
    head = report.config
    if head is None:
        return {}
    facts = _network_facts(report, head) | _input_facts(head, target)
    shared = [
        name
        for name, in_head in (("embedding", head.own_embedding), ("lm_head", head.own_lm_head))
        if not in_head
    ]
    facts["Shared with target"] = ", ".join(shared) or "nothing by name (equal copies are shared)"
    if head.draft_window:
        facts["Draft window"] = f"a layer sees the last {head.draft_window:,} tokens at most"
    if head.suggested_draft_len is not None:
        facts["Draft length"] = f"{head.suggested_draft_len}, says config.json"
    if head.mask_token_id is not None:
        most = head.trained_draft_len
        limit = "" if most is None else f", at most {most} tokens"
        facts["Drafts in parallel"] = f"mask token {head.mask_token_id}{limit}"
    if report.mask_hidden is not None:
        facts["Mask state"] = _mask_state(report.mask_hidden, len(head.layers_to_capture))
    if report.zero_weights:
        facts["Zero weights"] = f"{', '.join(report.zero_weights)}: a trained head has none"
    if target is not None:
        ropes = "; ".join(
            f"{label}{_rope(kind)}"
            for label, kind in _kinds(target, names_layers=False)
            if kind.linear_attention is None
        )
        facts["Target"] = (
            f"{target.num_layers} layers, hidden_size {target.hidden_size}, vocabulary "
            f"{target.vocab_size}, RoPE {ropes}"
        )
    return facts


def _network_facts(report: HeadReport, head: HeadConfig) -> dict[str, str]:
    """Returns what its tensors and layers are."""
    decoder = head.decoder
    parameters = sum(prod(source.shape) for source in report.tensors.values())
    facts = {
        "Format": head.format,
        "Tensors": f"{len(report.tensors)} used, {parameters:,} parameters",
        "Layers": f"{head.num_mtp_layers or decoder.num_layers}, hidden_size "
        f"{decoder.hidden_size}, intermediate_size {decoder.intermediate_size}",
        "Attention": "\n".join(f"{label}{_attention(kind)}" for label, kind in _kinds(decoder)),
        "Target hidden size": str(head.target_hidden_size),
        "RoPE": "\n".join(f"{label}{_rope(kind)}" for label, kind in _kinds(decoder)),
        "Vocabulary": _vocabulary(head),
    }
    layers = range(decoder.num_layers)
    moe = next(filter(None, (decoder.moe_of_layer(i) for i in layers)), None)
    if moe is not None:
        facts["Experts"] = (
            f"{moe.num_experts} of intermediate_size {moe.intermediate_size}, "
            f"{moe.experts_per_token} to a token"
        )
    return facts


def _input_facts(head: HeadConfig, target: DecoderConfig | None) -> dict[str, str]:
    """Returns what it reads, which depends on its kind."""
    facts = {}
    if head.kind in ("dflash", "dspark"):
        facts["Captured layers"] = _captured(head)
        facts["Block"] = _block(head)
        if head.markov_rank:
            facts["Bias"] = f"by the token before, {head.markov_kind}, rank {head.markov_rank}"
        if head.confidence_size:
            facts["Confidence head"] = "read where max_verified_drafts is set"
    elif head.kind == "eagle3":
        facts["Captured layers"] = _captured(head)
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        facts["Flags"] = ", ".join(n for n in names if getattr(head, n)) or "none"
    else:
        facts["Hidden states"] = "the target's last, after its final norm"
    if head.kind == "mtp":
        order = "hidden state, embedding" if head.hidden_first else "embedding, hidden state"
        fed_on = "after" if head.norm_output else "before"
        facts["Input"] = f"{order}; fed on {fed_on} the layer's final norm"
    if head.kind == "gemma4_assistant":
        facts |= _assistant_facts(head, target)
    return facts


def _block(head: HeadConfig) -> str:
    """Returns what the rows of a DFlash head's block see and propose."""
    blind = [i for i, sees in enumerate(head.sees_ahead) if not sees]
    sight = "rows see each other both ways"
    if blind:
        layers = "" if len(blind) == len(head.sees_ahead) else f" in layers {_list(blind)}"
        sight = f"rows see earlier ones alone{layers}"
    anchor = "the last token's row and the masks propose"
    facts = [sight, anchor if head.samples_from_anchor else "the masks propose"]
    if head.context_embeddings:
        facts.append("a context row reads the token after it too")
    if head.decoder.attention_sinks:
        facts.append("attention sinks")
    if head.value_scale != 1:
        facts.append(f"values times {head.value_scale:.6g}")
    if head.windows_by_row:
        facts.append("windows are counted from each row")
    if head.selector_rank:
        taps, group = head.block_convolution
        facts.append(f"convolutions of {taps} rows, {group} channels in a group")
        facts.append(
            f"a path through the best {head.selector_candidates}, rank {head.selector_rank}"
        )
    if head.logit_scale != 1:
        facts.append(f"logits times {head.logit_scale:.6g}")
    if head.logit_softcap is not None:
        facts.append(f"logits within ±{head.logit_softcap:g}")
    if head.embedding_scale is not None:
        facts.append(f"embedding times {head.embedding_scale:.6g}")
    return "; ".join(facts)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _kinds(
    decoder: DecoderConfig, names_layers: bool = True
) -> Iterator[tuple[str, DecoderConfig]]:
    """Yields a label and the config, windows included, of each kind of layer.

    The label is empty where all layers are alike.
    """
    types = decoder.layer_types[: decoder.num_layers] or ("",) * decoder.num_layers
    for kind in dict.fromkeys(types):
        layers = [i for i, layer_type in enumerate(types) if layer_type == kind]
        windows = {decoder.window(i) for i in layers}
        layer_config = replace(decoder.of_layer(layers[0]), layer_windows=tuple(windows))
        numbers = f" (layer{'s' * (len(layers) > 1)} {_list(layers)})"
        yield (f"{kind}{numbers if names_layers else ''}: " if kind else ""), layer_config


def _assistant_facts(head: HeadConfig, target: DecoderConfig | None) -> dict[str, str]:
    from ..models.drafters.gemma_assistant import layer_read

    facts = {"Keys and values": "the target's, of its last layer of the same kind"}
    scale = "as the target has it"
    if target is not None:
        read = [(i, layer_read(head.decoder, i, target)) for i in range(head.decoder.num_layers)]
        facts["Layers read"] = ", ".join(
            f"{i} → {'none' if layer is None else layer} "
            f"({'full' if head.decoder.window(i) is None else 'sliding'})"
            for i, layer in read
        )
        factor = target.embedding_scale
        scale = "not scaled" if factor is None else f"scaled by {factor:.6g}"
    facts["Input"] = (
        f"the target's embedding ({scale}), hidden state; fed on: post_projection of the state "
        f"{'after' if head.norm_output else 'before'} the final norm"
    )
    facts["Position"] = "the last token's own, the same for all drafts of a step"
    return facts


def _mask_state(mask_hidden: Tensor, num_captured: int) -> str:
    state = mask_hidden.float()
    if not bool(state.any()):
        return "mask_hidden is zero everywhere, which a trained one is not"
    parts = ", ".join(f"{float(part.norm()):.4g}" for part in state.chunk(num_captured, dim=-1))
    return f"mask_hidden of norm {float(state.norm()):.4g} (by captured layer {parts})"


def _attention(decoder: DecoderConfig) -> str:
    windows = sorted(window for window in decoder.layer_windows if window is not None)
    also = f", window {_list(windows)}" if windows else ""
    if windows and None in decoder.layer_windows:
        also += " in some layers"
    if decoder.mla is not None:
        return (
            f"{decoder.num_heads} heads on a latent of {decoder.mla.kv_lora_rank} and "
            f"{decoder.mla.qk_rope_head_dim} rotated{also}"
        )
    return (
        f"{decoder.num_heads} heads, {decoder.num_kv_heads} KV heads, head_dim "
        f"{decoder.head_dim}, bias {_yes(decoder.qkv_bias)}, q/k norm {_yes(decoder.qk_norm)}{also}"
    )


def _captured(head: HeadConfig) -> str:
    if all(layer < 0 for layer in head.layers_to_capture):
        return f"{len(head.layers_to_capture)}, {head.captured_by}"
    return f"{_list(head.layers_to_capture)} (0-based outputs), from {head.captured_by}"


def _vocabulary(head: HeadConfig) -> str:
    vocab, drafted = head.decoder.vocab_size, head.draft_vocab_size
    if drafted == vocab:
        return f"{vocab}, all of them drafted"
    return f"{vocab}, of which {drafted} ({drafted / vocab:.0%}) are drafted, by d2t"


def _rope(decoder: DecoderConfig) -> str:
    from ..models.rope import NOT_ROTATED

    parameters, rotated = decoder.rope_parameters, decoder.rotary_dim
    if parameters == NOT_ROTATED:
        return "none: no positions"
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    part = parameters.get("partial_rotary_factor", 1)
    factor = f", factor {parameters['factor']:g}" if "factor" in parameters else ""
    rotates = "" if rotated is None else f", rotates {rotated} of {decoder.head_dim} dimensions"
    rotates += f", rotates {part:g} of a head" if part != 1 and rotated is None else ""
    return f"{kind}, theta {theta:g}{factor}{rotates}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
