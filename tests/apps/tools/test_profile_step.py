"""tools/profile_step.py: a trace that is there, mistakes, and the run that flags come to."""

import json
import sys
from pathlib import Path

import pytest

from megatron.config import Setting
from tools import profile_step

sys.path.append(str(Path(__file__).parents[1] / "profiling"))

from kineto import event, kernel, scope, step, write  # noqa: E402


@pytest.fixture
def trace(tmp_path):
    return write(
        tmp_path / "trace.json.gz",
        step(1, 0, 100),
        scope("megatron::forward", 10, 50),
        event("aten::mm", 20, 40, Input_Dims=[[4, 8], [8, 2]]),
        step(2, 100, 260),
        scope("megatron::forward", 110, 210),
        event("aten::mm", 120, 200, Input_Dims=[[4, 8], [8, 2]]),
        megatron={"matmul_peak_flops": 1e7},
    )


def test_shows_a_trace(trace, tmp_path, capsys):
    profile_step.main(["--trace", str(trace), "--json", str(tmp_path / "split.json")])
    out = capsys.readouterr().out
    assert "2 steps of rank 3: 0.13 ms a step in the mean (time of the training thread)" in out
    numbers = json.loads((tmp_path / "split.json").read_text())
    assert numbers["step_ms"] == pytest.approx(0.130)
    assert numbers["categories_ms"]["matrix products"] == {"forward": pytest.approx(0.050)}
    assert numbers["product_flops"] == 128 and numbers["matmul_peak_flops"] == 1e7
    profile_step.main(["--trace", str(trace), "--least"])
    assert "0.10 ms a step when each operator is at its fastest" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--trace", "no-such-file"], "No such file or directory: 'no-such-file'"),
        (["--trace", "TRACE", "--hidden-size", "8"], "--hidden-size describes a run to train"),
        (["--trace", "TRACE", "--top", "0"], "--top 0 must be positive"),
        (["--trace", "GPU", "--least"], "--least is for the time of a CPU"),
    ],
)
def test_mistakes_are_named(trace, tmp_path, flags, says):
    gpu = write(tmp_path / "gpu.json", step(1, 0, 9), kernel("gemm", 1, 2, 4))
    argv = [{"TRACE": str(trace), "GPU": str(gpu)}.get(flag, flag) for flag in flags]
    with pytest.raises(SystemExit, match=f"profile_step.py: error: .*{says}"):
        profile_step.main(argv)


def test_flags_of_a_trace_without_one():
    with pytest.raises(SystemExit, match="profile_step.py: error: --least needs --trace"):
        profile_step.main(["--least"])


def given(**values):
    return {name: Setting(value, f"flag --{name}") for name, value in values.items()}


def test_a_run_is_cut_to_its_first_steps_and_saves_nothing():
    few = profile_step.few_steps(
        given(save="runs/a", save_interval=2, train_iters=5000, lr=1e-3, load="runs/a")
    )
    values = {name: setting.value for name, setting in few.items()}
    assert values == {
        "profile": True, "profile_step_start": 3, "profile_step_end": 8, "exit_interval": 8,
        "train_iters": 5000, "eval_iters": 0, "lr": 1e-3, "load": "runs/a", "finetune": True,
    }  # fmt: skip


def test_without_a_length_the_run_is_as_long_as_needed():
    few = profile_step.few_steps(given(profile_step_start=1))
    assert (few["train_iters"].value, few["profile_step_end"].value) == (6, 6)
    assert "exit_interval" not in few
