"""Checkpoints in the memory of the nodes: ranks that die, nodes that are lost, damaged copies."""

import os
import shutil
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file
from training_jobs import TINY, run

from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.manifest import verify
from megatron.training.trainer import Trainer

STEPS = 8
FLAGS = [*TINY, "--train-iters", str(STEPS), "--non-persistent-save-interval", "2"]
LAYOUTS = {
    "zero0": (1, ["--zero-stage", "0"]),
    "zero0-dp2": (2, ["--zero-stage", "0"]),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "65536"]),
    "zero2-dp2-bf16": (2, ["--zero-stage", "2", "--bf16"]),
    "zero3-dp2": (2, ["--zero-stage", "3"]),
    "zero1-tp2": (2, ["--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "zero1-pp2": (2, ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
    "zero0-sgd": (1, ["--zero-stage", "0", "--optimizer", "sgd"]),
}


class LostError(ValueError):
    """Takes the place of a death, after which the processes of the pool are still needed."""


def dying(at):
    """Training ends with an error before the step after this one."""
    real = Trainer.step

    def step(self, batches):
        if self.iteration == at:
            raise LostError(f"lost after step {at}")
        return real(self, batches)

    return mock.patch.object(Trainer, "step", step)


def run_on_nodes(argv, base, nodes, at=None):
    """A run whose ranks are on nodes, by their numbers, each with a folder of its own."""
    node = nodes[int(os.environ["RANK"])]
    flags = [*argv, "--non-persistent-local-ckpt-dir", f"{base}/node{node}"]
    return run(flags) if at is None else run(flags, dying, at)


class Cluster:
    """Runs on the same nodes, one after the other, that save to one folder."""

    def __init__(self, pool, folder, flags):
        self.pool, self.base, self.save = pool, folder, folder / "save"
        self.argv = [*FLAGS, *flags, "--save", str(self.save), "--load", str(self.save)]

    def train(self, nodes, at=None, more=()):
        argv = [*self.argv, *more]
        return self.pool.run(len(nodes), run_on_nodes, argv, str(self.base), nodes, at)

    def in_memory(self, node):
        """The run's folder on a node."""
        (found,) = (self.base / f"node{node}").iterdir()
        return found


def same_weights(ours, theirs):
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    for file in files:
        expected, found = load_file(theirs / file), load_file(ours / file)
        assert found.keys() == expected.keys()
        for key in expected:
            assert np.array_equal(found[key], expected[key]), (file, key)


SAMPLE = {"zero3-dp2"}


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS]
)
def test_a_node_is_lost_before_the_first_save_to_the_disk(pool, tmp_path, name):
    """The other node has a copy, and weights are those of the run that was not disturbed."""
    size, flags = LAYOUTS[name]
    nodes = list(range(size))
    cluster = Cluster(pool, tmp_path, flags)
    lost = cluster.train(nodes, at=5)
    assert "lost after step 5" in lost[0][1]
    assert "saved checkpoint in memory at iteration 2" in lost[0][0]
    for node in nodes:
        assert complete_tags(cluster.in_memory(node)) == ["global_step4"]
        verify(cluster.in_memory(node) / "global_step4")
    assert complete_tags(cluster.save) == []
    if size > 1:
        shutil.rmtree(tmp_path / "node1")
    output, error = cluster.train(nodes)[0]
    assert error is None
    assert "the memory of the nodes has iteration 4, and --load none" in output
    assert f"resumed from {tmp_path}/node0/" in output and "at iteration 4" in output
    for node in nodes:
        assert list((tmp_path / f"node{node}").iterdir()) == []
    undisturbed = Cluster(pool, tmp_path / "other", flags)
    undisturbed.train(nodes)
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed.save / f"global_step{STEPS}")
