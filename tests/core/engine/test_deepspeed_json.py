"""DeepSpeed's JSON and the flags resolve into one configuration."""

import copy
import json
from pathlib import Path

import pytest
import torch

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_file import check_settings, read_json
from megatron.engine.deepspeed_json import complete, for_engine, merge, stage_notes, stage_of
from megatron.features.optimizers.flags import OptimizersConfig

SHIPPED = Path(__file__).parents[3] / "deepspeed_configs"

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10 "
    "--deepspeed_config ds.json"
)
BATCH = "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3"

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": "auto"},
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "loss_scale": "auto",
        "initial_scale_power": "auto",
        "loss_scale_window": "auto",
        "hysteresis": "auto",
        "min_loss_scale": "auto",
    },
    "optimizer": {
        "type": "auto",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
}


def run(flags, content, world_size=2):
    """(configuration, completed JSON, origins) of flags and a JSON."""
    settings = FlagParser(*FLAG_CLASSES).settings(f"{FLAGS} {flags}".split())
    before = copy.deepcopy(content)
    result = resolve(merge(settings, content, "folder/ds.json", world_size), world_size)
    completed = complete(content, result.config)
    assert content == before, "the JSON that was read stays as it is"
    return result.config, completed, result.origins


def refusal(flags, content, world_size=2):
    with pytest.raises(ConfigError) as raised:
        run(flags, content, world_size)
    return str(raised.value)


def reading(tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_json(str(path))


def test_every_auto_is_filled_from_the_flags():
    flags = f"{BATCH} --fp16 --zero-stage 2 --clip-grad 0.5 --initial-loss-scale 65536"
    _, completed, _ = run(f"{flags} --adam-beta2 0.95 --adam-eps 1e-6", AUTO)
    assert completed == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1.0,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01},
        },
    }


def test_values_of_a_dtype_that_is_off_are_left_out():
    _, completed, _ = run(f"{BATCH} --bf16 --zero-stage 1", AUTO)
    assert completed["fp16"] == {"enabled": False} and completed["bf16"] == {"enabled": True}


def test_sgd_has_momentum_and_no_betas():
    content = {
        "optimizer": {
            "type": "auto",
            "params": {"betas": "auto", "eps": "auto", "momentum": "auto"},
        }
    }
    _, completed, _ = run(f"{BATCH} --optimizer sgd --sgd-momentum 0.8", content)
    params = {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.8}
    assert completed["optimizer"] == {"type": "SGD", "params": params}


@pytest.mark.parametrize(
    "content",
    [
        {"optimizer": "auto"},
        {"optimizer": {"type": "AdamW", "params": "auto"}},
        {"optimizer": {"params": {"betas": ["auto", 0.999]}}},
        {"zero_optimization": "auto", "fp16": "auto", "bf16": "auto", "data_types": {}},
        {},
    ],
    ids=lambda content: json.dumps(content)[:50],
)
def test_whole_sections_may_be_auto_or_absent(content):
    _, completed, _ = run(BATCH, content)
    assert completed["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert completed["optimizer"]["type"] == "AdamW"
    assert completed["zero_optimization"]["stage"] == 0


JSON_FILLS = [
    ({"train_micro_batch_size_per_gpu": 4}, "training", "micro_batch_size", 4),
    ({"gradient_clipping": 2}, "optimizer", "clip_grad", 2.0),
    ({"zero_optimization": {"stage": 3}}, "engine", "zero_stage", 3),
    ({"bf16": {"enabled": True}}, "precision", "bf16", True),
    ({"fp16": {"loss_scale": 0}}, "precision", "loss_scale", None),
    ({"fp16": {"initial_scale_power": 8}}, "precision", "initial_loss_scale", 256.0),
    ({"fp16": {"loss_scale_window": 9}}, "precision", "loss_scale_window", 9),
    ({"fp16": {"hysteresis": 3}}, "precision", "hysteresis", 3),
    ({"fp16": {"min_loss_scale": 2}}, "precision", "min_loss_scale", 2.0),
    ({"fp16": {"enabled": True}}, "precision", "initial_loss_scale", 65536.0),
    (
        {"data_types": {"grad_accum_dtype": "fp32"}},
        "precision",
        "accumulate_allreduce_grads_in_fp32",
        True,
    ),
    ({"optimizer": {"type": "SGD"}}, "optimizer", "optimizer", "sgd"),
    ({"optimizer": {"type": "Adam"}}, "optimizer", "optimizer", "adam"),
    ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, "optimizer", "adam_beta1", 0.8),
    ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, "optimizer", "adam_beta2", 0.9),
    ({"optimizer": {"params": {"betas": [0.8, "auto"]}}}, "optimizer", "adam_beta2", 0.999),
    ({"optimizer": {"params": {"eps": 1e-6}}}, "optimizer", "adam_eps", 1e-6),
    ({"optimizer": {"params": {"weight_decay": 0}}}, "optimizer", "weight_decay", 0.0),
    ({"optimizer": {"params": {"momentum": 0.5}}}, "optimizer", "sgd_momentum", 0.5),
]


@pytest.mark.parametrize("content, part, name, expected", JSON_FILLS)
def test_json_fills_what_no_flag_gives(content, part, name, expected):
    flags = "--lr 1e-3" + ("" if name == "micro_batch_size" else " --micro-batch-size 2")
    config, _, origins = run(flags, content)
    value = getattr(config.part(part), name)
    assert (type(value), value) == (type(expected), expected)
    if name != "adam_beta2" or content["optimizer"]["params"]["betas"][1] != "auto":
        assert origins[name].startswith("ds.json: ")


CONTRADICTIONS = [
    ("--clip-grad 0.5", {"gradient_clipping": 1.0}, ["--clip-grad 0.5", "gradient_clipping 1.0"]),
    ("", {"train_batch_size": 32}, ["--global-batch-size 16", "train_batch_size 32"]),
    (
        "",
        {"train_micro_batch_size_per_gpu": 1},
        ["--micro-batch-size 2", "train_micro_batch_size_per_gpu 1"],
    ),
    (
        "--zero-stage 1",
        {"zero_optimization": {"stage": 2}},
        ["--zero-stage 1", "zero_optimization.stage 2"],
    ),
    ("--bf16", {"bf16": {"enabled": False}}, ["--bf16 True", "bf16.enabled false"]),
    ("--fp16", {"fp16": {"enabled": False}}, ["--fp16 True", "fp16.enabled false"]),
    ("--loss-scale 8", {"fp16": {"loss_scale": 4}}, ["--loss-scale 8.0", "fp16.loss_scale 4"]),
    (
        "--initial-loss-scale 4",
        {"fp16": {"initial_scale_power": 3}},
        ["--initial-loss-scale 4.0", "fp16.initial_scale_power 3"],
    ),
    (
        "--accumulate-allreduce-grads-in-fp32",
        {"data_types": {"grad_accum_dtype": "bf16"}},
        ["--accumulate-allreduce-grads-in-fp32", 'data_types.grad_accum_dtype "bf16"'],
    ),
    ("--optimizer sgd", {"optimizer": {"type": "AdamW"}}, ["--optimizer sgd", '"AdamW"']),
    ("", {"optimizer": {"params": {"lr": 2e-3}}}, ["--lr 0.001", "optimizer.params.lr 0.002"]),
    (
        "--adam-beta2 0.95",
        {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
        ["--adam-beta2 0.95", "optimizer.params.betas.1 0.999"],
    ),
]


SCALES = [
    # Scripts of Megatron-DeepSpeed mean a power by the flag; DeepSpeed reads the JSON alone.
    ("--fp16", {"fp16": {"enabled": True, "initial_scale_power": 12}}, None, "dynamic"),
    ("--fp16", {"fp16": {"enabled": True, "loss_scale": 0}}, None, "dynamic"),
    ("--bf16", {"fp16": {"enabled": False}, "bf16": {"enabled": True}}, None, "--fp16 only"),
    ("--bf16", {"bf16": {"enabled": True}}, 12.0, "has an effect with --fp16 only"),
    ("--fp16", {"fp16": {"enabled": True, "loss_scale": "auto"}}, 12.0, ""),
    ("--fp16", {"fp16": {"enabled": True, "loss_scale": 12}}, 12.0, ""),
    ("--fp16", {"zero_optimization": {"stage": 1}}, 12.0, ""),
]


@pytest.mark.parametrize("flags, content, scale, told", SCALES)
def test_the_loss_scale_is_that_of_the_json(flags, content, scale, told):
    argv = f"{FLAGS} {BATCH} --zero-stage 1 {flags} --loss-scale 12".split()
    settings = merge(FlagParser(*FLAG_CLASSES).settings(argv), content, "folder/ds.json", 2)
    for merged in (settings, merge(settings, content, "folder/ds.json", 2)):
        result = resolve(merged, 2)
        assert result.config.precision.loss_scale == scale
        lines = [note for note in result.notes if "--loss-scale 12" in note]
        assert len(lines) == bool(told) and all(told in line for line in lines)
        if flags == "--fp16":
            assert complete(content, result.config)["fp16"]["loss_scale"] == (scale or 0)


def test_a_loss_scale_of_0_is_dynamic_without_a_json_too():
    argv = f"{FLAGS} {BATCH} --zero-stage 1 --fp16 --loss-scale 0".split()
    result = resolve(FlagParser(*FLAG_CLASSES).settings(argv), 2)
    assert complete({}, result.config)["fp16"]["loss_scale"] == 0
    argv[argv.index("--fp16")] = "--bf16"
    assert not resolve(FlagParser(*FLAG_CLASSES).settings(argv), 2).config.precision.fp16


@pytest.mark.parametrize("flags, content, told", CONTRADICTIONS)
def test_a_contradiction_names_both_values_and_places(flags, content, told):
    message = refusal(f"{BATCH} {flags}", content)
    assert all(text in message for text in [*told, "folder/ds.json", '"auto"']), message


def test_equal_values_are_no_contradiction():
    content = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}
    config, _, origins = run(f"{BATCH} --optimizer adam", content)
    assert config.training.global_batch_size == 16 and origins["lr"] == "flag --lr"


STEPS = [
    # flags, JSON, (micro, global, steps) on 2 processes
    ("--micro-batch-size 2", {"gradient_accumulation_steps": 4}, (2, 16, 4)),
    ("--global-batch-size 16", {"gradient_accumulation_steps": 4}, (2, 16, 4)),
    ("--micro-batch-size 2 --global-batch-size 16", {"gradient_accumulation_steps": 4}, (2, 16, 4)),
    ("", {"gradient_accumulation_steps": 2, "train_batch_size": 8}, (2, 8, 2)),
    ("--micro-batch-size 2", {"gradient_accumulation_steps": "auto"}, (2, 4, 1)),
    (
        "--micro-batch-size 2 --tensor-model-parallel-size 2",
        {"gradient_accumulation_steps": 4},
        (2, 8, 4),
    ),
]


@pytest.mark.parametrize("flags, content, expected", STEPS)
def test_accumulation_steps_and_batches_fit_together(flags, content, expected):
    config, completed, _ = run(f"--lr 1e-3 {flags}", content)
    micro, whole, steps = expected
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (micro, whole)
    assert completed["train_micro_batch_size_per_gpu"] == micro
    assert completed["train_batch_size"] == whole
    assert completed["gradient_accumulation_steps"] == steps


def test_contradicting_accumulation_steps():
    message = refusal(BATCH, {"gradient_accumulation_steps": 3})
    for text in ("gradient_accumulation_steps 3", "--global-batch-size 16", "--micro-batch-size 2"):
        assert text in message
    both = {"train_batch_size": 16, "gradient_accumulation_steps": 3}
    message = refusal("--micro-batch-size 2 --lr 1e-3", both)
    assert "ds.json: train_batch_size 16" in message and "--micro-batch-size 2" in message
    assert "0 is" not in refusal(BATCH, {"gradient_accumulation_steps": 0})
    assert "expected a positive integer" in refusal(BATCH, {"gradient_accumulation_steps": 0})


def test_a_layout_that_does_not_fit_gets_its_own_message():
    content = {"gradient_accumulation_steps": 2}
    message = refusal("--lr 1 --micro-batch-size 2 --tensor-model-parallel-size 4", content, 2)
    assert "--tensor-model-parallel-size 4" in message and "number of processes, 2;" in message


def test_gradients_accumulated_in_another_format_stay():
    _, completed, _ = run(BATCH, {"data_types": {"grad_accum_dtype": "bf16"}})
    assert completed["data_types"] == {"grad_accum_dtype": "bf16"}


INVALID = [
    ({"train_batch_size": "16"}, "train_batch_size is '16', not of type int"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes', not of type bool"),
    ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage is 5; it must be one of 0, 1"),
    ({"fp16": {"initial_scale_power": "big"}}, "fp16.initial_scale_power is 'big'"),
    ({"fp16": {"initial_scale_power": 5000}}, "fp16.initial_scale_power is 5000"),
    ({"optimizer": {"type": "Muon"}}, "--muon-coefficient-type simple"),
    ({"optimizer": {"type": "Lamb"}}, "give --optimizer muon or soap"),
    ({"optimizer": {"type": "Adagrad"}}, "--optimizer adam --adam-beta2 0.999"),
    ({"optimizer": {"type": "MuAdamW"}}, "--optimizer adam or sgd with --use-mup"),
    ({"optimizer": {"type": "RMSprop"}}, "class of torch.optim without a counterpart"),
]


@pytest.mark.parametrize("content, told", INVALID)
def test_values_of_the_wrong_kind_are_refused(content, told):
    assert told in refusal("--micro-batch-size 2 --lr 1e-3", content)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="--deepspeed_config .*absent.json: file not found"):
        read_json(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_json(str(tmp_path))


def test_an_auto_that_no_flag_stands_for_is_refused():
    zero = {"stage3_prefetch_bucket_size": "auto"}
    content = {"zero_optimization": zero, "dump_state": "auto"}
    message = refusal(BATCH, content)
    assert "zero_optimization.stage3_prefetch_bucket_size, dump_state" in message
    assert message.startswith("ds.json: ")


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def test_layouts_that_do_not_exist_are_refused_by_what_the_json_alone_says():
    assert "offload_optimizer.device cpu" in refusal(BATCH, {"zero_optimization": OFFLOAD})
    run(f"{BATCH} --zero-stage 1", {"zero_optimization": OFFLOAD})


@pytest.mark.parametrize("section", [None, {}, {"device": "none"}, {"device": "cpu"}])
def test_what_offload_may_say(tmp_path, section):
    content = {"zero_optimization": {"offload_optimizer": section}}
    run(f"{BATCH} --zero-stage 1", reading(tmp_path, content))


def test_sums_of_fp16_at_stage_0_are_the_trainers():
    flags = f"{BATCH} --fp16 --accumulate-allreduce-grads-in-fp32 --zero-stage"
    assert "data_types" not in engine_json(f"{flags} 0", {})
    assert engine_json(f"{flags} 1", {})["data_types"] == {"grad_accum_dtype": "fp32"}
    assert engine_json(f"{flags} 0", {})["communication_data_type"] == "fp32"


def engine_json(flags, content, on_cpu=True):
    config, completed, _ = run(f"{BATCH} {flags}", content)
    return for_engine(completed, config, on_cpu)


def test_the_trainer_clips_at_stage_0_and_deepspeed_above():
    assert engine_json("--clip-grad 0.5", {})["gradient_clipping"] == 0.0
    assert engine_json("--clip-grad 0.5 --zero-stage 1", {})["gradient_clipping"] == 0.5


def test_gradients_accumulated_in_fp32_are_also_reduced_in_fp32():
    flags = "--bf16 --zero-stage 2 --accumulate-allreduce-grads-in-fp32"
    settings = engine_json(flags, {})
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert settings["communication_data_type"] == "fp32"
    # Unless the JSON says otherwise.
    assert (
        engine_json(flags, {"communication_data_type": "bf16"})["communication_data_type"] == "bf16"
    )
    assert "communication_data_type" not in engine_json("--bf16 --zero-stage 2", {})


def test_bf16_at_stage_0_is_autocast():
    settings = engine_json("--bf16", {"bf16": {"enabled": "auto"}})
    assert settings["bf16"]["enabled"] is False
    assert settings["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    settings = engine_json("--bf16 --zero-stage 1", {})
    assert settings["bf16"]["enabled"] is True and "torch_autocast" not in settings


NOTHING = ["ZeRO {} over one data-parallel rank partitions nothing: it runs as ZeRO 1"]
OFFLOADED = {"device": "cpu"}
SUMS = "--bf16 --accumulate-allreduce-grads-in-fp32"
KEPT = [
    ("", {"offload_optimizer": OFFLOADED}, (2, 3)),
    ("", {"offload_param": OFFLOADED}, (3,)),
    ("--remote-device cpu", {}, (3,)),
    ("", {"zero_quantized_weights": True}, (3,)),
    ("--checkpoint-format deepspeed", {}, (2, 3)),
    (SUMS, {}, (2,)),
]


@pytest.mark.parametrize("more", ["", "--bf16", "--fp16", "--optimizer sgd"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_data_rank_runs_no_more_than_stage_1(stage, processes, more):
    """What it was asked for stays in the configuration and in the JSON that checkpoints get."""
    for tensor in (1, 2):
        flags = f"{BATCH} {more} --zero-stage {stage} --tensor-model-parallel-size {tensor}"
        config, completed, _ = run(flags, {}, processes * tensor)
        runs = 1 if processes == 1 else stage
        assert stage_of(for_engine(completed, config, True)) == runs
        assert config.engine.zero_stage == stage_of(completed) == stage
        told = [NOTHING[0].format(stage)] if runs != stage else []
        assert stage_notes(completed, config) == told


@pytest.mark.parametrize("flags, zero, stages", KEPT)
def test_one_data_rank_keeps_a_stage_that_does_more_than_partition(flags, zero, stages):
    for stage in stages:
        content = {"zero_optimization": {"stage": stage, **zero}}
        config, completed, _ = run(f"{BATCH} {flags}", content, 1)
        assert stage_of(for_engine(completed, config, False)) == stage
        assert stage_notes(completed, config) == []
    neutral = {"stage": 3, "zero_hpz_partition_size": 1, "offload_param": {"device": "none"}}
    config, completed, _ = run(BATCH, {"zero_optimization": neutral}, 1)
    assert stage_of(for_engine(completed, config, True)) == 1


def test_cuda_graphs_need_weights_that_stay_where_they_are():
    flags = f"{BATCH} --torch-compile --torch-compile-mode reduce-overhead --zero-stage 3"
    run(flags, {}, 1)  # as ZeRO 1
    words = "reduce-overhead, --zero-stage 3: a CUDA graph .* gathers them again .*no-cudagraphs"
    for zero, processes in (({}, 2), ({"offload_param": {"device": "cpu"}}, 1)):
        with pytest.raises(ConfigError, match=words):
            run(flags, {"zero_optimization": {"stage": 3, **zero}}, processes)


def test_the_optimizer_is_the_trainers():
    settings = engine_json("", AUTO)
    assert "optimizer" not in settings
    assert settings["zero_allow_untested_optimizer"] is True
    assert settings["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_shipped_file_resolves_with_typical_flags(path):
    content = read_json(str(path))
    for world_size in (1, 2, 8):
        config, completed, _ = run(BATCH, content, world_size)
        settings = for_engine(completed, config, True)
        assert completed["train_batch_size"] == 16
        assert completed["gradient_accumulation_steps"] == 16 // 2 // world_size
        assert '"auto"' not in json.dumps(settings)


def test_files_are_shipped():
    assert list(SHIPPED.glob("*.json"))


def test_flags_of_zero_are_keys_of_the_json():
    flags = (
        f"{BATCH} --zero-stage 3 --zero-reduce-scatter --zero-contigious-gradients "
        "--zero-reduce-bucket-size 5000 --zero-allgather-bucket-size 6000 "
        "--remote-device cpu --use-pin-memory --bf16"
    )
    expected = {
        "stage": 3, "reduce_scatter": True, "contiguous_gradients": True,
        "reduce_bucket_size": 5000, "allgather_bucket_size": 6000,
        "offload_param": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert run(flags, {})[1]["zero_optimization"] == expected
    given = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "reduce_scatter": False}}
    completed = run(f"{BATCH} --bf16", given)[1]["zero_optimization"]
    assert completed == {"stage": 2, "reduce_bucket_size": 500_000_000, "reduce_scatter": False}


def test_flags_of_zero_that_contradict_the_json_are_refused():
    told = refusal(
        f"{BATCH} --zero-reduce-bucket-size 5", {"zero_optimization": {"reduce_bucket_size": 6}}
    )
    assert "--zero-reduce-bucket-size 5 contradicts zero_optimization.reduce_bucket_size 6" in told


@pytest.mark.parametrize(
    "content, told",
    [
        ({"zero_optimization": {"foo": 1}}, "zero_optimization.foo 1: Extra inputs"),
        ({"zero_optimization": {"overlap_comm": "x"}}, 'overlap_comm "x": Input should be a valid'),
        ({"bf16": {"foo": {"a": 1}}}, 'bf16.foo {"a": 1}: Extra inputs'),
        ({"comms_logger": {"enabled": True, "foo": 1}}, "comms_logger.foo 1: Extra inputs"),
        ({"csv_monitor": {"enabled": True, "nope": 1}}, "csv_monitor.nope 1: Extra inputs"),
        ({"timers": {"throughput": {"enabled": "x"}}}, 'timers.throughput.enabled "x": Input'),
        ({"communication_data_type": "foo"}, "Invalid communication_data_type"),
        ({"data_types": {"grad_accum_dtype": "foo"}}, "'foo' is not a valid DtypeEnum"),
    ],
)
def test_what_deepspeed_refuses_is_one_line(content, told):
    settings = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, **content}
    with pytest.raises(ConfigError) as raised:
        check_settings(settings, "ds.json")
    text = str(raised.value)
    assert told in text and text.startswith("ds.json: DeepSpeed refuses ") and "\n" not in text


ACCEPTED = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "lion": "lion"}


def test_every_optimizer_of_deepspeed_runs_or_has_a_remedy():
    """Names that DeepSpeed knows and classes of torch.optim, which it looks up; of those without
    the same rule here the message names the type and flags of others."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    classes = {n for n, each in vars(torch.optim).items()
               if isinstance(each, type) and n != "Optimizer"}  # fmt: skip
    assert {"Muon", "Adafactor", "SGD"} <= classes
    for name in {*DEEPSPEED_OPTIMIZERS, *classes}:
        content = {"optimizer": {"type": name}}
        if name.lower() in ACCEPTED:
            config, _, _ = run(BATCH, content)
            assert config.optimizer.optimizer == ACCEPTED[name.lower()]
        else:
            message = refusal(BATCH, content)
            assert f'optimizer.type "{name}"' in message
            assert "give --optimizer" in message, message


def test_lion_has_the_betas_of_the_json():
    """Without them DeepSpeed's, which are not Megatron's; a flag must agree."""
    for params, flags, betas in (
        ({}, "", (0.9, 0.999)),
        ({"betas": [0.95, 0.97]}, "", (0.95, 0.97)),
        ({}, "--lion-beta2 0.9", (0.9, 0.9)),
    ):
        content = {"optimizer": {"type": "Lion", "params": params}}
        config, completed, _ = run(f"{BATCH} {flags}", content)
        lion = config.section(OptimizersConfig)
        assert (lion.lion_beta1, lion.lion_beta2) == betas
        assert completed["optimizer"]["params"]["betas"] == list(betas)
    content = {"optimizer": {"type": "Lion", "params": {"betas": [0.95, 0.97]}}}
    assert "contradicts optimizer.params.betas.1" in refusal(f"{BATCH} --lion-beta2 0.9", content)
