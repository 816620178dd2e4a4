"""megatron/apps/doctor: what is judged wrong, and what a node says of its GPUs."""

import copy

import pytest

from megatron.apps.doctor import probe
from megatron.apps.doctor.examination import rounds
from megatron.apps.doctor.findings import Link, judge_clocks, judge_links, judge_reports

GPU = {
    "index": "0",
    "name": "NVIDIA H100",
    "driver_version": "580.1",
    "temperature.gpu": "40",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "No",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
}
HEALTHY = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "code": {"pretrain_gpt.py": "a"},
    "data": {"text.bin": "4 bytes, b"},
    "places": {"/tmp": {"folder": "/tmp", "free": 2**40, "refused": "", "inodes": 0.5}},
    "shm": 2**33,
    "nofile": 2**20,
    "memlock": -1,
    "infiniband": True,
    "own_address": "10.0.0.1",
    "interface": "",
    "gpus": {"rows": [GPU], "error": "", "xids": []},
}


def nodes(*changed):
    """Reports of n1, n2, n3, of which n2 has other values: a path of keys and a value each."""
    reports = {name: copy.deepcopy(HEALTHY) for name in ("n1", "n2", "n3")}
    for *path, value in changed:
        place = reports["n2"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    return reports


def test_healthy_nodes():
    assert judge_reports(nodes(), free_gib=1) == []


@pytest.mark.parametrize(
    "changed, check, words",
    [
        (("python", "3.12.1"), "version of Python", "3.12.1 (3.11.7 on the other nodes)"),
        (("packages", "torch", "2.12.0"), "version of torch", "pip install torch==2.13.0"),
        (("packages", "torch", None), "version of torch", "not installed"),
        (("code", "pretrain_gpt.py", "b"), "code", "pretrain_gpt.py differs (the same"),
        (("data", "text.bin", None), "data text.bin", "cannot be read"),
        (("data", "text.bin", "5 bytes, c"), "data text.bin", "4 bytes, b on the other nodes"),
        (("places", "/tmp", "free", 2**29), "folder /tmp", "0.50 GiB are free (at least 1)"),
        (("places", "/tmp", "inodes", 0.001), "folder /tmp", "0.1% of its inodes"),
        (("places", "/tmp", "refused", "Permission denied"), "folder /tmp", "Permission denied"),
        (("shm", 2**26), "/dev/shm", "64 MiB"),
        (("nofile", 1024), "open files", "at most 1024"),
        (("memlock", 65536), "locked memory", "65,536 bytes (unlimited for InfiniBand)"),
        (("own_address", "127.0.1.1"), "address of its own name", "GLOO_SOCKET_IFNAME"),
        (("gpus", "rows", []), "GPUs", "none (1 x NVIDIA H100 on the other nodes)"),
        (("gpus", "error", "No devices\nwere found"), "GPUs", "No devices (nvidia-smi answers)"),
        (("gpus", "xids", ["Xid (PCI:0000:18): 79, GPU has fallen off"]), "GPUs", "Xid (PCI:0000"),
        (("gpus", "rows", 0, "driver_version", "570.9"), "driver of the GPUs", "580.1 on the"),
        (("gpus", "rows", 0, "retired_pages.pending", "Yes"), "GPU 0", "pages wait"),
        *(
            (("gpus", "rows", 0, key, value), "GPU 0", words)
            for key, value, words in (
                ("ecc.errors.uncorrected.volatile.total", "3", "3 uncorrected ECC errors"),
                ("clocks_throttle_reasons.hw_thermal_slowdown", "Active", "at 40 degrees"),
                ("clocks_throttle_reasons.hw_power_brake_slowdown", "Active", "power"),
            )
        ),
    ],
)
def test_one_node_is_named(changed, check, words):
    found = judge_reports(nodes(changed), free_gib=1)
    assert [(one.node, one.check) for one in found] == [("n2", check)]
    assert words in str(found[0]) and found[0].remedy


def test_a_gpu_without_counters():
    """Consumer cards have none."""
    missing = ("gpus", "rows", 0, "ecc.errors.uncorrected.volatile.total", "[N/A]")
    assert judge_reports(nodes(missing), free_gib=1) == []


def test_clocks():
    """n4 may be less than a second behind, as far as that can be told."""
    offsets = {"n1": 5.0, "n2": 5.5, "n3": 3.4, "n4": 3.9, "n5": 5.0}
    found = judge_clocks({name: (offset, 0.2) for name, offset in offsets.items()})
    assert [(one.node, one.value) for one in found] == [("n3", "1.6 s behind the other nodes")]


NORMAL, SLOW = Link(1e9, 1e-4), Link(1e7, 1e-4)


def links(*slow, names=("n1", "n2", "n3", "n4"), link=SLOW):
    return {(a, b): link if (a, b) in slow else NORMAL for a in names for b in names if a != b}


def found(measured):
    return [(one.node, one.check, one.value) for one in judge_links(measured)]


def test_links():
    assert found(links()) == []
    assert found(links(("n2", "n3"))) == [("n2 -> n3", "bandwidth", "10.0 MB/s")]
    of_n2 = [("n2", name) for name in ("n1", "n3", "n4")]
    to_n2 = [pair[::-1] for pair in of_n2]
    assert found(links(*of_n2)) == [("n2", "bandwidth", "sends 10.0 MB/s")]
    assert found(links(*to_n2)) == [("n2", "bandwidth", "receives 10.0 MB/s")]
    assert found(links(*of_n2, *to_n2)) == [("n2", "bandwidth", "sends 10.0 MB/s")] + [
        ("n2", "bandwidth", "receives 10.0 MB/s")
    ]
    answers = ("n3", "n2")  # delayed by what n2 sends
    assert found(links(*of_n2, answers)) == [("n2", "bandwidth", "sends 10.0 MB/s")]
    other = ("n3", "n4")
    assert found(links(*of_n2, other))[1:] == [("n3 -> n4", "bandwidth", "10.0 MB/s")]


def test_far_links():
    far = Link(1e9, 2.1e-3)
    assert found(links(("n1", "n4"), link=far)) == [
        ("n1 -> n4", "latency", "2,100 us there and back")
    ]
    assert found(links(("n1", "n4"), link=Link(1e9, 1e-3))) == []  # not a millisecond more


def test_two_nodes_have_their_other_direction():
    pair = {"names": ("n1", "n2")}
    assert found(links(**pair)) == []
    assert found(links(("n2", "n1"), **pair)) == [("n2 -> n1", "bandwidth", "10.0 MB/s")]
    assert found(links(("n1", "n2"), ("n2", "n1"), **pair)) == []


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_every_pair_meets_once(count):
    met = [frozenset(pair) for one in rounds(count) for pair in one]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for one in rounds(count):
        players = [player for pair in one for player in pair]
        assert len(players) == len(set(players))


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs that a node finds: name and what each runs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(**scripts):
        for name, script in scripts.items():
            file = tmp_path / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)

    return write


LOG = """[    1.0] NVRM: loading NVIDIA UNIX Open Kernel Module
[   10.0] NVRM: Xid (PCI:0000:18:00): 31, pid=12, name=python, MMU Fault
[   11.0] NVRM: Xid (PCI:0000:18:00): 48, DBE (double bit error)
[   12.0] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.
[   13.0] NVRM: Xid (PCI:0000:2a:00): 13, Graphics Exception"""


def test_the_interface_that_the_launching_side_names(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert probe.report("/none", [], [], [])["interface"] == ""
    assert probe.report("/none", [], [], [], "eth1")["interface"] == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth2")
    assert probe.report("/none", [], [], [])["interface"] == "eth2"


def test_gpus_of_a_node(programs):
    row = ", ".join(GPU.values())
    programs(nvidia_smi=f"echo '{row}'\necho '{row}'", dmesg=f"cat <<'E'\n{LOG}\nE")
    said = probe._gpus()
    assert said["rows"] == [GPU, GPU] and said["error"] == ""
    assert said["xids"] == ["Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."]


def test_a_warning_among_the_gpus(programs):
    """It is named, and the GPUs are known all the same."""
    row, warning = ", ".join(GPU.values()), "WARNING: infoROM is corrupted at gpu 0000:84:00.0"
    programs(nvidia_smi=f"echo '{row}'\necho '{warning}'\necho\necho '{row}'", dmesg="exit 1")
    assert probe._gpus() == {"rows": [GPU, GPU], "xids": [], "error": warning}


def test_a_driver_that_does_not_answer(programs):
    programs(nvidia_smi="echo 'Unable to determine the device handle' >&2; exit 15", dmesg="exit 1")
    assert probe._gpus() == {
        "rows": [], "xids": [], "error": "Unable to determine the device handle"
    }  # fmt: skip


def test_no_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe._gpus() == {"rows": [], "xids": [], "error": ""}
