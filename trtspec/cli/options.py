"""The options that the commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m"

ModelOption = Annotated[
    str, typer.Option("--model", help="smollm2-135m (fetched on first use) or a model directory.")
]
SpeculativeOption = Annotated[
    str,
    typer.Option(
        "--speculative",
        help="none, ngram, draft_target, auto, eagle3, mtp (one layer per draft token) or "
        "mtp_eagle (one layer for all). The last three draft inside the step, the modes "
        "EAGLE3_ONE_MODEL, MTP and MTP_EAGLE_ONE_MODEL; see --two-engine.",
    ),
]
DraftLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-draft-len",
        help="Draft tokens per step, K. Default: ngram and auto 6, mtp 1, mtp_eagle 1 (3 with the "
        "package's head), the others 4; an EAGLE head may say its own; demo 3.",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option("--draft-model", help="Directory (or name) of the drafting model."),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="Directory of the EAGLE head or MTP layers, or a name: smollm2-135m-eagle3, "
        "smollm2-135m-mtp. Default: for smollm2-135m the package's, for other models their own MTP "
        "layers.",
    ),
]
TwoEngineOption = Annotated[
    bool,
    typer.Option("--two-engine", help="eagle3, mtp_eagle: draft in passes outside the step."),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="How drafts of sampled answers are judged: rejection (the default), block, "
        "exact_match or strict. All are lossless.",
    ),
]
PromptOption = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text to answer. May be given several times.")
]
PromptFileOption = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        help='One JSON per line: a string, {"prompt": "..."} or {"messages": [...]}.',
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Give the text to the model as it is: no chat template.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="Most new tokens per prompt.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="1 is off.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="0 is off.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same tokens.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
BatchSizeOption = Annotated[
    int, typer.Option("--max-batch-size", help="Most requests decoded together.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made from."""

    model: str
    speculative: str
    max_draft_len: int | None
    draft_model: str | None
    head: str | None
    two_engine: bool
    dtype: str
    device: str
    max_batch_size: int
    acceptance: str | None = None


@dataclass(frozen=True)
class SamplingOptions:
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
