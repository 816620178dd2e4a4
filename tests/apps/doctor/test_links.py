"""Measurements of pairs of nodes: how often, and the findings of those that fail."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron.apps.doctor import examination
from megatron.apps.doctor.findings import Link, judge_links
from megatron.apps.doctor.session import ProbeError


@pytest.fixture
def cluster(monkeypatch):
    """Measures links between so many nodes, of which a function says how one is: its rate, or why
    it does not work. Returns links, findings and how often each pair was measured."""

    def run(count, quality):
        tries, lock = Counter(), threading.Lock()

        def link(source, target):
            pair = source.name, target.name
            with lock:
                tries[pair] += 1
            found = quality(*pair, tries[pair])
            if isinstance(found, str):
                raise ProbeError(found)
            return Link(found, 1e-5)

        monkeypatch.setattr(examination, "_by_tcp", link)
        sessions = [SimpleNamespace(name=f"n{number}") for number in range(count)]
        measured, lost = examination.measured(sessions, "tcp")
        return measured, [(one.node, one.value) for one in lost], tries

    return run


def test_a_node_that_nobody_reaches(cluster):
    """Each try takes seconds: it is left out after three of the others, and named once."""
    _, lost, tries = cluster(64, lambda a, b, _: "timed out" if "n9" in (a, b) else 1e9)
    ((node, value),) = lost
    assert node == "n9" and value.startswith("timed out, with n")
    assert value.endswith("; not tried with the others")
    assert sum("n9" in pair for pair in tries) == 6
    assert len(tries) == 63 * 62 + 6


def test_one_direction(cluster):
    _, lost, _ = cluster(4, lambda a, b, _: "refused" if b == "n2" else 1e9)
    assert lost == [("n2", "refused, from n0, n1, n3")]


def test_a_pair(cluster):
    _, lost, _ = cluster(4, lambda a, b, _: "refused" if {a, b} == {"n2", "n0"} else 1e9)
    assert lost == [("n0 -> n2", "refused"), ("n2 -> n0", "refused")]


def test_several_nodes_that_nobody_reaches(cluster):
    """The others fail with each of them, and are examined all the same."""
    dead = {f"n{number}" for number in (3, 17, 29, 30, 31, 40)}
    measured, lost, _ = cluster(64, lambda a, b, _: "timed out" if {a, b} & dead else 1e9)
    assert {node for node, _ in lost} == dead
    assert len(measured) == 58 * 57


def test_two_halves_that_do_not_see_each_other(cluster):
    half = {f"n{number}" for number in range(32)}
    _, lost, tries = cluster(64, lambda a, b, _: 1e9 if (a in half) == (b in half) else "no route")
    assert len(lost) <= 32
    assert sum((a in half) != (b in half) for a, b in tries) <= 6 * 32


def test_a_slow_node_is_measured_again_a_few_times(cluster):
    measured, lost, tries = cluster(64, lambda a, b, _: 1e8 if "n7" in (a, b) else 1e9)
    assert [(one.node, one.value) for one in judge_links(measured)] == [
        ("n7", "sends 100.0 MB/s"), ("n7", "receives 100.0 MB/s")
    ]  # fmt: skip
    assert sum(tries.values()) <= 64 * 63 + 12 and not lost


def test_other_work_is_not_a_slow_node(cluster):
    """All of its links are measured again, if it is always better then."""
    slow = lambda a, b, tries: 1e8 if tries == 1 and "n7" in (a, b) else 1e9  # noqa: E731
    measured, _, _ = cluster(16, slow)
    assert judge_links(measured) == []
