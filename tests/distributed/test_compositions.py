"""The comparison of random compositions with one process."""

import dataclasses

import numpy as np
import pytest
from compositions import compare
from compositions.draw import OPTIONS, Composition, drawn
from training_jobs import TINY

from megatron.apps.parity.runs import Drift, RunRecord

MUON = [*TINY, "--train-iters", "4", "--optimizer", "adaptive_muon", "--hidden-dropout", "0"]


def record(*losses: float) -> RunRecord:
    return RunRecord(list(losses), [1.0] * len(losses), [1.0] * len(losses), [False] * len(losses))


def drift(*losses: float):
    return lambda: Drift(np.array(losses), np.zeros(len(losses)))


def no_drift():
    raise AssertionError("rounding is not measured within the bounds")


def test_later_steps_differ_by_no_more_than_rounding_explains():
    alone = record(4.0, 4.0, 4.0)
    assert compare.training_differs(record(4.0, 4.003, 3.997), alone, "", no_drift) is None
    far, noise = record(4.0, 4.0, 4.02), drift(0.0, 0.006, 0.001)
    assert compare.training_differs(far, alone, "", noise) is None
    wrong = compare.training_differs(far, alone, "", drift(0.0, 0.004, 0.001))
    assert wrong == "loss of step 3: 4.02, alone 4, rounding 0.02"
    later = drift(0.0, 0.0, 0.1)
    assert "step 2" in compare.training_differs(record(4.0, 4.02, 4.0), alone, "", later)
    first = record(4.001, 4.0, 4.0)
    assert "step 1" in compare.training_differs(first, alone, "", drift(9.0, 9.0, 9.0))
    lost = record(4.0, float("nan"), 4.0)
    assert "step 2" in compare.training_differs(lost, alone, "", drift(1.0, 1.0, 1.0))


@pytest.mark.proof
@pytest.mark.parametrize(
    "precision, least, most", [("medium", 1e-5, 1e-1), ("highest", 1e-9, 1e-5)]
)
def test_rounding_of_muon_grows_with_products_of_16_bits(pool, precision, least, most):
    flags = [*MUON, "--attention-dropout", "0", "--muon-fp32-matmul-prec", precision]
    runs = [pool.run(1, compare.trained, flags, seed)[0] for seed in (0, 0, 1, 2)]
    assert runs[0].losses == runs[1].losses
    largest = Drift.between(runs[2:], runs[0]).losses.max()
    assert least < largest < most


@pytest.mark.proof
def test_every_choice_is_accepted_in_some_composition():
    chosen = {each for seed in range(400) for each in drawn(seed).options}
    choices = {(option, flags) for option, every in OPTIONS.items() for _, flags in every if flags}
    assert not choices - chosen


def test_what_depends_on_the_layout_is_not_compared():
    alone = Composition(0, "dp1", (("dropout", "--attention-dropout 0.1"),), 1, 1, 2, 1)
    for layout, same in (("dp1", True), ("pp2-dp2", True), ("tp2", False), ("cp2", False)):
        assert dataclasses.replace(alone, layout=layout).comparable == same
    hidden = dataclasses.replace(alone, options=(("dropout", "--hidden-dropout 0.1"),))
    for layout, same in (("tp2", True), ("tp2-sp", False)):
        assert dataclasses.replace(hidden, layout=layout).comparable == same
    counted = "--moe-router-load-balancing-type global_aux_loss"
    balanced = dataclasses.replace(alone, options=(("experts", counted),))
    for layout, same in (("tp2", True), ("ep2", False), ("dp2", False)):
        assert dataclasses.replace(balanced, layout=layout).comparable == same


def test_another_layout_has_the_same_micro_batches():
    here = Composition(0, "pp2-dp2", (), micro_batch=1, times=2, layers=4, resume=1)
    for target, times in (("dp1", 4), ("dp4", 1), ("tp2-pp2", 4), ("pp4", 4), ("pp2-dp2", 2)):
        there = dataclasses.replace(here, target=target).elsewhere
        assert there is not None and (there.layout, there.times) == (target, times)
        batch = "--micro-batch-size 1 --global-batch-size 4".split()
        assert [here.flags_alone()[-4:], there.flags_alone()[-4:]] == [batch, batch]
    once = dataclasses.replace(here, times=1)
    assert dataclasses.replace(once, target="pp4-dualpipev").elsewhere is None
    growing = dataclasses.replace(here, options=(("order", "--rampup-batch-size @start 4 9"),))
    assert growing.elsewhere is None  # dp1 would begin with two samples
    assert dataclasses.replace(growing, target="cp2-dp2").elsewhere is not None
