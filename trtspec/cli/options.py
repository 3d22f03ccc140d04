"""The options of the commands: a record for each group, in which a field is an option.

An option's default and help are written here once. Its name is the field's, `max_tokens` for
`--max-tokens`, where none is given. `records.py` makes parameters of the fields, which takes
annotations that are no strings: no `from __future__ import annotations` here.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config.engine import ENGINE_ARGUMENTS, KvCacheConfig
from ..serving.config import ServerConfig

DEFAULT_MODEL = "smollm2-135m"
API_KEY_VARIABLE = "TRTSPEC_API_KEY"
SPECULATIVE_NAMES = (
    "none", "ngram", "sa", "draft_target", "auto", "eagle3", "dflash", "dspark", "mtp", "mtp_eagle",
)  # fmt: skip


def _engine_option(name: str, *short: str) -> Any:
    """Returns the option of a field of `EngineConfig`, by its name and with its help."""
    names = f"--{name.replace('_', '-')}", *short
    return typer.Option(*names, help=ENGINE_ARGUMENTS[name].metadata["help"])


def _engine_default(name: str) -> Any:
    return ENGINE_ARGUMENTS[name].default


DEFAULT_DTYPE, DEFAULT_DEVICE = _engine_default("dtype"), _engine_default("device")

Dtype = Annotated[str, _engine_option("dtype")]
Device = Annotated[str, _engine_option("device")]
MaxBatchSize = Annotated[int, _engine_option("max_batch_size")]
Quant = Annotated[str | None, _engine_option("quant")]
TensorParallelSize = Annotated[int | None, _engine_option("tensor_parallel_size", "--tp")]
MaxTokens = Annotated[int, typer.Option(help="Most new tokens per prompt.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Give the text to the model as it is: no chat template.")
]


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made from."""

    model: Annotated[
        str, typer.Option(help="smollm2-135m (fetched on first use) or a model directory.")
    ] = DEFAULT_MODEL
    speculative: Annotated[
        str,
        typer.Option(
            help="none, ngram, sa (suffixes of this and earlier answers), draft_target, auto, "
            "eagle3, dflash, dspark, mtp (a layer per draft) or mtp_eagle (one for all). eagle3 is "
            "the mode EAGLE3_ONE_MODEL, mtp_eagle MTP_EAGLE_ONE_MODEL: see --two-engine."
        ),
    ] = "none"
    max_draft_len: Annotated[
        str | None,
        typer.Option(
            metavar="<int>|auto",
            help="Draft tokens per step, K; auto chooses it while serving. Default: ngram and "
            "auto 6, sa 16, mtp 1, mtp_eagle 1 (3 with the package's head), dflash and dspark what "
            "fills a block, the others 4; an EAGLE head may say its own; demo 3. Left out on one "
            "GPU or a CPU, sa and the package's EAGLE-3 and DSpark heads choose K as with auto, up "
            "to that.",
        ),
    ] = None
    draft_len_schedule: Annotated[
        str | None,
        typer.Option(
            help="K by the number of requests: 4:4,8:2,32:1 drafts 4 with up to 4 requests, 2 with "
            "up to 8, 1 with up to 32, none with more. auto: 0 … K, what is fastest."
        ),
    ] = None
    max_verified_drafts: Annotated[
        str | None,
        typer.Option(
            help="Drafts that a step verifies at most, of all its requests together: the likeliest "
            "by the drafter's own probabilities or its confidence head. auto: what is fastest, "
            "chosen while serving. Default: all."
        ),
    ] = None
    draft_model: Annotated[
        str | None, typer.Option(help="Directory (or name) of the drafting model.")
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            help="Directory of the EAGLE, DFlash or DSpark head or MTP layers, or a name: "
            "smollm2-135m-dspark, smollm2-135m-eagle3, smollm2-135m-mtp. Default: for smollm2-135m "
            "the package's, but with mtp; with mtp and mtp_eagle other models' own MTP layers."
        ),
    ] = None
    draft_window: Annotated[
        int | None,
        typer.Option(
            help="How many of the last tokens the head sees at most; 0 is all. Default: what its "
            "config.json says (draft_window), else all."
        ),
    ] = None
    draft_quant: Annotated[
        str | None,
        typer.Option(help="fp8: quantise the head's or draft model's large weights at load."),
    ] = None
    draft_token_ids: Annotated[
        str | None,
        typer.Option(
            help="JSON or .pt file with a list of token ids: a head with an lm_head of all tokens "
            "drafts among these alone."
        ),
    ] = None
    two_engine: Annotated[
        bool,
        typer.Option("--two-engine", help="eagle3, mtp_eagle: draft in passes outside the step."),
    ] = False
    sa: Annotated[
        bool,
        typer.Option(
            "--sa",
            help="Beside a head or a draft model: drafts from this and earlier answers, where "
            "they repeat at least 4 tokens.",
        ),
    ] = False
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="How drafts of sampled answers are judged: rejection (the default), block, "
            "exact_match or strict. All are lossless."
        ),
    ] = None
    dtype: Dtype = DEFAULT_DTYPE
    quant: Quant = None
    device: Device = DEFAULT_DEVICE
    max_batch_size: MaxBatchSize = 8
    prefill_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="<int>|auto",
            help="N: while requests decode, prompts wait until N slots are free. auto: until slots "
            "were free for as long as a pass over prompts delays the others. Default: auto on a "
            "GPU, 1 on a CPU and in serve.",
        ),
    ] = None
    tensor_parallel_size: TensorParallelSize = None
    moe_expert_parallel_size: Annotated[int, _engine_option("moe_expert_parallel_size", "--ep")] = 1
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp8",
            help="How the target's keys and values are kept: fp8 holds twice as many tokens as "
            "bfloat16; auto is fp8 if the checkpoint was made for it.",
        ),
    ] = "auto"
    no_block_reuse: Annotated[
        bool, typer.Option("--no-block-reuse", help="Compute every prompt anew: no prefix cache.")
    ] = False
    free_gpu_memory_fraction: Annotated[
        float,
        typer.Option(help="Share of the GPU memory left by the weights that keys and values take."),
    ] = KvCacheConfig.free_gpu_memory_fraction

    def with_plain(self, speculative: str = "none") -> "EngineOptions":
        """Returns the options of the same engine with this mode, and nothing else of drafting."""
        unset = {name: getattr(EngineOptions, name) for name in DRAFTING}
        return replace(self, speculative=speculative, **unset)


DRAFTING = (
    "max_draft_len", "draft_len_schedule", "max_verified_drafts", "draft_model", "head",
    "draft_window", "draft_quant", "draft_token_ids", "two_engine", "sa", "acceptance",
)  # fmt: skip


@dataclass(frozen=True)
class PromptOptions:
    """What is to be answered."""

    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to answer. May be given several times.")
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help='One JSON per line: a string, {"prompt": "..."} or {"messages": [...]}.'),
    ] = None
    raw: Raw = False


@dataclass(frozen=True)
class SamplingOptions:
    """How it is answered."""

    max_tokens: MaxTokens = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The answer is a JSON object.")
    ] = False
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON that fits this file's schema.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="The answer matches this as a whole.")] = None
    grammar: Annotated[
        Path | None, typer.Option(help="The answer follows this file's EBNF grammar.")
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is this text, or another given so.")
    ] = None


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, and what it takes."""

    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback: the network.")
    ] = ServerConfig.host
    port: Annotated[int, typer.Option(help="0 is any that is free.")] = ServerConfig.port
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            show_envvar=True,
            help="What clients must send. Other users of this machine can read an option.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in requests. Default: the last part of MODEL.")
    ] = None
    max_batch_size: Annotated[
        int | None, typer.Option(help="Most requests decoded together. Default: 64, on a CPU 8.")
    ] = None
    max_seq_len: Annotated[
        int | None, typer.Option(help="Most tokens of a prompt and its answer.")
    ] = None
    max_num_requests_in_queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; others are refused with status 429.")
    ] = 1024
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of one request.")] = (
        ServerConfig.max_body_bytes
    )
    max_n: Annotated[int, typer.Option(min=1, help="Most completions of one prompt.")] = (
        ServerConfig.max_n
    )
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that running requests have after SIGTERM. A second signal ends at once.",
        ),
    ] = ServerConfig.shutdown_timeout
    no_warm_up: Annotated[
        bool,
        typer.Option(
            "--no-warm-up",
            help="Compile kernels and capture graphs when a client needs them, not before.",
        ),
    ] = False


@dataclass(frozen=True)
class JsonOptions:
    """Where the JSON object goes; by default there is none, and text is printed."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
    ] = False
    json_file: Annotated[Path | None, typer.Option(help="Write the JSON object to this file.")] = (
        None
    )

    @property
    def is_wanted(self) -> bool:
        return self.as_json or self.json_file is not None


@dataclass(frozen=True)
class SweepOptions:
    """What `trtspec bench --sweep` goes through."""

    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="A table: plain, each fixed K, auto, sa, and --speculative with sa, over "
            "concurrency, temperature and kinds of text.",
        ),
    ] = False
    concurrency: Annotated[str, typer.Option(help="--sweep: requests at once, like 1,8,32.")] = (
        "1,4"
    )
    temperatures: Annotated[str, typer.Option(help="--sweep: like 0,0.7,1. 0 is greedy.")] = "0,1"
    kinds: Annotated[
        str | None,
        typer.Option(
            help="--sweep: of text: chat, code, maths, summarise, translate, rewrite, agent; or "
            "all. Default: chat,agent; with --prompt or --prompt-file these alone."
        ),
    ] = None
    contexts: Annotated[
        str | None,
        typer.Option(help="--sweep: like 512,4096: after turns that make the prompts this long."),
    ] = None
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="--sweep: a cell has as many prompts as requests at once, times this."
        ),
    ] = 1
    columns: Annotated[
        str | None,
        typer.Option(
            help="--sweep: some of plain, fixed, auto, sa, both (--speculative with sa). Each has "
            "an engine of its own. Default: all that there can be."
        ),
    ] = None
    fixed: Annotated[
        str | None, typer.Option(help="--sweep: fixed K, like 1,2,4. Default: up to 8 all.")
    ] = None
    picture: Annotated[
        Path | None, typer.Option(help="--sweep: draw the table to this file, as SVG.")
    ] = None
    csv: Annotated[Path | None, typer.Option(help="--sweep: write the table to this file.")] = None


@dataclass(frozen=True)
class AcceptanceOptions:
    """What `trtspec acceptance` measures."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='One JSON per line: {"id": "...", "category": "...", "messages": [...]}. '
            "Default: the 120 prompts of the package."
        ),
    ] = None
    categories: Annotated[
        str | None, typer.Option(help="Only these, like chat,code. Default: all.")
    ] = None
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Only the first N prompts of each category.")
    ] = None
    temperatures: Annotated[str, typer.Option(help="Like 0,0.7,1. 0 is greedy.")] = "0"
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Like 256,1024,4096: the prompts again, after turns that make them this long."
        ),
    ] = None
    raw: Raw = False
    max_tokens: MaxTokens = 128
    seed: Annotated[int, typer.Option(min=0, help="Of sampled answers.")] = 0
    advise: Annotated[
        bool, typer.Option("--advise", help="Time a step for each K, and say which K pays.")
    ] = False
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots.")] = (
        None
    )


@dataclass(frozen=True)
class DoctorOptions:
    """What `trtspec doctor` examines."""

    target: Annotated[str, typer.Option(help="smollm2-135m or a model directory.")]
    head: Annotated[Path, typer.Option(help="Directory or name of a draft head or a draft model.")]
    num_prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="How many of the package's prompts to use.")
    ] = 24
    raw: Raw = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens per prompt.")] = 64
    dtype: Dtype = DEFAULT_DTYPE
    quant: Quant = None
    device: Device = DEFAULT_DEVICE
    tensor_parallel_size: TensorParallelSize = None


@dataclass(frozen=True)
class TrainOptions:
    """What `trtspec train` makes, and from what."""

    kind: Annotated[str, typer.Argument(help="eagle3, dflash, dflash2, dspark or mtp.")]
    target: Annotated[str, typer.Option(help="smollm2-135m or a model directory.")] = DEFAULT_MODEL
    out: Annotated[Path, typer.Option(help="The run's directory; a run that is there goes on.")] = (
        Path("head")
    )
    data: Annotated[Path | None, typer.Option(help="Conversations, one JSON per line.")] = None
    self_generate: Annotated[
        int | None, typer.Option(min=1, help="Let the target write this many conversations.")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="What to ask it; default: made from templates.")
    ] = None
    self_written: Annotated[
        float, typer.Option(min=0, max=1, help="Share of user turns that the target writes too.")
    ] = 0.4
    max_turns: Annotated[
        int, typer.Option(min=2, help="Of a conversation, a quarter has more than one.")
    ] = 2
    init_head: Annotated[
        str | None,
        typer.Option(
            help="Begin with this head's weights, a directory or a name: of the same kind and "
            "sizes. Its layers to capture and its draft vocabulary stay; a larger "
            "--draft-vocab-size adds tokens."
        ),
    ] = None
    num_layers: Annotated[int, typer.Option(min=1, help="mtp: more than one is vanilla.")] = 1
    block_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="dflash, dflash2: the last token and those to be drafted. dspark: how many are "
            "drafted. Default: 8.",
        ),
    ] = None
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="dflash, dflash2 and dspark need it: a token that texts do not have, read in "
            "place of drafts.",
        ),
    ] = None
    num_anchors: Annotated[
        int | None,
        typer.Option(
            "--anchors",
            min=1,
            help="dflash, dflash2, dspark: blocks trained in each row of text. Default: 64.",
        ),
    ] = None
    position_weights: Annotated[
        str | None,
        typer.Option(
            help="dflash, dflash2, dspark: how a block's drafts weigh in the loss, exponential "
            "(earlier ones more) or d-pace (by what the accepted length owes to each). Default: "
            "exponential."
        ),
    ] = None
    variation: Annotated[
        float | None,
        typer.Option(
            "--total-variation",
            min=0,
            max=1,
            help="The share of total variation in the loss, the rest is cross-entropy. Default: "
            "dspark 0.9, others 0.",
        ),
    ] = None
    context_embeddings: Annotated[
        bool,
        typer.Option(
            "--context-embeddings",
            help="dflash, dflash2, dspark: a context row reads the token after it, as EAGLE-3's "
            "do. Such a head is for trtspec alone.",
        ),
    ] = False
    sliding_window: Annotated[
        int | None,
        typer.Option(
            min=1, help="The head's layers see this many rows of text; not of mtp. Default: all."
        ),
    ] = None
    markov_rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="dspark: the rank of its bias. Default: by the target's size, at most 256."
        ),
    ] = None
    selector_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="dflash2: the rank of its choice among candidates. Default: by the target's size, "
            "at most 256.",
        ),
    ] = None
    selector_weight: Annotated[
        float | None,
        typer.Option(
            help="dflash2: the weight in the loss of its choice among candidates. Default: 1."
        ),
    ] = None
    capture_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the target that the head reads, e.g. 1,14,27; not of mtp. Default: "
            "the kind's."
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="eagle3: tokens to draft among. Default: 16384, or all of a smaller vocabulary.",
        ),
    ] = None
    length: Annotated[int, typer.Option(min=8, help="Tokens of a packed row.")] = 512
    max_answer: Annotated[int, typer.Option(min=1, help="Most tokens of a generated answer.")] = 384
    max_steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps. Default: by --epochs.")
    ] = None
    epochs: Annotated[float, typer.Option(min=0.01)] = 3.0
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 48
    num_steps: Annotated[
        int | None,
        typer.Option(
            "--unroll",
            min=1,
            help="eagle3, mtp of one layer: draft steps trained at each position. Default: 6.",
        ),
    ] = None
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon: Muon for the layers' matrices, AdamW for the rest.")
    ] = "adamw"
    learning_rate: Annotated[float, typer.Option()] = 1e-3
    head_format: Annotated[
        str, typer.Option("--format", help="raw, or but for mtp speculators.")
    ] = "raw"
    dtype: Dtype = DEFAULT_DTYPE
    quant: Quant = None
    device: Device = DEFAULT_DEVICE
    max_batch_size: MaxBatchSize = 256
    tensor_parallel_size: TensorParallelSize = None
    seed: Annotated[int, typer.Option(min=0)] = 0
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines of --data out, and count them.")
    ] = False
