"""What a run says of the checkpoint that it continues."""

import dataclasses
from types import SimpleNamespace

from configs import run_config

from megatron.config import PrecisionConfig
from megatron.config.engine import FastPathsConfig
from megatron.training.resume import changes


def test_another_format_of_states_is_one_line():
    run = run_config()
    bits_8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    stored = PrecisionConfig(bf16=True, use_precision_aware_optimizer=True, **bits_8)
    before = dataclasses.replace(run, precision=PrecisionConfig(bf16=True))
    after = dataclasses.replace(run, precision=stored)
    source = SimpleNamespace(state={"iteration": 1}, run=before)
    assert changes(source, before) == []
    shown = "--main-params-dtype fp32 --exp-avg-dtype int8 --exp-avg-sq-dtype int8"
    assert changes(source, after) == [f"optimizer states: float32 -> {shown}; rounded to nearest"]
    back = SimpleNamespace(state={"iteration": 1}, run=after)
    assert changes(back, before) == [f"optimizer states: {shown} -> float32"]


def test_a_state_that_keeps_its_format_is_not_rounded():
    """Stored values are float32 numbers, which the same format holds exactly."""

    def run(**dtypes):
        precision = PrecisionConfig(bf16=True, use_precision_aware_optimizer=True, **dtypes)
        return dataclasses.replace(run_config(), precision=precision)

    def line(before, after):
        return changes(SimpleNamespace(state={"iteration": 1}, run=before), after)[0]

    bits_16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    assert "rounded" not in line(run(**bits_16), run(exp_avg_dtype="bf16"))
    assert line(run(**bits_16), run(**bits_16, main_params_dtype="bf16")).endswith("to nearest")


def test_another_recipe_of_8_bits_is_reported_and_compilation_is_not():
    run = run_config()
    before = dataclasses.replace(
        run, fast_paths=FastPathsConfig(fp8_format="hybrid", torch_compile="off")
    )
    after = dataclasses.replace(
        run,
        fast_paths=FastPathsConfig(
            fp8_format="hybrid", fp8_recipe="delayed", first_last_layers_bf16=True,
            torch_compile="on", torch_compile_mode="max-autotune", activation_memory_budget=0.5,
        ),
    )  # fmt: skip
    assert changes(SimpleNamespace(state={"iteration": 1}, run=before), after) == [
        'fp8_recipe: "tensorwise" -> "delayed"',
        "first_last_layers_bf16: false -> true",
    ]
