"""Layers of experts in the files of Megatron's core library (``--ckpt-format torch``), written here
by facts of its layout: fused norms, a tensor for each expert, expert ranks in the third number."""

import argparse
from itertools import product

import pytest
import torch
from configs import model_config, run_config

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.features import whole_shards
from megatron.formats.legacy_megatron.names import qkv_to_megatron
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron

FIELDS = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_query_groups": 2, "group_query_attention": True, "kv_channels": 4, "seq_length": 12,
    "max_position_embeddings": 12, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "unpadded_vocab_size": 64, "padded_vocab_size": 64, "make_vocab_size_divisible_by": 16,
    "moe_ffn_hidden_size": 8, "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True,
    "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
ARGUMENTS = FIELDS | {
    "num_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "moe_grouped_gemm": False,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01,
    "transformer_impl": "transformer_engine",
}  # fmt: skip
OURS = FIELDS | {
    "num_experts": (4,), "moe_layer_freq": "[0, 1, 0, 1]",
    "moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.01,),
}  # fmt: skip
del OURS["group_query_attention"]
ROWS = ("qkv", "word_embeddings", "output_layer", "shared_experts.linear_fc1")
COLUMNS = ("linear_proj", "linear_fc2")


@pytest.fixture(scope="module")
def model():
    return model_config(**OURS)


@pytest.fixture(scope="module")
def weights(model):
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(shard.canonical_shape, generator=generator)
        for name, shard in whole_shards(model).items()
    }


def their_tensors(name, values, dense, grouped):
    """(their name, with the number of the expert among all, or None, and its tensor)."""
    inner = {
        "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "attention.qkv.weight": "self_attention.linear_qkv.weight",
        "attention.proj.weight": "self_attention.linear_proj.weight",
        "mlp_norm.weight": (
            "mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight"
        ),
        "mlp.up.weight": "mlp.linear_fc1.weight",
        "mlp.down.weight": "mlp.linear_fc2.weight",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.expert_bias": "mlp.router.expert_bias",
        "mlp.shared.up.weight": "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared.down.weight": "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
    }  # fmt: skip
    if not name.startswith("layers."):
        return [(name.replace("final_norm.norm", "decoder.final_layernorm"), None, values)]
    _, layer, rest = name.split(".", 2)
    if rest in inner:
        return [(f"decoder.layers.{layer}.{inner[rest]}", None, values)]
    fc = {"mlp.experts.up.weight": "linear_fc1", "mlp.experts.down.weight": "linear_fc2"}[rest]
    place = f"decoder.layers.{layer}.mlp.experts."
    form = f"{place}{fc}.weight{{}}" if grouped else f"{place}local_experts.{{}}.{fc}.weight"
    return [(form, number, each) for number, each in enumerate(values)]


def share(name, values, rank, size, model):
    if "linear_qkv.weight" in name:
        values = qkv_to_megatron(values, 3, 4, 2, 4)
    if "linear_fc1.weight" in name:  # gate and up, each cut
        return torch.cat([half.chunk(size)[rank] for half in values.chunk(2)])
    if any(part in name for part in ROWS) and "norm" not in name:
        return values.chunk(size)[rank]
    return values.chunk(size, 1)[rank] if any(part in name for part in COLUMNS) else values


def write_core(save, weights, model, tensor=1, pipeline=1, experts=1, grouped=False):
    """As every rank of Megatron-LM writes its file."""
    each = model.num_layers // pipeline
    for t, p, e in product(range(tensor), range(pipeline), range(experts)):
        content = {}
        for name, values in weights.items():
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            last = "final" in name or "output" in name
            if p != (layer // each if layer is not None else pipeline - 1 if last else 0):
                continue
            dense = f"layers.{layer}.mlp.up.weight" in weights
            for theirs, number, part in their_tensors(name, values, dense, grouped):
                if layer is not None:
                    theirs = theirs.replace(f".{layer}.", f".{layer % each}.", 1)
                here = 4 // experts
                if number is not None and number // here != e:
                    continue
                theirs = theirs if number is None else theirs.format(number % here)
                content[theirs] = share(theirs, part, t, tensor, model).clone()
        content["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        arguments = ARGUMENTS | {
            "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
            "expert_model_parallel_size": experts, "moe_grouped_gemm": grouped,
        }  # fmt: skip
        folder = f"mp_rank_{t:02d}"
        folder += f"_{p:03d}" * (pipeline > 1) + f"_{e:03d}" * (experts > 1)
        path = save / "iter_0000007" / folder / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        states = {"iteration": 7, "checkpoint_version": 3.0, "model": content}
        torch.save(states | {"args": argparse.Namespace(**arguments)}, path)
    (save / "latest_checkpointed_iteration.txt").write_text("7")
    return save / "iter_0000007"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "experts", "grouped"),
    [
        (2, 1, 2, True),
        (2, 2, 2, False),
        *[
            pytest.param(t, p, e, g, marks=pytest.mark.proof)
            for t, p, e, g in product((1, 2), (1, 2, 4), (1, 2, 4), (False, True))
        ],
    ],
)
def test_every_layout_is_read(tmp_path, model, weights, tensor, pipeline, experts, grouped):
    folder = write_core(tmp_path, weights, model, tensor, pipeline, experts, grouped)
    source = MegatronCheckpoint(folder)
    assert source.model == model
    assert set(source.names()) == weights.keys()
    for name, values in weights.items():
        assert torch.equal(source.tensor(name), values), name


@pytest.mark.parametrize(
    ("tensor", "pipeline", "experts"),
    [
        (2, 2, 2),
        pytest.param(1, 1, 1, marks=pytest.mark.proof),
        pytest.param(1, 1, 4, marks=pytest.mark.proof),
    ],
)
def test_what_is_written_is_theirs(tmp_path, model, weights, tensor, pipeline, experts):
    """The same files, names and tensors as those of the writer above."""
    theirs = write_core(tmp_path / "theirs", weights, model, tensor, pipeline, experts)
    source = MegatronCheckpoint(theirs)
    ours = write_megatron(source, tmp_path / "ours", tensor, pipeline, 7, expert_size=experts)
    names = sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt"))
    assert sorted(path.relative_to(ours) for path in ours.rglob("*.pt")) == names
    for name in names:
        here, there = (
            torch.load(root / name, weights_only=False)["model"] for root in (ours, theirs)
        )
        there.pop("decoder.layers.0.self_attention.core_attention._extra_state")
        assert here.keys() == there.keys()
        for key, values in there.items():
            assert torch.equal(here[key], values), key
    assert MegatronCheckpoint(ours).model == model


def test_an_expert_or_a_rank_that_is_missing_is_named(tmp_path, model, weights):
    folder = write_core(tmp_path, weights, model, experts=2)
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    for part in ("linear_fc1", "linear_fc2"):
        del content["model"][f"decoder.layers.1.mlp.experts.local_experts.1.{part}.weight"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"local_experts\.1\.linear_fc1"):
        MegatronCheckpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="mp_rank_00_001/model_optim_rng.pt is missing"):
        MegatronCheckpoint(folder)
    alone = write_core(tmp_path / "alone", weights, model)
    path = alone / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["model"]["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"has no expert 3 of the 4 of .*experts\.down"):
        MegatronCheckpoint(alone)


def test_through_our_own_format(tmp_path, model, weights):
    """Buffers too, which have no moments."""
    source = MegatronCheckpoint(write_core(tmp_path / "theirs", weights, model, experts=2))
    ours = CheckpointReader(write_checkpoint(tmp_path / "ours", source))
    assert ours.model == model and set(ours.names()) == weights.keys()
    for name, values in weights.items():
        assert torch.equal(ours.tensor(name), values), name
    assert run_config(model=ours.model).model == model


def test_ranks_that_do_not_divide_experts_are_refused(tmp_path, model, weights):
    source = MegatronCheckpoint(write_core(tmp_path, weights, model))
    with pytest.raises(ValueError, match="--target-expert-parallel-size 3 must divide"):
        write_megatron(source, tmp_path / "x", expert_size=3)


def test_experts_from_before_the_core_library_are_refused(tmp_path, model, weights):
    folder = write_core(tmp_path, weights, model)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"] = {
        name.replace("decoder.layers", "language_model.encoder.layers").replace(
            "experts.local_experts", "local_experts"
        ): values
        for name, values in content["model"].items()
    }
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="weighed by a sigmoid"):
        MegatronCheckpoint(folder)
