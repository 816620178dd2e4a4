"""Checkpoints of NeMo 2 as its releases lay them out: ``weights/`` of Megatron-Core with the prefix
``module.``, and ``context/model.yaml``, in which Fiddle has written the model's configuration."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from fuzz.readers.checkpoints import GROUPS, HEADS, F, H, weights, write_huggingface
from fuzz.readers.trainers import write_nemo

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.sharded.files import METADATA, ShardedFiles

LAST = "model_name=0--val_loss=0.00-step=9-consumed_samples=80.0-last"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nemo")
    write_nemo(folder)
    return folder


@pytest.fixture
def nemo(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / LAST))


@pytest.mark.parametrize("inside", ["", "weights", "weights/.metadata", ".."])
def test_the_folder_is_the_llama(inside, nemo, tmp_path):
    (tmp_path / "llama").mkdir()
    write_huggingface(tmp_path / "llama")
    source, llama = open_checkpoint(nemo / inside), open_checkpoint(tmp_path / "llama")
    assert source.title == "distributed checkpoint of Megatron-Core" and source.folder == nemo
    padded = {"unpadded_vocab_size": 128}  # NeMo's multiple: it does not store how many are tokens
    assert source.model.shaping() == llama.model.shaping() | padded
    assert source.model.norm == llama.model.norm
    assert source.model.positions.rotary_base == llama.model.positions.rotary_base
    assert {*source.names()} == {*llama.names()} and not source.state
    for name in llama.names():
        expected = llama.tensor(name)
        assert torch.equal(source.tensor(name)[: len(expected)], expected), name
    assert any("how many are padding" in note for note in source.notes)


def test_rows_of_queries_keys_and_values_are_those_of_its_groups(nemo):
    stored = ShardedFiles(nemo / "weights").tensor(
        "module.decoder.layers.self_attention.linear_qkv.weight"
    )
    width, per = H // HEADS, HEADS // GROUPS
    q, k, v = (weights()[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    rows = []
    for group in range(GROUPS):
        rows += [q[group * per * width : (group + 1) * per * width]]
        rows += [each[group * width : (group + 1) * width] for each in (k, v)]
    assert torch.equal(stored, torch.cat(rows)[None])


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_a_stack_halves_of_a_gate_and_flat_pieces(nemo):
    """As other releases of Megatron-Core lay the same out: of a stacked tensor each row is a block;
    ``weight_w`` is the gate; a tensor is a grid of pieces, each of them flat."""
    files = ShardedFiles(nemo / "weights")
    state = {name: files.tensor(name) for name in files.tensors}
    for name, values in state.items():
        if ".layers." in name:
            state[name] = torch.cat((values, values + 1))
    gated = "module.decoder.layers.mlp.linear_fc1.weight"
    state[f"{gated}_w"], state[f"{gated}_v"] = state.pop(gated).chunk(2, dim=1)
    name = "module.output_layer.weight"
    head = state[name]
    rows, width = len(head) // 2, H // 4
    pieces = [[part.flatten() for part in row.split(width, 1)] for row in head.split(rows)]
    state[name] = torch.stack([torch.stack(row) for row in pieces])
    before = open_checkpoint(nemo)
    expected = {name: before.tensor(name) for name in before.names()}
    dcp.save(state, checkpoint_id=nemo / "weights", no_dist=True)
    path = nemo / "weights" / METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": tuple(head.shape)}}
    path.write_bytes(pickle.dumps(metadata))
    edited(nemo, num_layers=2)
    source = open_checkpoint(nemo)
    assert len(source.names()) > len(expected)
    for name, values in expected.items():
        assert torch.equal(source.tensor(name), values), name
        if name.startswith("layers.0."):
            second = name.replace("layers.0.", "layers.1.")
            assert torch.equal(source.tensor(second), values + 1), second


def edited(folder, **changes):
    path = folder / "context" / "model.yaml"
    content = yaml.safe_load(path.read_text())
    content["config"].update(changes)
    path.write_text(yaml.safe_dump(content))


RELU = {"_call_": False, "_target_": "torch.nn.functional.relu"}
GELU = {"_call_": False, "_target_": "torch.nn.functional.gelu"}
DAMAGES = {
    "activation": ({"activation_func": RELU}, r"model.yaml: activation_func 'torch.*relu' with"),
    "gated gelu": ({"activation_func": GELU}, r"gelu' with gated_linear_unit True; expected one"),
    "positions": ({"position_embedding_type": "yarn"}, "position_embedding_type is 'yarn'"),
    "blocks": ({"num_layers": 2}, r"linear_\w+.weight|layers\.1\..*a network as .*model.yaml"),
    "width": ({"ffn_hidden_size": F + 8}, r"mlp.*\(2, 24, 16\)|mlp.*model.yaml makes it"),
    "rows": ({"hidden_size": H * 2}, r"\.metadata: .*model.yaml makes it"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_description_is_refused_by_name(damage, nemo):
    changes, message = DAMAGES[damage]
    edited(nemo, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(nemo)


@pytest.mark.parametrize(
    "text, message", [("config: [", "is not YAML"), ("model: 1", "has no config of a GPT")]
)
def test_a_malformed_description_is_refused_by_file(text, message, nemo):
    path = nemo / "context" / "model.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"context/model\.yaml {message}"):
        open_checkpoint(nemo)


def test_a_tied_plain_network_of_nemo(nemo):
    """The table of names: what GPTConfig of 126M parameters says, without its tensors."""
    from megatron.formats.legacy_megatron.arguments import model_of_arguments
    from megatron.formats.sharded.megatron_core import arguments_of_nemo

    path = nemo / "context" / "model.yaml"
    config = {
        "num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12,
        "seq_length": 2048, "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
        "share_embeddings_and_output_weights": True, "add_bias_linear": True,
        "activation_func": GELU, "gated_linear_unit": False, "bias_activation_fusion": True,
        "position_embedding_type": "learned_absolute", "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "num_query_groups": None, "rotary_percent": 1.0,
    }  # fmt: skip
    path.write_text(yaml.safe_dump({"config": config}))
    model = model_of_arguments(arguments_of_nemo(path), path)
    assert (model.num_layers, model.hidden_size, model.mlp.ffn_hidden_size) == (12, 768, 3072)
    assert model.embedding.tied and model.mlp.bias and model.attention.qkv_bias
    assert model.mlp.activation == "gelu_tanh" and model.norm.normalization == "LayerNorm"
    assert model.positions.max_position_embeddings == 2048
