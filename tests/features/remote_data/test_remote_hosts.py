"""URLs in files of others: no protocol that runs code or reads local files, no way to a metadata
service or from outside into this network, no endless answer. Servers are on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from megatron.data.pipeline import open_indexed
from megatron.features.remote_data import dataset as remote
from megatron.features.remote_data import hosts as remote_hosts
from megatron.features.remote_data.hosts import PROTOCOLS, check_url


@pytest.mark.parametrize(
    "url",
    [
        "reference://a::/dir/refs", "reference://a/x", "file:///etc/passwd", "local:///etc/passwd",
        "zip://a.bin::http://example.com/x.zip", "filecache::https://example.com/x",
        "simplecache::s3://bucket/x", "https://example.com/a::file:///etc/passwd", "github://o:r@/x",
        "hf://datasets/a/b", "ftp://example.com/x", "sftp://example.com/x", "ssh://example.com/x",
        "smb://host/x", "dir://x::/y", "data://x", "jupyter://x", "git://x", "hdfs://h/x",
        "memory://x", "nonsense://x", "HTTP://example.com/x", " http://example.com/x", "://x",
        "tar://x::s3://b/y", "dask://x", "arrow_hdfs://x", "async_wrapper://x", "s3+x://b/c",
    ],
)  # fmt: skip
def test_other_protocols(url, tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("the URL was opened")

    monkeypatch.setattr(fsspec.core, "url_to_fs", forbidden)
    with pytest.raises(ValueError, match="data can be read from files and from the URLs of") as at:
        open_indexed(url, str(tmp_path / "cache"))
    assert str(at.value).startswith(url) and "\n" not in str(at.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "169.254.0.1", "[fe80::1]", "metadata.google.internal", "metadata",
        "METADATA.google.internal.", "100.100.100.200", "2852039166", "0xa9fea9fe", "169.16689662",
        "0251.0376.0251.0376", "[0:0:0:0:0:ffff:169.254.169.254]", "user:pass@169.254.169.254",
        "169.254.169.254:80", "168.63.129.16", "metadata.goog", "[fd20:ce:0:0:0:0:0:254]",
    ],
)  # fmt: skip
def test_metadata_services(host):
    for protocol in ("http", "https"):
        with pytest.raises(ValueError, match="is the metadata service|data can be read from files"):
            check_url(f"{protocol}://{host}/latest/x")


@pytest.mark.parametrize(
    "host",
    [
        "\u2460\u2465\u2468.\u2461\u2464\u2463.\u2460\u2465\u2468.\u2461\u2464\u2463",
        "169\u3002254\u3002169\u3002254", "metadata\u3002google\u3002internal",
        "\uff4detadata.google.internal", "%31%36%39.254.169.254",
    ],
)  # fmt: skip
def test_letters_that_a_client_turns_into_others(host):
    """The client of web servers makes 169.254.169.254 of the first two."""
    with pytest.raises(ValueError, match="names a host with other characters"):
        check_url(f"http://{host}/latest/x")


def test_what_is_documented_is_accepted():
    for protocol in PROTOCOLS:
        check_url(f"{protocol}://bucket.example/corpus_text_document")
    hosts = "10.1.2.3", "192.168.0.9:8000", "localhost", "127.0.0.1:80", "files.example"
    for host in (*hosts, "my_node-1:80", "xn--bcher-kva.example", "user:p%40ss@files.example"):
        check_url(f"http://{host}/corpus_text_document")
    check_url("abfs://container@account.dfs.core.windows.net/corpus_text_document")


class Handler(BaseHTTPRequestHandler):
    """Redirects to ``location``, if any; else answers with 10 bytes, or without an end."""

    location = None
    headers_sent: dict = {}
    asked: list = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        if self.location is not None:
            self.send_response(302)
            self.send_header("Location", self.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.headers_sent.get("Content-Length") == "10":
            self.wfile.write(bytes(10 if self.command == "GET" else 0))
            return
        try:
            while self.command == "GET":
                self.wfile.write(bytes(1 << 16))
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    started = []

    def make(**attributes):
        handler = type("Server", (Handler,), {"asked": [], **attributes})
        httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        started.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}/x", handler

    yield make
    for httpd in started:
        httpd.shutdown()
        httpd.server_close()


@pytest.mark.parametrize(
    "target",
    ["http://169.254.169.254/latest/x", "http://[fe80::1]/x", "//metadata.google.internal/x",
     "http://0xa9fea9fe/x", "http://%E2%91%A0%E2%91%A5%E2%91%A8.254.169.254/x",
     "http://169%E3%80%82254.169.254/x", "http://files.example\\@169.254.169.254/x"],
)  # fmt: skip
def test_a_redirect_to_a_metadata_service(target, server, tmp_path):
    url, _ = server(location=target)
    with pytest.raises(OSError, match="leads to |names a host with other") as caught:
        open_indexed(url, str(tmp_path))
    assert "Cannot connect" not in str(caught.value)


def test_a_redirect_from_outside_into_the_network(server, tmp_path, monkeypatch):
    inside, reached = server(headers_sent={"Content-Length": "10"})
    outside, _ = server(location=inside)
    public = remote_hosts._is_public
    # The first server counts as one on the internet.
    monkeypatch.setattr(remote_hosts, "_addresses", lambda host: [])
    with pytest.raises(OSError, match="leads to .*is in this machine's network"):
        open_indexed(outside, str(tmp_path))
    assert not reached.asked
    monkeypatch.undo()
    assert not public(remote_hosts._address("127.0.0.1"))
    with pytest.raises(ValueError, match="10 bytes"):  # inside the network it is followed
        open_indexed(outside, str(tmp_path))
    assert reached.asked


def test_a_name_that_resolves_to_a_metadata_service(server, tmp_path, monkeypatch):
    """The address is looked at when it is connected to, so that a second answer of the name's
    server does not help."""
    import aiohttp

    async def resolve(self, host, port=0, family=0):
        entry = {"hostname": host, "host": "169.254.169.254", "port": port}
        return [entry | {"family": 2, "proto": 6, "flags": 0}]

    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", resolve)
    with pytest.raises(OSError, match="is the metadata service"):
        open_indexed("http://files.example/x", str(tmp_path))


@pytest.mark.parametrize("headers", [{}, {"Content-Length": str(1 << 40)}])
def test_endless_answers(headers, server, tmp_path, monkeypatch):
    url, _ = server(headers_sent=headers)
    monkeypatch.setattr(remote.RemoteFile, "_info", lambda self: {"size": 100, "ETag": "1"})
    with pytest.raises(OSError, match="answers with .* bytes where at most .* were asked for"):
        open_indexed(url, str(tmp_path))
