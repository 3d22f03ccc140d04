"""`trtspec doctor`: why a drafter is accepted so little, and what to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .engine import resolve_model
from .errors import EXIT_FAILED, CliError
from .inputs import encoder
from .options import DoctorOptions, JsonOptions
from .output import check_writable, write_json
from .render import make_console
from .status import Progress

if TYPE_CHECKING:
    from ..doctor import Diagnosis

Ids = list[list[int]]
MAX_ROWS = 12  # of what was tried, the best


def run_doctor(options: DoctorOptions, output: JsonOptions) -> int:
    """Returns the exit code: 0 if nothing is wrong, else 1."""
    from ..attention.torch_sdpa import TorchAttention
    from ..checkpoints.hf_config import load_config
    from ..checkpoints.place import LoadOptions, weight_form
    from ..checkpoints.tokenizer import load_tokenizer
    from ..checkpoints.weights import load_decoder
    from ..doctor import check, diagnose, texts_of
    from ..executor.device import resolve_device, resolve_dtype

    with Progress() as progress:
        check_writable(output.json_file)
        head = _resolve_drafter(options.head, progress)
        target_dir = Path(resolve_model(options.target, progress))
        config, tokenizer = load_config(target_dir), load_tokenizer(target_dir)
        where = resolve_device(options.device)
        diagnosis = check(config, head, tokenizer=tokenizer)
        if not diagnosis.problems:  # otherwise the target need not write anything
            progress("the target writes texts")
            prompts, written = _write(target_dir, options, config.max_position_embeddings)
            how = LoadOptions(
                dtype=resolve_dtype(options.dtype, config, where),
                device=where,
                backend=TorchAttention(),
                pack=False,
                form=replace(weight_form(options.quant, where), keeps_fp8=False),
            )
            model = load_decoder(target_dir, how)
            texts = texts_of(prompts, written, where)
            diagnosis = diagnose(model, head, None, texts, progress, tokenizer)
    if output.is_wanted:
        found = {"target": options.target, "head": str(head), **_as_json(diagnosis)}
        write_json(output, found)
    if not output.as_json:
        _print(diagnosis, head)
    return 0 if diagnosis.is_well else EXIT_FAILED


def _resolve_drafter(head: Path, progress: Progress) -> Path:
    """The directory of a head or a draft model, by its name too."""
    from ..checkpoints.zoo import HEADS, MODELS, hub_advice, resolve_head

    if (found := resolve_head(head)).is_dir():
        return found
    if str(head) in MODELS or head.suffix.lower() == ".gguf":
        return Path(resolve_model(str(head), progress))
    raise CliError(
        f"{head} is neither a directory nor a known head or model. Give the directory of a head or "
        f"a draft model, a .gguf file, or one of: {', '.join((*HEADS, *MODELS))}."
        f"{hub_advice(head)}"
    )


def _write(target_dir: Path, options: DoctorOptions, num_positions: int) -> tuple[Ids, Ids]:
    """Returns (token ids of prompts, those that the target wrote after each)."""
    from ..api.sampling_params import SamplingParams
    from ..data.acceptance_prompts import load_prompts
    from ..llm import LLM

    prompts, count = load_prompts(), options.num_prompts
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    messages = [list(prompt.messages) for prompt in chosen]
    with LLM(
        target_dir,
        device=options.device,
        dtype=options.dtype,
        quant=options.quant,
        max_batch_size=16,
        tensor_parallel_size=options.tensor_parallel_size,
        max_seq_len=min(1024, num_positions),
    ) as llm:
        inputs = list(map(encoder(llm, options.raw), messages))
        outputs = llm.generate(inputs, SamplingParams(max_tokens=options.max_tokens))
    return (
        [list(output.prompt_token_ids) for output in outputs],
        [list(output.outputs[0].token_ids) for output in outputs],
    )


def _as_json(diagnosis: Diagnosis) -> dict[str, object]:
    loaded, likely = diagnosis.as_loaded, diagnosis.likely
    return {
        "verdict": diagnosis.verdict,
        "is_well": diagnosis.is_well,
        "problems": diagnosis.problems,
        "changes": [{"name": f.name, "change": f.cure} for f in diagnosis.changes],
        "likely": {"name": likely.name, "change": likely.cure} if likely else None,
        "conditional_acceptance": loaded.conditional if loaded else None,
        "judged": loaded.judged if loaded else None,
        "tried": {f.name: f.result.conditional for f in diagnosis.tried},
        "suspicion": diagnosis.suspicion,
        "notes": diagnosis.remarks,
    }


def _print(diagnosis: Diagnosis, head: Path) -> None:
    console = make_console()
    if diagnosis.as_loaded is not None:
        title = f"{head}: how many of drafts 1, 2, … are accepted, if those before are"
        table = Table(title=title, title_justify="left")
        table.add_column("setting")
        for i in range(len(diagnosis.as_loaded.conditional)):
            table.add_column(str(i + 1), justify="right")
        table.add_column("length", justify="right")
        best_first = sorted(diagnosis.tried, key=lambda f: -f.result.acceptance_length)
        hidden = best_first[MAX_ROWS:]
        rows = [("as it is", diagnosis.as_loaded)]
        rows += [(f.name, f.result) for f in best_first[:MAX_ROWS]]
        for name, result in rows:
            rates = [f"{rate:.2f}" for rate in result.conditional]
            table.add_row(name, *rates, f"{result.acceptance_length:.2f}")
        console.print(table)
        if hidden:
            most = hidden[0].result.acceptance_length
            text = (
                f"{len(hidden)} others were tried, of length {most:.2f} at most (--json has all)."
            )
            console.print(Text(text), soft_wrap=True)
    for problem in diagnosis.problems:
        console.print(Text(f"✗ {problem}", style="red"), soft_wrap=True)
    if not diagnosis.problems:
        style = "green" if diagnosis.is_well else "yellow"
        console.print(Text(diagnosis.verdict, style=style), soft_wrap=True)
    for finding in diagnosis.changes:
        console.print(Text(f"  change: {finding.cure}", style="bold"), soft_wrap=True)
    for note in diagnosis.remarks:
        console.print(Text(f"  note: {note}"), soft_wrap=True)
