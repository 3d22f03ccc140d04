"""From options to an engine. torch and transformers are imported here, when they are needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, RequestError
from .errors import CliError
from .options import SPECULATIVE_NAMES, EngineOptions, SamplingOptions
from .other_options import DRAFTERS
from .status import Progress

if TYPE_CHECKING:
    from ..api.guided_decoding import GuidedDecodingParams
    from ..api.sampling_params import SamplingParams
    from ..config import DecodingBaseConfig, HeadDecodingConfig, KvCacheConfig
    from ..llm import LLM
    from ..metadata.mode import SpeculativeDecodingMode


def parse_mode(name: str) -> SpeculativeDecodingMode:
    """Returns the mode of `--speculative`. Raises CliError for an unknown name."""
    from ..metadata.mode import SpeculativeDecodingMode

    ours = DRAFTERS.get(name.lower().replace("-", "_"))
    if ours is None:
        with suppress(ConfigError):
            return SpeculativeDecodingMode.from_string(name)
    names = ", ".join(SPECULATIVE_NAMES)
    here = "" if ours is None else f" Here it is {ours}."
    raise CliError(f"--speculative {name!r} is unknown: give one of {names}.{here}")


def make_spec_config(options: EngineOptions, progress: Progress) -> DecodingBaseConfig | None:
    """Returns the decoding config that `--speculative` and its companions describe, if any.

    `eagle3` and `mtp_eagle` name a drafter here: it drafts inside the step unless `--two-engine`
    asks for passes of its own.
    """
    from ..config import CONFIG_OF_MODE, SAEnhancerConfig

    mode = parse_mode(options.speculative)
    config_class, head_class = CONFIG_OF_MODE.get(mode), _head_class(mode)
    _check_companions(options, mode, reads_head=head_class is not None)
    if config_class is None:
        return None
    if config_class.needs_python:
        raise CliError(
            f"{mode.name} needs {config_class.needs_python}: use the Python API, LLM(model, "
            f"{config_class.__name__}(...))."
        )
    arguments: dict[str, Any] = {}
    if options.max_draft_len is not None:
        arguments[config_class.draft_len_field] = parse_draft_len(options.max_draft_len)
    if options.acceptance is not None:
        arguments["acceptance"] = options.acceptance
    if options.draft_len_schedule is not None:
        arguments["draft_len_schedule"] = parse_schedule(options.draft_len_schedule)
    if options.max_verified_drafts is not None:
        arguments["max_verified_drafts"] = int_or_auto(
            "--max-verified-drafts", options.max_verified_drafts, "drafts"
        )
    if options.draft_quant is not None:
        arguments["quant"] = options.draft_quant
    if mode.is_draft_target():
        if options.draft_model is None:
            raise CliError(f"{mode.name} needs a second model: give --draft-model DIR.")
        arguments["speculative_model"] = resolve_model(options.draft_model, progress)
    if head_class is not None:
        arguments = _head_arguments(options, mode, head_class, progress) | arguments
    if options.sa:
        arguments["sa_config"] = SAEnhancerConfig()
    return config_class(**arguments)


def parse_draft_len(text: str) -> int | Literal["auto"]:
    """Reads "4" or "auto". Raises CliError for anything else.

    0 is refused, too: in a config it means the drafter's own, and here it would seem to mean none.
    """
    number = int_or_auto("--max-draft-len", text, "drafts")
    if number != "auto" and number < 1:
        raise CliError(
            f"--max-draft-len {number}: give 1 or more. Leave it out for the drafter's own number, "
            "or leave out --speculative to draft nothing."
        )
    return number


def int_or_auto(option: str, text: str, what: str) -> int | Literal["auto"]:
    """Raises CliError where it is neither."""
    if text.strip().lower() == "auto":
        return "auto"
    if not text.strip().removeprefix("-").isdecimal():
        raise CliError(f"{option} {text!r}: give a number of {what}, or auto.")
    return int(text)


def parse_schedule(text: str) -> dict[int, int] | Literal["auto"]:
    """Reads "4:4,8:2,32:1" or "auto".

    Raises:
        CliError: it is none, or names a number of requests twice.
    """
    if text.strip().lower() == "auto":
        return "auto"
    pairs = [pair.strip().split(":") for pair in text.split(",")]
    if not all(len(pair) == 2 and all(part.strip().isdecimal() for part in pair) for pair in pairs):
        raise CliError(
            f"--draft-len-schedule {text!r}: give numbers of requests and draft lengths, like "
            "4:4,8:2,32:1, or auto."
        )
    schedule = {int(count): int(length) for count, length in pairs}
    if len(schedule) < len(pairs):
        raise CliError(f"--draft-len-schedule {text!r} names a number of requests twice.")
    return schedule


def _check_companions(
    options: EngineOptions, mode: SpeculativeDecodingMode, reads_head: bool
) -> None:
    """Raises CliError for an option that this way of drafting has no use for."""
    if options.draft_model is not None and not mode.is_draft_target():
        instead = (
            " Give its directory with --head."
            if reads_head
            else " One that drafts goes with --speculative draft_target."
        )
        raise CliError(f"--draft-model was given, but {mode.name} drafts without a model.{instead}")
    if options.head is not None and not reads_head:
        raise CliError(
            f"--head was given, but --speculative {options.speculative} drafts without a head. Say "
            "with --speculative how it drafts: eagle3, dflash, dspark, mtp or mtp_eagle."
        )
    of_drafts = {
        "--acceptance": options.acceptance,
        "--max-draft-len": options.max_draft_len,
        "--draft-len-schedule": options.draft_len_schedule,
        "--max-verified-drafts": options.max_verified_drafts,
        "--draft-quant": options.draft_quant,
        "--two-engine": options.two_engine or None,
        "--sa": options.sa or None,
    }
    given = [name for name, value in of_drafts.items() if value is not None]
    if mode.is_none() and given:
        raise CliError(f"{given[0]} was given, but nothing drafts: name a --speculative mode.")
    for name in ("draft_window", "draft_token_ids"):
        if getattr(options, name) is not None and not reads_head:
            raise CliError(
                f"--{name.replace('_', '-')} was given, but --speculative {options.speculative} "
                "drafts without a head: it goes with eagle3, dflash, dspark, mtp or mtp_eagle."
            )
    if options.draft_quant is not None and not mode.drafts_with_network():
        raise CliError(
            f"--draft-quant was given, but {mode.name} drafts without a network: it goes with "
            "eagle3, dflash, dspark, mtp, mtp_eagle or draft_target."
        )
    has_two = mode.is_eagle3() or mode.is_eagle3_one_model() or mode.is_mtp_eagle()
    if options.two_engine and not (has_two or mode.is_mtp_eagle_one_model()):
        raise CliError(
            f"--two-engine was given, but {mode.name} has no two-engine form: eagle3 and mtp_eagle "
            "have."
        )
    if options.sa and not mode.drafts_with_network():
        raise CliError(
            f"--sa was given, but {mode.name} drafts without a network: it goes beside eagle3, "
            "dflash, dspark, mtp, mtp_eagle or draft_target. Alone it is --speculative sa."
        )


def chosen_head(options: EngineOptions) -> str | None:
    """Returns what `--head` names, or the package's head for the model; None if there is none."""
    from ..checkpoints.zoo import head_for

    mode = parse_mode(options.speculative)
    head_class = _head_class(mode)
    if options.head is not None or head_class is None or mode.is_mtp_vanilla():
        return options.head
    return head_for(options.model, head_class.head_name)


def _head_class(mode: SpeculativeDecodingMode) -> type[HeadDecodingConfig] | None:
    from ..config import CONFIG_OF_MODE, HeadDecodingConfig

    found = CONFIG_OF_MODE.get(mode)
    return found if found is not None and issubclass(found, HeadDecodingConfig) else None


def _head_arguments(
    options: EngineOptions,
    mode: SpeculativeDecodingMode,
    config_class: type[HeadDecodingConfig],
    progress: Progress,
) -> dict[str, Any]:
    """Returns the arguments of a head's config: the head, its K, and where it drafts."""
    from ..checkpoints.zoo import DRAFT_LENS, HEADS

    head, is_vanilla = chosen_head(options), mode.is_mtp_vanilla()
    if head is not None and options.head is None:
        progress(f"drafting with {head}")
    if head is None and not config_class.target_may_hold_head:
        others = [name for name, model in HEADS.items() if model == str(options.model)]
        ready = f" For other modes the package has {', '.join(others)}." if others else ""
        raise CliError(f"{mode.name} needs a draft head: give --head DIR.{ready}")
    arguments: dict[str, Any] = {
        "speculative_model": head,
        "draft_window": options.draft_window,
        "draft_token_ids": options.draft_token_ids,
        **config_class.fields_of_mode(mode),
    }
    if config_class.one_model_field is not None:
        arguments[config_class.one_model_field] = not options.two_engine
    known = DRAFT_LENS.get(str(head))
    if known is not None and not is_vanilla and options.max_draft_len is None:
        arguments[config_class.draft_len_field] = known
    return arguments


def resolve_model(model: str, progress: Progress) -> str | Path:
    """Returns the model's directory; a .gguf file or a known name is made ready on first use."""
    if model and Path(model).is_dir():
        return model
    from ..checkpoints import zoo

    return zoo.resolve_model(model, progress=progress)


def load_llm(options: EngineOptions, progress: Progress, **more: Any) -> LLM:
    """Returns the engine that the options describe.

    Args:
        more: further arguments of `LLM`.

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
        quant=options.quant,
        max_batch_size=options.max_batch_size,
        prefill_batch_size=(
            None
            if options.prefill_batch_size is None
            else int_or_auto("--prefill-batch-size", options.prefill_batch_size, "slots")
        ),
        tensor_parallel_size=options.tensor_parallel_size,
        moe_expert_parallel_size=options.moe_expert_parallel_size,
        **{"kv_cache_config": _cache_config(options)} | more,
    )


def _cache_config(options: EngineOptions, max_tokens: int | None = None) -> KvCacheConfig:
    import trtspec

    return trtspec.KvCacheConfig(
        max_tokens=max_tokens,
        free_gpu_memory_fraction=options.free_gpu_memory_fraction,
        enable_block_reuse=not options.no_block_reuse,
        dtype=options.kv_cache_dtype,
    )


def load_small_llm(options: EngineOptions, length: int, progress: Progress, **more: Any) -> LLM:
    """Returns an engine that leaves memory for others.

    Args:
        length: tokens of a prompt and its answer for which `max_batch_size` requests have room.
    """
    rows = 64 * -(-(length + 64) // 64)  # and what is drafted beyond, in blocks
    cache = _cache_config(options, options.max_batch_size * (rows + 64))
    return load_llm(options, progress, kv_cache_config=cache, **more)


def load_pair(options: EngineOptions, progress: Progress) -> tuple[LLM, LLM]:
    """Returns two engines that differ in speculation only: without, with."""
    if parse_mode(options.speculative).is_none():
        raise CliError("--speculative none leaves nothing to compare: name a drafting mode.")
    with_speculation = load_llm(options, progress)  # first: it is the one whose options can fail
    return load_llm(options.with_plain(), progress), with_speculation


def make_sampling_params(options: SamplingOptions) -> SamplingParams:
    import trtspec

    try:
        return trtspec.SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            guided_decoding=_make_guided(options),
        )
    except RequestError as error:  # here it is the command line that is wrong, not a request
        raise CliError(str(error)) from error


def check_filters(options: SamplingOptions, temperatures: Sequence[float]) -> None:
    """Raises CliError for a filter where every answer is greedy: it would change nothing."""
    filters = {"--top-k": options.top_k > 1, "--top-p": options.top_p != 1}
    for name, is_given in filters.items():
        if is_given and not any(temperatures):
            raise CliError(f"{name} was given, but temperature 0 is greedy: give a temperature.")


def _make_guided(options: SamplingOptions) -> GuidedDecodingParams | None:
    """Raises CliError for a file that cannot be read, RequestError for several grammars."""
    from ..api.guided_decoding import GuidedDecodingParams

    given: dict[str, Any] = {
        "json": _read_schema(options.json_schema),
        "grammar": _read("--grammar", options.grammar),
        "regex": options.regex,
        "choice": options.choice or None,
        "json_object": options.json_object or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return GuidedDecodingParams(**given) if given else None


def _read_schema(path: Path | None) -> str | None:
    """Refuses before the model is loaded what no compiler of grammars would take."""
    text = _read("--json-schema", path)
    if text is None:
        return None
    try:
        schema = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CliError(f"--json-schema {path} is not JSON: {error}.") from error
    if not isinstance(schema, dict | bool):
        raise CliError(
            f"--json-schema {path} holds a {type(schema).__name__}: a schema is an object, as "
            '{"type": "object"}.'
        )
    return text


def _read(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"{option} {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{option} {path} cannot be read: it is not UTF-8.") from error


def describe(llm: LLM) -> dict[str, Any]:
    """Returns the engine's part of every JSON object."""
    return {
        "mode": llm.mode.name.lower(),
        "max_draft_len": llm.max_draft_len,
        "chooses_draft_len": llm.chooses_draft_len,  # each step's K is 0 … max_draft_len
        "acceptance": llm.acceptance,
        "device": str(llm.device),
        "dtype": dtype_name(llm),
    }


def dtype_name(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")
