"""A slurm cluster on this machine: munged, slurmctld and a slurmd on each node of its own.

The daemons are Debian's (slurmd, slurmctld, slurm-client, munge); the nodes are namespaces with
addresses and names, as ``nodes.namespaces`` makes them, and one more has slurmctld. All files are
in one folder, and nothing in ``/etc`` or ``/run`` of this machine is used. Nodes have processors
and no GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodes import namespaces
from nodes.namespaces import Node, nodes

SLURMD_TIMEOUT = 10
"""Seconds after which a node that does not answer counts as down."""
REQUEUE_DELAY = 5
"""Seconds before which a requeued job is not started again. Slurm takes 120, its default, in place
of less than 5."""
_PROCESSORS = 8
"""Of each node, as slurm is told: more than there are."""
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={control}
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={delay}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdTimeout={timeout}
MessageTimeout=3
InactiveLimit=0
KillWait=5
MinJobAge=600
ReturnToService=2
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    for program, package in _PROGRAMS.items():
        if _found(program) is None:
            return f"{package} is not installed"
    return namespaces.missing()


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class Cluster:
    """What tests do with a cluster.

    Attributes:
        nodes: that run jobs; ``node-1`` and so on.
        control: the one that has slurmctld, from which people submit.
    """

    nodes: list[Node]
    control: Node
    folder: Path

    def run(self, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command, such as squeue, where people log in; its output is captured."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        return self.control.run(*words, **{"env": environment} | options)

    def output(self, *words: object, **options: Any) -> str:
        """What a command prints that must succeed."""
        done = self.run(*words, **options)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.strip()

    def submit(self, *words: object, **variables: object) -> int:
        """The number of a job that sbatch queues, with variables of the environment."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        environment |= {name: str(value) for name, value in variables.items()}
        return int(self.output("sbatch", "--parsable", *words, env=environment))

    def job(self, number: int) -> dict[str, str]:
        """What scontrol shows of a job: JobState, NodeList, Restarts and others."""
        text = self.output("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in text.split())

    def state(self, name: str) -> str:
        """Of a node, such as ``idle`` or ``down*``."""
        return self.output("sinfo", "--noheader", "--nodes", name, "--format", "%t")

    def end(self, number: int) -> str:
        """The state in which a job ends, without restarts; waits for it."""
        while (state := self.job(number)["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
            time.sleep(0.3)
        return state


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    """A cluster with so many nodes until the block ends; then all of its processes end."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, as the names of sockets must be
    with contextlib.ExitStack() as opened:
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        *machines, control = opened.enter_context(nodes(count + 1, folder / "nodes", sshd=False))
        made = Cluster(machines, control, folder)
        _configure(made)
        _start(opened, folder, control, "munged", "--foreground", "--force", "--num-threads", 4,
               "--socket", folder / "munge.socket", "--key-file", folder / "munge.key",
               "--pid-file", folder / "munge.pid", "--log-file", folder / "munge.log",
               "--seed-file", folder / "munge.seed")  # fmt: skip
        _await(lambda: (folder / "munge.socket").exists(), "munged", folder)
        conf = folder / "slurm.conf"
        _start(opened, folder, control, "slurmctld", "-D", "-f", conf)
        for node in machines:
            _start(opened, folder, node, "slurmd", "-D", "-N", node.name, "-f", conf)
        _await(lambda: _ready(made), "slurmctld and slurmd", folder)
        yield made


def _configure(made: Cluster) -> None:
    folder = made.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "state").mkdir(mode=0o700)
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={_PROCESSORS} RealMemory=1000"
        for node in made.nodes
    ]
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            control=f"{made.control.name}({made.control.address})",
            folder=folder,
            delay=REQUEUE_DELAY,
            timeout=SLURMD_TIMEOUT,
            nodes="\n".join(lines),
        )
    )


def _start(
    opened: contextlib.ExitStack, folder: Path, node: Node, program: str, *words: object
) -> None:
    """Starts a daemon; it ends with its node."""
    place = _found(program)
    assert place is not None
    log = opened.enter_context((folder / f"{program}-{node.name}.out").open("w"))
    options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    process = node.start(place, *words, **options)
    opened.callback(process.wait)
    opened.callback(process.kill)


def _ready(made: Cluster) -> bool:
    asked = made.run("sinfo", "--noheader", "--Node", "--format", "%t")
    return asked.returncode == 0 and asked.stdout.split() == ["idle"] * len(made.nodes)


def _await(condition: Any, what: str, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"{what} did not start within a minute:\n{logs}")
        time.sleep(0.1)
