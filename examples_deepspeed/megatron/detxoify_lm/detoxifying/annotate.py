"""Scores the texts of a file of JSON lines, and continues where an interrupted run stopped."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from detoxifying.scorers import Scorer, ScorerConfig, Scores, is_score, open_scorer
from megatron.apps.tasks.config import check_inputs
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.config.output import check_output
from megatron.features.raw_text.records import BYTE_ORDER_MARK
from megatron.util.files import sync
from megatron.util.json_text import parse_json
from megatron.util.progress import progress_bar

_AHEAD = 4
"""Calls of the scorer that wait, for each that is under way."""


@dataclass(frozen=True)
class AnnotateConfig:
    """Annotation: which texts are scored."""

    data_path: str | None = option(None)
    """File of JSON lines with a "text" each."""
    out_path: str | None = option(None, derived="DATA_PATH-annotated.jsonl")
    """File for the same lines with a "score"."""
    total: int = option(-1)
    """Accepted: the progress bar counts the lines itself."""
    end_text: tuple[str, ...] = option(("<|endoftext|>",))
    """How the tokenizer writes what begins and ends documents; it is removed from texts."""


@dataclass(frozen=True)
class Row:
    """A line of a file, and its place, for messages."""

    place: str
    content: dict[str, Any]

    def text(self, key: str, remedy: str) -> str:
        """The string under a key. Raises ConfigError, with the remedy, if it has no such key."""
        value = self.content.get(key)
        if not isinstance(value, str):
            raise ConfigError(
                f'{self.place} has no string "{key}" (its keys: {", ".join(self.content)}): '
                f"{remedy}"
            )
        return value

    def toxicity(self, remedy: str) -> float | None:
        """The score of a row; None of a text that was not scored. Raises ConfigError, with the
        remedy, if it has none, or one outside of 0 to 1."""
        score = self.content.get("score", "")
        if score is None:
            return None
        score_value = score.get("toxicity") if isinstance(score, dict) else None
        if score_value is None or not is_score(score_value):
            raise ConfigError(
                f'{self.place}: "score" must be null or {{"toxicity": 0 to 1, ...}}, found '
                f"{json.dumps(score)[:60] or 'nothing'}: {remedy}"
            )
        return float(score_value)


def read_rows(flag: str, path: str | None) -> list[Row]:
    """The rows of a file of JSON lines; blank lines are left out. Raises ConfigError, naming flag,
    file and line, if it cannot be read, a line is not a JSON object, or it has no line."""
    if not path:
        raise ConfigError(f"{flag} is missing: a file of JSON lines")
    check_inputs(flag, [path])
    rows = []
    lines = Path(path).read_bytes().removeprefix(BYTE_ORDER_MARK).split(b"\n")
    for number, line in enumerate(lines, 1):
        place = f"{flag} {path}, line {number}"
        if not line.strip():
            continue
        try:
            content = parse_json(line, place, lenient=True)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not isinstance(content, dict):
            raise ConfigError(f"{place} is not a JSON object: {line[:60]!r}")
        rows.append(Row(place, content))
    if not rows:
        raise ConfigError(f"{flag} {path} is empty: it must have a JSON object in each line")
    return rows


def run_annotation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Scores the file of a command line. Raises ValueError or OSError if a flag or a file cannot be
    used, or the scorer fails; the message names it."""
    config, scoring = parse_configs((AnnotateConfig, ScorerConfig), argv, description=description)
    rows = read_rows("--data-path", config.data_path)
    out = annotated_path(config.data_path, config.out_path)
    print(out)
    with ending_at_ctrl_c():
        annotate(rows, out, open_scorer(scoring), config.end_text)


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Ends the process at a Ctrl-C, without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)


def annotated_path(data_path: str, out_path: str | None) -> Path:
    """Path of annotated rows. Raises ConfigError if they would replace the others, or cannot be
    written."""
    out = Path(out_path or f"{data_path}-annotated.jsonl")
    check_output("--out-path", out)
    if out.exists() and out.samefile(data_path):
        raise ConfigError(f"--out-path {out} is the file of --data-path; name another")
    return out


def annotate(rows: Sequence[Row], out: Path, scorer: Scorer, end_text: Sequence[str]) -> None:
    """Writes each row with its text as it was scored and a ``score``, null where the text is blank
    or the scorer has none. Until all are there they are in a file next to ``out``, whose name
    depends on texts and scorer, and from which another call continues. Raises ConfigError if a row
    has no text, and what the scorer raises."""
    texts = [cleaned(row.text("text", "annotate what was generated"), end_text) for row in rows]
    mark = sha256(json.dumps([scorer.name, [row.content for row in rows], texts]).encode())
    part = out.with_name(f"{out.name}.partial-{mark.hexdigest()[:12]}")
    done = _kept(part)
    if done:
        print(f"{part}: continuing after {done} of {len(rows)} lines")
    with part.open("ab") as file, progress_bar("scored", total=len(rows), unit=" lines") as bar:
        bar.update(done)
        scores = _in_order(scorer, texts[done:])
        for row, text, score in zip(rows[done:], texts[done:], scores, strict=True):
            content = row.content | {"text": text, "score": score}
            file.write(json.dumps(content).encode() + b"\n")
            file.flush()
            bar.update()
        sync(file)
    part.replace(out)


def cleaned(text: str, end_text: Iterable[str]) -> str:
    """A text without the marks of its beginning and end."""
    for mark in end_text:
        text = text.replace(mark, "")
    return text


def _in_order(scorer: Scorer, texts: Sequence[str]) -> Iterator[Scores | None]:
    """The score of each text, in their order; blank ones are not given to the scorer. Scores before
    a failed call come before its error."""
    asked = [text for text in texts if text.strip()]
    batches = iter([asked[i : i + scorer.batch] for i in range(0, len(asked), scorer.batch)])
    scored = _called(scorer, batches)
    for text in texts:
        yield next(scored) if text.strip() else None


def _called(scorer: Scorer, batches: Iterator[Sequence[str]]) -> Iterator[Scores | None]:
    under_way: deque[Future[list[Scores | None]]] = deque()
    with ThreadPoolExecutor(scorer.workers) as threads:
        try:
            for batch in batches:
                under_way.append(threads.submit(scorer, batch))
                if len(under_way) >= _AHEAD * scorer.workers:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def _kept(part: Path) -> int:
    """Count of the lines that an interrupted run wrote; one that it did not finish is cut off."""
    if not part.exists():
        return 0
    content = part.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        part.write_bytes(whole)
    return whole.count(b"\n")
