"""Loading reads what a rank keeps, and holds one parameter at a time."""

import math
from unittest import mock

import pytest
from training_jobs import TINY, train

from megatron.checkpoint.reader import CheckpointReader

TABLE = "embedding.word_embeddings.weight"
FLAGS = [*TINY, *"--num-layers 4 --attention-dropout 0 --hidden-dropout 0 --train-iters 2".split()]


def reads(argv):
    """(elements, largest) of what this rank reads to load a checkpoint, by kind; for the pool."""
    found: dict[str, list[int]] = {}
    stored = CheckpointReader._stored

    def counted(self, name, kind, entry, first, end):
        values = stored(self, name, kind, entry, first, end)
        assert values.numel() == end - first
        found.setdefault(kind, []).append(values.numel())
        return values

    with mock.patch.object(CheckpointReader, "_stored", counted):
        train(argv)
    return {kind: (sum(sizes), max(sizes)) for kind, sizes in found.items()}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    save = tmp_path_factory.mktemp("tp2")
    argv = [*FLAGS, "--tensor-model-parallel-size", "2", "--zero-stage", "1"]
    pool.run(4, train, [*argv, "--save", str(save)])
    return save, CheckpointReader(save / "global_step2")


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(4, "--zero-stage 3", marks=pytest.mark.proof),
        pytest.param(4, "--zero-stage 1", marks=pytest.mark.proof),
        (4, "--zero-stage 3 --tensor-model-parallel-size 2"),
        (2, "--zero-stage 1 --pipeline-model-parallel-size 2"),
    ],
)
def test_a_rank_reads_what_it_keeps(pool, saved, size, flags):
    save, reader = saved
    numel = {name: math.prod(reader.shape(name)) for name in reader.names()}
    whole, largest = sum(numel.values()), max(numel.values())
    # What every tensor-parallel rank holds whole.
    uncut = ("norm.weight", "norm.bias", "proj.bias", "down.bias", "position_embeddings.weight")
    shared = sum(count for name, count in numel.items() if name.endswith(uncut))
    ranks = pool.run(size, reads, [*FLAGS, *flags.split(), "--load", str(save)])
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        read = sum(rank[kind][0] for rank in ranks)
        # With ZeRO 1 the model's working weights are whole on every data-parallel rank.
        copies = size if kind == "weight" and flags == "--zero-stage 1" else 1
        # A pipeline has the tied table at both ends.
        tied = numel[TABLE] if "pipeline" in flags else 0
        assert copies * whole <= read <= copies * whole + shared + tied, kind
        assert max(rank[kind][1] for rank in ranks) <= largest
