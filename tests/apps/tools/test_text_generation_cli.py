"""tools/text_generation_cli.py as people type into it; the server is told its answers."""

import io
import json
import os
import socket
import stat
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tool_modules import load_program

TOOL = Path(__file__).parents[3] / "tools" / "text_generation_cli.py"
PROMPT, NUMBER = "Enter prompt: ", "Enter number of tokens to generate: "


@pytest.fixture(scope="module")
def program():
    return load_program("tools/text_generation_cli.py")


@pytest.fixture
def server():
    """Answers each PUT with the next of ``server.answers``, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.asked.append((self.path, dict(self.headers), json.loads(content)))
            status, answer = self.server.answers.pop(0)
            if status is None:
                return  # closes the connection
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as started:
        started.answers, started.asked = [], []
        thread = threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def talk(program, server, monkeypatch, capsys):
    """Types lines; returns what is printed."""

    def typed(*lines, flags=(), path=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        program.main([f"127.0.0.1:{server.server_address[1]}{path}", *flags])
        return capsys.readouterr().out

    return typed


def test_the_words_of_megatron(talk, server):
    server.answers = [(200, {"text": ["Hello world, ünd"], "segments": [[]], "logprobs": None})]
    printed = talk("Hello world", "64")
    assert printed == f"{PROMPT}{NUMBER}Megatron Response: \nHello world, ünd\n{PROMPT}\n"
    ((path, headers, request),) = server.asked
    assert path == "/api" and headers["Content-Type"].startswith("application/json")
    assert request == {"prompts": ["Hello world"], "tokens_to_generate": 64}
    assert "Authorization" not in headers


def test_asks_again_after_errors(talk, server):
    server.answers = [
        (400, {"message": "Empty prompts require add_BOS=true"}),
        (502, b"<html>Bad gateway</html>"),
        (200, {"text": ["a b"]}),
    ]
    printed = talk("", "1", "a", "many", "", "2", "a", "3")
    assert "Error 400: Empty prompts require add_BOS=true\n" in printed
    assert "'many' is not a whole number\n" + NUMBER + "'' is not a whole number\n" in printed
    assert "Error 502: <html>Bad gateway</html>\n" in printed
    assert printed.endswith(f"Megatron Response: \na b\n{PROMPT}\n")


@pytest.mark.parametrize("answer", [b"[]", b'{"text": []}', b'"text"', b'{"texts": ["a"]}', b""])
def test_an_answer_of_another_kind_is_shown(answer, talk, server):
    server.answers = [(200, answer)]
    assert f"Error 200: {answer.decode()}\n" in talk("a", "1")


def test_the_key_is_sent(talk, server):
    server.answers = [(200, {"text": ["a"]})]
    talk("a", "1", flags=("--api-key", "secret"), path="/behind/api")
    path, headers, _ = server.asked[0]
    assert path == "/behind/api" and headers["Authorization"] == "Bearer secret"


def test_nothing_listens(program, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n1\n"))
    with pytest.raises(SystemExit, match=f"nothing listens at {address}; start tools/run_text"):
        program.main([address])


def test_a_connection_that_ends_without_an_answer(talk, server):
    server.answers = [(None, b"")]
    with pytest.raises(SystemExit, match="gives no answer to PUT /api: Remote end closed"):
        talk("a", "1")


def test_ctrl_c_ends_it(program, monkeypatch, capsys):
    def pressed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    with pytest.raises(SystemExit) as end:
        program.main(["localhost:5000"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("\n", "")


@pytest.mark.parametrize("text", ["localhost:port", "localhost:99999", "ftp://a", ":5000", "a b:1"])
def test_a_wrong_address(text, program, capsys):
    with pytest.raises(SystemExit) as end:
        program.main([text])
    assert end.value.code == 2
    assert f"{text!r} is not the address of a server: HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown", "secure"),
    [
        ("localhost:5000", "localhost:5000", False),
        ("[::1]:5000", "[::1]:5000", False),
        ("https://example.org/models/api", "example.org", True),
    ],
)
def test_addresses(text, shown, secure, program):
    address = program.Address.of(text)
    assert str(address) == shown and address.secure == secure


def test_no_address(program, capsys):
    with pytest.raises(SystemExit):
        program.main([])
    assert "HOST:PORT" in capsys.readouterr().err


def test_it_is_executable():
    assert os.stat(TOOL).st_mode & stat.S_IXUSR
    assert TOOL.read_text().startswith("#!/usr/bin/env python\n")
