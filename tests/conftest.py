"""Fixtures for all tests, and the parts of a long run."""

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from _pytest.logging import catching_logs

# importlib mode puts no folder on the path.
sys.path[:0] = [str(Path(__file__).parent / "helpers"), str(Path(__file__).parent)]
sys.path.append(str(Path(__file__).parents[1] / "examples_deepspeed/megatron/detxoify_lm"))

from cost import Cost  # noqa: E402
from forks import Forks  # noqa: E402
from leaks import Leaks  # noqa: E402
from ledger import Recorder  # noqa: E402
from parts import parse_part, recorded, slow, split  # noqa: E402
from stem import SELDOM  # noqa: E402

# torch's store asks for the names of its clients; a lost answer of a name server would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
# Inductor's processes would outlive the tests that they compile a few small kernels for.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tiny tensors on many threads spend their time waiting, above all where other tests run next to.
torch.set_num_threads(1)


def attach(self: catching_logs) -> logging.Handler:
    """Attach to the root logger and to this project's. pytest goes through all loggers for those
    that hand nothing on, six times a test, and libraries have hundreds."""
    root, own = logging.getLogger(), logging.getLogger("megatron")
    self.attached_loggers += [root] if own.propagate else [root, own]
    for logger in self.attached_loggers:
        logger.addHandler(self.handler)
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    return self.handler


setattr(catching_logs, "__enter__", attach)  # noqa: B010


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, help="run the tests on this number of processes")
    parser.addoption(
        "--part",
        metavar="I/N",
        help="only the I-th of N parts of the tests, which take about as long as each other",
    )
    parser.addoption(
        "--stale",
        action="store_true",
        help="only the long tests that were not seen to pass on this code, into tests/ledger.jsonl",
    )
    parser.addoption("--minutes", type=float, help="begin no test after this time")


def pytest_configure(config: pytest.Config) -> None:
    try:
        parse_part(config.option.part or "1/1")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Cost())
    config.pluginmanager.register(Leaks())
    if config.option.workers:
        config.pluginmanager.register(Forks(config.option.workers, config.option.stale))
    if config.option.stale:
        config.pluginmanager.register(Recorder(config.option.minutes))


def pytest_collection(session: pytest.Session) -> None:
    """Nothing that the collection makes is garbage."""
    gc.disable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test that uses a fixture which does not exist: a long one would only fail when it
    runs."""
    if isinstance(item, pytest.Function):
        known = {"request", *item._fixtureinfo.name2fixturedefs}
        if unknown := {*item.fixturenames} - known:
            raise pytest.UsageError(f"{item.nodeid}: no fixture {', '.join(sorted(unknown))}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests leave behind is looked through without the modules and the tests themselves."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(*SELDOM)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no tests of the cases that ``-m "not proof"`` leaves out: more than half of all."""
    if metafunc.config.option.markexpr.startswith("not proof"):
        calls = metafunc._calls
        kept = [call for call in calls if all(mark.name != "proof" for mark in call.marks)]
        calls[:] = kept or calls[:1]  # a function without a case would be a test without arguments


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, and keep the tests of a part, the longest pieces first."""
    slow_functions = slow(recorded())
    for item in items:
        if item.nodeid.partition("[")[0] in slow_functions:
            item.add_marker("slow")
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        # It would parse all of this project's modules, to draw their constants.
        providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]
    if not config.option.part:
        return
    number, parts = parse_part(config.option.part)
    by_name = {item.nodeid: item for item in items}
    pieces = split(list(by_name), parts, recorded())[number - 1]
    items[:] = [by_name.pop(test) for piece in pieces for test in piece.tests]
    config.hook.pytest_deselected(items=list(by_name.values()))


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of public data that MEGATRON_TEST_DATA names; tests that need it are skipped
    without it."""
    folder = os.environ.get("MEGATRON_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEGATRON_TEST_DATA names no folder of public data")
    return Path(folder).resolve()
