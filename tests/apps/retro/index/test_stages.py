"""The stages index-train and index-add of a project, on hashed words."""

import itertools
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import upstream_retro as upstream
from samples import sampled

from megatron.apps.retro.command import run_preprocessing
from megatron.apps.retro.config import IndexFlags
from megatron.apps.retro.embedding import HashingEmbedder, chunk_texts
from megatron.apps.retro.index import existing_files, open_index, stages
from megatron.config import ConfigError, TokenizerConfig
from megatron.features.retro.hdf5 import read_array
from megatron.features.retro.project import RetroProject
from megatron.tokenizer import build_tokenizer

pytest.importorskip("h5py")

LENGTH, WIDTH = 16, 8
CLUSTERS = "IVF8,Flat"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A project with a database."""
    folder = tmp_path_factory.mktemp("index")
    corpora = [upstream.corpus("first", 30, 1), upstream.corpus("second", 15, 2)]
    first, second = upstream.write_corpora(folder, corpora)
    paths = ("--data-path", "2", first, "1", second, "--split", "80,15,5")
    build(
        folder / "project", "db-build", *paths,
        *("--seq-length", "64", "--train-samples", "40", "--global-batch-size", "4"),
        *("--eval-interval", "5", "--eval-iters", "2", "--tokenizer-type", "ByteLevelTokenizer"),
        *("--retro-gpt-chunk-length", str(LENGTH), "--retro-block-size", "150"),
        *("--bert-embedder-type", "hashing", "--retro-hashing-width", str(WIDTH)),
        *("--retro-index-ntrain", "400"),
    )  # fmt: skip
    return folder / "project"


@pytest.fixture
def project(begun, tmp_path):
    """A copy of it."""
    return RetroProject(shutil.copytree(begun, tmp_path / "project"))


def build(folder, tasks, *flags):
    run_preprocessing(None, ["--retro-project-dir", str(folder), "--retro-tasks", tasks, *flags])


def index(project, *flags, tasks="index-train,index-add"):
    hashing = ("--bert-embedder-type", "hashing", "--retro-hashing-width", str(WIDTH))
    build(project.folder, tasks, *hashing, "--retro-index-recall-queries", "50", *flags)


def index_file(project, flags):
    """The finished index that the flags describe."""
    return existing_files(project.index_folder, flags, "index-add").added


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def vectors_of(project):
    database = project.database()
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    texts = chunk_texts(tokenizer, database.tokens(np.arange(len(database))))
    return HashingEmbedder(WIDTH).embed(texts)


def test_an_exact_index_has_the_vectors_of_all_chunks(project, capsys):
    index(project)
    assert "the search is exact" in capsys.readouterr().out
    path = index_file(project, IndexFlags())
    assert path == project.index_folder / "faiss-par-add/Flat/added_1.000_1.000.faissindex"
    found = open_index(project, HashingEmbedder(WIDTH))
    vectors = vectors_of(project)
    assert found.holds(0, found.encode(vectors)) and len(found) == len(vectors)
    left = {str(p.relative_to(path.parent)) for p in path.parent.rglob("*")}
    assert left == {"empty_1.000.faissindex", path.name, "added_1.000_1.000.json"}
    path.with_suffix(".json").unlink()  # upstream has none
    assert len(open_index(project, HashingEmbedder(WIDTH))) == len(vectors)


def test_types_agree_and_recall_is_that_of_brute_force(project, capsys):
    pytest.importorskip("faiss")
    probes = ("--retro-index-str", CLUSTERS, "--retro-query-nprobe", "2")
    index(project, *probes)
    index(project, *probes, "--retro-index-type", "faiss-base")
    own, base = (
        project.index_folder / kind / CLUSTERS / "added_1.000_1.000.faissindex"
        for kind in ("faiss-par-add", "faiss-base")
    )
    assert own.read_bytes() == base.read_bytes()
    told = json.loads(own.with_suffix(".json").read_text())
    vectors = vectors_of(project).astype(np.float64)
    asked = np.arange(50) * len(vectors) // 50
    distances = ((vectors[asked, None] - vectors) ** 2).sum(-1)
    distances[np.arange(50), asked] = np.inf
    flags = IndexFlags(retro_index_type="faiss-base", retro_query_nprobe=2)
    found, _ = open_index(project, HashingEmbedder(WIDTH), flags).search(
        vectors[asked].astype(np.float32), 21
    )
    for k in (2, 20):
        kth = np.sort(distances, axis=1)[:, k - 1] + 1e-9  # equal ones count as found
        lists = [[n for n in row if n != own][:k] for row, own in zip(found, asked, strict=True)]
        hits = [(distances[row, list_] <= kth[row]).sum() for row, list_ in enumerate(lists)]
        assert told["recall"][str(k)] == pytest.approx(sum(hits) / (50 * k))
    assert 0.3 < told["recall"]["20"] < 1
    said = capsys.readouterr().out
    assert f"recall {told['recall']['2']:.3f} at 2, {told['recall']['20']:.3f} at 20, of 50" in said
    with pytest.raises(ConfigError, match=r"several indices .*--retro-index-type"):
        index_file(project, IndexFlags(retro_index_str=CLUSTERS))
    with pytest.raises(ConfigError, match=r"no index of the stage index-add for .*IVF9,Flat"):
        index_file(project, IndexFlags(retro_index_str="IVF9,Flat"))


def test_shares_are_the_first_chunks(project):
    pytest.importorskip("faiss")
    shares = ("--retro-index-train-load-fraction", "0.5", "--retro-index-add-load-fraction", "0.25")
    kept = ("--retro-index-no-delete-training-embeddings", "--no-retro-index-delete-added-codes")
    index(project, "--retro-index-str", CLUSTERS, *shares, *kept)
    own = project.index_folder / "faiss-par-add" / CLUSTERS
    assert (own / "added_0.500_0.250.faissindex").is_file()
    vectors = vectors_of(project)
    chunks = open_index(project, HashingEmbedder(WIDTH))
    assert len(chunks) == int(0.25 * len(vectors))
    assert chunks.holds(0, chunks.encode(vectors[: len(chunks)]))
    # Of 400, 266 are of the first dataset and 133 of the second, of which 199 are half.
    learned = np.fromfile(project.index_folder / "train_emb/train_0.500.bin", np.float32)
    np.testing.assert_array_equal(learned.reshape(-1, WIDTH), vectors[:199])
    codes = sorted((own / "add_codes_0.500").glob("*.hdf5"))
    assert len(codes) == -(-len(chunks) // 150)
    assert read_array(codes[0], "data").shape[0] == 150


@pytest.mark.parametrize(
    "text, at",
    sampled(
        itertools.product(["Flat", CLUSTERS], range(1, 7)),
        lambda case: case in [("Flat", 3), (CLUSTERS, 2)],
    ),
)
def test_what_was_stopped_continues(project, text, at, monkeypatch):
    """Stopped in a block of each stage; the files are those of a run that was not."""
    pytest.importorskip("faiss")
    flags = ("--retro-index-str", text)
    whole, calls = stages.chunk_vectors, Counter()

    def stopping(work, chunks, *rest):
        stage = "index-add" if any(project.index_folder.rglob("empty_*")) else "index-train"
        calls[stage] += 1
        if calls[stage] == at:
            raise KeyboardInterrupt
        return whole(work, chunks, *rest)

    monkeypatch.setattr(stages, "chunk_vectors", stopping)
    stopped = 0
    while stopped < 3:
        try:
            index(project, *flags)
            break
        except KeyboardInterrupt:
            stopped += 1
    monkeypatch.undo()
    assert stopped
    other = RetroProject(shutil.copytree(project.folder, project.folder.with_name("other")))
    shutil.rmtree(other.index_folder)
    index(other, *flags)
    assert files_of(other.index_folder) == files_of(project.index_folder)


def test_blocks_of_other_chunks_are_made_again(project, monkeypatch):
    """Those that a run left that learned from others."""
    pytest.importorskip("faiss")
    flags = ("--retro-index-str", CLUSTERS)
    with monkeypatch.context() as patched:
        patched.setattr(stages, "_learn", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index(project, *flags, tasks="index-train")
    index(project, "--retro-index-ntrain", "300", tasks="db-build")
    other = RetroProject(shutil.copytree(project.folder, project.folder.with_name("other")))
    shutil.rmtree(other.index_folder)
    index(project, *flags)
    index(other, *flags)
    assert files_of(other.index_folder) == files_of(project.index_folder)


@pytest.mark.parametrize("text", ["Flat", CLUSTERS])
def test_validation_computes_the_index_again(project, text, capsys):
    pytest.importorskip("faiss")
    flags = ("--retro-index-str", text)
    index(project, *flags)
    index(project, *flags, "--retro-task-validate", "1", tasks="index-add")
    assert "blocks made again, all equal" in capsys.readouterr().out
    path = index_file(project, IndexFlags())
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"chunks \d+ to \d+ are not what this run computes"):
        index(project, *flags, "--retro-task-validate", "1", tasks="index-add")
    path.write_bytes(damaged[:-1])
    with pytest.raises(ValueError, match=r"damaged: it has not the size .* run index-add again"):
        open_index(project, HashingEmbedder(WIDTH))


def test_what_is_missing_or_of_another_embedder(project):
    pytest.importorskip("faiss")
    with pytest.raises(ConfigError, match=r"no index of the stage index-train: run .* index-train"):
        index(project, tasks="index-add")
    with pytest.raises(ValueError, match=r"at least 512 chunks and gets 399; raise"):
        index(project, "--retro-index-str", "IVF512,Flat")
    index(project)
    with pytest.raises(ConfigError, match=r"is of the embedder .*8.*, this is .*16"):
        open_index(project, HashingEmbedder(16))
