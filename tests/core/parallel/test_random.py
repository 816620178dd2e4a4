"""Random numbers that do not depend on the layout."""

import pytest
import torch

from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.random import (
    derive_seed,
    dropout_seed,
    generator,
    seed_devices,
    tensor_parallel_random,
)

GPU = torch.cuda.is_available()


def test_seeds_are_stable_over_versions():
    # A changed seed would change every run: these numbers must never change.
    assert derive_seed(1234, "embedding.word_embeddings.weight") == 3049120096115717112
    assert derive_seed(1234, "dropout", 0) == 818971740242686642
    assert 0 <= derive_seed("x") < 2**63


def test_seeds_tell_their_parts_apart():
    assert len({derive_seed("a", "bc"), derive_seed("ab", "c"), derive_seed("abc")}) == 3


def test_generators_are_independent_of_the_global_stream():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.rand(3, generator=generator(1, "x"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), first)


def test_dropout_is_a_function_of_the_sample_number():
    assert dropout_seed(1234, 8) == dropout_seed(1234, 8)
    assert len({dropout_seed(1234, 8), dropout_seed(1234, 16), dropout_seed(1, 8)}) == 3


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))]
)
def test_seeding_devices_against_torch(device):
    torch.rand(1, device=device)
    torch.manual_seed(derive_seed("x"))
    expected = torch.rand(4, device=device)
    seed_devices(derive_seed("x"))
    assert torch.equal(torch.rand(4, device=device), expected)


def inside_and_after(rank, draws):
    torch.manual_seed(7)
    with tensor_parallel_random(Group((0, 1), rank)):
        inside = torch.rand(draws)
    return inside, torch.rand(3)


def test_ranks_differ_inside_and_agree_outside():
    inside_0, after_0 = inside_and_after(0, 4)
    # Another amount is drawn inside on purpose: ranks may hold shares of different sizes.
    inside_1, after_1 = inside_and_after(1, 9)
    assert not torch.equal(inside_0, inside_1[:4])
    assert torch.equal(after_0, after_1)


def test_inside_numbers_follow_the_outer_stream():
    first, second = inside_and_after(0, 4)[0], inside_and_after(0, 4)[0]
    assert torch.equal(first, second)
    torch.manual_seed(8)
    with tensor_parallel_random(Group((0, 1), 0)):
        assert not torch.equal(torch.rand(4), first)


def test_one_rank_draws_from_the_common_stream():
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with tensor_parallel_random(SINGLE):
        assert torch.equal(torch.rand(2), expected)


def test_the_stream_is_put_back_after_an_error():
    torch.manual_seed(7)
    try:
        with tensor_parallel_random(Group((0, 1), 1)):
            torch.rand(5)
            raise KeyError
    except KeyError:
        after = torch.rand(3)
    assert torch.equal(after, inside_and_after(0, 4)[1])
