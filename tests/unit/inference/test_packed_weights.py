"""Products with packed weights, beside F.linear."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron.inference import packed_weights
from megatron.inference.packed_weights import pack_weights, packed_products

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@pytest.fixture
def layer():
    torch.manual_seed(1)
    layer = nn.Linear(48, 40).requires_grad_(False)
    pack_weights(layer.parameters())
    return layer


def test_a_row_depends_on_no_other_row(layer):
    x = torch.randn(96, 48)
    with packed_products():
        whole = layer(x)
        for rows in (4, 5, 31, 64, 95):
            assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows
            assert torch.equal(layer(x[None, :rows]), whole[None, :rows]), rows


def test_only_where_they_are_asked_for(layer, monkeypatch):
    x, products = torch.randn(8, 48), []
    plain = F.linear(x, layer.weight.data, layer.bias)
    product = packed_weights._product

    def noted(*args):
        products.append(args)
        return product(*args)

    with packed_products():
        monkeypatch.setattr(packed_weights, "_product", noted)
        torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-6)
        assert products
    products.clear()
    assert torch.equal(layer(x), plain) and not products


def test_a_shape_whose_rows_depend_on_others_stays_as_it_is(layer, monkeypatch):
    x = torch.randn(8, 48)
    monkeypatch.setattr(packed_weights, "_rows_are_independent", lambda inputs, outputs: False)
    with packed_products():
        assert torch.equal(layer(x), F.linear(x, layer.weight.data, layer.bias))


def test_the_trial_sees_a_dependence(monkeypatch):
    product = packed_weights._product
    trial = packed_weights._rows_are_independent.__wrapped__
    assert trial(48, 40)
    monkeypatch.setattr(packed_weights, "_product", lambda x, *rest: product(x, *rest) + len(x))
    assert not trial(48, 40)


def test_embeddings_and_other_dtypes_are_untouched():
    table = nn.Embedding(10, 4, dtype=torch.float32).requires_grad_(False)
    half = nn.Linear(8, 8, dtype=torch.bfloat16)
    pack_weights([*table.parameters(), *half.parameters()])
    with packed_products():
        assert torch.equal(table(torch.tensor([3])), table.weight[3:4])
        assert not hasattr(table.weight, "packed")
    assert type(half.weight) is nn.Parameter
