"""Checkpoints with experts and buffers: tools that walk parameters, universal folders, folders of
Megatron-DeepSpeed."""

import pytest
import torch
from tool_modules import load_program

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.deepspeed_folders.universal import UniversalFolder, write_universal
from megatron.formats.inspection import model_of, tensor_differences, verify_all
from megatron.formats.unpickle import load_pickle

FIELDS = {
    "num_experts": (4,), "moe_layer_freq": "[0,1]", "moe_ffn_hidden_size": 12, "llama": True,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True,
}  # fmt: skip
BIAS = "layers.1.mlp.router.expert_bias"
UP = "layers.1.mlp.experts.up.weight"
STOCK = {
    "num_layers": 4, "num_experts": (4, 2), "expert_interval": 2, "moe_router_topk": 2,
    "moe_gate": "deepspeed", "mlp_type": "residual", "add_bias_linear": True,
}  # fmt: skip
"""Megatron-DeepSpeed's PR-MoE: other numbers of experts in other layers."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, gpt_config, random_gpt, write_checkpoint):
    def make(**fields):
        config = gpt_config(**fields)
        folder = tmp_path_factory.mktemp("saved")
        write_checkpoint(folder, config, random_gpt(config))
        return folder

    return make


def command(*words):
    load_program("tools/convert_checkpoint.py").main([*map(str, words)])


def assert_same(read, expected):
    assert set(read.names()) == set(expected.names())
    for name in expected.names():
        assert torch.equal(read.tensor(name), expected.tensor(name)), name


def test_tools_walk_experts_and_buffers(saved, tmp_path, capsys):
    folder = saved(**FIELDS)
    source = open_checkpoint(folder)
    assert source.shape(UP) == (4, 24, 32) and source.shape(BIAS) == (4,)
    load_program("tools/inspect_checkpoint.py").main([str(folder)])
    shown = capsys.readouterr().out
    assert UP in shown and BIAS in shown
    (verdict,) = verify_all(folder)
    assert verdict.error is None and verdict.parameters == len(source.names())
    model = model_of(source, torch.bfloat16, torch.device("cpu"))
    ((name, buffer),) = model.canonical_buffers()
    assert name == BIAS and torch.equal(buffer.values, source.tensor(BIAS))
    copy = CheckpointReader(write_checkpoint(tmp_path / "copy", source))
    assert_same(copy, source)
    assert not list(tensor_differences(copy, source))


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.proof)])
def test_universal_folders_have_every_expert(saved, tmp_path, stage):
    source = open_checkpoint(saved(**FIELDS))
    write_universal(source, tmp_path / "u", stage)
    read = UniversalFolder(tmp_path / "u")
    assert_same(read, source)
    content = load_pickle(tmp_path / "u" / "zero" / UP / "fp32.pt")
    assert content["param"].shape == (4, 24, 32) and "cat_dim" not in content
    (tmp_path / "u" / "zero" / UP / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=UP):
        UniversalFolder(tmp_path / "u").tensor(UP)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_command_writes_folders_of_megatron_deepspeed(saved, tmp_path, capsys, size):
    """Residual experts, and layers with other numbers of them; read back by the command itself."""
    folder = saved(**STOCK)
    words = ["--load", folder, "--output", tmp_path, "--target-tensor-parallel-size", size]
    command("to-deepspeed", *words)
    assert "read back and equal, bit by bit" in capsys.readouterr().out
    source = open_checkpoint(tmp_path)
    assert source.model.flags().num_experts == (4, 2)
    assert_same(source, open_checkpoint(folder))
    files = sorted(path.name for path in (tmp_path / "global_step10").glob("layer_*_00_*"))
    assert len(files) == 6 and files[-1] == "layer_1_expert_1_mp_rank_00_model_states.pt"


def test_networks_that_a_program_lacks_are_refused(saved, tmp_path):
    with pytest.raises(SystemExit, match="trained with its gates"):
        fields = FIELDS | {"moe_layer_freq": "1"}
        command("to-deepspeed", "--load", saved(**fields), "--output", tmp_path)
    with pytest.raises(SystemExit, match="layers 1 have experts"):
        fields = {"num_experts": (4,), "moe_layer_freq": "[1,0]"}
        command("to-deepspeed", "--load", saved(**fields), "--output", tmp_path)
    with pytest.raises(SystemExit, match="one number of experts for all layers"):
        command("to-megatron", "--load", saved(**STOCK), "--output", tmp_path)
