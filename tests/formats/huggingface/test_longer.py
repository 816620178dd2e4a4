"""Checkpoints that flags continue at longer sequences: the same logits in transformers over the
whole length, and contradictions that are named."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.checkpoint.reader import CheckpointReader
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.features.rope_scaling.longer import check_scaling, dynamic_base, unscaled_note
from megatron.formats.huggingface.export import write_model
from megatron.run.run import run_of
from megatron.training.resume import locate

SHORT, LONG = 24, 96
PAIRS = 4
ORIGINAL = {"original_max_position_embeddings": SHORT}
SCALINGS = {
    "theta": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    } | ORIGINAL,
    "yarn": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL,
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0,
    } | ORIGINAL,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config(llama=True)
    write_checkpoint(tmp_path / "short", config, random_gpt(config))
    return tmp_path / "short"


def continued(checkpoint, *words):
    flags = (
        f"--load {checkpoint} --use-checkpoint-args --finetune --micro-batch-size 1 --lr 1e-3 "
        f"--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 60 --seq-length {LONG}"
    ).split()
    return run_of(FlagParser(*FLAG_CLASSES).settings([*flags, *words]), 1).config


def scaled(form, *words):
    words = ["--max-position-embeddings", str(LONG), *words]
    return [*words, "--rope-scaling", json.dumps(form)] if form else words


@pytest.mark.parametrize(
    "kind",
    [k if k == "yarn" else pytest.param(k, marks=pytest.mark.proof) for k in SCALINGS],
)
def test_logits_of_the_longer_model_against_transformers(
    kind, checkpoint, tmp_path, random_gpt, write_checkpoint
):
    words = scaled(SCALINGS[kind], *(["--rotary-base", "500000"] if kind == "theta" else []))
    config = continued(checkpoint, *words)
    assert locate(config).found.folder.parent == checkpoint
    model = random_gpt(config)
    reader = CheckpointReader(write_checkpoint(tmp_path / "long", config, model))
    (tmp_path / "hf").mkdir()
    write_model(reader, tmp_path / "hf", "float32", 10**9)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert theirs.config.max_position_embeddings == LONG
    assert theirs.config.rope_parameters["rope_type"] == (kind if kind != "theta" else "default")
    tokens_BS = torch.arange(LONG)[None] * 7 % 60
    with torch.no_grad():
        ours = logits(model, tokens_BS)
        expected = theirs(tokens_BS).logits
    torch.testing.assert_close(ours[..., :61], expected, rtol=1e-4, atol=1e-4)
    plain = random_gpt(continued(checkpoint, *scaled(None)))
    assert (logits(plain, tokens_BS)[..., :61] - expected).abs().max() > 1e-2


def logits(model, tokens_BS):
    from megatron.model.spec import LayerState

    with torch.no_grad():
        return model(LayerState(tokens_BS)).hidden.float()


def test_frequencies_of_dynamic_scaling_are_those_of_another_base(gpt_config):
    factor, width = 3.0, 8
    form = {"rope_type": "dynamic", "factor": factor}
    config = gpt_config(
        llama=True, seq_length=LONG, max_position_embeddings=LONG, rope_scaling=json.dumps(form)
    )
    theirs = LlamaConfig(
        hidden_size=16, num_attention_heads=2, max_position_embeddings=SHORT,
        rope_parameters={"rope_theta": 10000.0, **form},
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=LONG)
    base = dynamic_base(config.model, SHORT)
    ours = base ** -(torch.arange(0, width, 2) / width)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


REFUSED = [
    (scaled({"rope_type": "linear", "factor": 2.0}), "2 x 24 = 48 positions.*give factor 4"),
    (scaled({"rope_type": "yarn", "factor": 3.0} | ORIGINAL), "3 x 24 = 72.*give factor 4"),
    (
        scaled({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}),
        "original_max_position_embeddings 48 .* was trained at 24; give 24",
    ),
    (scaled({"rope_type": "dynamic", "factor": 2.0}), "--rotary-base .* without --rope-scaling"),
    (["--rotary-base", "5e5"], "give --max-position-embeddings 96, and --rope-scaling or a higher"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_contradictions_are_named(words, said, checkpoint):
    with pytest.raises(ConfigError, match=said):
        locate(continued(checkpoint, *words))


def test_a_second_stage_counts_from_the_first_length(gpt_config):
    """Two stages of YaRN, as DeepSeek-V3's, and of linear scaling."""

    def model(length, form):
        changes = {"rope_scaling": json.dumps(form)} if form else {}
        return gpt_config(
            llama=True, seq_length=length, max_position_embeddings=length, **changes
        ).model

    for kind, original in (("yarn", ORIGINAL), ("linear", {})):
        first = model(48, {"rope_type": kind, "factor": 2.0} | original)
        second = model(96, {"rope_type": kind, "factor": 4.0} | original)
        check_scaling(first, second, "checkpoint")
        with pytest.raises(ConfigError, match="reaches 2 x 24 = 48 positions"):
            check_scaling(first, model(96, {"rope_type": kind, "factor": 2.0} | original), "it")


def test_the_same_rotation_at_a_longer_length_is_said(gpt_config):
    short = gpt_config(llama=True).model
    changes = {"llama": True, "seq_length": LONG, "max_position_embeddings": LONG}
    assert "has not seen" in unscaled_note(short, gpt_config(**changes).model)[0]
    assert unscaled_note(short, gpt_config(**changes, rotary_base=5e5).model) == ()
    assert unscaled_note(short, short) == ()
