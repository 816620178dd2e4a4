"""Selection of URLs: URLs that do not point to prose are dropped, and each page is kept only once.

datatrove's URLFilter downloads the list of public suffixes, ignores file extensions and malformed
URLs, and keeps duplicates.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import tldextract
from w3lib.url import canonicalize_url

from megatron.apps.corpus.collection.json_files import BatchResult, BatchStep
from megatron.apps.corpus.collection.line_job import JobReport, LineJobConfig, required, run_step
from megatron.apps.corpus.preprocessing.inputs import LineBatch, expand_inputs
from megatron.config.flags import option
from megatron.util.digests import hash64

_LONGEST = 1 << 16  # maximum length of a URL; servers and browsers do not accept longer ones
_LONGEST_HOST = 512
"""Maximum number of characters of a host with user and port. A host name has at most 253. The limit
is needed because Python normalises hosts in quadratic time."""
_AFTER_HOST = re.compile(r"[/?#]")
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.IGNORECASE)
_TRACKING = re.compile(r"(utm_\w+|fbclid|gclid|mc_cid|mc_eid|igshid|ref_src)", re.IGNORECASE)
DOMAINS = frozenset(
    # images
    "500px artstation deviantart flickr gfycat giphy gyazo imagebam imageshack imgbb imgflip imgur "
    "instagram photobucket pinimg pinterest pixiv postimg shutterstock tinypic tumblr unsplash "
    # video and audio
    "bandcamp dailymotion liveleak mixcloud netflix soundcloud spotify streamable tiktok twitch "
    "vevo vimeo vine vocaroo youtu youtube ytimg "
    # social networks and chat
    "discord discordapp facebook fbcdn linkedin mastodon redd reddit redditmedia snapchat t "
    "telegram twimg twitter vk weibo whatsapp x "
    # shops and their short links
    "aliexpress amazon amzn apple bestbuy ebay etsy ikea newegg pcpartpicker steampowered walmart "
    # files, code, and services with little text on a single page
    "akamaihd archive bitbucket cloudfront dropbox github gitlab google goo googleusercontent "
    "icloud mediafire mega onedrive pastebin rapidshare scribd sourceforge zippyshare "
    # polls, memes, URL shorteners
    "bit imgfave knowyourmeme lmgtfy memegenerator quickmeme strawpoll tinyurl 9gag "
    # better read from its dumps (wikipedia.py)
    "wikimedia wikipedia "
    # pornography
    "e621 erome pornhub redtube spankbang xhamster xnxx xvideos".split()
)
"""Domains to leave out, without public suffix: `youtube` matches youtube.com and youtube.co.uk."""

EXTENSIONS = frozenset(
    # archives and programs
    "7z apk app bin bz2 deb dmg exe gz iso jar msi pkg rar rpm tar tgz xz zip zst "
    # images
    "ai bmp eps gif gifv ico jpeg jpg png psd svg tif tiff webp "
    # audio and video
    "3gp aac aif avi flac flv m4a m4v mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv opus qt ram swf "
    "wav webm wma wmv "
    # documents and data that are not web pages
    "csv dat doc docx epub json log mobi odt pdf pps ppt pptx sql txt xls xlsx xml "
    # source code and fonts
    "c cpp css h js otf py ttf woff woff2".split()
)
"""File extensions to leave out, in lower case."""


@dataclass(frozen=True)
class UrlConfig:
    """Options for selecting URLs."""

    input: tuple[str, ...] = option(())
    """Files with one URL per line, or folders with such *.txt files, plain or compressed."""
    output: str | None = option(None)
    """File to write, compressed if its name ends in .gz or .zst."""
    rejected: str | None = option(None)
    """File for the URLs that are left out, each preceded by the reason and a tab."""
    min_length: int = option(9)
    """Minimum number of characters of a URL. Shorter URLs are left out."""
    domains: str | None = option(None)
    """File with further domains to leave out, one per line, with or without public suffix."""
    extensions: tuple[str, ...] = option(())
    """Further file extensions to leave out."""
    only_listed: bool = option(False)
    """Leave out only the entries of --domains and --extensions, not those of the built-in lists."""


def choose_urls(config: UrlConfig, running: LineJobConfig) -> JobReport:
    """Write the URLs worth fetching, in input order. An interrupted run starts over, because the
    set of pages seen is only in memory."""
    inputs, output = required(config, "input", "output")
    return run_step(
        config,
        running,
        "blacklist_urls",
        _url_step,
        expand_inputs(inputs, (".txt",)),
        [output, config.rejected],
        keys=None,
        resumable=False,
    )


def _url_step(config: UrlConfig) -> BatchStep:
    fault = fault_finder(config)
    # 64-bit hashes save memory. Among 100 million URLs, the probability of a collision is 0.03 %.
    seen: set[int] = set()

    def step(batch: LineBatch) -> BatchResult:
        kept: list[str] = []
        rejected: list[str] = []
        result = BatchResult([])
        for line in batch.lines:
            url = line.decode("utf-8", "replace").strip()
            if not url:
                continue
            result.documents += 1
            reason = fault(url)
            form = None if reason else same_page(url)
            if form is None:
                reason = reason or "malformed"
            else:
                page = hash64(form.encode())
                reason = "duplicate" if page in seen else None
                seen.add(page)
            if reason is None:
                kept.append(f"{url}\n")
                result.counts["addresses kept"] += 1
            else:
                rejected.append(f"{reason}\t{url}\n")
                result.counts[f"left out: {reason}"] += 1
        result.outputs = ["".join(kept).encode(), "".join(rejected).encode()]
        return result

    return step


def fault_finder(config: UrlConfig) -> Callable[[str], str | None]:
    """Return a function that returns the reason for leaving out a URL, or None to keep it."""
    domains, extensions = (set(), set()) if config.only_listed else ({*DOMAINS}, {*EXTENSIONS})
    try:
        listed = Path(config.domains).read_text("utf-8").split() if config.domains else []
    except UnicodeDecodeError as error:
        raise ValueError(f"--domains {config.domains} is not UTF-8: {error}") from None
    domains |= {domain.lower() for domain in listed}
    extensions |= {extension.lower().lstrip(".") for extension in config.extensions}
    # Use the public suffix list in the package, without download or cache.
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def fault(url: str) -> str | None:
        if len(url) < config.min_length:
            return "too short"
        if len(url) > _LONGEST:
            return "too long"
        host = host_of(url)
        if host is None:
            return "malformed"
        parts = extract(host)
        if not parts.suffix and not _is_ip_address(host):
            return "malformed"
        if not domains.isdisjoint((parts.domain, f"{parts.domain}.{parts.suffix}", host)):
            return "domain"
        name = urlsplit(url).path.lower().rpartition("/")[2]
        return "extension" if "." in name and name.rpartition(".")[2] in extensions else None

    return fault


def host_of(url: str) -> str | None:
    """Return the lower-case host of a well-formed http or https URL, or None for any other text."""
    if len(_AFTER_HOST.split(url.partition("//")[2], maxsplit=1)[0]) > _LONGEST_HOST:
        return None
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not host or "\ufffd" in url:
        return None
    if any(character.isspace() or ord(character) < 32 for character in url):
        return None
    if _is_ip_address(host):
        return host
    try:
        ascii_host = host.encode("idna").decode("ascii").rstrip(".")
    except UnicodeError:
        return None
    labels = ascii_host.split(".")
    is_name = len(labels) > 1 and len(ascii_host) < 254 and all(map(_LABEL.fullmatch, labels))
    return ascii_host if is_name else None


def same_page(url: str) -> str | None:
    """Return a canonical form that is the same for all URLs of a page, or None if the text is not a
    URL. It ignores the scheme, `www.`, the default port, the fragment, the order and encoding of
    the query, a trailing slash, and parameters that only track visitors."""
    try:
        parts = urlsplit(canonicalize_url(url))
    except ValueError:  # the canonicalizer is stricter than urlsplit about brackets
        return None
    host = (parts.hostname or "").rstrip(".").removeprefix("www.")
    port = f":{parts.port}" if parts.port not in (None, 80, 443) else ""
    query = "&".join(
        item for item in parts.query.split("&") if not _TRACKING.fullmatch(item.partition("=")[0])
    )
    return urlunsplit(("", host + port, parts.path.rstrip("/"), query, ""))


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
