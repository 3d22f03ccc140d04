"""Guided decoding on a real model: JSON for 30 schemas, with every drafter, on CPU or CUDA.

    python benchmarks/guided_json.py --modes none,ngram,eagle3 --json-file out.json

For each mode it prints
- how many outputs fit their schema, as `jsonschema` says;
- how many equal those of plain decoding under the same grammars;
- the acceptance length with drafts masked and unmasked, and without grammars.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jsonschema

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    GuidedDecodingParams,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig

SCHEMAS = Path(__file__).parent / "schemas.jsonl"
MODEL = "smollm2-135m"


def config_of(mode: str) -> DecodingBaseConfig | None:
    """Returns the config of a mode, with K of the heads in the package."""
    if mode == "ngram":
        return NGramDecodingConfig(max_draft_len=4)
    if mode == "eagle3":
        return EagleDecodingConfig(max_draft_len=4, speculative_model=f"{MODEL}-eagle3")
    if mode == "mtp":
        return MTPDecodingConfig(num_nextn_predict_layers=3, speculative_model=f"{MODEL}-mtp")
    if mode == "draft_target":
        return DraftTargetDecodingConfig(max_draft_len=3, speculative_model=MODEL)
    if mode != "none":
        raise SystemExit(f"--modes: {mode!r} is none of none, ngram, eagle3, mtp, draft_target.")
    return None


def fits(text: str, schema: Any) -> bool:
    """Whether the text is JSON of the schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def decode(llm: LLM, cases: list[dict[str, Any]], is_guided: bool, max_tokens: int) -> Any:
    """Returns the outputs, and the acceptance length over all of them."""
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            guided_decoding=GuidedDecodingParams(json=case["schema"]) if is_guided else None,
        )
        for case in cases
    ]
    llm.reset_stats()
    started = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": c["prompt"]}] for c in cases], params)
    seconds = time.perf_counter() - started
    steps = sum(output.spec_stats.num_steps for output in outputs)
    accepted = sum(o.spec_stats.acceptance_length * o.spec_stats.num_steps for o in outputs)
    return outputs, accepted / max(steps, 1), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="none,ngram,eagle3,mtp,draft_target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--max-batch-size", type=int, default=10)
    parser.add_argument("--json-file", type=Path)
    args = parser.parse_args()
    cases = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    plain: list[list[int]] | None = None
    rows = []
    for mode in args.modes.split(","):
        with LLM(
            MODEL,
            config_of(mode),
            device=args.device,
            dtype=args.dtype,
            max_batch_size=args.max_batch_size,
            max_seq_len=512,
        ) as llm:
            outputs, masked, seconds = decode(llm, cases, True, args.max_tokens)
            tokens = [output.outputs[0].token_ids for output in outputs]
            plain = plain or (tokens if mode == "none" else None)
            row: dict[str, Any] = {"mode": mode, "seconds": round(seconds, 1), "masked": masked}
            texts = [output.outputs[0].text for output in outputs]
            good = [fits(t, case["schema"]) for t, case in zip(texts, cases, strict=True)]
            row["valid"] = sum(good)
            row["invalid"] = [t for t, is_good in zip(texts, good, strict=True) if not is_good]
            if plain is not None:
                row["equal"] = sum(a == b for a, b in zip(tokens, plain, strict=True))
            if mode not in ("none", "ngram"):
                llm.executor.runner.masks.num_masked_drafts = 0
                _, row["unmasked"], _ = decode(llm, cases, True, args.max_tokens)
                llm.executor.runner.masks.num_masked_drafts = 1
                _, row["first_masked"], _ = decode(llm, cases, True, args.max_tokens)
            if mode != "none":
                _, row["free"], _ = decode(llm, cases, False, 60)
        rows.append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
    if args.json_file:
        args.json_file.write_text(json.dumps(rows, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
