"""Some hundred requests at once, a third of them malformed; tests/e2e/test_server_soak.py has
thousands, to a process."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed (the extra serve)")

sys.path.insert(0, str(Path(__file__).parents[3] / "e2e"))

from serving import served  # noqa: E402
from soaking import Soak  # noqa: E402

from megatron.apps.generation.server.config import ServiceLimits  # noqa: E402
from megatron.apps.generation.server.listening import ConnectionLimits  # noqa: E402

READ_SECONDS = 3
"""A slow client needs 0.4 seconds for its body on a machine with nothing else to do."""


@pytest.mark.proof
def test_every_answer_is_right():
    limits = ServiceLimits(request_seconds=60, read_seconds=READ_SECONDS)
    connections = ConnectionLimits(read_seconds=READ_SECONDS)
    with served(limits=limits, connections=connections) as server:
        port = int(server.url.rpartition(":")[2])
        soak = Soak(port, os.getpid(), distinct=16, at_once=32)
        found = asyncio.run(soak.run(150))
        assert not found["faults"], found
        assert server.client().get("/health").status_code == 200
        assert found["counts"]["good"] > 80
        assert sum(n for kind, n in found["counts"].items() if kind.startswith("malformed")) > 30
