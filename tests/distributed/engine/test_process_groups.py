"""Process groups of a run: none twice, and nothing that waits for slow neighbours."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from training_jobs import TINY, train

from megatron.engine import deepspeed_patches
from megatron.engine.deepspeed_replacements import FEW_GROUPS, Replacement
from megatron.engine.pipeline_executor import PipelinePasses

FLAGS = [*TINY, "--train-iters", "1", "--num-layers", "4"]


def groups_of(argv: list[str], shared: bool) -> tuple[Counter, float]:
    """How often a group of some ranks is made, and the loss; for the pool."""
    made: Counter[tuple[int, ...]] = Counter()
    plain = dist.new_group

    def new_group(ranks: list[int], *args: object, **options: object) -> object:
        made[tuple(ranks)] += 1
        return plain(ranks, *args, **options)

    def chosen(replacement: Replacement) -> bool:
        return shared or replacement is not FEW_GROUPS

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(deepspeed_patches, "made", chosen),
    ):
        return made, train(argv).losses[0]


def test_no_group_is_made_twice(pool):
    """Those of DeepSpeed's grid for a pipeline are ours; without the replacement they are more."""
    argv = [*FLAGS, "--pipeline-model-parallel-size", "2", "--zero-stage", "0"]
    (few, loss), _ = pool.run(2, groups_of, argv, True)
    (many, other), _ = pool.run(2, groups_of, argv, False)
    assert set(few) <= set(many) and (0, 1) not in few
    assert max(few.values()) == 1 < max(many.values())
    assert loss == other


class Sent:
    """A send that has left or not, and that must not be waited for."""

    def __init__(self, left: bool) -> None:
        self.left = left

    def is_completed(self) -> bool:
        return self.left

    def wait(self) -> None:
        raise AssertionError("the compute stream waits for a neighbour")


@pytest.mark.parametrize("left", [0, 2, 4])
def test_a_gpu_waits_for_no_send(left: int) -> None:
    """Tensors are kept until they have left, however many there are."""
    passes = PipelinePasses.__new__(PipelinePasses)
    passes.device = torch.device("cuda")
    passes._leaving = [[(Sent(n < left), torch.zeros(1))] for n in range(4)]  # type: ignore[list-item]
    passes._free_what_was_sent()
    assert len(passes._leaving) == 4 - left


def test_a_cpu_waits_for_old_sends() -> None:
    """gloo says nothing about sends that are not waited for."""
    waited: list[int] = []

    def sent(number: int) -> mock.Mock:
        return mock.Mock(is_completed=lambda: False, wait=lambda: waited.append(number))

    passes = PipelinePasses.__new__(PipelinePasses)
    passes.device = torch.device("cpu")
    passes._leaving = [[(sent(n), torch.zeros(1))] for n in range(4)]  # type: ignore[list-item]
    passes._free_what_was_sent()
    assert waited == [0, 1] and len(passes._leaving) == 2
