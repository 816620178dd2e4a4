"""Counters of processors in a tree as Linux has it, and of GPUs.

The tree and the driver's library are made here, and show the arithmetic and the errors; what a real
GPU counts is shown by tests/gpu.
"""

import ctypes
import os

import pytest

from megatron.features.energy.callback import NvmlCounter, RaplCounter

RANGE = 262143328850


def zone(folder, name, what, microjoules):
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{what}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


@pytest.fixture
def powercap(tmp_path):
    """Two packages, one with memory; parts of packages, another interface, the platform."""
    zones = {
        "package": zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        "core": zone(tmp_path, "intel-rapl:0:0", "core", 5),
        "dram": zone(tmp_path, "intel-rapl:0:1", "dram", 500_000),
        "second": zone(tmp_path, "intel-rapl:1", "package-1", RANGE - 1_000_000),
        "psys": zone(tmp_path, "intel-rapl:2", "psys", 9),
        "mmio": zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000),
    }
    (tmp_path / "intel-rapl").mkdir()  # the driver itself, without a counter
    return tmp_path, zones


def test_processors_count_packages_and_memory_once(powercap):
    folder, zones = powercap
    counter = RaplCounter(folder)
    assert counter.joules() == 0
    zones["package"].write_text("3500000\n")
    zones["dram"].write_text("1500000\n")
    for name in ("core", "psys", "mmio"):
        zones[name].write_text("999000000\n")
    assert counter.joules() == pytest.approx(2.5 + 1)
    assert counter.joules() == pytest.approx(3.5)


def test_a_counter_begins_again_at_its_end(powercap):
    folder, zones = powercap
    counter = RaplCounter(folder)
    zones["second"].write_text("2000000\n")
    assert counter.joules() == pytest.approx(3 + 1e-6)
    zones["second"].write_text("2500000\n")
    assert counter.joules() == pytest.approx(3.5 + 1e-6)


def test_hosts_without_counters_or_rights(powercap, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no counters of processors"):
        RaplCounter(tmp_path / "missing")
    folder, zones = powercap
    if os.geteuid() == 0:
        real = type(zones["package"]).read_text

        def refused(path, *arguments):
            if path == zones["package"]:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments)

        monkeypatch.setattr(type(zones["package"]), "read_text", refused)
    else:
        zones["package"].chmod(0)
    with pytest.raises(PermissionError):
        RaplCounter(folder)


class Library:
    """Answers as the driver's library: statuses, and values by reference."""

    def __init__(self, status=0):
        self.millijoules, self.status, self.asked = 0, status, []
        self.nvmlErrorString = self._meaning

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        self.asked.append(uuid)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, value):  # noqa: N802
        value._obj.value = self.millijoules
        return self.status

    @staticmethod
    def _meaning(status):
        return b"Not Supported"


def test_gpus_count_millijoules(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    counter = NvmlCounter("GPU-1")
    library.millijoules = 2**40 + 500
    assert counter.joules() == (2**40 + 500) / 1000
    assert library.asked == [b"GPU-1"]


def test_gpus_without_a_counter_or_driver(monkeypatch):
    with pytest.raises(OSError, match="libmissing"):
        NvmlCounter("GPU-1", "libmissing.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(status=3))
    with pytest.raises(OSError, match=r"TotalEnergyConsumption gives 3 \(Not Supported\)"):
        NvmlCounter("GPU-1")
