"""Tests of what runs on a GPU; a machine without one skips them, with a reason.

    python -m pytest tests/gpu -q
    MEGATRON_GPU_TESTS_ON=cpu python -m pytest tests/gpu -q -m ""

The second runs them on the CPU, so that they are known to work before there is a GPU; only what a
GPU alone has is left out of them then. Files marked ``also_on_cpu`` run on the CPU anyway.
"""

import sys
from pathlib import Path

import pytest

# importlib mode puts no folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from gpu_runs import DEVICE, ON_CPU, ON_GPU, forget_engines  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "also_on_cpu: of tests/gpu, runs on the CPU without a GPU")


def pytest_report_header() -> str:
    return f"tests/gpu on: {DEVICE}"


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not (ON_GPU or ON_CPU or item.get_closest_marker("also_on_cpu")):
        pytest.skip("needs a GPU (MEGATRON_GPU_TESTS_ON=cpu tries it on the CPU)")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No engine, group or compiled code of one test is there in the next."""
    yield
    if ON_GPU or ON_CPU:  # what runs on the CPU anyway has none, and this takes a while
        forget_engines()
