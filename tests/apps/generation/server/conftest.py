"""A server for each file of tests that only ask it."""

import sys
from pathlib import Path

import pytest

# importlib mode puts no folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_pycollect_makemodule():
    """Skips the tests of this folder where a package is missing."""
    for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra serve)")


@pytest.fixture(scope="module")
def server():
    """With the usual limits."""
    from serving import served

    with served() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    """Of this server."""
    with server.client() as found:
        yield found
