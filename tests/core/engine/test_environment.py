"""What the launcher has set is believed; what it has not set is noticed."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
from configs import run_config

from megatron.config import ConfigError, ParallelConfig
from megatron.config.engine import FastPathsConfig
from megatron.engine import environment
from megatron.engine.environment import (
    deterministic_kernels,
    distributed,
    training_device,
    world_size,
)
from megatron.parallel.meeting import Meeting


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


def test_one_of_several_processes_has_a_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    message = "WORLD_SIZE=2 in the environment without RANK"
    with pytest.raises(ConfigError, match=message), distributed(ParallelConfig()):
        pass


def test_a_local_rank_that_contradicts_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    message = "--local_rank 0 contradicts LOCAL_RANK=1"
    with pytest.raises(ConfigError, match=message), distributed(ParallelConfig(local_rank=0)):
        pass


def test_gloo_in_a_pipeline_on_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "training_device", lambda: torch.device("cuda", 0))
    config = ParallelConfig(distributed_backend="gloo", pipeline_model_parallel_size=2)
    message = "--distributed-backend gloo, --pipeline-model-parallel-size 2: gloo cannot send"
    with pytest.raises(ConfigError, match=message), distributed(config):
        pass


def test_groups_of_gloo_are_not_split_from_a_group_that_is_bound_to_a_gpu(monkeypatch):
    """DeepSpeed binds the group of all ranks to the GPU of its rank, whatever the backend."""

    initialise = deepspeed.init_distributed

    def bind(**options: Any) -> None:
        initialise(**options)
        group_of_all().bound_device_id = torch.device("cuda", 0)

    def group_of_all() -> Any:
        return torch.distributed.group.WORLD

    monkeypatch.setattr("deepspeed.init_distributed", bind)
    with distributed(ParallelConfig()):
        assert group_of_all().bound_device_id is None


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "x")  # restored after the test
        monkeypatch.delenv(name)
    import torch._inductor.config as compiler

    with compiler.patch(deterministic=False):
        yield compiler


def test_deterministic_kernels(gpus):
    config = run_config(fast_paths=FastPathsConfig(deterministic_mode=True))
    with deterministic_kernels(config):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1" and gpus.deterministic
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_that_contradicts_deterministic_kernels_is_refused(monkeypatch, gpus):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    config = run_config(fast_paths=FastPathsConfig(deterministic_mode=True))
    with pytest.raises(ConfigError, match="contradicts CUBLAS_WORKSPACE_CONFIG=:0:0"):
        deterministic_kernels(config).__enter__()


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_that_share_layers_compile_without_measuring(gpus, tensor):
    """Else their copies of a norm may have kernels that add in other orders."""
    config = run_config(parallel=ParallelConfig(tensor_model_parallel_size=tensor))
    with deterministic_kernels(config):
        assert gpus.deterministic == (tensor == 2)
        assert not torch.are_deterministic_algorithms_enabled()


FAULTS = """
import resource, torch
from megatron.engine import environment
environment.keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(sum(faults() for _ in range(10)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's malloc")
def test_memory_of_large_tensors_is_kept():
    """A tensor finds the pages of one before it, at most two places next to the first. Without the
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
    monkeypatch.setattr(environment, "run_meeting", Meeting)  # the others are not started
    monkeypatch.setattr(environment, "prepare_deepspeed", lambda: None)
    monkeypatch.setattr("deepspeed.init_distributed", start_deepspeed)
    monkeypatch.setattr(environment, "own_cores", lambda where: nullcontext(seen.append(where)))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(Reached), distributed(ParallelConfig()):
        pass
    assert seen == [device, device, str(index), str(index)]
