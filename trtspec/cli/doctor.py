"""`trtspec doctor`: why a drafter is accepted so little, and what to change."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from .engine import resolve_model
from .errors import EXIT_FAILED, CliError
from .generate import write_json
from .render import make_console
from .status import Progress


def run_doctor(
    target: str, head: Path, num_prompts: int, max_tokens: int, dtype: str, device: str,
    as_json: bool,
) -> int:  # fmt: skip
    """Returns the exit code: 0 if nothing is wrong, else 1."""
    from ..acceptance_prompts import load_prompts
    from ..attention.torch_sdpa import TorchAttention
    from ..doctor import diagnose, texts_of
    from ..executor.build import resolve_device, resolve_dtype
    from ..llm import LLM
    from ..models.hf_config import load_config
    from ..models.weights import load_decoder
    from ..models.zoo import HEADS, resolve_head
    from ..sampling.params import SamplingParams

    if not (found := resolve_head(head)).is_dir():
        raise CliError(
            f"{head} is neither a directory nor a known head. Give the directory of a head or a "
            f"draft model, or one of: {', '.join(HEADS)}."
        )
    head = found
    with Progress() as progress:
        target_dir = Path(resolve_model(target, progress))
        config = load_config(target_dir)
        where = resolve_device(device)
        progress("the target writes texts")
        llm = LLM(target_dir, device=device, dtype=dtype, max_batch_size=16, max_seq_len=1024)
        prompts = load_prompts()
        chosen = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]
        outputs = llm.chat(
            [list(prompt.messages) for prompt in chosen], SamplingParams(max_tokens=max_tokens)
        )
        tokenizer = llm.tokenizer
        del llm
        model = load_decoder(
            target_dir, resolve_dtype(dtype, config, where), where, TorchAttention(), pack=False
        )
        texts = texts_of(
            [output.prompt_token_ids for output in outputs],
            [output.outputs[0].token_ids for output in outputs],
            where,
        )
        diagnosis = diagnose(model, head, None, texts, progress, tokenizer)
    is_well = diagnosis.is_well
    if as_json:
        write_json({
            "target": target, "head": str(head), "verdict": diagnosis.verdict,
            "problems": diagnosis.problems,
            "changes": [{"name": f.name, "change": f.cure} for f in diagnosis.changes],
            "conditional_acceptance": (
                diagnosis.as_loaded.conditional if diagnosis.as_loaded else None
            ),
            "judged": diagnosis.as_loaded.judged if diagnosis.as_loaded else None,
            "tried": {f.name: f.result.conditional for f in diagnosis.tried},
            "suspicion": diagnosis.suspicion,
            "notes": diagnosis.remarks,
        })  # fmt: skip
        return 0 if is_well else EXIT_FAILED
    console = make_console()
    if diagnosis.as_loaded is not None:
        table = Table(title=str(head), title_justify="left")
        table.add_column("setting")
        for i in range(len(diagnosis.as_loaded.conditional)):
            table.add_column(f"draft {i + 1}", justify="right")
        table.add_column("length", justify="right")
        rows = [("as it is", diagnosis.as_loaded)]
        rows += [(f.name, f.result) for f in diagnosis.tried]
        for name, result in rows:
            rates = [f"{rate:.2f}" for rate in result.conditional]
            table.add_row(name, *rates, f"{result.acceptance_length:.2f}")
        console.print(table)
    for problem in diagnosis.problems:
        console.print(Text(f"✗ {problem}", style="red"), soft_wrap=True)
    if not diagnosis.problems:
        style = "green" if is_well else "yellow"
        console.print(Text(diagnosis.verdict, style=style), soft_wrap=True)
    for finding in diagnosis.changes:
        console.print(Text(f"  change: {finding.cure}", style="bold"), soft_wrap=True)
    for note in diagnosis.remarks:
        console.print(Text(f"  note: {note}"), soft_wrap=True)
    return 0 if is_well else EXIT_FAILED
