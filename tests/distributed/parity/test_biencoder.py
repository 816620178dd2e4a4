"""The loss of a biencoder over data-parallel ranks: that of one process with all of their samples
in a micro batch, and its gradients, in float64."""

import pytest
from family_models import FAMILIES, MODELS, NO_DROPOUT
from training_jobs import gradients

from megatron.apps.parity.gradients import reference_gradients
from megatron.apps.parity.layouts import flags_for, parse_layout

BATCH = ["--global-batch-size", "8", "--train-iters", "1", "--num-layers", "2", *NO_DROPOUT]
proof = pytest.mark.proof


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp2", "towers"),
        pytest.param("dp2", "shared", marks=proof),
        pytest.param("dp2-zero2", "projected", marks=proof),
        pytest.param("tp2-sp-dp2", "towers", marks=proof),
        pytest.param("pp2-dp2", "towers", marks=proof),
        pytest.param("dp4", "shared", marks=proof),
    ],
)
def test_contexts_of_all_ranks_count(pool, layout, model):
    parsed = parse_layout(layout)
    argv = [*FAMILIES["biencoder"], *MODELS["biencoder"][model], *BATCH]
    size = 2 * parsed.data
    expected = reference_gradients([*argv, "--micro-batch-size", str(size)])
    records = pool.run(parsed.processes, gradients, [*argv, *flags_for(parsed)])
    whole = {each.name: each for each in expected.gradients}
    top = max(float(each.values.abs().max()) for each in expected.gradients)
    for record in records:
        assert record.norm == pytest.approx(expected.norm, rel=1e-10)
        for own in record.gradients:
            values = whole[own.name].shard.join([whole[own.name].values])
            share = own.shard.cut(values, record.coordinates)
            assert float((own.values - share).abs().max()) < 1e-10 * top, own.name
