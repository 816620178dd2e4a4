"""Which ranks of an elastic run end, and how, when a stop was not asked of all of them."""

import pytest
import torch.distributed as dist

from megatron.features.resilience.restart.trainer import (
    ElasticNodes,
    NodeLeftError,
    given_nodes,
    is_range,
)
from megatron.training.stopping import ASKED_ELSEWHERE


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        ("python torchrun --nnodes 1:4 pretrain_gpt.py", "1:4"),
        ("python torchrun --nproc-per-node 8 --nnodes=2:2 pretrain_gpt.py", "2:2"),
        ("python -m torch.distributed.run --nnodes=1:2 -m pretrain_gpt", "1:2"),
        ("python -c torchrun", None),
        ("torchrun train.py --nnodes 1:4", None),
    ],
)
def test_nodes_of_a_command_line(line, nodes):
    assert given_nodes(line.split()) == nodes


@pytest.mark.parametrize(
    ("nodes", "changes"), [("1:4", True), ("2:2", True), ("4", False), ("", False), ("a:b", False)]
)
def test_a_number_of_nodes_that_may_change(nodes, changes):
    assert is_range(nodes) == changes


class Place:
    iteration = 7


def outcome(monkeypatch, reasons, rank):
    """How a rank ends where the ranks stop for these reasons."""

    def gather(found, own):
        assert own == reasons[rank]
        found[:] = reasons

    monkeypatch.setattr(dist, "get_world_size", lambda: len(reasons))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    try:
        ElasticNodes().training_ended(Place(), reasons[rank])
    except NodeLeftError as error:
        return str(error)
    except SystemExit as end:
        return end.code
    return None


def test_the_others_of_a_node_that_leaves_start_again(monkeypatch):
    reasons = [ASKED_ELSEWHERE, "SIGTERM", "end of the launcher (process 9)"]
    message = "ranks 1, 2 left the run after iteration 7 (SIGTERM); the others start again"
    ends = [outcome(monkeypatch, reasons, rank) for rank in range(3)]
    assert ends == [message, 0, 0]


@pytest.mark.parametrize(
    "reasons",
    [
        ["SIGTERM", "SIGTERM"],  # the whole run
        [ASKED_ELSEWHERE, "--exit-duration-in-mins 5"],  # its time is over
        ["SIGTERM", "--exit-interval 10"],
        [None, None],  # the end of the plan
        ["SIGTERM", None],
        ["data that do not come", ASKED_ELSEWHERE],
    ],
)
def test_what_ends_the_run_ends_it_on_all_ranks(monkeypatch, reasons):
    assert [outcome(monkeypatch, reasons, rank) for rank in (0, 1)] == [None, None]
