"""From options to an engine. torch and transformers are imported here, when they are needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .errors import CliError
from .options import EngineOptions, SamplingOptions
from .status import Progress

if TYPE_CHECKING:
    from ..api.sampling_params import SamplingParams
    from ..config import DecodingBaseConfig
    from ..llm import LLM
    from ..metadata.mode import SpeculativeDecodingMode


def parse_mode(name: str) -> SpeculativeDecodingMode:
    from ..metadata.mode import SpeculativeDecodingMode

    return SpeculativeDecodingMode.from_string(name)


def make_spec_config(options: EngineOptions, progress: Progress) -> DecodingBaseConfig | None:
    """The decoding config that `--speculative` and its companions describe; None for none.

    `eagle3` and `mtp_eagle` name a drafter here: it drafts inside the step unless `--two-engine`
    asks for passes of its own.
    """
    from ..checkpoints.zoo import DRAFT_LENS, head_for
    from ..config import CONFIG_OF_MODE, EagleDecodingConfig, MTPDecodingConfig

    mode = parse_mode(options.speculative)
    config_class = CONFIG_OF_MODE.get(mode)
    is_eagle, is_mtp = config_class is EagleDecodingConfig, config_class is MTPDecodingConfig
    if options.draft_model is not None and not mode.is_draft_target():
        instead = " Give its directory with --head." if is_eagle or is_mtp else ""
        raise CliError(f"--draft-model was given, but {mode.name} drafts without a model.{instead}")
    if options.head is not None and not (is_eagle or is_mtp):
        raise CliError(
            f"--head was given, but --speculative {options.speculative} drafts without a head. Say "
            "with --speculative how it drafts: eagle3, mtp or mtp_eagle."
        )
    if options.two_engine and (mode.is_mtp_vanilla() or not (is_eagle or is_mtp)):
        raise CliError(
            f"--two-engine was given, but {mode.name} has no two-engine form: eagle3 and mtp_eagle "
            "have."
        )
    if mode.is_none():
        if options.acceptance is not None:
            raise CliError("--acceptance was given, but nothing drafts: name a --speculative mode.")
        if options.max_draft_len is not None:
            raise CliError(
                "--max-draft-len was given, but nothing drafts: name a --speculative mode."
            )
        return None
    if mode.is_user_provided() or mode.is_save_hidden_states():
        what = "a Python object that drafts" if mode.is_user_provided() else "an output_directory"
        raise CliError(f"{mode.name} needs {what}: use the Python API, LLM(model, {_name(mode)}).")
    arguments: dict[str, Any] = {}
    if options.max_draft_len is not None:
        name = "num_nextn_predict_layers" if is_mtp else "max_draft_len"
        arguments[name] = options.max_draft_len
    if options.acceptance is not None:
        arguments["acceptance"] = options.acceptance
    if mode.is_draft_target():
        if options.draft_model is None:
            raise CliError(f"{mode.name} needs a second model: give --draft-model DIR.")
        arguments["speculative_model"] = resolve_model(options.draft_model, progress)
    head = options.head
    if head is None and (is_eagle or (is_mtp and not mode.is_mtp_vanilla())):
        head = head_for(options.model, "eagle3" if is_eagle else "mtp")
        if head is not None:
            progress(f"drafting with {head}")
    if is_eagle:
        if head is None:
            raise CliError(f"{mode.name} needs a draft head: give --head DIR.")
        arguments |= {"speculative_model": head, "eagle3_one_model": not options.two_engine}
    if is_mtp:
        known = DRAFT_LENS.get(str(head))
        if known is not None and not mode.is_mtp_vanilla():  # what it was trained for
            arguments.setdefault("num_nextn_predict_layers", known)
        arguments |= {
            "speculative_model": head,
            "use_mtp_vanilla": mode.is_mtp_vanilla(),
            "mtp_eagle_one_model": not options.two_engine,
        }
    assert config_class is not None
    return config_class(**arguments)


def _name(mode: SpeculativeDecodingMode) -> str:
    from ..config import CONFIG_OF_MODE

    return f"{CONFIG_OF_MODE[mode].__name__}(...)"


def resolve_model(model: str, progress: Progress) -> str | Path:
    """A directory as it is; a .gguf file or a name of the zoo made ready on first use."""
    if model and Path(model).is_dir():
        return model
    from ..checkpoints import zoo

    return zoo.resolve_model(model, progress=progress)


def load_llm(options: EngineOptions, progress: Progress) -> LLM:
    """Build the engine that the options describe.

    Raises:
        CliError, ConfigError, CheckpointError, OSError: with the reason.
    """
    import trtspec

    config = make_spec_config(options, progress)
    model = resolve_model(options.model, progress)
    how = "" if config is None else f" with {config.spec_dec_mode.name}"
    progress(f"loading {options.model}{how}")
    return trtspec.LLM(
        model,
        speculative_config=config,
        device=options.device,
        dtype=options.dtype,
        max_batch_size=options.max_batch_size,
    )


def load_pair(options: EngineOptions, progress: Progress) -> tuple[LLM, LLM]:
    """Two engines that differ in speculation only: without, with."""
    if parse_mode(options.speculative).is_none():
        raise CliError("--speculative none leaves nothing to compare: name a drafting mode.")
    with_speculation = load_llm(options, progress)  # first: it is the one whose options can fail
    plain = replace(
        options, speculative="none", max_draft_len=None, draft_model=None, head=None,
        two_engine=False, acceptance=None,
    )  # fmt: skip
    return load_llm(plain, progress), with_speculation


def make_sampling_params(options: SamplingOptions) -> SamplingParams:
    import trtspec

    try:
        return trtspec.SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
        )
    except RequestError as error:  # here it is the command line that is wrong, not a request
        raise CliError(str(error)) from error


def describe(llm: LLM) -> dict[str, Any]:
    """The engine's part of every JSON object."""
    return {
        "mode": llm.mode.name.lower(),
        "max_draft_len": llm.max_draft_len,
        "acceptance": llm.acceptance,
        "device": str(llm.device),
        "dtype": dtype_name(llm),
    }


def dtype_name(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")
