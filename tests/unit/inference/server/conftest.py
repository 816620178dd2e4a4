"""A server for each file of tests that only ask it."""

import sys
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed (the extra serve)")

# importlib mode puts no folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from serving import served  # noqa: E402


@pytest.fixture(scope="module")
def server():
    """With the usual limits."""
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    """Of this server."""
    with server.client() as found:
        yield found
