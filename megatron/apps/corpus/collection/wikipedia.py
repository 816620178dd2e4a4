"""Conversion of WikiExtractor's output to one JSON object per article.

WikiExtractor writes folders AA, AB ... with files wiki_00, wiki_01 ... They contain JSON lines
(--json), or articles between `<doc id="12" url="..." title="...">` and `</doc>`, each tag on a
separate line. The first line of such an article is its title, and &, < and > are HTML entities.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.apps.corpus.collection.json_files import (
    BadRecordError,
    BatchResult,
    BatchStep,
    JsonRecord,
    json_line,
    map_records,
)
from megatron.apps.corpus.collection.line_job import JobReport, LineJobConfig, required, run_step
from megatron.apps.corpus.preprocessing.inputs import LineBatch, read_batches
from megatron.config.flags import option
from megatron.features.raw_text.records import BadLine, long_line

_START = re.compile(r"<doc\s(.*)>")  # matches lines without trailing white space
_ATTRIBUTE = re.compile(r'(?<!\w)(\w+)="([^"]*)"')
_LONG_NUMBER = re.compile(r"&#([0-9]{8,});?")
_END = b"</doc>"
_REDIRECT = re.compile(r"#\s*redirect", re.IGNORECASE)
_MAX_ARTICLE = 1 << 28


@dataclass(frozen=True)
class WikipediaConfig:
    """Options for reading WikiExtractor's output."""

    input: tuple[str, ...] = option(())
    """Folders that WikiExtractor wrote, or single files (wiki_00), in either of its formats, plain
    or compressed with gzip or zstd."""
    output: str | None = option(None)
    """JSON-lines file to write (id, url, title, text), compressed if its name ends in .gz or
    .zst."""
    title_in_text: bool = option(False)
    """Begin each text with the title and an empty line."""
    min_length: int = option(0)
    """Minimum number of characters of an article's text. Shorter articles are left out."""


def read_wikipedia(config: WikipediaConfig, running: LineJobConfig) -> JobReport:
    inputs, output = required(config, "input", "output")
    return run_step(
        config,
        running,
        "wikiextractor_json",
        _wikipedia_step,
        extracted_files(inputs),
        [output],
        keys=None,
        reader=article_batches,
    )


def _wikipedia_step(config: WikipediaConfig) -> BatchStep:
    """Return the step that drops empty articles and redirects, and writes others as JSON."""
    writer = _ArticleWriter(config)

    def step(batch: LineBatch) -> BatchResult:
        is_markup = any(line.startswith((b"<doc ", _END)) for line in batch.lines)
        if not is_markup and any(line.startswith(b"{") for line in batch.lines):
            return map_records(batch, ("text",), writer.from_record, outputs=1)
        return writer.from_markup(batch)

    return step


@dataclass(frozen=True)
class _ArticleWriter:
    """Writer of articles as JSON lines, from JSON records or from WikiExtractor's markup."""

    config: WikipediaConfig

    def line(
        self, number: object, url: object, title: str, text: str, counts: Counter[str]
    ) -> bytes | None:
        """Return the article as a line, or None if it is left out. ``counts`` counts both."""
        text = text.strip()
        if title and text.partition("\n")[0].strip() == title.strip():
            text = text.partition("\n")[2].strip()
        if not text:
            counts["empty articles left out"] += 1
        elif _REDIRECT.match(text):
            counts["redirects left out"] += 1
        elif len(text) < self.config.min_length:
            counts["short articles left out"] += 1
        else:
            counts["articles written"] += 1
            if self.config.title_in_text and title:
                text = f"{title}\n\n{text}"
            return json_line({"id": number, "url": url, "title": title, "text": text})
        return None

    def from_record(self, record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        fields = record.fields
        title = fields.get("title", "")
        if not isinstance(title, str):
            raise BadRecordError('"title" is not a string', f"found {title!r:.60}")
        line = self.line(fields.get("id"), fields.get("url"), title, fields["text"], counts)
        if line:
            yield 0, line

    def from_markup(self, batch: LineBatch) -> BatchResult:
        result = BatchResult([])
        attributes: dict[str, str] | None = None
        lines: list[str] = []
        written: list[bytes] = []
        started = 0

        def bad(number: int, reason: str, detail: str) -> None:
            result.bad_lines.append(BadLine(number, reason, detail))

        for number, raw in enumerate(batch.lines, batch.first_line):
            if too_long := long_line(raw, number):
                result.bad_lines.append(too_long)
                continue
            try:
                line = raw.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                bad(number, "not UTF-8", str(error))
                continue
            if start := _START.fullmatch(line.rstrip()):
                if attributes is not None:
                    bad(started, "an article without </doc>", f"the next starts in line {number}")
                pairs = _ATTRIBUTE.findall(start[1])
                attributes = {name: _unescaped(value) for name, value in pairs}
                lines, started = [], number
            elif line.strip() == _END.decode():
                if attributes is None:
                    bad(number, "</doc> without <doc ...>", "the article before has ended")
                    continue
                result.documents += 1
                text = _unescaped("\n".join(lines))
                about = attributes.get("id"), attributes.get("url"), attributes.get("title", "")
                written.append(self.line(*about, text, result.counts) or b"")
                attributes = None
            elif attributes is not None:
                lines.append(line)
            elif line.strip():
                bad(number, "text outside of <doc> and </doc>", repr(line[:60]))
        if attributes is not None:
            bad(started, "an article without </doc>", "the file ends")
        result.outputs = [b"".join(written)]
        return result


def _unescaped(text: str) -> str:
    """Replace HTML entities by their characters. Numeric entities of eight or more digits become
    U+FFFD, because Python cannot parse numbers with thousands of digits."""

    def short(number: re.Match[str]) -> str:
        digits = number[1].lstrip("0") or "0"
        return f"&#{digits};" if len(digits) < 8 else "\ufffd"

    return html.unescape(_LONG_NUMBER.sub(short, text))


def article_batches(paths: Sequence[Path]) -> Iterator[LineBatch]:
    """Yield lines in batches that do not end within an article. Raises ValueError if an article
    exceeds 256 MiB, since its end is probably missing."""
    pending: list[bytes] = []  # lines after the last </doc>
    last: LineBatch | None = None
    first, size, has_begun = 1, 0, False
    for batch in read_batches(paths):
        if last is None or last.path != batch.path:
            if last is not None and pending:
                yield replace(last, first_line=first, lines=pending)
            pending, first, size, has_begun = [], batch.first_line, 0, False
        last, lines = batch, batch.lines
        whole = len(lines)
        if has_begun or _has_start(lines):
            while whole and not lines[whole - 1].startswith(_END):
                whole -= 1
        if whole:
            yield replace(batch, first_line=first, lines=pending + lines[:whole])
            pending, first, size, has_begun = [], batch.first_line + whole, 0, False
        rest = lines[whole:]
        pending += rest
        size += sum(map(len, rest))
        has_begun = has_begun or _has_start(rest)
        if size > _MAX_ARTICLE:
            raise ValueError(
                f"{batch.path}, line {first}: an article without </doc> in the "
                f"{_MAX_ARTICLE >> 20} MiB that follow"
            )
    if last is not None and pending:
        yield replace(last, first_line=first, lines=pending)


def _has_start(lines: Iterable[bytes]) -> bool:
    return any(line.startswith(b"<doc ") for line in lines)


def extracted_files(patterns: Iterable[str]) -> list[Path]:
    """Return WikiExtractor's files: the given files, and all files wiki_* in given folders. Raises
    FileNotFoundError if a path or its files do not exist, and ValueError if a file is compressed
    with bzip2."""
    files: dict[Path, None] = {}
    for pattern in map(Path, patterns):
        paths = sorted(pattern.rglob("wiki_*")) if pattern.is_dir() else [pattern]
        if not paths or not paths[0].exists():
            what = "has no files wiki_* in it" if pattern.is_dir() else "does not exist"
            raise FileNotFoundError(f"--input {pattern} {what}")
        files.update(dict.fromkeys(path for path in paths if path.is_file()))
    packed = next((path for path in files if path.suffix == ".bz2"), None)
    if packed:
        raise ValueError(
            f"--input {packed} is compressed with bzip2: decompress it with bunzip2 first"
        )
    return list(files)
