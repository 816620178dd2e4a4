"""The joules of a run are those of all its counters, each read by one rank."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from training_jobs import TINY

from megatron.features.energy import callback as meter
from megatron.features.energy.callback import Joules, RunEnergy
from megatron.parallel.mesh import Group, Mesh
from megatron.run.run import parse_run
from megatron.training.build import train

GPUS = ("GPU-a", "GPU-b", "GPU-b", "GPU-a")
HOSTS = ("one", "one", "one", "two")


class Clock:
    """A counter that is read from a tree made here, and counts as many joules each time."""

    def __init__(self, joules: float) -> None:
        self.step, self.now = joules, 1000.0

    def joules(self) -> float:
        self.now += self.step
        return self.now


def shared() -> tuple[Joules, Joules, list[str]]:
    """What four ranks on two hosts find, of which two share a GPU."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = mock.Mock(spec=torch.device, type="cuda")
    made: list[str] = []

    def gpu(uuid: str) -> Clock:
        made.append(uuid)
        return Clock(10.0)

    def processors() -> Clock:
        made.append(HOSTS[rank])
        if HOSTS[rank] == "two":
            raise PermissionError(13, "Permission denied", "/sys/x")
        return Clock(1.0)

    mesh = Mesh(Group(tuple(range(4)), rank, dist.group.WORLD))
    with (
        mock.patch.object(meter, "uuid_of", lambda device: GPUS[rank]),
        mock.patch.object(socket, "gethostname", lambda: HOSTS[rank]),
        mock.patch.object(meter, "NvmlCounter", gpu),
        mock.patch.object(meter, "RaplCounter", processors),
        mock.patch.object(torch.Tensor, "to", lambda self, device: self),
    ):
        energy = RunEnergy(mesh, device)
        first, second = energy.used(), energy.used()
        energy.close()
    return first, second, made


def test_what_ranks_share_is_counted_once(pool):
    found = pool.run(4, shared)
    # The first reading of a counter is where it begins.
    assert {first for first, _, _ in found} == {Joules(30.0, 1.0)}
    assert {second for _, second, _ in found} == {Joules(60.0, 2.0)}
    assert [made for *_, made in found] == [
        ["GPU-a", "one"], ["GPU-b"], [], ["GPU-a", "two"],
    ]  # fmt: skip


def trained(argv: list[str]) -> None:
    with mock.patch.object(meter, "RaplCounter", lambda: Clock(3600.0)):
        train(parse_run(None, argv, "gpt"))


@pytest.mark.proof
def test_sums_continue_on_a_resume_and_count_lost_steps(pool, tmp_path):
    save = tmp_path / "save"
    flags = [*TINY, "--save", str(save), "--load", str(save), "--log-interval", "1"]
    flags += ["--cost-per-gpu-hour", "3600", "--grid-gco2-per-kwh", "1000", "--train-iters", "6"]
    pool.run(2, trained, [*flags, "--save-interval", "2", "--exit-interval", "4"])
    first = rows(save)
    (save / "latest").write_text("global_step2")
    pool.run(2, trained, flags)
    second = rows(save)
    assert [row["iteration"] for row in second] == [1, 2, 3, 4, 5, 6]
    joules = [row["energy_joules"] for row in second]
    assert joules[0] == 3600 and joules == sorted(joules)
    # Two steps were lost, and what they used was not.
    assert joules[2] > first[-1]["energy_joules"]
    for row in second:
        assert row["co2_grams"] == pytest.approx(row["energy_joules"] / 3600)
        assert row["cost"] == pytest.approx(row["device_seconds"])
        assert row["processors_joules"] == row["energy_joules"] and "devices_joules" not in row
    kept = json.loads((save / "run" / "totals.json").read_text())
    assert kept["processors_joules"] == joules[-1]
    assert second[-1]["seconds_left"] == second[-1]["cost_left"] == 0


def rows(save: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == "train"]
