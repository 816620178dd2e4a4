"""Requests of the server's three ways to ask, with a runner that has no model."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from fuzz.fuzzer import ROOT, Fuzzer

REQUESTS: dict[str, dict[str, Any]] = {
    "/api": {
        "prompts": ["Hello"], "tokens_to_generate": 4, "logprobs": True, "temperature": 0.9,
        "top_k": 3, "top_p": 0.0, "add_BOS": False, "random_seed": 7, "stop_on_eol": True,
    },
    "/v1/completions": {
        "prompt": ["Hello", "you"], "max_tokens": 4, "temperature": 0.5, "n": 2, "stop": ["x"],
        "logprobs": 2, "seed": 3, "logit_bias": {"7": 1.5}, "echo": False, "stream": False,
        "stop_token_ids": [3], "presence_penalty": 0.5, "min_p": 0.1,
        "structured_outputs": {"regex": "[a-z]{1,3}"},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 4, "top_logprobs": 2, "logprobs": True, "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {
                "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            }},
        },
    },
}  # fmt: skip


def write_requests(folder: Path) -> None:
    for number, body in enumerate(REQUESTS.values()):
        (folder / f"{number}.json").write_text(json.dumps(body))


@lru_cache
def application() -> Any:
    """The server's, with its engine running in this process."""
    sys.path[:0] = [str(ROOT / "tests/apps/generation"), str(ROOT / "tests/apps/generation/server")]
    from serving import PlainChat, TextRunner, byte_tokenizer

    from megatron.apps.generation.scheduling.engine import GenerationEngine
    from megatron.apps.generation.scheduling.engine_thread import EngineThread
    from megatron.apps.generation.scheduling.schedule import EngineLimits
    from megatron.apps.generation.server.app import build_app
    from megatron.apps.generation.server.config import ServiceLimits
    from megatron.apps.generation.server.service import ServedModel, Service

    service = Service("fake", ServiceLimits(request_seconds=20), log=lambda line: None)
    runner = TextRunner(259, pages=64, max_positions=64)
    engine = EngineThread(GenerationEngine(runner, byte_tokenizer(), EngineLimits()))
    engine.start()
    service.open(ServedModel(engine, byte_tokenizer(), PlainChat(), frozenset({258})))
    return build_app(service)


def ask(folder: Path) -> None:
    """Sends the requests. Raises ValueError for one that is refused; RuntimeError where the server
    fails."""
    statuses = asyncio.run(_answers(folder))
    broken = {path: text for path, (status, text) in statuses.items() if status >= 500}
    if broken:
        raise RuntimeError(f"the server failed: {broken}")
    if any(status >= 400 for status, _ in statuses.values()):
        raise ValueError(f"refused: {statuses}")


async def _answers(folder: Path) -> dict[str, tuple[int, str]]:
    import httpx

    found = {}
    transport = httpx.ASGITransport(application(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for number, path in enumerate(REQUESTS):
            file = folder / f"{number}.json"
            answer = await client.request(
                "PUT" if path == "/api" else "POST",
                path,
                content=file.read_bytes() if file.is_file() else b"",
                headers={"Content-Type": "application/json"},
            )
            found[path] = (answer.status_code, answer.text[:300])
    return found


# Constraints of text are compiled in a process of their own.
PROCESS = frozenset(("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.kill"))

FUZZERS = (
    Fuzzer("server", write_requests, ask, names_file=False, may=PROCESS, seconds=10.0, heavy=True),
)
