"""Tiny random EAGLE-3 heads of the published `speculators` package: an independent reference.

The package is optional and installed without its dependencies: those of its data pipeline, which
no head calls, are answered for by stubs while it is being imported.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tiny import DEFAULTS
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import import_utils

INSTALL = "pip install --no-deps speculators==0.9.0 loguru pydantic-settings python-dotenv"
STUBBED = ("openai", "datasets", "hs_connectors")
HEAD_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
HEAD_DEFAULTS = {"draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


class _StubFinder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        stubbed = fullname.partition(".")[0] in STUBBED
        return ModuleSpec(fullname, self, is_package=True) if stubbed else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@cache
def load_speculators() -> ModuleType:
    """The package, or a skip of the calling test where it is not installed."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip(f"the reference heads need: {INSTALL}")
    # transformers asks once whether these exist: not while the stubs are there
    import_utils.is_datasets_available()
    import_utils.is_openai_available()
    finder = _StubFinder()
    sys.meta_path.append(finder)  # the last one: what is really installed is imported as usual
    try:
        return importlib.import_module("speculators")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, MagicMock)]:
            del sys.modules[name]


def build_eagle3(
    seed: int = 0, *, family: str = "llama", mask_token_id: int | None = None, **flags: Any
) -> Any:
    """A float32 `Eagle3DraftModel`; `flags` are fields of the head's config or of its layers'. With
    a mask token it is a `PEagleDraftModel`.

    Every weight is random and large enough that leaving one out shows in the logits. The draft
    vocabulary is a random subset of the target's, unless both have the same size.
    """
    package = load_speculators()
    greedy = importlib.import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
    head_flags = {name: flags.pop(name) for name in (*HEAD_FIELDS, *HEAD_DEFAULTS) if name in flags}
    layers = {**DEFAULTS, "num_hidden_layers": 1, "attn_implementation": "eager", **flags}
    Config, Model = package.Eagle3SpeculatorConfig, package.Eagle3DraftModel
    if mask_token_id is not None:
        parallel = importlib.import_module("speculators.models.peagle")
        Config, Model = parallel.PEagleSpeculatorConfig, parallel.PEagleDraftModel
        head_flags["mask_token_id"] = mask_token_id
    config = Config(
        transformer_layer_config=AutoConfig.for_model(family, **layers),
        speculators_config=package.SpeculatorsConfig(
            algorithm="eagle3" if mask_token_id is None else "peagle",
            proposal_methods=[greedy(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=package.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{**HEAD_DEFAULTS, **head_flags},
    )
    return _randomized(Model(config).float().eval(), seed)


def build_dflash(seed: int = 0, *, name: str = "dflash", **flags: Any) -> Any:
    """A float32 `DFlashDraftModel`; `flags` are fields of the head's config or of its layers'.

    With the name "dspark" it is a `DSparkDraftModel`, with "dflash2" a `DFlash2DraftModel`.
    """
    kinds = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
    package, kind = load_speculators(), kinds[name]
    module = importlib.import_module(f"speculators.models.{name}")
    greedy = importlib.import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
    fields = {"draft_vocab_size": DEFAULTS["vocab_size"], "block_size": 5, "mask_token_id": 90}
    fields |= {"aux_hidden_state_layer_ids": [2, 4, 5]}
    own = (*fields, "sliding_window_non_causal", "sample_from_anchor", "markov_rank")
    own = (*own, "markov_head_type", "conv_kernel_size", "conv_group_size", "selector_rank")
    own = (*own, "selector_top_k", "confidence_head_with_markov")
    fields |= {name: flags.pop(name) for name in own if name in flags}
    layers = {**DEFAULTS, "num_hidden_layers": 2, "attn_implementation": "eager", **flags}
    config = getattr(module, f"{kind}SpeculatorConfig")(
        transformer_layer_config=AutoConfig.for_model("qwen3", **layers),
        speculators_config=package.SpeculatorsConfig(
            algorithm=name,
            proposal_methods=[greedy(speculative_tokens=fields["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=package.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )
    return _randomized(getattr(module, f"{kind}DraftModel")(config).float().eval(), seed)


def block_logits(model: Any, hidden: Tensor, token_ids: Tensor, anchor: int) -> Tensor:
    """A `DFlashDraftModel`'s logits of the block whose first token is at `anchor`, [block, Vd].

    A `DSparkDraftModel`'s bias is by the tokens that follow in `token_ids`. So is what a
    `DFlash2DraftModel` adds to its candidates; the other tokens are at -inf.
    """
    ours = torch.zeros_like(token_ids)
    ours[anchor] = 1
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = model._backbone_forward(
            hidden[None], token_ids[None], ours[None], hidden[None, :, : model.norm.weight.numel()],
            torch.zeros_like(token_ids)[None], max_anchors=1,
        )  # fmt: skip
        logits, markov = found[1][0], getattr(model, "markov_head", None)
        selector = getattr(model, "candidate_selector", None)
        if markov is None and selector is None:
            return logits
        before = token_ids[anchor : anchor + model.block_size]
        if not model.config.sample_from_anchor:
            before = torch.cat([before[:1], before[:-1]])
        if selector is not None:
            ids, scores = selector.select(logits, found[0][0], before)
            return torch.full_like(logits, -math.inf).scatter(1, ids, scores)
        return logits + markov.block_bias(prev_token_ids=before[None], hidden_states=found[0])[0]


def _randomized(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif parameter.ndim == 1 or "embed_tokens" in name:
            noise *= 0.5
        else:
            noise *= parameter.shape[1] ** -0.5 * (3 if "lm_head" in name else 1.5)
        parameter.data.copy_(noise)
    if model.d2t is not None:
        order = torch.randperm(len(model.t2d), generator=generator)
        targets = order[: len(model.d2t)].sort().values
        model.d2t.copy_(targets - torch.arange(len(targets)))
        model.t2d[targets] = True
    return model


def save_eagle3(model: Any, path: Path) -> Path:
    """Writes the head as the package's own trainer does; returns `path`."""
    model.save_pretrained(path)
    return path


def step_logits(model: Any, hidden: Tensor, token_ids: Tensor, steps: int) -> list[Tensor]:
    """The logits [T, draft_vocab] of every unrolled step, from `hidden` [T, n_aux * H].

    At step 0, row i reads hidden i and the embedding of token i (already shifted by the caller);
    at step s it reads token i + s instead, so that only its rows i < T - s are meaningful.
    """
    logits: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    with handle, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        documents = torch.zeros_like(token_ids)
        model(hidden[None], token_ids[None], documents[None], ttt_steps=steps)
    return logits


class _Seen(Exception):
    """Ends a forward once the logits are there."""


def parallel_logits(model: Any, hidden: Tensor, token_ids: Tensor, depths: int) -> list[Tensor]:
    """A `PEagleDraftModel`'s logits [depths, draft_vocab] after each of the first T - depths rows.

    Row i reads hidden i [n_aux * H] and the embedding of token i (already shifted by the caller);
    at depth d > 0 it reads masks at position i + d. All places are looked at, in place of the
    sample that training takes.
    """
    core = importlib.import_module("speculators.models.peagle.core")
    rows = len(token_ids)
    anchors = torch.cat([torch.arange(rows - d) for d in range(depths)])
    depth = torch.cat([torch.full((rows - d,), d) for d in range(depths)])
    seen: list[Tensor] = []

    def look(*call: Any) -> None:
        seen.append(call[2][0])
        raise _Seen

    handle = model.lm_head.register_forward_hook(look)
    stance = torch.compiler.set_stance("force_eager")
    with handle, torch.no_grad(), stance, pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depth))
        with pytest.raises(_Seen):
            model(
                hidden[None], token_ids[None], torch.zeros_like(token_ids)[None],
                verifier_last_hidden_states=hidden[None], num_depths=depths,
            )  # fmt: skip
    return [seen[0][anchors == i] for i in range(rows - depths)]
