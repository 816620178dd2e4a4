"""Indexed datasets at URLs: the same tokens as from local files, fetched once, errors that name the
URL. The stores are fsspec's memory:// and a web server on this machine."""

import logging
import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.pipeline import check_vocabulary, open_indexed
from megatron.features.remote_data import dataset as remote
from megatron.features.remote_data import hosts as remote_hosts
from megatron.features.remote_data.dataset import RemoteDataset

LENGTHS = [3, 0, 40, 7, 1, 90, 12, 5]


def write(prefix: Path, dtype: str = "uint16", last: int = 9) -> Path:
    tokens = np.random.default_rng(1).integers(300, size=sum(LENGTHS))
    tokens[-1] = last
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_documents(tokens, LENGTHS, [1] * len(LENGTHS))
    return prefix


def upload(prefix: Path, url: str) -> str:
    for ending in ("bin", "idx"):
        with fsspec.open(f"{url}.{ending}", "wb") as file:
            file.write(Path(f"{prefix}.{ending}").read_bytes())
    return url


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CHUNK_BYTES", 64)
    monkeypatch.setattr(remote_hosts, "PROTOCOLS", (*remote_hosts.PROTOCOLS, "memory"))


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The same dataset as a local prefix and as a URL."""
    prefix = write(tmp_path / "x")
    yield prefix, upload(prefix, f"memory://{tmp_path.name}/x")
    fsspec.filesystem("memory").store.clear()


class Handler(BaseHTTPRequestHandler):
    """Files by path, whole or in ranges."""

    files: dict[str, bytes] = {}
    ranges = True
    asked: list[str] = []

    def answer(self, body: bool) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        if "secret" in self.path:
            return self.send_error(403)
        if self.path not in self.files:
            return self.send_error(404)
        content = self.files[self.path]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = content
        if wanted and self.ranges:
            part = content[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206 if part is not content else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", str(hash(content)))
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if part is not content:
            self.send_header(
                "Content-Range",
                f"bytes {wanted[1]}-{wanted[2]}/{len(content)}",  # type: ignore[index]
            )
        self.end_headers()
        if body:
            self.wfile.write(part)

    def do_GET(self) -> None:
        self.answer(True)

    def do_HEAD(self) -> None:
        self.answer(False)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str, type[Handler]]]:
    pytest.importorskip("aiohttp")
    prefix = write(tmp_path / "x")
    files = {f"/d/x.{e}": Path(f"{prefix}.{e}").read_bytes() for e in ("bin", "idx")}
    handler = type("Files", (Handler,), {"files": files, "asked": []})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield prefix, f"http://127.0.0.1:{httpd.server_port}/d/x", handler
    httpd.shutdown()
    httpd.server_close()


def same(dataset: IndexedDataset, prefix: Path) -> bool:
    local = IndexedDataset(prefix)
    assert len(dataset) == len(local) and dataset.dtype == local.dtype
    assert dataset.num_tokens == local.num_tokens
    assert dataset.lengths_digest == local.lengths_digest
    assert dataset.get(5, 10, 60).tolist() == local.get(5, 10, 60).tolist()
    blocks = [block.tolist() for _, block in dataset.token_blocks(50)]
    assert blocks == [block.tolist() for _, block in local.token_blocks(50)]
    return all(np.array_equal(dataset[i], local[i]) for i in range(-len(local), len(local)))


def test_against_the_local_files(stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    dataset = open_indexed(url, str(tmp_path / "cache"))
    assert isinstance(dataset, RemoteDataset) and same(dataset, prefix)
    assert isinstance(open_indexed(str(prefix)), IndexedDataset)
    for local in ("/a/b", "a:b"):
        with pytest.raises(FileNotFoundError, match=f"{local}.idx does not exist"):
            open_indexed(local)
    with pytest.raises(ValueError, match="read-only"):
        dataset[2][0] = 1
    assert not list((tmp_path / "cache").rglob("*partial*"))


def test_samples_against_those_of_the_local_files(stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    both = []
    for documents in (IndexedDataset(prefix), RemoteDataset(url, tmp_path / "cache")):
        both.append(GPTRecipe(8, 1).build(documents, range(8), 50, "train", IndexCache(None)))
    assert all(np.array_equal(both[0][i], both[1][i]) for i in range(len(both[0])))
    assert both[1].origin(0)[0].source == url


def test_only_chunks_that_are_needed_are_fetched_and_only_once(
    stored: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, url = stored
    caplog.set_level(logging.INFO)
    dataset = RemoteDataset(url, tmp_path / "cache")
    assert dataset[0].tolist() == IndexedDataset(prefix)[0].tolist()
    assert dataset[2].tolist() == IndexedDataset(prefix)[2].tolist()
    fetched = [record.getMessage() for record in caplog.records]
    assert [f"{url}.bin" in message for message in fetched] == [False, True, True]
    caplog.clear()
    again = RemoteDataset(url, tmp_path / "cache")
    assert again[2].tolist() == dataset[2].tolist()
    assert not caplog.records


def test_a_file_that_was_replaced_is_fetched_again(
    stored: tuple[Path, str], tmp_path: Path
) -> None:
    prefix, url = stored
    assert same(RemoteDataset(url, tmp_path / "cache"), prefix)
    upload(write(prefix, last=11), url)
    assert same(RemoteDataset(url, tmp_path / "cache"), prefix)


def test_a_file_that_is_replaced_while_it_is_read(stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    dataset = RemoteDataset(url, tmp_path / "cache")
    upload(write(prefix, last=11), url)  # of the same size
    with pytest.raises(OSError, match=rf"{url}\.bin was replaced while it was read"):
        dataset[0]
    assert same(RemoteDataset(url, tmp_path / "cache"), prefix)


def test_pickles_as_its_url(stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    dataset = RemoteDataset(url, tmp_path / "cache")
    dataset.limit_ids(10)
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 1000
    with pytest.raises(ValueError, match=r"bin: bytes 0 on contain the token id"):
        copy[0]


def test_ids_are_checked_as_they_are_read(stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    upload(write(prefix, last=500), url)
    dataset = RemoteDataset(url, tmp_path / "cache")
    check_vocabulary(dataset, 400, IndexCache(None))
    assert dataset[0].tolist() == IndexedDataset(prefix)[0].tolist()
    with pytest.raises(ValueError, match=rf"{url}\.bin.*the token id 500.*400 ids"):
        dataset[7]


def test_a_web_server(server: tuple[Path, str, type[Handler]], tmp_path: Path) -> None:
    prefix, url, handler = server
    assert same(RemoteDataset(url, tmp_path / "cache"), prefix)
    handler.asked.clear()
    assert same(RemoteDataset(url, tmp_path / "cache"), prefix)
    assert {request.split()[0] for request in handler.asked} == {"HEAD"}


def _read_all(dataset: RemoteDataset, prefix: Path) -> None:
    assert same(dataset, prefix)


def test_several_processes_share_a_cache(
    server: tuple[Path, str, type[Handler]], tmp_path: Path
) -> None:
    """Forked after the connection was made, as a loader's workers are."""
    prefix, url, _ = server
    dataset = RemoteDataset(url, tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_read_all, args=(dataset, prefix)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert not list((tmp_path / "cache").rglob("*partial*"))


def test_a_web_server_without_ranges(
    server: tuple[Path, str, type[Handler]], tmp_path: Path
) -> None:
    _, url, handler = server
    handler.ranges = False
    with pytest.raises(OSError, match=rf"{url}\.\w+ .*answers with .*does not support ranges"):
        RemoteDataset(url, tmp_path / "cache")[2]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere/x", r"memory://nowhere/x\.idx is not found"),
        ("nonsense://a/x", r"nonsense://a/x\.idx: data can be read from files"),
        (
            "http://127.0.0.1:1/x",
            r"http://127\.0\.0\.1:1/x\.idx (cannot be reached|is not found).*",
        ),
    ],
)
def test_missing_files(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        RemoteDataset(url, tmp_path / "cache")


def test_errors_of_a_web_server(server: tuple[Path, str, type[Handler]], tmp_path: Path) -> None:
    _, url, handler = server
    handler.files.pop("/d/x.bin")
    with pytest.raises(FileNotFoundError, match=rf"{url}\.bin is not found"):
        RemoteDataset(url, tmp_path / "cache")
    with pytest.raises(OSError, match=r"secret\.idx is not found \(403"):
        RemoteDataset(url.replace("/d/x", "/secret"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ImportError("Install s3fs to access S3"), ValueError, "install s3fs to read s3:// paths"),
        (PermissionError("Access Denied"), PermissionError, "AWS_ACCESS_KEY_ID"),
        (type("NoCredentialsError", (Exception,), {})("none found"), OSError, "AWS_ACCESS_KEY_ID"),
        (TimeoutError("timed out"), OSError, "cannot be reached: TimeoutError: timed out"),
    ],
)
def test_errors_of_an_object_store(
    error: Exception, kind: type, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(kind, match=message) as caught:
        RemoteDataset("s3://bucket/x", tmp_path / "cache")
    assert "s3://bucket/x.idx" in str(caught.value)


@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_damaged_remote_files(ending: str, stored: tuple[Path, str], tmp_path: Path) -> None:
    prefix, url = stored
    os.truncate(f"{prefix}.{ending}", Path(f"{prefix}.{ending}").stat().st_size - 2)
    upload(prefix, url)
    with pytest.raises(ValueError, match=rf"{url}\.{ending} has \d+ bytes"):
        RemoteDataset(url, tmp_path / "cache")


def test_a_damaged_cache(stored: tuple[Path, str], tmp_path: Path) -> None:
    _, url = stored
    assert RemoteDataset(url, tmp_path / "cache")[2] is not None
    for file in (tmp_path / "cache").rglob("0-64"):
        os.truncate(file, 10)
        with pytest.raises(ValueError, match=f"{file}, the local copy of .* delete it"):
            RemoteDataset(url, tmp_path / "cache")[2]


def test_a_cache_that_cannot_be_written(stored: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        RemoteDataset(stored[1], tmp_path / "file" / "cache")
