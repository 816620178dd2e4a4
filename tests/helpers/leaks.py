"""State of the process that a test leaves for those after it, of which they know nothing."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
import torch

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STATE = {
    "dispatch modes of torch that are entered": torch._C._len_torch_dispatch_stack,
    "function modes of torch that are entered": torch._C._len_torch_function_stack,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "os.getcwd()": os.getcwd,
    "variables of launchers": lambda: {name: os.environ.get(name) for name in LAUNCHERS},
}


def state() -> list[object]:
    """Values that tests must leave as they were, in the order of :data:`STATE`."""
    return [read() for read in STATE.values()]


class Leaks:
    """A plugin that fails the last test of a file where its tests have changed :data:`STATE`, and
    names the first after which it was so. Fixtures of a file may change it until then."""

    def __init__(self) -> None:
        self._before = state()
        self._first = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None]:
        """Compare with the state before the first test."""
        yield
        after = state()
        if after == self._before:
            self._first = ""
            return
        self._first = self._first or item.nodeid
        if nextitem is None or nextitem.path != item.path:
            changed = zip(STATE, self._before, after, strict=True)
            said = [f"{name}: {old} -> {new}" for name, old, new in changed if old != new]
            first, self._before, self._first = self._first, after, ""
            pytest.fail(f"{first} leaves {', '.join(said)}", pytrace=False)
