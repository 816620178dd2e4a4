"""Flags, values and numbers as users of other trainers write them."""

import re

import pytest

from megatron.apps.finetune.settings import TuningConfig
from megatron.apps.migration.advice import OTHER_TRAINERS
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.config.command_line import CommandParser
from megatron.config.flags import edit_distance, nearest_flag
from megatron.formats.refused_flags import refused_flag

PARSER = FlagParser(*FLAG_CLASSES, prog="pretrain_gpt.py")
TUNING = FlagParser(TuningConfig, *FLAG_CLASSES, prog="finetune.py")
KNOWN = set(PARSER._option_string_actions)


@pytest.fixture
def refusal(capsys):
    def parse(words: str, parser: CommandParser = PARSER) -> str:
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
        return capsys.readouterr().err

    return parse


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        # transformers, LLaMA-Factory, axolotl, torchtitan, torchtune, NeMo, nanotron, nanoGPT.
        ("--per_device_train_batch_size=4", "--micro-batch-size N"),
        ("--gradient-accumulation-steps", "give --global-batch-size"),
        ("--cutoff_len", "--seq-length N"),
        ("--sequence_len", "--seq-length N"),
        ("--fsdp", "--zero-stage 3"),
        ("--dtype", "--bf16 or --fp16"),
        ("--gradient-checkpointing", "--recompute-granularity"),
        ("--training.local_batch_size", "--micro-batch-size N"),
        ("--parallelism.tensor_parallel_degree", "--tensor-model-parallel-size N"),
        ("--optimizer.lr", "--lr"),
        ("--tokens.micro_batch_size", "--micro-batch-size N"),
        ("--trainer.max_steps", "--train-iters N"),
        ("--n_embd", "--hidden-size N"),
        ("--num_train_epochs", "--epochs N"),
        ("--output_dir", "--save FOLDER"),
    ],
)
def test_another_trainers_name_is_known(refusal, flag, advice):
    assert f"{flag.partition('=')[0]} is another trainer's name: {advice}" in refusal(f"{flag} 4")


def test_a_key_without_dashes_is_known(refusal):
    assert "'trainer.devices=8' is not a value of any flag" in refusal("trainer.devices=8")
    assert "--num-gpus-per-node" in refusal("trainer.devices=8")


def test_finetuning_has_its_own_names(refusal):
    assert "--output FOLDER" in refusal("--output_dir x", TUNING)
    assert "--model FOLDER" in refusal("--model_name_or_path x", TUNING)


def test_advice_names_flags_that_exist():
    known = KNOWN | set(TUNING._option_string_actions) | {"--max-new-tokens", "--greedy"}
    known |= {"--nproc-per-node", "--nnodes"}  # torchrun's
    seen = set()
    for line in OTHER_TRAINERS.read_text().splitlines():
        names, colon, advice = line.partition(": ")
        if colon and not line.startswith("#"):
            assert set(re.findall(r"--[a-z][\w-]*", advice)) <= known, line
            for name in names.split():
                flag = f"--{name.replace('_', '-')}"
                assert refused_flag(flag) is None, name
                assert (name, advice) not in seen
                seen.add((name, advice))
    assert len(seen) > 500


def test_no_suggestion_is_far_away():
    """A ratio of common letters suggested --seed for --fsdp, and --mlp-type for --dtype."""
    for flag in ("--fsdp", "--dtype", "--foo", "--gradient-checkpointing", "--wibble-wobble"):
        assert nearest_flag(flag, KNOWN) == ""
    for typed, meant in [
        ("--hiden-size", "--hidden-size"),
        ("--train_iters", "--train-iters"),
        ("--num-layer", "--num-layers"),
        ("--tpye", ""),
        ("--micro-bacth-size", "--micro-batch-size"),
        ("--num-atention-heads", "--num-attention-heads"),
        ("--LR", "--lr"),
    ]:
        assert nearest_flag(typed, KNOWN) == meant


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("ab", "ba", 1),
        ("abc", "abc", 0),
        ("ca", "abc", 3),
    ],
)
def test_edit_distance(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--lr-decay-style cosin", "cosine"),
        ("--optimizer adm", "adam"),
        ("--normalization rmsnrm", "RMSNorm"),
        ("--attention-backend Flash", "flash"),
        ("--checkpoint-format safetensor", "safetensors"),
        ("--optimizer lamb", None),
    ],
)
def test_a_choice_is_suggested(refusal, words, meant):
    told = refusal(words)
    assert (f"did you mean {meant}?" in told) if meant else ("did you mean" not in told)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--seq-length 64k", 65536),
        ("--max-position-embeddings 1M", 1 << 20),
        ("--sliding-window 4K", 4096),
        ("--seq-length 1.5k", 1536),
        ("--train-iters 64k", 64_000),
        ("--train-tokens 1.5T", 1_500_000_000_000),
        ("--train-samples 2B", 2_000_000_000),
        ("--train-iters 1e6", 1_000_000),
        ("--lr-decay-iters 2_048", 2048),
        ("--hidden-size 1e3", 1000),
        ("--seed 7", 7),
        ("--train-iters -3", -3),
    ],
)
def test_numbers_are_read_exactly(words, value):
    (setting,) = PARSER.settings(words.split()).values()
    assert setting.value == value and isinstance(setting.value, int)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--vocab-size 32k", "32k may be 32,000 or 32,768; give the number itself"),
        ("--hidden-size 4k", "4k may be 4,000 or 4,096"),
        ("--seq-length 64KiB", "invalid int value: '64KiB'"),
        ("--seq-length 64kb", "invalid int value: '64kb'"),
        ("--train-tokens 1GiB", "invalid int value"),
        ("--train-iters 2.5", "2.5 is not an integer"),
        ("--train-iters 1e-3", "1e-3 is not an integer"),
        ("--train-iters 1e999999999", "invalid int value"),
        ("--train-iters 1__0", "invalid int value"),
        ("--train-iters ten", "argument --train-iters: invalid int value: 'ten'"),
        ("--train-iters 0x10", "invalid int value"),
        ("--train-iters k", "invalid int value"),
    ],
)
def test_other_numbers_are_refused(refusal, words, told):
    assert told in refusal(words)
