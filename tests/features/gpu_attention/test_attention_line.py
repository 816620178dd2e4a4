"""The line about attention at the start of a run describes that run."""

import dataclasses

import pytest
import torch
from configs import run_config

from megatron.config.data import DataConfig
from megatron.config.training import PrecisionConfig
from megatron.features.gpu_attention import kernels
from megatron.features.gpu_attention.kernels import attention_line
from megatron.features.instruction.flags import InstructionConfig

CUDA = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    found: list[tuple] = []
    monkeypatch.setattr(kernels, "describe_attention", lambda *args: found.append(args[1:]))
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
    attention_line(run_config(**changes), CUDA, "causal")
    attention_line(run_config(**changes), CUDA, "full")  # whose samples are padded
    assert asked == [(dtype, CUDA, 1, documents, "causal"), (dtype, CUDA, 1, True, "full")]
