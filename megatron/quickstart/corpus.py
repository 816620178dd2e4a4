"""Text that every Python installation carries: the source files of its standard library."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from megatron.util.digests import sha256
from megatron.util.files import write_whole

LEFT_OUT = frozenset(
    (
        # Installed packages, and tests with files that are broken on purpose.
        *("site-packages", "dist-packages", "test", "tests", "idle_test"),
        # Generated: tables of character codes, and the language reference as one string.
        *("encodings", "pydoc_data"),
    )
)
"""Folders of the standard library that are no hand-written code."""


@dataclass(frozen=True)
class Corpus:
    """A JSON-lines file with one document per line, under the key ``text``.

    Attributes:
        path: the file.
        documents: number of lines.
        text_bytes: bytes of the texts in UTF-8.
        digest: identifies the content.
    """

    path: Path
    documents: int
    text_bytes: int
    digest: str


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def write_corpus(output: Path, root: Path | None = None) -> Corpus:
    """Writes every Python source file below ``root`` as a document.

    The order is that of the hashed names: equal on every machine, and mixed, so that the last
    documents, which become the validation split, are of all kinds.

    Args:
        output: the file to write.
        root: folder of the sources; the standard library by default.

    Raises:
        FileNotFoundError: there are no source files.
    """
    root = root or standard_library()
    texts = [text for path in source_files(root) if (text := read_source(path))]
    if not texts:
        raise FileNotFoundError(
            f"{root} holds no .py files: this Python has no standard library in source form"
        )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, lines)
    return Corpus(
        path=output,
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        digest=sha256(lines),
    )


def source_files(root: Path) -> list[Path]:
    """Python files below ``root`` outside of :data:`LEFT_OUT`, ordered by their hashed names."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    kept = [name for name in names if LEFT_OUT.isdisjoint(name.split("/"))]
    return [root / name for name in sorted(kept, key=sha256)]


def read_source(path: Path) -> str | None:
    """The text of a source file; None where it is not UTF-8 or has nothing but white space."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.strip() else None
