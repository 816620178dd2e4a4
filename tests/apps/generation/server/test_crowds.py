"""Many clients at once: what they may take together, whose turn it is, and how the server ends."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from serving import PlainChat, TextRunner, served

from megatron.apps.generation.server import listening, turns
from megatron.apps.generation.server.command import _drain
from megatron.apps.generation.server.config import ServiceLimits
from megatron.apps.generation.server.exchange import RequestError
from megatron.apps.generation.server.listening import (
    BoundedConnection,
    ConnectionLimits,
    most_connections,
)
from megatron.apps.generation.server.service import _without_frames
from megatron.apps.generation.server.turns import Lane, RequestTurn
from megatron.util.errors import RareLog

LARGE = "x" * 150_000
CHAT = "/v1/chat/completions"


class SlowChat(PlainChat):
    """Waits, with a large conversation, until it may continue."""

    def __init__(self):
        self.may_continue, self.begun = threading.Event(), []

    def tokens(self, tokenizer, messages):
        if len(messages[0]["content"]) >= len(LARGE):
            self.begun.append(messages)
            self.may_continue.wait(20)
        return super().tokens(tokenizer, messages)


@contextmanager
def slow_server(**limits):
    chat = SlowChat()
    runner = TextRunner(259, max_positions=4096, delay=0.002)
    limits = ServiceLimits(**{"request_seconds": 20, "request_bytes": 200_000} | limits)
    with served(runner, limits, chat=chat) as server:
        try:
            yield server, chat
        finally:
            chat.may_continue.set()


def connection(server):
    address = urlsplit(server.url)
    found = socket.create_connection((address.hostname, address.port))
    found.settimeout(10)
    return found


def sent(server, body, path=CHAT):
    """A connection with a whole request."""
    content = json.dumps(body).encode()
    client = connection(server)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with contextlib.suppress(OSError):  # refused before its end
        client.sendall(head.encode() + content)
    return client


def conversation(content, **fields):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def test_large_requests_are_counted_until_their_texts_are_tokens():
    with slow_server() as (server, chat), ExitStack() as stack, server.client() as client:
        clients = [stack.enter_context(sent(server, conversation(LARGE))) for _ in range(21)]
        wait_for(lambda: chat.begun and server.service.active == 21)
        refused = client.post(CHAT, json=conversation(LARGE))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["retry-after"] == "1" and len(chat.begun) == 1
        # Small ones, of the same client, do not wait.
        assert client.post(CHAT, json=conversation("hi")).is_success
        assert client.put("/api", json={"prompts": ["a"], "tokens_to_generate": 1}).is_success
        chat.may_continue.set()
        for one in clients:
            assert one.recv(2000).startswith(b"HTTP/1.1 400")
        assert len(chat.begun) == 21
        assert client.post(CHAT, json=conversation(LARGE)).status_code == 400


def test_nothing_is_done_for_clients_that_left():
    with slow_server() as (server, chat), server.client() as client:
        first = sent(server, conversation(LARGE))
        wait_for(lambda: chat.begun)
        others = [sent(server, conversation(LARGE)) for _ in range(10)]
        wait_for(lambda: server.service.active == 11)
        for one in (first, *others):
            one.close()
        wait_for(lambda: server.service.active == 0)
        assert client.post(CHAT, json=conversation("hi")).is_success
        chat.may_continue.set()
        assert client.post(CHAT, json=conversation(LARGE)).status_code == 400
        assert len(chat.begun) == 2


def test_a_text_that_must_be_too_long_is_not_split():
    with slow_server(request_bytes=2**22) as (server, chat), server.client() as client:
        for path, body in (
            (CHAT, conversation("x" * 300_000)),
            ("/v1/completions", {"prompt": "x" * 300_000}),
            ("/v1/completions", {"prompt": ["x" * 8000] * 100}),
            ("/api", {"prompts": ["x" * 8000] * 100}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400 and "characters are too many" in response.text
        assert not chat.begun


@pytest.mark.parametrize("where", ["messages", "content"])
def test_too_many_messages(client, where):
    part = {"role": "user", "content": "a"} if where == "messages" else {"type": "text", "text": ""}
    parts = [part] * 2049
    messages = parts if where == "messages" else [{"role": "user", "content": parts}]
    response = client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400 and "at most 2,048" in response.text


@pytest.mark.parametrize("stop", ["-" * 1025, ["a", "-" * 512_000], ["a"] * 17])
def test_stop_strings_are_bounded(client, stop):
    response = client.post("/v1/completions", json={"prompt": "a", "stop": stop})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop"
    assert "at most 1" in response.text


def test_clients_take_turns():
    order = []

    async def ask(lane, client):
        async with RequestTurn(lane, client):
            order.append(client)
            await asyncio.sleep(0)

    async def all_of_them():
        lane = Lane(1.0)
        async with RequestTurn(lane, "first"):
            tasks = [asyncio.create_task(ask(lane, name)) for name in "aaabcb"]
            await asyncio.sleep(0.01)
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    assert order == ["a", "b", "c", "a", "b"]


def test_a_text_that_takes_too_long_delays_nobody_else():
    released = threading.Event()

    async def ask():
        lane = Lane(0.05)
        for _ in range(turns._MOST_OVERDUE):
            with pytest.raises(RequestError, match="more than 0.05 seconds"):
                async with RequestTurn(lane, "a") as turn:
                    await turn.work(released.wait, 20)
            async with RequestTurn(lane, "b") as turn:
                assert await turn.work(str, 7) == "7"
        assert lane.overdue == turns._MOST_OVERDUE
        released.set()
        while lane.overdue:
            await asyncio.sleep(0.01)

    asyncio.run(ask())


def test_a_refusal_keeps_nothing_in_memory():
    class Large(dict):
        pass

    async def refuse(large):
        raise RequestError("no")

    async def ask():
        large = Large()
        seen = weakref.ref(large)
        try:
            await _without_frames(refuse(large))
        except RequestError as error:
            del large
            assert seen() is None
            return error

    gc.disable()
    try:
        assert str(asyncio.run(ask())) == "no"
    finally:
        gc.enable()


FORMS = (
    ("/v1/completions", {"prompt": "go", "max_tokens": 250, "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 250, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "go", "max_tokens": 250, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": "go", "max_tokens": 250, "echo": True, "logprobs": 2}),
    (CHAT, conversation("go") | {"max_tokens": 250, "ignore_eos": True}),
    (CHAT, conversation("go") | {"max_tokens": 250, "ignore_eos": True, "stream": True}),
    ("/api", {"prompts": ["go", "on"], "tokens_to_generate": 250}),
    ("/api", {"prompts": ["go"], "tokens_to_generate": 100, "beam_width": 2}),
)


def test_every_form_of_request_ends_well_after_a_signal(capsys):
    with slow_server() as (server, chat), ThreadPoolExecutor(len(FORMS)) as pool:
        with server.client() as client:
            futures = [pool.submit(client.post, path, json=body) for path, body in FORMS]
            wait_for(lambda: server.service.active == len(FORMS))
            begun = time.monotonic()
            _drain(server.service, server.engine, server.http, 120)
            assert time.monotonic() - begun < 110  # not for as long as it may
            for (path, body), future in zip(FORMS, futures, strict=True):
                response = future.result()
                assert response.is_success, (path, body, response.text)
                assert not body.get("stream") or response.text.endswith("data: [DONE]\n\n")
        assert "all requests have ended" in capsys.readouterr().out


def test_requests_whose_texts_wait_are_answered_at_the_end(capsys):
    with slow_server() as (server, chat):
        clients = [sent(server, conversation(LARGE)) for _ in range(5)]
        wait_for(lambda: chat.begun and server.service.active == 5)
        begun = time.monotonic()
        _drain(server.service, server.engine, server.http, 0.2)
        assert time.monotonic() - begun < 30
        assert all(one.recv(100).startswith(b"HTTP/1.1 503") for one in clients)
        assert "the requests that remained were cancelled" in capsys.readouterr().out


def test_a_burst_of_idle_connections_is_cut(monkeypatch):
    kept, check = set(), BoundedConnection._check
    monkeypatch.setattr(BoundedConnection, "_check", lambda one: kept.add(one) or check(one))
    with served(connections=ConnectionLimits(connections=20)) as server, ExitStack() as stack:
        state = server.http._server.server_state
        first = [stack.enter_context(connection(server)) for _ in range(20)]
        wait_for(lambda: len(state.connections) == 20)
        clients = [stack.enter_context(connection(server)) for _ in range(100)]
        for one in clients:  # at once, or after a second
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(10) == b""
        assert len(state.connections) == 20 and len(kept) < 110
        assert sum("20 clients are connected" in line for line in server.lines) == 1
        with server.client() as client:
            assert client.get("/health").status_code == 503
        first[0].close()
        wait_for(lambda: len(state.connections) == 19)
        with server.client() as client:
            assert client.get("/health").is_success


def test_connections_leave_descriptors(monkeypatch):
    limits = {"most": 1024}
    monkeypatch.setattr(listening.resource, "getrlimit", lambda kind: (limits["most"], 4096))
    assert 128 < most_connections() < 1024 - 128
    limits["most"] = 64
    assert 1 <= most_connections() <= 16
    with served(connections=ConnectionLimits(connections=1024)) as server:
        assert (
            server.lines[0].startswith("--max-connections 1,024: ")
            and "ulimit -n" in server.lines[0]
        )


def test_errors_of_accepting_are_logged_rarely():
    lines = []
    log = RareLog(lines.append)
    for number in range(1000):
        log.say("accept", f"error {number}")
    log.say("other", "error")
    assert lines == ["error 0", "error"]
    with served() as server:
        for _ in range(100):
            context = {"message": "no descriptors", "exception": OSError(24, "Too many open files")}
            server.http._failed(None, context)
        assert [line for line in server.lines if "descriptors" in line] == [
            "error: no descriptors ([Errno 24] Too many open files)"
        ]


def test_answers_that_nobody_reads_are_bounded(monkeypatch):
    monkeypatch.setattr(listening, "_UNREAD", 30_000_000)
    monkeypatch.setattr(listening, "_CHECKS", 300)
    limits = ConnectionLimits(read_seconds=60.0, write_seconds=60.0)
    with served(connections=limits) as server, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connection(server))
        state = server.http._server.server_state
        wait_for(lambda: len(state.connections) == 4)
        for number, one in enumerate(list(state.connections)):
            one.loop.call_soon_threadsafe(one.transport.write, b" " * 1_000_000 * (16 + number))
        wait_for(lambda: 0 < len(state.connections) <= 2)
        assert sum(one.transport.get_write_buffer_size() for one in state.connections) < 30_000_000
