"""A run that does not advance ends, and names what holds it up: stopped, hanging and lost ranks,
processes that read data and do not, in every layout. A run that was suspended as a whole
continues."""

import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from warm_runs import WarmRuns, alive, kill, output_of, status_of, wait

from megatron.features.resilience.watch.processes import state_letter

sys.path.insert(0, str(Path(__file__).parent))
LIMIT = 5
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters 1000000 "
    f"--log-interval 5 --hang-seconds {LIMIT} --distributed-timeout-minutes 5"
).split()
TENSOR, PIPELINE = (f"--{kind}-model-parallel-size 2".split() for kind in ("tensor", "pipeline"))


@pytest.fixture(scope="module")
def warm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
        runs = WarmRuns("hanging_program", "deepspeed")
    yield runs
    runs.stop()


class HangingRun:
    """A run of some processes, stopped or damaged by the test."""

    def __init__(self, warm, folder, argv=(), size=2, hang=""):
        self.output, self.size = folder / "output", size
        environment = {"HANG": hang} if hang else {}
        self.pids = warm.start([*FLAGS, *argv], size, self.output, lambda rank: environment)

    def printed(self, rank=0):
        file = output_of(self.output, rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def trains(self):
        assert wait(self.pids, lambda: "iteration " in self.printed().partition("layout:")[2])
        return self

    def errors(self, rank=0):
        """The lines that say why a rank has ended, once it has."""
        wait([self.pids[rank]], lambda: False, pause=0.05)
        return [line for line in self.printed(rank).splitlines() if "error: " in line[:20]]

    def status(self, rank=0):
        deadline = time.monotonic() + 10  # it is written after the process has been waited for
        while (status := status_of(self.output, rank)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return status

    def signal(self, number, *ranks):
        for rank in ranks or range(self.size):
            os.kill(self.pids[rank], number)

    def readers(self, rank=0):
        """The processes that read a rank's data."""
        pid = self.pids[rank]
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start(warm, tmp_path):
    begun = []

    def begin(*args, **options):
        begun.append(HangingRun(warm, tmp_path, *args, **options))
        return begun[-1]

    yield begin
    for run in begun:
        kill(run.pids)


def proof(*case):
    return pytest.param(*case, marks=pytest.mark.proof)


@pytest.mark.parametrize(
    ("stopped", "size", "argv"),
    [
        (1, 2, []),
        proof(0, 2, []),
        *(proof(1, 2, ["--zero-stage", str(stage)]) for stage in (1, 2, 3)),
        proof(1, 2, TENSOR),
        proof(0, 2, PIPELINE),
        proof(1, 2, PIPELINE),
        *(proof(rank, 4, [*TENSOR, *PIPELINE]) for rank in (1, 2, 3)),
        proof(3, 4, ["--zero-stage", "3"]),
        proof(0, 4, ["--zero-stage", "2"]),
    ],
)
def test_a_stopped_rank_is_named(start, stopped, size, argv):
    run = start(argv, size).trains()
    run.signal(signal.SIGSTOP, stopped)
    for rank in set(range(size)) - {stopped}:
        (line,) = run.errors(rank)
        assert f"rank {stopped} (" in line and f"pid {run.pids[stopped]})" in line
        assert "is stopped (state T" in line
        assert not re.search(rf"error: (?!rank {stopped} )", line), "the wrong one is blamed"
        assert run.status(rank) == 3


@pytest.mark.proof
@pytest.mark.parametrize(
    ("where", "how", "argv"),
    [
        ("step", "sleeps", []),
        ("step", "loops", []),
        ("step", "blocked", []),
        ("step", "loops", PIPELINE),
        ("step", "sleeps", TENSOR),
        ("start", "loops", ["--hang-limits", "start=5"]),
        ("evaluation", "sleeps", ["--eval-interval", "10", "--eval-iters", "1"]),
        ("save", "sleeps", ["--save-interval", "10"]),
        ("save", "sleeps", ["--save-interval", "10", "--async-save"]),
    ],
)
def test_a_rank_that_hangs_is_named(start, tmp_path, where, how, argv):
    save = ["--save", str(tmp_path / "save")]
    run = start([*argv, *save], hang=f"1:{where}:20:{how}")
    for rank in (0, 1):
        (line,) = run.errors(rank)
        assert "error: rank 1 (" in line and f"in phase {where}" in line, line
        assert "rank 0 waits for others in " in line
        assert run.status(rank) == 3
    (report,) = (tmp_path / "save").glob("hang-*.txt")
    text = report.read_text()
    assert "hanging_program.py" in text and text.count("thread MainThread:") == 2
    if where != "start":
        records = tmp_path / "save" / "collectives"
        assert {file.name for file in records.iterdir()} == {"rank_0", "rank_1"}
        entries = pickle.loads((records / "rank_0").read_bytes())["entries"]
        assert any(not entry["retired"] for entry in entries)
    if "--async-save" in argv:
        assert "the save in the background" in run.printed(1)


@pytest.mark.proof
def test_a_run_ends_well_whose_reports_take_their_time(start):
    """For longer than a store may be silent, while the other rank has come to the end."""
    run = start(["--train-iters", "5", "--hang-seconds", "60"], hang="0:end:0:slow")
    assert not run.errors(0) and not run.errors(1)
    assert run.status(0) == run.status(1) == 0


@pytest.mark.proof
def test_a_rank_that_hangs_at_the_end_is_named(start):
    run = start(["--train-iters", "5"], hang="0:end:0:sleeps")
    (line,) = run.errors(1)
    assert "error: rank 0 (" in line and "hanging_program.py" in line
    assert run.status(1) == 3


@pytest.mark.proof
def test_a_rank_that_holds_the_interpreter_is_named(start):
    run = start(hang="1:step:20:interpreter")
    (line,) = run.errors(0)
    assert "error: rank 1 (" in line and "holds the interpreter's lock" in line
    assert run.status(0) == 3


@pytest.mark.proof
@pytest.mark.parametrize(
    ("killed", "size", "argv"),
    [(1, 2, []), (0, 2, []), (3, 4, PIPELINE), (2, 4, [*TENSOR, "--zero-stage", "1"])],
)
def test_a_killed_rank_is_named(start, killed, size, argv):
    run = start(argv, size).trains()
    run.signal(signal.SIGKILL, killed)
    for rank in set(range(size)) - {killed}:
        (line,) = run.errors(rank)
        assert f"rank {killed} (" in line and "has ended" in line, line
        assert run.status(rank) == 3


@pytest.mark.proof
def test_a_rank_that_ends_by_an_error_is_named_with_it(start):
    run = start(hang="1:step:20:raises")
    (line,) = run.errors(0)
    assert "error: rank 1 (" in line and "has ended: 'some weight'" in line
    run.errors(1)
    assert run.status(0) == 1 and "KeyError" in run.printed(1)


@pytest.mark.proof
def test_stopped_readers_of_data_end_a_run_of_several_ranks(start):
    run = start(["--num-workers", "1"]).trains()
    (reader,) = run.readers(1)
    os.kill(reader, signal.SIGSTOP)
    (line,) = run.errors(0)
    assert (
        "error: rank 1 (" in line and f"process {reader} of --num-workers, which is stopped" in line
    )
    assert run.status(0) == 3
    run.errors(1)
    assert wait(run.pids, lambda: state_letter(reader) in (None, "Z")), state_letter(reader)


@pytest.mark.proof
@pytest.mark.parametrize("terminated", [False, True])
def test_a_run_whose_data_do_not_come_saves_its_last_step(start, tmp_path, terminated):
    save = tmp_path / "save"
    argv = ["--num-workers", "1", "--save", str(save)]
    if terminated:
        argv += ["--hang-seconds", "600"]
    run = start(argv, size=1).trains()
    (reader,) = run.readers()
    os.kill(reader, signal.SIGSTOP)
    if terminated:
        before = None  # what it has read already is trained on; the signal would end it there
        while before != (before := run.printed()):
            time.sleep(3)
        run.signal(signal.SIGTERM)
    (line,) = run.errors()
    assert f"process {reader} of --num-workers, which is stopped" in line
    assert ("SIGTERM: " in line) == terminated
    (saved,) = re.findall(r"saved checkpoint at iteration (\d+) ", run.printed())
    assert f"at iteration {int(saved) + 1}" in line
    assert run.status() == 3 and not alive([reader])


@pytest.mark.proof
def test_a_signal_to_end_is_obeyed_while_a_rank_is_stopped(start):
    run = start(["--hang-seconds", "600"]).trains()
    run.signal(signal.SIGSTOP, 1)
    time.sleep(1)
    run.signal(signal.SIGTERM)
    (line,) = run.errors(0)
    assert "SIGTERM cannot be obeyed: rank 1 (" in line and "is stopped" in line
    assert run.status(0) == 3


@pytest.mark.proof
@pytest.mark.parametrize(("size", "seconds"), [(1, 2 * LIMIT), (2, 2 * LIMIT), (2, 75)])
def test_a_suspended_run_continues(start, size, seconds):
    """Gloo may end one that was suspended for longer than it waits; the watchdog does not."""
    run = start(["--distributed-timeout-minutes", "1"], size).trains()
    run.signal(signal.SIGSTOP)
    time.sleep(seconds)
    run.signal(signal.SIGCONT)
    time.sleep(1.5 * LIMIT)
    before = run.printed()
    if seconds > 60 and not alive(run.pids):
        assert "a connection between them failed" in run.printed()
        return
    assert wait(run.pids, lambda: run.printed() != before)
    assert "error" not in before and alive(run.pids)
