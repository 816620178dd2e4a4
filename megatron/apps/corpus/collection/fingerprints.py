"""MinHash signatures, ids and texts of documents on disk, which `duplicates` searches.

Each input file has a folder, which is complete once about.json exists:

    about.json       settings that the fingerprints were made with
    signatures.u32   MinHash signatures, uint32[documents, seeds]
    ids.jsonl        one id per line
    texts.bin        the texts, each compressed with zstd
    sizes.i64        bytes of each text in texts.bin, int64[documents]

Shape suffixes: D documents, S seeds (values of a signature).
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from rensa import RMinHash

from megatron.apps.corpus.collection.json_files import JsonRecord, RecordStep, write_packed
from megatron.apps.corpus.collection.line_job import LineJob, LineJobConfig, run
from megatron.util.digests import hash64

CHARACTERS = 5  # length of a shingle, as in Megatron's scripts
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, made odd
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_FILES = ("signatures.u32", "ids.jsonl", "texts.bin", "sizes.i64")
_LINE_FEED = 10


def shingle_hashes(text: str) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash for each run of 5 characters, in order and with repetitions. A shorter
    text is a single shingle; an empty text has none."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    width = min(CHARACTERS, len(codes))
    hashes = np.zeros(len(codes) - width + 1 if width else 0, np.uint64)
    for offset in range(width):
        hashes = hashes * _MULTIPLIER + codes[offset : offset + len(hashes)] + np.uint64(1)
    # Mix the bits, because the polynomial alone maps similar shingles to similar values.
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes


def signature_S(text: str, seeds: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return a text's MinHash signature of `seeds` values. The probability that two texts have the
    same value at an index is their Jaccard similarity. `seed` initialises the hash functions."""
    hashes = shingle_hashes(text)  # repetitions do not change a minimum
    offsets = np.array([0, len(hashes)], np.uint64)
    digests = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, seeds, seed)
    return np.array(digests.to_rows()[0], np.uint32)


def similarity(
    first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], kind: str = "union"
) -> float:
    """Return the similarity of two texts, given their distinct shingle hashes in ascending order.
    It is the number of shared shingles divided by the size of the union (Jaccard similarity), of
    the smaller set ("min") or of the larger set ("max"). Two empty texts have similarity 1."""
    if not len(first) or not len(second):
        return float(len(first) == len(second))
    common = len(np.intersect1d(first, second, assume_unique=True))
    whole = {
        "union": len(first) + len(second) - common,
        "min": min(len(first), len(second)),
        "max": max(len(first), len(second)),
    }[kind]
    return common / whole


@dataclass(frozen=True)
class FingerprintConfig:
    id_key: str
    text_key: str
    seeds: int  # number of values in a signature
    seed: int  # seed of the hash functions

    def made_by(self) -> dict[str, Any]:
        """Return the settings that must be equal for two sets of fingerprints to be comparable."""
        return {
            "seeds": self.seeds,
            "seed": self.seed,
            "shingle": CHARACTERS,
            "algorithm": f"rensa R-MinHash {RMinHash.ALGORITHM_VERSION}",
        }


def make_fingerprints(
    path: Path, config: FingerprintConfig, folder: Path, running: LineJobConfig
) -> None:
    """Write the fingerprints of a file unless they exist. Raises the errors of `line_job.run`."""
    job = LineJob(
        "find_duplicates",
        [path],
        [folder / name for name in _FILES],
        functools.partial(_fingerprint_step, config),
        (config.text_key,),
        asdict(config),
    )
    about = {"made_by": config.made_by(), "source": job.description()}
    try:
        if json.loads((folder / "about.json").read_bytes()) == about:
            return
    except (OSError, ValueError):
        pass
    (folder / "about.json").unlink(missing_ok=True)
    report = run(job, running)
    if report.bad:
        print(f"{path}: {report}", file=sys.stderr)
    write_packed(folder / "about.json", json.dumps(about).encode())


def _fingerprint_step(config: FingerprintConfig) -> RecordStep:
    packer = zstandard.ZstdCompressor(level=1)

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        text = record.fields[config.text_key]
        packed = packer.compress(text.encode())
        yield 1, json.dumps(str(record.value(config.id_key))).encode() + b"\n"
        yield 0, signature_S(text, config.seeds, config.seed).astype("<u4").tobytes()
        yield 2, packed
        yield 3, len(packed).to_bytes(8, "little")

    return step


class Fingerprints:
    def __init__(self, folder: Path) -> None:
        """Open a folder of fingerprints. Raises ValueError if it is incomplete or damaged."""
        self.folder = folder
        try:
            about = json.loads((folder / "about.json").read_bytes())
            self.made_by: dict[str, Any] = about["made_by"]
            self._sizes = np.fromfile(folder / "sizes.i64", "<i8")
            signatures, ids, texts = (_mapped(folder / name) for name in _FILES[:3])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} has no complete fingerprints: {error!r}") from error
        seeds, count = int(self.made_by["seeds"]), len(self._sizes)
        self._text_offsets = np.concatenate(([0], np.cumsum(self._sizes)))
        self._id_offsets = np.concatenate(([0], np.flatnonzero(ids == _LINE_FEED) + 1))
        if (
            len(signatures) != 4 * seeds * count
            or len(self._id_offsets) != count + 1
            or self._text_offsets[-1] != len(texts)
        ):
            raise ValueError(f"{folder} is damaged: the sizes of its files do not agree")
        self._ids, self._texts = ids, texts
        self.signatures_DS = signatures.view("<u4").reshape(count, seeds)

    def __len__(self) -> int:
        return len(self._sizes)

    def id_line(self, document: int) -> bytes:
        return self._ids[self._id_offsets[document] : self._id_offsets[document + 1]].tobytes()

    def text_of(self, document: int) -> str:
        start, end = self._text_offsets[document], self._text_offsets[document + 1]
        packed = self._texts[start:end].tobytes()
        return zstandard.ZstdDecompressor().decompress(packed).decode("utf-8")


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


class FingerprintedDocuments:
    """Documents in several folders of fingerprints, numbered consecutively."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open the folders. Raises ValueError if a folder is damaged, if two were made with
        different settings, or if an id occurs twice."""
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
        return np.concatenate([part.signatures_DS[:, start:end] for part in self._parts])

    def signatures_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return the signatures of the given documents, uint32[len(documents), S]."""
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
        """Return the distinct shingle hashes of a document, in ascending order."""
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
