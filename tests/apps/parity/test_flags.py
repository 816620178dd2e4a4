"""The flags of a training run, made those of a check."""

import dataclasses
import json

import pytest

from megatron.apps.parity.check import OF_LAYOUTS, CheckFlags, check_flags, smallest_batch
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, ParallelFlags
from megatron.config.flags import flag_of
from megatron.config.layouts import SCHEDULES, Layout

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()


def parse(*argv: str):
    return FlagParser(*FLAG_CLASSES).settings(list(argv))


def flags(*argv: str, layouts: str = "dp1", steps: int = 5) -> CheckFlags:
    parsed = [parse_layout(name) for name in layouts.split(",")]
    return check_flags(parse(*MODEL, *argv), parsed, steps)


def values(argv: list[str]):
    return {name: setting.value for name, setting in parse(*argv).items()}


@pytest.mark.parametrize(
    ("layouts", "micro", "expected"),
    [
        ("dp1", 1, 4),  # several orders of summation
        ("tp2-sp", 3, 12),
        ("dp2", 1, 4),
        ("dp4", 1, 8),  # two micro batches for each replica
        ("dp3,dp2", 1, 6),
        ("dp3,dp4", 1, 12),
        ("pp2-interleaved", 1, 4),
        ("pp4-dualpipev", 1, 8),
        ("pp2-dualpipev-dp2", 2, 16),
        ("pp3-interleaved,dp2", 1, 6),
    ],
)
def test_smallest_batch(layouts, micro, expected):
    parsed = [parse_layout(name) for name in layouts.split(",")]
    assert smallest_batch(parsed, micro) == expected
    for layout in parsed:
        count, rest = divmod(expected, micro * layout.data)
        assert rest == 0 and count >= max(2, layout.fewest_micro_batches)
        assert layout.schedule != "interleaved" or count % layout.pipeline == 0


def test_what_is_missing_is_added():
    found = flags(layouts="dp2,pp2", steps=7)
    added = values(found.plain)
    assert values(found.layout) == added | {"initial_loss_scale": 4096.0} and not found.left_out
    assert added["mock_data"] and added["tokenizer_type"] == "NullTokenizer"
    assert (added["train_iters"], added["exit_interval"]) == (7, 7)
    assert (added["micro_batch_size"], added["global_batch_size"]) == (1, 4)


def test_what_is_given_stays():
    argv = (
        "--data-path 0.3 a 0.7 b --tokenizer-type HFTokenizer --tokenizer-model t --lr 2e-3 "
        "--train-samples 1000 --micro-batch-size 2 --global-batch-size 32 --disable-bias-linear "
        "--vocab v"
    ).split()
    found = values(flags(*argv).plain)
    for name, setting in parse(*argv).items():
        assert found[name] == setting.value, name
    assert not found.keys() & {"mock_data", "train_iters", "vocab_size"}


def test_what_a_check_does_not_do_is_left_out():
    argv = "--save s --load l --lr-warmup-iters 9 --tensorboard-dir t --eval-iters 3 --lr 1".split()
    found = flags(*argv)
    assert sorted(found.left_out) == [
        "--eval-iters", "--load", "--lr-warmup-iters", "--save", "--tensorboard-dir",
    ]  # fmt: skip
    assert values(found.layout)["eval_iters"] == 0
    assert not values(found.layout).keys() & {"save", "load", "tensorboard_dir", "lr_warmup_iters"}


def test_every_flag_that_a_layout_stands_for_is_refused():
    """Flags that some layout's name asks for, and all spellings of them."""
    named = [Layout(tensor=2, sequence=True, data=2, zero=3)]
    named += [Layout(pipeline=2, schedule=s, chunks=c) for s in SCHEDULES for c in (1, 2, 4)]
    named += [Layout(precision=p) for p in ("bf16", "fp16")]
    asked = {name for layout in named for name in parse(*flags_for(layout))}
    assert asked <= OF_LAYOUTS
    kept = {
        "pipeline_partition", "pipeline_model_parallel_split_rank", "recompute_activations",
        "recompute_granularity", "recompute_method",
        "recompute_modules", "recompute_num_layers", "checkpoint_activations",
        "activations_checkpoint_method",
        "distributed_backend",
        "distributed_timeout_minutes", "local_rank", "logits_chunk_mib",
    }  # fmt: skip
    fields = {f.name for f in dataclasses.fields(ParallelFlags) if not f.metadata.get("internal")}
    assert fields - OF_LAYOUTS == kept


def spellings():
    for part in FLAG_CLASSES:
        for field in dataclasses.fields(part):
            if field.name in OF_LAYOUTS:
                for flag in (flag_of(field), *field.metadata["aliases"]):
                    value = (field.metadata["choices"] or (2,))[-1]
                    yield [flag] if field.type == "bool" else [flag, str(value)]


@pytest.mark.parametrize("words", list(spellings()), ids=lambda words: words[0])
def test_a_layout_flag_is_refused(words):
    with pytest.raises(ConfigError, match=f"^{words[0]}: .* --layouts"):
        flags(*words)


def test_json_counts_for_one_process_too(tmp_path):
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    found = flags("--deepspeed_config", str(path), layouts="dp4")
    plain, layout = values(found.plain), values(found.layout)
    assert plain["clip_grad"] == 0.5 and plain["lr"] == 0.01 and plain["adam_beta1"] == 0.8
    assert plain["global_batch_size"] == layout["global_batch_size"] == 16
    assert not plain.keys() & {"deepspeed_config", "zero_stage", "bf16"}
    assert layout["deepspeed_config"] == str(path) and "lr" not in layout


def test_a_checkpoint_is_not_read():
    with pytest.raises(ConfigError, match="--use-checkpoint-args"):
        flags("--use-checkpoint-args", "--load", "folder")


def test_flags_of_a_precision_are_for_its_layouts_alone():
    """One process trains in float32, where they would be contradictions."""
    given = {"fp32_residual_connection": True, "use_precision_aware_optimizer": True,
             "exp_avg_dtype": "bf16", "hysteresis": 1}  # fmt: skip
    words = "--fp32-residual-connection --use-precision-aware-optimizer --exp-avg-dtype bf16"
    found = flags(*words.split(), "--hysteresis", "1", layouts="dp2-zero1-bf16")
    assert given.items() <= values(found.layout).items()
    assert not given.keys() & values(found.plain).keys()
