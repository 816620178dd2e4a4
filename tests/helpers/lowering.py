"""What torch's compiler makes of a function, without a GPU: its backend for CPUs."""

import logging
from collections.abc import Callable

import torch


def compiled_traffic(function: Callable, *arguments: torch.Tensor) -> float:
    """Bytes that a compiled function's kernels read and write, as the compiler counts them."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    level = inductor_metrics_log.level
    inductor_metrics_log.setLevel(logging.INFO)
    metrics.reset()
    torch._dynamo.reset()
    try:
        with config.patch(fx_graph_cache=False):
            torch.compile(function, fullgraph=True, dynamic=False)(*arguments)
    finally:
        inductor_metrics_log.setLevel(level)
    return metrics.num_bytes_accessed
