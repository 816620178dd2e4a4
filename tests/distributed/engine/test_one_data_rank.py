"""ZeRO 2 and 3 over one data-parallel rank run as ZeRO 1."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest
from training_jobs import TINY, train

FLAGS = [*TINY, "--train-iters", "4", "--lr-decay-style", "constant"]
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --clip-grad 0"
).split()
FORMS = {
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "4096", "--loss-scale-window", "2"],
    "sgd": ["--optimizer", "sgd"],
    "bf16-llama": ["--bf16", *LLAMA],
}
TP2 = ["--tensor-model-parallel-size", "2"]
AS_DEEPSPEED = ["--checkpoint-format", "deepspeed"]
"""Keeps the stage asked for, as DeepSpeed runs it."""


def results(pool, size: int, argv: list[str]) -> list:
    """Losses, scales, skipped steps and state of every rank, without norms: DeepSpeed sums their
    squares in another dtype at stage 3."""
    found = []
    for record in pool.run(size, train, argv):
        pieces: dict[str, dict[int, np.ndarray]] = {}
        for name, values in record.state.items():
            key, _, start = name.rpartition("/")
            pieces.setdefault(key, {})[int(start)] = values
        state = {k: np.concatenate([v for _, v in sorted(p.items())]) for k, p in pieces.items()}
        found.append((record.losses, record.scales, record.skipped, state))
    return found


def check_same(found: list, expected: list) -> None:
    for (*numbers, state), (*others, wanted) in zip(found, expected, strict=True):
        assert numbers == others
        assert state.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(state[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("form", "size"),
    [
        pytest.param("fp16", 1, marks=pytest.mark.proof),
        ("bf16-llama", 2),
        pytest.param("bf16", 1, marks=pytest.mark.proof),
        pytest.param("sgd", 2, marks=pytest.mark.proof),
    ],
)
def test_same_bits_as_stage_1_and_as_deepspeed(pool, form, size):
    """DeepSpeed's own stage 3 rounds a linear layer with a bias twice in 16 bits, so that only
    layers without are the same there."""
    argv = [*FLAGS, *FORMS[form], *(TP2 if size == 2 else [])]
    expected = results(pool, size, [*argv, "--zero-stage", "1"])
    for stage in (2, 3):
        flags = [*argv, "--zero-stage", str(stage)]
        check_same(results(pool, size, flags), expected)
        if stage == 2 or form == "bf16-llama":
            check_same(results(pool, size, [*flags, *AS_DEEPSPEED]), expected)


def printed(argv: list[str]) -> str:
    """What a run prints; for the pool."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(argv)
    return said.getvalue()


def test_what_a_run_leaves_names_the_stage_asked_for(pool, tmp_path):
    """A line says what runs, once; everything that is written says 3."""
    argv = [*FLAGS, "--zero-stage", "3", "--save", str(tmp_path), "--save-interval", "4"]
    (said,) = pool.run(1, printed, [*argv, "--save-universal"])
    note = "ZeRO 3 over one data-parallel rank partitions nothing: it runs as ZeRO 1"
    assert said.count(note) == 1
    assert "ZeRO stage 3" in said and "ZeRO stage 1" not in said
    saved = tmp_path / "global_step4"
    assert json.loads((saved / "config.json").read_text())["engine"]["zero_stage"] == 3
    assert json.loads((saved / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    (universal,) = tmp_path.glob("*universal*/")
    assert list(universal.glob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    again = [*FLAGS, "--train-iters", "5", "--load", str(tmp_path), "--zero-stage", "3"]
    (record,) = pool.run(1, train, again)
    assert record.iteration == 5


def test_a_folder_of_deepspeed_is_of_the_stage_asked_for(pool, tmp_path):
    argv = [*FLAGS, "--zero-stage", "3", *AS_DEEPSPEED, "--save", str(tmp_path)]
    pool.run(1, train, [*argv, "--save-interval", "4"])
    names = {path.name for path in (tmp_path / "global_step4").iterdir()}
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt" in names
