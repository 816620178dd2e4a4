"""Trains on the null GPU as one rank of a layout, and prints what the step asks of the device.

    python tests/nullgpu/count.py CELL

table.py runs it with the library of build.py loaded. The program is the trainer's own, with two
replacements: weights stay as they are, and the other ranks of the layout do not exist. NCCL's
operations return at once, and what this rank would ask of the others, it answers itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

TREE = Path.cwd()
"""Of the trainer that is counted; this file's own, or another."""
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(TREE), str(TREE / "benchmarks"), str(HERE.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nullgpu.cells import CELLS, STEADY, STEPS, Cell, flags_of_cell  # noqa: E402
from one_rank import without_others  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

COUNTS = (
    "cuda_launches", "triton_launches", "products", "syncs", "event_waits", "reads", "writes",
    "collectives", "exposed", "exposed_bytes", "communicators",
)  # fmt: skip
"""Counters of null_cuda.c, in its order; then calls and bytes of :data:`OPERATIONS`."""
OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send",
    "receive",
)  # fmt: skip
GIB = 2**30

_LIBRARY = ctypes.CDLL(None)


def counts() -> dict[str, int]:
    """Return what was asked of the device since it was last reset."""
    values = (ctypes.c_long * (len(COUNTS) + 2 * len(OPERATIONS)))()
    _LIBRARY.null_gpu_counts(values)
    found = dict(zip(COUNTS, values, strict=False))
    for place, name in enumerate(OPERATIONS):
        first = len(COUNTS) + 2 * place
        found |= {name: values[first], f"{name}_bytes": values[first + 1]}
    return found


@contextmanager
def on_null_gpus(cell: Cell) -> Iterator[None]:
    """The block runs as the cell's rank. Its groups on CPUs have this rank alone."""
    from megatron.engine import backend
    from megatron.engine.environment import training_device
    from megatron.features.experts import exchange

    build, all_rows = backend.PlainBackend._build, exchange.all_rows
    rows = cell.micro_tokens * cell.setting.choices

    def on_device(self: Any, settings: Any) -> Any:
        with training_device():  # whole models would take the host's memory
            return build(self, settings)

    make = distributed_c10d._new_process_group_helper

    def make_group(size: int, *args: Any, **options: Any) -> Any:
        _LIBRARY.null_gpu_group_of(size)
        return make(size, *args, **options)

    def even_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
        """Rows of each expert on each rank; what is read from a null GPU is zeros."""
        gathered = all_rows(x, group)
        if x.dtype != torch.int64 or len(x) != 1:
            return gathered
        gathered.tolist()  # as the program does, which makes it wait
        return torch.full(gathered.shape, rows // x.shape[1])

    class OnCpu(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(dist.HashStore(), 0, 1, timeout)

    with ExitStack() as stack:
        stack.enter_context(without_others(cell.rank, cell.ranks))
        for owner, name, new in (
            (distributed_c10d, "_new_process_group_helper", make_group),
            (distributed_c10d, "ProcessGroupGloo", OnCpu),
            (backend.Backend, "initialise", lambda *_: None),
            (backend.PlainBackend, "initialise", lambda *_: None),
            (backend.PlainBackend, "_build", on_device),
            (exchange, "all_rows", even_rows),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


@contextmanager
def noting_symbols() -> Iterator[list[bool]]:
    """Notes whether inputs have symbols for sizes, for each graph with parameters: those of
    blocks. Casts of weights and updates are compiled once for any size."""
    from torch._inductor import compile_fx
    from torch.fx.experimental.symbolic_shapes import free_symbols

    lower, noted = compile_fx.compile_fx, list[bool]()

    def noting(graph: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if any("_parameters_" in str(node.target) for node in graph.graph.nodes):
            noted.append(any(isinstance(x, torch.SymInt) or free_symbols(x) for x in inputs))
        return lower(graph, inputs, *args, **options)

    with mock.patch.object(compile_fx, "compile_fx", noting):
        yield noted


def train(cell: Cell) -> dict[str, Any]:
    """Count a cell: graphs, breaks, what the last step asks of the device, and peak memory."""
    from megatron.engine.environment import deterministic_kernels, distributed
    from megatron.run.run import parse_run
    from megatron.training.build import build_trainer
    from megatron.training.trainer import Callback

    steps: list[dict[str, int]] = []

    class Steps(Callback):
        def after_step(self, trainer: Any, step: Any) -> None:
            steps.append(counts())
            _LIBRARY.null_gpu_reset()
            if len(steps) == 1:
                torch.cuda.reset_peak_memory_stats()

        def reason_to_stop(self, trainer: Any) -> str | None:
            return "the end of the count" if len(steps) == STEPS else None

    from torch._dynamo.utils import counters

    with ExitStack() as stack:
        stack.enter_context(on_null_gpus(cell))
        run = parse_run(None, flags_of_cell(cell), cell.setting.family)
        stack.enter_context(deterministic_kernels(run.config))
        symbolic = stack.enter_context(noting_symbols())
        mesh = stack.enter_context(distributed(run.config.parallel))
        trainer = build_trainer(run, mesh, [Steps()])
        made = counts()["communicators"]
        _LIBRARY.null_gpu_reset()
        trainer.fit()
    found = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "symbolic_graphs": sum(symbolic),
        **{name: value for name, value in steps[-1].items() if value},
        "syncs": max(step["syncs"] for step in steps[STEADY:]),
        "communicators": made,
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }
    reasons = [" ".join(str(each).split())[:200] for each in counters["graph_break"]]
    return {"counts": found, "reasons": reasons}


def main() -> None:
    """Print a line of JSON about the cell."""
    cell = CELLS[sys.argv[1]]
    torch.set_num_threads(1)
    try:
        found = train(cell)
    except torch.OutOfMemoryError as error:
        found = {"counts": {"out_of_memory": 1}, "reasons": [str(error).partition(". ")[0]]}
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # threads and groups of ranks that do not exist are not waited for


if __name__ == "__main__":
    main()
