"""The neighbours of samples, compared with a search written from its description."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upstream_retro import EOD, Corpus, corpus, gpt_flags, write_corpora, write_project

from megatron.apps.retro.blocks import FileBlock
from megatron.apps.retro.index.exact import ExactIndex
from megatron.apps.retro.preprocessing import project_run
from megatron.apps.retro.query import Retriever, SampleChunks, first_kept, gpt_samples, neighbors_of
from megatron.config import Setting
from megatron.families import family_of
from megatron.features.retro.project import RetroProject
from megatron.run.run import run_of
from megatron.training.plan import TrainingPlan

pytest.importorskip("h5py")

CHUNK, SEQ_LENGTH, SEARCHED, KEPT = 32, 128, 200, 20


class WordVectors:
    """The mean of a random vector of each word."""

    width = 24
    identity = {"type": "words"}

    def lengths(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([len(text.split()) for text in texts])

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([self._vector(text) for text in texts], np.float32)

    def _vector(self, text: str) -> np.ndarray:
        seeds = sorted(zlib.crc32(word.encode()) for word in text.split()) or [0]
        rows = [np.random.default_rng(seed).standard_normal(self.width) for seed in seeds]
        return np.mean(rows, axis=0)


def text_of(tokens: np.ndarray) -> str:
    return bytes(tokens[tokens != EOD].astype(np.uint8)).decode()


@pytest.fixture(scope="module", params=[40, pytest.param(400, marks=pytest.mark.proof)])
def made(request, tmp_path_factory):
    """A project of two corpora, with the index of all its chunks: 1,232 or 13,743."""
    folder: Path = tmp_path_factory.mktemp("retro")
    corpora = [corpus("a", 2 * request.param, 1), corpus("b", request.param, 2)]
    flags = gpt_flags(write_corpora(folder, corpora), SEQ_LENGTH, train_samples=20)
    table = write_project(folder / "project", corpora, flags["data_path"][1::2], flags, CHUNK)
    retriever = Retriever(RetroProject(folder / "project"), WordVectors(), SEARCHED)
    vectors = WordVectors().embed([text_of(tokens_of(corpora, row)) for row in table])
    retriever.index = ExactIndex(WordVectors.width)
    retriever.index.add(vectors)
    return corpora, flags, table, vectors, retriever


def tokens_of(corpora: Sequence[Corpus], row: Sequence[int]) -> np.ndarray:
    dataset, document, start, end, _ = row
    return corpora[dataset].documents[document][start:end]


def samples_of_training(flags: dict) -> dict:
    """The samples that a GPT trained with the flags reads, by part."""
    model = dict(num_layers=2, hidden_size=16, num_attention_heads=2, max_position_embeddings=128)
    model |= dict(micro_batch_size=2, lr=1e-4, data_path=tuple(flags["data_path"]))
    run = run_of({k: Setting(v, "test") for k, v in (flags | model).items()}, 2)
    plan = TrainingPlan(run.config)
    found = family_of("gpt").data(run.config, run.tokenizer).datasets(plan.sample_counts)
    return {"train": found.train, "valid": found.valid["valid"], "test": found.test["test"]}


def brute_force(made, samples, sample: int, chunk: int) -> np.ndarray:
    """The neighbours of a chunk: all distances in float64, sorted, 200 of them, those of the
    sample's documents taken out, 20 of the rest."""
    corpora, flags, table, vectors, _ = made
    prefixes = [word for word in flags["data_path"] if not word.isdigit()]
    own = {(prefixes.index(each.source), each.sequence) for each in samples.origin(sample)}
    text = text_of(samples[sample][chunk * CHUNK : (chunk + 1) * CHUNK])
    query = WordVectors().embed([text])[0].astype(np.float64)
    distances = ((vectors.astype(np.float64) - query) ** 2).sum(axis=1)
    found = []
    for number in np.lexsort((np.arange(len(table)), distances))[:SEARCHED].tolist():
        if tuple(table[number, :2].tolist()) not in own and len(found) < KEPT:
            found.append(number)
    return np.array(found + [-1] * (KEPT - len(found)))


def parts_of(made) -> dict[str, SampleChunks]:
    _, _, _, _, retriever = made
    numbers = {prefix: n for n, prefix in enumerate(retriever.database.sources)}
    parts = gpt_samples(project_run(retriever.project))
    per_sample = SEQ_LENGTH // CHUNK
    return {name: SampleChunks(part, per_sample, CHUNK, numbers) for name, part in parts.items()}


@pytest.mark.parametrize(("part", "samples"), [("train", 20), ("valid", 16), ("test", 8)])
def test_neighbors_equal_brute_force(made, part, samples):
    """In the order of the training run; a block begins and ends within a sample."""
    chunks, reference = parts_of(made)[part], samples_of_training(made[1])[part]
    assert len(chunks) == samples * SEQ_LENGTH // CHUNK
    block = FileBlock(3, len(chunks) - 2, Path("unused"))
    found = neighbors_of(chunks, made[-1], KEPT, block)["neighbors"]
    assert found.dtype == np.int64 and found.shape == (len(block), KEPT)
    expected = [
        brute_force(made, reference, *divmod(number, SEQ_LENGTH // CHUNK))
        for number in range(block.start, block.stop)
    ]
    np.testing.assert_array_equal(found, expected)


def test_training_text_of_no_dataset_of_the_database_is_refused(made):
    chunks = parts_of(made)
    assert chunks["valid"].read(0, 8)[1] != [frozenset()] * 8
    others = {"elsewhere": 0}
    with pytest.raises(ValueError, match="and the database of elsewhere"):
        replace(chunks["train"], numbers=others).read(0, 4)
    assert replace(chunks["valid"], numbers=others).read(0, 8)[1] == [frozenset()] * 8


def test_fewer_neighbors_than_are_kept(made):
    """Minus one where nothing is left of what was searched for."""
    *_, retriever = made
    chunks = parts_of(made)["train"]
    tokens, own = chunks.read(0, 3)
    everything = frozenset(map(tuple, made[2][:, :2].tolist()))
    few = Retriever(retriever.project, WordVectors(), searched=KEPT)
    few.index = retriever.index
    found = few.neighbors(tokens, KEPT, exclude=[everything, frozenset(), everything])
    assert (found[[0, 2]] == -1).all() and (found[1] >= 0).all()
    np.testing.assert_array_equal(few.neighbors(tokens, 5), few.neighbors(tokens, KEPT)[:, :5])


@st.composite
def choices(draw):
    queries, searched = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    dropped = np.array(draw(st.lists(st.booleans(), min_size=32, max_size=32)))
    numbers = np.arange(1, 33).reshape(4, 8)[:queries, :searched]
    return numbers, dropped.reshape(4, 8)[:queries, :searched], draw(st.integers(1, searched))


@given(choices())
def test_the_first_that_are_kept_followed_by_minus_one(made):
    numbers, dropped, k = made
    expected = []
    for row, out in zip(numbers.tolist(), dropped.tolist(), strict=True):
        kept = [number for number, left in zip(row, out, strict=True) if not left][:k]
        expected.append(kept + [-1] * (k - len(kept)))
    np.testing.assert_array_equal(first_kept(numbers, dropped, k), expected)
