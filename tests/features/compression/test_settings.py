"""The section compression_training: what it accepts, and what it refuses by its place."""

import json

import pytest
from configs import model_config, run_config

from megatron.config import ParallelConfig
from megatron.config.flags import ConfigError
from megatron.families import spec_of
from megatron.features.compression.layers import layers_in, names_of
from megatron.features.compression.model import with_compression
from megatron.features.compression.settings import compression_of
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel

WEIGHTS = {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["encoder.layers"]}
RATIO = {"params": {"dense_ratio": 0.5}, "modules": ["mlp"]}


def section(kind, group, **shared):
    return {
        kind: {
            "shared_parameters": {"enabled": True, **shared},
            "different_groups": {"g": group},
        }
    }


def weights(group=None, **shared):
    return section("weight_quantization", group or WEIGHTS, **shared)


REDUCTION = {"enabled": True, "keep_number_layer": 2, "teacher_layer": [1, 3]}
WRONG = [
    ([], "compression_training is []; it must be an object"),
    ({"row_pruning": 3}, "row_pruning is 3; it must be an object"),
    ({"weights": {}}, 'unknown key "weights" in compression_training'),
    (weights(schedule_ofset=3), 'unknown key "schedule_ofset" in compression_training.weight_quan'),
    (weights(enabled="yes"), 'shared_parameters.enabled is "yes"; it must be true or false'),
    (weights(schedule_offset=-1), "schedule_offset is -1; it must be a non-negative integer"),
    (weights(quantize_groups=0), "quantize_groups is 0; it must be a positive integer"),
    (weights(quantization_type="linear"), '"linear"; it must be symmetric or asymmetric'),
    (weights(rounding="up"), 'rounding is "up"; it must be nearest or stochastic'),
    (weights(quantizer_kernel=True), "quantizer_kernel is true: DeepSpeed removed that kernel"),
    (weights(fp16_mixed_quantize={"on": True}), 'unknown key "on" in compression_training.weight'),
    (weights({"params": {"start_bits": 8}}), "params.target_bits is missing"),
    (weights({"params": {"start_bits": 3, "target_bits": 4}}), "make start_bits at least as"),
    (weights({"params": {"start_bits": 8, "target_bits": 17}}), "target_bits is 17; it must be"),
    (weights({**WEIGHTS, "modules": "encoder"}), 'modules is "encoder"; it must be a list'),
    (weights({**WEIGHTS, "modules": ["["]}), "'[' is not a pattern"),
    (weights({**WEIGHTS, "related_modules": [["x"]]}), "weight_quantization shrinks no dimens"),
    (
        weights(quantize_weight_in_forward=True, rounding="stochastic"),
        'rounding "stochastic" is of weights that are quantised after updates',
    ),
    (
        weights({"params": {"start_bits": 8, "target_bits": 2}}, quantization_type="asymmetric"),
        "target_bits 2: weights of 1 or 2 bits are symmetric",
    ),
    (section("activation_quantization", {"params": {"bits": 5}}), "bits is 5; it must be 4 or 8"),
    (section("sparse_pruning", RATIO, method="snip_momentum"), "a pruner of the package neural_"),
    (section("sparse_pruning", RATIO, schedule_offset_end=5), "_end 5 is before schedule_offset"),
    (section("sparse_pruning", {"params": {"dense_ratio": 1.5}}), "dense_ratio is 1.5; it must"),
    (section("head_pruning", RATIO), "num_heads is missing; it must be a positive integer"),
    (section("head_pruning", RATIO, num_heads=4, method="l1"), "heads are pruned by topk only"),
    (section("row_pruning", {**RATIO, "related_modules": []}), "related_modules is []; it must"),
    (section("channel_pruning", RATIO), "channel pruning is of convolutions"),
    (
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "compression_training.weight_quantization.different_groups is empty",
    ),
    ({"layer_reduction": {**REDUCTION, "keep_number_layer": 3}}, "keep_number_layer is 3, and"),
    ({"layer_reduction": {"enabled": True, "teacher_layer": []}}, "teacher_layer is []; it must"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refusals(content, message):
    with pytest.raises(ConfigError) as error:
        compression_of(json.dumps(content))
    assert message in str(error.value)


BROKEN = ["compression.json", '{"weight_quantization":', "", '{"a": NaN}', "[" * 100_000]


@pytest.mark.parametrize("text", BROKEN)
def test_text_that_is_no_json(text):
    with pytest.raises(ConfigError, match=r"^compression_training: [^\n]*$"):
        compression_of(text)


def test_what_is_off_changes_nothing():
    off = weights(enabled=False) | {"layer_reduction": {"enabled": False, "keep_number_layer": 5}}
    for content in ({}, off, {"row_pruning": {"shared_parameters": {"method": "l1"}}}):
        assert compression_of(json.dumps(content)) is None
    assert compression_of(None) is None


def test_defaults_are_those_of_deepspeed():
    """deepspeed/compression/constants.py of DeepSpeed 0.19.6."""
    chosen = compression_of(
        json.dumps(weights() | section("activation_quantization", {"params": {"bits": 8}}))
    )
    of_weights = chosen.techniques["weight_quantization"]
    assert of_weights.shared["quantize_groups"] == 1 and of_weights.offset == 0
    assert of_weights.shared["quantization_type"] == "symmetric"
    assert of_weights.groups[0].params["quantization_period"] == 1
    assert of_weights.after_updates and chosen.moq is of_weights
    assert of_weights.shared["fp16_mixed_quantize"]["quantize_change_ratio"] == 0.001
    inputs = chosen.techniques["activation_quantization"]
    assert inputs.offset == 1000 and inputs.shared["range_calibration"] == "dynamic"
    assert inputs.groups[0].modules == ("*",)
    rows = compression_of(json.dumps(section("row_pruning", RATIO))).techniques["row_pruning"]
    assert rows.shared["method"] == "l1" and rows.offset == 1000


def test_modules_have_megatrons_names_too():
    def names(module):
        return list(names_of(module))

    block = "language_model.encoder.layers.3."
    assert f"{block}self_attention.query_key_value" in names("layers.3.attention.qkv")
    assert f"{block}mlp.dense_4h_to_h" in names("layers.3.mlp.down")
    assert f"{block}mlp.deepspeed_moe.experts.deepspeed_experts.dense_h_to_4h" in names(
        "layers.3.mlp.experts.up"
    )
    assert "language_model.embedding.word_embeddings" in names("embedding.word_embeddings")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder.layers", "attention.qkv attention.proj mlp.up mlp.down"),
        ("language_model.embedding", "word_embeddings position_embeddings tokentype_embeddings"),
        ("pooler|lm_head|binary_head", "pooler.dense binary_head lm_head.dense"),
    ],
)
def test_modules_of_bert(pattern, expected):
    """BERT's blocks and heads are found by the names of the templates, as GPT's are."""
    model = model_config(family="bert", num_tokentypes=2, num_layers=1).with_vocabulary(32)
    section = weights({**WEIGHTS, "modules": [pattern]})
    chosen = compression_of(json.dumps(section))
    spec = with_compression(spec_of(model), run_config(model), chosen)
    stack = LayerStack(spec.layers(TensorParallel()), ParallelConfig())
    names = {layer.name for layer in layers_in(stack)}
    assert {name.removeprefix("layers.0.").removeprefix("embedding.") for name in names} == {
        *expected.split()
    }
