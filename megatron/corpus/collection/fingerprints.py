"""Signatures, ids and texts of documents on disk: what the search for duplicates reads.

A folder per input file, whole when about.json is there:

    about.json       what made it
    signatures.u32   MinHash signatures, uint32[documents, seeds]
    ids.jsonl        an id a line
    texts.bin        the texts, each packed by zstd
    sizes.i64        bytes of each in texts.bin, int64[documents]
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from rensa import RMinHash

from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.lines import BadRecord, Mapped, records_of, value_of
from megatron.corpus.collection.outputs import write_packed
from megatron.corpus.collection.shingles import CHARACTERS, shingle_hashes, signatures_DS
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.data.json_lines import BadLine
from megatron.util.digests import hash64

_FILES = ("signatures.u32", "ids.jsonl", "texts.bin", "sizes.i64")
_LINE_FEED = 10


@dataclass(frozen=True)
class FingerprintStep:
    """A batch of lines to what belongs at the end of each of the four files."""

    id_key: str
    text_key: str
    seeds: int
    """Values of a signature."""
    seed: int
    """Of the hash functions."""

    def made_by(self) -> dict[str, Any]:
        """What fingerprints that are compared have in common."""
        return {
            "seeds": self.seeds,
            "seed": self.seed,
            "shingle": CHARACTERS,
            "algorithm": f"rensa R-MinHash {RMinHash.ALGORITHM_VERSION}",
        }

    def build(self) -> BatchStep:
        packer = zstandard.ZstdCompressor(level=1)

        def batch_step(batch: LineBatch) -> Mapped:
            ids: list[str] = []
            texts: list[str] = []
            bad: list[BadLine] = []
            for record in records_of(batch, (self.text_key,)):
                if isinstance(record, BadLine):
                    bad.append(record)
                    continue
                try:
                    ids.append(str(value_of(record, self.id_key)))
                    texts.append(record.fields[self.text_key])
                except BadRecord as error:
                    bad.append(BadLine(record.number, error.reason, error.detail))
            packed = [packer.compress(text.encode()) for text in texts]
            outputs = [
                signatures_DS(texts, self.seeds, self.seed).astype("<u4").tobytes(),
                b"".join(json.dumps(i).encode() + b"\n" for i in ids),
                b"".join(packed),
                np.array(list(map(len, packed)), "<i8").tobytes(),
            ]
            return Mapped(outputs, Counter(), bad, len(texts))

        return batch_step


def make_fingerprints(path: Path, step: FingerprintStep, folder: Path, running: RunConfig) -> None:
    """Writes the fingerprints of a file, unless they are there.

    Raises:
        ValueError, OSError: see `job.run`.
    """
    job = Job("find_duplicates", [path], [folder / f for f in _FILES], step, settings=asdict(step))
    about = {"made_by": step.made_by(), "source": job.description()}
    try:
        if json.loads((folder / "about.json").read_bytes()) == about:
            return
    except (OSError, ValueError):
        pass
    (folder / "about.json").unlink(missing_ok=True)
    report: Report = run(job, running)
    if report.bad:
        print(f"{path}: {report}", file=sys.stderr)
    write_packed(folder / "about.json", json.dumps(about).encode())


class Fingerprints:
    """One folder, opened; only the sizes are read into memory."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError where it is no such folder, or damaged; names it."""
        self.folder = folder
        try:
            self.made_by: dict[str, Any] = json.loads((folder / "about.json").read_bytes())[
                "made_by"
            ]
            self._sizes = np.fromfile(folder / "sizes.i64", "<i8")
            signatures, ids, texts = (_mapped(folder / name) for name in _FILES[:3])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no whole fingerprints: {error!r}") from error
        seeds, count = int(self.made_by["seeds"]), len(self._sizes)
        self._text_offsets = np.concatenate(([0], np.cumsum(self._sizes)))
        self._id_offsets = np.concatenate(([0], np.flatnonzero(ids == _LINE_FEED) + 1))
        if (
            len(signatures) != 4 * seeds * count
            or len(self._id_offsets) != count + 1
            or self._text_offsets[-1] != len(texts)
        ):
            raise ValueError(f"{folder} is damaged: its files do not fit one another")
        self._ids, self._texts = ids, texts
        self.signatures_DS = signatures.view("<u4").reshape(count, seeds)

    def __len__(self) -> int:
        return len(self._sizes)

    def id_line(self, document: int) -> bytes:
        """The id as JSON."""
        return self._ids[self._id_offsets[document] : self._id_offsets[document + 1]].tobytes()

    def text_of(self, document: int) -> str:
        start, end = self._text_offsets[document], self._text_offsets[document + 1]
        packed = self._texts[start:end].tobytes()
        return zstandard.ZstdDecompressor().decompress(packed).decode("utf-8")


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


class FingerprintedDocuments:
    """The documents of several folders, numbered on."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """
        Raises:
            ValueError: a folder is damaged; two were made in different ways; an id occurs twice.
        """
        self._parts = [Fingerprints(folder) for folder in folders]
        self._starts = np.cumsum([0, *map(len, self._parts)])
        first = self._parts[0]
        for part in self._parts[1:]:
            if part.made_by != first.made_by:
                raise ValueError(
                    f"{part.folder} was made with {part.made_by}, {first.folder} with "
                    f"{first.made_by}: they cannot be compared"
                )
        self.seeds: int = first.signatures_DS.shape[1]
        self._check_ids()
        self.shingles_of = functools.lru_cache(maxsize=1024)(self._shingles_of)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def columns_DS(self, start: int, end: int) -> npt.NDArray[np.uint32]:
        """Values `start` to `end` of all signatures."""
        return np.concatenate([part.signatures_DS[:, start:end] for part in self._parts])

    def signatures_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Signatures of some documents, uint32[len(documents), S]."""
        rows = np.empty((len(documents), self.seeds), np.uint32)
        parts = np.searchsorted(self._starts, documents, "right") - 1
        for number in np.unique(parts):
            chosen = parts == number
            local = documents[chosen] - self._starts[number]
            rows[chosen] = self._parts[number].signatures_DS[local]
        return rows

    def id_of(self, document: int) -> str:
        part, index = self._find(document)
        return json.loads(part.id_line(index))

    def _shingles_of(self, document: int) -> npt.NDArray[np.uint64]:
        """Different shingle hashes of a text, sorted."""
        part, index = self._find(document)
        return np.unique(shingle_hashes(part.text_of(index)))

    def _find(self, document: int) -> tuple[Fingerprints, int]:
        part = int(np.searchsorted(self._starts, document, "right")) - 1
        return self._parts[part], document - int(self._starts[part])

    def _check_ids(self) -> None:
        hashes = np.fromiter(
            (hash64(part.id_line(i)) for part in self._parts for i in range(len(part))),
            np.uint64,
            len(self),
        )
        order = np.argsort(hashes, kind="stable")
        equal = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        for i in equal:
            first, second = self.id_of(int(order[i])), self.id_of(int(order[i + 1]))
            if first == second:
                raise ValueError(
                    f"the id {first!r} occurs twice: duplicates are removed by id, and add_id.py "
                    "gives each document its own"
                )
