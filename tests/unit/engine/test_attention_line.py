"""What the start says of attention is about the run's own dtype, ranks and data."""

import dataclasses

import pytest
import torch
from configs import run_config

from megatron.config.data import DataConfig
from megatron.config.kinds.instruction import InstructionConfig
from megatron.config.training import PrecisionConfig
from megatron.engine import build
from megatron.engine.build import attention_line

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
        ({"kinds": (InstructionConfig(sft=True),)}, torch.float32, True),
    ],
)
def test_it_is_about_the_run(asked, changes, dtype, documents):
    attention_line(run_config(**changes), CUDA)
    assert asked == [(dtype, CUDA, 1, documents)]
