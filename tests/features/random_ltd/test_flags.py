"""The section of the JSON, refusals, and lengths and FLOPs of a run that drops tokens."""

import copy
import dataclasses
import json

import pytest

from megatron.config import ConfigError
from megatron.features.random_ltd.flags import dropping_of
from megatron.features.random_ltd.lengths import DroppedLengths, layer_tokens
from megatron.model.flops import TransformerShape
from megatron.run.run import parse_run
from megatron.training.plan import TrainingPlan

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 9 "
    "--train-iters 20"
).split()
SECTION = {
    "enabled": True,
    "data_routing": {
        "enabled": True,
        "random_ltd": {
            "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2,
            "random_ltd_layer_id": [2, 1], "model_mask_name": None, "model_type": "decoder",
            "hidden_state_order": "batch_seq_dim",
            "random_ltd_schedule": {
                "min_value": 16, "max_value": 64, "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 12, "seq_per_step": 8},
            },
        },
    },
}  # fmt: skip
GROWS = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8},
}  # fmt: skip


def changed(path, value):
    section = copy.deepcopy(SECTION)
    *outer, last = path.split("/")
    node = section
    for key in outer:
        node = node[key]
    node[last] = value
    return section


def run(*more, section=SECTION, flag=("--random-ltd",)):
    return parse_run(None, [*FLAGS, *flag, "--data-efficiency", json.dumps(section), *more]).config


LTD = "data_routing/random_ltd"
SCHEDULE = f"{LTD}/random_ltd_schedule"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("enabled", False, '--random-ltd needs .*"enabled": true in each of these three'),
        ("data_routing/enabled", False, "--random-ltd needs"),
        (f"{LTD}/enabled", False, "--random-ltd needs"),
        (f"{LTD}/total_layer_num", 5, "total_layer_num is 5, and --num-layers 4"),
        (f"{LTD}/random_ltd_layer_num", 3, "random_ltd_layer_num is 3; it must be 2, the layers"),
        (f"{LTD}/random_ltd_layer_id", [1, 4], "has layer 4; the last of 4 is 3"),
        (f"{LTD}/random_ltd_layer_id", [1, -1], "must be a list of numbers of layers, from 0"),
        (f"{LTD}/model_type", "encoder", "model_type is encoder, and the family gpt is decoder"),
        (f"{LTD}/hidden_state_order", "bsh", "must be seq_batch_dim or batch_seq_dim"),
        (f"{LTD}/layer_token_lr_schedule", {"enabled": True}, "was never part of DeepSpeed"),
        (f"{LTD}/random_ltd_layers", 1, "has no key random_ltd_layers; the nearest known"),
        (f"{SCHEDULE}/schedule_type", "fixed_root", "must be fixed_linear"),
        (f"{SCHEDULE}/min_value", 65, "min_value is 65; it must be at most max_value 64"),
        (f"{SCHEDULE}/min_value", 4, "min_value is 4; it must be at least seq_per_step 8"),
        (f"{SCHEDULE}/schedule_config/require_steps", 0, "an integer of at least 1"),
    ],
)  # fmt: skip
def test_wrong_sections(path, value, message):
    with pytest.raises(ConfigError, match=message):
        run(section=changed(path, value))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--position-embedding-type alibi", "contradicts --position-embedding-type alibi"),
        ("--sliding-window 8", "has layer 1, which attends to a window"),
        (
            "--linear-attention-freq 3 --experimental-attention-variant mamba2 "
            "--mamba-num-groups 1 --mamba-head-dim 8",
            "has layer 1, which has no attention",
        ),
        ("--model-family t5 --decoder-seq-length 16", "is for the families gpt and bert"),
    ],
)
def test_models_that_cannot_drop_tokens(flags, message):
    with pytest.raises(ConfigError, match=message):
        run(*flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--context-parallel-size 2", "contradicts --context-parallel-size 2: each rank has fixed"),
        ("--tensor-model-parallel-size 3 --sequence-parallel --num-attention-heads 6 "
         "--hidden-size 48 --seq-length 96", "keeps 16 tokens at a time, which --sequence-paral"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_drop_tokens(flags, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3" if "tensor" in flags else "2")
    with pytest.raises(ConfigError, match=message):
        run(*flags.split())


def test_the_flag_and_the_section_belong_together():
    with pytest.raises(ConfigError, match="random_ltd is enabled, but layers drop tokens with"):
        run(flag=())
    assert dropping_of(run()).layers == (1, 2)
    assert dropping_of(run(flag=(), section=changed("enabled", False))) is None


def test_a_schedule_that_drops_nothing():
    def notes(section):
        argv = [*FLAGS, "--random-ltd", "--data-efficiency", json.dumps(section)]
        return [note for note in parse_run(None, argv).resolved.notes if "none is dropped" in note]

    assert not notes(SECTION)
    (note,) = notes(changed(f"{SCHEDULE}/min_value", 64))
    assert "layers keep 64 tokens or more, and --seq-length is 64" in note


@pytest.mark.parametrize("curriculum", [False, True])
def test_lengths_against_a_loop(curriculum):
    """Tokens of every step, those of the layers, and the samples of a number of tokens."""
    grows = ["--curriculum-learning", json.dumps(GROWS)] * curriculum
    plan = TrainingPlan(run(*grows, "--rampup-batch-size", "2", "2", "8"))
    lengths, dropping = plan.lengths, dropping_of(run())
    assert isinstance(lengths, DroppedLengths) and lengths.grows == curriculum
    consumed = tokens = of_layers = 0
    for step in range(25):
        reserved = min(16 + step * 48 // 12 // 8 * 8, 64)
        length = min(8 + (step + 1) * 56 // 8 // 8 * 8, 64) if curriculum else 64
        actual = (2 * length + 2 * min(reserved, length)) // 4
        assert lengths.at(step) == length
        assert lengths.shown(step) == {
            "random_ltd_reserved_length": reserved, "actual_seq_length": actual,
        }  # fmt: skip
        assert lengths.shorter(step) == ((2, reserved) if reserved < length else None)
        assert lengths.tokens(consumed) == tokens and lengths.samples(tokens) == consumed
        size = plan.batch_size.batch_size(consumed)
        consumed, tokens = consumed + size, tokens + size * actual
        of_layers += size * (2 * reserved + 2 * 64)
        assert layer_tokens(dropping, step + 1, plan.batch_size.samples) == of_layers


def test_flops_of_a_sum_over_the_layers():
    shape = TransformerShape.of(run().model.with_vocabulary(9, 1))
    kept = dataclasses.replace(shape, shorter=(3, 16))
    h, ffn, vocab, s, r = 32, 128, shape.padded_vocab_size, 64, 16

    def block(tokens):
        return tokens * (2 * 4 * h * h + 2 * 2 * h * ffn) + 4 * h * tokens * tokens / 2

    forward = block(s) + 3 * block(r) + s * 2 * h * vocab
    assert kept.flops_per_step(5, causal=True) == pytest.approx(3 * 5 * forward, rel=1e-12)
    again = s * kept.recomputed_flops_per_token("uniform", causal=True)
    assert again == pytest.approx(block(s) + 3 * block(r), rel=1e-12)
    same = dataclasses.replace(shape, shorter=(3, s)).flops_per_step(5, causal=True)
    assert same == pytest.approx(shape.flops_per_step(5, causal=True), rel=1e-12)
