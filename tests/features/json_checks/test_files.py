"""DeepSpeed JSON files that are wrong are refused by name; what others write is said."""

import json

import pytest

from megatron.config import ConfigError
from megatron.engine.deepspeed_file import read_json
from megatron.features.json_checks.checks import file_notes

UNREADABLE = [
    ("{", "is not valid JSON"),
    ("[]", "expected a JSON object"),
    ('{"bf16": {}, "bf16": {}}', 'the key "bf16" occurs twice'),
    ({"gradient_cliping": 1}, 'no key "gradient_cliping"; the nearest known key is "gradient_clip'),
    ({"zzzz": 1}, 'no key "zzzz"'),
    ({"fp16": True}, "fp16 is true; it must be an object"),
    ({"optimizer": {"params": [1]}}, "optimizer.params is [1]; it must be an object"),
    ({"optimizer": {"params": {"betas": [0.9]}}}, "betas is [0.9]; it must be a list of two"),
    ({"optimizer": {"params": {"betas": 0.9}}}, "betas is 0.9; it must be a list of two"),
    ({"optimizer": {"params": {"weigth_decay": 1}}}, 'nearest known one is "weight_decay"'),
    ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam_w_mode is false, but"),
    ({"scheduler": {"type": "WarmupLR"}}, '"scheduler": the learning rate follows --lr-decay'),
    ({"amp": {"enabled": True}}, "amp.enabled is on, and DeepSpeed removed amp in 0.19.8: NVIDIA"),
    ({"torch_autocast": {}}, '"torch_autocast"'),
    ({"tensor_parallel": {"autotp_size": 2}}, "--tensor-model-parallel-size"),
    ({"hybrid_engine": {}}, "tools/generate.py"),
    ({"zero_optimization": {"offload_optimizer": "cpu"}}, 'offload_optimizer is "cpu"; it must be'),
    ({"zero_optimization": {"offload_param": ["cpu"]}}, 'offload_param is ["cpu"]; it must be an'),
    (
        {"zero_optimization": {"offload_param": {"device": "gpu"}}},
        'zero_optimization.offload_param.device is "gpu"; it must be cpu, nvme or none',
    ),
    ({"zero_optimization": {"offload_optimizer": {"device": ["cpu"]}}}, 'device is ["cpu"]; it'),
    ({"zero_optimization": {"cpu_offload": True}}, 'use "offload_optimizer": {"device": "cpu"}'),
    ({"zero_optimization": {"cpu_offload_param": False}}, 'use "offload_param": {"device": "cpu"}'),
    ({"zero_optimization": {"cpu_offload_use_pin_memory": True}}, 'use "pin_memory" in "offload_'),
    ('{"a":' * 100_000, "nested more than 100 levels"),
    ('{"bf16": ' + "[" * 100_000, "nested more than 100 levels"),
    ('{"steps_per_print": ' + "9" * 5000 + "}", "an integer of 5,000 digits"),
    ('{"bf16": {"enabled": NaN}}', "is not valid JSON"),
    ({"steps_per_print": "x"}, 'steps_per_print is "x"; it must be a positive integer'),
    ({"steps_per_print": 0}, "steps_per_print is 0; it must be a positive integer"),
    ({"wall_clock_breakdown": "x"}, 'wall_clock_breakdown is "x"; it must be true or false'),
    ({"flops_profiler": {"enabled": 1}}, "flops_profiler.enabled is 1; it must be true or false"),
    ({"flops_profiler": {"output_file": 1}}, "flops_profiler.output_file is 1; it must be a str"),
    ({"comms_logger": 5}, "comms_logger is 5; it must be an object"),
    (
        {"zero_optimization": {"zero_hpz_partition_size": "x"}},
        'zero_optimization.zero_hpz_partition_size is "x"; it must be a positive integer',
    ),
    ({"comet": {"enabled": True}}, "the package comet_ml is not installed"),
]


@pytest.mark.parametrize("content, told", UNREADABLE)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path, content, told):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as raised:
        read_json(str(path))
    assert told in str(raised.value) and str(path) in str(raised.value)


def test_what_a_json_makes_deepspeed_write_is_said():
    content = {
        "tensorboard": {"enabled": True, "output_path": "/etc/tb"},
        "csv_monitor": {"enabled": False, "output_path": "/etc/csv"},
        "flops_profiler": {"enabled": True, "output_file": "/etc/flops"},
        "wandb": {"enabled": True},
    }
    assert file_notes(content, "ds.json") == [
        "ds.json: tensorboard.output_path makes DeepSpeed write to /etc/tb",
        "ds.json: flops_profiler.output_file makes DeepSpeed write to /etc/flops",
        "ds.json: wandb makes DeepSpeed send metrics to the service of wandb",
    ]
    assert file_notes({}, "") == []
