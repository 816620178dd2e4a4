"""Corpus of the quickstart, made from the source files of Python's standard library, and a baseline
for the validation loss on that corpus."""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.data.indexed import IndexedDataset
from megatron.data.sources import split_documents
from megatron.util.digests import sha256
from megatron.util.files import write_whole

# Folders of the standard library that are left out, because they contain no hand-written code.
LEFT_OUT = frozenset(
    (
        # Installed packages, and tests. Some tests have intentionally broken files.
        *("site-packages", "dist-packages", "test", "tests", "idle_test"),
        # Generated code: character code tables, and the language reference as one string.
        *("encodings", "pydoc_data"),
    )
)


@dataclass(frozen=True)
class SourceCorpus:
    """A JSON Lines file with one document per line, under the key ``text``."""

    path: Path
    documents: int
    text_bytes: int
    digest: str


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def write_corpus(output: Path, root: Path | None = None) -> SourceCorpus:
    """Write every Python source file below ``root``, by default the standard library, as a
    document. Documents are ordered by hashed names, so that the validation split is the same on
    every machine. Raises FileNotFoundError if there are no source files."""
    root = root or standard_library()
    texts = [text for path in source_files(root) if (text := read_source(path))]
    if not texts:
        raise FileNotFoundError(
            f"{root} contains no .py files: this Python has no standard library in source form"
        )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, lines)
    return SourceCorpus(
        path=output,
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        digest=sha256(lines),
    )


def source_files(root: Path) -> list[Path]:
    """Return the Python files below ``root`` outside :data:`LEFT_OUT`, ordered by hashed name."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    kept = [name for name in names if LEFT_OUT.isdisjoint(name.split("/"))]
    return [root / name for name in sorted(kept, key=sha256)]


def read_source(path: Path) -> str | None:
    """Return the text of a source file, or None if it is not UTF-8 or contains only white space."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.strip() else None


@dataclass(frozen=True)
class HeldOut:
    """Validation documents. ``unigram_entropy`` is the loss, in nats per token, of a model that
    predicts the token frequencies of the training data."""

    tokens: int
    text_bytes: int
    unigram_entropy: float

    def bits_per_byte(self, loss: float) -> float:
        """Convert a loss in nats per token to bits per byte of text, which can be compared between
        vocabularies, unlike the loss."""
        return loss / math.log(2) * self.tokens / self.text_bytes


def held_out(prefix: Path, corpus: Path, split: str, vocab_size: int) -> HeldOut:
    """Measure the validation split of a corpus and of its indexed file, which has one sequence per
    document. ``split`` has the form of ``--split``. Raises ValueError if document counts differ."""
    documents = IndexedDataset(prefix)
    with corpus.open("rb") as lines:
        text_bytes = [len(json.loads(line)["text"].encode()) for line in lines]
    if len(documents) != len(text_bytes):
        raise ValueError(
            f"{prefix} has {len(documents)} documents and {corpus} {len(text_bytes)}: they do not "
            "belong together"
        )
    training, validation, _ = split_documents(split, len(documents))
    train = token_counts((documents[i] for i in training), vocab_size)
    valid = token_counts((documents[i] for i in validation), vocab_size)
    return HeldOut(
        tokens=int(valid.sum()),
        text_bytes=sum(text_bytes[i] for i in validation),
        unigram_entropy=unigram_cross_entropy(train, valid),
    )


def token_counts(
    documents: Iterable[npt.NDArray[np.integer]], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Return how often each token occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in documents:
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def unigram_cross_entropy(train: npt.NDArray[np.int64], valid: npt.NDArray[np.int64]) -> float:
    """Return the cross entropy, in nats per token, of tokens with the counts ``valid`` under the
    frequencies of ``train``. One is added to every training count, so that no probability is 0."""
    log_probability = np.log((train + 1) / (train + 1).sum())
    return float(-(valid * log_probability).sum() / valid.sum())
