"""Universal checkpoints: what is written, atomically, and how a damaged one is refused."""

import pytest
import torch
from tool_modules import load_program

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.deepspeed_folders import universal
from megatron.formats.deepspeed_folders.universal import UniversalFolder, write_universal
from megatron.formats.unpickle import load_pickle


@pytest.fixture
def own(tmp_path, gpt_config, random_gpt, write_checkpoint):
    """A checkpoint of this project, weights only."""
    config = gpt_config(num_query_groups=2, llama=True)
    return CheckpointReader(write_checkpoint(tmp_path / "own", config, random_gpt(config)))


def command(*argv):
    load_program("tools/convert_checkpoint.py").main(["to-universal", *map(str, argv)])


def test_command_writes_what_stock_loaders_look_for(tmp_path, own, capsys):
    output = tmp_path / "out" / "global_step10_universal"
    output.parent.mkdir()
    command("--load", tmp_path / "own", "--output", output)
    printed = capsys.readouterr().out
    assert "ZeRO stages 1 and 2" in printed and printed.count("\n") == 1
    assert (output.parent / "latest_universal").read_text().strip() == output.name
    assert sorted(p.name for p in output.glob("*.pt")) == ["mp_rank_00_model_states.pt"]
    assert load_pickle(output / "zero" / "optimizer_state.pt")["ds_version"]
    place = output / "zero" / "layers.0.attention.qkv.weight"
    content = load_pickle(place / "fp32.pt")
    assert content["cat_dim"] == 0
    assert content["sub_param_shape"].shape == ((32, 16, 16), 32)
    up = load_pickle(output / "zero" / "layers.1.mlp.up.weight" / "fp32.pt")
    assert up["param_n_sub_params"] == 2
    table = load_pickle(output / "zero" / "embedding.word_embeddings.weight" / "fp32.pt")
    assert table["vocab_tensor"] and table["param"].shape == (61, 32)
    source = open_checkpoint(output.parent)
    for name in own.names():
        assert torch.equal(source.tensor(name), own.tensor(name)), name


def test_loaders_of_stage_3_get_the_padding(tmp_path, own):
    output = tmp_path / "u" / "x"
    output.parent.mkdir()
    command("--load", tmp_path / "own", "--output", output, "--zero-stage", "3")
    assert (output / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    table = load_pickle(output / "zero" / "embedding.word_embeddings.weight" / "fp32.pt")
    assert table["param"].shape == (128, 32)
    name = "embedding.word_embeddings.weight"
    assert torch.equal(UniversalFolder(output).tensor(name), own.tensor(name))


def test_skipped_steps_are_no_updates(tmp_path, own):
    own.state = {"iteration": 7, "consumed_samples": 56, "optimizer_step": 5}
    write_universal(own, tmp_path / "u")
    states = load_pickle(tmp_path / "u" / "mp_rank_00_model_states.pt")
    assert (states["global_steps"], states["skipped_steps"]) == (7, 2)
    schedule = {"last_batch_iteration": 4, "last_epoch": 5, "_step_count": 6}
    assert states["lr_scheduler"] == schedule  # after five steps of DeepSpeed's and of torch's


def test_a_failed_write_leaves_nothing(tmp_path, own, monkeypatch):
    save, folder = torch.save, tmp_path / "out" / "u"
    folder.parent.mkdir()
    write_universal(own, folder)

    def full(content, path):
        if "layers.1" in str(path):
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(universal.torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_universal(own, folder.with_name("v"))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest_universal", "u"]
    assert (folder.parent / "latest_universal").read_text() == "u"


def test_other_folders_are_not_overwritten(tmp_path, own):
    with pytest.raises(SystemExit, match="not a universal checkpoint; name a new folder"):
        command("--load", tmp_path / "own", "--output", tmp_path / "own")


def test_damage_is_named(tmp_path, own):
    folder = tmp_path / "u"
    write_universal(own, folder)
    UniversalFolder.verify(folder)
    path = folder / "zero" / "layers.0.mlp.up.weight" / "fp32.pt"
    content = bytearray(path.read_bytes())
    content[-300] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up\.weight/fp32\.pt is damaged"):
        UniversalFolder.verify(folder)
    path.write_bytes(bytes(content[:100]))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up\.weight/fp32\.pt"):
        UniversalFolder(folder).tensor("layers.0.mlp.up.weight")
    torch.save({"param": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up\.weight is \(3,\), but"):
        UniversalFolder(folder).tensor("layers.0.mlp.up.weight")


class _Malicious:
    def __reduce__(self):
        return (exec, ("raise SystemExit('run')",))


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero/layers.0.mlp.up.weight/fp32.pt"]
)
def test_pickles_are_not_run(tmp_path, own, name):
    folder = tmp_path / "u"
    write_universal(own, folder)
    torch.save(_Malicious(), folder / name)
    with pytest.raises(CheckpointError, match="exec"):
        UniversalFolder(folder).tensor("layers.0.mlp.up.weight")
