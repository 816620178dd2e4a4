"""What is recorded of collectives, and where it is written."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.features.resilience.watch.reports import (
    COLLECTIVES,
    record_collectives,
    write_collectives,
)

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of a machine with a GPU, where nobody has set up the recorder."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return kept


def given(environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in NAMES if name in environment}


def test_nccl_records_its_collectives(environment: dict[str, str], tmp_path: Path) -> None:
    record_collectives(str(tmp_path / "save"))
    assert given(environment) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "save" / COLLECTIVES / "rank_"),
    }
    assert (tmp_path / "save" / COLLECTIVES).is_dir(), "NCCL makes no folder"


def test_the_environment_wins(environment: dict[str, str], tmp_path: Path) -> None:
    """By the names that torch had before, too: it warns of those and takes the newer ones."""
    own = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    environment.update(own)
    record_collectives(str(tmp_path))
    assert given(environment) == own


def test_without_gpus_nothing_is_set(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record_collectives(str(tmp_path / "save"))
    assert not given(environment) and not (tmp_path / "save").exists()


def test_torch_knows_these_names() -> None:
    """As its libraries do; those of NCCL are only in builds that have it."""
    folder = Path(torch.__file__).parent
    headers = folder / "include/torch/csrc/distributed/c10d"
    known = (headers / "FlightRecorder.hpp").read_text()
    known += (headers / "ProcessGroupNCCL.hpp").read_text()
    assert '{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}' in known
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in known


_TWO_RANKS = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.features.resilience.watch.reports import write_collectives

save, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{save}/meet", rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.broadcast(torch.ones(3), 0, async_op=True)  # rank 1 is not there yet
write_collectives(save, rank)
Path(save, f"written-{rank}").touch()
while not Path(save, f"written-{1 - rank}").exists():
    pass
"""


@pytest.mark.proof
def test_the_records_say_which_rank_is_missing(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", _TWO_RANKS, str(tmp_path), str(rank)])
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    records = tmp_path / COLLECTIVES
    found = [pickle.loads((records / f"rank_{rank}").read_bytes()) for rank in (0, 1)]
    begun = [[entry["profiling_name"] for entry in record["entries"]] for record in found]
    assert begun == [["gloo:all_reduce", "gloo:broadcast"], ["gloo:all_reduce"]]
    assert not found[0]["entries"][1]["retired"]


def test_without_other_ranks_nothing_is_written(tmp_path: Path) -> None:
    if torch.distributed.is_initialized():
        pytest.skip("this process has others already")
    write_collectives(str(tmp_path), 0)
    assert not list(tmp_path.iterdir())
