"""The database of a project: its chunks against those of a description, its files in upstream's
layout, and what happens to a project that is stopped, damaged or changed."""

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import upstream_retro as upstream

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.retro.command import run_preprocessing
from megatron.features.retro.hdf5 import array_shapes, read_array, write_arrays
from megatron.features.retro.project import RetroProject

pytest.importorskip("h5py")

LENGTH = 16
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def corpora():
    return [upstream.corpus("first", 40, 1), upstream.corpus("second", 20, 2)]


@pytest.fixture(scope="module")
def prefixes(corpora, tmp_path_factory):
    return upstream.write_corpora(tmp_path_factory.mktemp("corpora"), corpora)


def flags(prefixes, *others, blend=("2", "1")):
    paths = [word for pair in zip(blend, prefixes, strict=False) for word in pair]
    return [
        *("--data-path", *(paths if len(prefixes) > 1 else prefixes), "--split", "80,15,5"),
        *("--seq-length", "64", "--train-samples", "40", "--global-batch-size", "4"),
        *("--eval-interval", "5", "--eval-iters", "2", "--tokenizer-type", "ByteLevelTokenizer"),
        *("--retro-gpt-chunk-length", str(LENGTH), "--retro-doc-block-size", "10"),
        *("--bert-embedder-type", "hashing", "--retro-index-ntrain", "60", *others),
    ]


def build(folder, *words, task="db-build"):
    run_preprocessing(None, ["--retro-project-dir", str(folder), "--retro-tasks", task, *words])
    return RetroProject(folder)


def files_of(folder):
    """The content of every file, by its path in the folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def project(prefixes, tmp_path_factory):
    return build(tmp_path_factory.mktemp("project"), *flags(prefixes))


def words_of(tokens):
    return len(bytes(tokens.tolist()).decode().split())


def test_chunks_are_those_of_the_training_documents(project, corpora):
    expected = upstream.chunk_table(corpora, LENGTH)
    table = read_array(project.database_file, "chunks")
    assert table.dtype == np.uint32
    np.testing.assert_array_equal(table[:, :4], expected[:, :4])
    database = project.database()
    for row, tokens in zip(table.tolist(), database.tokens(np.arange(len(table))), strict=True):
        dataset, document, start, stop, words = row
        text = corpora[dataset].documents[document][start:stop]
        np.testing.assert_array_equal(tokens[: stop - start], text)
        assert (tokens[stop - start :] == upstream.EOD).all()
        assert upstream.EOD not in text
        assert words == words_of(text)


def test_a_chunk_continues_in_its_document_only(project, corpora):
    database = project.database()
    for chunk, row in enumerate(database.table.tolist()):
        document = corpora[row[0]].documents[row[1]]
        following = document[row[2] : row[2] + 2 * LENGTH]
        padded = np.full(2 * LENGTH, upstream.EOD)
        padded[: len(following)] = following
        np.testing.assert_array_equal(database.tokens(chunk, 2), padded)
    nothing = database.tokens([[-1, 0]], 2)
    assert nothing.shape == (1, 2, 2 * LENGTH)
    assert (nothing[0, 0] == upstream.EOD).all()
    np.testing.assert_array_equal(nothing[0, 1], database.tokens(0, 2))
    with pytest.raises(ValueError, match=r"chunk 100000 of a database of .* query-neighbors"):
        database.tokens(100_000)


def test_documents_of_chunks(project, prefixes):
    database = project.database()
    assert database.sources == prefixes
    np.testing.assert_array_equal(
        database.documents([[0, -1], [len(database) - 1, 1]]),
        [[database.table[0, :2], [-1, -1]], [database.table[-1, :2], database.table[1, :2]]],
    )


def test_workers_of_a_loader_get_no_copy(project):
    database = project.database()
    sent = pickle.dumps(database)
    assert len(sent) < 2000 < database.table.nbytes
    received = pickle.loads(sent)
    every = np.arange(len(database))
    np.testing.assert_array_equal(received.tokens(every, 2), database.tokens(every, 2))
    assert isinstance(received.table.base, np.memmap)


def test_files_are_upstreams(project, corpora):
    """Names, shapes, types, and offsets, as REFERENCE's readers expect them."""
    folder = project.database_folder
    parts = sorted(p.name for p in (folder / "individual" / "first").glob("*.hdf5"))
    assert parts == ["000-010.hdf5", "010-020.hdf5", "020-030.hdf5", "030-040.hdf5"]
    chunks = read_array(project.database_file, "chunks")
    offsets = read_array(project.database_file, "doc_offsets")
    assert offsets.dtype == np.uint64
    assert len(offsets) == sum(each.for_training for each in corpora)
    expected = [
        (dataset, document, int((chunks[:, 0] < dataset).sum()
         + ((chunks[:, 0] == dataset) & (chunks[:, 1] <= document)).sum()))
        for dataset, each in enumerate(corpora)
        for document in range(each.for_training)
    ]  # fmt: skip
    np.testing.assert_array_equal(offsets, expected)
    for name in ("train", "sampled", "valid"):
        path = folder / "merged" / f"{name}.hdf5"
        written = read_array(path, "n_written")
        assert written.dtype == np.uint64
        assert written.tolist() == [len(read_array(path, "chunks"))]
    block = folder / "individual" / "first" / parts[1]
    within = read_array(block, "chunks_valid")
    assert within.dtype == np.uint32
    np.testing.assert_array_equal(
        within, chunks[(chunks[:, 0] == 0) & (chunks[:, 1] >= 10) & (chunks[:, 1] < 20)][:, 1:]
    )
    assert read_array(block, "chunks_invalid").shape == (0, 4)
    ends = [[n, (within[:, 0] <= n).sum()] for n in range(10, 20)]
    np.testing.assert_array_equal(read_array(block, "doc_offsets"), ends)


def test_the_others_documents_are_not_in_the_database(project, corpora):
    held_out = read_array(project.database_folder / "merged" / "valid.hdf5", "chunks")
    for dataset, each in enumerate(corpora):
        found = set(held_out[held_out[:, 0] == dataset, 1].tolist())
        assert found == set(range(each.for_training, len(each.documents)))


def test_sampled_chunks_are_the_first_of_each_dataset(project):
    table = read_array(project.database_file, "chunks")
    sampled = read_array(project.database_folder / "merged" / "sampled.hdf5", "chunks")
    expected = [table[table[:, 0] == n][: int(60 * ratio / 3)] for n, ratio in enumerate((2, 1))]
    np.testing.assert_array_equal(sampled, np.concatenate(expected))


def test_chunks_without_text_for_the_embedder_are_left_out(tmp_path):
    """They are listed apart, and the chunks after them keep their places in the document."""
    text = np.array([*b"a" * 16, *b" " * 16, *b"words here", upstream.EOD])
    with IndexedDatasetWriter(tmp_path / "gaps", np.uint16) as writer:
        for _ in range(12):
            writer.add_document([text])
    project = build(tmp_path / "project", *flags([str(tmp_path / "gaps")]))
    chunks = read_array(project.database_file, "chunks")
    assert chunks[:2].tolist() == [[0, 0, 0, 16, 1], [0, 0, 32, 42, 2]]
    block = project.database_folder / "individual" / "gaps" / "000-010.hdf5"
    assert read_array(block, "chunks_invalid")[0].tolist() == [0, 16, 32, 0]
    (info,) = json.loads(project.datasets_file.read_text())
    assert info["n_chunks_invalid"] == 12
    # The continuation is the text that follows, although it is no chunk.
    assert bytes(project.database().tokens(0, 2).tolist()) == b"a" * 16 + b" " * 16


def test_raw_text_is_copied_into_the_project(corpora, prefixes, tmp_path):
    texts = [bytes(tokens[:-1].tolist()).decode() for tokens in corpora[0].documents]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    raw = build(tmp_path / "raw", *flags([str(file)]))
    copy = tmp_path / "copy"
    with IndexedDatasetWriter(copy, np.uint16) as writer:
        for text in filter(None, texts):
            writer.add_document([np.array([*text.encode(), upstream.EOD])])
    indexed = build(tmp_path / "indexed", *flags([str(copy)]))
    tables = [read_array(each.database_file, "chunks") for each in (raw, indexed)]
    assert len(tables[0]) > 100
    np.testing.assert_array_equal(*tables)
    chunks = np.arange(len(tables[0]))
    np.testing.assert_array_equal(*(each.database().tokens(chunks, 2) for each in (raw, indexed)))
    assert raw.database().sources == [str(file)]
    (info,) = json.loads(raw.datasets_file.read_text())
    assert info["prefix"] == "texts.jsonl"  # of a project that may be moved
    content = file.read_text()
    file.write_text(content.replace("a", "b"))
    with pytest.raises(ValueError, match=r"texts.jsonl has changed since .* was copied from it"):
        build(tmp_path / "raw", *flags([str(file)]))
    file.write_text(content)
    os.rename(tmp_path / "raw", tmp_path / "moved")
    moved = RetroProject(tmp_path / "moved").database().tokens(chunks)
    np.testing.assert_array_equal(moved, indexed.database().tokens(chunks))


def test_named_corpora(prefixes, project, tmp_path, monkeypatch):
    """As --data-path, also from another folder."""
    content: dict[str, dict] = {"all": {"corpora": ["x", "y"]}}
    content["x"] = {"files": prefixes[0], "weight": 2}
    content["y"] = {"files": prefixes[1], "weight": 1}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    words = flags(prefixes)
    words[: words.index("--split")] = ["--train-data", "all", "--corpora-file", "mine.json"]
    words.insert(0, "--corpora-outside")
    monkeypatch.chdir(tmp_path)
    named = build(tmp_path / "project", *words)
    monkeypatch.chdir("/")
    build(named.folder, "--retro-task-validate", "1")
    for file in ("train", "sampled"):
        path = f"merged/{file}.hdf5"
        same = (named.database_folder / path).read_bytes()
        assert same == (project.database_folder / path).read_bytes()


def test_files_of_the_same_name(corpora, tmp_path):
    """Each has blocks of its own."""
    paths = []
    for folder, number, name in (("x", 0, "c"), ("y", 1, "c"), ("z", 0, "c-2")):
        (tmp_path / folder).mkdir()
        renamed = upstream.Corpus(name, corpora[number].documents)
        paths += upstream.write_corpora(tmp_path / folder, [renamed])
    project = build(tmp_path / "project", *flags(paths, blend=("1", "1", "1")))
    assert {p.name for p in (project.database_folder / "individual").iterdir()} == {
        *("c", "c-2", "c-2-2")
    }
    table = project.database().table
    first, last = (table[table[:, 0] == number, 1:] for number in (0, 2))
    np.testing.assert_array_equal(first, last)


def test_two_ranges_of_a_file_are_one_source(prefixes, tmp_path):
    halves = [f"{prefixes[0]}@0:0.5", f"{prefixes[0]}@0.5:1"]
    project = build(tmp_path / "project", *flags(halves))
    database = project.database()
    assert database.sources == [prefixes[0], prefixes[0]]
    assert set(database.table[:, 0].tolist()) == {0, 1}
    documents = database.documents(np.arange(len(database)))
    assert set(documents[:, 0].tolist()) == {1}
    assert set(documents[:, 1].tolist()) == (set(range(16)) | set(range(20, 36))) - {3}
    names = sorted(p.name for p in (project.database_folder / "individual").iterdir())
    assert names == ["first", "first-2"]


def test_a_stopped_stage_continues(project, prefixes, tmp_path):
    """Blocks that are missing or cut short are made, the others are not; the files are the same."""
    whole = files_of(project.folder)
    again = build(tmp_path / "again", *flags(prefixes))
    assert files_of(again.folder) == whole
    parts = again.database_folder / "individual"
    kept, cut, missing = sorted(parts.rglob("*.hdf5"))[:3]
    before = kept.stat().st_ino
    cut.write_bytes(cut.read_bytes()[:3000])
    missing.unlink()
    again.datasets_file.unlink()
    (again.database_folder / "merged" / "train.hdf5").unlink()
    build(again.folder, *flags(prefixes))
    assert files_of(again.folder) == whole
    assert kept.stat().st_ino == before


@pytest.mark.parametrize("file", ["individual/second/000-010", "merged/sampled", "merged/train"])
def test_validation_finds_a_changed_bit(prefixes, tmp_path, file, capsys):
    project = build(tmp_path, *flags(prefixes))
    build(tmp_path, "--retro-task-validate", "1")
    assert "all equal" in capsys.readouterr().out
    path = project.database_folder / f"{file}.hdf5"
    name = "chunks_valid" if "individual" in file else "chunks"
    arrays = {n: read_array(path, n).copy() for n in array_shapes(path)}
    arrays[name][-1, -1] ^= 1
    write_arrays(path, arrays)
    with pytest.raises(ValueError, match=rf"{path.name}: {name} is not what this run computes"):
        build(tmp_path, "--retro-task-validate", "1")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--retro-gpt-chunk-length", "32"), r"--retro-gpt-chunk-length 32: .* is 16"),
        (("--retro-chunk-length", "32"), r"--retro-chunk-length 32: retro_gpt_chunk_length .* 16"),
        (("--retro-gpt-seq-length", "128"), r"--retro-gpt-seq-length 128: .* is 64"),
        (("--train-iters", "9", "--global-batch-size", "4"), r"--train-iters 36: .* is 40"),
        (("--tokenizer-model", "x"), r"--tokenizer-model x: retro_gpt_tokenizer_model .* is None"),
        (("--seed", "5"), r"--seed 5: retro_gpt_seed of .*config.json is 1234"),
        (("--tokenizer-type", "NullTokenizer"), r"--tokenizer-type NullTokenizer: .* ByteLevel"),
        (("--data-path", "elsewhere"), r"--data-path .*elsewhere.* retro_gpt_data_path .* is"),
        (("--bert-embedder-type", "huggingface"), r"--bert-embedder-type huggingface: .* hashing"),
    ],
)  # fmt: skip
def test_flags_that_contradict_the_project(project, given, told):
    with pytest.raises(ValueError, match=told + r".*leave the flag out, or make another"):
        build(project.folder, *given)


def test_a_changed_corpus_is_named(prefixes, corpora, tmp_path):
    upstream.write_corpora(tmp_path, corpora)
    paths = [str(tmp_path / each.name) for each in corpora]
    project = build(tmp_path / "project", *flags(paths))
    longer = upstream.Corpus("second", [*corpora[1].documents, corpora[0].documents[0]])
    other = upstream.Corpus(
        "second", [np.where(t == ord("a"), ord("b"), t) for t in corpora[1].documents]
    )
    for changed in (longer, other):
        upstream.write_corpora(tmp_path, [changed])
        told = r"second has changed since .*db was made .*restore"
        with pytest.raises(ValueError, match=told):
            project.database()
        with pytest.raises(ValueError, match=told):
            build(project.folder, *flags(paths))


def test_a_corpus_that_changed_before_the_end_is_read_again(prefixes, corpora, tmp_path):
    """No block of the earlier one is in the database."""
    upstream.write_corpora(tmp_path, corpora)
    paths = [str(tmp_path / each.name) for each in corpora]
    project = build(tmp_path / "stopped", *flags(paths))
    project.datasets_file.unlink()
    upstream.write_corpora(tmp_path, [upstream.corpus("second", 20, 3)])
    build(project.folder, *flags(paths))
    fresh = build(tmp_path / "fresh", *flags(paths))
    assert files_of(project.folder) == files_of(fresh.folder)


def test_what_is_missing_is_named(tmp_path, prefixes):
    with pytest.raises(ValueError, match="missing --retro-project-dir"):
        run_preprocessing(None, ["--retro-tasks", "db-build"])
    with pytest.raises(ValueError, match=r"config.json does not exist; .*preprocess_data.py"):
        RetroProject(tmp_path)
    with pytest.raises(ValueError, match="missing --retro-gpt-seq-length"):
        build(tmp_path, "--data-path", *prefixes)
    with pytest.raises(ValueError, match="missing --retro-gpt-global-batch-size"):
        build(tmp_path, "--data-path", *prefixes, "--seq-length", "64")
    sizes = ("--retro-gpt-seq-length", "64", "--global-batch-size", "4")
    with pytest.raises(ValueError, match="missing --retro-gpt-train-samples"):
        build(tmp_path, "--data-path", *prefixes, *sizes)
    with pytest.raises(ValueError, match=r"--retro-tasks db-bild: .*the nearest is db-build"):
        build(tmp_path, *flags(prefixes), task="db-bild")
    project = RetroProject(build(tmp_path, *flags(prefixes)).folder)
    project.database_file.unlink()
    with pytest.raises(ValueError, match=r"has no database .*--retro-tasks db-build"):
        project.database()
    with pytest.raises(ValueError, match=r"no neighbours for valid; .*--retro-tasks query"):
        project.neighbors("valid")


def test_a_damaged_file_is_named(project, tmp_path):
    path = tmp_path / "cut.hdf5"
    path.write_bytes(project.database_file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut.hdf5 is damaged or cut short; delete it and run"):
        read_array(path, "chunks")
    with pytest.raises(ValueError, match=r"train.hdf5 has no dataset data, only chunks, doc_off"):
        read_array(project.database_file, "data")


def test_a_full_disk_is_named(prefixes, tmp_path, project):
    """What is there stays, and the next run continues with it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, limits[1]))
    try:
        told = r"hdf5 cannot be written: .* free space on the disk, and run db-build again"
        with pytest.raises(OSError, match=told):
            build(tmp_path, *flags(prefixes))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = files_of(tmp_path)
    assert {"config.json", "db/individual/first/000-010.hdf5"} <= left.keys()
    assert not [name for name in left if "partial" in name]
    build(tmp_path, *flags(prefixes))
    assert files_of(tmp_path) == files_of(project.folder)


def processes(folder, words, count):
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(count), "tools/retro/preprocess_data.py"),
        *("--retro-project-dir", str(folder), "--retro-tasks", "db-build", *words),
    ]


@pytest.mark.proof
def test_two_processes_write_the_same_files(project, prefixes, tmp_path):
    done = subprocess.run(
        processes(tmp_path, flags(prefixes), 2), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path) == files_of(project.folder)
