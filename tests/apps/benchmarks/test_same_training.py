"""benchmarks/same_training.py on models that take no time, and data that are made up."""

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

pytestmark = pytest.mark.proof
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
STEPS, ROWS = 4, 128


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *(f"w{i}" for i in range(95))]) + "\n")
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for _ in range(20):
            writer.add_document([rng.integers(5, 100, rng.integers(5, 20)) for _ in range(8)])
    data = ["--data-path", str(folder / "text"), "--vocab-file", str(folder / "vocab.txt")]
    return [*data, "--train-iters", str(STEPS), "--seq-length", "32", "--micro-batch-size", "2"]


@pytest.mark.parametrize("name", ["bert", "megatron-bert", "t5"])
def test_losses_of_transformers_step_by_step(flags, name):
    import same_training

    curves = same_training.compare(same_training.peers(layers=1, width=16)[name], flags, ROWS)
    assert len(curves.here) == STEPS and curves.here[-1] != curves.here[0]
    assert curves.difference < 1e-6


def test_another_weight_decay_is_noticed(flags):
    import same_training

    peer = same_training.peers(layers=1, width=16)["bert"]
    here = same_training.compare(peer, [*flags, "--weight-decay", "1"], ROWS).here
    there = same_training.compare(peer, flags, ROWS).transformers
    assert same_training.relative(here, there).max() > 1e-6
