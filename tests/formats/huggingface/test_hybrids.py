"""Architectures with Mamba-2, besides logits and gradients in float32: gradients in
float64, older names, and what is refused; all against transformers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hf_hybrid_cases import HYBRID_CASES
from hf_inputs import pair
from safetensors.torch import load_file
from samples import sampled
from test_against_hf import LENGTH, gradients_of, ours_of
from transformers import AutoConfig

from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError
from megatron.formats.conversion.commands import from_hf, to_hf
from megatron.formats.huggingface import architecture_named, linear_targets
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.shard import shard_of

MAMBA = ("bamba", "nemotron_h")
ALL = [(model_type, case) for model_type in MAMBA for case in HYBRID_CASES[model_type]]
FIRST = [("bamba", "limits"), ("nemotron_h", "plain")]
PATH = Path("config.json")


def config_of(model_type, case="plain"):
    return AutoConfig.for_model(model_type, **HYBRID_CASES[model_type][case]).to_dict()


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL, lambda case: case in FIRST))
def test_float64_gradients_against_hf(model_type, case, hf_model, tmp_path, monkeypatch):
    """Their scan, norms and routers convert to float32; here float32 means float64 to them."""
    theirs = hf_model(model_type, **HYBRID_CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    ours, inputs = ours_of(source).double(), pair(source.model, LENGTH)
    for block in ours.blocks():
        if hasattr(block.mlp, "router"):
            block.mlp.router.dtype = torch.float64
    sum(ours(inputs.ours).losses.values()).backward()
    with monkeypatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        theirs.double()
        if model_type == "nemotron_h":
            theirs.set_experts_implementation("eager")
        else:  # in theirs, frequencies are rounded to float32
            factor = theirs.config.rope_parameters.get("factor", 1.0)
            places = torch.arange(2, dtype=torch.float64)
            theirs.model.rotary_emb.inv_freq = 10000.0 ** (-places / 2) / factor
        inputs.loss(theirs(**inputs.theirs)).backward()
    gradients = {
        name: shard_of(param).join([param.grad]) for name, param in ours.canonical_parameters()
    }
    expected = gradients_of(theirs, tmp_path / "gradients")
    compared = 0
    for parameter in source.architecture.parameters(source.model):
        if parameter.ours in gradients:
            for name, gradient in parameter.to_hf(gradients[parameter.ours]).items():
                assert expected[name].dtype == torch.float64
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
                compared += 1
    assert compared == len([name for name in expected if not name.endswith("correction_bias")])


@pytest.mark.parametrize("model_type", MAMBA)
def test_a_checkpoint_between_them_is_bitwise(model_type, hf_folder, tmp_path, capsys):
    """By the commands, which compare logits with transformers on both ways."""
    settings = HYBRID_CASES[model_type]["plain"]
    theirs, ours, back = hf_folder(model_type, **settings), tmp_path / "ours", tmp_path / "back"
    from_hf(["--input", str(theirs), "--output", str(ours)])
    to_hf(["--load", str(ours), "--output", str(back)])
    assert capsys.readouterr().out.count("tokens agree") == 2
    actual, expected = (load_file(folder / "model.safetensors") for folder in (back, theirs))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_patterns_of_older_files():
    content = config_of("nemotron_h")
    known = architecture_named(content, PATH)
    expected = known.model(content, PATH)
    del content["layers_block_type"]
    older = content | {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}
    assert known.model(older, PATH) == expected
    kinds = ["mamba", "moe", "attention", "mlp", "mamba"]
    assert known.model(content | {"layers_block_type": kinds}, PATH) == expected


CHANGED = {
    "mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 1, "mamba_num_heads": 2,
    "mamba_conv_kernel_dim": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
    "mamba_norm_before_gate": True, "mamba_step_limits": (0.1, 5.0),
    "linear_attention_freq": "[1,1,0]", "hybrid_layer_pattern": "*E-MM",
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("model_type", MAMBA)
def test_a_field_is_written_or_refused(model_type, field):
    """Whatever else a model has: it is read again, or it does not fit; never is it left out."""
    content = config_of(model_type)
    known = architecture_named(content, PATH)
    flags = known.model(content, PATH).flags()
    changes = {field: CHANGED[field]}
    if field == "hybrid_layer_pattern":
        changes["moe_layer_freq"] = "([0]*1+[1]*1+[0]*3)"
    try:
        model = dataclasses.replace(flags, **changes).resolve()
    except ConfigError:  # there is no such network
        return
    model = model.with_vocabulary(61)
    if not known.misfits(model):
        assert known.model(json.loads(json.dumps(known.config(model))), PATH) == model


REFUSED = [
    ("nemotron_h", {"layers_block_type": ["linear_attention", "conv"]}, "layers_block_type is"),
    ("nemotron_h", {"layers_block_type": ["full_attention", "mlp"]}, "no layer is Mamba-2"),
    ("nemotron_h", {"mlp_bias": True}, "mlp_bias is True .*next to experts"),
    ("nemotron_h", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern is 'M.*says ME"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias is True.*no biases"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'.*SiLU"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("nemotron_h", {"time_step_min": -1.0}, "time_step_min is -1.0.*0 or more"),
    ("nemotron_h", {"n_group": 2, "topk_group": 2}, "topk_group is 2.*num_experts_per_tok"),
    ("nemotron_h", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0.*positive"),
    ("bamba", {"attn_layer_indices": [5]}, r"attn_layer_indices is \[5\].*below 3"),
    ("bamba", {"attn_layer_indices": [0, 1, 2]}, "no block has Mamba-2"),
    ("bamba", {"mamba_d_head": 16}, "mamba_d_head is 16.*64"),
    ("bamba", {"time_step_limit": [1.0, 0.5]}, "time_step_limit is.*smaller one first"),
    ("bamba", {"mamba_n_groups": 3}, "--mamba-num-groups 3.*must divide --mamba-num-heads 8"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_cannot_be_represented_is_named(model_type, changes, message):
    content = config_of(model_type)
    with pytest.raises(CheckpointError, match=message):
        architecture_named(content, PATH).model(content | changes, PATH)


def test_projections_of_states_can_have_adapters():
    content = config_of("bamba")
    model = architecture_named(content, PATH).model(content, PATH)
    names = {target.module.rpartition(".")[2] for target in linear_targets(model)}
    assert {"in_proj", "out_proj", "q_proj", "o_proj", "gate_proj"} <= names
