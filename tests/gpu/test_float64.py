"""One step in float64 on a GPU and on the CPU: any difference beyond rounding is an error."""

import pytest
from gpu_runs import TINY, forget_engines, own_environment

from megatron.families import spec_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parity.gradients import first_difference, gradients, reference_gradients
from megatron.training.run import parse_run

KINDS = {
    "llama": [],
    "documents": ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"],
    "recomputed": ["--recompute-granularity", "full"],
    "grouped": ["--num-query-groups", "2", "--qk-layernorm"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_cpu(kind):
    argv = [*TINY, *KINDS[kind]]
    reference = reference_gradients(argv)
    with own_environment():
        record = gradients(argv)
    forget_engines()
    config = parse_run(None, argv).config
    layers = spec_of(config.model, config.parallel).layers(TensorParallel())
    assert first_difference([record], reference, layers) is None
