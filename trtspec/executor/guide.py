"""`Guide`: compiles the grammars of requests, which wait for that."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from ..api.sampling_params import SamplingParams
from ..errors import ConfigError, RequestError
from ..guided.compiler import Compilation, GrammarCompiler
from ..models.config import DecoderConfig
from .admission import end_ids
from .request import Request

COMPILE_SECONDS = 60.0
"""A grammar that takes longer ends its request with an error."""
POLL_SECONDS = 0.05


class Guide:
    """Compiles grammars of requests.

    Args:
        model: says how large the vocabulary is, and which tokens end an output.
        skips_wrong_tokens: of forced acceptance, whose output follows no grammar.
    """

    def __init__(self, model: DecoderConfig, skips_wrong_tokens: bool):
        self.model, self.skips_wrong_tokens = model, skips_wrong_tokens
        self.compiling: dict[int, tuple[Request, Compilation]] = {}
        self._tokenizer: Any = None
        self._compiler: GrammarCompiler | None = None

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Sets what grammars are compiled for: a tokenizer of transformers, or None."""
        self._tokenizer, self._compiler = tokenizer, None

    @property
    def compiler(self) -> GrammarCompiler:
        """Raises RequestError without a tokenizer, ConfigError without XGrammar."""
        if self._tokenizer is None:
            raise RequestError(
                "SamplingParams.guided_decoding needs the model's tokenizer: use LLM with a model "
                "directory that has one, or executor.set_tokenizer(tokenizer)."
            )
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self._tokenizer, self.model.vocab_size, self.model.eos_token_ids
            )
        return self._compiler

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError where no grammar can be served."""
        if params.guided_decoding is not None:
            try:
                self.compiler.marker(params.guided_decoding)
            except ConfigError as error:
                raise RequestError(str(error)) from error

    def start(self, request: Request) -> None:
        """Starts to compile a request's grammar."""
        params = request.sampling_params
        assert params.guided_decoding is not None
        ends = self.compiler.ends_of(end_ids(params, self.model))
        compilation = self.compiler.compile(
            params.guided_decoding, sorted(ends), request.prompt_token_ids
        )
        self.compiling[request.request_id] = request, compilation

    def compiled(self, waits: bool) -> Iterable[tuple[Request, str | None]]:
        """Yields requests whose grammar is compiled, and why it failed if it did.

        Sets `has_wrong_grammar` where the grammar is to blame.

        Args:
            waits: there is nothing else to do.
        """
        for request_id, (request, compilation) in list(self.compiling.items()):
            if request.is_finished:  # cancelled meanwhile
                compilation.future.cancel()
                del self.compiling[request_id]
        if waits and self.compiling:
            futures = [compilation.future for _, compilation in self.compiling.values()]
            wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for request_id, (request, compilation) in list(self.compiling.items()):
            error, future = None, compilation.future
            if not future.done():
                if compilation.seconds < COMPILE_SECONDS:
                    continue
                compilation.give_up()
                request.has_wrong_grammar = True
                error = f"its grammar took more than {COMPILE_SECONDS:.0f} s to compile"
            elif (raised := future.exception()) is not None:
                request.has_wrong_grammar = isinstance(raised, RequestError)
                error = str(raised)
            else:
                request.grammar = future.result()
                request.grammar.skips_wrong_tokens = self.skips_wrong_tokens
            yield request, error
            self.compiling.pop(request_id, None)

    def close(self) -> None:
        """Forgets tokenizer and grammars."""
        self.set_tokenizer(None)
        self.compiling.clear()
