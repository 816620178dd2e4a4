"""Parts of sequences that ranks of a context have, and their targets.

The reference of every part is the whole, by the definition: rank r has the pieces r and 2P - 1 - r
of 2P.
"""

import pytest
import torch

from megatron.features.instruction.objective import EmbeddingNoise
from megatron.model.layer_list import LayerState
from megatron.parallel.context import Context
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import TensorParallel

LENGTH = 24


def contexts(size):
    return [Context(Group(tuple(range(size)), rank)) for rank in range(size)]


def places(context):
    width = LENGTH // (2 * context.size)
    pieces = (context.rank, 2 * context.size - 1 - context.rank)
    return torch.cat([torch.arange(piece * width, (piece + 1) * width) for piece in pieces])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_two_pieces(size):
    x = torch.randn(2, LENGTH, 3)
    for context in contexts(size):
        expected = places(context) if size > 1 else torch.arange(LENGTH)
        assert torch.equal(context.positions(LENGTH), expected)
        assert torch.equal(context.take(x, 1), x[:, expected])
        assert torch.equal(context.take(x, -2), x[:, expected])


@pytest.mark.parametrize("size", [2, 3])
def test_positions_of_rows_one_after_another(size):
    rows = torch.arange(3 * LENGTH)
    together = torch.cat([context.take(rows.view(3, -1), 1)[None] for context in contexts(size)])
    for context, own in zip(contexts(size), together, strict=True):
        local, here = context.local(rows[None], LENGTH)
        assert torch.equal(here[0], torch.isin(rows, own))
        assert torch.equal(own.flatten()[local[0][here[0]]], rows[here[0]])
        assert not local[~here].any()


def test_state_has_positions_of_the_whole_sequence():
    tokens = torch.randint(99, (2, LENGTH))
    own = torch.randint(9, (2, LENGTH))
    for context in contexts(2):
        at = places(context)
        state = LayerState(tokens, token_types=own).divided(context)
        assert torch.equal(state.hidden, tokens[:, at])
        assert torch.equal(state.token_types, own[:, at])
        assert torch.equal(state.position_ids, at[None])
        state = LayerState(tokens, position_ids=own).divided(context)
        assert torch.equal(state.position_ids, own[:, at])


def test_targets_everywhere():
    labels, mask = torch.randint(99, (2, LENGTH)), (torch.rand(2, LENGTH) < 0.4).float()
    for context in contexts(4):
        at, part = places(context), Targets(labels, mask).divided(context, LENGTH)
        assert torch.equal(part.labels_BS, labels[:, at])
        assert torch.equal(part.mask_BS, mask[:, at])
        assert part.total == mask.sum()
    assert Targets(labels, mask).total is None


@pytest.mark.parametrize("together", [False, True])
def test_targets_at_positions(together):
    """Those of all rows together, or of each; the last of each row does not count."""
    groups, reach = (1, 2 * LENGTH) if together else (2, LENGTH)
    positions = torch.stack([torch.randperm(reach)[:14] for _ in range(groups)])
    labels, mask = torch.randint(99, (groups, 14)), torch.ones(groups, 14)
    mask[:, -1] = 0.0
    targets, counted = Targets(labels, mask, positions), 0
    hidden = torch.arange(2.0 * LENGTH).view(2, LENGTH, 1)
    for context in contexts(3):
        part = targets.divided(context, LENGTH)
        assert part.labels_BS.shape[1] == min(14, 8 * -(-int(part.mask_BS.sum(1).max()) // 8))
        x, _ = part.taken(context.take(hidden, 1), TensorParallel())
        rows = torch.zeros(groups, 1) if together else LENGTH * torch.arange(groups)[:, None]
        for group, place in part.mask_BS.nonzero().tolist():
            whole = int(part.places_BP[group, place])
            assert part.labels_BS[group, place] == labels[group, whole]
            assert x[group, place] == positions[group, whole] + rows[group]
        counted += part.mask_BS.sum()
    assert counted == mask.sum() == part.total


def test_numbers_of_targets_go_back_to_their_places(monkeypatch):
    """Each rank has those of its own targets, where these are not those that come first."""
    monkeypatch.setattr(Context, "sum", lambda context, x: x)
    positions = torch.arange(LENGTH).flip(0)[None]
    labels, mask = torch.randperm(LENGTH)[None] + 1, torch.ones(1, LENGTH)
    mask[:, 5:9] = 0.0
    targets, total = Targets(labels, mask, positions), torch.zeros(1, LENGTH)
    for context in contexts(3):
        part = targets.divided(context, LENGTH)
        total += part.gathered(part.labels_BS * part.mask_BS, context)
    assert torch.equal(total, labels * mask)


def test_targets_that_do_not_count_are_no_work():
    """One or two of a rank's twelve positions count, for which eight are computed."""
    mask = torch.zeros(1, LENGTH)
    mask[:, [0, 7, 9]] = 1.0
    targets = Targets(torch.ones(1, LENGTH).long(), mask, torch.arange(LENGTH)[None])
    for context in contexts(2):
        assert targets.divided(context, LENGTH).labels_BS.shape == (1, 8)


def test_no_target_of_a_rank_leaves_one_that_does_not_count():
    targets = Targets(torch.tensor([[5]]), torch.ones(1, 1), torch.tensor([[0]]))
    first, second = (targets.divided(context, LENGTH) for context in contexts(2))
    assert first.mask_BS.tolist() == [[1.0]] and first.labels_BS.tolist() == [[5]]
    assert second.mask_BS.tolist() == [[0.0]] and second.total == 1


def test_labels_of_samples_are_whole():
    labels = torch.tensor([1, 0])
    targets = Targets(labels, torch.ones_like(labels), of_samples=True)
    assert targets.divided(contexts(2)[1], LENGTH) is targets


def test_noise_is_part_of_that_of_one_process():
    noise = EmbeddingNoise(5.0, LENGTH + 6, torch.randint(1, 9, (2, LENGTH)).float())
    whole = noise.drawn(torch.zeros(2, LENGTH, 3), 7, TensorParallel())
    for context in contexts(4):
        zeros = torch.zeros(2, LENGTH // 4, 3)
        drawn = noise.drawn(zeros, 7, TensorParallel(context=context))
        assert torch.equal(drawn, whole[:, places(context)])


def test_blocks_communicate_alike_or_each_in_its_way():
    assert [Context().kind(n) for n in range(2)] == ["p2p"] * 2
    assert [Context(kinds=("a2a",)).kind(n) for n in range(2)] == ["a2a"] * 2
    assert [Context(kinds=("a2a", "p2p")).kind(n) for n in range(2)] == ["a2a", "p2p"]
