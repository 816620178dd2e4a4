"""What the server of the dashboard answers, and what it refuses."""

import errno
import gzip
import http.client
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron.apps.dashboard import runs
from megatron.apps.dashboard.connections import RefusedError
from megatron.apps.dashboard.runs import WatchedRun, find_runs
from megatron.apps.dashboard.server import Dashboard

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from dashboards import row, train_row, write_record, write_run  # noqa: E402


@contextmanager
def served(*words: str, token: str | None = None) -> Iterator[Dashboard]:
    """A server that has read its runs."""
    watched = [WatchedRun(str(n), *found) for n, found in enumerate(find_runs(words), 1)]
    for run in watched:
        run.refresh()
    with serving(watched, token) as server:
        yield server


@contextmanager
def serving(watched: list[WatchedRun], token: str | None = None) -> Iterator[Dashboard]:
    """A server whose thread reads the runs."""
    server = Dashboard(watched, "127.0.0.1", 0, token)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "metrics.jsonl", 600, spike=321, broken=2)


@pytest.fixture(scope="module")
def server(run) -> Iterator[Dashboard]:
    with served(f"one={run}") as running:
        yield running


def test_the_loss_of_a_short_run_is_that_of_its_end(tmp_path):
    """And not the mean of all its rows."""
    path = tmp_path / "metrics.jsonl"
    rows = ({"kind": "train", "iteration": n, "loss": 100.0 - n} for n in range(1, 41))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(str(path)) as running:
        found = asked(running, "/api/runs/1")
    assert found["totals"]["loss"] == 60.5


def get(server: Dashboard, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def asked(server: Dashboard, path: str, status: int = 200):
    found, _, body = get(server, path)
    assert found == status, body
    return json.loads(body)


def series_id(server: Dashboard, kind: str = "train", name: str = "loss") -> str:
    listed = asked(server, "/api/runs/1")["series"]
    return next(one["id"] for one in listed if (one["kind"], one["name"]) == (kind, name))


def test_what_is_known_of_a_run(server):
    (listed,) = asked(server, "/api/runs")
    assert listed["name"] == "one" and listed["broken"] == 2 and listed["state"] == "live"
    assert listed["last"]["iteration"] == 600
    found = asked(server, "/api/runs/1")
    assert found["extent"]["iteration"] == [1, 600]
    kinds = [event["kind"] for event in found["events"]]
    assert kinds.count("spike") == 1 and kinds.count("resume") == 1 and kinds.count("save") == 2
    spike = next(event for event in found["events"] if event["kind"] == "spike")
    assert spike["values"]["loss"] == 30 and spike["iteration"] == 321
    assert found["totals"]["energy_joules"] == 8 * 400.0 * 600
    assert found["totals"]["validation_loss"] == pytest.approx(3.1473, abs=1e-3)
    assert asked(server, "/api/runs/1/texts")[-1]["answer"] == "after 500 steps"


def test_curves_and_their_parts(server):
    id = series_id(server)
    whole = asked(server, f"/api/runs/1/series?id={id}&points=50")[id]
    assert max(whole["y"]) == 30 and len(whole["x"]) < 120 and "smooth" not in whole
    part = asked(server, f"/api/runs/1/series?id={id}&points=500&from=100&to=110&smooth=0.9")[id]
    assert part["x"] == list(range(99, 112)) == part["smooth"]["x"]
    expected = [json.loads(train_row(step))["loss"] for step in range(99, 112)]
    assert part["y"] == pytest.approx(expected)
    seconds = asked(server, f"/api/runs/1/series?id={id}&x=seconds&points=5000")[id]["x"]
    each = [json.loads(train_row(step))["seconds_per_iteration"] for step in range(1, 601)]
    assert seconds[-1] == pytest.approx(sum(each), rel=0.01)
    other = series_id(server, "validation web")
    assert asked(server, f"/api/runs/1/series?id={other}&smooth=0.9")[other]["x"][0] == 100


def test_table(server):
    ids = series_id(server), series_id(server, "validation web")
    _, headers, body = get(server, f"/api/runs/1/csv?id={ids[0]}&id={ids[1]}&from=99&to=101")
    lines = body.decode().splitlines()
    assert lines[0] == "iteration,samples,tokens,loss,validation web loss"
    assert [line.split(",")[0] for line in lines[1:]] == ["99", "100", "101"]
    assert lines[1].endswith(",") and not lines[2].endswith(",")
    assert headers["Content-Type"].startswith("text/csv")


def test_names_are_no_formulas_or_columns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(row("train", 1, loss=1.0, **{'=cmd()|"a",b': 2.0}))
    with served(str(path)) as server:
        id = series_id(server, name='=cmd()|"a",b').replace("=", "%3D").replace("|", "%7C")
        id = id.replace('"', "%22").replace(",", "%2C")
        _, _, body = get(server, f"/api/runs/1/csv?id={id}")
        assert body.decode().splitlines()[0] == 'iteration,samples,tokens,"\'=cmd()|""a"",b"'


def test_unchanged_and_packed(server):
    _, headers, body = get(server, "/api/runs/1")
    status, _, nothing = get(server, "/api/runs/1", If_None_Match=headers["ETag"])
    assert status == 304 and not nothing
    _, packed, small = get(server, "/api/runs/1", Accept_Encoding="gzip")
    assert packed["Content-Encoding"] == "gzip" and gzip.decompress(small) == body


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/uPlot.iife.min.js", "/api/runs"])
def test_every_answer_has_the_policy(path, server):
    status, headers, _ = get(server, path)
    assert status == 200 and "default-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../server.py", "/page/..%2fserver.py", "/page/%2e%2e/%2e%2e/etc/passwd"),
        *("/page//etc/passwd", "/page/uPlot.LICENSE", "/server.py", "/page/", "//etc/passwd"),
        *("/api/runs/2", "/api/runs/..%2f1", "/api/runs/1/other", "/api", "/api/runs/1/series/x"),
        *("/api/runs/1/series?id=99-loss", "/api/runs/1/series?id=0-iteration"),
        *("/api/runs/1/series?id=-1-loss", "/api/runs/1/csv?id=0-none"),
    ],
)
def test_nothing_else_is_found(path, server):
    assert asked(server, path, status=404)["error"]


@pytest.mark.parametrize("query", ["x=loss", "points=1e9", "points=x", "smooth=1", "from=nan"])
def test_unknown_values_are_refused_by_name(query, server):
    words = asked(server, f"/api/runs/1/series?id=0-loss&{query}", status=400)["error"]
    assert words.startswith(query.partition("=")[0])


def test_other_names_of_this_machine(server):
    """A page of another site, whose name leads here, reads nothing."""
    assert get(server, "/api/runs", Host="evil.example")[0] == 403
    assert get(server, "/api/runs", Host="localhost:1")[0] == 200
    assert get(server, "/api/runs", Host="[")[0] == 400


def test_token(run, tmp_path):
    with served(str(run), token="secret word") as server:
        assert get(server, "/")[0] == get(server, "/api/runs")[0] == 401
        assert get(server, "/?token=other")[0] == 401
        status, headers, _ = get(server, "/?token=secret%20word")
        assert status == 303 and headers["Location"] == "./"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert get(server, "/api/runs", Cookie=cookie.split(";")[0])[0] == 200
        assert get(server, "/api/runs", Authorization="Bearer secret word")[0] == 200


def test_two_servers_of_a_machine_have_cookies_of_their_own(run):
    """A browser sends a cookie to every port."""
    with served(str(run), token="a") as one, served(str(run), token="b") as other:
        cookies = []
        for server, token in ((one, "a"), (other, "b")):
            _, headers, _ = get(server, f"/?token={token}")
            cookies.append(headers["Set-Cookie"].split(";")[0])
        kept = dict(cookie.split("=", 1) for cookie in cookies)
        both = "; ".join(f"{name}={value}" for name, value in kept.items())
        assert get(one, "/api/runs", Cookie=both)[0] == 200
        assert get(other, "/api/runs", Cookie=both)[0] == 200


def test_a_server_without_a_token_takes_no_empty_one(run):
    with pytest.raises(ValueError, match="--token is empty"):
        Dashboard([], "127.0.0.1", 0, "")


INNER = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER)


def answers(server: Dashboard, request: bytes) -> list[bytes]:
    """The status of each answer to bytes on one connection, which the server closes."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=5) as connection:
        with suppress(OSError):
            connection.sendall(request)
        content = b""
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                content += piece
    return re.findall(rb"HTTP/1\.1 (\d+)", content)


def get_with(*lines: bytes, body: bytes = b"", first: bytes = b"GET /api/runs HTTP/1.1") -> bytes:
    return b"\r\n".join((first, b"Host: localhost", *lines, b"", body))


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (get_with(b"Content-Length: %d" % len(INNER), body=INNER), b"400"),
        (get_with(b"Transfer-Encoding: chunked", body=CHUNK), b"400"),
        (get_with(b"Content-Length: 0", b"Transfer-Encoding: chunked", body=CHUNK), b"400"),
        (get_with(b"Transfer-Encoding: identity", body=INNER), b"400"),
        (get_with(b"Transfer-Encoding:\x0bchunked", body=CHUNK), b"400"),
        (get_with(b"Transfer-Encoding : chunked", body=CHUNK), b"400"),
        (get_with(b"Content-Length: 0", b"Content-Length: 5", body=INNER), b"400"),
        (get_with(b"Content-Length: 0, 5", body=INNER), b"400"),
        (get_with(b"Content-Length: +0", body=INNER), b"400"),
        (get_with(b"Content-Length: 00", body=INNER), b"400"),
        (get_with(b"X: a", b" Content-Length: 5", body=INNER), b"400"),
        (get_with(b"X: a\rContent-Length: 5", body=INNER), b"400"),
        (get_with(b"X: a\nContent-Length: 5", body=INNER), b"400"),
        (get_with(b"X: a\0", body=INNER), b"400"),
        (get_with(b"Host: example.com", body=INNER), b"400"),
        (get_with(b"Expect: 100-continue", body=INNER), b"417"),
        (get_with(b"Content-Length: 5", first=b"HEAD / HTTP/1.1", body=INNER), b"400"),
        (get_with(b"Content-Length: 5", first=b"POST / HTTP/1.1", body=INNER), b"405"),
        (get_with(first=b"POST / HTTP/1.1", body=INNER), b"405"),
        (get_with(first=b"CONNECT localhost:1 HTTP/1.1", body=INNER), b"405"),
        (get_with(first=b"GET http://example.com/api/runs HTTP/1.1", body=INNER), b"400"),
        (get_with(first=b"GET /api/runs HTTP/1.1 ", body=INNER), b"400"),
        (get_with(first=b"GET  /api/runs HTTP/1.1", body=INNER), b"400"),
        (get_with(first=b"GET /api/runs HTTP/2.0", body=INNER), b"400"),
        (get_with(first=b"GET /api/runs", body=INNER), b"400"),
        (b"GET /api/runs HTTP/1.1\nHost: localhost\n\n" + INNER, b"400"),
        (b"GET /api/runs HTTP/1.1\r\n\r\n" + INNER, b"400"),
        (b"\x16\x03\x01" * 100 + b"\r\n" + INNER, b"400"),
        (get_with(b"Cookie: " + b"\\" * 60_000, body=INNER), b"431"),
        (get_with(b"Cookie: a=" + b"b; c=" * 10_000, body=INNER), b"431"),
        (get_with(*[b"X: y"] * 200, body=INNER), b"431"),
        (get_with(*[b"X: " + b"y" * 1000] * 90, body=INNER), b"431"),
        (get_with(b"X: " + b"y" * 10_000_000, body=INNER), b"431"),
        (get_with(first=b"GET /?x=" + b"%41" * 20_000 + b" HTTP/1.1", body=INNER), b"414"),
        (get_with(first=b"GET /" + b"a/" * 500_000 + b" HTTP/1.1", body=INNER), b"414"),
    ],
)
def test_a_request_that_can_be_read_in_two_ways_has_one_answer(request_bytes, status, server):
    """A proxy in front of the server would give a second one to its next client."""
    assert answers(server, request_bytes) == [status]


@pytest.mark.parametrize(
    "request_bytes",
    [
        get_with(b"Connection: close"),
        get_with(b"Content-Length: 0", b"Connection: close"),
        get_with(b"Connection: close", first=b"GET http://localhost/api/runs HTTP/1.1"),
        get_with(b"Connection: close", first=b"HEAD /api/runs HTTP/1.1"),
        get_with(b"Cookie: \xc3\xa4=\x85", b"Connection: close"),
        b"GET /api/runs HTTP/1.0\r\n\r\n",
    ],
)
def test_ordinary_requests_are_answered(request_bytes, server):
    assert answers(server, request_bytes) == [b"200"]
    assert answers(server, INNER + request_bytes) == [b"200", b"200"]


@pytest.mark.parametrize("text", ["\\" * 30_000, '"' * 30_000, "a=" * 15_000, ";" * 30_000])
def test_cookies_cost_no_time_before_the_token_is_known(text, run):
    with served(str(run), token="a") as server:
        begin = time.process_time()
        for _ in range(5):
            assert get(server, "/api/runs", Cookie=f'a="{text}')[0] == 401
        assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    "end, quiet, state, words",
    [
        ("the end of its plan", 0, "finished", "finished"),
        ("SIGTERM", 0, "stopped", "stopped: SIGTERM"),
        ("KeyboardInterrupt: ", 0, "stopped", "stopped: KeyboardInterrupt:"),
        ("--exit-interval 5", 9e4, "stopped", "stopped: --exit-interval 5"),
        ("RuntimeError: no\nmemory", 0, "failed", "failed: RuntimeError: no memory"),
        (None, 0, "live", "running"),
        (None, 3600, "quiet", "no rows for 60 minutes"),
        (None, 9e4, "quiet", "no rows for 25 hours"),
        (None, 9e5, "quiet", "no rows for 10 days"),
    ],
)
def test_what_a_run_does_is_known_from_its_record_and_its_file(end, quiet, state, words, tmp_path):
    path = write_run(tmp_path / "metrics.jsonl", 20)
    write_record(path, end=end, training__train_iters=40)
    os.utime(path, (time.time() - quiet,) * 2)
    with served(str(path)) as server:
        (listed,) = asked(server, "/api/runs")
    assert (listed["state"], listed["words"]) == (state, words)


def test_a_run_that_reached_its_plan_has_finished_without_a_word(tmp_path):
    path = write_run(tmp_path / "metrics.jsonl", 20)
    write_record(path, training__train_iters=20)
    os.utime(path, (1e9, 1e9))
    with served(str(path)) as server:
        assert asked(server, "/api/runs")[0]["state"] == "finished"


def test_a_run_of_slow_steps_is_live(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(train_row(1, seconds_per_iteration=1000.0))
    os.utime(path, (time.time() - 5000,) * 2)
    with served(str(path)) as server:
        assert asked(server, "/api/runs")[0]["state"] == "live"


def test_power_is_the_energy_of_each_step(server):
    """``write_run`` has eight devices of 400 joules a step."""
    id = series_id(server, name="power_watts")
    curve = asked(server, f"/api/runs/1/series?id={id}&points=5000")[id]
    steps = map(int, curve["x"])
    seconds = [json.loads(train_row(step))["seconds_per_iteration"] for step in steps]
    assert curve["y"][0] is None and len(curve["x"]) == 600
    expected = [8 * 400.0 / each for each in seconds[1:]]
    known = [(a, b) for a, b in zip(curve["y"][1:], expected, strict=True) if a is not None]
    assert len(known) > 590
    assert [a for a, _ in known] == pytest.approx([b for _, b in known])


def test_the_last_events_and_how_many_there_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    events = (row(f"kind {n % 300}", n, **{f"v{n % 7}": n}) for n in range(1, 5001))
    path.write_text(train_row(1) + "".join(events))
    with served(str(path)) as server:
        known = asked(server, "/api/runs/1")
    assert known["event_count"] == 5000
    steps = [event["iteration"] for event in known["events"]]
    assert steps == list(range(3001, 5001))
    assert known["events"][-1]["values"] == {"v2": 5000.0} and len(json.dumps(known)) < 400_000


def test_events_of_one_step_are_bounded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    events = (row(f"kind {n % 300}", 1, v=n) for n in range(6000))
    path.write_text(train_row(1) + "".join(events))
    watched = WatchedRun("1", "one", path)
    watched.refresh()
    found = watched.summary()
    watched.close()
    assert found["event_count"] == 6000 and len(found["events"]) == 2000


def test_a_table_that_is_too_long_is_refused(server, monkeypatch):
    id = series_id(server)
    monkeypatch.setattr(runs, "MOST_CELLS", 599)
    assert "more than 599 values" in asked(server, f"/api/runs/1/csv?id={id}", 413)["error"]
    path = f"/api/runs/1/csv?from=1&to=500{f'&id={id}' * 100}"
    assert get(server, path)[2].splitlines()[0] == b"iteration,samples,tokens,loss"


def test_connections_are_bounded(server, monkeypatch, capfd):
    """A silent client makes room for a new one; one that sends too slowly is closed."""
    monkeypatch.setattr(Dashboard, "most_connections", 3)
    server.most_connections = 3
    address = server.server_address[:2]
    silent = [socket.create_connection(address, timeout=10) for _ in range(8)]
    silent[7].sendall(b"GET /api/ru")
    assert asked(server, "/api/runs") and silent[0].recv(100) == b""
    monkeypatch.setattr(Dashboard, "request_seconds", 0.0)
    assert silent[7].recv(100) == b""
    for one in silent:
        one.close()


def test_a_client_that_goes_away_is_not_logged(server, capfd):
    with suppress(OSError), socket.create_connection(server.server_address[:2]) as client:
        client.sendall(b"GET /api/ru")
        wait_until(lambda: server._silent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not server._count)
    assert capfd.readouterr().err == ""


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pages_that_are_told_of_updates_are_bounded(server, monkeypatch):
    monkeypatch.setattr(server, "followers", threading.BoundedSemaphore(1))
    with server.followers:
        assert "close one" in asked(server, "/api/updates", 503)["error"]
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        client.sendall(b"HEAD /api/updates HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


def test_large_answers_that_are_not_read_are_bounded(server):
    with server.sending(1 << 28), pytest.raises(RefusedError), server.sending(1 << 17):
        pass
    with server.sending(1 << 28):
        assert asked(server, "/api/runs")


def test_other_runs_are_read_while_one_is_large(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(train_row(1))
    watched = WatchedRun("1", "one", tmp_path / "metrics.jsonl")
    watched.refresh(lambda: True)
    assert watched.listing()["state"] == "loading"
    watched.refresh()
    assert watched.listing()["state"] == "live"
    watched.close()


def wait_for(server: Dashboard, state: str) -> dict[str, object]:
    deadline = time.monotonic() + 10
    while (listed := asked(server, "/api/runs")[0])["state"] != state:
        assert time.monotonic() < deadline, listed
        time.sleep(0.05)
    return listed


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ESTALE, "Stale file handle"), "cannot be read: Stale file handle"),
        (RuntimeError("odd"), "cannot be read: RuntimeError: odd"),
    ],
)
def test_a_record_that_cannot_be_looked_for_ends_no_reading(error, words, tmp_path, monkeypatch):
    """A server of files may be away for a moment."""
    found = runs.newest_record
    failing = [True]

    def newest_record(metrics):
        if failing[0]:
            raise error
        return found(metrics)

    monkeypatch.setattr(runs, "newest_record", newest_record)
    monkeypatch.setattr(runs, "_RETRY_SECONDS", 0.1)
    path = write_run(tmp_path / "metrics.jsonl", 5)
    with serving([WatchedRun("1", "one", path)]) as server:
        assert wait_for(server, "error")["error"] == words
        failing[0] = False
        assert wait_for(server, "live")["error"] is None
        with path.open("a") as file:
            file.write(train_row(6))
        deadline = time.monotonic() + 10
        while asked(server, "/api/runs")[0]["last"]["iteration"] != 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_updates_are_told(tmp_path):
    path = write_run(tmp_path / "metrics.jsonl", 30)
    with served(str(path)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
        connection.request("GET", "/api/updates")
        stream = connection.getresponse()
        first = json.loads(stream.readline().removeprefix(b"data: "))
        with path.open("a") as file:
            file.write(train_row(31))
        stream.readline()
        second = json.loads(stream.readline().removeprefix(b"data: "))
        assert first[0]["version"] != second[0]["version"]
        assert second[0]["last"]["iteration"] == 31
        connection.close()


def test_a_file_of_something_else_is_an_error_of_the_run(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("iteration 1 loss 2\n" * 4)
    with served(str(path)) as server:
        (listed,) = asked(server, "/api/runs")
        assert listed["state"] == "error" and "none of the 4 lines" in listed["error"]


def test_folders_and_names(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name / "metrics.jsonl", 1)
    assert [name for name, _ in find_runs([str(tmp_path / "runs")])] == ["a", "b"]
    assert find_runs([f"x={tmp_path / 'runs' / 'a'}"])[0][0] == "x"
    twice = find_runs([str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "a")])
    assert twice[0][0].endswith("metrics.jsonl")
    for word in ("missing", f"x={tmp_path}/missing", str(tmp_path / "runs" / "a" / ".none")):
        with pytest.raises(FileNotFoundError, match="--metrics-file"):
            find_runs([word])


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--port", "{taken}"], "--port {taken} is taken; give another one"),
        (["--port", "70000"], "--port 70000: expected 0 to 65535"),
        (["--host", "203.0.113.9", "--port", "0"], "--host 203.0.113.9: "),
        (["--port", "many"], "--port"),
        (["--token", ""], "--token is empty; give a secret, or leave the flag out"),
        (["--token", " ", "--host", "0.0.0.0"], "--token is empty; give a secret, or leave"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_mistakes_of_the_command(flags, words, run, capsys):
    from tools import dashboard

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            dashboard.main([str(run), *(flag.replace("{taken}", port) for flag in flags)])
    assert ended.value.code == 2
    assert words.replace("{taken}", port) in capsys.readouterr().err
