"""`ServerConfig`: what a server serves, where, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from ..checks import is_int, is_number
from ..errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, and what it takes.

    Args:
        served_model_name: the name of the model in requests. None: the directory's.
        api_key: what clients send as `Authorization: Bearer …`. None: no key is asked for.
        shutdown_timeout: seconds that running requests have, after the signal to end.
        max_body_bytes: of a request. body_timeout: seconds in which it must arrive.
        header_timeout: seconds in which a request's head must arrive.
        write_timeout: seconds in which a client must read what is ready for it.
        max_n: completions of one prompt. max_prompts: prompts of one request.
        max_stop: stop strings, and stop tokens. max_logprobs: alternatives per token.
        max_prompt_logprobs: log probabilities of a request's prompts. As many as are allowed by
            default take 0.3 s to write as JSON, for which other clients wait.
        plain_step_seconds: of a step without drafts, by batch size, for the page's speed-up.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 4 * 2**20
    body_timeout: float = 30.0
    header_timeout: float = 20.0
    write_timeout: float = 60.0
    max_n: int = 16
    max_prompts: int = 64
    max_stop: int = 16
    max_logprobs: int = 20
    max_prompt_logprobs: int = 2**18
    plain_step_seconds: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_host = isinstance(self.host, str) and self.host.strip() != ""  # "" would be all of them
        allowed = "an address of this machine, like '127.0.0.1', or '0.0.0.0' for all of them"
        self._check("host", is_host, allowed)
        for name, high in (
            ("port", 65535),
            ("max_body_bytes", 2**30),
            ("max_n", 128),
            ("max_prompts", 4096),
            ("max_stop", 1024),
            ("max_logprobs", 20),
            ("max_prompt_logprobs", 2**30),
        ):
            self._check(name, is_int(getattr(self, name), 0, high), f"an int in 0 … {high}")
        for name in ("shutdown_timeout", "body_timeout", "header_timeout", "write_timeout"):
            value = getattr(self, name)
            self._check(name, is_number(value) and 0 <= value <= 86400, "seconds in 0 … 86400")
        if self.api_key == "":
            raise ConfigError("The API key is empty. Give one, or leave it out to ask for no key.")
        if self.api_key is not None:
            is_key = isinstance(self.api_key, str) and self.api_key.strip() == self.api_key
            if not is_key or not self.api_key.isascii():  # never shown
                raise ConfigError("The API key must be ASCII text without spaces around it.")

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        if not is_right:
            value = shown(getattr(self, name))
            raise ConfigError(f"ServerConfig.{name}={value}: it must be {allowed}.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
