"""Which steps are recorded, and by what."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from configs import run_config
from torch.profiler import record_function

from megatron.apps.profiling import callback as module
from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.callback import (
    MemoryHistory,
    NsysRange,
    Profiler,
    Recorder,
    TorchTrace,
    profiling,
    under_nsys,
)
from megatron.apps.profiling.flags import ProfilingConfig
from megatron.apps.profiling.trace import read_trace
from megatron.config import PART_FLAGS, FlagParser, RunConfig, resolve
from megatron.parallel.mesh import Mesh


class Notes(Recorder):
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def prepare(self) -> None:
        self.told.append("prepare")

    def start(self, iteration: int) -> None:
        self.told.append(f"start {iteration}")

    def step(self) -> None:
        self.told.append("step")

    def stop(self, iteration: int) -> None:
        self.told.append(f"stop {iteration}")

    def close(self) -> None:
        self.told.append("close")


def run_steps(start: int, end: int, first: int, last: int) -> list[str]:
    """What a recorder of steps start + 1 to end is told in a run of steps first + 1 to last."""
    notes = Notes()
    options = ProfilingConfig(profile="auto", profile_step_start=start, profile_step_end=end)
    with Profiler([notes], options, first) as profiler:
        for _ in range(first, last):
            profiler.before_step(None)
            notes.told.append("train")
    return notes.told


@pytest.mark.parametrize(
    "start, end, first, last, told",
    [
        # Iterations 3 and 4 of six.
        (2, 4, 0, 6, "train, prepare, train, start 2, train, step, train, stop 4, close, "
         "train, train"),
        (0, 1, 0, 2, "start 0, train, stop 1, close, train"),
        # The run ends with the last recorded step, and before it.
        (2, 4, 0, 4, "train, prepare, train, start 2, train, step, train, stop 4, close"),
        (2, 5, 0, 3, "train, prepare, train, start 2, train, stop 3, close"),
        (4, 5, 0, 2, "train, train, close"),
        # Resumed after the first of them.
        (2, 5, 3, 6, "start 3, train, step, train, stop 5, close, train"),
    ],
)  # fmt: skip
def test_the_recorded_steps(start, end, first, last, told):
    assert ", ".join(run_steps(start, end, first, last)) == told


def test_an_error_in_a_step_ends_the_recording():
    notes = Notes()
    profiler = Profiler([notes], ProfilingConfig(profile_step_start=0), 0)
    with pytest.raises(MemoryError), profiler:
        profiler.before_step(None)
        raise MemoryError
    assert notes.told == ["start 0", "stop 1", "close"]


REQUIRED = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "8",
    "--max-position-embeddings": "8", "--micro-batch-size": "1", "--train-iters": "20",
    "--lr": "1e-3",
}  # fmt: skip


def resolved(*flags: str, world_size: int = 1):
    argv = [word for pair in REQUIRED.items() for word in pair]
    return resolve(FlagParser(*PART_FLAGS.values()).settings([*argv, *flags]), world_size)


def test_megatrons_flags_and_defaults():
    options = resolved().config.section(ProfilingConfig)
    assert (options.profile, options.profile_step_start, options.profile_step_end) == (
        None, 10, 12,
    )  # fmt: skip
    assert options.profile_ranks == (0,)
    options = resolved(
        *"--profile --profile-step-start 3 --profile-step-end 5 --profile-ranks 0 2 "
        "--use-pytorch-profiler --save runs/a".split(),
        world_size=4,
    ).config.section(ProfilingConfig)
    assert options.profile_ranks == (0, 2) and options.use_pytorch_profiler
    assert options.profile_dir == "runs/a/profile"
    assert resolved("--profile").config.section(ProfilingConfig).profile_dir == "profile"
    later = resolved("--profile", "--profile-step-start", "15").config.section(ProfilingConfig)
    assert later.profile_step_end == 17
    assert (
        resolved("--profile", "--profile-dir", "x").config.section(ProfilingConfig).profile_dir
        == "x"
    )


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--profile --profile-step-start 9 --profile-step-end 9", "--profile-step-end 9 must be "
         "above --profile-step-start 9: iterations 10 to 9 are recorded"),
        ("--profile --profile-step-start -1", "--profile-step-start -1 must not be negative"),
        ("--profile --profile-ranks 0 1", "--profile-ranks 0 1 must be ranks from 0 to 0"),
        ("--profile --profile-ranks 0 0", "--profile-ranks 0 0 names a rank twice"),
        ("--use-pytorch-profiler", "--use-pytorch-profiler chooses .* needs it"),
        ("--profile --profile-step-start 20 --profile-step-end 21", "--profile-step-start 20 "
         r"leaves nothing to record: the run ends at iteration 20 \(--train-iters\)"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        resolved(*flags.split())


def test_flags_without_profile_are_said_to_do_nothing():
    notes = resolved("--profile-step-end", "30").notes
    assert "--profile-step-end has no effect without --profile" in notes


class Engine:
    """A model with the scopes that engines write."""

    def __init__(self) -> None:
        self.model, self.device = torch.nn.Linear(4, 4), torch.device("cpu")
        self.mesh = Mesh()
        self.losses: list[float] = []

    def train_step(self, batches):
        with record_function("megatron::data"):
            batch = next(batches)
        with record_function("megatron::forward"):
            loss = self.model(batch).square().mean()
        with record_function("megatron::backward"):
            loss.backward()
        self.update()
        self.losses.append(float(loss.detach()))

    @record_function("megatron::optimizer")
    def update(self):
        for param in self.model.parameters():
            param.data -= 0.1 * param.grad
            param.grad = None

    @record_function("megatron::evaluate")
    def evaluate(self):
        self.model(torch.ones(1, 4))


@pytest.fixture
def config(tmp_path) -> RunConfig:
    options = ProfilingConfig(
        profile="auto", profile_step_start=1, profile_step_end=3, profile_dir=str(tmp_path / "p")
    )
    return run_config(sections=(options,))


def trained(config: RunConfig, steps: int = 4) -> Engine:
    torch.manual_seed(7)
    engine = Engine()
    batches = (torch.randn(2, 4) for _ in range(steps))
    with contextlib.ExitStack() as stack:
        profilers = [stack.enter_context(p) for p in profiling(config, engine, 0)]
        for _ in range(steps):
            for profiler in profilers:
                profiler.before_step(None)
            engine.train_step(batches)
            engine.evaluate()
    return engine


def test_a_trace_with_all_phases(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "measure_matmul_peak", lambda *_, seconds: 1e9)
    profiled = trained(config)
    (path,) = (tmp_path / "p").iterdir()
    assert path.name == "rank0-step1-3.json.gz"
    found = break_down(read_trace(path))
    assert found.steps == 2
    assert found.about == {"matmul_peak_flops": 1e9, "iterations_before": 1}
    for phase in ("data", "forward", "backward", "optimizer"):
        assert found.of_phase(phase) > 0, phase
    names = {event.name for event in read_trace(path).host[read_trace(path).main_thread]}
    assert "megatron::evaluate" in names
    printed = capsys.readouterr().out
    assert str(path) in printed and "matrix products" in printed and "of peak" in printed
    assert profiled.losses == trained(run_config()).losses, "training is unchanged"


def test_nothing_is_recorded_without_the_flag():
    assert profiling(run_config(), Engine(), 0) == []


def test_other_ranks_record_nothing(config):
    options = dataclasses.replace(config.section(ProfilingConfig), profile_ranks=(1,))
    assert profiling(config.with_sections(options), Engine(), 0) == []


def test_a_run_that_is_past_the_steps_says_so(config, capsys):
    assert profiling(config, Engine(), 3) == []
    assert "--profile-step-end 3: nothing to profile" in capsys.readouterr().out


def test_a_failed_export_leaves_no_file(config, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measure_matmul_peak", lambda *_, seconds: 1e9)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    trained(config)
    assert list((tmp_path / "p").iterdir()) == []


@pytest.mark.parametrize(
    "variable, on_gpu, forced, expected",
    [("1", True, False, True), ("1", True, True, False), ("1", False, False, False),
     (None, True, False, False)],
)  # fmt: skip
def test_nsys_is_told_by_its_variable(monkeypatch, variable, on_gpu, forced, expected):
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    if variable:
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", variable)
    options = ProfilingConfig(profile="auto", use_pytorch_profiler=forced)
    assert under_nsys(options, on_gpu) is expected


def test_nsys_records_between_start_and_stop(monkeypatch):
    """No GPU: what torch would be told."""
    told: list[str] = []
    ranges = SimpleNamespace(
        __enter__=lambda: told.append("ranges"), __exit__=lambda *_: told.append("no ranges")
    )
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: ranges)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("stop"))
    recorder = NsysRange()
    assert told == []
    recorder.start(4)
    recorder.stop(6)
    assert told == ["wait", "start", "ranges", "no ranges", "wait", "stop"]


def test_memory_history_is_written_once_and_whole(monkeypatch, tmp_path, capsys):
    """No GPU: what torch would be told."""
    told: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all", **_: told.append(str(enabled))
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    options = ProfilingConfig(
        record_memory_history=True,
        memory_snapshot_path=str(tmp_path / "m" / "snapshot.pickle"),
        profile_ranks=(0, 3),
    )
    first, third = MemoryHistory(options, 0), MemoryHistory(options, 3)
    for recorder in (first, third):
        recorder.stop(12)
        recorder.close()
    assert told == ["all", "all", "None", "None"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "snapshot-rank3.pickle", "snapshot.pickle",
    ]  # fmt: skip


def test_memory_history_needs_a_gpu():
    options = ProfilingConfig(record_memory_history=True)
    config = run_config(sections=(options,))
    with pytest.raises(ValueError, match="--record-memory-history records a GPU's memory"):
        profiling(config, Engine(), 0)


def test_the_profiler_is_stopped_if_the_run_ends_early(config):
    recorder = TorchTrace(config, torch.device("cpu"), 0)
    recorder.prepare()
    recorder.close()
    recorder.close()
    assert not recorder.begun
