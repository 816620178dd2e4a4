"""A step in a layout against the same step on one process, in float64."""

from collections.abc import Callable, Sequence
from functools import cache

from pool import Pool
from training_jobs import gradients

from megatron.apps.parity.gradients import (
    Difference,
    GradientRecord,
    first_difference,
    reference_gradients,
)
from megatron.families import trained_spec
from megatron.model.layer_list import LayerSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run


@cache
def reference(*argv: str) -> GradientRecord:
    """The step in plain torch. Many cells of a table have the same one."""
    return reference_gradients(argv)


@cache
def layers_of(*argv: str) -> list[LayerSpec]:
    """The layers of a run's model, whose outputs are compared."""
    return trained_spec(parse_run(None, argv).config).layers(TensorParallel())


def difference(
    pool: Pool,
    size: int,
    argv: Sequence[str],
    layout: Sequence[str],
    job: Callable[[list[str]], GradientRecord] = gradients,
) -> Difference | None:
    """What first differs if ``size`` processes take the step with the flags of a layout."""
    records = pool.run(size, job, [*argv, *layout])
    return first_difference(records, reference(*argv), layers_of(*argv))
