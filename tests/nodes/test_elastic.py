"""torchrun on a number of nodes that changes during a run: nodes leave, are lost, and return."""

import json
import re
import signal
import statistics
import subprocess
import time

import pytest
from launched_runs import FLAGS, ROOT, environment, free_port

from .namespaces import missing, nodes, send

pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(missing()), reason=missing())]
MODEL = [
    *FLAGS,
    *"--global-batch-size 12 --lr 1e-4 --lr-decay-style constant --save-interval 50".split(),
    *"--attention-dropout 0 --hidden-dropout 0".split(),
]


class Elastic:
    """A run of one to four nodes, one process on each, started by a script of examples_deepspeed;
    each agent writes what it prints to a file."""

    def __init__(self, machines, folder):
        self.machines, self.folder, self.port = machines, folder, free_port()
        self.agents = {}

    def start(self, *which):
        variables = {"NODES": "1:4", "GPUS": "1", "LAUNCHER": "torchrun",
                     "MASTER_ADDR": "node-1", "MASTER_PORT": self.port,
                     "OMP_NUM_THREADS": "1"}  # fmt: skip
        script = 'source examples_deepspeed/common.sh; start pretrain_gpt.py "$@"'
        save = ["--save", self.folder / "save", "--load", self.folder / "save"]
        words = [*MODEL, *save, "--train-iters", 1000000, "--keep-last", 2]
        for node in which:
            with (self.folder / f"log.{node}").open("a") as log:
                self.agents[node] = self.machines[node - 1].start(
                    "bash", "-c", script, ROOT / "examples_deepspeed" / "elastic.sh", *words,
                    cwd=ROOT, env=environment() | variables, stdout=log, stderr=log,
                )  # fmt: skip

    def said(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("log.*")))

    def layouts(self):
        return [int(size) for size in re.findall(r"layout: (\d+) process", self.said())]

    def trains_on(self, layouts, steps=10):
        """Waits until the run has begun with these numbers of processes, and has taken steps."""
        end, least = time.monotonic() + 240, None
        while True:
            assert time.monotonic() < end, self.said()[-6000:]
            if self.layouts() == layouts:
                newest = len(losses(self.folder / "save"))
                least = least or newest + steps
                if newest >= least:
                    return
            time.sleep(0.1)


def losses(save):
    if not (save / "metrics.jsonl").exists():
        return []
    lines = (save / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


def test_nodes_leave_and_return(tmp_path):
    """One is asked to leave, which saves; one is lost; both return. Every sample is read once, in
    the order of a run of one process."""
    with nodes(4, tmp_path / "nodes", sshd=False) as machines:
        run = Elastic(machines, tmp_path)
        run.start(1, 2, 3, 4)
        run.trains_on([4])
        send(run.agents[4], signal.SIGTERM)
        run.trains_on([4, 3])
        machines[2].run("sh", "-c", "kill -9 -1")
        run.trains_on([4, 3, 2])
        run.start(3, 4)
        run.trains_on([4, 3, 2, 4])
        for agent in run.agents.values():
            send(agent, signal.SIGTERM)
        for agent in run.agents.values():
            agent.wait(timeout=120)
    found = losses(tmp_path / "save")
    undisturbed = subprocess.run(
        ["python", "pretrain_gpt.py", *MODEL, "--micro-batch-size", "12",
         "--train-iters", str(len(found)), "--save", str(tmp_path / "undisturbed")],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = losses(tmp_path / "undisturbed")
    assert found == pytest.approx(expected, rel=1e-4)
    assert statistics.stdev(expected) > 1e-3 * expected[0]  # other samples would be seen
