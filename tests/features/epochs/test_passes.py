"""``--epochs``: the length of a run in passes over its data, against the samples."""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.run.run import run_data, run_of

MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --lr 1 --eval-iters 0 "
    "--micro-batch-size 1 --tokenizer-type {} --num-workers 0"
)
PARSER = FlagParser(*FLAG_CLASSES)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Completes a run on files A (50 documents of 33 tokens) and B (10 of 70)."""
    monkeypatch.chdir(tmp_path)
    for name, documents, length in (("A", 50, 33), ("B", 10, 70)):
        with IndexedDatasetWriter(name, "uint16") as writer:
            for number in range(documents):
                writer.add_document([np.full(length, number)])
    chats = [{"prompt": "1 2", "completion": f"{n} 4"} for n in range(21)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))

    def complete(words: str, tokenizer: str = "NullTokenizer --vocab-size 99"):
        return run_of(PARSER.settings(f"{MODEL.format(tokenizer)} {words}".split()), 1)

    return complete


def readings(run, samples: int) -> Counter:
    """How often the first samples of a run read each (file, sequence, token)."""
    train = run_data(run).datasets.train
    pieces = chain.from_iterable(train.origin(index) for index in range(samples))
    return Counter(
        (piece.source, piece.sequence, token)
        for piece in pieces
        for token in range(piece.start, piece.stop - 1)
    )


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_token_is_read_as_often(run, epochs):
    made = run(f"--data-path A --split 80,20,0 --epochs {epochs}")
    samples = made.config.training.train_samples
    assert samples == (epochs * 40 * 33 - 1) // 16
    counts = readings(made, samples)
    assert {sequence for _, sequence, _ in counts} == set(range(40))
    assert max(counts.values()) == epochs
    missing = epochs * 40 * 32 - sum(counts.values())
    assert missing <= 16 + 40 * epochs  # the end of the last sample, and tokens that two share


def test_schedules_choose_the_unit(run):
    made = run("--data-path A --split 1,0,0 --epochs 2 --lr-warmup-iters 3 --global-batch-size 4")
    assert made.config.training.train_iters == (2 * 1650 - 1) // 16 // 4
    assert made.config.training.train_samples is None


def test_a_blend_by_tokens_has_passes(run):
    made = run("--data-path 1650 A 700 B --split 1,0,0 --epochs 2")
    assert made.config.training.train_samples == (2 * 1650 - 1) // 16 + (2 * 700 - 1) // 16


@pytest.mark.parametrize("more, samples", [("", 2 * 21), ("--packing", None)])
def test_examples_have_passes(run, more, samples):
    words = f"--sft --data-path chats.jsonl --split 1,0,0 --epochs 2 {more}"
    made = run(words, "ByteLevelTokenizer")
    found = made.config.training.train_samples
    assert found == samples or (samples is None and 0 < found < 42)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data-path 1 A 1 B --split 1,0,0", "by the weights of the data A, which has 103"),
        ("--mock-data", "--epochs 1: --mock-data have no end; give --train-iters"),
        ("--data-path B --split 1,0,0 --global-batch-size 50", "43 samples of 16 tokens"),
        ("--data-path A --train-samples 5", "--epochs 1 and --train-samples 5 both say how long"),
        ("--data-path A --train-iters 5", "--epochs 1 and --train-iters 5 both say how long"),
        ("--data-path A --train-iters 5 --rampup-batch-size 1 1 1", "both say how long"),
    ],
)  # fmt: skip
def test_data_without_passes_are_refused(run, words, told):
    with pytest.raises(ConfigError, match=told):
        run(f"{words} --epochs 1")
