"""The generation server over the counted model, for tests of what its clients see."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# The tests of the server have what runs one without a model.
UNIT = Path(__file__).parents[1] / "apps" / "generation"
sys.path[:0] = [str(UNIT), str(UNIT / "server"), str(Path(__file__).parent)]

from counted_model import CountedRunner, counted_tokenizer  # noqa: E402
from serving import served  # noqa: E402

from megatron.apps.generation.decoding.chat import ChatFormat  # noqa: E402
from megatron.apps.generation.server.app import Access  # noqa: E402
from megatron.apps.generation.server.service import Service  # noqa: E402

NAME = "counted-words"


TEMPLATE = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
"""Ends each message with an empty line, as the paragraphs that were counted end."""


@dataclass
class CountedServer:
    """A running server."""

    url: str
    service: Service
    name: str = NAME

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, trust_env=False).json()

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        response = httpx.post(self.url + path, json=body, timeout=20, trust_env=False)
        assert response.status_code == status, response.text
        return response.json()

    def wait_until_idle(self) -> None:
        """Fails after 5 seconds."""
        end = time.monotonic() + 5
        while self.get("/health")["running"]:
            assert time.monotonic() < end, "a request is still running"
            time.sleep(0.01)


@contextmanager
def counted_server(delay: float = 0.0, key: str | None = None) -> Iterator[CountedServer]:
    """A server whose steps take ``delay`` seconds."""
    tokenizer = counted_tokenizer()
    runner, chat = CountedRunner(delay=delay), ChatFormat({"default": TEMPLATE})
    with served(
        runner, access=Access(key=key), tokenizer=tokenizer, name=NAME, chat=chat
    ) as running:
        yield CountedServer(running.url, running.service)
    chat.close()
