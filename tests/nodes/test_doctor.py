"""tools/doctor.py on nodes with sshd: each planted fault is named with its node, and nothing is
named of healthy nodes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched_runs import ROOT, environment
from nodes.hostfile_runs import hostfile
from nodes.namespaces import nodes, require

pytestmark = pytest.mark.proof
COUNT = 8
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
PORT = 29777


class Cluster:
    """Nodes with a file of data that each has for itself and a folder that they share."""

    def __init__(self, machines, folder, private):
        self.machines, self.private, self.save = machines, private, folder / "save"
        self.save.mkdir()
        names = {machine.name: 1 for machine in machines}
        self.words = [
            sys.executable, ROOT / "tools" / "doctor.py", "--json",
            "--hostfile", hostfile(folder / "hosts", names), "--master-port", PORT,
            "--data-path", private / "text",
        ]  # fmt: skip
        for machine in machines:
            self.write(machine, "same")

    def write(self, machine, text):
        for kind in ("bin", "idx"):
            command = f"echo {text} > {self.private}/text.{kind}"
            machine.run("sh", "-c", command).check_returncode()

    def findings(self, *flags, save=None):
        """What was found first at each node and check; each has a remedy."""
        words = [*self.words, "--save", save or self.save, *flags]
        done = self.machines[0].run(*words, cwd=ROOT, env=environment(), timeout=300)
        assert done.returncode in (0, 1), done.stderr
        answer = json.loads(done.stdout)
        assert done.returncode == bool(answer["findings"])
        assert all(finding["remedy"] and finding["right"] for finding in answer["findings"])
        found = {}
        for one in answer["findings"]:
            found.setdefault((one["node"], one["check"]), one["value"])
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    require()
    folder, private = (tmp_path_factory.mktemp(name) for name in ("nodes", "private"))
    with nodes(COUNT, folder / "nodes", private=[private]) as machines:
        yield Cluster(machines, folder, private)


def with_variables(machine, **variables):
    """Restarts the sshd of a node, so that what it starts has these."""
    machine.stop_sshd()
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    option = ["-o", f"SetEnv {words}"] if words else []
    machine.run("/usr/sbin/sshd", "-E", "/run/sshd.log", *option).check_returncode()


def test_healthy(cluster):
    assert cluster.findings() == {}
    assert not list(cluster.save.iterdir())


def test_an_occupied_port(cluster):
    server = cluster.machines[0].start(
        sys.executable,
        "-m",
        "http.server",
        PORT,
        cwd=cluster.save,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        reach = ["bash", "-c", f": < /dev/tcp/node-1/{PORT}"]
        while cluster.machines[1].run(*reach).returncode:
            assert server.poll() is None
        assert cluster.findings() == {("node-1", f"port {PORT}"): "Address already in use"}
    finally:
        cluster.machines[0].run("pkill", "-f", f"http.server {PORT}")
        server.wait()


def test_a_closed_port(cluster):
    """Packets to it are dropped, as firewalls do."""
    head = cluster.machines[0]

    def rules(*lines):
        for line in lines:
            head.run("ip", "rule", *line.split()).check_returncode()

    drop = f"pref 0 ipproto tcp dport {PORT} blackhole"
    rules("add pref 1 lookup local", "del pref 0", f"add {drop}")
    try:
        found = cluster.findings()
    finally:
        rules(f"del {drop}", "add pref 0 lookup local", "del pref 1")
    assert list(found) == [("node-1", f"port {PORT}")]
    assert "no other node reaches it: " in found["node-1", f"port {PORT}"]


def test_a_clock(cluster):
    if not FAKETIME.exists():
        pytest.skip("faketime is not installed")
    odd = cluster.machines[3]
    with_variables(odd, LD_PRELOAD=FAKETIME, FAKETIME="+90s")
    try:
        found = cluster.findings()
    finally:
        with_variables(odd)
    assert list(found) == [("node-4", "clock")]
    assert float(found["node-4", "clock"].split()[0]) == pytest.approx(90, abs=2)
    assert "ahead of" in found["node-4", "clock"]


def test_another_version(cluster, tmp_path):
    """A package that shadows the usual one."""
    metadata = tmp_path / "safetensors-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n")
    with_variables(cluster.machines[4], PYTHONPATH=tmp_path)
    try:
        assert cluster.findings() == {("node-5", "version of safetensors"): "0.0.1"}
    finally:
        with_variables(cluster.machines[4])


def test_a_slow_link(cluster):
    cluster.machines[2].slow("20mbit")
    try:
        found = cluster.findings()
    finally:
        cluster.machines[2].quick()
    assert list(found) == [("node-3", "bandwidth")]
    assert found["node-3", "bandwidth"].startswith("sends ")


def test_a_full_disk(cluster):
    odd, folder = cluster.machines[5], cluster.private / "full"
    for machine in cluster.machines:
        machine.run("mkdir", folder).check_returncode()
    odd.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder).check_returncode()
    odd.run("dd", "if=/dev/zero", f"of={folder}/file", "bs=64k")
    try:
        found = cluster.findings(save=folder)
    finally:
        odd.run("umount", folder).check_returncode()
    values = {node: value for (node, check), value in found.items() if "not see" not in value}
    assert values == {"node-6": "0.00 GiB are free"}


def test_a_dead_sshd(cluster):
    cluster.machines[6].stop_sshd()
    try:
        found = cluster.findings()
    finally:
        cluster.machines[6].start_sshd()
    assert list(found) == [("node-7", "ssh")] and "refused" in found["node-7", "ssh"]


def test_folders(cluster):
    """One is missing on a node, and one is not shared."""
    folder = cluster.private / "missing"
    for machine in cluster.machines:
        if machine.name != "node-8":
            machine.run("mkdir", folder).check_returncode()
    found = cluster.findings(save=folder)
    assert found.pop(("node-8", f"folder {folder}")) == "missing"
    assert set(found.values()) == {"does not see what node-1 writes there"}
    assert [node for node, _ in found] == [f"node-{number}" for number in range(2, 8)]


def test_other_data(cluster):
    cluster.write(cluster.machines[1], "diff")
    cluster.machines[2].run("rm", cluster.private / "text.idx").check_returncode()
    try:
        found = cluster.findings()
    finally:
        for machine in cluster.machines[1:3]:
            cluster.write(machine, "same")
    data = [("node-2", "bin"), ("node-2", "idx"), ("node-3", "idx")]
    assert set(found) == {(node, f"data {cluster.private}/text.{kind}") for node, kind in data}
    assert found["node-3", f"data {cluster.private}/text.idx"] == "cannot be read"


def test_a_node_without_torch(cluster, tmp_path):
    """A Python with nothing installed."""
    bare = shutil.which("python3", path="/usr/bin:/bin")
    if bare is None:
        pytest.skip("no Python of the system here")
    found = cluster.findings("--python", bare)
    assert found["node-2", "version of torch"] == "not installed"


def test_links_over_gloo(cluster):
    """A healthy set, and one with a slow link."""
    assert cluster.findings("--over", "gloo") == {}
    cluster.machines[2].slow("20mbit")
    try:
        found = cluster.findings("--over", "gloo")
    finally:
        cluster.machines[2].quick()
    assert list(found) == [("node-3", "bandwidth")]


def test_nothing_answers_in_time(cluster):
    """A node without power costs seconds."""
    cluster.machines[7].cut()
    try:
        found = cluster.findings("--ssh-timeout", 3)
    finally:
        cluster.machines[7].join()
    assert list(found) == [("node-8", "ssh")]
