"""Digests of text, arrays and files. They are part of the names of cached files and checkpoints, so
the same content must have the same digest in every version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Content = str | bytes | memoryview
"""Data to hash. Text is encoded as UTF-8. An array's memory (``array.data``) must be contiguous."""
_BLOCK_BYTES = 2**22


def digest(content: Content) -> str:
    """Return 128 bits of BLAKE2b as 32 hex digits."""
    return digest_of_parts((content,))


def digest_of_parts(parts: Iterable[Content]) -> str:
    """Return the :func:`digest` of the concatenated parts, holding one part in memory at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def hash64(content: bytes, key: bytes = b"") -> int:
    """Return 64 bits of BLAKE2b as an unsigned integer."""
    digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")


def sha256(content: Content) -> str:
    """Return the SHA-256 digest as 64 hex digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_of_file(path: Path, read: Callable[[int], object] = lambda count: None) -> str:
    """Return a file's SHA-256 as ``sha256sum`` prints it. ``read`` is called with block sizes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()


def digest_of_sample(path: Path, blocks: int = 128, block_bytes: int = 2**13) -> str:
    """Return the :func:`digest` of evenly spaced blocks of a file, including the first and the
    last. Files of up to 1 MiB (by default) are hashed completely. Use it to detect at constant cost
    that a file was replaced. Raises OSError if the file cannot be read."""
    return digest_of_parts(_some_blocks(path, blocks, block_bytes))


def _some_blocks(path: Path, blocks: int, block_bytes: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        size = file.seek(0, 2)
        last, is_long = size - block_bytes, size > block_bytes * blocks
        for i in range(min(blocks, -(-size // block_bytes))):
            file.seek(last * i // (blocks - 1) if is_long else i * block_bytes)
            yield file.read(block_bytes)
