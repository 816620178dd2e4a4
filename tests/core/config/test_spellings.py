"""Spellings of other trainers and of older versions, against those of this project."""

import dataclasses
from typing import get_type_hints

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.config.flags import flag_names, value_type
from megatron.features.masked.flags import MaskedDataConfig

PARSER = FlagParser(*FLAG_CLASSES)
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
BASE = f"{MODEL} --micro-batch-size 2 --train-iters 100 --lr 1e-3"
SAVE = "--save checkpoints"


def config_of(words, world_size=2):
    return resolve(PARSER.settings(words.split()), world_size).config


@pytest.fixture
def refusal(capsys):
    """Parses a command line that is refused; returns what is printed."""

    def parse(words):
        with pytest.raises(SystemExit):
            PARSER.settings(words.split())
        return capsys.readouterr().err

    return parse


@pytest.mark.parametrize(
    "old, new",
    [
        # 2019.
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--warmup .01", "--lr-warmup-fraction .01"),
        ("--intermediate-size 96", "--ffn-hidden-size 96"),
        ("--fp16 --min-scale 2", "--fp16 --zero-stage 1 --min-loss-scale 2"),
        ("--fp16 --fp32-allreduce", "--fp16 --accumulate-allreduce-grads-in-fp32"),
        ("--checkpoint-activations", "--recompute-granularity full --recompute-method uniform"),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-num-layers 2",
        ),
        (f"{SAVE} --save-iters 10", f"{SAVE} --save-interval 10"),
        (
            "--load a --use-checkpoint-lr-scheduler",
            "--load a --use-checkpoint-opt_param-scheduler",
        ),
        ("--override-lr-scheduler", ""),
        ("--vocab v.json", "--vocab-file v.json"),
        ("--tokenizer-path m", "--tokenizer-model m"),
        ("--data-path a --val-data-path b", "--data-path a --valid-data-path b"),
        ("--save-optim --save-rng --save-all-rng", ""),
        ("--load-optim --load-rng --load-all-rng", ""),
        ("--resume-dataloader --shuffle --deep-init", ""),
        ("--fp32-embedding --fp32-layernorm --fp32-tokentypes", ""),
        ("--skip-mmap-warmup --data-impl mmap --DDP-impl local", ""),
        # 2021, and Megatron-DeepSpeed.
        ("--activations-checkpoint-method uniform", "--recompute-granularity full"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        ),
        (
            "--checkpoint-activations --deepspeed-activation-checkpointing",
            "--recompute-granularity full --recompute-method uniform",
        ),
        ("--dataset-impl mmap", ""),
        # OneFlow.
        ("--optimizer adamw", "--optimizer adam"),
        ("--dataset data", "--data-path data"),
        ("--fp16 --initial-loss-scale 4294967296", "--fp16"),
        ("--multihead-attention-fusion --no-scale-tril-softmax-dropout-fusion --use-rdma", ""),
        ("--metric-print-format table --log output --save-last", ""),
        ("--use-external-dataset --profile-transformer-layer", ""),
    ],
)
def test_same_configuration(old, new):
    assert config_of(f"{BASE} {old}") == config_of(f"{BASE} {new}")


@pytest.mark.parametrize(
    "old, new",
    [
        ("--batch-size 2 --lr 1e-3", "--micro-batch-size 2 --lr 1e-3"),
        ("--batch-size 2 --learning-rate 1e-3", "--micro-batch-size 2 --lr 1e-3"),
    ],
)
def test_same_batches_and_rates(old, new):
    model = f"{MODEL} --train-iters 9"
    assert config_of(f"{model} {old}") == config_of(f"{model} {new}")


def test_every_unused_flag_says_why():
    words = "--deep-init --fp32-embedding --use-rdma --save-last --metric-print-format table"
    notes = resolve(PARSER.settings(f"{BASE} {words}".split()), 1).notes
    assert len(notes) == 5
    assert all(" is accepted and not used: " in note for note in notes)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--save-init", ["--save-init", "--save"]),
        (
            "--activations-checkpoint-method block --recompute-method uniform",
            ["--activations-checkpoint-method block contradicts --recompute-method uniform"],
        ),
        (
            "--activations-checkpoint-method block --recompute-granularity selective",
            ["--activations-checkpoint-method block contradicts --recompute-granularity selective"],
        ),
        ("--checkpoint-num-layers 2", ["--recompute-num-layers 2", "--recompute-granularity full"]),
    ],
)
def test_contradictions_are_refused(words, told):
    with pytest.raises(ConfigError) as error:
        config_of(f"{BASE} {words}")
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--micro-batch-size 2 --batch-size 4", "--micro-batch-size 2 and --batch-size 4 set the"),
        ("--lr 1 --learning-rate 2", "--lr 1.0 and --learning-rate 2.0 set the same thing"),
        ("--data-path a --dataset b", "--data-path a and --dataset b set the same"),
        ("--learning-rat 1", "unknown flag --learning-rat; the nearest known flag is --learning-r"),
    ],
)
def test_two_spellings_of_different_values_are_refused(refusal, words, told):
    assert told in refusal(words)


@pytest.mark.parametrize(
    "flag, told",
    [
        ("--use-npy-data-loader", "tools/preprocess_data.py"),
        ("--load-openai", "is a flag of scripts/run_gpt2_eval.py"),
        ("--cloze-eval", "is a flag of scripts/run_gpt2_eval.py"),
        ("--eval-hf", "--load reads a folder of Hugging Face"),
        ("--top_k", "tools/generate.py"),
    ],
)
def test_flags_of_2019_that_mean_nothing_here(refusal, flag, told):
    message = refusal(flag)
    assert flag in message and told in message


def test_predictions_of_evaluations():
    config = MaskedDataConfig(max_preds_per_seq=80, eval_max_preds_per_seq=80)
    assert config.max_predictions(512) == 80
    with pytest.raises(ConfigError, match="--eval-max-preds-per-seq 80 differs from .* 76"):
        dataclasses.replace(config, max_preds_per_seq=76).max_predictions(512)


def test_no_two_spellings_of_a_number_are_both_accepted(refusal):
    """Of every flag with another name, the last one does not win silently."""
    numbers = [
        flag_names(field)[0]
        for cls in FLAG_CLASSES
        for field in dataclasses.fields(cls)
        if field.metadata.get("aliases") and value_type(get_type_hints(cls)[field.name]) is not bool
        and not field.metadata.get("internal") and not field.metadata.get("choices")
    ]  # fmt: skip
    assert ("--moe-aux-loss-coeff", "--moe-loss-coeff") in numbers
    for first, *others in numbers:
        for other in others:
            told = refusal(f"{first} 1 {other} 2")
            assert told.rstrip().endswith("set the same thing; give one of them"), told
