"""Digests of texts, arrays and files. Names of cached files and checkpoints contain them: the same
content has the same digest in every version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Content = str | bytes | memoryview
"""Text is encoded as UTF-8; the memory of an array (``array.data``) must be contiguous."""
_BLOCK_BYTES = 2**22


def digest(content: Content) -> str:
    """128 bits of BLAKE2b, as 32 hex digits."""
    return digest_of_parts((content,))


def digest_of_parts(parts: Iterable[Content]) -> str:
    """:func:`digest` of the concatenated parts, which need not be in memory together."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def hash64(content: bytes, key: bytes = b"") -> int:
    """64 bits of BLAKE2b, as a number."""
    digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")


def sha256(content: Content) -> str:
    """SHA-256, as 64 hex digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_of_file(path: Path, read: Callable[[int], object] = lambda count: None) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it; ``read`` is told how many bytes were read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()


def digest_of_sample(path: Path, blocks: int = 128, block_bytes: int = 2**13) -> str:
    """:func:`digest` of evenly spaced blocks of a file, the first, the last and some between; of
    all of it up to 1 MiB. Tells a replaced file from the one before it, at a cost that does not
    grow with it. Raises OSError if it cannot be read."""
    return digest_of_parts(_some_blocks(path, blocks, block_bytes))


def _some_blocks(path: Path, blocks: int, block_bytes: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        size = file.seek(0, 2)
        last, is_long = size - block_bytes, size > block_bytes * blocks
        for i in range(min(blocks, -(-size // block_bytes))):
            file.seek(last * i // (blocks - 1) if is_long else i * block_bytes)
            yield file.read(block_bytes)
