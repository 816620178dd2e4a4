"""Lines about the storage of optimizer states at the start of a run."""

import pytest
import torch

from megatron.config.layouts import StateDtypes
from megatron.features.low_bit_states import stored_states
from megatron.features.low_bit_states.stored_states import states_line

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("missing", [None, "no C compiler found"])
def test_how_states_are_stored(monkeypatch, missing):
    """A CPU is not asked for a compiler."""
    monkeypatch.setattr(stored_states, "missing_compiler", lambda device_type: missing)
    states = StateDtypes(exp_avg="int8", exp_avg_sq="bf16")
    line = "optimizer states: --main-params-dtype fp32 --exp-avg-dtype int8 --exp-avg-sq-dtype bf16"
    assert states_line(states, torch.device("cpu")) == line
    slow = f"; {missing}, so that the update is many operations, slower than of float32 states"
    assert states_line(states, CUDA) == line + slow * (missing is not None)
