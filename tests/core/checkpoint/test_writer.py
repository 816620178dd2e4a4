"""Any source becomes a checkpoint of this project: same tensors, same state, same configuration."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import incomplete_folder
from megatron.checkpoint.manifest import tensor_key, verify
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import Source, locate_checkpoint, open_checkpoint
from megatron.checkpoint.writer import SliceWriter, finish_checkpoint
from megatron.config import TokenizerConfig
from megatron.formats.conversion.output import run_of
from megatron.formats.conversion.output import write_checkpoint as write
from megatron.tokenizer.plain import NullTokenizer


class InMemory(Source):
    """A source of given tensors, by (name, kind)."""

    title = "memory"

    def __init__(self, model, tensors, state):
        self.folder, self.model, self.tensors, self.state = Path("memory"), model, tensors, state
        self.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=60)

    @classmethod
    def locate(cls, path, wanted):
        return None

    def names(self):
        return list(dict.fromkeys(name for name, _ in self.tensors))

    def shape(self, name):
        return tuple(self.tensors[name, "weight"].shape)

    def kinds(self, name):
        return [kind for other, kind in self.tensors if other == name]

    def tensor(self, name, kind="weight"):
        return self.tensors[name, kind]


@pytest.fixture
def source(gpt_config):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        (name, kind): torch.randn(shape, generator=generator)
        for name, shape in (("a.weight", (5, 3)), ("b.weight", (7,)), ("c.weight", (2, 9)))
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    state = {"iteration": 4, "consumed_samples": 16, "optimizer_step": 4, "loss_scaler": {}}
    return InMemory(gpt_config().model, tensors, state)


@pytest.mark.parametrize("max_file_bytes", [1, 100, 10**9])
def test_round_trip(tmp_path, source, max_file_bytes):
    folder = write(tmp_path, source, max_file_bytes=max_file_bytes)
    verify(folder)
    found = open_checkpoint(tmp_path)
    assert isinstance(found, CheckpointReader) and found.folder == folder
    assert folder.name == "global_step4"
    assert found.names() == source.names()
    assert found.state == source.state and found.tokenizer == source.tokenizer
    assert found.model == source.model
    for (name, kind), values in source.tensors.items():
        assert torch.equal(found.tensor(name, kind), values)
    stored = [load_file(path) for path in folder.glob("*.safetensors")]
    shapes = {key: values.shape for file in stored for key, values in file.items()}
    assert all(shapes[tensor_key(*key)] == each.shape for key, each in source.tensors.items())
    files = len(list(folder.glob("weights-*.safetensors")))
    assert files == {1: 3, 100: 2, 10**9: 1}[max_file_bytes]


def test_weights_alone(tmp_path, source):
    source.state = {}
    found = open_checkpoint(write(tmp_path, source, moments=False))
    assert found.folder.name == "global_step0" and found.state == {}
    assert found.kinds("a.weight") == ["weight"]
    assert not found.run.checkpoint.save_optim
    assert not list(found.folder.glob("optimizer-*"))


def test_other_checkpoints_are_not_pushed_aside(tmp_path, source):
    folder = write(tmp_path, source)
    before = (folder / "manifest.json").read_bytes()
    for iteration in (2, 4, 9):
        with pytest.raises(CheckpointError, match="contains global_step4"):
            write(tmp_path, source, iteration)
    assert (folder / "manifest.json").read_bytes() == before
    assert (tmp_path / "latest").read_text() == "global_step4"


def test_what_several_processes_hold_is_one_checkpoint(tmp_path, source):
    """Rows, columns and runs of them; what a process left for the index is gone afterwards."""
    folder = incomplete_folder(tmp_path, 4)
    folder.mkdir()
    columns = [((1, ((0, 1),)),), ((1, ((1, 2),)),)]
    rows = [((0, ((1, 1),)),), ((0, ((0, 1),)),)]
    held = {
        "a.weight": [Slice((5, 3), columns[0], 0, 5), Slice((5, 3), columns[1], 0, 10)],
        "b.weight": [Slice((7,), (), 0, 2), Slice((7,), (), 2, 7)],
        "c.weight": [Slice((2, 9), rows[0], 0, 9), Slice((2, 9), rows[1], 0, 9)],
    }
    for process in range(2):
        writer = SliceWriter(folder, process)
        for name, slices in held.items():
            own = slices[process]
            kinds = source.kinds(name)
            writer.add(name, own, [(kind, own.cut(source.tensor(name, kind))) for kind in kinds])
        writer.finish()
    contents = {"config.json": run_of(source).to_dict(), "state.json": source.state}
    size = finish_checkpoint(tmp_path, 4, 2, contents, lambda folder: None)
    found = open_checkpoint(tmp_path)
    for (name, kind), values in source.tensors.items():
        assert torch.equal(found.tensor(name, kind), values)
    files = {path.name: path.stat().st_size for path in found.folder.iterdir()}
    assert size == sum(files.values()) - files.pop("manifest.json")
    assert sorted(files) == sorted(
        [f"{what}-0000{n}.safetensors" for what in ("weights", "optimizer") for n in range(2)]
        + ["config.json", "index.json", "state.json"]
    )


def test_a_failure_leaves_nothing(tmp_path, source):
    class Damaged(InMemory):
        def tensor(self, name, kind="weight"):
            if name == "c.weight":
                raise CheckpointError("c.weight is damaged")
            return super().tensor(name, kind)

    damaged = Damaged(source.model, source.tensors, source.state)
    with pytest.raises(CheckpointError, match="damaged"):
        write(tmp_path, damaged, max_file_bytes=1)
    assert list(tmp_path.iterdir()) == []
    assert locate_checkpoint(tmp_path) is None


def test_a_converted_checkpoint_brings_its_tokenizer(
    tmp_path, gpt_config, random_gpt, write_checkpoint
):
    """Where the configuration names none, the folder next to the weights is it."""
    config = gpt_config()
    first = write_checkpoint(tmp_path / "a", config, random_gpt(config), NullTokenizer(60))
    found = open_checkpoint(write(tmp_path / "b", open_checkpoint(first)))
    assert found.tokenizer.tokenizer_type == "HFTokenizer"
    assert found.tokenizer.tokenizer_model == str(found.folder / "tokenizer")
    named = dataclasses.replace(config, tokenizer=TokenizerConfig("NullTokenizer", vocab_size=60))
    other = write_checkpoint(tmp_path / "c", named, random_gpt(config))
    assert open_checkpoint(other).tokenizer.tokenizer_type == "NullTokenizer"
