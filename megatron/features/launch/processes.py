"""Start the processes of a run without a launcher. A node can start its own processes. Those that
srun or mpirun started, which are not told the address of rank 0, get the variables of
torch.distributed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import psutil
import torch

from megatron.config import ConfigError, ParallelFlags, Settings
from megatron.config.flags import ConfigResolver, build
from megatron.engine.environment import meeting, tasks_of_scheduler, world_size
from megatron.features.launch.flags import LaunchFlags
from megatron.training.stopping import stop_signals
from megatron.util.processes import death

logger = logging.getLogger(__name__)

MPI_PORT = 29500
"""Rendezvous port of mpirun's processes if MASTER_PORT is not set; the same as DeepSpeed's
default."""


@dataclass(frozen=True)
class Node:
    """This node's part of a run. ``rank`` is its position in ``addresses``, of which the first is
    the rendezvous address. A single node has no addresses."""

    processes: int
    rank: int = 0
    addresses: tuple[str, ...] = ()


def launch(settings: Settings, argv: Sequence[str] | None) -> int | None:
    """Start the processes of this node, with the same command line, if flags request several and no
    launcher has started them. This process then forwards signals to them, and exits with their exit
    code. Processes of srun or mpirun get the variables of torch.distributed. Raises ConfigError if
    the flags contradict a launcher, the node lacks GPUs, the node's rank is unclear, or the nodes
    cannot connect."""
    set_infiniband()
    resolver = ConfigResolver((ParallelFlags,), settings)
    whole = build(ParallelFlags, settings)
    flags = LaunchFlags.of(whole)
    if "WORLD_SIZE" in os.environ:
        world_size()
        _check_launched(flags, resolver)
        return None
    asked = flags.launched_processes
    if asked is None or asked == 1:
        if tasks_of_scheduler()[1] > 1:
            os.environ.update(variables_of_scheduler(os.environ))
        return None
    if "explain_config" in settings:
        return asked
    name, tasks = tasks_of_scheduler()
    nodes, processes = flags.num_nodes or 1, flags.num_gpus_per_node or 1
    resolver.check(
        tasks in (1, nodes),
        f"{name} is {tasks} and --num-nodes {nodes}: each of the {tasks} processes would start "
        "those of a node; start one on each node",
    )
    _check_gpus(processes, resolver)
    node = Node(processes)
    if nodes > 1:
        addresses = _addresses(flags, resolver)
        node = Node(processes, _node_rank(addresses), addresses)
        # Otherwise gloo uses the address of the host's name, which other nodes may not reach.
        interface = _interface(addresses[node.rank])
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = [*_program(), *(sys.argv[1:] if argv is None else argv)]
    sys.exit(run_node(node, command, flags.ctrl_port, whole.distributed_timeout_minutes))


def set_infiniband() -> None:
    """Translate ``ONEFLOW_COMM_NET_IB_ENABLE`` into NCCL's variable. Raises ConfigError if its
    value is invalid, or contradicts NCCL's variable."""
    theirs, ours = "ONEFLOW_COMM_NET_IB_ENABLE", "NCCL_IB_DISABLE"
    given = os.environ.get(theirs)
    if given is None:
        return
    if given not in ("0", "1"):
        raise ConfigError(f"{theirs}={given}: it must be 0 or 1; or unset it and set {ours}")
    wanted = "0" if given == "1" else "1"
    value = os.environ.get(ours)
    if value not in (None, wanted):
        raise ConfigError(f"{theirs}={given} contradicts {ours}={value}; unset one of them")
    if value is None:
        os.environ[ours] = wanted
        logger.info(f"{theirs}={given} is set as {ours}={wanted}: NCCL connects the nodes")


def _check_launched(flags: LaunchFlags, resolver: ConfigResolver) -> None:
    """Check the number of processes on this node. The total number is checked in ``feature.py``."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        local = os.environ.get(name)
        resolver.check(
            local is None or flags.num_gpus_per_node in (None, int(local)),
            f"{resolver.show('num_gpus_per_node')} contradicts the launcher, which has started "
            f"{local} processes on this node ({name}); make them equal, or start without it",
        )
    several = flags.node_ips is not None and (flags.num_nodes or 1) > 1
    if several and os.environ.get("MASTER_ADDR") != _addresses(flags, resolver)[0]:
        logger.info(f"{resolver.show('node_ips')} changes nothing: the launcher connects the nodes")


def _check_gpus(processes: int, resolver: ConfigResolver) -> None:
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return
    visible = torch.cuda.device_count()
    if visible < processes:
        which = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"{resolver.show('num_gpus_per_node')}: {visible} GPUs are visible on this node"
            + ("" if which is None else f" (CUDA_VISIBLE_DEVICES={which})")
        )


def _addresses(flags: LaunchFlags, resolver: ConfigResolver) -> tuple[str, ...]:
    nodes, given = flags.num_nodes or 1, flags.node_ips or ""
    addresses = tuple(word.strip() for word in given.split(",") if word.strip())
    resolver.check(
        len(addresses) >= nodes,
        f"{resolver.show('num_nodes')} needs --node-ips with the addresses of {nodes} nodes, "
        + (f"and {resolver.show('node_ips')} has {len(addresses)}" if given else "as in a,b"),
    )
    return addresses[:nodes]


def _node_rank(addresses: Sequence[str]) -> int:
    """Return this node's rank: NODE_RANK, or the position of its own address in the list."""
    listed, given = ",".join(addresses), os.environ.get("NODE_RANK")
    if given is not None:
        if not given.isdecimal() or int(given) >= len(addresses):
            raise ConfigError(
                f"NODE_RANK={given}: of the {len(addresses)} nodes --node-ips {listed} it must be "
                f"one of 0 to {len(addresses) - 1}"
            )
        return int(given)
    own = [rank for rank, address in enumerate(addresses) if _is_here(address)]
    if len(own) != 1:
        problem = "none of them is" if not own else "several of them are"
        raise ConfigError(
            f"--node-ips {listed}: {problem} this node's, whose addresses are "
            f"{', '.join(_own_addresses())}; correct the list, or set NODE_RANK on each node"
        )
    return own[0]


def _is_here(address: str) -> bool:
    """Return whether an address or name belongs to this node, i.e. a socket can be bound to it."""
    try:
        places = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"--node-ips: {address} is not known here: {error.strerror}") from error
    for family, kind, protocol, _, place in places:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def _own_addresses() -> dict[str, str]:
    """Return the interface of each address of this node."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _interface(address: str) -> str | None:
    """Return the interface of an address or name, or None if it is not on this node."""
    own = _own_addresses()
    with contextlib.suppress(socket.gaierror):
        for *_, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            if place[0] in own:
                return own[str(place[0])]
    return None


def _program() -> list[str]:
    """Return the arguments after ``python`` that start this program again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec else [sys.argv[0]]


def run_node(node: Node, command: Sequence[str], port: int, timeout_minutes: float) -> int:
    """Start the processes of a node like torchrun does, wait for them, and return the exit code of
    the first that failed, or 0. Raises ConfigError if the nodes do not connect in time.

    Args:
        command: arguments after ``python``.
        port: rendezvous port of the first node. A run on one node uses a free port instead.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Use torchrun's default, so that sums have the same bits whichever of the two starts the run.
    if node.processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The failed process has printed its own error; torch's traceback of this process adds nothing.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    several = len(node.addresses) > 1
    first = node.addresses[0] if several else "localhost"
    timeout = timedelta(minutes=timeout_minutes)
    timed = {"timeout": int(timeout.total_seconds())}
    config = LaunchConfig(
        min_nodes=max(1, len(node.addresses)),  # wait for all nodes
        max_nodes=max(1, len(node.addresses)),
        nproc_per_node=node.processes,
        run_id=first if several else str(uuid4()),
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=f"{first}:{port if several else 0}",
        rdzv_configs={**timed, "rank": node.rank} if several else timed,
        local_addr=node.addresses[node.rank] if several else "localhost",
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # other signals are forwarded
    )
    who = f"node {node.rank} of {len(node.addresses)}"
    with _forwarded_signals(), meeting(who, first, port, "--ctrl-port", timeout):
        try:
            elastic_launch(config, sys.executable)("-u", *command)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode >= 0:
                return failure.exitcode
            # the process itself has reported the user's Ctrl-C
            if failure.exitcode != -signal.SIGINT:
                print(f"error: process {rank} {death(failure.exitcode)}", file=sys.stderr)
            return 128 - failure.exitcode
    return 0


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[None]:
    """Forward the signals that stop a run to the processes started here. Without any, the signals
    end this process. A thread does this, since the main thread may be waiting inside torch."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def forward() -> None:
        while received := reader.recv(1):
            children = psutil.Process().children()
            if not children:
                os._exit(128 + received[0])
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.send_signal(received[0])

    threading.Thread(target=forward, daemon=True).start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()


def variables_of_scheduler(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch.distributed, from those of a process of srun or mpirun.
    Variables that are already set keep their values. Return an empty dictionary if neither started
    this process. Raises ConfigError if the address of rank 0 cannot be determined."""
    if "SLURM_STEP_NODELIST" in given and "SLURM_PROCID" in given:
        variables = _slurm(given)
    elif "OMPI_COMM_WORLD_RANK" in given:
        variables = _open_mpi(given)
    else:
        return {}
    return {name: given.get(name, value) for name, value in variables.items()}


def _slurm(given: Mapping[str, str]) -> dict[str, str]:
    # Derive the port from job and step: two steps of a job may run on the same nodes.
    number = int(given.get("SLURM_JOB_ID", "0")) * 7 + int(given.get("SLURM_STEP_ID", "0"))
    nodes = given["SLURM_STEP_NODELIST"]
    return {
        "RANK": given["SLURM_PROCID"],
        "WORLD_SIZE": given["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": given["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _tasks_of_node(
            given["SLURM_STEP_TASKS_PER_NODE"], int(given.get("SLURM_NODEID", "0"))
        ),
        "MASTER_ADDR": given.get("MASTER_ADDR") or first_of_nodes(nodes),
        "MASTER_PORT": str(20000 + number % 20000),
    }


def first_of_nodes(nodes: str) -> str:
    """Return the first name of a Slurm node list, such as ``node[07-09,12],login``. Raises
    ConfigError if it is malformed."""
    match = re.fullmatch(r"([^\[\],]+)(?:\[(\d+)(?:[-,][-,\d]*)?\]([^\[\],]*))?(?:,.*)?", nodes)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes}: the first node is not clear; set MASTER_ADDR to its name"
        )
    return "".join(part or "" for part in match.groups())


def _tasks_of_node(counts: str, node: int) -> str:
    """Return the count for a node from Slurm's list of counts, such as ``4(x2),3``."""
    numbers: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        numbers += [count] * int(times or 1)
    return numbers[min(node, len(numbers) - 1)]


def _open_mpi(given: Mapping[str, str]) -> dict[str, str]:
    size, local = given["OMPI_COMM_WORLD_SIZE"], given["OMPI_COMM_WORLD_LOCAL_SIZE"]
    # The address of mpirun itself, which usually runs on the first node; MASTER_ADDR overrides it.
    uri = re.search(r"tcp://([^,:]+)", given.get("OMPI_MCA_orte_hnp_uri", ""))
    address = given.get("MASTER_ADDR") or ("127.0.0.1" if size == local else uri and uri[1])
    if not address:
        raise ConfigError(
            "mpirun does not say where its first process is; give it -x MASTER_ADDR=NAME, the name "
            "of the first node"
        )
    return {
        "RANK": given["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": given["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(MPI_PORT),
    }
