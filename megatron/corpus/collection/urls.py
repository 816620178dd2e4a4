"""Lists of web addresses: what leads to no prose is left out, and each page stays once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import tldextract
from w3lib.url import canonicalize_url

from megatron.config.flags import option
from megatron.corpus.collection.blacklist import DOMAINS, EXTENSIONS
from megatron.corpus.collection.command import required
from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.lines import Mapped
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch, expand_inputs
from megatron.util.digests import hash64

_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.IGNORECASE)
_TRACKING = re.compile(r"(utm_\w+|fbclid|gclid|mc_cid|mc_eid|igshid|ref_src)", re.IGNORECASE)


@dataclass(frozen=True)
class UrlConfig:
    """Choosing web addresses."""

    input: tuple[str, ...] = option(())
    """Folders with *.txt files, or files, of one address a line, plain or packed."""
    output: str | None = option(None)
    """The file to write; .gz or .zst at its end packs it."""
    rejected: str | None = option(None)
    """A file for the addresses left out, each behind its reason and a tab."""
    min_length: int = option(9)
    """Leave out addresses with fewer characters."""
    domains: str | None = option(None)
    """A file of further domains to leave out, one a line, with or without public suffix."""
    extensions: tuple[str, ...] = option(())
    """Further endings of files to leave out."""
    only_listed: bool = option(False)
    """Leave out what --domains and --extensions name, and not the built-in lists."""


@dataclass(frozen=True)
class UrlStep:
    """Sorts addresses out, and keeps of equal ones the first."""

    min_length: int
    domains: frozenset[str]
    extensions: frozenset[str]

    def build(self) -> BatchStep:
        fault = self.fault_finder()
        # 8 bytes of a hash instead of the address: of 100 million, two collide at 0.03 %
        seen: set[int] = set()

        def step(batch: LineBatch) -> Mapped:
            kept: list[str] = []
            rejected: list[str] = []
            mapped = Mapped([])
            for line in batch.lines:
                url = line.decode("utf-8", "replace").strip()
                if not url:
                    continue
                mapped.documents += 1
                reason = fault(url)
                if reason is None:
                    page = hash64(same_page(url).encode())
                    reason = "duplicate" if page in seen else None
                    seen.add(page)
                if reason is None:
                    kept.append(url)
                    mapped.counts["addresses kept"] += 1
                else:
                    rejected.append(f"{reason}\t{url}")
                    mapped.counts[f"left out: {reason}"] += 1
            mapped.outputs = ["".join(u + "\n" for u in urls).encode() for urls in (kept, rejected)]
            return mapped

        return step

    def fault_finder(self) -> Callable[[str], str | None]:
        """What is wrong with an address; None: nothing."""
        # The list of public suffixes that lies in the package: nothing is fetched, nothing cached.
        extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

        def fault(url: str) -> str | None:
            if len(url) < self.min_length:
                return "too short"
            host = host_of(url)
            if host is None:
                return "malformed"
            parts = extract(host)
            if not parts.suffix and not _is_address(host):
                return "malformed"
            registered = f"{parts.domain}.{parts.suffix}"
            if parts.domain in self.domains or registered in self.domains or host in self.domains:
                return "domain"
            name = urlsplit(url).path.lower().rpartition("/")[2]
            if "." in name and name.rpartition(".")[2] in self.extensions:
                return "extension"
            return None

        return fault


def host_of(url: str) -> str | None:
    """The host of a well-formed http or https address, in small letters; None: it is none."""
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not host or "\ufffd" in url:
        return None
    if any(character.isspace() or ord(character) < 32 for character in url):
        return None
    if _is_address(host):
        return host
    try:
        ascii_host = host.encode("idna").decode("ascii").rstrip(".")
    except UnicodeError:
        return None
    labels = ascii_host.split(".")
    is_name = len(labels) > 1 and len(ascii_host) < 254 and all(map(_LABEL.fullmatch, labels))
    return ascii_host if is_name else None


def same_page(url: str) -> str:
    """A form that two addresses of a page share.

    Scheme, `www.`, default port, fragment, order and encoding of the query, a slash at the end and
    parameters that only track visitors make no difference.
    """
    parts = urlsplit(canonicalize_url(url))
    host = (parts.hostname or "").rstrip(".").removeprefix("www.")
    port = f":{parts.port}" if parts.port not in (None, 80, 443) else ""
    query = "&".join(
        item for item in parts.query.split("&") if not _TRACKING.fullmatch(item.partition("=")[0])
    )
    return urlunsplit(("", host + port, parts.path.rstrip("/"), query, ""))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def choose_urls(config: UrlConfig, running: RunConfig) -> Report:
    """Writes the addresses that are worth fetching, in the order of the input.

    A run that was stopped starts anew: what it has seen is in memory only.

    Raises:
        ConfigError: a flag is missing.
        OSError: a file cannot be read or written.
    """
    required(input=config.input, output=config.output)
    assert config.output is not None
    built_in = (frozenset[str](), frozenset[str]()) if config.only_listed else (DOMAINS, EXTENSIONS)
    listed = Path(config.domains).read_text("utf-8").split() if config.domains else []
    step = UrlStep(
        config.min_length,
        built_in[0] | {domain.lower() for domain in listed},
        built_in[1] | {extension.lower().lstrip(".") for extension in config.extensions},
    )
    output = Path(config.output)
    rejected = Path(config.rejected) if config.rejected else None
    job = Job(
        "blacklist_urls",
        expand_inputs(config.input, (".txt",)),
        [output, *([rejected] if rejected else [])],
        step if rejected else KeptOnly(step),
        resumable=False,
    )
    return run(job, running)


@dataclass(frozen=True)
class KeptOnly:
    """A step of which only the first output is written."""

    step: UrlStep

    def build(self) -> BatchStep:
        inner = self.step.build()

        def first_output(batch: LineBatch) -> Mapped:
            mapped = inner(batch)
            mapped.outputs = mapped.outputs[:1]
            return mapped

        return first_output
