"""Products with packed weights, next to F.linear."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron.apps.generation.execution import row_rule
from megatron.apps.generation.execution.row_rule import (
    PackedWeights,
    RowRule,
    independent,
    is_packed,
    some_weight,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(row_rule, "LEAST", 0)
    row_rule._independent.cache_clear()
    torch.manual_seed(1)
    return nn.Linear(48, 40).requires_grad_(False)


@pytest.fixture
def products(monkeypatch):
    """The calls of oneDNN's kernel."""
    found, product = [], row_rule.packed_linear
    noted = lambda *args: found.append(args) or product(*args)  # noqa: E731
    monkeypatch.setattr(row_rule, "packed_linear", noted)
    return found


def test_a_row_depends_on_no_other_row(layer):
    x = torch.randn(96, 48)
    with PackedWeights([layer.weight]):
        whole = layer(x)
        for rows in (4, 5, 31, 64, 95):
            assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows
            assert torch.equal(layer(x[None, :rows]), whole[None, :rows]), rows


def test_only_where_they_are_asked_for(layer, products):
    x, plain = torch.randn(8, 48), F.linear
    weights = PackedWeights([layer.weight])
    products.clear()
    expected = plain(x, layer.weight, layer.bias)
    assert not products
    with weights:
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
        assert len(products) == 1
        assert torch.equal(x @ layer.weight.t(), x @ layer.weight.t())
    assert torch.equal(layer(x), expected) and len(products) == 1


def test_a_shape_whose_rows_depend_on_others_stays_as_it_is(layer, monkeypatch):
    product = row_rule.packed_linear
    monkeypatch.setattr(row_rule, "packed_linear", lambda x, *rest: product(x, *rest) + len(x))
    weights = PackedWeights([layer.weight])
    assert not is_packed(layer.weight)
    x = torch.randn(8, 48)
    expected = layer(x)
    with weights:
        assert torch.equal(layer(x), expected)
    row_rule._independent.cache_clear()


def test_the_trial_sees_a_dependence():
    assert independent(lambda x: x * 2, 48, torch.float32)
    assert not independent(lambda x: x + 1e-6 * len(x), 48, torch.float32)


def test_where_memory_is_short_none_is_packed(layer, monkeypatch):
    monkeypatch.setattr(row_rule, "SHARE", 0.0)
    PackedWeights([layer.weight])
    assert not is_packed(layer.weight)


def test_other_dtypes_and_small_weights_stay_as_they_are(layer, monkeypatch):
    half = nn.Linear(8, 8, dtype=torch.bfloat16)
    PackedWeights([half.weight, torch.zeros(48, 40)])
    assert not is_packed(half.weight)
    monkeypatch.setattr(row_rule, "LEAST", 48 * 40 + 1)
    PackedWeights([layer.weight])
    assert not is_packed(layer.weight)


def test_rows_of_small_products():
    """In 16 bits torch has other code for up to 4,096 multiplications."""
    weights = [some_weight(16, 8, torch.bfloat16), some_weight(64, 32, torch.bfloat16)]
    assert RowRule.of(weights, lambda weight: False).fewest == 33
    assert RowRule.of([weights[1].float()], lambda weight: False).fewest <= 24


def test_ranks_agree_on_the_strictest_rule(monkeypatch):
    rules = RowRule(4, None, 0, (8,)), RowRule(8, 32, 1, (6, 8))

    def gather(into, own, group):
        into[:] = rules

    monkeypatch.setattr(row_rule.dist, "all_gather_object", gather)
    ranks = SimpleNamespace(size=2, handle=None)
    assert [rule.agreed(ranks) for rule in rules] == [RowRule(8, 32, 1, (6, 8))] * 2


def test_no_row_that_counts_is_the_last():
    """Where a width is no multiple of 128 bytes, other code computes the end of a pass."""
    for width, spare in ((45, 1), (64, 0)):
        rule = RowRule.of([some_weight(width, 32, torch.float32)], lambda weight: True)
        assert [rule.padded(rows) for rows in (1, 4, 9)] == [4 + spare, 4 + spare, 9 + spare]
    assert RowRule(32, 32, 1).padded(32) == 33


def test_threads_have_whole_vectors():
    widths, grain = (172, 344), 2**15
    for threads in (1, 2, 3, 7):
        for rows in (5, 100, 333, 1001):
            padded = row_rule._divided(rows, widths, threads)
            assert rows <= padded < rows + 128 * threads
            for width in widths:
                used = min(threads, -(-padded * width // grain))
                assert used < 2 or -(-padded * width // used) % 128 == 0


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 22), (4, 11), (16, 22), (8, 33), (32, 16)])
def test_rows_of_a_promise_do_not_depend_on_their_place(outputs, inputs):
    """Rows whose length is no multiple of 16 bytes are aligned differently in other places."""
    weight = some_weight(outputs, inputs, torch.float32)
    rule = RowRule.of([weight], lambda weight: False)
    if rule.most is not None:
        return  # it promises nothing
    row_I = torch.randn(inputs, generator=torch.Generator().manual_seed(2))
    placed = set()
    for rows in (4, 9, 21, 65):
        for place in range(rows):
            x_MI = torch.zeros(rows, inputs)
            x_MI[place] = row_I
            placed.add(F.linear(x_MI, weight)[place].numpy().tobytes())
    assert len(placed) == 1
