"""What bad, slow and impatient clients get, and what becomes of the others."""

import contextlib
import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from serving import TextRunner, events, served

from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.generation.server.config import ServiceLimits
from megatron.apps.generation.server.listening import ConnectionLimits

UNFINISHED = (b"", b"POST /api HT", b"GET /health HTTP/1.1\r\nA: ")
LONG = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True}


def wait_for(condition, seconds=5):
    """Until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def connection(server):
    found = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    found.settimeout(10)
    return found


def head(path, length, *more):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture(scope="module")
def slow():
    """A server whose steps take a while, with little patience."""
    runner = TextRunner(259, delay=0.005)
    with served(
        runner,
        ServiceLimits(request_seconds=2.0, request_bytes=2000, read_seconds=1.0),
        engine_limits=EngineLimits(running=2, step_tokens=64, waiting=2),
        connections=ConnectionLimits(read_seconds=1.0, write_seconds=1.0),
    ) as found:
        yield found


def still_answers(server):
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"prompts": NaN}', "not JSON"),
        (b'{"prompts": ["\\ud800"]}', "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
        (b'{"prompts": ' + b"[" * 100 + b"]" * 100 + b"}", "inside each other"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "inside each other"),
        (b"[" * 1900, "not JSON"),
    ],
)
def test_bodies_that_are_no_objects(slow, body, words):
    with slow.client() as client:
        response = client.put("/api", content=body)
    assert response.status_code == 400 and words in response.json()["message"]


def test_many_brackets_in_a_flat_body_are_no_depth(slow):
    with slow.client() as client:
        body = {"prompt": "[" * 200, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).is_success


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long(slow, chunked):
    content = b'{"prompt": "' + b"a" * 20_000 + b'"}'
    pieces = (content[start : start + 1000] for start in range(0, len(content), 1000))
    with slow.client() as client:
        response = client.post("/v1/completions", content=pieces if chunked else content)
    assert response.status_code == 413 and response.headers["connection"] == "close"
    assert "--max-request-bytes" in response.json()["error"]["message"]
    still_answers(slow)


def test_a_declared_length_is_refused_before_the_body(slow):
    with connection(slow) as client:
        client.sendall(head("/api", 10**12, "Expect: 100-continue"))
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come(slow):
    with connection(slow) as client:
        client.sendall(head("/api", 100) + b"{")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_requests_that_do_not_begin(slow):
    """Each is cut after its time; the three wait at once."""
    with ExitStack() as stack:
        clients, begun = [stack.enter_context(connection(slow)) for _ in range(3)], time.monotonic()
        for client, sent in zip(clients, UNFINISHED, strict=True):
            client.sendall(sent)
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
            assert 0.3 < time.monotonic() - begun < 30


def test_a_body_that_continues_after_the_answer(slow):
    with connection(slow) as client:
        client.sendall(head("/nothing", 10**9))
        assert client.recv(100).startswith(b"HTTP/1.1 404")
        with pytest.raises(OSError):
            for _ in range(300):
                client.sendall(b"x")
                time.sleep(0.01)


def test_a_client_that_does_not_read(slow):
    body = json.dumps({**LONG, "stream": True}).encode()
    with connection(slow) as client:
        client.sendall(head("/v1/completions", len(body)) + body)
        assert b"200 OK" in client.recv(100)
        # More than the buffers of both sides take, so that the rest of the answer has to wait.
        open_ones = slow.http._server.server_state.connections
        (server_side,) = [one for one in open_ones if one.cycle and not one.cycle.response_complete]
        server_side.loop.call_soon_threadsafe(server_side.transport.write, b" " * 40_000_000)
        wait_for(lambda: server_side not in open_ones)
        wait_for(lambda: slow.engine.stats.running == slow.service.active == 0)
    still_answers(slow)


@pytest.mark.proof
def test_a_request_that_takes_too_long(slow):
    with slow.client() as client:
        response = client.post("/v1/completions", json=LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: slow.engine.stats.running == 0)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            assert stream.status_code == 200
            last = events(stream)[-1]
        assert last["error"]["code"] == "timeout"
    wait_for(lambda: slow.engine.stats.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_is_not_generated_for(stream):
    body = json.dumps({**LONG, "stream": stream}).encode()
    with served(TextRunner(259, delay=0.02)) as server:  # it would take 18 seconds
        client = connection(server)
        client.sendall(head("/v1/completions", len(body)) + body)
        wait_for(lambda: server.engine.stats.running == 1)
        if stream:
            assert b"200 OK" in client.recv(1000)
        client.close()
        wait_for(lambda: server.engine.stats.running == server.service.active == 0)


def test_a_queue_that_is_full(slow):
    with slow.client() as client:
        body = {**LONG, "n": 5}
        body["max_tokens"] = 100
        response = client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "queue_full")
        assert response.headers["retry-after"] == "1"
        wait_for(lambda: slow.engine.stats.running == slow.engine.stats.waiting == 0)
    still_answers(slow)


def test_too_many_connections():
    with served(connections=ConnectionLimits(connections=3)) as server:
        first = [connection(server) for _ in range(3)]
        wait_for(lambda: len(server.http._server.server_state.connections) == 3)
        with server.client() as client:
            assert client.get("/health").status_code == 503
        for one in first:
            one.close()
        wait_for(lambda: not server.http._server.server_state.connections)
        still_answers(server)


def test_one_bad_request_does_not_end_another():
    with served(TextRunner(259, delay=0.01)) as server:
        found = []
        body = {"prompt": "ab", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

        def ask():
            with server.client() as client:
                found.append(client.post("/v1/completions", json=body).json())

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: server.engine.stats.running)
        for content in (b"{", b'{"prompt": 1}', b"x" * 100):
            with server.client() as client:
                assert client.post("/v1/completions", content=content).status_code == 400
        raw = http.client.HTTPConnection(urlsplit(server.url).netloc)
        raw.sock = connection(server)
        raw.sock.sendall(b"\x00\x01 nonsense\r\n\r\n")
        assert b"400" in raw.sock.recv(100)
        raw.close()
        thread.join()
        ask()
        assert found[0]["choices"] == found[1]["choices"]


def test_draining():
    with served(TextRunner(259, delay=0.005)) as server, server.client() as client:
        request = {**LONG, "max_tokens": 60, "stream": True}
        with client.stream("POST", "/v1/completions", json=request) as stream:
            server.service.drain()
            with server.client() as other:
                response = other.post("/v1/completions", json=LONG)
                assert (response.status_code, response.headers["retry-after"]) == (503, "5")
                assert other.put("/api", json={"prompts": ["a"]}).status_code == 503
                health = other.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
            ended = server.http.submit(lambda: server.engine.drain(5))
            assert len(events(stream)) >= 60
        assert ended.result(5)


def test_draining_cancels_what_takes_longer():
    with served(TextRunner(259, delay=0.005)) as server, server.client() as client:
        request = {**LONG, "stream": True}
        with client.stream("POST", "/v1/completions", json=request) as stream:
            server.service.drain()
            assert not server.http.submit(lambda: server.engine.drain(0.1)).result(5)
            assert events(stream)[-1]["error"]["code"] == "stopped"


def test_a_model_that_fails():
    with served(TextRunner(259, fail_at=3)) as server, server.client() as client:
        response = client.post("/v1/completions", json=LONG)
        assert response.status_code == 503
        assert server.engine.failed is not None
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert client.post("/v1/completions", json=LONG).status_code == 503


def test_a_model_that_is_being_loaded():
    with served(opened=False) as server, server.client() as client:
        assert client.get("/health").json() == {"status": "loading"}
        assert client.get("/v1/models").status_code == 503
        assert client.get("/metrics").is_success and client.get("/").is_success


def test_an_error_of_our_own_is_answered(monkeypatch):
    with served() as server, server.client() as client:
        monkeypatch.setattr(server.service, "complete", None)
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 500
        assert "TypeError" not in response.text
        assert any("TypeError" in line for line in server.lines)
        monkeypatch.undo()
        still_answers(server)


def test_slow_clients_share_a_bound_of_memory():
    body = json.dumps({"prompts": ["a"], "max_len": "x" * 190_000}).encode()
    sent = b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    limits = ServiceLimits(request_bytes=200_000)
    with served(limits=limits) as server, ExitStack() as stalled, server.client() as client:
        port = int(server.url.rpartition(":")[2])
        for _ in range(16):
            connection = stalled.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(sent + body[:-1])
        end = time.monotonic() + 10
        while (response := client.put("/api", content=body)).status_code != 503:
            assert time.monotonic() < end
        assert "large requests" in response.json()["message"] and response.headers["retry-after"]
        assert client.put("/api", json={"prompts": ["a"], "tokens_to_generate": 1}).is_success
        stalled.close()
        while (response := client.put("/api", content=body)).status_code != 400:
            assert time.monotonic() < end
