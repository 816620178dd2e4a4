"""build_index.py fills the cache that a run looks into, so that the run builds nothing."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.corpus.prebuilding import in_processes
from megatron.data import index_cache
from megatron.run.run import parse_run, run_data
from tools import build_index

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 12 --eval-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 500"
).split()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch) -> None:
    """Indices of relative paths are next to them."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Three files, by weight."""
    paths = []
    for number, name in enumerate("abc"):
        rng = np.random.default_rng(number)
        lengths = rng.integers(1, 40, 60)
        with IndexedDatasetWriter(tmp_path / name, "int32") as writer:
            writer.add_documents(rng.integers(500, size=lengths.sum()), lengths, [1] * 60)
        paths += [str(number + 1), str(tmp_path / name)]
    return paths


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("blend", [True, False])
def test_a_run_then_builds_nothing(
    workers: str, blend: bool, corpus: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    flags = [*FLAGS, "--split", "80,10,10", "--data-path", *(corpus if blend else corpus[1:2])]
    ahead, alone = (["--data-cache-path", str(tmp_path / name)] for name in ("ahead", "alone"))
    build_index.main(["--workers", workers, *flags, *ahead])
    out = capsys.readouterr().out.splitlines()
    expected = run_data(parse_run(None, [*flags, *alone])).datasets
    assert entries(tmp_path / "ahead") == entries(tmp_path / "alone")
    # Files of token ids, parts of three files and blends; of one file, its three parts.
    assert len(entries(tmp_path / "ahead")) == (3 + 9 + 3 if blend else 1 + 3)

    monkeypatch.setattr(index_cache._Entry, "publish", lambda *_: pytest.fail("built again"))
    found = run_data(parse_run(None, [*flags, *ahead])).datasets
    parts = [found.train, found.valid["valid"], found.test["test"]]
    others = [expected.train, expected.valid["valid"], expected.test["test"]]
    for name, line, ours, other in zip(
        ("train", "valid", "test"), out, parts, others, strict=False
    ):
        assert line == f"{name}: {len(ours):,} samples" and len(ours) == len(other)
        assert all(np.array_equal(ours[i], other[i]) for i in range(len(ours)))


def test_each_entry_is_built_by_a_worker(corpus: list[str], tmp_path: Path, monkeypatch) -> None:
    publish = index_cache._Entry.publish

    def noting(entry, built):
        with (tmp_path / "log").open("a") as file:
            file.write(f"{os.getpid()} {entry.folder.name.split('-')[0]}\n")
        return publish(entry, built)

    monkeypatch.setattr(index_cache._Entry, "publish", noting)
    flags = ["--split", "80,10,10", "--data-path", *corpus]
    build_index.main(["--workers", "3", *FLAGS, *flags])
    by = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    ours = {kind for process, kind in by if process == str(os.getpid())}
    theirs = [kind for process, kind in by if process != str(os.getpid())]
    assert ours == {"blend"}
    assert (theirs.count("gpt"), theirs.count("token")) == (9, 3)


def test_the_number_of_processes_counts(corpus: list[str], tmp_path: Path, capsys) -> None:
    """Without --global-batch-size a step takes a micro batch of each."""
    flags = [f for f in FLAGS if f not in ("--global-batch-size", "8")]
    flags += ["--data-path", *corpus, "--split", "1,0,0"]
    for size, samples in ((1, 24), (4, 96)):
        build_index.main(["--world-size", str(size), *flags])
        assert f"train: {samples} samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "0"], "--workers and --world-size start at 1"),
        (["--mock-data"], "--mock-data needs no index"),
        ([], "no training data"),
        (["--data-path", "nowhere"], r"--data-path nowhere: nowhere\.idx does not exist"),
    ],
)
def test_flags_without_an_index(more: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"build_index.py: error: .*{message}"):
        build_index.main([*FLAGS, *more])


def test_an_id_past_the_vocabulary_is_found_by_a_worker(corpus: list[str], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "b", "int32") as writer:
        writer.add_document([np.array([1, 777])])
    with pytest.raises(SystemExit, match=r"b\.bin: sequence 0 contains the token id 777"):
        build_index.main(["--workers", "2", *FLAGS, "--data-path", *corpus])


def test_jobs_in_processes(tmp_path: Path) -> None:
    in_processes([lambda n=n: (tmp_path / str(n)).touch() for n in range(20)], 3)
    assert len(list(tmp_path.iterdir())) == 20

    def fail() -> None:
        raise ValueError("the third")

    jobs = [lambda: None, lambda: None, fail, *[lambda: None] * 5]
    with pytest.raises(ValueError, match="the third"):
        in_processes(jobs, 2)
    with pytest.raises(OSError, match="was killed.*fewer --workers"):
        in_processes([lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None], 2)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families(family: str, tmp_path: Path, capsys) -> None:
    """Of sentences, for the family of the run's model."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(60))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 9, 120)
    with IndexedDatasetWriter(tmp_path / "sentences", "int32") as writer:
        writer.add_documents(rng.integers(5, 65, size=lengths.sum()), lengths, [4] * 30)
    flags = [
        *FLAGS[:-4],
        *("--model-family", family, "--data-path", str(tmp_path / "sentences")),
        *("--vocab-file", str(tmp_path / "vocab.txt"), "--vocab-extra-ids", "20"),
        *("--split", "80,10,10"),
    ]
    ahead, alone = (["--data-cache-path", str(tmp_path / name)] for name in ("ahead", "alone"))
    build_index.main(["--workers", "1", *flags, *ahead])
    assert "train: 96 samples" in capsys.readouterr().out
    run_data(parse_run(None, [*flags, *alone]))
    assert entries(tmp_path / "ahead") == entries(tmp_path / "alone")
    assert all(name.startswith(family) for name in entries(tmp_path / "ahead") if "train" in name)
