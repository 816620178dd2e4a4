"""What a run says of the checkpoint that it continues."""

import dataclasses
from types import SimpleNamespace

from configs import run_config

from megatron.config import PrecisionConfig
from megatron.training.resume import changes


def test_another_format_of_states_is_one_line():
    run = run_config()
    bits_8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    stored = PrecisionConfig(bf16=True, use_precision_aware_optimizer=True, **bits_8)
    before = dataclasses.replace(run, precision=PrecisionConfig(bf16=True))
    after = dataclasses.replace(run, precision=stored)
    source = SimpleNamespace(state={"iteration": 1}, run=before)
    assert changes(source, before) == []
    assert changes(source, after) == [
        "optimizer states: float32 -> main_params fp32, exp_avg int8, exp_avg_sq int8; converted, "
        "rounded to nearest"
    ]
