"""A project that a script writes in upstream's layout is read as it is described."""

import json

import numpy as np
import pytest
from upstream_retro import EOD, corpus, gpt_flags, write_blocks, write_corpora, write_project

from megatron.features.retro.project import RetroProject

pytest.importorskip("h5py")

CHUNK, SEQ_LENGTH = 32, 128
DIRS = {"train": "train_5d41", "valid": "valid_402a", "test": "test_bc4b"}


@pytest.fixture(params=["config.json", "args.json"])
def made(tmp_path, request):
    corpora = [corpus("a", 12, 1), corpus("b", 8, 2)]
    prefixes = write_corpora(tmp_path, corpora)
    flags = gpt_flags(prefixes, SEQ_LENGTH, train_samples=20)
    folder = tmp_path / "project"
    table = write_project(folder, corpora, prefixes, flags, CHUNK)
    rng, rows = np.random.default_rng(3), {}
    for part, samples in (("train", 20), ("valid", 16), ("test", 8)):
        rows[part] = rng.integers(-1, len(table), (samples * SEQ_LENGTH // CHUNK, 20))
        write_blocks(folder / "query" / DIRS[part], rows[part], block=30)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    if request.param == "config.json":  # args.json of 2023 does not name them
        config["retro_neighbor_dirs"] = DIRS
        write_blocks(folder / "query" / "train_1111", rows["train"][::-1], block=30)
    (folder / request.param).write_text(json.dumps(config))
    return corpora, table, rows, folder


def test_the_text_of_every_neighbor(made):
    """Chunk and continuation, for all neighbours of all samples; nothing after the end of a
    document, or for -1."""
    corpora, table, rows, folder = made
    project = RetroProject(folder)
    database = project.database()
    for part in DIRS:
        neighbors = project.neighbors(part)
        assert len(neighbors) == len(rows[part]) * CHUNK // SEQ_LENGTH
        for sample in range(len(neighbors)):
            chunks = neighbors.rows(sample)
            first = sample * SEQ_LENGTH // CHUNK
            np.testing.assert_array_equal(chunks, rows[part][first : first + 4])
            tokens = database.tokens(chunks[:, :2], retrieved=2)
            for found, number in zip(tokens.reshape(-1, 64), chunks[:, :2].ravel(), strict=True):
                expected = np.full(2 * CHUNK, EOD)
                if number >= 0:
                    dataset, document, start, *_ = table[number]
                    text = corpora[dataset].documents[document][start : start + 2 * CHUNK]
                    expected[: len(text)] = text
                np.testing.assert_array_equal(found, expected)


def test_the_documents_of_chunks(made):
    _, table, _, folder = made
    database = RetroProject(folder).database()
    assert len(database) == len(table)
    np.testing.assert_array_equal(database.documents(np.arange(len(table))), table[:, :2])


def test_what_a_run_takes_from_the_configuration(made):
    settings = RetroProject(made[-1]).data_settings()
    found = {name: setting.value for name, setting in settings.items()}
    assert found["seq_length"] == SEQ_LENGTH and found["train_samples"] == 20
    assert (found["seed"], found["global_batch_size"], found["split"]) == (1234, 4, "80,15,5")


def test_several_searches_of_which_none_is_named(made):
    _, _, rows, folder = made
    write_blocks(folder / "query" / "valid_2222", rows["valid"], block=30)
    if (folder / "config.json").is_file():
        found = RetroProject(folder).neighbors("valid").rows(0)
        np.testing.assert_array_equal(found, rows["valid"][:4])
    else:
        with pytest.raises(ValueError, match=r"valid_2222, valid_402a: name one in .*args.json"):
            RetroProject(folder).neighbors("valid")
