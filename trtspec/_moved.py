"""Modules that have moved: the old names still import, with a DeprecationWarning.

A row is `old: new`, or `old: (new, new, …)` where a module was split. Names are without `trtspec.`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_TRITON_ATTENTION = (
    "attention.triton_backend",
    "attention.triton_generations",
    "attention.triton_contexts",
    "attention.online_softmax",
)
MOVED: dict[str, tuple[str, ...]] = {
    "acceptance_prompts": ("data.acceptance_prompts",),
    "attention.paged": _TRITON_ATTENTION,
    "attention.triton_mla": ("attention.mla",),
    "attention.triton_paged": _TRITON_ATTENTION,
    "attention.triton_parts": ("attention.split_kv", "attention.tiles"),
    "cache": (),
    "cache.blocks": ("state.blocks",),
    "cache.manager": ("state.kv_cache",),
    "cache.slots": ("state.slots",),
    "checkpoints.fp8": ("checkpoints.dequantized", "checkpoints.quantization"),
    "checkpoints.heads.config": ("checkpoints.heads.eagle_config",),
    "checkpoints.json_object": ("checkpoints.files",),
    "cli.__main__": ("__main__",),
    "config.decoding": ("config.base", "config.lookups", "config.networks", "config.modes"),
    "executor.auto_draft_len": ("executor.draft_lens.auto_draft_len",),
    "executor.choose_draft_len": ("executor.draft_lens.choose_draft_len",),
    "executor.context_inputs": ("executor.cuda_graphs.context_inputs",),
    "executor.draft_len": ("executor.draft_lens.draft_len",),
    "executor.draft_passes": ("executor.device_step",),
    "executor.drafting": ("executor.host_drafts",),
    "executor.generation_inputs": ("executor.cuda_graphs.generation_inputs",),
    "executor.graph_key": ("executor.cuda_graphs.graph_key",),
    "executor.graph_recorder": ("executor.cuda_graphs.graph_recorder",),
    "executor.graphs": ("executor.cuda_graphs.graphs",),
    "executor.joined_passes": ("executor.cuda_graphs.joined_passes",),
    "executor.mask_token": ("executor.drafters",),
    "executor.parallel": ("executor.drafters",),
    "executor.running_acceptance": ("executor.draft_lens.running_acceptance",),
    "executor.step_costs": ("executor.draft_lens.step_costs",),
    "executor.step_launch": ("executor.device_step",),
    "hidden_states": ("data.hidden_states",),
    "metadata.protocols": ("metadata.guided",),
    "models.checkpoint": ("checkpoints.tensors",),
    "models.clustered_head": (
        "models.drafters.clustered_head",
        "checkpoints.heads.gemma_assistant",
    ),
    "models.draft_head": ("models.drafters.base",),
    "models.eagle": ("models.drafters.eagle",),
    "models.families": ("checkpoints.families",),
    "models.families.deepseek": ("checkpoints.families.deepseek",),
    "models.families.family": ("checkpoints.families.family",),
    "models.families.gemma": ("checkpoints.families.gemma",),
    "models.families.glm": ("checkpoints.families.glm",),
    "models.families.llama": ("checkpoints.families.llama",),
    "models.families.moe": ("checkpoints.families.moe",),
    "models.families.step": ("checkpoints.families.step",),
    "models.files": ("checkpoints.files",),
    "models.fp8": ("checkpoints.dequantized", "checkpoints.quantization"),
    "models.gemma_assistant": (
        "models.drafters.gemma_assistant",
        "checkpoints.heads.gemma_assistant",
    ),
    "models.gguf": ("checkpoints.gguf",),
    "models.head_config": (
        "checkpoints.heads.eagle_config",
        "checkpoints.heads.fields",
        "checkpoints.heads.mtp",
    ),
    "models.head_weights": ("checkpoints.heads.load",),
    "models.hf_config": ("checkpoints.hf_config",),
    "models.json_object": ("checkpoints.files",),
    "models.mtp": ("models.drafters.mtp", "checkpoints.heads.mtp_layouts"),
    "models.parallel_head": ("checkpoints.heads.masked",),
    "models.text_part": ("checkpoints.text_part",),
    "models.tokenizer": ("checkpoints.tokenizer",),
    "models.weights": ("checkpoints.weights",),
    "models.zoo": ("checkpoints.zoo",),
    "multimodal": ("api.embeds_prompt",),
    "ops.accept": ("ops.tokens.accept",),
    "ops.activation": ("ops.layer.activation",),
    "ops.choose": ("ops.tokens.greedy", "ops.step.window"),
    "ops.cublaslt": ("ops.layer.cublaslt",),
    "ops.dispatch": ("ops.launch.dispatch",),
    "ops.drafting": ("ops.step.rows", "ops.padded.torch"),
    "ops.embedding": ("layers.embedding", "ops.layer.embedding"),
    "ops.fused": ("layers.fused",),
    "ops.latent": ("ops.layer.latent",),
    "ops.launch.native": ("native",),
    "ops.linear": ("layers.linear",),
    "ops.logprobs": ("ops.tokens.logprobs",),
    "ops.moe": ("layers.experts", "ops.experts.torch"),
    "ops.native": ("native",),
    "ops.ngram": ("ops.tokens.ngram",),
    "ops.noise": ("ops.tokens.noise",),
    "ops.norm": ("layers.norm", "ops.layer.norm"),
    "ops.rope": ("ops.layer.rope",),
    "ops.sample": ("ops.tokens.sample",),
    "ops.slots": ("ops.step.slots",),
    "ops.soft_cross_entropy": ("ops.tokens.soft_cross_entropy",),
    "ops.triton_drafting": ("ops.step.triton_rows", "ops.step.triton_drafts", "ops.padded.triton"),
    "ops.triton_latent": ("ops.layer.triton_latent",),
    "ops.triton_launch": ("ops.launch.triton",),
    "ops.triton_moe": ("ops.experts.triton",),
    "ops.triton_ops": (
        "ops.layer.triton_activation",
        "ops.layer.triton_embedding",
        "ops.layer.triton_norm",
        "ops.layer.triton_rope",
        "ops.tokens.triton_soft_cross_entropy",
    ),
    "ops.triton_sampling": ("ops.tokens.triton_sampled", "ops.tokens.triton_filter"),
    "outputs": ("api.outputs",),
    "prompts": ("data.prompts",),
    "sampling": (),
    "sampling.draft": ("acceptance.draw",),
    "sampling.params": ("api.sampling_params",),
    "sampling.target": ("acceptance.target",),
    "state.lookup": ("state.prefix_search",),
    "text": ("api.text_stream",),
    "workers.history": ("workers.ngram",),
    "workers.parallel": ("workers.masked",),
    "workers.save_hidden_states": ("workers.plain",),
    "workers.user_provided": ("workers.plain",),
    "workers.verification": ("acceptance.verify", "acceptance.rule"),
}


class _OldModule(ModuleType):
    """Reads and sets attributes of the modules that took its place, the first that has them."""

    def __init__(self, name: str, homes: tuple[str, ...]) -> None:
        super().__init__(name)
        self.__dict__["_homes"], self.__dict__["_before"] = homes, {}
        self.__path__: list[str] = []  # some of them were packages

    def __dir__(self) -> list[str]:
        homes = (importlib.import_module(f"trtspec.{home}") for home in self.__dict__["_homes"])
        return sorted({name for home in homes for name in dir(home) if not name.startswith("_")})

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return dir(self)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._home_of(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or f"{self.__name__}.{name}" in sys.modules:
            self.__dict__[name] = value
        else:
            home = self._home_of(name)
            self.__dict__["_before"].setdefault(name, getattr(home, name))
            setattr(home, name, value)

    def __delattr__(self, name: str) -> None:
        """Takes back what was set, as pytest's monkeypatch asks."""
        setattr(self._home_of(name), name, self.__dict__["_before"].pop(name))

    def _home_of(self, name: str) -> ModuleType:
        for home in self.__dict__["_homes"]:
            module = importlib.import_module(f"trtspec.{home}")
            if hasattr(module, name):
                return module
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class MovedModules:
    """A finder for `sys.meta_path`: asked last, so only for modules that are no longer there."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.removeprefix("trtspec.") not in MOVED or not fullname.startswith("trtspec."):
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        homes = MOVED[spec.name.removeprefix("trtspec.")]
        if homes:
            now = " and ".join(f"trtspec.{home}" for home in homes)
            message = f"{spec.name} has moved: import {now} instead."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return _OldModule(spec.name, homes)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the module reads from its new homes."""

    def get_code(self, fullname: str) -> CodeType:
        """Returns what `python -m` of an old name runs: the first of its new homes."""
        home = MOVED[fullname.removeprefix("trtspec.")][0]
        run = f"import runpy; runpy.run_module('trtspec.{home}', None, '__main__', alter_sys=True)"
        return compile(run, fullname, "exec")
