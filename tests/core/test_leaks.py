"""A test that changes the state of the process for those after it is named."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from leaks import Leaks
from torch._subclasses.fake_tensor import FakeTensorMode

ONE, TWO, OTHER = (
    SimpleNamespace(nodeid=f"{path}::{name}", path=path)
    for path, name in (("a.py", "one"), ("a.py", "two"), ("b.py", "other"))
)


def torn_down(leaks, item, following):
    """Run the plugin's part of a teardown as pytest does."""
    hook = leaks.pytest_runtest_teardown(item, following)
    next(hook)
    with contextlib.suppress(StopIteration):
        next(hook)


@pytest.fixture
def mode():
    with contextlib.ExitStack() as entered:
        yield lambda: entered.enter_context(FakeTensorMode())


@pytest.fixture
def no_gradients():
    yield lambda: torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("change", ["mode", "no_gradients"])
def test_the_first_test_after_which_it_is_so_is_named(request, change):
    leaks = Leaks()
    torn_down(leaks, ONE, TWO)
    request.getfixturevalue(change)()
    torn_down(leaks, TWO, TWO)
    with pytest.raises(pytest.fail.Exception, match=r"a.py::two leaves .*: (0 -> 1|True -> False)"):
        torn_down(leaks, ONE, OTHER)
    torn_down(leaks, OTHER, None)  # one error is enough


def test_fixtures_of_a_file_may_change_it(mode):
    leaks = Leaks()
    with FakeTensorMode():
        torn_down(leaks, ONE, TWO)
    torn_down(leaks, TWO, OTHER)
