"""A Retro project: settings, HDF5 files of chunks and neighbours, the indexed files behind them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from fuzz.fuzzer import Fuzzer
from upstream_retro import corpus, gpt_flags, write_blocks, write_corpora, write_project

from megatron.apps.retro.inspection import RetroInspector
from megatron.features.retro.project import RetroProject

LENGTH, CHUNKS, KEPT = 16, 2, 2


def write(folder: Path) -> None:
    (folder / "data").mkdir()
    corpora = [corpus("pages", 12, 1, 200), corpus("books", 8, 2, 200)]
    write_corpora(folder / "data", corpora)
    names = [each.name for each in corpora]
    flags = gpt_flags(names, LENGTH * CHUNKS, 4, batch_size=2)
    table = write_project(folder, corpora, names, flags, LENGTH)
    rng = np.random.default_rng(3)
    packed = {"chunks": (2, KEPT), "compression": "gzip"}
    for part, options in (("train", {}), ("valid", packed), ("test", {})):
        rows = rng.integers(-1, len(table), (8, KEPT))
        write_blocks(folder / "query" / f"{part}_0a1b", rows, 5, **options)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["retro_neighbor_dirs"] = {p: f"query/{p}_0a1b" for p in ("train", "valid", "test")}
    path.write_text(json.dumps(settings))


def read(folder: Path) -> None:
    """As training and the inspection do."""
    project = RetroProject(folder)
    database = project.database()
    database.tokens(np.arange(-1, min(len(database), 50)), 2)
    for part in ("train", "valid"):
        neighbors = project.neighbors(part)
        for sample in range(min(len(neighbors), 8)):
            chunks = neighbors.rows(sample)
            database.tokens(chunks, 2)
            database.documents(chunks)
    inspector = RetroInspector()
    inspector.init(folder)
    for _ in inspector.summary():
        pass
    for _ in inspector.described(0, 0, "train"):
        pass


# The settings are those of a run, whose errors name the flags that they stand for.
FUZZERS = (Fuzzer("retro-project", write, read, names_file=False, seconds=10.0, heavy=True),)
