"""Sharded checkpoints against torch.distributed.checkpoint itself, which writes and loads them."""

import dataclasses
import io
import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz.readers.checkpoints import CONFIG, weights, write_huggingface

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.sharded.files import METADATA, ShardedFiles
from megatron.formats.sharded.writer import (
    ShardedWriter,
    to_dcp,
    to_torch_dist,
    write_dcp,
    write_torch_dist,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return ShardedFiles(folder)


def fsdp_folder(folder, prefix=("model",)):
    """A checkpoint as accelerate writes it, next to the model's config.json."""
    state = weights()
    for key in reversed(prefix):
        state = {key: state}
    save(folder / "pytorch_model_fsdp_0", state)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_huggingface(folder)
    return folder


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory):
    """A checkpoint of this project with moments."""
    source = open_checkpoint(llama)
    generator = torch.Generator().manual_seed(5)
    moments = {
        (name, kind): torch.rand(source.shape(name), generator=generator)
        for name in source.names()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    weight = source.tensor
    source.kinds = lambda name: ["weight", "exp_avg", "exp_avg_sq"]
    source.tensor = lambda name, kind="weight": (
        weight(name) if kind == "weight" else moments[name, kind]
    )
    source.state = {
        "iteration": 7, "consumed_samples": 56, "optimizer_step": 7, "loss_scaler": {},
    }  # fmt: skip
    save = tmp_path_factory.mktemp("trained")
    write_checkpoint(save, source, 7)
    return save


def test_every_tensor_and_slice_is_what_torch_wrote(tmp_path):
    state = {
        "a": torch.randn(5, 7),
        "b": {"c": torch.randn(3, 4, 2).bfloat16(), "transposed": torch.randn(4, 6).t()},
        "scalar": torch.tensor(3.0), "whole": torch.arange(6), "step": 7,
        "empty": torch.empty(0, 3),
    }  # fmt: skip
    files = save(tmp_path / "dcp", state)
    for name, values in {
        **state,
        "b.c": state["b"]["c"],
        "b.transposed": state["b"]["transposed"],
    }.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(files.tensor(name), values), name
    assert files.object("step") == 7
    box = Slice((5, 7), ((0, ((1, 3),)), (1, ((2, 4),))), 2, 11)
    assert torch.equal(files.read("a", box), box.cut(state["a"]))


def test_chunks_of_a_grid_are_put_together(tmp_path):
    whole = torch.randn(4, 6)
    writer = ShardedWriter(tmp_path)
    for n in range(4):
        writer.add("w", whole[n], whole.shape, n)
    writer.finish()
    assert torch.equal(ShardedFiles(tmp_path).tensor("w"), whole)
    loaded = {"w": torch.zeros(4, 6)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["w"], whole)


READ = """
import sys
from pathlib import Path
from megatron.formats.sharded.files import ShardedFiles
files = ShardedFiles(Path(sys.argv[1]))
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
before = resident()
for name in files.tensors:
    files.tensor(name)
print(resident() - before)
"""


@pytest.mark.proof
def test_tensors_that_were_read_leave_no_memory(tmp_path):
    """The blocks of a tensor that is freed serve the next one, which needs that nothing small which
    stays has been put into them."""
    writer, count, size = ShardedWriter(tmp_path), 10, 2**24
    for n in range(count):
        writer.add(f"layers.{n}.weight", torch.zeros(size // 4))
    writer.finish()
    run = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < count * size // 3


@pytest.mark.parametrize("prefix", [("model",), (), ("model", "module", "_orig_mod")])
def test_fsdp_folders_are_the_model_that_they_shard(prefix, llama, tmp_path):
    fsdp_folder(tmp_path, prefix)
    source, same = open_checkpoint(tmp_path), open_checkpoint(llama)
    assert source.title == "sharded checkpoint (DCP)" and not source.state
    for name in same.names():
        assert torch.equal(source.tensor(name), same.tensor(name))


def test_torch_loads_weights_and_moments_that_are_written(trained, tmp_path):
    source = open_checkpoint(trained)
    assert write_dcp(source, tmp_path / "dcp", "float32")
    expected = weights()
    state = {
        "model": {name: torch.zeros_like(values) for name, values in expected.items()},
        "optim": {
            "state": {
                name: {
                    "exp_avg": torch.zeros_like(v), "exp_avg_sq": torch.zeros_like(v),
                    "step": torch.tensor(0.0),
                }
                for name, v in expected.items()
            }
        },
    }  # fmt: skip
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, values in expected.items():
        assert torch.equal(state["model"][name], values)
        assert state["optim"]["state"][name]["step"] == 7
    for kind in ("exp_avg", "exp_avg_sq"):
        moment = state["optim"]["state"]["lm_head.weight"][kind]
        assert torch.equal(moment, source.tensor("output_layer.weight", kind))
        up = source.tensor("layers.0.mlp.up.weight", kind)
        halves = [
            state["optim"]["state"][f"model.layers.0.mlp.{part}_proj.weight"][kind]
            for part in ("gate", "up")
        ]
        assert torch.equal(torch.cat(halves), up)
    again = open_checkpoint(tmp_path / "dcp")
    assert again.model == open_checkpoint(tmp_path / "dcp").model


@pytest.mark.parametrize(
    "flags", [[], ["--dtype", "bfloat16", "--no-distributed-optimizer"], ["--no-optim"]]
)
def test_to_torch_dist_reads_back_and_resumes(flags, trained, tmp_path, capsys):
    to_torch_dist(["--load", str(trained), "--output", str(tmp_path / "core"), *flags])
    assert "read back and equal" in capsys.readouterr().out
    written, source = open_checkpoint(tmp_path / "core"), open_checkpoint(trained)
    moments = "--no-optim" not in flags
    if moments:
        assert {**written.state} == {**source.state}
    for name in source.names():
        assert torch.equal(written.tensor(name), source.tensor(name))
        for kind in source.kinds(name)[1:] if moments else ():
            assert torch.equal(written.tensor(name, kind), source.tensor(name, kind))
    cut = Slice(source.shape("layers.0.mlp.down.weight"), ((1, ((3, 5),)),), 4, 21)
    name = "layers.0.mlp.down.weight"
    assert torch.equal(written.read(name, "weight", cut), cut.cut(source.tensor(name)))
    with pytest.raises(CheckpointError, match="exists already"):
        to_torch_dist(["--load", str(trained), "--output", str(tmp_path / "core"), *flags])


def test_moments_of_some_weights_alone_are_not_exported(trained, tmp_path):
    """Moments of Muon and SOAP, which leave embeddings to Adam: a loader would miss the others."""
    source = open_checkpoint(trained)
    kinds = source.kinds
    source.kinds = lambda name: ["weight"] if ".mlp." in name else kinds(name)
    assert not write_dcp(source, tmp_path / "dcp", "float32")
    folder = write_torch_dist(source, tmp_path / "core", "float32")
    for path in (tmp_path / "dcp", folder):
        assert not any(name.startswith("optim") for name in ShardedFiles(path).tensors)


def test_to_dcp_refuses_an_existing_folder_and_leaves_nothing(trained, tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        to_dcp(["--load", str(trained), "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def edited(folder, change):
    """The metadata of a folder after a change."""
    content = pickle.loads((folder / METADATA).read_bytes())
    change(content)
    stream = io.BytesIO()
    pickle.dump(content, stream)
    (folder / METADATA).write_bytes(stream.getvalue())


def missing(folder):
    (folder / "__0_0.distcp").unlink()


def truncated(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_tensor(folder):
    edited(folder, lambda m: m.state_dict_metadata.pop("model.lm_head.weight"))


def of_another_shape(folder):
    def change(metadata):
        facts = metadata.state_dict_metadata["model.lm_head.weight"]
        facts.size = torch.Size([31, 16])
        facts.chunks[0].sizes = facts.size

    edited(folder, change)


def with_a_gap(folder):
    def change(metadata):
        metadata.state_dict_metadata["model.lm_head.weight"].chunks[0].sizes = torch.Size([16, 16])

    edited(folder, change)


def overlapping(folder):
    """Two chunks of as many elements as the tensor, which leave its last rows out."""

    def change(metadata):
        facts = metadata.state_dict_metadata["model.lm_head.weight"]
        facts.chunks[0].sizes = torch.Size([16, 16])
        facts.chunks.append(dataclasses.replace(facts.chunks[0], offsets=torch.Size([8, 0])))
        data = metadata.storage_data
        (first,) = (index for index in data if index.fqn == "model.lm_head.weight")
        data[dataclasses.replace(first, offset=torch.Size([8, 0]))] = data[first]

    edited(folder, change)


def outside(folder):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = "../secret"

    edited(folder, change)


def swapped(folder):
    def change(metadata):
        places = {index.fqn: index for index in metadata.storage_data}
        a, b = places["model.lm_head.weight"], places["model.model.norm.weight"]
        data = metadata.storage_data
        data[a], data[b] = data[b], data[a]

    edited(folder, change)


DAMAGES = {
    missing: r"__0_0.distcp is missing; .metadata says that it has model\.",
    truncated: r"__0_0.distcp has .* bytes, but model\..* should end at",
    without_a_tensor: r"\.metadata lacks lm_head.weight",
    of_another_shape: r"lm_head.weight has the shape \(31, 16\)",
    with_a_gap: r"\.metadata: the 1 chunks of model.lm_head.weight do not fill",
    overlapping: r"\.metadata: the 2 chunks of model.lm_head.weight do not fill",
    outside: r"'../secret', which is not a file of this folder",
    swapped: r"__0_0.distcp has .* bytes of model.lm_head.weight \(32, 16\), which needs more",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_by_file_and_tensor(damage, tmp_path):
    fsdp_folder(tmp_path)
    damage(tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        source = open_checkpoint(tmp_path)
        for name in source.names():
            source.tensor(name)


def test_no_code_of_the_metadata_runs(tmp_path):
    fsdp_folder(tmp_path)

    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    path = tmp_path / "pytorch_model_fsdp_0" / METADATA
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names builtins.print"):
        open_checkpoint(tmp_path)


def test_a_half_written_export_leaves_nothing(trained, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardedWriter, "finish", fail)
    with pytest.raises(OSError, match="No space"):
        write_dcp(open_checkpoint(trained), tmp_path / "dcp", "float32")
    assert not list(tmp_path.iterdir())
    shutil.rmtree(tmp_path)
