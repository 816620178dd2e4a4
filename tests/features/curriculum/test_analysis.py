"""Difficulties of samples, against sums written out."""

import math
import multiprocessing
import os
import signal

import numpy as np
import pytest

from megatron.data.samples import PackedSample
from megatron.features.curriculum import analysis, metric_files
from megatron.features.curriculum.analysis import Analysis, sample_tokens, token_rarity
from megatron.features.curriculum.metric_files import read_rows
from megatron.features.masked.batch import BertSample


class Tokens:
    """Samples of 9 tokens below 50, small ones more often."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        rng = np.random.default_rng([1, index])
        return (50 * rng.random(9) ** 2).astype(np.int64)

    def origin(self, index):
        return ()


def analyse(samples, metrics, folder, **more):
    return analysis.analyse(Analysis(samples, metrics, folder, 64, 9), **more)


def packed(lengths, padding):
    """Documents of these lengths, the first token of each without a loss, then padding."""
    total = sum(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = np.ones(total, np.float32)
    mask[np.cumsum([0, *lengths[:-1]])] = 0
    return PackedSample(
        np.arange(total + padding + 1),
        np.concatenate([mask, np.zeros(padding, np.float32)]),
        np.concatenate([ids, np.full(padding, len(lengths))]),
    )


def test_rarity_against_a_sum(tmp_path):
    samples = [Tokens()[i].tolist() for i in range(61)]
    every = [token for sample in samples for token in sample]
    # A token that never occurs counts as one that did: 64 rows and one more.
    total = sum(max(1, every.count(token)) for token in range(65))
    expected = [
        int(sum(-math.log(every.count(token) / total) for token in sample)) for sample in samples
    ]
    (summary,) = analyse(Tokens(), ["vocab_rarity"], tmp_path)
    actual = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_sample_to_metric")).values
    assert actual.tolist() == expected
    assert summary.percentiles[0] == min(expected) and summary.percentiles[100] == max(expected)
    values = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_index_to_metric")).values
    members = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_index_to_sample"))
    assert values.tolist() == sorted(set(expected))
    for row, value in enumerate(values):
        assert members[row].tolist() == [i for i, known in enumerate(expected) if known == value]


def test_workers_threads_and_processes_write_the_same(tmp_path, monkeypatch):
    """Also a thread without samples, and one that runs again after the others."""
    for module in (analysis, metric_files):
        monkeypatch.setattr(module, "BLOCK", 7)
    monkeypatch.setattr(analysis, "usable_processors", lambda: 1)
    analyse(Tokens(), ["seqlen", "vocab_rarity"], tmp_path / "one")
    for name in ("total_vocab_freq", "seqlen", "vocab_rarity"):
        several = Analysis(Tokens(), [name], tmp_path / "two", 64, 9, 4, 17)
        for worker in range(4):
            several.map(worker, only_threads=range(16))
        with pytest.raises(FileNotFoundError, match="worker-id 0 --analyzing-specific-threads 16"):
            several.reduce()
        for worker in range(4):
            several.map(worker, only_threads=[16])
        several.reduce(processes=3)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*")]
    assert len(files) == 2 * 9 + 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_tokens_of_packed_samples_without_padding():
    assert sample_tokens(packed([4, 3], padding=0)).tolist() == list(range(8))
    assert sample_tokens(packed([4, 3], padding=5)).tolist() == list(range(8))
    with pytest.raises(ValueError, match="samples of the type dict have no metrics"):
        sample_tokens({})


class Masked(Tokens):
    """Samples of BERT, of 3 to 9 tokens in 16."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)[: 3 + index % 7]
        parts = np.zeros_like(tokens), np.array([1]), tokens[1:2].copy(), 0
        tokens[1] = 63  # the mask
        return BertSample.padded(tokens, *parts, seq_length=16, pad=0)


def test_samples_of_bert_count_what_is_no_padding(tmp_path):
    analyse(Masked(), ["seqlen", "vocab_rarity"], tmp_path)
    lengths = read_rows(str(tmp_path / "seqlen" / "seqlen_sample_to_metric")).values
    assert lengths.tolist() == [3 + i % 7 for i in range(len(Masked()))]
    counts = read_rows(str(tmp_path / "total_vocab_freq" / "total_vocab_freq_metric_value")).values
    assert counts.sum() == lengths.sum()


def test_samples_of_bert_are_known_again_without_their_masks(tmp_path):
    """In another process too: no part of the fingerprint is the address of an object."""
    seen = [sample_tokens(Masked()[i]) for i in range(len(Masked()))]
    assert seen[0].tolist() == Tokens()[0][:3].tolist()
    assert seen[5].tolist() == Tokens()[5][:8].tolist()
    assert analysis.fingerprint(Masked()) == "e4563fbcbb24a3ca1e5e360172c128ab"


def test_parts_of_other_samples_are_refused(tmp_path):
    """Refuse another division with parts of equal size, and token counts of other samples."""
    Analysis(Tokens(), ["seqlen"], tmp_path, 64, 9, 4, 1).map(1)
    two = Analysis(Tokens(), ["seqlen"], tmp_path, 64, 9, 2, 2)
    two.map(0)
    two.map(1, only_threads=[1])
    with pytest.raises(ValueError, match=r"thread0 was made of .* than 2 and 2: run --ana"):
        two.reduce()
    rarity = Analysis(Tokens(), ["vocab_rarity"], tmp_path, 64, 9)
    with pytest.raises(FileNotFoundError, match="run --analyzing-metric total_vocab_freq, map and"):
        rarity.map()
    analyse(Masked(), ["total_vocab_freq"], tmp_path)
    with pytest.raises(ValueError, match="total_vocab_freq was made of other samples, or another"):
        rarity.map()


def test_all_missing_parts_are_named(tmp_path):
    four = Analysis(Tokens(), ["seqlen"], tmp_path, 64, 9, 4, 3)
    four.map(0)
    four.map(2, only_threads=[1])
    said = "worker-id 1, --analyzing-worker-id 2 --analyzing-specific-threads 0 2, .*-worker-id 3,"
    with pytest.raises(FileNotFoundError, match=f"worker1_thread0.*idx does not exist: .*{said}"):
        four.reduce()


class Ending(Tokens):
    """Other samples, of which some cannot be read."""

    def __getitem__(self, index):
        if index > 40:
            raise OSError("the disk is gone")
        return super().__getitem__(index) + 1


@pytest.mark.parametrize("name", ["total_vocab_freq", "seqlen"])
def test_an_ended_map_leaves_no_older_values(name, tmp_path):
    Analysis(Tokens(), [name], tmp_path, 64, 9).map()
    with pytest.raises(OSError, match="the disk is gone"):
        Analysis(Ending(), [name], tmp_path, 64, 9).map()
    with pytest.raises((ValueError, FileNotFoundError), match="run --analyzing-task map with"):
        Analysis(Tokens(), [name], tmp_path, 64, 9).reduce()
    Analysis(Tokens(), [name], tmp_path, 64, 9).map()
    (summary,) = Analysis(Tokens(), [name], tmp_path, 64, 9).reduce()
    assert summary.samples == len(Tokens())


def test_rarity_of_tokens():
    np.testing.assert_allclose(token_rarity(np.array([3, 0, 4])), -np.log([3 / 8, 1 / 8, 4 / 8]))


def test_unknown_metrics(tmp_path):
    with pytest.raises(ValueError, match="--analyzing-metric perplexity must be one of total"):
        analyse(Tokens(), ["perplexity"], tmp_path)


def test_progress_counts_both_readings(tmp_path):
    told = []
    analyse(Tokens(), ["vocab_rarity"], tmp_path, progress=lambda *now: told.append(now))
    assert told[-1] == (122, 122) and told == sorted(set(told)) and len(told) == 8


class Deadly(Tokens):
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None and index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.proof
def test_a_killed_process_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "SAMPLES_PER_PROCESS", 1)
    monkeypatch.setattr(analysis, "usable_processors", lambda: 2)
    with pytest.raises(OSError, match="killed by SIGKILL .*; the files are not complete"):
        analysis.analyse(Analysis(Deadly(), ["vocab_rarity"], tmp_path, 64, 9, threads=2))
    assert not list(tmp_path.rglob("*.idx"))
