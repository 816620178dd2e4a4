"""Flags that have an effect with other flags only: refused without them, or mentioned."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.config.run import resolve

PARSER = FlagParser(*FLAG_CLASSES)
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 10"
)
REFUSED = [
    ("--rotary-base 1e6", "--position-embedding-type rope"),
    ("--rotary-position-embeddings-theta 500000", "--position-embedding-type rope"),
    ("--rotary-base 1e6 --position-embedding-type alibi", "--position-embedding-type rope"),
    ("--rotary-percent 0.25 --no-position-embedding", "--position-embedding-type rope"),
    ("--position-embedding-type rope --rope-scaling-factor 4", "--use-rope-scaling"),
    (
        "--lr-wsd-decay-iters 5 --lr-decay-style cosine",
        "--lr-decay-style WSD, inverse-square-root or power",
    ),
    ("--lr-wsd-decay-style cosine", "--lr-decay-style WSD, inverse-square-root or power"),
    ("--lr-warmup-init 1e-6", "--lr-warmup-iters or its like"),
    ("--load-tag global_step10", "--load"),
    ("--exit-on-missing-checkpoint", "--load"),
    ("--finetune", "--load"),
    ("--tiktoken-pattern v2", "--tokenizer-type TikTokenizer or Llama3Tokenizer"),
]
NOTED = [
    ("--bf16 --initial-loss-scale 65536", "--initial-loss-scale 65536.0", "--fp16"),
    ("--hysteresis 4", "--hysteresis 4", "--fp16"),
    (
        "--optimizer sgd --adam-beta2 0.95",
        "--adam-beta2 0.95",
        "--optimizer adam, muon, soap, adaptive_muon, ademamix, adam_mini or schedule_free",
    ),
    ("--save-interval 1500", "--save-interval 1500", "--save"),
    ("--no-load-optim", "--no-load-optim", "--load"),
    (
        "--lr-decay-style constant --min-lr 1e-5",
        "--min-lr 1e-05",
        "a --lr-decay-style other than constant",
    ),
]
EFFECTIVE = [
    "--rotary-base 1e6 --position-embedding-type rope",
    "--rotary-base 1e6 --use-rotary-position-embeddings",
    "--rotary-base 10000",
    "--lr-decay-style WSD --lr-wsd-decay-iters 5",
    "--finetune --load a",
    "--finetune --pretrained-checkpoint a",
    "--fp16 --hysteresis 4",
    "--lr-warmup-init 1e-6 --lr-warmup-fraction 0.1",
    "--adam-beta2 0.95",
]


def resolved(words: str):
    return resolve(PARSER.settings(f"{RUN} {words}".split()), 1)


@pytest.mark.features
@pytest.mark.parametrize(("words", "needs"), REFUSED)
def test_a_flag_without_effect_is_refused(words, needs):
    with pytest.raises(ConfigError, match=f"has an effect with {needs} only"):
        resolved(words)


@pytest.mark.features
@pytest.mark.parametrize(("words", "shown", "needs"), NOTED)
def test_a_flag_of_other_scripts_is_mentioned(words, shown, needs):
    assert f"{shown} changes nothing without {needs}" in resolved(words).notes


@pytest.mark.parametrize("words", EFFECTIVE)
def test_a_flag_with_effect_is_accepted(words):
    assert not [note for note in resolved(words).notes if "changes nothing" in note]
