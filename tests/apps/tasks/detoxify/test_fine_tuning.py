"""Data that a fine-tuning is evaluated on, in place of a part of its own."""

import numpy as np
import pytest
from detoxifying.fine_tuning import FineTuneConfig, fine_tuning_data

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import ConfigError
from megatron.run.run import RunToolParser, run_data, run_of

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 "
    "--micro-batch-size 2 --train-iters 10 --eval-interval 5 --eval-iters 3 "
    "--tokenizer-type NullTokenizer --vocab-size 500"
).split()
NAMES = ("own", "first", "second")


@pytest.fixture
def files(tmp_path):
    """Three files with 100 documents each, of ids that say file and document."""
    for number, name in enumerate(NAMES):
        with IndexedDatasetWriter(str(tmp_path / name), "int32") as writer:
            for document in range(100):
                writer.add_document([np.full(30, 100 * number + document, np.int32)])
    return [str(tmp_path / name) for name in NAMES]


def read(*words):
    config, settings = RunToolParser(FineTuneConfig, None).parse([*FLAGS, *words])
    run = run_of(settings, 1)
    return run, fine_tuning_data(run, config)


def tokens(samples):
    return np.stack([samples[n] for n in range(len(samples))])


def test_validation_is_a_part_of_the_other_data(files):
    own, first, second = files
    words = ["--data-path", own, "--split", "100,0,0", "--seed", "7", "--eval-ppl"]
    run, data = read(*words, "--data-path2", "0.25", first, "0.75", second)
    plain = run_data(run).datasets
    assert np.array_equal(tokens(data.datasets.train), tokens(plain.train))
    assert tokens(data.datasets.train).max() < 100 and not plain.valid
    found = tokens(data.datasets.valid["valid"])
    # The documents after the first 98 % of each file.
    assert set(np.unique(found)) == {198, 199, 298, 299}
    assert (found >= 200).mean() > 0.6
    words = ["--data-path", "0.25", first, "0.75", second, "--split", "98,2,0", "--seed", "1234"]
    _, before = read(*words)
    assert np.array_equal(tokens(before.datasets.valid["valid"]), found)


def test_without_it_the_split_applies(files):
    _, data = read("--data-path", files[0], "--split", "90,10,0")
    assert tokens(data.datasets.valid["valid"]).min() >= 90


def test_two_kinds_of_validation_data(files):
    with pytest.raises(ConfigError, match="--data-path2 and --valid-data-path both name"):
        read("--train-data-path", files[0], "--valid-data-path", files[1], "--data-path2", files[2])


def test_files_that_do_not_exist(files, tmp_path):
    with pytest.raises(ConfigError, match="--data-path2 .*none"):
        read("--data-path", files[0], "--split", "100,0,0", "--data-path2", f"{tmp_path}/none")
    with pytest.raises(ConfigError, match="--data-path2 a b c: give one PREFIX"):
        read("--data-path", files[0], "--data-path2", "a", "b", "c")
