"""Checkpoints written as any layout would write them are read back whole, or refused by name."""

import dataclasses
import json
import math

import pytest
import torch
from configs import model_config, run_config
from safetensors.torch import save_file

from megatron.checkpoint.files import CheckpointError, write_json
from megatron.checkpoint.folder import incomplete_folder, publish
from megatron.checkpoint.manifest import IndexEntry, file_facts, tensor_key, verify
from megatron.checkpoint.reader import CheckpointReader, differences
from megatron.checkpoint.slices import Slice
from megatron.parallel.shard import Cut, Shard

SHARDS = {
    "embedding.word_embeddings.weight": Shard((16, 6), (Cut(0, unpadded=11),)),
    "layers.0.attention.qkv.weight": Shard((24, 6), (Cut(0, parts=(8, 8, 8)),)),
    "layers.0.attention.proj.weight": Shard((6, 8), (Cut(1),)),
    "final_norm.norm.weight": Shard((6,)),
}
APART = {
    "layers.0.attention.qkv.weight": (
        Shard((24, 6), (Cut(0, parts=(16, 4, 4), held=(0,)),)),
        Shard((24, 6), (Cut(0, parts=(16, 4, 4), held=(1, 2), copies=2),)),
    )
}
"""What is held in two parameters, at 4 ranks that share 2 key and value heads."""
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def whole_tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        (name, kind): torch.randn(shard.canonical_shape, generator=generator)
        for name, shard in SHARDS.items()
        for kind in KINDS
    }


def write_checkpoint(save, iteration, tensor_size, data_size, apart=False):
    """A checkpoint of tensor_size x data_size ranks, where ZeRO cuts every share evenly."""
    shards = {name: (shard,) for name, shard in SHARDS.items()} | (APART if apart else {})
    folder = incomplete_folder(save, iteration)
    folder.mkdir(parents=True)
    index, facts, wholes = {}, {}, whole_tensors()
    for rank in range(tensor_size * data_size):
        data_rank, tensor_rank = divmod(rank, tensor_size)
        stored, place = {}, {"tensor": (tensor_rank, tensor_size)}
        for name, shard in ((name, each) for name, several in shards.items() for each in several):
            if not shard.counted(place):
                continue
            numel = math.prod(shard.local_shape(place))
            step = -(-numel // data_size)
            start, end = data_rank * step, min((data_rank + 1) * step, numel)
            files = {kind: f"rank-{rank}.safetensors" for kind in KINDS}
            held = Slice.of(shard, place, start, end)
            if not held.numel:
                continue
            for kind in KINDS:
                share = shard.cut(wholes[name, kind], place).reshape(-1)
                values = share[held.start : held.end].clone()
                if held.is_whole_share:
                    values = values.view(held.share_shape)
                stored[tensor_key(name, kind, shard.part)] = values
            index.setdefault(name, []).append(IndexEntry(held, files, shard.part).to_json())
        save_file(stored, folder / f"rank-{rank}.safetensors")
    write_json(folder / "index.json", index)
    write_json(folder / "config.json", run_config().to_dict())
    write_json(folder / "state.json", {"iteration": iteration})
    for path in folder.iterdir():
        facts[path.name] = file_facts(path)
    return publish(save, iteration, facts)


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_any_layout_reads_whole(tmp_path, tensor_size, data_size):
    reader = CheckpointReader(write_checkpoint(tmp_path, 7, tensor_size, data_size))
    for (name, kind), expected in whole_tensors().items():
        assert torch.equal(reader.tensor(name, kind), expected), (name, kind)


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_parameters_in_parts_read_whole(tmp_path, data_size):
    reader = CheckpointReader(write_checkpoint(tmp_path, 7, 4, data_size, apart=True))
    for (name, kind), expected in whole_tensors().items():
        assert torch.equal(reader.tensor(name, kind), expected), (name, kind)


def test_keys_tell_parts_and_kinds_apart():
    keys = {tensor_key("a", kind, part) for kind in KINDS for part in ("", "parts0", "parts1-2")}
    assert len(keys) == 9 and {"a", "a.exp_avg", "a.parts1-2", "a.parts1-2.exp_avg"} < keys


def test_missing_slice_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, 7, 2, 2)
    index = json.loads((folder / "index.json").read_text())
    index["layers.0.attention.proj.weight"].pop()
    write_json(folder / "index.json", index)
    with pytest.raises(CheckpointError, match=r"slices of layers.0.attention.proj.weight over"):
        CheckpointReader(folder)


def test_elements_that_no_file_has_are_not_old_memory(tmp_path):
    name = "layers.0.attention.proj.weight"
    reader = CheckpointReader(write_checkpoint(tmp_path, 7, 2, 2))
    reader.index[name] = reader.index[name][:-1]
    with pytest.raises(CheckpointError, match=rf"weight of {name} has \d+ of \d+ elements"):
        reader.tensor(name)


def test_slices_that_overlap_instead_of_tiling_are_refused(tmp_path):
    """Their sizes add up, and yet an element is missing."""
    name = "layers.0.attention.proj.weight"
    folder = write_checkpoint(tmp_path, 7, 1, 2)
    index = json.loads((folder / "index.json").read_text())
    index[name][1] = index[name][0]
    write_json(folder / "index.json", index)
    with pytest.raises(CheckpointError, match=f"slices of {name} overlap or"):
        CheckpointReader(folder)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_slice_needs_only_the_files_that_hold_it(tmp_path, cut):
    """Each rank reads its part, and not the whole checkpoint."""
    name = {0: "layers.0.attention.qkv.weight", 1: "layers.0.attention.proj.weight"}[cut]
    folder = write_checkpoint(tmp_path, 7, 2, 2)
    shard, whole = SHARDS[name], whole_tensors()[name, "exp_avg"]
    place = {"tensor": (1, 2)}
    held = Slice.of(shard, place, 3, math.prod(shard.local_shape(place)) // 2)
    for rank in (0, 2, 3):  # of rank 1 are the first elements of tensor rank 1's share
        (folder / f"rank-{rank}.safetensors").unlink()
    found = CheckpointReader(folder).read(name, "exp_avg", held)
    assert torch.equal(found, shard.cut(whole, place).reshape(-1)[held.start : held.end])


def test_parts_of_a_matrix_that_is_stored_in_its_shape(tmp_path):
    name = "layers.0.attention.qkv.weight"
    reader = CheckpointReader(write_checkpoint(tmp_path, 7, 1, 1))
    whole = whole_tensors()[name, "exp_avg"].reshape(-1)
    for start, end in ((0, 3), (7, 8), (10, 31), (5, 144)):
        held = Slice((24, 6), (), start, end)
        assert torch.equal(reader.read(name, "exp_avg", held), whole[start:end])


class Recorded:
    """A stored tensor, or an open file of them, that notes which rows are read."""

    def __init__(self, stored, rows):
        self.stored, self.rows = stored, rows

    def get_slice(self, key):
        return Recorded(self.stored.get_slice(key), self.rows)

    def get_shape(self):
        return self.stored.get_shape()

    def __getitem__(self, rows):
        self.rows.append((rows.start, rows.stop))
        return self.stored[rows]


def test_a_slice_needs_only_the_rows_that_hold_it(tmp_path):
    name = "layers.0.attention.qkv.weight"
    reader = CheckpointReader(write_checkpoint(tmp_path, 7, 1, 1))
    reader.tensor(name)
    rows = []
    for file, stored in reader._open.items():
        reader._open[file] = Recorded(stored, rows)
    for start, end in ((0, 3), (7, 8), (10, 31), (138, 144)):
        reader.read(name, "weight", Slice((24, 6), (), start, end))
    assert rows == [(0, 1), (1, 2), (1, 6), (23, 24)]


def test_unknown_parameter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no parameter layers\.9"):
        CheckpointReader(write_checkpoint(tmp_path, 7, 2, 2)).tensor("layers.9")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": [{"shape": 3}]}', '{"a": 3}'])
def test_malformed_index_is_refused(tmp_path, content):
    folder = write_checkpoint(tmp_path, 7, 1, 1)
    (folder / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index.json"):
        CheckpointReader(folder)


def test_damage_is_found_by_name(tmp_path):
    folder = write_checkpoint(tmp_path, 7, 2, 1)
    verify(folder)
    path = folder / "rank-1.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"x", bytes([*content[:-1], content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="rank-1.safetensors"):
            verify(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="rank-1.safetensors is missing"):
        verify(folder)


def test_ranks_divide_the_verification(tmp_path):
    folder = write_checkpoint(tmp_path, 7, 2, 2)
    (folder / "rank-2.safetensors").write_bytes(b"")
    found = []
    for share in range(3):
        try:
            verify(folder, share, 3)
        except CheckpointError:
            found.append(share)
    assert len(found) == 1


def test_entry_round_trip():
    held = Slice((4, 6), ((1, ((0, 2), (4, 1))),), 3, 9)
    entry = IndexEntry(held, {"weight": "f"})
    assert IndexEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    older = {key: value for key, value in entry.to_json().items() if key != "part"}
    assert IndexEntry.from_json(older) == entry
    apart = dataclasses.replace(entry, part="parts0")
    assert IndexEntry.from_json(apart.to_json()) == apart != entry
    for cuts in (((0, ((0, 1), (3, 1))), *held.cuts), ()):
        other = dataclasses.replace(entry, slice=dataclasses.replace(held, cuts=cuts))
        assert IndexEntry.from_json(json.loads(json.dumps(other.to_json()))) == other
    assert held.share_shape == (4, 3)
    assert not held.is_whole_share
    assert dataclasses.replace(held, start=0, end=12).is_whole_share


def test_files_say_one_cut_as_they_always_did():
    """Checkpoints that were written before have these keys, in this order."""
    held = Slice((4, 6), ((1, ((0, 2), (4, 1))),), 3, 9)
    assert json.dumps(IndexEntry(held, {"weight": "f"}, "parts0").to_json()) == (
        '{"shape": [4, 6], "dim": 1, "ranges": [[0, 2], [4, 1]], "start": 3, "end": 9, '
        '"files": {"weight": "f"}, "part": "parts0"}'
    )
    assert json.dumps(IndexEntry(Slice.whole((4, 6)), {"weight": "f"}).to_json()) == (
        '{"shape": [4, 6], "dim": null, "ranges": [], "start": 0, "end": 24, '
        '"files": {"weight": "f"}, "part": ""}'
    )


def test_differences_name_what_shapes_the_weights():
    here = model_config(num_layers=2, ffn_hidden_size=16, attention_dropout=0.0)
    there = model_config(num_layers=3, ffn_hidden_size=16, swiglu=True)
    lines = differences(there, here)
    assert lines == [
        "num_layers is 3 in the checkpoint and 2 in this run",
        'activation is "swiglu" in the checkpoint and "gelu_tanh" in this run',
    ]
