"""torchrun starts ranks again that were killed or stopped, with every rendezvous and on two nodes:
the run continues from its newest checkpoint and ends with the weights of a run that was never
killed. deepspeed ends the others."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched_runs import ADDRESSES, BIN, FLAGS, ROOT, environment, free_port, nodes
from safetensors.numpy import load_file

__all__ = ["nodes"]  # a fixture
STEPS = 240
LAYOUTS = {
    "zero1-dp2": ["--zero-stage", "1"],
    "zero3-dp2": ["--zero-stage", "3"],
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}


def words(save, layout=("--zero-stage", "1")):
    length = ["--train-iters", str(STEPS), "--save-interval", "20", "--keep-last", "2"]
    log = ["--log-interval", "20"]
    return ["pretrain_gpt.py", *FLAGS, *length, *log, *layout, "--save", str(save), "--load",
            str(save)]  # fmt: skip


class Run:
    """The agents of a run, one for each node; each writes what it prints to a file."""

    def __init__(self, folder, rendezvous, layout=("--zero-stage", "1"), names=None, nnodes="2"):
        self.save, self.folder = folder / "save", folder
        self.rendezvous, self.layout = rendezvous, layout
        self.names, self.nnodes, self.port = names, nnodes, free_port()
        self.agents: dict[int, subprocess.Popen] = {}

    def start(self, *which):
        for node in which or range(len(self.names or [0])):
            own = {**environment(), "OMP_NUM_THREADS": "1"}
            own.pop("GLOO_SOCKET_IFNAME", None)
            start = [str(BIN / "torchrun"), "--max-restarts", "3"]
            if self.rendezvous == "deepspeed":
                start = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", self.port]
            elif self.names is None:
                start += ["--nproc-per-node", "2"]
                start += {
                    "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"],
                    "static": ["--master-port", self.port],
                }[self.rendezvous]
            else:
                own["GLOO_SOCKET_IFNAME"] = interface_of(self.names[node])
                at = f"{ADDRESSES[0]}:{self.port}"
                start = ["ip", "netns", "exec", self.names[node], *start, "--nproc-per-node", "1"]
                start += ["--nnodes", self.nnodes, "--local-addr", ADDRESSES[node]]
                start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--rdzv-id", "run"]
                start += ["--rdzv-conf", f"is_host={1 - node},last_call_timeout=2"]
            with (self.folder / f"log.{node}").open("a") as log:
                self.agents[node] = subprocess.Popen(
                    [*start, *words(self.save, self.layout)],
                    cwd=ROOT, env=own, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip

    def said(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("log.*")))

    def wait_for(self, pattern):
        end = time.monotonic() + 240
        while not re.search(pattern, self.said()):
            assert time.monotonic() < end, self.said()[-4000:]
            time.sleep(0.05)

    def processes(self, node=None):
        """The ranks of the run, those of a node or all, by their ids."""
        agents = {str(self.agents[n].pid) for n in self.agents if node in (None, n)}
        if self.rendezvous == "deepspeed":  # has a process of its own for each node
            agents = {pid for agent in agents for pid in children_of(agent)}
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    ranks = [v[5:] for v in variables if v.startswith(b"RANK=")]
                    if parent in agents and ranks:
                        found[int(ranks[0])] = int(folder.name)
        return found

    def ends_well(self):
        status = {node: agent.wait(timeout=300) for node, agent in self.agents.items()}
        assert status[0] == 0, self.said()[-4000:]
        assert (self.save / "latest").read_text() == f"global_step{STEPS}"

    def stop(self):
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
                agent.wait(timeout=60)


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def interface_of(name):
    shown = subprocess.run(["ip", "-n", name, "-br", "link"], capture_output=True, text=True)
    (line,) = (line for line in shown.stdout.splitlines() if not line.startswith("lo"))
    return line.split()[0].partition("@")[0]


@contextlib.contextmanager
def a_run(*arguments, **options):
    run = Run(*arguments, **options)
    try:
        run.start()
        yield run
    finally:
        run.stop()


def weights(save):
    folder = save / f"global_step{STEPS}"
    return {f"{path.name}/{name}": tensor.tobytes()
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of two processes that nothing happens to, by its layout."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def trained(layout="zero1-dp2"):
        save = folder / layout
        if not save.exists():
            start = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", free_port()]
            done = subprocess.run(
                [*start, *words(save, LAYOUTS[layout])],
                cwd=ROOT, env=environment(), capture_output=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
        return save

    return trained


def losses(save):
    rows = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return {row["iteration"]: row["loss"] for row in rows if row["kind"] == "train"}


def resumed_at(said):
    return [int(number) for number in re.findall(r"resumed from \S+ at iteration (\d+)", said)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("rendezvous", "layout", "rank"),
    [
        ("c10d", "zero1-dp2", 1),
        ("static", "zero3-dp2", 0),
        ("static", "tp2", 1),
        ("c10d", "pp2", 0),
    ],
)
def test_a_killed_rank_is_started_again(undisturbed, tmp_path, rendezvous, layout, rank):
    """Twice: the second start has the keys of the first in its store."""
    with a_run(tmp_path, rendezvous, LAYOUTS[layout]) as run:
        for least in (60, 140):
            run.wait_for(rf"iteration +{least}/")
            os.kill(run.processes()[rank], signal.SIGKILL)
        run.ends_well()
    first, second = resumed_at(run.said())
    assert first >= 40 and second >= 120
    assert weights(run.save) == weights(undisturbed(layout))


@pytest.mark.proof
@pytest.mark.parametrize(("rendezvous", "rank"), [("c10d", 0), ("c10d", 1), ("static", 0)])
def test_a_stopped_rank_is_started_again(undisturbed, tmp_path, rendezvous, rank):
    """torchrun ends it by SIGKILL, half a minute after the others have named it."""
    layout = [*LAYOUTS["zero1-dp2"], "--hang-seconds", "6"]
    with a_run(tmp_path, rendezvous, layout) as run:
        run.wait_for(r"iteration +60/")
        stopped = run.processes()[rank]
        os.kill(stopped, signal.SIGSTOP)
        run.ends_well()
    named = f"error: rank {rank} \\([^)]*pid {stopped}\\) does not answer: its process is stopped"
    assert re.search(named, run.said())
    assert not re.search(f"error: rank {1 - rank} ", run.said()), "the wrong one is blamed"
    (resumed,) = resumed_at(run.said())
    assert resumed >= 40
    assert weights(run.save) == weights(undisturbed())


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_a_run_of_deepspeed(tmp_path, rank):
    """With status 3, by which the scripts start it again."""
    layout = [*LAYOUTS["zero1-dp2"], "--hang-seconds", "6"]
    with a_run(tmp_path, "deepspeed", layout) as run:
        run.wait_for(r"iteration +60/")
        ranks = run.processes()
        os.kill(ranks[rank], signal.SIGSTOP)
        assert run.agents[0].wait(timeout=300) == 3, run.said()[-4000:]
        assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    (line,) = re.findall(r".*error: rank .*", run.said())
    assert f"error: rank {rank} (" in line and f"pid {ranks[rank]})" in line
    assert "its process is stopped" in line


@pytest.mark.proof
@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_killed_on_one_of_two_nodes(undisturbed, nodes, tmp_path, node):
    """The agents then count different numbers of restarts."""
    with a_run(tmp_path, "c10d", names=nodes) as run:
        run.wait_for(r"iteration +60/")
        os.kill(run.processes(node).popitem()[1], signal.SIGKILL)
        run.ends_well()
    (at,) = resumed_at(run.said())
    assert at >= 40
    assert weights(run.save) == weights(undisturbed())


@pytest.mark.proof
def test_a_lost_node_leaves_a_smaller_run(undisturbed, nodes, tmp_path):
    """Of one to two nodes the second is lost, agent and rank; the first continues alone, in the
    same order of samples."""
    with a_run(tmp_path, "c10d", names=nodes, nnodes="1:2") as run:
        run.wait_for(r"iteration +60/")
        assert "layout: 2 processes" in run.said()
        os.killpg(run.agents.pop(1).pid, signal.SIGKILL)
        run.ends_well()
    assert resumed_at(run.said()) and "layout: 1 process" in run.said()
    ours, theirs = losses(run.save), losses(undisturbed())
    assert ours.keys() == theirs.keys()
    # Sums of gradients over one rank are rounded otherwise than over two. Weights show it less:
    # the bias of keys has no gradient but rounding, of which Adam makes whole steps.
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-5)
