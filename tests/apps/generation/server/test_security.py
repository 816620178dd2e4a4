"""What a hostile client gets: no file, no connection to elsewhere, no key, and never a failure."""

import contextlib
import json
import re
import socket
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="pip install -e '.[serve]'")

from serving import served  # noqa: E402

from megatron.apps.generation.decoding.chat import ChatFormat  # noqa: E402
from megatron.apps.generation.server.app import Access  # noqa: E402
from megatron.apps.generation.server.config import ServiceLimits  # noqa: E402

KEY = "correct horse battery staple"
RESET = 0
"""Status of a connection that ended without an answer."""
COMPLETION = {"prompt": "Hello", "max_tokens": 3}
_TOUCHES = re.compile(
    r"open$|socket\.(connect|getaddrinfo|gethostby\w+|sendto|bind)$|subprocess\.|os\.(system|exec|"
    r"posix_spawn|spawn|fork|remove|rename|mkdir|rmdir|listdir|scandir|chmod|putenv)|import$|"
    r"ctypes\.|pty\.|shutil\.|urllib\.|ftplib\.|smtplib\.|code\.__new__$"
)
"""Audit events of a process that reaches for files, other machines, programs or code."""


class Watch:
    """Events of all threads but this one while it is on. A hook stays for the life of a process."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        self._own = threading.get_ident()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if self.on and threading.get_ident() != self._own and _TOUCHES.match(event):
            self.events.append(f"{event} {arguments!r:.200}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def server():
    with served(limits=ServiceLimits(request_bytes=20_000, request_seconds=20)) as running:
        yield running


@pytest.fixture(scope="module")
def locked():
    access = Access(key=KEY, origins=("https://friend.example",))
    with served(access=access) as running:
        yield running


def exchange(server, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body that follow bytes as they are: clients tidy paths and headers."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        got = b""
        # A server that refuses a request before it has read it all resets the connection.
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                got += piece
    if not got:
        return RESET, {}, b""
    head, _, body = got.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, body


def get(server, path: str, *headers: str, method: str = "GET", host: str = "localhost"):
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers)
    return exchange(server, "\r\n".join((*lines, "", "")).encode("latin-1"))


def post(server, path: str, body: bytes, *headers: str):
    length = f"Content-Length: {len(body)}"
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", length, *headers)
    return exchange(server, "\r\n".join((*lines, "", "")).encode("latin-1") + body)


CLIMBS = (
    "../",
    "..%2f",
    "%2e%2e/",
    "%2e%2e%2f",
    "..%5c",
    "..\\",
    "%252e%252e%252f",
    "....//",
    ".%00./",
)
TARGETS = ("etc/passwd", "service.py", "setup.py", "index.html")
PATHS = [
    *(
        f"/page/{climb * depth}{target}"
        for climb in CLIMBS
        for depth in (1, 9)
        for target in TARGETS
    ),
    *(f"/{climb * 9}etc/passwd" for climb in CLIMBS),
    *("/page//etc/passwd", "/page/%2fetc%2fpasswd", "//etc/passwd", "/page/", "/page", "/page/."),
    *("/page/style.css/../../service.py", "/page/style.css%00.py", "/page/__init__.py", "/page.py"),
    *("/page/C:%5cwindows%5cwin.ini", "/page/~root/.bashrc", "/page/page_files.py", "/.env"),
    *("http://localhost/etc/passwd", "file:///etc/passwd", "/v1/models/../../etc/passwd"),
    *("/v1/models/..%2f..%2fetc%2fpasswd", "/docs", "/openapi.json", "/redoc", "/static/x"),
]

FIELDS: list[dict] = [
    {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"},
    {"chat_template_kwargs": {"x": "{{ 7*191 }}"}},
    {"template": "{{ 7*191 }}"},
    {"tokenizer": "/etc/passwd"},
    {"adapter": "../../etc"},
    {"model": "/etc/passwd"},
    {"model": "../../../../etc/passwd"},
    {"file": "/etc/passwd"},
    {"documents": ["file:///etc/passwd"]},
    {"response_format": {"type": "json_schema", "json_schema": "/etc/passwd"}},
    {"structured_outputs": {"grammar_file": "/etc/passwd"}},
    {"logits_processors": ["os.system"]},
    {"__class__": "x"},
]
"""Each is refused by both of OpenAI's requests."""

CONTENTS: list = [
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}],
    [{"type": "input_audio", "input_audio": {"data": "/etc/passwd", "format": "wav"}}],
    [{"type": "file", "file": {"file_id": "/etc/passwd"}}],
]
"""Each is refused as a message's."""


def test_no_request_reaches_files_or_machines(server, watch):
    """Every path outside the API is 404, every field that names a file or an address is refused,
    and neither opens anything."""
    post(server, "/v1/completions", json.dumps(COMPLETION).encode())  # what is imported when used
    get(server, "/page/style.css")
    get(server, "/nothing")
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    post(server, "/v1/chat/completions", json.dumps(chat).encode())
    watch.events.clear()
    watch.on = True
    found, refused = {}, {}
    try:
        assert [get(server, path)[0] for path in ("/", "/page/page.js", "/page/icon.svg")] == [
            200
        ] * 3
        assert post(server, "/v1/completions", json.dumps(COMPLETION).encode())[0] == 200
        for path in PATHS:
            found[path] = get(server, path)
        for field in FIELDS:
            for path, plain in (("completions", COMPLETION), ("chat/completions", chat)):
                body = json.dumps(plain | field).encode()
                refused[f"{path} {field}"] = post(server, f"/v1/{path}", body)
        for content in CONTENTS:
            body = chat | {"messages": [{"role": "user", "content": content}]}
            refused[str(content)] = post(server, "/v1/chat/completions", json.dumps(body).encode())
    finally:
        watch.on = False
    assert not watch.events
    assert {path for path, (status, *_) in found.items() if status not in (400, 404)} == set()
    assert not [path for path, (*_, body) in found.items() if b"root:" in body or b"import" in body]
    assert {name: got for name, got in refused.items() if got[0] not in (400, 404)} == {}
    assert all(json.loads(body)["error"]["message"] for _, _, body in refused.values())


def _schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.proof
@pytest.mark.parametrize(
    "field",
    [
        {"response_format": _schema({"$ref": "file:///etc/passwd"})},
        {"response_format": _schema({"$ref": "http://127.0.0.1:9/schema.json"})},
        {"response_format": _schema({"$schema": "http://127.0.0.1:9/s", "$ref": "other.json"})},
        {"structured_outputs": {"grammar": '%import "/etc/passwd"\nstart: "x"'}},
        {"structured_outputs": {"grammar": '%include /etc/passwd\nstart: "x"'}},
        {"structured_outputs": {"regex": "(a*)*" * 300 + "{1000}{1000}{1000}"}},
    ],
)
def test_constraints_refer_to_nothing(field, server):
    """Neither to files nor to addresses; and none takes the server with it."""
    pytest.importorskip("llguidance", reason="pip install -e '.[serve]'")
    status, _, body = post(server, "/v1/completions", json.dumps(COMPLETION | field).encode())
    assert status == 400 and b"root:" not in body
    assert get(server, "/health")[0] == 200


def test_the_watch_sees_what_it_forbids(watch):
    """Otherwise the test above shows nothing."""

    def reach() -> None:
        Path("/etc/hostname").exists()
        open(__file__).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1)

    watch.events.clear()
    watch.on = True
    thread = threading.Thread(target=reach)
    thread.start()
    thread.join()
    watch.on = False
    assert {event.split()[0] for event in watch.events} >= {"open", "socket.connect"}


def test_templates_in_texts_are_texts(server):
    """Jinja in a prompt or a message reaches the model as it is."""
    source = "{{ 7 * 191 }}{% for i in range(9**9) %}{% endfor %}{{ messages.__class__ }}"
    body = json.dumps({"prompt": source, "max_tokens": 1, "echo": True}).encode()
    status, _, got = post(server, "/v1/completions", body)
    assert status == 200 and json.loads(got)["choices"][0]["text"].startswith(source)
    message = {"role": "user", "content": source}
    body = json.dumps({"messages": [message], "max_tokens": 1}).encode()
    status, _, got = post(server, "/v1/chat/completions", body)
    tokens = json.loads(got)["usage"]["prompt_tokens"]
    assert status == 200 and tokens == len(f"user: {source}\nassistant: ")


@pytest.mark.proof
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_templates_of_a_model_are_in_a_sandbox(template):
    """What came with a tokenizer can read nothing; texts in messages are no templates for it."""
    pytest.importorskip("jinja2", reason="pip install -e '.[serve]'")
    source = "{{ 7 * 191 }}{% include '/etc/passwd' %}"
    wrote = {"messages": [{"role": "user", "content": source}], "max_tokens": 1}
    harmless = ChatFormat({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    for chat, expected in ((ChatFormat({"default": template}), 400), (harmless, 200)):
        with served(chat=chat) as running:
            body = json.dumps(wrote).encode()
            status, _, got = post(running, "/v1/chat/completions", body)
        chat.close()
        assert status == expected and b"root:" not in got and b"uid=" not in got
    assert json.loads(got)["usage"]["prompt_tokens"] == len(source)


@pytest.mark.parametrize(
    "path", ["/", "/page/page.js", "/health", "/v1/models", "/nothing", "/%00"]
)
def test_headers_of_every_answer(path, server):
    status, headers, _ = get(server, path)
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers and "access-control-allow-origin" not in headers


def test_no_page_of_another_site_uses_the_server(server, locked):
    """Neither by its origin, nor by a name of its own that leads to this machine, nor by a form;
    except those that the owner allows."""
    body = json.dumps(COMPLETION).encode()
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://localhost.evil"):
        status, headers, _ = post(server, "/v1/completions", body, f"Origin: {origin}")
        assert status == 403 and "access-control-allow-origin" not in headers
        asked = ("Access-Control-Request-Method: POST", f"Origin: {origin}")
        status, headers, _ = get(server, "/v1/completions", *asked, method="OPTIONS")
        assert status in (403, 405) and "access-control-allow-origin" not in headers
    for host in ("evil.example", "localhost.evil.example", "[::ffff:8.8.8.8]", "127.0.0.1.nip.io"):
        assert get(server, "/v1/models", host=host)[0] == 403

    friend = ("Origin: https://friend.example", f"Authorization: Bearer {KEY}")
    status, headers, _ = post(locked, "/v1/completions", body, *friend)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://friend.example")
    assert "access-control-allow-credentials" not in headers
    asked = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization")
    status, headers, _ = get(locked, "/v1/completions", friend[0], *asked, method="OPTIONS")
    assert (status, headers["access-control-allow-origin"]) == (200, "https://friend.example")
    evil = ("Origin: https://friend.example.evil", friend[1])
    assert post(locked, "/v1/completions", body, *evil)[0] == 403


@pytest.mark.parametrize(
    "host",
    ["[", "]", "[::1", "a:b:c", "", " ", "localhost:99999999", "\xff\xfe", "@", "a@b", "[v1.x]"],
)
def test_strange_hosts_and_origins_are_refused(host, server):
    """Not with a failure of the server's own."""
    before = len(server.lines)
    for headers in ((), (f"Origin: {host}",), (f"Origin: http://{host}",)):
        got = get(server, "/v1/models", *headers, host="localhost" if headers else host)
        assert got[0] < 500
        assert got[0] in (200, 400, 403)
    assert not [line for line in server.lines[before:] if "Traceback" in line]


WRONG_KEYS = [
    "Authorization: Bearer ",
    "Authorization: Bearer",
    f"Authorization: {KEY}",
    f"Authorization: Basic {KEY}",
    f"Authorization: Bearer {KEY[:-1]}",
    f"Authorization: Bearer {KEY}x",
    f"Authorization: Bearer {KEY.upper()}",
    f"Authorization: Bearer {KEY}\xe9",
    "Authorization: Bearer \xff\x00".replace("\x00", ""),
    f"Authorization: Bearer {'x' * 9000}",
    f"X-Api-Key: {KEY}",
    f"Cookie: Authorization=Bearer {KEY}",
    "Accept: */*",
]


@pytest.mark.parametrize("header", WRONG_KEYS)
def test_wrong_keys(header, locked):
    for path in ("/v1/models", "/models", "/metrics", "/v1/models/fake", "/nothing"):
        status, headers, body = get(locked, path, header)
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert KEY.encode() not in body
    body = json.dumps(COMPLETION).encode()
    assert post(locked, "/v1/completions", body, header)[0] == 401
    assert not [line for line in locked.lines if "correct" in line]


def test_the_key_opens(locked):
    for scheme in ("Bearer", "bearer"):
        assert get(locked, "/v1/models", f"Authorization: {scheme} {KEY}")[0] == 200
    assert get(locked, "/v1/models", f"Authorization: Bearer {KEY}", host="any.example")[0] == 200
    for path in ("/", "/health", "/page/page.js"):  # the page asks for the key itself
        assert get(locked, path)[0] == 200
    for path in ("/page/../v1/models", "//v1/models", "/health/../v1/models", "/v1/models/"):
        assert get(locked, path)[0] in (401, 404)


def test_what_is_too_large(server):
    """Bodies by their length and without one, compressed ones, heads, and depth."""
    large = json.dumps(COMPLETION | {"prompt": "x" * 30_000}).encode()
    assert post(server, "/v1/completions", large)[0] == 413
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(large), large) for _ in range(2)) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    assert exchange(server, head + b"Connection: close\r\n\r\n" + chunks)[0] == 413
    bomb = zlib.compress(b" " * 10**7)
    assert post(server, "/v1/completions", bomb, "Content-Encoding: deflate")[0] in (400, 413, 415)
    assert get(server, "/health", f"X-Long: {'x' * 200_000}")[0] in (RESET, 400, 431)
    assert get(server, f"/{'x' * 200_000}")[0] in (RESET, 400, 414, 431)
    many = [f"X-{number}: {'x' * 100}" for number in range(2000)]
    assert get(server, "/health", *many)[0] in (RESET, 400, 431)
    deep = b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}"
    assert post(server, "/v1/completions", deep)[0] == 400
    assert get(server, "/health")[0] == 200


def test_what_is_no_request(server):
    """Broken HTTP, lengths that contradict each other, and methods that nothing has."""
    two = b"Content-Length: 3\r\nContent-Length: 4\r\n"
    both = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for sent in (
        *(
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
            b"GET\r\n\r\n",
        ),
        *(head + two + b"\r\nabcd", head + b"Content-Length: -1\r\n\r\n"),
        *(head + b"Content-Length: 1e3\r\n\r\n", head + b"Transfer-Encoding: gzip\r\n\r\n"),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\nY\x00: c\r\n\r\n",
    ):
        assert 400 <= exchange(server, sent)[0] <= 501
    smuggled = exchange(server, head + both + b"\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n")
    assert smuggled[0] == 400 and b"megatron" not in smuggled[2]
    kept = head.replace(b"Connection: close\r\n", b"") + both
    answer = exchange(server, kept + b"\r\n0\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answer[0] == 400 and b"HTTP/1.1" not in answer[2]
    for method in ("TRACE", "CONNECT", "PATCH", "DELETE", "PROPFIND"):
        assert get(server, "/v1/completions", method=method)[0] in (400, 404, 405)


def test_the_log_has_one_line_for_a_request(server):
    """A path writes no lines of its own, nor commands of a terminal."""
    before = len(server.lines)
    for path in ("/a%0aGET%20/fake%20200", "/a%1b[2J", "/a%e2%80%ae", "/a%0d%0aX"):
        get(server, path)
    end = time.monotonic() + 2
    while len(server.lines) < before + 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(server.lines) == before + 4
    assert all(re.fullmatch(r"[ -~]+", line) for line in server.lines[before:])
