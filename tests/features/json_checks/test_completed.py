"""Keys of a DeepSpeed JSON that contradict the run are refused by name."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_json import complete, merge

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --deepspeed_config ds.json"
)


def run(flags, content):
    settings = FlagParser(*FLAG_CLASSES).settings(f"{FLAGS} {flags}".split())
    complete(content, resolve(merge(settings, content, "ds.json", 2), 2).config)


def refusal(flags, content):
    with pytest.raises(ConfigError) as raised:
        run(flags, content)
    return str(raised.value)


def test_the_flops_profiler_has_nothing_to_measure_in_a_pipeline():
    content = {"flops_profiler": {"enabled": True}}
    message = refusal("--pipeline-model-parallel-size 2", content)
    assert "flops_profiler.enabled true, --pipeline-model-parallel-size 2: " in message
    run("", content)
    run("--pipeline-model-parallel-size 2", {"flops_profiler": {"enabled": False}})


def test_keys_of_fp16_that_do_not_fit_are_refused_by_name():
    main_weights = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    message = refusal("--fp16 --zero-stage 0", main_weights)
    assert "fp16.fp16_master_weights_and_grads true, --zero-stage 0: " in message
    run("--fp16 --zero-stage 1", main_weights)
    message = refusal("--fp16", {"fp16": {"enabled": True, "auto_cast": True}})
    assert "fp16.auto_cast true" in message


def test_a_guard_that_is_off_is_refused():
    content = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    assert "bf16.check_grad_overflow false" in refusal("", content)
