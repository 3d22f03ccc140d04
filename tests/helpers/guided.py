"""A tokenizer for tiny models, and guided greedy decoding by brute force, without XGrammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from trtspec import GuidedDecodingParams

VOCAB, EOS = 97, 2
SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": EOS}
LONG = ["\n", "ab", "abc", "xy", "))", '":', '{"', "12", "zz", ", ", "true", "aa", "b;"]
_CHARACTERS = [chr(c) for c in range(32, 127)]


def token_texts() -> list[str]:
    """The text of each of the 97 tokens: special ones, some of several characters, characters."""
    kept = [c for c in _CHARACTERS if c not in "~`^#$%&*@!?<>|"]
    return [*SPECIAL, *LONG, *kept]


def save_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Saves it beside a tiny model."""
    texts = token_texts()
    assert len(set(texts)) == len(texts) == VOCAB
    tokenizer = Tokenizer(WordLevel({t: i for i, t in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(path)
    return fast


class Language(NamedTuple):
    """A grammar, and what tells by other means which texts are of it."""

    params: GuidedDecodingParams
    is_prefix: Callable[[str], bool]  # of some text of it
    is_whole: Callable[[str], bool]


def of_regex(pattern: str) -> Language:
    return Language(
        GuidedDecodingParams(regex=pattern),
        lambda text: regex.fullmatch(pattern, text, partial=True) is not None,
        lambda text: regex.fullmatch(pattern, text) is not None,
    )


def of_choice(*texts: str) -> Language:
    return Language(
        GuidedDecodingParams(choice=texts),
        lambda text: any(whole.startswith(text) for whole in texts),
        lambda text: text in texts,
    )


def of_nested() -> Language:
    """Parentheses around x, at least one pair: no regular language."""

    def is_prefix(text: str) -> bool:
        found = regex.fullmatch(r"(\(*)(x?)(\)*)", text)
        if found is None:
            return False
        opened, x, closed = (len(part) for part in found.groups())
        return (opened > 0 or not x) and (closed == 0 or (x == 1 and closed <= opened))

    def is_whole(text: str) -> bool:
        opened = text.count("(")
        return opened > 0 and text == "(" * opened + "x" + ")" * opened

    # With `inner ::= root | "x"` XGrammar 0.2.7 leaves the token "))" out of its masks.
    grammar = 'root ::= "(" inner ")"\ninner ::= "(" inner ")" | "x"'
    return Language(GuidedDecodingParams(grammar=grammar), is_prefix, is_whole)


def of_records() -> Language:
    """JSON records of a few values, enumerated."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["ab", 12, None]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    values = itertools.product(['"ab"', "12", "null"], ["true", "false"])
    gap = r"[ \n\t\r]*"  # white space may stand where JSON lets it
    parts = [rf'\{{{gap}"a"{gap}:{gap}{a}{gap},{gap}"b"{gap}:{gap}{b}{gap}\}}' for a, b in values]
    pattern = "|".join(parts)
    return Language(
        GuidedDecodingParams(json=schema),
        lambda text: regex.fullmatch(pattern, text, partial=True) is not None,
        lambda text: (
            regex.fullmatch(pattern, text) is not None and isinstance(json.loads(text), dict)
        ),
    )


LANGUAGES = [
    of_regex(r"[abc]{3,9}(xy|zz);"),
    of_choice("abcabc", "abx", "true", "xyzzy, true"),
    of_nested(),
    of_regex(r"([0-9]{1,3}, )*[a-f]+\."),
    of_records(),
]


def allowed(language: Language, text: str) -> list[int]:
    """The tokens that may follow `text`."""
    texts = token_texts()
    tokens = [i for i in range(3, VOCAB) if language.is_prefix(text + texts[i])]
    return [*tokens, EOS] if language.is_whole(text) else tokens


class GuidedOracle:
    """transformers' greedy decoding over the allowed tokens, one at a time from scratch."""

    def __init__(self, model_dir: Path, device: str = "cpu"):
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.to(device)

    @torch.inference_mode()
    def extend(
        self,
        prompt: Sequence[int],
        count: int,
        language: Language | None,
        marker: Sequence[int] = (),
    ) -> list[int]:
        """The output; `language` holds after `marker`, before which the end may not come."""
        output: list[int] = []
        texts, begin = token_texts(), 0 if not marker else -1
        while len(output) < count and EOS not in output:
            ids = torch.tensor([[*prompt, *output]], device=self.device)
            logits: Any = self.model(ids).logits[0, -1].cpu()
            if language is not None and begin < 0:
                logits[EOS] = -torch.inf
            elif language is not None:
                text = "".join(texts[i] for i in output[begin:])
                keep = torch.zeros(VOCAB, dtype=torch.bool)
                keep[allowed(language, text)] = True
                assert keep.any(), text
                logits = logits.masked_fill(~keep, -torch.inf)
            output.append(int(logits.argmax()))
            if begin < 0 and tuple(output[-len(marker) :]) == tuple(marker):
                begin = len(output)
        return output
