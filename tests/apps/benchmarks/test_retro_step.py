"""What benchmarks/retro_step.py makes of its measurements."""

import retro_step
from layout_shapes import Shape
from retro_step import MODELS, flops_of, table
from trainer_worker import Sample


def sample(cpu: float) -> Sample:
    return Sample(2, cpu, cpu, 0.0, 0.0, 0, 0.0)


def test_ratios_are_those_of_a_round():
    """Of rounds that become slower, in CPU time of a step."""
    rounds = [[sample(factor * slow) for slow in (1, 2, 4)] for factor in (1, 2, 3, 4)]
    lines = table(rounds, [10**6] * 4, [2.0, 3.0, 4.0, 5.0]).splitlines()
    assert lines[2] == "| GPT | 1.0 M | 1000 | 500 to 2000 | 1.00 | 1.00 |"
    assert [line.split(" | ")[4] for line in lines[2:]] == ["1.00", "2.00", "3.00", "4.00"]
    assert lines[-1].endswith(" | 2.50 |")


def test_the_models_are_what_they_are_called():
    shape = Shape(layers=6, micro_batch=1)
    gpt, two, one, short = (flops_of(shape, flags) for flags in MODELS.values())
    assert gpt < short < one < two
    assert retro_step.parser().parse_args([]).rounds == 5
