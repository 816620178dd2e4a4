"""Counts of the choices of experts, and the biases that follow from them, in every layout."""

import pytest
import torch
from training_jobs import TINY

from megatron.apps.parity.runs import watched_trainer
from megatron.engine.environment import distributed
from megatron.features.experts import balance
from megatron.features.resilience.steps.replicas import Replicas
from megatron.run.run import parse_run
from megatron.training.writers import read_metrics

MODEL = (
    "--num-layers 4 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-layer-freq [1,0,1,1] --moe-ffn-hidden-size 8 "
    "--train-iters 4 --log-interval 2"
).split()
BY_COUNTS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split()
BY_QUANTILE = "--moe-router-load-balancing-type quantile_balancing".split()
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "recomputed": (1, RECOMPUTED),
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2-recomputed": (2, f"--expert-model-parallel-size 2 {RECOMPUTED}"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2-whole": (2, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    "pp2-dp2-zero1": (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2-cp2": (4, "--expert-model-parallel-size 2 --context-parallel-size 2"),
}


def run(argv):
    """The biases of a rank's layers after a run, by layer; for the pool."""
    parsed = parse_run(None, argv)
    with distributed(parsed.config.parallel) as mesh:
        trainer = watched_trainer(parsed, mesh, lambda result: None)
        trainer.fit()
        (balances,) = trainer.engine.kernels.members
        return {n: each.bias.values.tolist() for n, each in balances.layers.items()}


def trained(pool, folder, size, rule, layout):
    """Shares of the experts by iteration and layer, and the biases by layer, which all ranks that
    have the layer share."""
    path = folder / "metrics.jsonl"
    argv = [*TINY, *MODEL, *rule, *layout.split(), "--metrics-file", str(path)]
    biases = {}
    for of_rank in pool.run(size, run, argv):
        for layer, values in of_rank.items():
            assert biases.setdefault(layer, values) == values
    rows = [row for row in read_metrics(path) if row["kind"] == "expert_loads"]
    loads = {
        (row["iteration"], row["layer"]): [row[f"expert_{n}"] for n in range(8)] for row in rows
    }
    numbers = [row for row in read_metrics(path) if row["kind"] == "train"]
    return loads, biases, [row["experts_max_over_mean"] for row in numbers]


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    kinds = {"counts": BY_COUNTS, "quantile": BY_QUANTILE}
    return {
        name: trained(pool, tmp_path_factory.mktemp(name), 1, rule, "")
        for name, rule in kinds.items()
    }


@pytest.mark.parametrize(
    "layout",
    [n if n in ("ep2-recomputed", "tp2-sp") else pytest.param(n, marks=pytest.mark.proof)
     for n in LAYOUTS],
)  # fmt: skip
def test_counts_and_biases_equal_one_process(layout, alone, pool, tmp_path):
    size, flags = LAYOUTS[layout]
    loads, biases, worst = trained(pool, tmp_path, size, BY_COUNTS, flags)
    expected, its_biases, its_worst = alone["counts"]
    assert sorted(loads) == [(n, layer) for n in (2, 4) for layer in (0, 2, 3)]
    assert loads == expected and worst == its_worst and biases == its_biases
    assert max(map(abs, biases[0])) <= 4.1e-3  # four steps of 1e-3, recomputed or not
    assert len({tuple(each) for each in loads.values()}) == 6


def compared(argv, bad):
    """Differences of replicas after a run, and after a change of a bias on rank 1; for the pool."""
    parsed = parse_run(None, argv)
    with distributed(parsed.config.parallel) as mesh:
        trainer = watched_trainer(parsed, mesh, lambda result: None)
        trainer.fit()
        before = Replicas(trainer.engine).difference()
        if mesh.world.rank == 1:
            trainer.engine.buffers[bad].values[2] += 1e-3
        return before, Replicas(trainer.engine).difference()


def test_replicas_compare_biases(pool):
    name = "layers.2.mlp.router.expert_bias"
    for before, after in pool.run(2, compared, [*TINY, *MODEL, *BY_COUNTS], name):
        assert before is None and name in after


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantile_biases_equal_one_process(layout, alone, pool, tmp_path):
    size, flags = LAYOUTS[layout]
    loads, biases, _ = trained(pool, tmp_path, size, BY_QUANTILE, flags)
    expected, its_biases, _ = alone["quantile"]
    assert loads == expected
    for layer, values in its_biases.items():
        torch.testing.assert_close(biases[layer], values, rtol=0, atol=2e-5)
        assert abs(sum(values)) < 1e-5 and max(values) > 0.01


def test_shares_are_of_the_choices_of_all_tokens(alone):
    loads, _, worst = alone["counts"]
    for iteration, place in ((2, 0), (4, 1)):
        of_layers = [shares for (n, _), shares in loads.items() if n == iteration]
        for shares in of_layers:
            assert sum(shares) == pytest.approx(1)
            # Of 2 steps of 4 samples of 16 tokens with 2 experts each.
            assert all(share * 256 == pytest.approx(round(share * 256)) for share in shares)
        assert worst[place] == pytest.approx(8 * max(map(max, of_layers)))
    assert balance.updated_bias(torch.zeros(2), torch.tensor([1, 3]), 0.5).tolist() == [0.5, -0.5]
