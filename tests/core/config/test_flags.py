"""Flags that are generated from dataclasses, and the names that people's scripts pass."""

import dataclasses
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from megatron.config import FLAG_CLASSES, PART_FLAGS, FlagParser, ModelFlags, Setting, parse_configs
from megatron.config.flags import ConfigError, check_value, field_help, flag_of, option
from megatron.config.sections import FlagPart, with_parts

GOLDEN = Path(__file__).parents[2] / "golden" / "flags.json"
"""Every flag of the training commands. MEGATRON_REWRITE_GOLDEN=1 rewrites it."""

MEGATRON_FLAGS = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention
--num-query-groups --kv-channels --seq-length --max-position-embeddings --position-embedding-type
--use-rotary-position-embeddings --rotary-base --rotary-percent --normalization --norm-epsilon
--layernorm-epsilon --swiglu --squared-relu --openai-gelu --no-bias-gelu-fusion
--disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights --attention-dropout
--hidden-dropout --init-method-std --make-vocab-size-divisible-by
--micro-batch-size --global-batch-size --rampup-batch-size --train-iters --train-samples
--train-tokens --lr --min-lr --lr-decay-style --lr-decay-iters --lr-decay-samples
--lr-decay-tokens --lr-warmup-iters --lr-warmup-samples --lr-warmup-tokens --lr-warmup-fraction
--lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples
--weight-decay --start-weight-decay --end-weight-decay --weight-decay-incr-style --clip-grad
--adam-beta1 --adam-beta2 --adam-eps --sgd-momentum --optimizer --fp16 --bf16 --loss-scale
--initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis
--accumulate-allreduce-grads-in-fp32 --seed
--data-path --train-data-path --valid-data-path --test-data-path --split --data-cache-path
--num-workers --mock-data --reset-position-ids --reset-attention-mask --eod-mask-loss
--tokenizer-type --vocab-file --vocab --merge-file --tokenizer-model --vocab-size
--vocab-extra-ids --save --load --save-interval --finetune --no-load-optim --no-load-rng
--no-save-optim --no-save-rng --use-checkpoint-args --exit-interval --exit-duration-in-mins
--exit-signal-handler --log-interval --eval-interval --eval-iters --skip-train
--log-throughput --log-progress --timing-log-option --data-impl
--deepspeed --deepspeed_config --zero-stage --no-pipeline-parallel
--tensor-model-parallel-size --pipeline-model-parallel-size --model-parallel-size
--sequence-parallel --recompute-activations --recompute-granularity --recompute-method
--recompute-num-layers --checkpoint-activations --deepspeed-activation-checkpointing
--distributed-backend --distributed-timeout-minutes --local_rank --local-rank
--use-flash-attn --use-distributed-optimizer --DDP-impl --no-masked-softmax-fusion
--no-bias-dropout-fusion --no-gradient-accumulation-fusion --attention-softmax-in-fp32
--no-query-key-layer-scaling --contiguous-checkpointing --use-cpu-initialization
""".split()


@pytest.fixture
def parser():
    return FlagParser(*FLAG_CLASSES, prog="pretrain_gpt.py")


@dataclass(frozen=True)
class Small:
    """Small: a class for tests."""

    count: int | None = option(None, aliases=("--number",), derived="the other number")
    """Pieces
    of it."""
    names: tuple[str, ...] = option(())
    """Names."""
    pair: tuple[int, int] | None = option(None)
    """Two numbers."""
    rate: float = option(0.5, choices=(0.5, 1.5))
    """Share, 50% by default."""
    fast: bool = option(True, off="--slow")
    """Take care."""
    inner: int = option(3, internal=True)
    """Filled by the program."""


@dataclass(frozen=True, kw_only=True)
class Part(FlagPart):
    before: ClassVar[str] = "names"

    weight: float = option(1.5)
    """Weight of a piece."""

    @property
    def known(self):
        return f"{super().known}, {self.weight} each"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces: a class of the core."""

    count: int = option(2)
    """Number of pieces."""
    names: tuple[str, ...] = option(())
    """Names."""

    @property
    def known(self):
        return f"{self.count} pieces"


def test_a_part_stands_before_the_field_that_it_names_and_overrides():
    whole = with_parts((Part,))(Pieces)
    assert [field.name for field in dataclasses.fields(whole)] == ["count", "weight", "names"]
    (flags,) = parse_configs((whole,), ["--weight", "2", "--count", "3"])
    assert Part.of(flags).weight == 2 and flags.known == "3 pieces, 2.0 each"
    assert list(dataclasses.asdict(flags)) == ["count", "weight", "names"]
    help_text = " ".join(FlagParser(whole).format_help().split())
    assert help_text.index("Weight of a piece.") < help_text.index("Names.")
    each = type("Last", (Part,), {"before": {"weight": "count"}})
    assert [f.name for f in dataclasses.fields(with_parts((each,))(Pieces))][0] == "weight"
    with pytest.raises(AssertionError, match="weight"):
        with_parts((type("Lost", (Part,), {"before": "missing"}),))(Pieces)


def refusal(capsys, argv, *classes):
    with pytest.raises(SystemExit) as exit_info:
        FlagParser(*(classes or FLAG_CLASSES), prog="tool").settings(argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def described(parser):
    flags = {}
    for action in parser._actions:
        if action.dest in ("help", "version"):
            continue
        field = next(
            f for c in FLAG_CLASSES for f in dataclasses.fields(c) if f.name == action.dest
        )
        flags[" ".join(action.option_strings)] = {
            "field": action.dest,
            "default": field.default,
            "sets": action.const if action.nargs == 0 else None,
            "type": action.type.__name__ if action.type else "bool",
            "nargs": action.nargs,
            "choices": list(action.choices) if action.choices else None,
        }
    return json.loads(json.dumps(flags))


@pytest.mark.features
def test_every_flag_is_as_in_the_golden_file(parser):
    flags = described(parser)
    if os.environ.get("MEGATRON_REWRITE_GOLDEN"):
        lines = (f"{json.dumps(name)}: {json.dumps(flag)}" for name, flag in flags.items())
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert flags == json.loads(GOLDEN.read_text())


@pytest.mark.features
@pytest.mark.parametrize("name", MEGATRON_FLAGS)
def test_accepts_megatron_name(parser, name):
    assert name in parser._option_string_actions


def test_megatron_defaults():
    fields = {f.name: f.default for c in PART_FLAGS.values() for f in dataclasses.fields(c)}
    expected = {
        "seed": 1234, "split": "969,30,1", "make_vocab_size_divisible_by": 128, "clip_grad": 1.0,
        "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
        "init_method_std": 0.02, "norm_epsilon": 1e-5, "attention_dropout": 0.1,
        "hidden_dropout": 0.1, "initial_loss_scale": 2**32, "loss_scale_window": 1000,
        "hysteresis": 2, "lr_decay_style": "linear", "eval_interval": 1000, "eval_iters": 100,
        "log_interval": 100, "num_workers": 2, "rotary_percent": 1.0, "rotary_base": 10000.0,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected


@pytest.mark.parametrize("cls", FLAG_CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_documented(cls):
    texts = field_help(cls)
    for field in dataclasses.fields(cls):
        assert texts.get(field.name, "").endswith("."), f"{cls.__name__}.{field.name}"


def test_field_names_are_unique_over_all_classes():
    names = [f.name for cls in FLAG_CLASSES for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))


def test_help_is_grouped_and_says_defaults(parser):
    text = parser.format_help()
    for cls in PART_FLAGS.values():
        assert (cls.__doc__ or "").split("\n")[0].rstrip(".") + ":" in text
    joined = " ".join(text.split())
    assert "Random seed of initial weights, data order and dropout. (default: 1234)" in joined
    # argparse breaks lines at hyphens.
    assert "(default:hidden-size/num-attention-heads)" in "".join(text.split())
    assert "megatron/config/accepted_flags.txt lists them" in joined
    assert "--DDP-impl" not in text
    assert text.startswith("usage: pretrain_gpt.py [flags]\n")


def test_help_states_the_default_of_every_value_flag(parser):
    for action in parser._actions:
        field = next(
            (
                f
                for c in PART_FLAGS.values()
                for f in dataclasses.fields(c)
                if f.name == action.dest
            ),
            None,
        )
        if field is None or action.nargs == 0:
            continue
        stated = field.metadata["derived"] or field.default not in (None, ())
        assert not stated or "(default: " in action.help, flag_of(field)


def test_values_and_origins():
    argv = "--number 4 --names a b --pair 1 2 --slow --rate 1.5".split()
    settings = FlagParser(Small).settings(argv)
    assert settings == {
        "count": Setting(4, "flag --number"),
        "names": Setting(("a", "b"), "flag --names"),
        "pair": Setting((1, 2), "flag --pair"),
        "fast": Setting(False, "flag --slow"),
        "rate": Setting(1.5, "flag --rate"),
    }
    assert FlagParser(Small).settings([]) == {}


def test_parse_configs_builds_one_instance_each():
    small, model = parse_configs((Small, ModelFlags), ["--count", "2", "--hidden-size", "8"])
    assert small == Small(count=2) and model == ModelFlags(hidden_size=8)


def test_configs_are_frozen():
    for cls in FLAG_CLASSES:
        with pytest.raises(dataclasses.FrozenInstanceError):
            cls().anything = 1  # type: ignore[attr-defined]


@pytest.mark.features
@pytest.mark.parametrize(
    "argv, told",
    [
        (["--num-layer", "2"], "unknown flag --num-layer; the nearest known flag is --num-layers"),
        (["--num_layers=2"], "unknown flag --num_layers; the nearest known flag is --num-layers"),
        (["--zzzz-qq"], "unknown flag --zzzz-qq (--help lists all)"),
        (["stray"], "'stray' is not a value of any flag (--help lists all)"),
        (["--num-layers", "two"], "argument --num-layers: invalid int value: 'two'"),
        (["--optimizer", "lamb"], "invalid choice: 'lamb'"),
        (["--rampup-batch-size", "1", "2"], "--rampup-batch-size: expected 3 arguments"),
        (
            ["--norm-epsilon", "1e-5", "--layernorm-epsilon", "1e-6"],
            "--norm-epsilon 1e-05 and --layernorm-epsilon 1e-06 set the same thing",
        ),
    ],
)
def test_malformed_command_line_is_refused_in_one_line(capsys, argv, told):
    message = refusal(capsys, argv)
    assert message.startswith("tool: error: ") and told in message
    assert message.count("\n") == 1


def test_a_prefix_of_a_flag_is_not_taken_for_it(capsys):
    assert "unknown flag --hidden" in refusal(capsys, ["--hidden", "8"])


def test_internal_fields_have_no_flag(capsys):
    assert "unknown flag --inner" in refusal(capsys, ["--inner", "8"], Small)


def test_the_same_flag_again_overrides():
    settings = FlagParser(Small).settings(["--count", "2", "--count", "3"])
    assert settings["count"].value == 3


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("count", "4", "f.json: k is '4', not of type int"),
        ("count", 4.0, "f.json: k is 4.0, not of type int"),
        ("count", True, "f.json: k is True, not of type int"),
        ("rate", 0.7, "f.json: k is 0.7; it must be one of 0.5, 1.5"),
        ("fast", 1, "f.json: k is 1, not of type bool"),
    ],
)
def test_check_value_refuses(name, value, told):
    field = next(f for f in dataclasses.fields(Small) if f.name == name)
    hint = typing.get_type_hints(Small)[name]
    with pytest.raises(ConfigError) as raised:
        check_value(field, hint, Setting(value, "f.json: k"))
    assert str(raised.value) == told


def test_check_value_takes_whole_numbers_for_floats_and_none():
    fields = {f.name: f for f in dataclasses.fields(Small)}
    hints = typing.get_type_hints(Small)
    taken = check_value(fields["rate"], hints["rate"], Setting(1.5, "x"))
    assert taken == Setting(1.5, "x")
    assert check_value(fields["count"], hints["count"], Setting(None, "x")).value is None
    whole = check_value(dataclasses.field(default=0.0), float, Setting(1, "x"))
    assert type(whole.value) is float
