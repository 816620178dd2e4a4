"""The JSON templates of ``examples_deepspeed``: refused by name until they are filled, and then one
configuration with the flags of their scripts."""

import itertools
import json
import re
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_file import check_settings, read_json
from megatron.engine.deepspeed_json import complete, for_engine, merge
from megatron.features.json_checks.checks import _REFUSED as REFUSED

EXAMPLES = Path(__file__).parents[3] / "examples_deepspeed"
OTHERS = {"curves.json", "runs.json"}
TEMPLATES = sorted(path for path in EXAMPLES.rglob("*.json") if path.name not in OTHERS)
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 10 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --log-interval 7 --clip-grad 1.0 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --hysteresis 2 --deepspeed_config ds.json"
)
METRIC = {
    "METRIC_NAME": '"voc"', "SAMPLE_PATH": '"sample"', "METRIC_PATH": '"metric"',
    "DIFF_TYPE": '"value"', "CLUSTER_TYPE": '"single_cluster"', "MIN": "8", "MAX": "64",
    "TOTAL_STEP": "1", "DIFF_STEP": "1", "ROOT": "1",
}  # fmt: skip
VALUES = {
    "CONFIG_CL_ENABLED": "true", "CONFIG_CL_MIN": "8", "CONFIG_CL_MAX": "64",
    "CONFIG_CL_DURATION": "5", "LTD_ENABLED": "false", "LTD_MIN": "64", "LTD_MAX": "64",
    "LTD_STEP": "1", "LTD_TOTAL_LAYERS": "2", "LTD_LAYER_NUM": "1", "LTD_LAYER_ID": "[1]",
    "CL_ENABLED": "true", "CL_CLUSTER_PATH": '"clusters"',
    "DATA_EFFICIENCY_SEED": "1234", "DATA_SAMPLING_NUM_WORKERS": "0",
    **{f"CL_1st_{name}": value for name, value in METRIC.items()},
    **{f"CL_2nd_{name}": value for name, value in METRIC.items()},
    "CL_2nd_METRIC_NAME": '"seqlen_truncate"', "CL_2nd_DIFF_STEP": "8",
    "OFFLOAD_DEVICE": '"cpu"', "SP": "15",
}  # fmt: skip
STAGES = {
    "Zero2": 2,
    "offload_pp": 3,
    "azure": 3,
    "eval_dummy": 0,
    "finetune_hf_llama/ds_config.json": 0,
}
FP16 = {
    "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
    "min_loss_scale": 1, "initial_scale_power": 11,
}  # fmt: skip


def name_of(path):
    return str(path.relative_to(EXAMPLES))


def filled(path, **values):
    text = path.read_text()
    for name, value in (VALUES | values).items():
        text = text.replace(f'"{name}"', value)
    return text


def resolved(text, folder, flags, world_size=2):
    path = folder / "ds.json"
    path.write_text(text)
    content = read_json(str(path))
    settings = FlagParser(*FLAG_CLASSES).settings(f"{FLAGS} {flags}".split())
    config = resolve(merge(settings, content, "ds.json", world_size), world_size).config
    return config, complete(content, config)


def stage_of(path):
    return next((stage for part, stage in STAGES.items() if part in name_of(path)), None)


def dtypes(path):
    """Flags of precision that the template leaves open."""
    content = json.loads(filled(path))
    if content.get("bf16", {}).get("enabled") in (True, False):
        return [""]
    return ["--fp16", "--bf16", ""] if "bf16" in content else ["--fp16", ""]


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.proof)])
@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_resolves_when_it_is_filled(path, processes, tmp_path):
    stages = (0, 1) if stage_of(path) is None else (stage_of(path),)
    for stage, dtype in itertools.product(stages, dtypes(path)):
        flags = f"--zero-stage {stage} {dtype}"
        config, content = resolved(filled(path), tmp_path, flags, processes)
        assert content["train_batch_size"] == 16
        assert content["gradient_accumulation_steps"] == 8 // processes
        steps = json.loads(filled(path)).get("steps_per_print")
        assert content.get("steps_per_print") == (7 if steps == "auto" else steps)
        assert content.get("prescale_gradients", stage == 0) == (stage == 0)
        if dtype == "--fp16" and content["fp16"]["loss_scale_window"] == 500:
            assert content["fp16"] == FP16
        settings = for_engine(content, config, on_cpu=True)
        assert '"auto"' not in json.dumps(settings)
        check_settings(settings, "ds.json")
        DeepSpeedConfig(settings | {"train_batch_size": 16 // processes})


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_placeholder_that_is_left_is_named(path):
    """Each of them; in a file with none, none is seen."""
    left = set(re.findall(r'"((?:CONFIG|LTD|CL|DATA|OFFLOAD)_\w+|SP)"', path.read_text()))
    assert left <= VALUES.keys()
    if not left:
        read_json(str(path))
        return
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if any(f'"{p}"' in line for p in left))
    with pytest.raises(ConfigError) as raised:
        read_json(str(path))
    told = re.fullmatch(
        r"(.*), line (\d+): the placeholder (\w+) is not filled; .*", str(raised.value)
    )
    assert told[1] == str(path) and int(told[2]) == number and f'"{told[3]}"' in lines[number - 1]


UNFILLED = [
    ('{"train_batch_size": CONFIG_BATCH_SIZE}', 1, "CONFIG_BATCH_SIZE", "--global-batch-size"),
    ('{"a": 1,\n "train_batch_size" : GBSIZE,', 2, "GBSIZE", '"auto" in its place'),
    ('{"train_micro_batch_size_per_gpu": MBSIZE}', 1, "MBSIZE", "--micro-batch-size"),
    ('{"zero_optimization": {\n\n"stage": ZERO_STAGE}}', 3, "ZERO_STAGE", "--zero-stage"),
    ('{"prescale_gradients": PRESCALE_GRAD}', 1, "PRESCALE_GRAD", "true at ZeRO stage 0"),
    ('{"fp16": {"enabled": CONFIG_FP16_ENABLED}}', 1, "CONFIG_FP16_ENABLED", "--fp16"),
    ('{"steps_per_print": "LOG_INTERVAL"}', 1, "LOG_INTERVAL", "--log-interval"),
    ('{"train_batch_size":\n $GLOBAL_BATCH}', 2, "$GLOBAL_BATCH", "the script of this template"),
    ('{"train_batch_size": ${GLOBAL_BATCH}}', 1, "${GLOBAL_BATCH}", "replaces it by a value"),
    (
        '{"comment": "x: GPT, GBS",\n "train_batch_size": GB_SIZE}',
        2,
        "GB_SIZE",
        "replaces it by a value",
    ),
]


@pytest.mark.parametrize("text, line, name, told", UNFILLED)
def test_placeholders_of_other_files_are_named(text, line, name, told, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_json(str(path))
    start = f"{path}, line {line}: the placeholder {name} is not filled; "
    assert str(raised.value).startswith(start) and told in str(raised.value)


def test_what_only_looks_like_a_placeholder_is_a_value(tmp_path):
    path = tmp_path / "ds.json"
    names = {"project": "GPT_RUN", "team": "$TEAM", "group": "a: GBSIZE of [MBSIZE"}
    path.write_text(json.dumps({"wandb": {"enabled": False, **names}}))
    assert read_json(str(path))["wandb"]["team"] == "$TEAM"
    for text in ('{"a": NaN}', '{"a": 1', '{"a": True}', '{"bf16": "GPT" 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not valid JSON"):
            read_json(str(path))


def test_a_templates_own_contradictions_are_gone_and_a_users_are_named(tmp_path):
    baseline = EXAMPLES / "curriculum_learning/ds_zero_stage_1_config_baseline.json"
    content = json.loads(baseline.read_text())
    config, completed = resolved(json.dumps(content), tmp_path, "--zero-stage 1")
    assert config.training.global_batch_size == 16 and config.optimizer.lr == 1e-3
    assert "max_grad_norm" not in completed["optimizer"]["params"]
    for key, value, told in [
        ("train_batch_size", 512, "--global-batch-size 16 contradicts train_batch_size 512"),
        ("optimizer", {"params": {"lr": 1.5e-4}}, "--lr 0.001 contradicts optimizer.params.lr"),
        ("fp16", {"enabled": True}, "--bf16"),
    ]:
        with pytest.raises(ConfigError, match=told):
            resolved(json.dumps(content | {key: value}), tmp_path, "--zero-stage 1 --bf16")


def test_the_old_spelling_of_clipping(tmp_path):
    def norms(old, new=None):
        content = {"optimizer": {"params": {"max_grad_norm": old}}}
        return json.dumps(content | ({} if new is None else {"gradient_clipping": new}))

    flags = FLAGS.replace("--clip-grad 1.0", "")
    for text in (norms(0.5), norms(0.5, 0.5), norms("auto", 0.5), norms(0.5, "auto")):
        path = tmp_path / "ds.json"
        path.write_text(text)
        content = read_json(str(path))
        settings = merge(FlagParser(*FLAG_CLASSES).settings(flags.split()), content, "ds.json", 1)
        config = resolve(settings, 1).config
        assert config.optimizer.clip_grad == 0.5
        completed = complete(content, config)
        assert completed["gradient_clipping"] == 0.5
        assert "max_grad_norm" not in completed["optimizer"]["params"]
    told = "gradient_clipping 0.5 contradicts optimizer.params.max_grad_norm 0.7 in ds.json"
    with pytest.raises(ConfigError, match=told):
        merge({}, json.loads(norms(0.7, 0.5)), "ds.json", 1)
    with pytest.raises(ConfigError, match="--clip-grad 1.0 contradicts .*max_grad_norm 0.7"):
        resolved(norms(0.7), tmp_path, "")


def test_scaling_before_the_reduction_is_for_low_stages(tmp_path):
    for stage in (0, 1):
        resolved('{"prescale_gradients": true}', tmp_path, f"--zero-stage {stage}")
    for stage in (2, 3):
        with pytest.raises(ConfigError, match=f"prescale_gradients true, --zero-stage {stage}: "):
            resolved('{"prescale_gradients": true}', tmp_path, f"--zero-stage {stage}")
        resolved('{"prescale_gradients": "auto"}', tmp_path, f"--zero-stage {stage}")


@pytest.mark.parametrize("ratio", [1, 1.0, 0.3, 0])
def test_a_share_of_the_optimizer_on_the_gpu(tmp_path, ratio):
    offload = {"device": "cpu", "pin_memory": True, "ratio": ratio, "buffer_count": 4,
               "pipeline_read": False, "pipeline_write": False}  # fmt: skip
    text = json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    config, content = resolved(text, tmp_path, "")
    check_settings(for_engine(content, config, on_cpu=True), "ds.json")


@pytest.mark.parametrize("last", [True, False])
def test_keys_without_effect_on_training_are_accepted(tmp_path, last):
    content = {
        "dataloader_drop_last": last, "zero_allow_untested_optimizer": False,
        "wall_clock_breakdown": True, "vocabulary_size": 64,
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1,
                           "top_modules": 3, "detailed": True, "output_file": None},
    }  # fmt: skip
    config, completed = resolved(json.dumps(content), tmp_path, "")
    check_settings(for_engine(completed, config, on_cpu=True), "ds.json")
    with pytest.raises(ConfigError, match='drop_last is "x"; it must be true or false'):
        resolved('{"dataloader_drop_last": "x"}', tmp_path, "")


def test_a_refused_section_that_is_off_is_left_out(tmp_path):
    """DeepSpeed would refuse some of them and start others: {"enabled": false} of datastates_ckpt
    needs a library."""
    content = {name: {"enabled": False} for name in REFUSED}
    for flags in ("--bf16", "--bf16 --zero-stage 1"):
        config, completed = resolved(json.dumps(content), tmp_path, flags)
        assert not content.keys() & completed.keys()
        settings = for_engine(completed, config, on_cpu=True)
        check_settings(settings, "ds.json")
        autocast = settings.get("torch_autocast", {"enabled": False})
        assert autocast["enabled"] is (config.engine.zero_stage == 0)
    for name in REFUSED:
        with pytest.raises(ConfigError, match=f'"{name}": '):
            resolved(json.dumps({name: {"enabled": True}}), tmp_path, "")


def test_one_half_precision_at_a_time(tmp_path):
    content = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="ds.json: bf16.enabled and fp16.enabled are both true"):
        resolved(json.dumps(content), tmp_path, "")
