"""Difficulties of samples, against sums written out."""

import math
import multiprocessing
import os
import signal

import numpy as np
import pytest

from megatron.data.kinds.curriculum.analysis import analyse, read_rows, sample_tokens, token_rarity
from megatron.data.kinds.masked_data.masked_batch import BertSample
from megatron.data.samples import PackedSample


class Tokens:
    """Samples of 9 tokens below 50, small ones more often."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        rng = np.random.default_rng([1, index])
        return (50 * rng.random(9) ** 2).astype(np.int64)

    def origin(self, index):
        return ()


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
    wanted = [
        int(sum(-math.log(every.count(token) / total) for token in sample)) for sample in samples
    ]
    (summary,) = analyse(Tokens(), ["vocab_rarity"], tmp_path, 64)
    found = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_sample_to_metric")).values
    assert found.tolist() == wanted
    assert summary.percentiles[0] == min(wanted) and summary.percentiles[100] == max(wanted)
    values = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_index_to_metric")).values
    members = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_index_to_sample"))
    assert values.tolist() == sorted(set(wanted))
    for row, value in enumerate(values):
        assert members[row].tolist() == [i for i, known in enumerate(wanted) if known == value]


def test_several_processes_write_the_same(tmp_path):
    analyse(Tokens(), ["seqlen", "vocab_rarity"], tmp_path / "one", 64)
    analyse(Tokens(), ["seqlen", "vocab_rarity"], tmp_path / "two", 64, processes=2)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*")]
    assert len(files) == 2 * 9 + 2
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
        parts = np.zeros_like(tokens), np.array([1]), tokens[1:2], 0
        return BertSample.padded(tokens, *parts, seq_length=16, pad=0)


def test_samples_of_bert_count_what_is_no_padding(tmp_path):
    analyse(Masked(), ["seqlen", "vocab_rarity"], tmp_path, 64)
    lengths = read_rows(str(tmp_path / "seqlen" / "seqlen_sample_to_metric")).values
    assert lengths.tolist() == [3 + i % 7 for i in range(len(Masked()))]
    counts = read_rows(str(tmp_path / "total_vocab_freq" / "total_vocab_freq_metric_value")).values
    assert counts.sum() == lengths.sum()


def test_rarity_of_tokens():
    np.testing.assert_allclose(token_rarity(np.array([3, 0, 4])), -np.log([3 / 8, 1 / 8, 4 / 8]))


def test_unknown_metrics(tmp_path):
    with pytest.raises(ValueError, match="--analyzing-metric perplexity must be one of seqlen"):
        analyse(Tokens(), ["perplexity"], tmp_path, 64)


def test_progress_counts_both_readings(tmp_path):
    told = []
    analyse(Tokens(), ["vocab_rarity"], tmp_path, 64, progress=lambda *now: told.append(now))
    assert told[-1] == (122, 122) and told == sorted(set(told)) and len(told) == 8


class Deadly(Tokens):
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None and index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.proof
def test_a_killed_process_is_an_error(tmp_path):
    with pytest.raises(OSError, match="killed by SIGKILL .*; the files are not complete"):
        analyse(Deadly(), ["vocab_rarity"], tmp_path, 64, processes=2)
    assert not list(tmp_path.rglob("*.idx"))
