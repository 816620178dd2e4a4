"""Architectures with experts: what their files can have, which experts tokens go to, and what is
refused. Their logits and gradients are compared in :mod:`test_against_hf`."""

import dataclasses
import json

import pytest
import torch
from hf_expert_cases import EXPERT_CASES
from hf_inputs import pair
from safetensors.torch import load_file, save_file
from samples import sampled
from test_against_hf import CLOSE, LENGTH, assert_same_logits, ours_of

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError
from megatron.features.experts import layer
from megatron.features.experts.flags import ExpertsConfig
from megatron.formats.conversion.commands import from_hf, to_hf
from megatron.formats.huggingface import architecture_named, architecture_of
from megatron.formats.huggingface.entries import Reordering
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder

TYPES = list(EXPERT_CASES)
PLAIN = {model_type: next(iter(cases.values())) for model_type, cases in EXPERT_CASES.items()}
ALL = [(model_type, case) for model_type, cases in EXPERT_CASES.items() for case in cases]
FEW = ["mixtral", "granitemoe"]


def weights(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, change):
    """Changes config.json, or with a function of tensors the file of weights."""
    if isinstance(change, dict):
        path = folder / "config.json"
        content = json.loads(path.read_text()) | change
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    else:
        save_file(change(weights(folder)), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("model_type", sampled(TYPES, FEW.__contains__))
def test_fused_experts_are_read_and_one_tensor_each_is_written(model_type, hf_model, tmp_path):
    """`transformers` 5 writes either; all of it is what it would have written in the other way."""
    theirs, (each, fused, back) = hf_model(model_type, **PLAIN[model_type]), (
        tmp_path / name for name in ("each", "fused", "back")
    )  # fmt: skip
    theirs.save_pretrained(each)
    theirs.save_pretrained(fused, save_original_format=False)
    assert weights(each).keys() != weights(fused).keys()
    source = HuggingFaceFolder(fused)
    assert_same_logits(source, theirs, model_type)
    back.mkdir()
    write_model(source, back, "float32", 10**9)
    actual, expected = weights(back), weights(each)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL, lambda c: c == ("mixtral", "plain")))
def test_tokens_go_to_the_same_experts(model_type, case, hf_folder, hf_model, monkeypatch):
    """With the same weights, in every layer."""
    settings = EXPERT_CASES[model_type][case]
    theirs, source = hf_model(model_type, **settings), None
    source = HuggingFaceFolder(hf_folder(model_type, **settings))
    routings, inputs = [], pair(source.model, LENGTH)

    def recorded(*arguments):
        routings.append(route(*arguments))
        return routings[-1]

    route = layer.route
    monkeypatch.setattr(layer, "route", recorded)
    with torch.no_grad():
        ours_of(source)(inputs.ours)
        logits = theirs(**inputs.theirs, output_router_logits=True).router_logits
    part, top = source.model.part(ExpertsConfig), settings["num_experts_per_tok"]
    assert len(routings) == len(logits) == part.layers
    for routing, logits_TE in zip(routings, logits, strict=True):
        scores_TE = logits_TE.softmax(-1)
        values_TK, experts_TK = scores_TE.topk(top)
        if settings.get("norm_topk_prob", model_type in ("mixtral", "granitemoe")):
            values_TK = values_TK / values_TK.sum(-1, keepdim=True)
        found_TE, wanted_TE = (
            torch.zeros_like(scores_TE).scatter(1, chosen, weights.to(scores_TE.dtype))
            for chosen, weights in (
                (routing.experts_TK, routing.weights_TK), (experts_TK, values_TK),
            )
        )  # fmt: skip
        torch.testing.assert_close(found_TE, wanted_TE, **CLOSE)
        assert (found_TE > 0).sum() == len(scores_TE) * top
        assert (found_TE > 0).any(0).sum() > 2  # the tokens do not all go to the same


@pytest.mark.parametrize("model_type", sampled(TYPES, FEW[:1].__contains__))
def test_the_balancing_loss_is_theirs(model_type, hf_folder, hf_model):
    """One layer, exactly: theirs is the number of choices times ours, and the coefficient that is
    read makes up for it. Gradient of the router included."""
    settings = PLAIN[model_type] | {"num_hidden_layers": 1, "router_aux_loss_coef": 0.3}
    theirs = hf_model(model_type, **settings)
    source = HuggingFaceFolder(hf_folder(model_type, **settings))
    part, ours, inputs = source.model.part(ExpertsConfig), ours_of(source), pair(source.model, 24)
    state = inputs.ours.changed(losses={"load_balancing_loss": torch.zeros(())})
    loss = ours(state).losses["load_balancing_loss"]
    weight = part.loss_weights["load_balancing_loss"]
    expected = theirs(**inputs.theirs, output_router_logits=True).aux_loss
    torch.testing.assert_close((weight * loss).float(), 0.3 * expected, **CLOSE)
    (weight * loss).backward()
    (0.3 * expected).backward()
    parameters = dict(ours.canonical_parameters())
    (gate,) = (
        p for n, p in theirs.named_parameters() if n.endswith(("mlp.gate.weight", "router.weight"))
    )
    torch.testing.assert_close(
        parameters["layers.0.mlp.router.weight"].grad, gate.grad, rtol=1e-5, atol=1e-7
    )
    written = source.architecture.config(source.model)
    assert written["router_aux_loss_coef"] == 0.3


def test_the_coefficient_is_divided_by_the_layers_with_experts(tmp_path):
    content = {"model_type": "qwen3_moe", "num_experts_per_tok": 4, "num_experts": 8,
               "mlp_only_layers": [0, 3], "num_hidden_layers": 6}  # fmt: skip
    model = architecture_named(content, tmp_path).model(content, tmp_path)
    assert model.part(ExpertsConfig).moe_aux_loss_coeff == (0.001,)  # of 4 choices in 4 layers
    assert [model.part(ExpertsConfig).experts_of(n) for n in range(6)] == [0, 8, 8, 0, 8, 8]


CHANGES = {
    "a missing expert": (
        "mixtral", lambda t: {n: v for n, v in t.items() if ".1.w3." not in n},
        r"lacks model.layers.0.block_sparse_moe.experts.1.w3.weight, model.layers.1"),
    "an expert too many": (
        "mixtral", lambda t: t | {"model.layers.0.block_sparse_moe.experts.6.w1.weight":
                                  t["model.layers.0.block_sparse_moe.experts.0.w1.weight"].clone()},
        r"contains model.layers.0.block_sparse_moe.experts.6.w1.weight"),
    "experts in a dense layer": (
        "qwen3_moe", {"mlp_only_layers": [1]}, r"lacks model.layers.1.mlp.gate_proj.weight"),
    "more experts than there are": (
        "qwen2_moe", {"num_experts": 8}, r"lacks model.layers.0.mlp.experts.6.gate_proj.weight"),
    "other widths": (
        "qwen2_moe", {"moe_intermediate_size": 24}, r"has the shape \(20, 32\).* it \(24, 32\)"),
    "a shared expert that is missing": (
        "qwen2_moe", lambda t: {n: v for n, v in t.items() if "shared_expert." not in n},
        r"lacks model.layers.0.mlp.shared_expert.gate_proj.weight"),
    "two numbers of experts": (
        "mixtral", {"num_experts": 4}, r"num_local_experts is 6, but num_experts is 4"),
    "one choice whose weight is 1": (
        "granitemoe", {"num_experts_per_tok": 1}, r"num_experts_per_tok is 1 .*always 1"),
    "one expert": ("olmoe", {"num_experts": 1}, r"num_experts is 1 .*dense MLP"),
    "more choices than experts": (
        "olmoe", {"num_experts_per_tok": 7}, r"num_experts_per_tok is 7 .*there are 6 experts"),
    "no layer with experts": (
        "qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, r"no layer has experts; write .* as qwen3"),
    "a layer that is not there": (
        "qwen2_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\] .*from 0 to 2"),
    "windows of some layers": (
        "qwen3_moe", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        r"layer_types is .*all blocks"),
    "windows of blocks that are not said": (
        "qwen2_moe", {"use_sliding_window": True, "sliding_window": 7, "layer_types": ...},
        r"use_sliding_window is True .*add layer_types"),
    "a multiplier of zero": (
        "granitemoe", {"residual_multiplier": 0}, r"residual_multiplier is 0.*positive number"),
    "a key of another model": (
        "olmoe", {"n_shared_experts": 1}, r"effect of n_shared_experts = 1 .*not known"),
}  # fmt: skip


@pytest.mark.parametrize("why", sampled(CHANGES, list(CHANGES)[::3].__contains__))
def test_what_does_not_fit_is_named(why, hf_folder):
    model_type, change, message = CHANGES[why]
    folder = hf_folder(model_type, **PLAIN[model_type])
    HuggingFaceFolder(folder)
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)


def test_both_names_of_the_number_of_experts(hf_folder):
    """transformers 4 wrote num_experts for a Qwen3, 5 writes num_local_experts."""
    folder = hf_folder("qwen3_moe", **PLAIN["qwen3_moe"])
    model = HuggingFaceFolder(folder).model
    rewrite(folder, {"num_local_experts": ..., "num_experts": 6, "max_window_layers": 3})
    assert HuggingFaceFolder(folder).model == model


SHIFTED = Reordering(
    "shifted", 1, lambda values, _: (values.roll(1, 0),), lambda tensors, _: tensors[0].roll(-1, 0)
)


@pytest.mark.parametrize("name", ["up", "down", "router"])
def test_shifted_experts_are_noticed(name, hf_model, tmp_path, monkeypatch):
    """A table that reads each expert as its neighbour, where all experts are in one tensor."""
    right = architecture_named({"model_type": "granitemoe"}, tmp_path)
    entries = tuple(
        dataclasses.replace(entry, form=SHIFTED) if f".{name}.weight" in entry.ours else entry
        for entry in right.entries
    )
    table = dataclasses.replace(right, entries=entries)
    monkeypatch.setattr("megatron.formats.huggingface.source.architecture_named", lambda *_: table)
    theirs = hf_model("granitemoe", **PLAIN["granitemoe"])
    theirs.save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(HuggingFaceFolder(tmp_path), theirs, "granitemoe")


TOOL = [("mixtral", "plain"), ("mixtral", "window"), ("qwen3_moe", "plain"),
        ("qwen3_moe", "dense_middle")]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "case", "fused"),
    sampled(
        [(*case, fused) for case in TOOL for fused in (True, False)],
        lambda case: case == ("mixtral", "plain", True),
    ),
)
def test_by_the_tool_and_back(model_type, case, fused, hf_model, tmp_path, capsys):
    """From `transformers` to a checkpoint of this project, and from that to the same files."""
    theirs, ours, back = hf_model(model_type, **EXPERT_CASES[model_type][case]), *(
        tmp_path / name for name in ("ours", "back")
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=not fused)
    theirs.save_pretrained(tmp_path / "each")
    from_hf(["--input", str(tmp_path / "theirs"), "--output", str(ours)])
    assert open_checkpoint(ours).model == HuggingFaceFolder(tmp_path / "theirs").model
    to_hf(["--load", str(ours), "--output", str(back)])
    assert capsys.readouterr().out.count("logits of 80 tokens agree") == 2
    actual, expected = weights(back), weights(tmp_path / "each")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[each], expected[each]) for each in expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "mixtral"),
        ({"moe_router_pre_softmax": True, "qk_layernorm": True}, "qwen3_moe"),
        ({"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 32,
          "moe_shared_expert_gate": True, "moe_layer_freq": "([0]+[1])"}, "qwen2_moe"),
        ({"qk_layernorm": True, "qk_layernorm_whole": True}, "olmoe"),
        ({"qk_layernorm": True, "qk_layernorm_whole": True, "pre_norm": False, "post_norm": True},
         "flex_olmo"),
        ({"residual_multiplier": 0.5}, "granitemoe"),
    ],
)  # fmt: skip
def test_the_plainest_that_fits(changes, expected, gpt_config):
    model = gpt_config(llama=True, num_layers=2, num_experts=(4,), **changes).model
    assert architecture_of(model).model_type == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_score_function": "sigmoid"}, "Mixtral needs --moe-router-score-function sof"),
        ({"moe_latent_size": 8}, "Mixtral needs no --moe-latent-size$"),
        ({"moe_router_pre_softmax": True}, "Mixtral needs no --moe-router-pre-softmax$"),
        ({"moe_shared_expert_intermediate_size": 8},
         "Qwen2-MoE needs .*--moe-shared-expert-gate"),
        ({"moe_layer_freq": "([0]+[1])"}, "Mixtral needs --moe-layer-freq 1$"),
        ({"add_bias_linear": True}, "Mixtral needs --disable-bias-linear$"),
    ],
)  # fmt: skip
def test_what_fits_nothing_says_what_would(changes, message, gpt_config):
    model = gpt_config(**{"llama": True, "num_layers": 2, "num_experts": (4,)} | changes).model
    with pytest.raises(ValueError, match=f"(?m){message}"):
        architecture_of(model, "qwen2_moe" if "Qwen2" in message else "mixtral")


def test_a_dense_architecture_refuses_experts(gpt_config):
    model = gpt_config(llama=True, num_experts=(4,)).model
    with pytest.raises(ValueError, match="Llama needs no --num-experts"):
        architecture_of(model, "llama")


FLAGS = {
    "moe_layer_freq": "([0]*1+[1]*2)", "moe_ffn_hidden_size": 40, "moe_router_topk": 3,
    "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True, "moe_router_bias": True, "moe_latent_size": 8,
    "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
    "moe_gate": "sparsemixer", "moe_expert_capacity_factor": 1.5, "mlp_type": "residual",
    "moe_apply_probs_on_input": True,
}  # fmt: skip


@pytest.mark.parametrize("model_type", sampled(TYPES, FEW.__contains__))
def test_a_flag_of_experts_is_written_or_refused(model_type, gpt_config, tmp_path):
    """Never is one left out, as of the other flags in :mod:`test_fields`."""
    content = {"model_type": model_type} | PLAIN[model_type] | {"num_hidden_layers": 3}
    known = architecture_named(content, tmp_path)
    plain = known.model(content, tmp_path)
    assert known.misfits(plain) == []
    for name, value in FLAGS.items():
        flags = dataclasses.replace(plain.flags(), **{name: value}, layer_experts=())
        try:
            model = flags.resolve().with_vocabulary(plain.vocabulary.size)
        except ConfigError:  # there is no such network
            continue
        if model == plain or known.misfits(model):
            continue
        written = json.loads(json.dumps(known.config(model)))
        assert getattr(known.model(written, tmp_path).flags(), name) == value, name


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("normalize", [None, False, True])
def test_normalised_weights_are_one_key(first, normalize, gpt_config):
    """Whichever of the two flags says it."""
    experts = {"moe_router_pre_softmax": first, "moe_router_normalize": normalize}
    try:
        model = gpt_config(llama=True, qk_layernorm=True, num_experts=(4,), **experts).model
    except ConfigError:
        assert not first and normalize is False
        return
    summing = not first if normalize is None else normalize
    assert architecture_of(model, "qwen3_moe").config(model)["norm_topk_prob"] is summing
    assert (not architecture_named({"model_type": "mixtral"}, model).misfits(model)) is False
