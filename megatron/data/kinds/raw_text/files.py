"""The text files that a data path names, and how a change of one is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.kinds.raw_text import PACKED_ENDINGS, TEXT_ENDINGS
from megatron.data.paths import expand
from megatron.util.digests import digest_of_parts

_BLOCK = 1 << 16
_BLOCKS = 64


class TextFile(NamedTuple):
    """A file as it was when it was looked at."""

    path: str
    size: int
    """Bytes."""
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> TextFile:
        """As it is now."""
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns)

    @property
    def has_columns(self) -> bool:
        """Whether it is a table (.csv, .tsv) and not JSON lines."""
        return self.path.endswith((".csv", ".tsv"))

    def content_digest(self) -> str:
        """Of up to 64 blocks of 64 KiB, the first, the last and evenly between."""
        return digest_of_parts(self._some_blocks())

    def _some_blocks(self) -> Iterator[bytes]:
        last = max(self.size - _BLOCK, 0)
        with open(self.path, "rb") as file:
            for i in range(min(_BLOCKS, -(-self.size // _BLOCK))):
                file.seek(last * i // (_BLOCKS - 1) if self.size > _BLOCK * _BLOCKS else i * _BLOCK)
                yield file.read(_BLOCK)


def text_files(path: str, endings: tuple[str, ...] = TEXT_ENDINGS) -> list[TextFile]:
    """The files of a path: itself, those below a folder sorted by path, or what a glob matches,
    sorted.

    Args:
        endings: of the files of a folder that are meant.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is packed, or the path is a URL.
    """
    found = [str(p) for p in expand(path, endings)]
    for name in found:
        if name.endswith(PACKED_ENDINGS):
            raise ValueError(
                f"{name} cannot be read as it is, from any place on: unpack it to JSON lines (or, "
                "of text, make a .bin/.idx with tools/preprocess_data.py)"
            )
    return [TextFile.of(name) for name in found]
