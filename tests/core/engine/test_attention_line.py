"""What the start says of attention and optimizer states is about the run."""

import dataclasses

import pytest
import torch
from configs import run_config

from megatron.config.data import DataConfig
from megatron.config.layouts import StateDtypes
from megatron.config.training import PrecisionConfig
from megatron.engine import build
from megatron.engine.build import attention_line, states_line
from megatron.features.instruction.flags import InstructionConfig

CUDA = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    found: list[tuple] = []
    monkeypatch.setattr(build, "describe_attention", lambda *args: found.append(args[1:]))
    return found


def data(**changes) -> DataConfig:
    return dataclasses.replace(run_config().data, **changes)


@pytest.mark.parametrize(
    ("changes", "dtype", "documents"),
    [
        ({}, torch.float32, False),
        ({"precision": PrecisionConfig(bf16=True)}, torch.bfloat16, False),
        ({"precision": PrecisionConfig(fp16=True)}, torch.float16, False),
        ({"data": data(reset_attention_mask=True)}, torch.float32, True),
        ({"sections": (InstructionConfig(sft=True),)}, torch.float32, True),
    ],
)
def test_it_is_about_the_run(asked, changes, dtype, documents):
    attention_line(run_config(**changes), CUDA)
    attention_line(run_config(**changes), CUDA, "full")  # whose samples are padded
    assert asked == [(dtype, CUDA, 1, documents, "causal"), (dtype, CUDA, 1, True, "full")]


@pytest.mark.parametrize("missing", [None, "no C compiler found"])
def test_how_states_are_stored(monkeypatch, missing):
    """A CPU is not asked for a compiler."""
    monkeypatch.setattr(build, "missing_compiler", lambda device_type: missing)
    states = StateDtypes(exp_avg="int8", exp_avg_sq="bf16")
    line = "optimizer states: --main-params-dtype fp32 --exp-avg-dtype int8 --exp-avg-sq-dtype bf16"
    assert states_line(states, torch.device("cpu")) == line
    slow = f"; {missing}, so that the update is many operations, slower than of float32 states"
    assert states_line(states, CUDA) == line + slow * (missing is not None)
