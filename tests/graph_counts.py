"""The graphs that torch.compile takes of a program, counted."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._dynamo.utils import counters


@contextmanager
def graphs_alone() -> Iterator[None]:
    """Graphs are taken and differentiated as always, and then run operator by operator. None are
    there before or afterwards, and the counts are of those that are taken inside."""
    compile_function = torch.compile

    def without_generated_code(function: Callable, *, dynamic: bool, **_: object) -> Callable:
        return compile_function(function, backend="aot_eager", dynamic=dynamic)

    torch.compiler.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", without_generated_code):
        yield
    torch.compiler.reset()


def graphs() -> tuple[int, Counter]:
    """How many graphs there are, and what broke them by its reason."""
    return counters["stats"]["unique_graphs"], Counter(counters["graph_break"])
