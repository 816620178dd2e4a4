"""Processes that srun or mpirun has started: their ranks, and where they meet.

Both say to a process which one it is, and not where the first one listens; torch.distributed needs
both, in the variables that torchrun and deepspeed set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.config import ConfigError

MPI_PORT = 29500
"""Port where processes of mpirun meet unless MASTER_PORT says otherwise; DeepSpeed's default,
too."""


def variables_of_scheduler(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of torch.distributed, from the variables of a process of srun or mpirun;
    those that are given already keep their values. Empty if neither has started this process.
    Raises ConfigError where they do not say where the first process is."""
    if "SLURM_STEP_NODELIST" in given and "SLURM_PROCID" in given:
        variables = _slurm(given)
    elif "OMPI_COMM_WORLD_RANK" in given:
        variables = _open_mpi(given)
    else:
        return {}
    return {name: given.get(name, value) for name, value in variables.items()}


def _slurm(given: Mapping[str, str]) -> dict[str, str]:
    # Two steps of a job may run at a time on the same nodes.
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
    """The first name of slurm's notation, such as ``node[07-09,12],login``. Raises ConfigError if
    it is something else."""
    match = re.fullmatch(r"([^\[\],]+)(?:\[(\d+)[-,\d]*\]([^\[\],]*))?(?:,.*)?", nodes)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes}: the first node is not clear; set MASTER_ADDR to its name"
        )
    return "".join(part or "" for part in match.groups())


def _tasks_of_node(counts: str, node: int) -> str:
    """The place of a node in slurm's notation of counts, such as ``4(x2),3``."""
    numbers: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        numbers += [count] * int(times or 1)
    return numbers[min(node, len(numbers) - 1)]


def _open_mpi(given: Mapping[str, str]) -> dict[str, str]:
    size, local = given["OMPI_COMM_WORLD_SIZE"], given["OMPI_COMM_WORLD_LOCAL_SIZE"]
    # mpirun's own address; it runs on the first node, or MASTER_ADDR says where that is.
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
