"""A Retro project in the layout of Megatron-LM's tools, written from its description: without the
code of this project except for the indexed files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

EOD = 258
"""Of ByteLevelTokenizer."""
WORDS = 400
_SPLIT = (80, 15, 5)


@dataclass(frozen=True)
class Corpus:
    """Documents of bytes, each ending with EOD."""

    name: str
    documents: Sequence[np.ndarray]

    @property
    def for_training(self) -> int:
        """Documents of the training part, by the split."""
        return round(len(self.documents) * _SPLIT[0] / sum(_SPLIT))


def words(count: int = WORDS) -> list[str]:
    """Words of the corpora, of 3 to 8 letters."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(count)]


def corpus(name: str, documents: int, seed: int, longest: int = 900) -> Corpus:
    """Documents of random words of a subject each; some are shorter than a chunk, and one is
    empty."""
    rng, vocabulary, made = np.random.default_rng(seed), words(), []
    for number in range(documents):
        subject = rng.choice(vocabulary, 30)
        text = " ".join(rng.choice(subject, 200))[: rng.integers(10, longest)]
        made.append(np.array([*text.encode(), EOD] if number != 3 else [EOD], np.int64))
    return Corpus(name, made)


def chunk_table(corpora: Sequence[Corpus], length: int) -> np.ndarray:
    """(dataset, document, start, end, BERT length) of the chunks of all training documents, uint32
    [n, 5]; EOD is of no chunk, and chunks without text are left out."""
    rows = [
        (dataset, document, start, end, len(text.split()))
        for dataset, each in enumerate(corpora)
        for document, tokens in enumerate(each.documents[: each.for_training])
        for start in range(0, len(tokens) - 1, length)
        for end in (min(start + length, len(tokens) - 1),)
        for text in (bytes(tokens[start:end].tolist()).decode(),)
        if text.split()
    ]
    return np.array(rows, np.uint32)


def write_blocks(folder: Path, rows: np.ndarray, block: int, **options: object) -> None:
    """``query/PART_HASH``: a file for every block of chunks, named by its range with
    ceil(log10 n) + 1 digits."""
    import h5py

    folder.mkdir(parents=True)
    digits = math.ceil(math.log10(len(rows))) + 1
    for start, stop in pairwise([*range(0, len(rows), block), len(rows)]):
        name = f"{start:0{digits}d}-{stop:0{digits}d}.hdf5"
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("neighbors", data=rows[start:stop], **options)


def write_corpora(folder: Path, corpora: Sequence[Corpus]) -> list[str]:
    """Indexed files of the corpora, and their prefixes."""
    for each in corpora:
        with IndexedDatasetWriter(folder / each.name, np.uint16) as writer:
            for document in each.documents:
                writer.add_document([document])
    return [str(folder / each.name) for each in corpora]


def gpt_flags(
    prefixes: Sequence[str],
    seq_length: int,
    train_samples: int,
    batch_size: int = 4,
    eval_interval: int = 5,
    eval_iters: int = 2,
) -> dict[str, object]:
    """The settings of a GPT's data, by the names that training has."""
    weights = [str(len(prefixes) - n) for n in range(len(prefixes))]
    blend = [word for pair in zip(weights, prefixes, strict=True) for word in pair]
    return {
        "data_path": blend if len(prefixes) > 1 else list(prefixes),
        "split": ",".join(map(str, _SPLIT)),
        "seed": 1234,
        "tokenizer_type": "ByteLevelTokenizer",
        "seq_length": seq_length,
        "train_samples": train_samples,
        "global_batch_size": batch_size,
        "eval_interval": eval_interval,
        "eval_iters": eval_iters,
    }


def write_project(
    folder: Path,
    corpora: Sequence[Corpus],
    prefixes: Sequence[str],
    flags: Mapping[str, object],
    length: int,
) -> np.ndarray:
    """``config.json`` and ``db/`` of a project; returns the table of its chunks."""
    import h5py

    table = chunk_table(corpora, length)
    merged = folder / "db" / "merged"
    merged.mkdir(parents=True)
    counts = np.array([len(each.documents) for each in corpora])
    of_document = [tuple(row) for row in table[:, :2].tolist()]
    offsets = [
        (dataset, document, sum(row <= (dataset, document) for row in of_document))
        for dataset, each in enumerate(corpora)
        for document in range(each.for_training)
    ]
    for name in ("train", "sampled", "valid"):
        with h5py.File(merged / f"{name}.hdf5", "w") as file:
            chunks = table if name != "valid" else table[:0]
            file.create_dataset("chunks", data=chunks)
            file.create_dataset("n_written", data=np.array([len(chunks)], np.uint64))
            if name == "train":
                file.create_dataset("doc_offsets", data=np.array(offsets, np.uint64))
    infos = [
        {
            "ratio": 1 / len(corpora),
            "prefix": prefix,
            "path": f"{prefix}.bin",
            "name": each.name,
            "n_docs": int(count),
            "n_docs_train": each.for_training,
            "n_chunks": int((table[:, 0] == number).sum()),
            "n_chunks_train": int((table[:, 0] == number).sum()),
        }
        for number, (each, prefix, count) in enumerate(zip(corpora, prefixes, counts, strict=True))
    ]
    (folder / "db" / "indexed_dataset_infos.json").write_text(json.dumps(infos))
    settings = {f"retro_gpt_{name}": value for name, value in flags.items()}
    settings |= {"retro_gpt_chunk_length": length, "retro_block_size": 100_000}
    (folder / "config.json").write_text(json.dumps(settings))
    return table


@dataclass(frozen=True)
class WrittenProject:
    """A small project with random neighbours, in upstream's layout."""

    folder: Path
    corpora: Sequence[Corpus]
    table: np.ndarray
    rows: Mapping[str, np.ndarray]
    """Neighbours by part, [samples, L, kept]."""


def small_project(folder: Path) -> WrittenProject:
    """Samples of 4 chunks of 16 tokens with 3 neighbours each: 24 for training (6 steps), 16 for
    validation (two evaluations of 2 batches) and 8 for test."""
    chunks, kept, chunk_length = 4, 3, 16
    corpora = [corpus("pages", 60, 1), corpus("books", 40, 2)]
    prefixes = write_corpora(folder, corpora)
    flags = gpt_flags(prefixes, chunks * chunk_length, 24)
    project = folder / "project"
    table = write_project(project, corpora, prefixes, flags, chunk_length)
    rng, rows = np.random.default_rng(3), {}
    for part, count in {"train": 24, "valid": 16, "test": 8}.items():
        rows[part] = rng.integers(-1, len(table), (count, chunks, kept))
        write_blocks(project / "query" / f"{part}_0a1b", rows[part].reshape(-1, kept), 7)
    settings = json.loads((project / "config.json").read_text())
    settings["retro_neighbor_dirs"] = {part: f"query/{part}_0a1b" for part in rows}
    (project / "config.json").write_text(json.dumps(settings))
    return WrittenProject(project, corpora, table, rows)
