"""Indexed datasets in object stores and on web servers, read through fsspec with a local cache.

The .idx is fetched as a whole when the dataset is opened, and the .bin in chunks of 32 MiB when
they are first needed. Cache files are renamed into place when complete, so that all processes on a
node can share one folder without locks. If two processes need a chunk at the same time, both may
fetch it, and the second rename changes nothing. Each version of a remote file has a folder named by
a hash of its URL, its size and its ETag, checksum or date, so that a replaced file is fetched
again.

fsspec's "blockcache" is not used: each process keeps its own list of blocks and saves it on
closing, so four processes fetched every byte four times, and again after a restart.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from megatron.data.indexed import IndexedDataset, IndexFile, map_file
from megatron.features.remote_data.hosts import WEB, check_url, web_client
from megatron.util.digests import digest
from megatron.util.files import replacing, sync

logger = logging.getLogger(__name__)

DEFAULT_CACHE = "object-storage-cache"
CHUNK_BYTES = 32 << 20
_OPEN_CHUNKS = 256
# Keys under which file systems report a value that changes with a file's content.
_VERSION_KEYS = (
    "ETag etag md5Hash md5 crc32c generation version_id LastModified last_modified mtime updated "
    "modified created"
).split()
_INSTALL = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
}
_CREDENTIALS = (
    "give credentials as the store's own tools read them (s3: AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or ~/.aws; gs: GOOGLE_APPLICATION_CREDENTIALS)"
)


class RemoteDataset(IndexedDataset):
    """Indexed dataset at a URL. Item i is sequence i.

    Token ids are checked chunk by chunk as they are fetched (see `limit_ids`), because checking all
    in advance would fetch the whole file. Raises FileNotFoundError if one of the two files is
    missing; ValueError if the files are damaged, the URL's protocol or host is refused, or a
    package that reads such URLs is missing; and OSError if the files cannot be reached or the cache
    cannot be written.
    """

    def __init__(self, prefix: str, cache_path: str | os.PathLike[str]) -> None:
        self.prefix = prefix
        self._cache_path = os.fspath(cache_path)
        idx = RemoteFile(f"{prefix}.idx", Path(cache_path))
        self._bin = RemoteFile(f"{prefix}.bin", Path(cache_path))
        index = IndexFile(idx.part(0, idx.size), idx.url)
        index.check_bin_size(self._bin.url, self._bin.size)
        self._chunks = ChunkedTokens(self._bin, index.dtype)
        self._read_from(index, self._chunks)

    def limit_ids(self, vocab_size: int) -> bool:
        """Set the vocabulary size. From now on, reading a chunk with an id that is not below it
        raises ValueError."""
        self._chunks.limit_ids(vocab_size)
        return True

    def bin_identity(self) -> dict[str, int | str]:
        return {"url": self._bin.url, "bytes": self._bin.size, "version": self._bin.version}

    def content(self) -> dict[str, int | str]:
        """Implement `IndexedDataset.content`. The version that the server reports is used instead
        of a digest of samples."""
        return {
            "bytes": self._bin.size,
            "documents": self.num_documents,
            "lengths": self.lengths_digest,
            "version": self._bin.version,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.prefix, self._cache_path, self._chunks.vocab_size)


def _reopen(prefix: str, cache_path: str, vocab_size: int | None) -> RemoteDataset:
    dataset = RemoteDataset(prefix, cache_path)
    if vocab_size is not None:
        dataset.limit_ids(vocab_size)
    return dataset


class ChunkedTokens:
    """Tokens in a remote .bin. Slicing fetches only the chunks that overlap the slice."""

    def __init__(self, file: RemoteFile, dtype: np.dtype) -> None:
        self.vocab_size: int | None = None
        self._file = file
        self._dtype = dtype
        self._per_chunk = CHUNK_BYTES // dtype.itemsize
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return self._file.size // self._dtype.itemsize

    def __getitem__(self, part: slice, /) -> np.ndarray:
        start, stop = part.start, part.stop
        pieces = []
        while start < stop:
            number, offset = divmod(start, self._per_chunk)
            piece = self._chunk(number)[offset : offset + stop - start]
            pieces.append(piece)
            start += len(piece)
        if len(pieces) == 1:
            return pieces[0]
        tokens = np.concatenate([np.empty(0, self._dtype), *pieces])
        tokens.flags.writeable = False
        return tokens

    def limit_ids(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._open.clear()

    def _chunk(self, number: int) -> np.ndarray:
        if number not in self._open:
            start = number * CHUNK_BYTES
            size = min(CHUNK_BYTES, self._file.size - start)
            tokens = map_file(self._file.part(start, size), self._dtype)
            self._check_ids(tokens, start)
            self._open[number] = tokens
            if len(self._open) > _OPEN_CHUNKS:  # each cached chunk keeps a file open
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _check_ids(self, tokens: np.ndarray, start: int) -> None:
        if self.vocab_size is None or not len(tokens):
            return
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{self._file.url}: bytes {start} on contain the token id {token}, but the "
                    f"vocabulary has {self.vocab_size} ids (0 to {self.vocab_size - 1}). The file "
                    "was preprocessed with another tokenizer"
                )


class RemoteFile:
    """One version of a remote file, with local copies of its byte ranges. Raises the errors of
    `RemoteDataset`."""

    def __init__(self, url: str, cache: Path) -> None:
        check_url(url)
        self.url = url
        self._connect()
        info = self._info()
        if info.get("type") == "directory" or info.get("size") is None:
            raise OSError(f"{url} is not a file, or its server does not tell its size")
        self.size: int = int(info["size"])
        self.version = _version(info)
        self._folder = cache / digest(f"{url}\n{self.size}\n{self.version}")

    def part(self, start: int, size: int) -> Path:
        """Return the path of a local copy of ``size`` bytes from ``start``. Fetch it if needed."""
        path = self._folder / f"{start}-{start + size}"
        try:
            length = path.stat().st_size
        except FileNotFoundError:
            self._fetch(path, start, size)
            return path
        if length != size:
            raise ValueError(
                f"{path}, the local copy of {self.url}, has {length} bytes, not {size}: it is "
                "damaged; delete it, and it is fetched again"
            )
        return path

    def _connect(self) -> None:
        # Connections do not survive a fork, such as that of a loader worker.
        self._process = os.getpid()
        options: dict[str, Any] = {}
        with self._errors("cannot be reached"):
            if self.url.startswith(tuple(f"{protocol}://" for protocol in WEB)):
                options["get_client"] = web_client(self.url, CHUNK_BYTES)
                options["skip_instance_cache"] = True
            self._system, self._path = fsspec.core.url_to_fs(self.url, **options)

    def _info(self) -> dict[str, Any]:
        with self._errors("cannot be reached"):
            self._system.invalidate_cache(self._path)
            info: dict[str, Any] = self._system.info(self._path)
            return info

    def _fetch(self, path: Path, start: int, size: int) -> None:
        logger.info("fetching bytes %d to %d of %s", start, start + size, self.url)
        new = not self._folder.is_dir()
        self._folder.mkdir(parents=True, exist_ok=True)
        if new:  # written only for users who inspect the cache
            (self._folder / "url").write_text(f"{self.url}\n{self.version}\n")
        with replacing(path) as part, part.open("wb") as file:
            for at in range(start, start + size, CHUNK_BYTES):
                file.write(self._bytes(at, min(at + CHUNK_BYTES, start + size)))
            sync(file)
            if _version(self._info()) != self.version:
                raise OSError(f"{self.url} was replaced while it was read: start again")

    def _bytes(self, start: int, end: int) -> bytes:
        if os.getpid() != self._process:
            self._connect()
        with self._errors(f"cannot be read from byte {start} on"):
            content: bytes = self._system.cat_file(self._path, start=start, end=end)
        if len(content) != end - start:
            raise OSError(
                f"{self.url} gave {len(content)} bytes of {end - start} from byte {start} on: it "
                "was replaced by a shorter file, or its server does not support ranges"
            )
        return content

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        protocol = self.url.partition("://")[0]
        try:
            yield
        except FileNotFoundError as error:
            # fsspec raises this for every failure of a web server. The cause has the details.
            cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise FileNotFoundError(
                f"{self.url} is not found{cause}; a data path is the prefix of a .bin and an .idx "
                "file"
            ) from error
        except ImportError as error:
            package = _INSTALL.get(protocol, f"what fsspec needs for {protocol}://")
            raise ValueError(
                f"{self.url}: install {package} to read {protocol}:// paths ({error})"
            ) from error
        except PermissionError as error:
            raise PermissionError(f"{self.url} cannot be read: {error}; {_CREDENTIALS}") from error
        except Exception as error:  # each library has exception classes of its own
            name = type(error).__name__
            hint = f"; {_CREDENTIALS}" if "redential" in f"{name} {error}" else ""
            raise OSError(f"{self.url} {what}: {name}: {error}{hint}") from error


def _version(info: dict[str, Any]) -> str:
    return json.dumps({key: str(info[key]) for key in _VERSION_KEYS if key in info})
