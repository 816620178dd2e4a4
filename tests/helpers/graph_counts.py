"""The graphs that torch.compile takes of a program, counted."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import free_symbols


@contextmanager
def graphs_alone() -> Iterator[None]:
    """Graphs are taken and differentiated as always, and then run operator by operator. None are
    there before or afterwards, and the counts are of those that are taken inside. Raises
    AssertionError if a graph for fixed sizes has inputs whose sizes are symbols."""
    compile_function, run = torch.compile, lookup_backend("aot_eager")

    def checked(graph: torch.fx.GraphModule, inputs: Sequence) -> Callable:
        symbols = [x for x in inputs if isinstance(x, torch.SymInt) or free_symbols(x)]
        assert not symbols, f"sizes that are symbols: {symbols}"
        return run(graph, inputs)

    def without_generated_code(function: Callable, *, dynamic: bool, **_: object) -> Callable:
        backend = checked if dynamic is False else run
        return compile_function(function, backend=backend, dynamic=dynamic)

    torch.compiler.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", without_generated_code):
        yield
    torch.compiler.reset()


def graphs() -> tuple[int, Counter]:
    """How many graphs there are, and what broke them by its reason."""
    return counters["stats"]["unique_graphs"], Counter(counters["graph_break"])
