"""Checkpoints in the memory of the nodes: ranks that die, nodes that are lost, damaged copies."""

import contextlib
import json
import os
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest
import torch
from pool import RankError
from safetensors.numpy import load_file
from training_jobs import TINY, run

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.manifest import verify
from megatron.checkpoint.source import open_checkpoint
from megatron.features.resilience.node_memory import folders as node_folders
from megatron.parallel.mesh import Group
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
    "async": (2, ["--zero-stage", "1", "--async-save", "--save-interval", "7"]),
    "deepspeed-format": (2, ["--zero-stage", "1", "--checkpoint-format", "deepspeed"]),
    "float8-delayed": (
        2,
        ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--zero-stage", "1"],
    ),
}


class LostError(ValueError):
    """Replaces a death, after which the processes of the pool are still needed."""


def dying(at):
    """Training ends with an error before the step after this one."""
    real = Trainer.step

    def step(self, batches):
        if self.iteration == at:
            raise LostError(f"lost after step {at}")
        return real(self, batches)

    return mock.patch.object(Trainer, "step", step)


def run_on_nodes(argv, base, nodes, at=None, fault=dying):
    """A run whose ranks are on nodes, by their numbers, each with a folder of its own."""
    node = nodes[int(os.environ["RANK"])]
    flags = [*argv, "--non-persistent-local-ckpt-dir", f"{base}/node{node}"]
    return run(flags) if at is None else run(flags, fault, at)


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


def same_weights(ours, theirs, but="nothing"):
    """Weights, moments and random state, but those files."""
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    for file in (name for name in files if not name.startswith(but)):
        expected, found = load_file(theirs / file), load_file(ours / file)
        assert found.keys() == expected.keys()
        for key in expected:
            assert np.array_equal(found[key], expected[key]), (file, key)


def same_parameters(ours, theirs):
    """Weights and moments of checkpoints of any format."""
    own, other = (open_checkpoint(folder, verify=False) for folder in (ours, theirs))
    assert own.names() == other.names()
    for name in own.names():
        for kind in other.kinds(name):
            assert own.tensor(name, kind).equal(other.tensor(name, kind)), (name, kind)


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
    own, other = (each.save / f"global_step{STEPS}" for each in (cluster, undisturbed))
    if name == "deepspeed-format":
        same_parameters(own, other)
    else:
        same_weights(own, other)


DP4 = ["--zero-stage", "1"]


def begun(output):
    """What a run says of where it begins."""
    lines = [line.partition("] ")[2] or line for line in output.splitlines()]
    return [x for x in lines if "memory of the nodes" in x or "resumed from" in x or "WARNING" in x]


def flip(file):
    """Changes one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def undisturbed(pool, tmp_path):
    def weights(flags, nodes):
        cluster = Cluster(pool, tmp_path / "undisturbed", flags)
        assert cluster.train(nodes)[0][1] is None
        return cluster.save / f"global_step{STEPS}"

    return weights


@pytest.mark.parametrize("nodes", [[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.proof
def test_any_one_of_several_nodes_is_lost(pool, tmp_path, undisturbed, nodes, lost):
    """No node has everything, and those that are left have."""
    cluster = Cluster(pool, tmp_path, DP4)
    cluster.train(nodes, at=7)
    shutil.rmtree(tmp_path / f"node{lost}")
    output, error = cluster.train(nodes)[0]
    assert error is None and "at iteration 6" in begun(output)[1]
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(DP4, nodes))


@pytest.mark.proof
def test_a_node_fetches_only_what_its_ranks_read(pool, tmp_path):
    """Of the optimizer's state only that of its own ranks."""
    nodes = [0, 1, 2, 3]
    cluster = Cluster(pool, tmp_path, [*DP4, "--non-persistent-save-interval", "4"])
    cluster.train(nodes, at=5)
    before = {node: files(cluster, node) for node in nodes}
    for node in nodes:
        kept = sorted([node, (node - 1) % 4])
        assert before[node]["optimizer"] == before[node]["random"] == kept
    shutil.rmtree(tmp_path / "node2")
    error = cluster.train(nodes, at=5)[0][1]
    assert "lost after step 5" in error
    after = {node: files(cluster, node) for node in nodes}
    assert after[2] == {"optimizer": [2], "random": [2], "weights": [0, 1, 2, 3]}
    assert after[1] == {**before[1], "weights": [0, 1, 2, 3]}


def files(cluster, node):
    """The ranks whose files a node has, by kind."""
    found = {}
    for path in sorted((cluster.in_memory(node) / "global_step4").glob("*.safetensors")):
        kind, _, rank = path.stem.partition("-")
        found.setdefault(kind, []).append(int(rank))
    return found


@pytest.mark.proof
def test_a_damaged_copy_is_replaced(pool, tmp_path, undisturbed):
    """By that of the other node, and it is said which was damaged."""
    cluster = Cluster(pool, tmp_path, DP4)
    cluster.train([0, 1], at=5)
    flip(cluster.in_memory(1) / "global_step4" / "optimizer-00001.safetensors")
    results = cluster.train([0, 1])
    assert [error for _, error in results] == [None, None]
    assert "at iteration 4" in begun(results[0][0])[-1]
    assert "WARNING: rank 1: " in results[1][0] and "optimizer-00001" in results[1][0]
    assert "is damaged: its SHA-256 differs" in results[1][0]
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(DP4, [0, 1]))


@pytest.mark.parametrize("fault", ["damaged", pytest.param("lost", marks=pytest.mark.proof)])
@pytest.mark.proof
def test_too_much_is_lost(pool, tmp_path, undisturbed, fault):
    """The checkpoint on the disk is taken, and it is said why."""
    cluster = Cluster(pool, tmp_path, [*DP4, "--save-interval", "3"])
    more = ["--replication-factor", "1"] if fault == "lost" else []
    cluster.train([0, 1], at=5, more=more)
    name = "optimizer-00001.safetensors"
    if fault == "damaged":
        for node in (0, 1):
            flip(cluster.in_memory(node) / "global_step4" / name)
    else:
        shutil.rmtree(tmp_path / "node1")
    output, error = cluster.train([0, 1])[0]
    assert error is None
    *_, warning, resumed = begun(output)
    why = f"no node has an undamaged {name}" if fault == "damaged" else f"no node has {name}"
    assert (
        warning.startswith("WARNING: the checkpoint of iteration 4 in the memory")
        and why in warning
    )
    assert resumed == f"resumed from {cluster.save}/global_step3 at iteration 3"
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(DP4, [0, 1]))


@pytest.mark.proof
def test_one_copy_after_the_other_is_damaged(pool, tmp_path, undisturbed):
    """A copy that turns out to be damaged when it arrives is not used; the third is."""
    nodes, name = [0, 1, 2, 3], "weights-00000.safetensors"
    cluster = Cluster(pool, tmp_path, [*DP4, "--replication-factor", "3"])
    cluster.train(nodes, at=5)
    for node in (0, 1):
        flip(cluster.in_memory(node) / "global_step4" / name)
    output, error = cluster.train(nodes)[0]
    assert error is None and "at iteration 4" in begun(output)[-1]
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(DP4, nodes))


@pytest.mark.proof
@pytest.mark.parametrize("stage", ["1", "3"])
def test_adapters(pool, tmp_path, undisturbed, stage):
    """The base is on the disk, the adapters are in memory."""
    base = str(tmp_path / "base")
    pool.run(2, run, [*TINY, "--train-iters", "2", "--save", base])
    lora = ["--zero-stage", stage, "--pretrained-checkpoint", base, "--lora", "--lora-rank", "3"]
    cluster = Cluster(pool, tmp_path, lora)
    cluster.train([0, 1], at=5)
    shutil.rmtree(tmp_path / "node0")
    output, error = cluster.train([0, 1])[0]
    assert error is None and "at iteration 4" in begun(output)[-1]
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(lora, [0, 1]))


@pytest.mark.proof
def test_an_optimizer_on_the_host(pool, tmp_path, undisturbed):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config = tmp_path / "offload.json"
    config.write_text(json.dumps(content))
    flags = ["--deepspeed_config", str(config)]
    cluster = Cluster(pool, tmp_path, flags)
    cluster.train([0, 1], at=5)
    shutil.rmtree(tmp_path / "node1")
    output, error = cluster.train([0, 1])[0]
    assert error is None and "at iteration 4" in begun(output)[-1]
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(flags, [0, 1]))


@pytest.mark.proof
def test_an_evaluation_leaves_what_is_only_in_memory(pool, tmp_path):
    cluster = Cluster(pool, tmp_path, DP4)
    cluster.train([0, 1], at=5)
    evaluated = ["--skip-train", "--eval-iters", "1", "--split", "90,5,5"]
    output, error = cluster.train([0, 1], more=evaluated)[0]
    assert error is None and "at iteration 4" in begun(output)[-1]
    assert complete_tags(cluster.in_memory(0)) == ["global_step4"]


def flipping(at):
    """A bit of a weight of rank 1 changes after a step."""
    real = Trainer.step

    def step(self, batches):
        real(self, batches)
        if self.iteration == at and os.environ["RANK"] == "1":
            param = next(iter(self.engine.trained))
            param.data.view(-1).view(torch.int32)[3] ^= 1 << 20

    return mock.patch.object(Trainer, "step", step)


@pytest.mark.proof
def test_replicas_that_differ_are_not_saved(pool, tmp_path):
    """The checkpoint in memory is the one before, and the run continues from it."""
    cluster = Cluster(pool, tmp_path, ["--zero-stage", "0"])
    with pytest.raises(RankError, match=r"after iteration 4 .* differs"):
        pool.run(2, run_on_nodes, cluster.argv, str(tmp_path), [0, 1], 4, flipping)
    assert complete_tags(cluster.in_memory(0)) == ["global_step2"]
    output, error = cluster.train([0, 1])[0]
    assert error is None and "at iteration 2" in begun(output)[-1]


OTHER_LAYOUTS = [
    ([0, 1], ["--zero-stage", "1"], [0], ["--zero-stage", "0"]),
    ([0, 1], ["--zero-stage", "3"], [1], ["--zero-stage", "1"]),
    ([0, 1], ["--zero-stage", "0"], [0, 1], ["--tensor-model-parallel-size", "2"]),
    ([0, 1], ["--pipeline-model-parallel-size", "2"], [0, 0, 1, 2], ["--zero-stage", "2"]),
    ([0, 1, 2, 3], ["--zero-stage", "2"], [3, 1, 2], ["--zero-stage", "1"]),
]


@pytest.mark.proof
@pytest.mark.parametrize("before, flags, after, more", OTHER_LAYOUTS, ids=str)
def test_another_layout_continues(pool, tmp_path, before, flags, after, more):
    """As it does from the same checkpoint on the disk, bitwise."""
    common = ["--global-batch-size", "12", "--attention-dropout", "0", "--hidden-dropout", "0"]
    cluster = Cluster(pool, tmp_path, common)
    cluster.train(before, at=5, more=flags)
    output, error = cluster.train(after, more=more)[0]
    assert error is None and "at iteration 4" in begun(output)[-1]
    disk = Cluster(pool, tmp_path / "disk", [*common, "--save-interval", "4"])
    disk.train(before, at=5, more=flags)
    output, error = disk.train(after, more=more)[0]
    assert error is None and f"resumed from {disk.save}/global_step4" in output
    # Random state is loaded for the same number of processes only; nothing draws from it here.
    own, other = (each.save / f"global_step{STEPS}" for each in (cluster, disk))
    same_weights(own, other, but="random")


@pytest.mark.proof
def test_what_another_run_left_is_not_taken(pool, tmp_path):
    """Of a run whose folder of checkpoints was deleted, and of one that begins again."""
    cluster = Cluster(pool, tmp_path, DP4)
    cluster.train([0, 1], at=5)
    left = cluster.in_memory(0)
    shutil.rmtree(cluster.save)
    output, error = cluster.train([0, 1], at=1)[0]
    assert begun(output) == [] and complete_tags(left) == ["global_step4"]
    cluster.train([0, 1], at=3)
    (own,) = {path for path in left.parent.iterdir()} - {left}
    assert complete_tags(own) == ["global_step2"]
    cluster.argv = cluster.argv[: cluster.argv.index("--load")]
    output, error = cluster.train([0, 1], at=1)[0]
    assert begun(output) == [] and complete_tags(own) == []
    assert complete_tags(left) == ["global_step4"]


@pytest.mark.proof
def test_a_full_memory_is_said_and_training_continues(pool, tmp_path, undisturbed):
    with tmpfs(tmp_path / "node1", "600k"):
        cluster = Cluster(pool, tmp_path, [*DP4, "--save-interval", "4"])
        output, error = cluster.train([0, 1])[0]
    assert error is None and "saved checkpoint at iteration 4 to" in output
    (warning,) = begun(output)
    assert warning.startswith("WARNING: no checkpoint in memory at iteration 2: ")
    assert "rank 1: " in warning and "MB are free; see --replication-factor 2" in warning
    same_weights(cluster.save / f"global_step{STEPS}", undisturbed(DP4, [0, 1]))


@contextlib.contextmanager
def tmpfs(folder, size):
    """A folder in memory with room for so much."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder])
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folders, "_SHARED_MEMORY", tmp_path)
    own = node_folders.base_folder(None)
    own.mkdir()
    os.chown(own, os.getuid() + 1 if os.getuid() == 0 else os.getuid(), -1)
    if os.getuid():
        own.rmdir()
        own.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"another folder by --non-persistent-local-ckpt-dir"):
        node_folders.open_folders(None, tmp_path, Group(), None)


@pytest.mark.parametrize("flag", ["--replication-factor 2", "--non-persistent-save-interval 2"])
def test_flags_without_what_they_need(pool, flag):
    error = pool.run(1, run, [*TINY, "--train-iters", "1", *flag.split()])[0][1]
    needed = {"--replication-factor 2": "--non-persistent-save-interval"}.get(flag, "--save")
    assert needed in error
