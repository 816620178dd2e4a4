"""Processes of srun and mpirun learn their ranks and where they meet."""

import pytest

from megatron.config import ConfigError
from megatron.features.launch.processes import first_of_nodes, variables_of_scheduler
from megatron.run.run import start_processes

SLURM = {
    "SLURM_JOB_ID": "21",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "2565996544.0;tcp://10.118.6.1,172.17.0.1:49481",
}


def test_slurm():
    assert variables_of_scheduler(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20000 + 21 * 7 + 2),
    }
    assert variables_of_scheduler({**SLURM, "SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a-1,b[2-3]", "a-1"), ("n[1,3],m", "n1"), ("r[01-04]-ib,x", "r01-ib")],
)
def test_first_of_slurms_nodes(nodes, first):
    assert first_of_nodes(nodes) == first


def test_open_mpi(monkeypatch):
    expected = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "10.118.6.1", "MASTER_PORT": "29500"}  # fmt: skip
    assert variables_of_scheduler(OPEN_MPI) == expected
    given = {**OPEN_MPI, "MASTER_ADDR": "node-1", "MASTER_PORT": "7"}
    assert variables_of_scheduler(given) == {
        **expected,
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "7",
    }
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    assert variables_of_scheduler(alone)["MASTER_ADDR"] == "127.0.0.1"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored at the end, whatever is set
        monkeypatch.delenv(name)
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert start_processes({}) == 3


def test_what_is_not_said_is_asked_for():
    assert variables_of_scheduler({}) == {}
    without = {name: value for name, value in OPEN_MPI.items() if "uri" not in name}
    with pytest.raises(ConfigError, match="-x MASTER_ADDR=NAME"):
        variables_of_scheduler(without)
    with pytest.raises(ConfigError, match="set MASTER_ADDR to its name"):
        variables_of_scheduler({**SLURM, "SLURM_STEP_NODELIST": "[1-2]"})
