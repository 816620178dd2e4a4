"""Worker processes of the trainer that start at once: forked from the stem instead of an
interpreter that imports everything again."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from stem import HELPERS, shared

from megatron.util import workers


class ForkedWorker(workers.Worker):
    """A worker whose process is a fork; all else is that of the trainer."""

    def __init__(self, prepare: Callable[[], Callable[[Any], Any]]) -> None:
        pickled = pickle.dumps(prepare)  # which no stem may import
        path = [str(HELPERS), *filter(None, sys.path)]
        self._process: Any = shared().start(
            "forked_workers", "serve", pickled, path, os.getcwd(), environment=os.environ
        )
        self.pipe = self._process.pipe


def serve(pipe: Connection, pickled: bytes, path: list[str], folder: str) -> None:
    """Be the worker: see :class:`megatron.util.workers.Worker`."""
    sys.path[:] = path
    os.chdir(folder)
    workers._serve(pipe, pickle.loads(pickled))
