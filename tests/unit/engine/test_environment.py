"""What the launcher has set is believed; what it has not set is noticed."""

import pytest

from megatron.config import ConfigError
from megatron.engine.environment import world_size


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
