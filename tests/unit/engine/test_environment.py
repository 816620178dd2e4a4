"""What the launcher has set is believed; what it has not set is noticed."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron.config import ConfigError, ParallelConfig
from megatron.engine import environment
from megatron.engine.environment import distributed, training_device, world_size


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_know_nothing_of_each_other_are_refused(monkeypatch, name):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world_size() == 1
    monkeypatch.setenv(name, "1")
    assert world_size() == 1
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"{name} is 4 and WORLD_SIZE is not set"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world_size() == 4


@pytest.mark.parametrize(
    "name, value",
    [
        *(("RANK", value) for value in ("abc", "", "-1", "nan")),
        *(("WORLD_SIZE", value) for value in ("0", "abc", "", "-2", "1e9", "9" * 5000)),
        *(("LOCAL_RANK", "x"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_SIZE", "nan")),
        ("SLURM_STEP_NUM_TASKS", "abc"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}=.* in the environment: launchers set it to a"):
        world_size()


def test_a_rank_is_below_the_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 must be below WORLD_SIZE=2"):
        world_size()


def test_a_local_rank_that_contradicts_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    message = "--local_rank 0 contradicts LOCAL_RANK=1"
    with pytest.raises(ConfigError, match=message), distributed(ParallelConfig(local_rank=0)):
        pass


FAULTS = """
import resource, torch
from megatron.engine import environment
environment._keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(sum(faults() for _ in range(10)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's malloc")
def test_memory_of_large_tensors_is_kept():
    """A tensor finds the pages of one before it, at most two places beside the first. Without the
    setting each is faulted in again, 16,384 pages where they are not huge, ten times here."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    assert int(done.stdout) < 2.5 * 2**14, done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_configuration_of_the_allocator_is_kept(monkeypatch, name):
    for one in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    environment._let_segments_grow()
    found = {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")}
    assert found == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 3)])
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch, visible, index):
    """slurm's --gpus-per-task shows each rank one; DeepSpeed goes by LOCAL_RANK."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    device = torch.device("cuda", index)
    assert training_device() == device

    class Reached(Exception):
        """As far as there is no GPU."""

    names, seen = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), []

    def start_deepspeed(**_):
        seen.extend(os.environ[name] for name in names)
        raise Reached

    def set_device(device):  # which allocates nothing
        seen.append(device)
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    alone = SimpleNamespace(compare=lambda facts: None)  # the other processes are not started
    monkeypatch.setattr(environment, "Agreement", lambda timeout: alone)
    monkeypatch.setattr(environment, "prepare_deepspeed", lambda: None)
    monkeypatch.setattr("deepspeed.init_distributed", start_deepspeed)
    monkeypatch.setattr(environment, "own_cores", lambda where: nullcontext(seen.append(where)))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(Reached), distributed(ParallelConfig()):
        pass
    assert seen == [device, device, str(index), str(index)]
