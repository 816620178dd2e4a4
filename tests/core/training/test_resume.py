"""What a run says of the checkpoint that it continues."""

import dataclasses
from types import SimpleNamespace

import pytest
from configs import run_config

from megatron.config import PrecisionConfig, TokenizerConfig
from megatron.config.engine import FastPathsConfig
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE, GPT2BPETokenizer
from megatron.tokenizer.mark import TokenizerMark, mark_of
from megatron.training import build
from megatron.training.resume import SKIPPED, ResumePoint, _skipped, changes


@pytest.mark.features
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


@pytest.mark.features
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


@pytest.mark.features
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


def test_a_run_continues_with_the_tokenizer_of_its_checkpoint(tmp_path):
    tokenizer = GPT2BPETokenizer({c: i for i, c in enumerate(CHARACTER_OF_BYTE)}, [])
    config = TokenizerConfig("GPT2BPETokenizer")
    run = SimpleNamespace(config=SimpleNamespace(tokenizer=config), tokenizer=tokenizer)
    (tmp_path / "tokenizer").mkdir()
    file = tmp_path / build.MARK_FILE
    for mark in (None, mark_of(run.tokenizer, "HFTokenizer")):
        if mark is not None:
            file.write_bytes(mark.json())
        build._check_tokenizer(run, ResumePoint(tmp_path, 3))
    file.write_bytes(TokenizerMark("HFTokenizer", 259, "another").json())
    build._check_tokenizer(run, ResumePoint(tmp_path, 0, weights_only=True))
    with pytest.raises(ValueError, match=f"{tmp_path} was trained with another tokenizer: HFTok"):
        build._check_tokenizer(run, ResumePoint(tmp_path, 3))


def test_ranges_that_a_run_found_bad_itself_stay_skipped():
    run = run_config()
    source = SimpleNamespace(state={SKIPPED: ["4:8"]}, run=run)
    assert _skipped(source, run, consumed_samples=16) == ("4:8",)
