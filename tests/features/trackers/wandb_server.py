"""A server for ``wandb sync`` on this machine: as much of W&B's as it needs to tell what it has
read in the files of a run. It keeps no artifacts."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class SyncedRun:
    """What was told of one run: its last description, and the rows of its history by their
    offsets."""

    described: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)


@contextlib.contextmanager
def wandb_server() -> Iterator[tuple[str, dict[str, SyncedRun]]]:
    """Its address, and the runs by their ids, which fill as they are told."""
    runs: dict[str, SyncedRun] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            told = json.loads(body)
            with lock:
                answer = self._query(told) if self.path == "/graphql" else self._stream(told)
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _query(self, told: dict[str, Any]) -> dict[str, Any]:
            given = told.get("variables", {})
            if told.get("operationName") != "UpsertBucket":
                return {"data": None, "errors": [{"message": "not on this server"}]}
            runs.setdefault(given["name"], SyncedRun()).described |= {
                name: value for name, value in given.items() if value is not None
            }
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given["name"], "displayName": "", "config": "{}"}
            bucket |= {"project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}

        def _stream(self, told: dict[str, Any]) -> dict[str, Any]:
            history = told.get("files", {}).get("wandb-history.jsonl")
            if history is not None:
                run = runs.setdefault(self.path.split("/")[-2], SyncedRun())
                for number, line in enumerate(history["content"], history["offset"]):
                    run.rows[number] = json.loads(line)
            return {}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", runs
        finally:
            server.shutdown()
