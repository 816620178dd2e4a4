"""Fixtures for the tests of collection."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard


class Files:
    """Writes and reads files of JSON lines below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    def lines(self, name: str, records: list) -> str:
        """A file of records; bytes are lines as they are. Packed as its name says."""
        data = b"".join(
            r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records
        )
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".gz"):
            data = gzip.compress(data)
        elif name.endswith(".zst"):
            data = zstandard.compress(data)
        path.write_bytes(data)
        return str(path)

    def read(self, name: str) -> bytes:
        data = (self.folder / name).read_bytes()
        if name.endswith(".gz"):
            return gzip.decompress(data)
        if name.endswith(".zst"):
            reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
            return reader.read()
        return data

    def records(self, name: str) -> list:
        return [json.loads(line) for line in self.read(name).splitlines()]

    def names(self) -> set[str]:
        return {str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()}


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)
