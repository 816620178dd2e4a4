"""Architectures with experts besides logits and gradients: router choices, files in
other forms, MXFP4, layers of multi-token prediction, and what is refused by name; all against
transformers."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hf_inputs import VOCABULARY
from hf_more_cases import LONGROPE, MORE_CASES
from safetensors.torch import load_file, save_file
from samples import sampled
from test_against_hf import CLOSE, LENGTH, SHORT, ours_of
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from megatron.checkpoint.files import CheckpointError
from megatron.data.gpt_batch import GPTBatch
from megatron.families.gpt import begin
from megatron.features.experts import layer
from megatron.formats.conversion.commands import from_hf, to_hf
from megatron.formats.huggingface import architecture_named, linear_targets
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder

FIRST = [(model_type, next(iter(cases))) for model_type, cases in MORE_CASES.items()]
ALL = [(model_type, case) for model_type, cases in MORE_CASES.items() for case in cases]
PATH = Path("config.json")


def config_of(model_type):
    return AutoConfig.for_model(model_type, **MORE_CASES[model_type]["plain"]).to_dict()


def tokens_of(length):
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def our_logits(source, tokens):
    model = ours_of(source)
    state = begin(source.model, GPTBatch(tokens, tokens, torch.ones(tokens.shape), None, None))
    return model(state.changed(targets=None)).hidden[..., :VOCABULARY]


def saved(theirs, folder, **options):
    theirs.save_pretrained(folder, **options)
    return HuggingFaceFolder(folder)


def by_expert(choices_TK, weights_TK, experts):
    """[T, E] weights, minus one where an expert is not chosen."""
    weights_TE = torch.full((len(choices_TK), experts), -1.0)
    return weights_TE.scatter(1, choices_TK, weights_TK.float())


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL, lambda case: case in FIRST))
def test_choices_against_hf(model_type, case, hf_model, tmp_path, monkeypatch):
    """The experts of every token in every layer, and their weights."""
    theirs = hf_model(model_type, **MORE_CASES[model_type][case])
    source = saved(theirs, tmp_path)
    ours, expected, tokens = [], [], tokens_of(LENGTH)
    route = layer.route

    def recorded(*args):
        routing = route(*args)
        ours.append(by_expert(routing.experts_TK, routing.weights_TK, args[2]))
        return routing

    def record(module, args, kwargs):
        _, choices, weights = (*args, *kwargs.values())
        expected.append(by_expert(choices, weights, module.num_experts))

    monkeypatch.setattr(layer, "route", recorded)
    for name, module in theirs.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(record, with_kwargs=True)
    our_logits(source, tokens)
    with torch.no_grad():
        theirs(tokens)
    assert len(ours) == len(expected) > 0
    for actual, wanted in zip(ours, expected, strict=True):
        assert torch.equal(actual >= 0, wanted >= 0)
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    # Without tokens that differ in their choices this would show little.
    assert all(len((actual >= 0).unique(dim=0)) > 2 for actual in ours)


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL, lambda case: case in FIRST))
def test_files_of_both_forms_have_the_same_weights(model_type, case, hf_model, tmp_path):
    """One tensor for each expert, and one for all, as transformers 5 has them in memory."""
    theirs = hf_model(model_type, **MORE_CASES[model_type][case])
    older = saved(theirs, tmp_path / "older")
    newer = saved(theirs, tmp_path / "newer", save_original_format=False)
    assert older.model == newer.model and list(older.names()) == list(newer.names())
    assert all(torch.equal(older.tensor(name), newer.tensor(name)) for name in older.names())
    in_memory = "gpt_oss"
    stored = load_file(tmp_path / "newer/model.safetensors")
    assert (stored.keys() == load_file(tmp_path / "older/model.safetensors").keys()) == (
        model_type == in_memory
    )


SCALED = ("phimoe", "longrope")


@pytest.mark.parametrize(
    ("model_type", "case"), sampled([*FIRST, SCALED], lambda each: each[0] == "glm4_moe")
)
def test_a_checkpoint_between_them_is_bitwise(model_type, case, hf_folder, tmp_path, capsys):
    """By the commands, which compare logits with transformers on both ways."""
    settings = MORE_CASES[model_type].get(case)
    if settings is None:
        settings = MORE_CASES["phimoe"]["plain"] | {"rope_parameters": LONGROPE}
    theirs, ours, back = hf_folder(model_type, **settings), tmp_path / "ours", tmp_path / "back"
    from_hf(["--input", str(theirs), "--output", str(ours)])
    to_hf(["--load", str(ours), "--output", str(back)])
    assert capsys.readouterr().out.count("tokens agree") == 2
    actual, expected = (load_file(folder / "model.safetensors") for folder in (back, theirs))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_corrections_are_written_in_float32(hf_model, tmp_path):
    """As transformers keeps them, whatever the dtype of the weights is: they are small changes."""
    source = saved(hf_model("glm4_moe", **MORE_CASES["glm4_moe"]["plain"]), tmp_path / "theirs")
    (tmp_path / "back").mkdir()
    write_model(source, tmp_path / "back", "bfloat16", 10**9)
    dtypes = {n: v.dtype for n, v in load_file(tmp_path / "back/model.safetensors").items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith("e_score_correction_bias")} != set()
    again = HuggingFaceFolder(tmp_path / "back")
    name = "layers.1.mlp.router.expert_bias"
    assert torch.equal(again.tensor(name), source.tensor(name))


def packed(values_EIO):
    """Blocks and scales of MXFP4 for weights, each of which becomes a random number."""
    experts, inputs, outputs = values_EIO.shape
    draw = torch.Generator().manual_seed(inputs + outputs)
    groups = (experts, outputs, inputs // 32)
    blocks = torch.randint(256, (*groups, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, groups, generator=draw, dtype=torch.uint8)


def test_a_folder_in_mxfp4_gives_what_transformers_dequantises(hf_model, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    theirs = hf_model("gpt_oss", **MORE_CASES["gpt_oss"]["plain"] | sizes)
    theirs.save_pretrained(tmp_path)
    tensors = {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(values)
        else:
            tensors[name] = values.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": quantised}))
    source = HuggingFaceFolder(tmp_path)
    assert "experts" in tensors.keys().__repr__() and source.model.mlp.bias
    dequantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).eval()
    expected = {name: values.float() for name, values in dequantised.state_dict().items()}
    actual = dict(source.architecture.to_hf(source.model, source.tensor))
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(actual[name], values), name
    tokens = tokens_of(LENGTH)
    with torch.no_grad():
        logits = dequantised.float()(tokens).logits
    torch.testing.assert_close(our_logits(source, tokens), logits, rtol=1e-4, atol=1e-4)
    back = tmp_path / "back"
    back.mkdir()
    write_model(source, back, "bfloat16", 10**9)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = load_file(back / "model.safetensors")
    assert all(torch.equal(again[name].float(), values) for name, values in expected.items())


@pytest.mark.parametrize("length", [SHORT, LENGTH])
def test_factors_of_phi_by_length(length, hf_model, tmp_path):
    """Beyond the original length, transformers 5 multiplies cosines by the factor for long
    sequences, but divides frequencies by those for short ones, since it computes these without the
    length; the authors' code and vLLM have both for long ones."""
    case = MORE_CASES["phimoe"]["plain"] | {"rope_parameters": LONGROPE}
    theirs = hf_model("phimoe", **case)
    source, tokens = saved(theirs, tmp_path), tokens_of(length)
    compute = theirs.model.rotary_emb.rope_init_fn
    theirs.model.rotary_emb.rope_init_fn = lambda config: compute(config, seq_len=length)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(our_logits(source, tokens), expected, **CLOSE)
    back = tmp_path / "back"
    back.mkdir()
    write_model(source, back, "float32", 10**9)
    assert HuggingFaceFolder(back).model == source.model
    config = AutoModelForCausalLM.from_pretrained(back).config
    assert {name: config.rope_parameters[name] for name in LONGROPE} == LONGROPE


MULTI_TOKEN = {
    "glm4_moe": [
        "model.layers.3.eh_proj.weight", "model.layers.3.shared_head.head.weight",
        "model.layers.3.mlp.experts.5.up_proj.weight",
    ],
    "ernie4_5_moe": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
}  # fmt: skip


@pytest.mark.parametrize("model_type", MULTI_TOKEN)
def test_layers_that_predict_further_tokens_are_left_out_and_named(model_type, hf_model, tmp_path):
    theirs = hf_model(model_type, **MORE_CASES[model_type]["plain"])
    plain = saved(theirs, tmp_path)
    assert not plain.notes
    file = tmp_path / "model.safetensors"
    further = {name: torch.ones(2, 2) for name in MULTI_TOKEN[model_type]}
    save_file(load_file(file) | further, file, {"format": "pt"})
    source = HuggingFaceFolder(tmp_path)
    assert source.names() == plain.names()
    (note,) = source.notes
    assert all(name in note for name in further) and "multi-token prediction" in note
    save_file(load_file(file) | {"model.layers.9.x.weight": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"contains model\.layers\.9\.x\.weight"):
        HuggingFaceFolder(tmp_path)


OTHER_KEYS = [
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1]}),
    ("hunyuan_v1_moe", {"moe_intermediate_size": [48] * 3, "use_cla": False, "use_qk_norm": True}),
    ("minimax_m2", {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}),
    ("minimax_m2", {"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "use_mtp": True}),
    ("minimax_m2", {"attn_type_list": [1, 1, 1], "num_mtp_modules": 3}),
    ("dots1", {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ("ernie4_5_moe", {"moe_gate": "topk", "moe_use_aux_free": True, "moe_capacity": [64] * 3}),
    ("gpt_oss", {"initial_context_length": 10, "experts_per_token": 2}),
    ("phimoe", {"head_dim": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "keys"), OTHER_KEYS)
def test_keys_of_the_authors_change_nothing(model_type, keys):
    content = config_of(model_type)
    known = architecture_named(content, PATH)
    assert known.model(content | keys, PATH) == known.model(content, PATH)


def test_dynamic_scaling_with_alpha_is_another_base(hf_model, tmp_path):
    """As HunYuan-A13B is published."""
    alpha = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0}
    case = MORE_CASES["hunyuan_v1_moe"]["plain"] | {"rope_parameters": alpha}
    theirs = hf_model("hunyuan_v1_moe", **case)
    source, tokens = saved(theirs, tmp_path), tokens_of(LENGTH)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(our_logits(source, tokens), expected, **CLOSE)
    written = source.architecture.config(source.model)
    assert written["rope_theta"] == pytest.approx(10000.0 * 20.0 ** (12 / 10))


def test_gpt_oss_without_scaling_in_the_file_has_its_default():
    content = config_of("gpt_oss")
    del content["rope_parameters"]
    model = architecture_named(content, PATH).model(content, PATH)
    scaling = model.positions.rope_scaling
    assert (scaling.factor, scaling.truncate, model.positions.rotary_base) == (32.0, False, 150000)


REFUSED = [
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False.*so must attention"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5.*must be 1.702"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "fp8.*only mxfp4"),
    ("glm4_moe", {"n_group": 4, "topk_group": 2}, "topk_group is 2.*num_experts_per_tok.*is 2"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3.*none has experts"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1.*0 or more"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0.*positive"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'.*sigmoids"),
    ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9.*8 experts"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts is None.*positive integer"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False"),
    ("minimax_m2", {"rotary_dim": 13}, "rotary_dim is 13.*at most 8"),
    ("minimax_m2", {"attn_type_list": [0, 1, 1]}, r"attn_type_list is \[0, 1, 1\].*softmax"),
    ("minimax_m2", {"quantization_config": {"quant_method": "hqq"}}, "weights of hqq are not"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is True.*experts have no biases"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1.*1e-12"),
    ("ernie4_5_moe", {"moe_layer_start_index": 5}, "moe_layer_interval is 1.*no block"),
    ("ernie4_5_moe", {"moe_num_shared_experts": -1}, "moe_num_shared_experts is -1"),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2, 2]}, r"moe_topk is \[1, 2, 2\].*the same number"),
    ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2.*has 1"),
    ("hunyuan_v1_moe", {"use_cla": True}, "use_cla is True.*cannot share"),
    ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1.*always has 0.01"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3.*two experts"),
    ("phimoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "expected longrope"),
    ("phimoe", {"my_key": 3}, "my_key = 3"),
    ("gpt_oss", {"num_experts_per_tok": 1}, "softmax over .* no gradient"),
    ("gpt_oss", {"num_local_experts": 1, "num_experts_per_tok": 1}, "one expert is a dense MLP"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_cannot_be_represented_is_named(model_type, changes, message):
    content = config_of(model_type)
    with pytest.raises(CheckpointError, match=message):
        architecture_named(content, PATH).model(content | changes, PATH)


def test_an_architecture_without_a_table_is_refused_with_the_reason():
    with pytest.raises(CheckpointError, match="model_type is 'paligemma' .*sides of a prompt"):
        architecture_named({"model_type": "paligemma"}, PATH)


def test_adapters_of_interleaved_heads(hf_model, tmp_path):
    """Rows of LoRA's second matrix are where those of the weight are."""
    source = saved(hf_model("ernie4_5_moe", **MORE_CASES["ernie4_5_moe"]["plain"]), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    targets = defaultdict(list)
    for target in linear_targets(source.model):
        targets[target.layer].append(target)
    qkv = targets["layers.{n}.attention.qkv"]
    assert [target.part for target in qkv] == ["q", "k", "v"]
    ours = source.tensor("layers.1.attention.qkv.weight").split([32, 16, 16])
    for target, rows in zip(qkv, ours, strict=True):
        theirs = stored[f"{target.module.format(n=1)}.weight"]
        assert torch.equal(target.rows_to_hf(rows), theirs)
        assert torch.equal(target.rows_from_hf(theirs), rows)
    assert not torch.equal(qkv[0].rows_to_hf(ours[0]), ours[0])
