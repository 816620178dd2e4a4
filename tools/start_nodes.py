#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Checks the nodes of a hostfile, and starts DeepSpeed's launcher on them.

    python tools/start_nodes.py --hostfile hostfile --exclude node-3 \
        deepspeed pretrain_gpt.py --deepspeed_config deepspeed_configs/ds_zero1.json ...
    python tools/start_nodes.py --hostfile hostfile --min-nodes 2 \
        deepspeed --launcher openmpi pretrain_gpt.py ...

Mistakes in the hostfile and in the choice of nodes are named before anything starts. Every node is
asked by ssh: it must answer, and have the current folder and this Python. The ranks of each node
are printed. With --min-nodes nodes that do not answer are left out, as long as so many remain: a
run that is started again after a node was lost continues on the others. pdsh then also notices a
lost node within 15 seconds. SIGTERM, SIGUSR1 and Ctrl-C let the processes on all nodes save and
end. What follows `deepspeed` is passed on.

Exit status: that of deepspeed; 2 if the command line or the hostfile is wrong; 3 if too few nodes
can take part.
"""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron.apps.doctor.hostfile import Slots, as_include, chosen, read_hostfile
from megatron.config import ConfigError, FlagParser
from megatron.config.flags import POSITIVE, build, option
from megatron.features.resilience.restart.nodes import ask, keep_alive, stop
from megatron.util.errors import RESTART_STATUS, FaultError, one_line, outlive_output

_MPI = ("openmpi", "mpich", "impi", "mvapich")
"""Launchers that take whole hostfiles only."""


@dataclass(frozen=True)
class NodesConfig:
    """Nodes: which of them, and when to leave one out."""

    hostfile: str = option("/job/hostfile")
    """File with a line NAME slots=N for each node."""
    include: str = option("")
    """The nodes to use, NAME or NAME:SLOT,SLOT, with @ between two."""
    exclude: str = option("")
    """The nodes or slots not to use, written likewise."""
    min_nodes: int | None = option(None, bounds=POSITIVE, derived="all of them")
    """Leave out nodes that cannot take part, as long as so many remain."""
    num_gpus: int | None = option(None, bounds=POSITIVE, derived="all of its slots")
    """Processes on each node, on its first slots."""
    ssh_port: int | None = option(None, bounds=POSITIVE)
    """Port of sshd on the nodes, unless ~/.ssh/config has it."""
    ssh_timeout: int = option(10, bounds=POSITIVE)
    """Seconds for which a node may not answer."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = next((i for i, word in enumerate(words) if os.path.basename(word) == "deepspeed"), None)
    own, command = (words, []) if place is None else (words[:place], words[place:])
    settings = FlagParser(NodesConfig, description=__doc__).settings(own)
    config: NodesConfig = build(NodesConfig, settings)
    try:
        if not command:
            raise ConfigError("give the command of the launcher: deepspeed pretrain_gpt.py ...")
        program = shutil.which(command[0])
        if program is None:
            raise ConfigError(f"{command[0]} is not installed: pip install deepspeed")
        config = with_ssh_port(config, command)
        hostfile = read_hostfile(config.hostfile)
        nodes = first_slots(chosen(hostfile, config.include, config.exclude), config.num_gpus)
        nodes = reachable(nodes, config)
        options = launcher_options(nodes, hostfile, config, launcher_of(command))
    except FaultError as error:
        tell(f"error: {one_line(error)}")
        sys.exit(RESTART_STATUS)
    except (ValueError, OSError) as error:
        tell(f"error: {one_line(error)}")
        sys.exit(2)
    outlive_output()
    tell(ranks(nodes))
    keep_alive(os.environ)
    sys.exit(run([program, *options, *command[1:]], nodes, config))


def with_ssh_port(config: NodesConfig, command: Sequence[str]) -> NodesConfig:
    """With the port that deepspeed is told, unless there is one of ours."""
    port = value_of("--ssh_port", command, "")
    if not port or config.ssh_port is not None:
        return config
    if not port.isdecimal() or not int(port):
        raise ConfigError(f"--ssh_port {port}: expected the number of a port")
    return replace(config, ssh_port=int(port))


def tell(text: str) -> None:
    print(f"start_nodes.py: {text}", file=sys.stderr)


def first_slots(nodes: Slots, count: int | None) -> Slots:
    """Return the first so many slots of each node. Raises ConfigError if one has fewer."""
    for name, slots in nodes.items():
        if len(slots) < (count or 0):
            raise ConfigError(f"--num-gpus {count}: {name} has {len(slots)} slots; give fewer")
    return {name: slots[:count] for name, slots in nodes.items()}


def reachable(nodes: Slots, config: NodesConfig) -> Slots:
    """The nodes that can take part. If too few can, raises an error that names the others:
    FaultError if they may come back, otherwise ConfigError."""
    options = [] if config.ssh_port is None else ["-p", str(config.ssh_port)]
    refusals = ask(list(nodes), os.getcwd(), sys.executable, config.ssh_timeout, options)
    lost = {refusal.name for refusal in refusals}
    left = {name: slots for name, slots in nodes.items() if name not in lost}
    least = len(nodes) if config.min_nodes is None else config.min_nodes
    if len(left) < max(1, least):
        if not refusals:
            raise ConfigError(f"--min-nodes {least}: only {len(left)} nodes are chosen")
        reasons = " / ".join(map(str, refusals))
        text = f"{len(left)} of {len(nodes)} nodes can take part, {least} must; {reasons}"
        if left and config.min_nodes is None:
            text += f" / or start without: --exclude {'@'.join(sorted(lost))}"
        raise (FaultError if all(refusal.gone for refusal in refusals) else ConfigError)(text)
    for refusal in refusals:
        tell(f"warning: left out {refusal}")
    return left


def run(command: Sequence[str], nodes: Slots, config: NodesConfig) -> int:
    """Runs deepspeed to its end, and returns its exit status. A signal that asks to stop reaches
    the processes on the nodes, which save and end: deepspeed would first cut the connections over
    which they print. A second signal is deepspeed's."""
    started: list[subprocess.Popen[bytes]] = []
    handed: list[int] = []

    def hand_on(number: int, _: object) -> None:
        handed.append(number)
        if not started:
            return  # it is being started, and hears of it then
        if launcher_of(command) == "pdsh" and len(handed) == 1:
            tell(f"{signal.Signals(number).name}: the processes on all nodes save and end")
            options = [] if config.ssh_port is None else ["-p", str(config.ssh_port)]
            stop(list(nodes), launch_of(command, nodes), config.ssh_timeout, options)
        else:
            started[0].send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    started.append(subprocess.Popen(command, start_new_session=True))
    if handed:
        hand_on(handed.pop(), None)
    status = started[0].wait()
    return status if status >= 0 else 128 - status


def launch_of(command: Sequence[str], nodes: Slots) -> str:
    """A regular expression for the process of this run that deepspeed starts on each node."""
    world = base64.urlsafe_b64encode(json.dumps(nodes).encode()).decode()
    program = "^[^ ]*python[^ ]* -u -m deepspeed.launcher.launch"  # not the shell that starts it
    return f"{program} --world_info={world} .*--master_port={port_of(command)}( |$)"


def launcher_of(command: Sequence[str]) -> str:
    return value_of("--launcher", command, "pdsh").lower()


def port_of(command: Sequence[str]) -> str:
    return value_of("--master_port", command, "29500")


def value_of(flag: str, command: Sequence[str], default: str) -> str:
    """Value of a flag of deepspeed."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return default


def launcher_options(
    nodes: Slots, hostfile: Slots, config: NodesConfig, launcher: str
) -> list[str]:
    """Options that tell deepspeed the nodes."""
    options = [] if config.ssh_port is None else ["--ssh_port", str(config.ssh_port)]
    if len(nodes) == 1 and not is_here(*nodes):
        options.append("--force_multi")  # deepspeed starts a single node's processes here
    if nodes == hostfile:
        return ["--hostfile", os.path.abspath(config.hostfile), *options]
    if launcher not in _MPI:
        choice = ["--include", as_include(nodes)]
        return ["--hostfile", os.path.abspath(config.hostfile), *choice, *options]
    for name, slots in nodes.items():
        if slots != hostfile[name][: len(slots)]:
            raise ConfigError(
                f"--launcher {launcher} cannot take slots {slots} of {name}: it takes the first "
                "ones; choose those, or use pdsh"
            )
    # mpirun reads the file later; it is there as long as this process.
    file = os.memfd_create("hostfile", 0)
    text = "".join(f"{name} slots={len(slots)}\n" for name, slots in nodes.items())
    os.write(file, text.encode())
    return ["--hostfile", f"/proc/{os.getpid()}/fd/{file}", *options]


def is_here(name: str) -> bool:
    """True if a name or address is this machine's."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return name == socket.gethostname()
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return True
    return False


def ranks(nodes: Slots) -> str:
    """Ranks of each node."""
    ends = list(accumulate(map(len, nodes.values())))
    places = [
        f"{name} {end - len(slots)}" + (f"-{end - 1}" if len(slots) > 1 else "")
        for (name, slots), end in zip(nodes.items(), ends, strict=True)
    ]
    return f"ranks: {', '.join(places)}"


if __name__ == "__main__":
    main()
