"""What `quant="fp8"` changes in a model's distributions, on the pages of docs/.

    python benchmarks/fp8_quality.py --model smollm2-135m

For each token of the text: the Kullback-Leibler divergence KL(float || FP8) in nats, whether the
likeliest next token is the same, and both perplexities.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from trtspec.attention.dense import DensePass
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.place import WeightForm
from trtspec.checkpoints.tokenizer import load_tokenizer
from trtspec.checkpoints.weights import load_decoder
from trtspec.checkpoints.zoo import resolve_model
from trtspec.models.decoder import Decoder

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
    models = [
        load_decoder(directory, dtype, device, TorchAttention(), form=form)
        for form in (WeightForm(), WeightForm(quantizes=True))
    ]
    divergences, same, losses = [], [], [[], []]
    with torch.no_grad():
        for text in texts:
            float_log, fp8_log = (log_probabilities(model, text) for model in models)
            divergences.append((float_log.exp() * (float_log - fp8_log)).sum(-1))
            same.append(float_log.argmax(-1) == fp8_log.argmax(-1))
            for loss, log in zip(losses, (float_log, fp8_log), strict=True):
                loss.append(-log[:-1].gather(1, text[1:, None])[:, 0])
    divergence = torch.cat(divergences)
    agreement = torch.cat(same).float().mean().item()
    before, after = (torch.cat(loss).mean().exp().item() for loss in losses)
    print(
        f"{len(divergence)} tokens, {args.dtype}: KL mean {divergence.mean():.4f}, median "
        f"{divergence.median():.4f}, 99 % {divergence.quantile(0.99):.4f}; the same top token "
        f"{100 * agreement:.1f} %; perplexity {before:.3f} -> {after:.3f}"
    )


def log_probabilities(model: Decoder, text: Tensor) -> Tensor:
    """Returns those of each next token, [L, V] float32."""
    one_document = DensePass(torch.zeros(1, len(text), dtype=torch.int64, device=text.device))
    positions = torch.arange(len(text), device=text.device)
    logits = model.compute_logits(model(text, positions, one_document))
    assert isinstance(logits, Tensor)
    return logits.float().log_softmax(-1)


if __name__ == "__main__":
    main()
