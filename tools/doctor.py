#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Examines the nodes of a run before it starts, and names what is wrong with the remedy.

    python tools/doctor.py
    python tools/doctor.py runs/a
    python tools/doctor.py --hostfile hostfile --save runs/a --data-path data/corpus_text_document
    python tools/doctor.py --nodes node-1,node-2 --json

Without nodes it examines this machine; in an allocation of slurm, the nodes of that. A folder alone
is that of --save; tools/inspect_checkpoint.py shows what is in a checkpoint. Checked are:
who answers, versions, code, data, free space, limits, GPUs, clocks, the port at which processes
meet, whether --save is one folder with locks for all, and bandwidth and latency of every pair of
nodes. Nothing needs to be installed on the nodes but Python.

Exit status: 0 if nothing is wrong; 1 if something is; 2 if the command line or hostfile is wrong.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import megatron
from megatron.apps.doctor.examination import OVER, Examination, Subject, examine
from megatron.apps.doctor.findings import NodeFinding, usual_link
from megatron.apps.doctor.hostfile import chosen, read_hostfile
from megatron.apps.doctor.session import Session, by_srun, by_ssh, here
from megatron.config import ConfigError, FlagParser
from megatron.config.flags import POSITIVE, build, option
from megatron.data.corpora import READ_IN_PLACE, expand
from megatron.features.resilience.restart.nodes import ask
from megatron.util.errors import one_line, spelled


@dataclass(frozen=True)
class DoctorConfig:
    """Doctor: which nodes to examine, and for what."""

    hostfile: str | None = option(None, derived="slurm's allocation, or this machine")
    """File with a line NAME slots=N for each node."""
    include: str = option("")
    """The nodes of the hostfile to examine, NAME with @ between two."""
    exclude: str = option("")
    """The nodes of the hostfile not to examine, written likewise."""
    nodes: str | None = option(None)
    """Names of nodes with commas between, in place of a hostfile."""
    save: str | None = option(None)
    """Folder that all nodes must share, as training's --save."""
    data_path: tuple[str, ...] = option(())
    """Prefixes of the .bin and .idx files of training, other files, folders or patterns, with or
    without weights; a URL is left out."""
    master_port: int = option(29500, bounds=POSITIVE)
    """Port of the first node at which the processes of a run meet."""
    free_gib: float = option(1.0)
    """GiB to be free in --save and in the folder for temporary files."""
    python: str = option(sys.executable)
    """Python on the nodes."""
    ssh_port: int | None = option(None, bounds=POSITIVE)
    """Port of sshd on the nodes, unless ~/.ssh/config has it."""
    over: str = option("tcp", choices=OVER)
    """What measures bandwidth and latency of every pair: tcp, which needs nothing on the nodes, or
    a backend of torch.distributed; nccl takes the first GPU of each."""
    ssh_timeout: int = option(10, bounds=POSITIVE)
    """Seconds for which a node may not answer."""
    json: bool = option(False)
    """Print one JSON object instead of lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) == 1 and not words[0].startswith("-"):
        words.insert(0, "--save")
    parser = FlagParser(DoctorConfig, description=__doc__)
    config: DoctorConfig = build(DoctorConfig, parser.settings(words))
    try:
        names, way = chosen_nodes(config)
        refused, sessions = start(names, way, config)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    try:
        done = examine(sessions, subject_of(config)) if sessions else Examination()
    finally:
        for session in sessions:
            session.end()
    done.findings[:0] = refused
    print(as_json(names, done) if config.json else as_text(names, done, config.over))
    return 1 if done.findings else 0


def chosen_nodes(config: DoctorConfig) -> tuple[list[str], str]:
    """Names, and how their probes are started: ssh, srun or here."""
    if config.hostfile and config.nodes:
        raise ConfigError("--hostfile and --nodes contradict each other; give one of them")
    if (config.include or config.exclude) and not config.hostfile:
        raise ConfigError("--include and --exclude choose from a --hostfile; give one")
    if config.hostfile:
        nodes = chosen(read_hostfile(config.hostfile), config.include, config.exclude)
        return list(nodes), "ssh"
    if config.nodes:
        names = [name.strip() for name in config.nodes.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"--nodes {config.nodes}: give each name once, such as node-1,node-2")
        return names, "ssh"
    if "SLURM_JOB_NODELIST" in os.environ and shutil.which("scontrol"):
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        said = subprocess.run(words, capture_output=True, text=True)
        if said.returncode:
            raise ConfigError(f"{' '.join(words)}: {said.stderr.strip()}; give --nodes")
        return said.stdout.split(), "srun"
    return [socket.gethostname()], "here"


def start(
    names: Sequence[str], way: str, config: DoctorConfig
) -> tuple[list[NodeFinding], list[Session]]:
    """The nodes that cannot be examined, and the probes of the others."""
    folder, python = os.getcwd(), config.python
    if way == "here":
        if shutil.which(python) is None:
            raise ConfigError(f"--python {python}: no such program here")
        return [], [Session(names[0], here(python))]
    if way == "srun":
        return [], [Session(name, by_srun(name, folder, python)) for name in names]
    options = [] if config.ssh_port is None else ["-p", str(config.ssh_port)]
    refusals = ask(names, folder, python, config.ssh_timeout, options)
    refused = [
        NodeFinding(one.name, "ssh", one.reason, "processes can be started", one.remedy)
        for one in refusals
    ]
    lost = {one.name for one in refusals}
    left = [name for name in names if name not in lost]
    return refused, [Session(name, by_ssh(name, folder, python, options)) for name in left]


def subject_of(config: DoctorConfig) -> Subject:
    """Name the subject of the probes."""
    data = []
    for word in config.data_path:
        try:
            float(word)
        except ValueError:
            data += files_of(word)
    save = os.path.abspath(config.save) if config.save else None
    return Subject(
        code_folder(), data, save, config.master_port, config.free_gib, config.over,
        interface(config),
    )  # fmt: skip


def code_folder() -> str:
    """The folder with the trainer's code, on every node: the checkout, or that of the packages."""
    here = os.getcwd()
    return here if os.path.isdir("megatron") else str(Path(megatron.__file__).parents[1])


def files_of(path: str) -> list[str]:
    """The files that training reads of a path; of a URL none."""
    if "://" in path:
        tell(f"--data-path {path}: not examined, it is not a file of the nodes")
        return []
    pair = [os.path.abspath(f"{path}.{kind}") for kind in ("bin", "idx")]
    if any(map(os.path.exists, pair)):
        return pair
    try:
        return [os.path.abspath(file) for file in expand(path, READ_IN_PLACE)]
    except FileNotFoundError:
        return pair


def interface(config: DoctorConfig) -> str:
    """GLOO_SOCKET_IFNAME of the processes, if the side that starts them says it: a line of
    .deepspeed_env, or the shell's variable, which DeepSpeed does not pass to the nodes of a
    hostfile."""
    name = "GLOO_SOCKET_IFNAME"
    address = "" if config.hostfile else os.environ.get(name, "")
    for folder in (os.path.expanduser("~"), "."):
        with suppress(OSError, UnicodeDecodeError):
            path = os.path.join(folder, os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
            for line in Path(path).read_text().splitlines():
                key, _, value = line.partition("=")
                address = value.strip() if key.strip() == name else address
    return address


NAME = spelled("doctor.py: ")
"""Begins each line."""


def tell(text: str) -> None:
    print(f"{NAME}{text}", file=sys.stderr)


def as_json(names: Sequence[str], done: Examination) -> str:
    links = [
        {"from": a, "to": b, "bytes_per_second": link.rate, "round_trip_seconds": link.trip}
        for (a, b), link in done.links.items()
    ]
    findings = [dataclasses.asdict(finding) for finding in done.findings]
    checks = {check.name: check.value for check in done.checks}
    return json.dumps({"nodes": names, "checks": checks, "findings": findings, "links": links})


def as_text(names: Sequence[str], done: Examination, over: str) -> str:
    lines = []
    for check in done.checks:
        wrong = any(finding.check.startswith(check.findings) for finding in done.findings)
        mark = "✗" if wrong else "✓" if check.value else "-"
        lines.append(f"{NAME}{mark} {check.name}: {check.value or 'nothing to examine'}")
    lines += [f"{NAME}{finding}" for finding in done.findings]
    if done.links:
        most = usual_link(done.links)
        lines.append(
            f"{NAME}median of {len(done.links)} links: {most.rate / 1e6:,.0f} MB/s, "
            f"{most.trip * 1e6:,.0f} us there and back ({over})"
        )
    count = len(done.findings)
    verdict = f"{count} finding{'s' * (count != 1)}" if count else "nothing is wrong"
    lines.append(f"{NAME}{len(names)} node{'s' * (len(names) != 1)}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
