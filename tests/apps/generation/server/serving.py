"""A server over a runner without a model, for tests of what clients see."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from fake_runner import FakeRunner

from megatron.apps.generation.decoding.chat import ChatFormat
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.engine_thread import EngineThread
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.generation.server.app import Access, build_app
from megatron.apps.generation.server.config import RequestDefaults, ServiceLimits
from megatron.apps.generation.server.listening import ConnectionLimits, HTTPThread, listening_socket
from megatron.apps.generation.server.service import ServedModel, Service
from megatron.config import TokenizerConfig
from megatron.formats.generation_settings import end_tokens
from megatron.tokenizer import build_tokenizer

NAME = "fake"


def byte_tokenizer():
    """Ids 0 to 255 are bytes, then pad, bos, eos."""
    return build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))


class TextRunner(FakeRunner):
    """Continues with printable ASCII, after a while with the end of the document."""

    def logits_after(self, sequence_L, encoded):
        logits_V = super().logits_after(sequence_L, encoded).clone()
        logits_V[:32], logits_V[127:258] = -50.0, -50.0
        logits_V[10] += 56.0  # ends of lines, too
        return logits_V


class PlainChat:
    """Stands for a chat template."""

    stops = ("\nuser:",)

    def render(self, messages):
        if messages[0]["role"] == "assistant":
            raise ValueError("the first message is not the user's")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return f"{text}assistant: "

    def tokens(self, tokenizer, messages):
        return tokenizer.tokenize(self.render(messages))

    prompt = ChatFormat.prompt


@dataclass
class Served:
    """A running server; ``lines`` is its log."""

    url: str
    service: Service
    runner: FakeRunner
    engine: EngineThread
    lines: list[str]
    http: HTTPThread

    def client(self, **settings) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **settings)


@contextmanager
def served(
    runner=None,
    limits=None,
    access=None,
    defaults=None,
    engine_limits=None,
    connections=None,
    chat=None,
    log_prompts=False,
    port=0,
    opened=True,
    lines=None,
    tokenizer=None,
    name=NAME,
    ends=(),
):
    """A server on a free port."""
    runner = runner or TextRunner(259)
    lines = [] if lines is None else lines
    service = Service(
        name,
        limits or ServiceLimits(request_seconds=20),
        defaults or RequestDefaults(),
        lines.append,
        log_prompts,
    )
    tokenizer = tokenizer or byte_tokenizer()
    engine = EngineThread(GenerationEngine(runner, tokenizer, engine_limits or EngineLimits()))
    engine.start()
    if opened:
        ends = end_tokens(tokenizer, {"eos_token_id": [*ends]})
        service.open(ServedModel(engine, tokenizer, chat or PlainChat(), ends))
    listening = listening_socket("127.0.0.1", port)
    app = build_app(service, access or Access())
    http = HTTPThread(app, listening, connections or ConnectionLimits(), lines.append)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    http.start()
    try:
        yield Served(url, service, runner, engine, lines, http)
    finally:
        engine.close()
        http.close()


def events(response):
    """The JSON of each server-sent event, the last one as it is."""
    found = []
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            found.append(line.removeprefix("data: "))
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def main():
    """Serves until Ctrl-C."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of a step")
    options = parser.parse_args()

    class Printed(list):
        def append(self, line):
            print(line, flush=True)

    runner = TextRunner(259, pages=4096, max_positions=4096, delay=options.delay)
    with served(runner, port=options.port, lines=Printed()) as server:
        print(f"listening on {server.url}", flush=True)
        threading.Event().wait()
