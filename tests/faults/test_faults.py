"""Faults on real trainings: each is named in time, the right one is blamed, nothing is lost. All of
them with `make proof`, or `python tests/faults/run.py`."""

import os
import sys

import pytest
from faults.campaign import campaign
from faults.fault import attempt
from faults.table import FAULTS
from faults.training import Undisturbed
from samples import sampled
from warm_runs import WarmRuns

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts and namespaces need root"
)


@pytest.fixture(scope="module")
def warm():
    runs = WarmRuns("faults.program")
    yield runs
    runs.stop()


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    return Undisturbed(warm, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", sampled(FAULTS, lambda name: False))
def test_fault(name, warm, undisturbed, tmp_path):
    outcome = attempt(FAULTS[name], warm, tmp_path / name, undisturbed)
    wrong = [each for each in outcome.wrong if not each.startswith("late: ")]  # a busy machine
    assert outcome.seconds is not None and not wrong, "\n".join(wrong)


@pytest.mark.proof
def test_random_faults(warm, tmp_path):
    tally = campaign(warm, tmp_path, faults=20, seed=7, minutes=10, say=print)
    assert tally.faults.total() >= 10 and not tally.wrong, "\n".join(tally.wrong)


def test_every_fault_says_what_is_expected():
    for name, fault in FAULTS.items():
        assert (fault.inject is None) != (fault.inside is None), name
        assert fault.says and fault.title, name
        assert fault.victims <= set(range(fault.shape.size)), name
    assert len(FAULTS) >= 60
