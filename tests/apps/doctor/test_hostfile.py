"""Hostfiles: what is right is read as DeepSpeed reads it, and what is wrong is named."""

import pytest

from megatron.apps.doctor.hostfile import HostfileError, as_include, chosen, read_hostfile

GOOD = "# racks\nnode-1 slots=2\n\n  10.0.0.2\tslots=4 max_slots=4\nnode_3.lan slots=1  # new\n"


def written(folder, text):
    path = folder / "hostfile"
    path.write_text(text, encoding="utf-8")
    return path


def test_as_deepspeed_reads_it(tmp_path):
    runner = pytest.importorskip("deepspeed.launcher.runner")
    path = written(tmp_path, GOOD)
    ours = read_hostfile(path)
    theirs = runner.fetch_hostfile(str(path))
    assert ours == {name: list(range(slots)) for name, slots in theirs.items()}
    for include, exclude in [
        ("", ""),
        ("node-1", ""),
        ("node_3.lan@10.0.0.2:1,3", ""),
        ("10.0.0.2:1@10.0.0.2:0", ""),
        ("", "node-1"),
        ("", "node-1:0@10.0.0.2:0,1,2,3"),
    ]:
        expected = runner.parse_inclusion_exclusion(theirs, include, exclude)
        left = chosen(ours, include, exclude)
        assert left == dict(expected)
        assert chosen(ours, as_include(left)) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no node is in it; write a line NAME slots=N"),
        ("# node-1 slots=8\n", "no node is in it"),
        ("node-1 slots=2\nnode-2\n", "line 2: 'node-2' is not a node; .* node-2 slots=8"),
        ("node-1 slot=4\n", "line 1: 'node-1 slot=4' .* such as node-1 slots=4"),
        ("node-1:4\n", "such as node-1 slots=4"),
        ("node-1 slots = 4", "such as node-1 slots=4"),
        ("node-1 slots=4GPUs", "'node-1 slots=4GPUs' is not a node"),
        ("node-1 slots=0", "node-1 has 0 slots; give 1 or more"),
        ("node-1, slots=4", "'node-1,' is not the name or address of a host"),
        ("node-1:22 slots=4", "'node-1:22' is not the name .* --ssh_port"),
        ("me@node-1 slots=4", "write node-1, and User me for Host node-1"),
        ("node-1 slots=4\nnode-1 slots=4", "line 2: node-1 is in line 1 already"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_file_line_and_remedy(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(HostfileError, match=message) as raised:
        read_hostfile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(HostfileError, match="hostfil: No such file.*NAME slots=N"):
        read_hostfile(tmp_path / "hostfil")


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("node-1", "node-2", "contradict"),
        ("node1", "", r"node1 is not in the hostfile \(is node-1 meant\?\); it has node-1, node-2"),
        ("node-1,node-2", "", "@ stands between two nodes"),
        ("", "node-2:4", "node-2 has the slots 0 to 3, and not 4"),
        ("node-1:0-1", "", "write node-1:0,1"),
        ("node-1@", "", "an empty name is not in the hostfile"),
        ("", "node-1@node-2", "--exclude node-1@node-2: no node is left"),
    ],
)
def test_wrong_choices_are_named(include, exclude, message):
    nodes = {"node-1": [0, 1], "node-2": [0, 1, 2, 3]}
    with pytest.raises(HostfileError, match=message):
        chosen(nodes, include, exclude)
