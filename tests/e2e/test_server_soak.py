"""tools/run_text_generation_server.py under thousands of requests, a third of them malformed.

MEGATRON_SOAK_REQUESTS sets how many (10,000).
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed (the extra serve)")

sys.path.insert(0, str(Path(__file__).parent))

from soaking import Soak  # noqa: E402
from test_text_generation_server import model, started  # noqa: E402, F401

REQUESTS = int(os.environ.get("MEGATRON_SOAK_REQUESTS", "10000"))
pytestmark = pytest.mark.proof


def test_nothing_ends_it_and_nothing_is_left(model, tmp_path):  # noqa: F811
    flags = ["--read-timeout", "3", "--kv-cache-gib", "0.2"]
    with started("one", model, tmp_path / "log", *flags) as program:
        port = int(program.url.rpartition(":")[2])
        found = asyncio.run(Soak(port, program.main.pid).run(REQUESTS))
        print(found)
        assert not found["faults"]
        assert program.process.poll() is None
        before, after = found["before"], found["after"]
        assert after["descriptors"] <= before["descriptors"] + 2, found
        assert after["children"] == before["children"] and after["threads"] <= before["threads"] + 2
        assert after["resident_bytes"] <= 1.1 * before["resident_bytes"] + 50e6, found
        program.main.send_signal(signal.SIGTERM)
        assert program.ended() == 0
