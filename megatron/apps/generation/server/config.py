"""Flags of ``tools/run_text_generation_server.py`` in addition to the training flags, and the
limits and defaults of requests."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.apps.generation.memory import ServedConfig
from megatron.config import ConfigError
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, Bounds, flag_of, option

KEY_VARIABLE = "MEGATRON_API_KEY"
_PORT = Bounds(lambda value: 0 <= value < 65536, "must be in [0, 65535]")
_TEMPERATURE = Bounds(lambda value: 0 < value <= 100, "must be in (0, 100]")
_TOP_K = Bounds(lambda value: 0 <= value <= 1000, "must be in [0, 1000]")


@dataclass(frozen=True)
class ServiceLimits:
    """Limits on each request. The server's flags describe the fields."""

    tokens: int = 12000
    request_seconds: float = 600.0
    request_bytes: int = 4 * 2**20
    read_seconds: float = 30.0
    text_seconds: float = 30.0

    @property
    def held_bytes(self) -> int:
        """Maximum total bytes of all large request bodies that have not been tokenized yet."""
        return 16 * self.request_bytes


@dataclass(frozen=True)
class RequestDefaults:
    """Sampling defaults of requests. As in Megatron's API, 0 keeps all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0


@dataclass(frozen=True)
class ServerConfig(ServedConfig):
    """Server: address, access and limits on concurrent work."""

    host: str = option("127.0.0.1")
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all network interfaces.
    Any address that is not loopback needs --api-key."""
    port: int = option(5000, bounds=_PORT)
    """Port to listen on. 0 chooses a free port, which is printed."""
    api_key: str | None = option(None)
    """Key that clients must send as "Authorization: Bearer KEY". To keep it out of the process
    list, set the environment variable MEGATRON_API_KEY or --api-key-file instead."""
    api_key_file: str | None = option(None)
    """File whose first line is the API key."""
    allow_origin: tuple[str, ...] = option((), aliases=("--allowed-origins",))
    """Other sites whose pages may use the server, such as https://example.org. * allows all sites
    and needs --api-key."""
    served_model_name: str | None = option(None, derived="the name of the folder of --load")
    """Model name that clients see."""
    temperature: float = option(1.0, bounds=_TEMPERATURE)
    """Default temperature of requests."""
    top_k: int = option(0, flag="--top_k", aliases=("--top-k",), bounds=_TOP_K)
    """For requests that set neither top_k nor top_p: sample from this number of most probable
    tokens. 0 keeps all."""
    top_p: float = option(0.0, flag="--top_p", aliases=("--top-p",), bounds=SHARE)
    """For requests that set neither top_k nor top_p: sample from the fewest tokens whose
    probabilities sum to at least this. 0 keeps all."""
    out_seq_length: int | None = option(None, note="every request says how many tokens it wants")
    inference_batch_times_seqlen_threshold: int | None = option(
        None,
        note="it says from which size a batch is cut for a pipeline, and every step makes a batch "
        "of its own here",
    )
    max_tokens_to_oom: int = option(12000, bounds=POSITIVE)
    """Maximum tokens of a request: number of texts x (longest prompt + new tokens)."""
    max_batch_size: int = option(64, aliases=("--max-num-seqs",), bounds=POSITIVE)
    """Maximum number of texts that are generated concurrently. Further texts wait."""
    max_num_batched_tokens: int = option(512, bounds=POSITIVE)
    """Maximum number of tokens in one step of the model. Longer prompts take several steps."""
    max_waiting: int = option(1024, bounds=POSITIVE)
    """Maximum number of waiting texts. Further requests get status 429."""
    request_timeout: float = option(600.0, bounds=POSITIVE)
    """Seconds after which an unfinished request is aborted with status 504."""
    read_timeout: float = option(30.0, bounds=POSITIVE)
    """Seconds within which a client must have sent its request."""
    write_timeout: float = option(30.0, bounds=POSITIVE)
    """Seconds after which a client that does not read its response is disconnected."""
    max_request_bytes: int = option(4 * 2**20, bounds=POSITIVE)
    """Maximum length of a request body in bytes."""
    max_connections: int = option(1024, bounds=POSITIVE)
    """Maximum number of concurrent connections. Further ones get status 503. The limit is lower if
    the process cannot open enough files (ulimit -n)."""
    drain_seconds: float = option(20.0, bounds=NOT_NEGATIVE)
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C. torchrun kills the
    process after 30 seconds."""
    chat_template: str | None = option(None, derived="that of the tokenizer")
    """File with a chat template in Jinja."""
    log_prompts: bool = option(False)
    """Log prompts, except those of requests with no_log."""

    def __post_init__(self) -> None:
        """Check the flags. Raises ConfigError for contradictory values or an unreadable file."""
        if self.top_k and self.top_p:
            raise ConfigError(f"--top_k {self.top_k} and --top_p {self.top_p}: give one of them")
        drafts = self.num_speculative_tokens
        if self.max_num_batched_tokens <= self.max_batch_size * (1 + drafts):
            more = f" x (1 + --num-speculative-tokens {drafts})" if drafts else ""
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be more than "
                f"--max-batch-size {self.max_batch_size}{more}: each text takes one and its "
                "drafts, prompts the rest"
            )
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("--api-key and --api-key-file: give one of them")
        if self.key is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines use the server, and there is no key: add "
                f"--api-key, --api-key-file or {KEY_VARIABLE}, or leave --host out"
            )
        for origin in self.allow_origin:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and not (scheme in ("http", "https") and rest and "/" not in rest):
                raise ConfigError(
                    f"--allow-origin {origin} is not a site: give https://example.org, with its "
                    "port if it has one, and nothing after it"
                )
        if self.key is None and "*" in self.allow_origin:
            raise ConfigError(
                "--allow-origin * lets every page that a browser here shows use the server, and "
                "there is no key: add --api-key, or name the sites"
            )

    @property
    def texts(self) -> int:
        """Maximum number of texts that run concurrently."""
        return self.max_batch_size

    @property
    def limits(self) -> ServiceLimits:
        """Limits on each request."""
        return ServiceLimits(
            self.max_tokens_to_oom, self.request_timeout, self.max_request_bytes, self.read_timeout
        )

    @property
    def template(self) -> str | None:
        """Contents of the --chat-template file, or None without the flag. Raises ConfigError if the
        file cannot be read."""
        path = self.chat_template
        return None if path is None else _text(path, f"--chat-template {path}")

    @property
    def notes(self) -> list[str]:
        """Messages about given flags that have no effect."""
        return [
            f"{flag_of(field)} {value} changes nothing: {field.metadata['note']}"
            for field in fields(self)
            if field.metadata.get("note") and (value := getattr(self, field.name)) is not None
        ]

    @property
    def key(self) -> str | None:
        """API key that clients must send, or None if they need no key."""
        if self.api_key_file is None:
            flag = "--api-key" if self.api_key is not None else KEY_VARIABLE
            key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        else:
            flag = f"--api-key-file {self.api_key_file}"
            key = next(iter(_text(self.api_key_file, flag).splitlines()), "")
        if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
            raise ConfigError(f"{flag}: the key must be printable ASCII and not empty")
        return key


def is_loopback(host: str) -> bool:
    """Return whether an address or host name can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} is not a text file") from None
