"""What `quant="fp8"` changes in a model's distributions, on the pages of docs/.

    python benchmarks/fp8_quality.py --model smollm2-135m

For each token of the text: the Kullback-Leibler divergence KL(float || FP8) in nats, whether the
likeliest next token is the same, and perplexities. Of weights that are rounded, as on the CPU; and
of products that round activations too, as on CUDA.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from trtspec.attention.dense import DensePass
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.place import LoadOptions, WeightForm
from trtspec.checkpoints.tokenizer import load_tokenizer
from trtspec.checkpoints.weights import load_decoder
from trtspec.checkpoints.zoo import resolve_model
from trtspec.models.decoder import Decoder

FORMS = {
    "weights": WeightForm(quantizes=True),
    "weights and activations": WeightForm(keeps_fp8=True, quantizes=True),
}
PAGES = Path(__file__).parents[1] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    args = parser.parse_args()
    directory, device = Path(resolve_model(args.model)), torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    pages = [page.read_text("utf-8") for page in sorted(PAGES.glob("*.md"))]
    ids = torch.tensor(tokenizer.encode("\n\n".join(pages)))
    count = min(args.texts, len(ids) // args.length)
    starts = torch.linspace(0, len(ids) - args.length, count).long().tolist()
    texts = [ids[start : start + args.length].to(device) for start in starts]
    print(f"{count} texts of {args.length} tokens, {args.dtype}")
    originals = all_log_probabilities(WeightForm(), directory, dtype, texts)
    print(f"float: perplexity {perplexity(originals, texts):.3f}")
    for name, form in FORMS.items():
        logs = all_log_probabilities(form, directory, dtype, texts)
        divergence = torch.cat(
            [(p.exp() * (p - q)).sum(-1) for p, q in zip(originals, logs, strict=True)]
        )
        same = torch.cat(
            [p.argmax(-1) == q.argmax(-1) for p, q in zip(originals, logs, strict=True)]
        )
        print(
            f"{name}: KL mean {divergence.mean():.4f}, median {divergence.median():.4f}, 99 % "
            f"{divergence.quantile(0.99):.4f}; the same top token {100 * same.float().mean():.1f} "
            f"%; perplexity {perplexity(logs, texts):.3f}"
        )


def all_log_probabilities(
    form: WeightForm, directory: Path, dtype: torch.dtype, texts: list[Tensor]
) -> list[Tensor]:
    """Returns those of a model's next tokens in each text, on the CPU."""
    device = texts[0].device
    options = LoadOptions(dtype=dtype, device=device, backend=TorchAttention(), form=form)
    model = load_decoder(directory, options)
    with torch.no_grad():
        return [log_probabilities(model, text).cpu() for text in texts]


def perplexity(logs: list[Tensor], texts: list[Tensor]) -> float:
    losses = [
        -log[:-1].gather(1, text[1:, None].cpu()) for log, text in zip(logs, texts, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


def log_probabilities(model: Decoder, text: Tensor) -> Tensor:
    """Returns those of each next token, [L, V] float32."""
    one_document = DensePass(torch.zeros(1, len(text), dtype=torch.int64, device=text.device))
    positions = torch.arange(len(text), device=text.device)
    logits = model.compute_logits(model(text, positions, one_document))
    assert isinstance(logits, Tensor)
    return logits.float().log_softmax(-1)


if __name__ == "__main__":
    main()
